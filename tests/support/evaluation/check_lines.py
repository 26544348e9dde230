"""Checks of a preflight as lines of text, for tests that state whole lines."""

from __future__ import annotations

from collections.abc import Iterable

from assay.records.preflight.report import Check


def check_lines(checks: Iterable[Check]) -> list[str]:
    """`FAIL environment ninja: what was found -> what to do`."""
    return [
        f"{check.outcome} {check.check} {check.subject}: {check.detail}" + (f" -> {check.remedy}" if check.remedy else "")
        for check in checks
    ]
