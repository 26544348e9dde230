"""What stands at the end of `upgrade-check`: engines in between, speeds, and the line for a changelog."""

from __future__ import annotations

from rich.console import Console

from assay.records.upgrade import UpgradeCheck
from assay_cli.shown.verdicts import COLOURS
from assay_cli.terminal import escape, print_rows


def print_upgrade(check: UpgradeCheck, out: Console) -> None:
    from assay_reports.upgrade import changelog_line, shown

    rows = [
        (
            "not tried" if step.status is None else f"[bold {COLOURS[step.status]}]{step.status}[/]",
            escape(step.engine.label),
            escape(step.engine.where),
            escape(step.reason),
        )
        for step in check.steps
    ]
    if rows:
        print_rows(("verdict", "engine", "where", "why"), rows, out)
    elif note := shown(check).steps:
        out.print(escape(note))
    for speed in check.speeds:
        drafts = f", {speed.speculation} drafted a step" if speed.speculation else ""
        around = "" if speed.interval is None else f" ({speed.interval.low:.2f} to {speed.interval.high:.2f})"
        out.print(
            escape(
                f"{speed.prompts}, {speed.concurrency} in flight{drafts}: {speed.before_tokens_s:.1f} to "
                f"{speed.after_tokens_s:.1f} tokens/s, {speed.ratio:.2f} times{around}"
            )
        )
    if check.speeds_not_measured is not None:
        out.print(escape(f"speed: {check.speeds_not_measured}"))
    out.print(escape(changelog_line(check)))
