"""The answer about one checkpoint: inspection, screening, what would tell more."""

from __future__ import annotations

from rich.console import Console

from assay.records.link import LinkAnswer
from assay_cli.shown.inspection import print_inspection
from assay_cli.shown.screening import print_screening
from assay_cli.terminal import escape


def print_link(answer: LinkAnswer, out: Console) -> None:
    """Facts and findings, then the distance from the base, then next steps."""
    print_inspection(answer.inspection, out)
    out.print()
    if answer.screening is not None:
        print_screening(answer.screening, out)
    else:
        out.print(escape(f"not compared with its base: {answer.not_screened}"))
    for step in answer.steps:
        out.print(escape(f"next: {step.sentence}{f': `{step.command}`' if step.command else ''}"))
