"""Rows, tasks and verdicts of a report, as sentences of a page ask for them."""

from __future__ import annotations

from collections.abc import Sequence

from assay.records.verdict import Verdict
from assay_reports.schema import Report, Row, TaskNumbers
from assay_reports.sentences import page as english
from assay_reports.text import and_list

FEW = 3
"""Names in a heading; of more their number is said."""


def candidates(report: Report) -> list[Row]:
    return [row for row in report.rows if row.kind == "candidate"]


def is_unjudged(report: Report, label: str, task: str) -> bool:
    """Its gate says NOT MEASURED: its numbers are no result."""
    gate = f"score {task}"
    return any(v.status == "NOT MEASURED" and (v.candidate, v.gate) == (label, gate) for v in report.verdicts)


def scored(report: Report, row: Row) -> list[TaskNumbers]:
    """Tasks of a candidate whose change is a result."""
    return [task for task in row.tasks if task.drop is not None and not is_unjudged(report, row.label, task.task)]


def unmeasured_tasks(report: Report) -> list[str]:
    """Names, as sentences call them, of tasks that no candidate has a result of."""
    rows = candidates(report)
    known = {name_of(task) for row in rows for task in scored(report, row)}
    return [name for name in dict.fromkeys(name_of(task) for row in rows for task in row.tasks) if name not in known]


def name_of(task: TaskNumbers) -> str:
    return task.title or task.task


def title_of(report: Report, task: str) -> str:
    return next((name_of(t) for row in report.rows for t in row.tasks if t.task == task), task)


def undecided_verdicts(report: Report) -> list[Verdict]:
    labels = {row.label for row in candidates(report)}
    return [v for v in report.verdicts if v.candidate in labels and v.status == "UNDERPOWERED" and v.has_say]


def shortened(names: Sequence[str]) -> str:
    return and_list(names) if len(names) <= FEW else english.MANY_TASKS.format(number=len(names))
