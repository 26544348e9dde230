"""Sentences of several entries."""

from collections.abc import Iterable

from assay.records.measurement import Measurement
from assay_reports.text import and_list


def with_entries(template: str, entries: Iterable[str]) -> str | None:
    """None: there is no entry."""
    joined = "; ".join(entries)
    return template.format(entries=joined) if joined else None


def with_labels(template: str, measurements: Iterable[Measurement]) -> str | None:
    """None: there is no measurement."""
    labels = [m.label for m in measurements]
    return template.format(labels=and_list(labels)) if labels else None
