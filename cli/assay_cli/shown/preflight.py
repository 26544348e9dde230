"""What a preflight found, a line for each check."""

from __future__ import annotations

from collections import Counter

from rich.console import Console

from assay.records.preflight.report import PreflightReport
from assay_cli.terminal import escape

MARKS = {"PASS": "[green]PASS   [/]", "FAIL": "[red]FAIL   [/]", "UNKNOWN": "[yellow]UNKNOWN[/]"}


def show(report: PreflightReport, out: Console, *, whole: bool = True) -> None:
    """A line for each check, what to do below it, and a summary. whole: what passed as well."""
    words_of = [(check.check, check.subject or "") for check in report.checks]
    widths = [max(map(len, words), default=0) for words in zip(*words_of, strict=True)] or [0, 0]
    for check in report.checks:
        if check.outcome == "PASS" and not whole:
            continue
        words = f"{check.check:{widths[0]}} {check.subject or '':{widths[1]}}"
        out.print(f"{MARKS[check.outcome]} {escape(words)} {escape(check.detail)}")
        if check.remedy is not None:
            out.print(f"{' ' * (9 + sum(widths))} -> {escape(check.remedy)}")
    out.print(escape(summary(report)))


def skipped(how: str) -> str:
    """What is said when a run stops at its first step. how: what skips it."""
    return f"nothing was written: the preflight failed; mend what it names, or skip it with {how}"


def summary(report: PreflightReport) -> str:
    """`preflight of glm-5 on 8xh200, suite full: 2 FAIL, 1 UNKNOWN, 14 PASS in 34 s`."""
    counts = Counter(check.outcome for check in report.checks)
    counts_text = ", ".join(f"{counts[each]} {each}" for each in ("FAIL", "UNKNOWN", "PASS") if counts[each])
    return f"preflight of {report.model} on {report.profile}, suite {report.suite}: {counts_text} in {report.seconds:.0f} s"
