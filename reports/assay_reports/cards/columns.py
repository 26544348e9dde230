"""The table at the top of a card: unquantized, FP8 and this checkpoint side by side; size, memory, speed, scores.

A cell is a number of a record or "not measured". Speeds stand in one line only if they are alike (`SpeedRow.like`), and only
if they were measured here, on the very bytes of that checkpoint, with native kernels.
"""

from __future__ import annotations

from typing import NamedTuple

from assay.records.speed import SpeedRecord, SpeedRow
from assay_evaluate.speed.ratio import mean_of, tpot_s, ttft_s
from assay_reports.cards.metadata import measured_tasks
from assay_reports.run import UNQUANTIZED_LABELS
from assay_reports.schema import Report, Row
from assay_reports.sentences import card as english
from assay_reports.text import percent_interval, size

MOST_SPEEDS = 8
"""Operating points that a card shows; `speed.json` and the report have the others."""


class Column(NamedTuple):
    """One checkpoint. row: None if it was not measured. num_bytes: of its weights, if something is known of them."""

    title: str
    row: Row | None = None
    sha256: str | None = None
    num_bytes: int | None = None


class Line(NamedTuple):
    title: str
    cells: tuple[str, ...]


def find_columns(report: Report | None, label: str, sha256: str, num_bytes: int) -> tuple[Column, ...]:
    """Unquantized, FP8 (or what else is the reference), then `label` itself. Those without a record are there, and empty."""
    rows = report.rows if report is not None else ()
    own = next((row for row in rows if row.label == label), None)
    source = next((row for row in rows if row.label in UNQUANTIZED_LABELS), None)
    reference = next((row for row in rows if row.kind == "reference"), None)
    columns: list[Column] = []
    if label not in UNQUANTIZED_LABELS:
        columns.append(_column(english.UNQUANTIZED, source))
    if reference is not None and reference is not source and reference is not own:
        columns.append(_column(english.FP8, reference))
    elif not label.startswith("fp8"):
        fp8 = (row for row in rows if row.label.startswith("fp8") and row.kind == "candidate")
        columns.append(_column(english.FP8, next(fp8, None)))
    own_bytes = own.checkpoint_bytes if own is not None and own.checkpoint_bytes is not None else num_bytes
    return (*columns, Column(label, own, sha256, own_bytes))


def _column(title: str, row: Row | None) -> Column:
    if row is None:
        return Column(title)
    name = english.REFERENCE_TITLE.format(label=row.label) if row.kind == "reference" else row.label
    return Column(name, row, row.checkpoint_sha256, row.checkpoint_bytes)


def table(columns: tuple[Column, ...], report: Report | None, speed: SpeedRecord | None) -> tuple[Line, ...]:
    """Size, memory, speed and verdict, then a line for each task that this checkpoint was asked.

    A score that its gate calls NOT MEASURED is none here either.
    """
    measured = [
        [] if speed is None or column.sha256 is None else [
            row for row in speed.rows
            if row.origin == "measured" and row.checkpoint_sha256 == column.sha256 and row.is_comparable
        ]
        for column in columns
    ]  # fmt: skip
    missing = english.MISSING
    lines = [
        Line(english.SIZE, tuple(missing if c.num_bytes is None else size(c.num_bytes) for c in columns)),
        Line(english.MEMORY, tuple(map(_memory, measured))),
        *(_speeds(measured) or [Line(english.SPEED, (missing,) * len(columns))]),
        Line(english.VERDICT, tuple(missing if c.row is None else c.row.status or english.IS_REFERENCE for c in columns)),
    ]
    if (own := columns[-1].row) is not None and report is not None:
        scores = [
            {} if c.row is None else {task.task: percent_interval(task.accuracy) for task in measured_tasks(c.row, report)}
            for c in columns
        ]
        lines += [
            Line(english.SCORE.format(task=task.title or task.task), tuple(of.get(task.task, missing) for of in scores))
            for task in own.tasks
        ]
    return tuple(lines)


def _memory(rows: list[SpeedRow]) -> str:
    taken = [(repeat.memory_bytes, row) for row in rows for repeat in row.repeats if repeat.memory_bytes is not None]
    if not taken:
        return english.MISSING
    num_bytes, row = max(taken, key=lambda entry: entry[0])
    each = english.EACH_GPU if row.num_gpus else ""
    return english.MEMORY_CELL.format(size=size(num_bytes), each=each, hardware=row.hardware)


def _speeds(measured: list[list[SpeedRow]]) -> list[Line]:
    """A line for each operating point of the last column: geometric means over the repeats, as `assay speed` prints them."""
    lines = []
    for own in sorted(measured[-1], key=lambda row: (row.hardware, row.prompts, row.concurrency, row.speculation or 0)):
        alike = [next((row for row in rows if row.like == own.like), None) for rows in measured]
        at_once = english.ONE_AT_ONCE if own.concurrency == 1 else english.SEVERAL_AT_ONCE.format(number=own.concurrency)
        title = english.OUTPUT.format(
            at_once=at_once,
            prompts=own.prompts,
            drafts=english.DRAFTS.format(number=own.speculation) if own.speculation else english.NO_DRAFTS,
            hardware=own.hardware,
            engine=f", {own.engine}" if own.engine else "",
        )
        lines.append(Line(title, tuple(english.MISSING if row is None else _speed(row) for row in alike)))
    return lines[:MOST_SPEEDS]


def _speed(row: SpeedRow) -> str:
    cell = english.SPEED_CELL.format(speed=row.tokens_s)
    if (ttft := mean_of(row, ttft_s)) is not None:
        cell += english.FIRST_TOKEN.format(seconds=ttft.value)
    if (tpot := mean_of(row, tpot_s)) is not None:
        cell += english.OTHER_TOKENS.format(milliseconds=1000 * tpot.value)
    return cell
