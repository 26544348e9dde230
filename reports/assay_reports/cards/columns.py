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
from assay_reports.text import percent_interval, size

MISSING = "not measured"
MOST_SPEEDS = 8
"""Operating points that a card shows; `speed.json` and the report have the others."""


class Column(NamedTuple):
    """One checkpoint. row: None if it was not measured. num_bytes: of its weights, if something is known of them."""

    title: str
    row: Row | None
    sha256: str | None
    num_bytes: int | None


class Line(NamedTuple):
    title: str
    cells: tuple[str, ...]


def find_columns(report: Report | None, label: str, sha256: str, num_bytes: int) -> tuple[Column, ...]:
    """Unquantized, FP8 (or what else is the reference), then `label` itself. Those without a record are there, and empty."""
    rows = report.rows if report is not None else ()
    own = next((row for row in rows if row.label == label), None)
    source = next((row for row in rows if row.label in UNQUANTIZED_LABELS), None)
    reference = next((row for row in rows if row.kind == "reference"), None)
    eights = [row for row in rows if row.label.startswith("fp8") and row.kind == "candidate"]
    columns: list[Column] = []
    if label not in UNQUANTIZED_LABELS:
        columns.append(_column("BF16", source))
    if reference is not None and reference is not source and reference is not own:
        columns.append(_column("FP8", reference))
    elif not label.startswith("fp8"):
        columns.append(_column("FP8", next(iter(eights), None)))
    here = _column(label, own)
    bytes_here = own.checkpoint_bytes if own is not None and own.checkpoint_bytes is not None else num_bytes
    return (*columns, here._replace(title=label, sha256=sha256, num_bytes=bytes_here))


def _column(title: str, row: Row | None) -> Column:
    if row is None:
        return Column(title, None, None, None)
    name = f"{row.label} (reference)" if row.kind == "reference" else row.label
    return Column(name, row, row.checkpoint_sha256, row.checkpoint_bytes)


def table(columns: tuple[Column, ...], report: Report | None, speed: SpeedRecord | None) -> tuple[Line, ...]:
    """Size, memory, speed and verdict, then a line for each task that this checkpoint was asked.

    A score that its gate calls NOT MEASURED is none here either.
    """
    measured = [_measured(column, speed) for column in columns]
    lines = [Line("size of the weights", tuple(MISSING if one.num_bytes is None else size(one.num_bytes) for one in columns))]
    lines.append(Line("memory while served", tuple(map(_memory, measured))))
    lines += _speeds(measured) or [Line("speed", tuple(MISSING for _ in columns))]
    lines.append(Line("verdict", tuple(_verdict(column) for column in columns)))
    own = columns[-1].row
    if own is not None and report is not None:
        for task in own.tasks:
            cells = tuple(_score(column, task.task, report) for column in columns)
            lines.append(Line(f"{task.title or task.task}, correct", cells))
    return tuple(lines)


def _verdict(column: Column) -> str:
    if column.row is None:
        return MISSING
    return column.row.status or "reference"


def _score(column: Column, name: str, report: Report) -> str:
    tasks = measured_tasks(column.row, report) if column.row is not None else []
    return next((percent_interval(task.accuracy) for task in tasks if task.task == name), MISSING)


# ------------------------------------------------------------------------------------------------ memory and speed
def _measured(column: Column, speed: SpeedRecord | None) -> list[SpeedRow]:
    """Of these very bytes; an imported row names no bytes, a predicted one measured nothing."""
    if speed is None or column.sha256 is None:
        return []
    return [
        row for row in speed.rows if row.origin == "measured" and row.checkpoint_sha256 == column.sha256 and row.is_comparable
    ]


def _memory(rows: list[SpeedRow]) -> str:
    most = max(
        ((repeat.memory_bytes, row) for row in rows for repeat in row.repeats if repeat.memory_bytes is not None),
        key=lambda found: found[0],
        default=None,
    )
    if most is None:
        return MISSING
    num_bytes, row = most
    return f"{size(num_bytes)}{' a GPU' if row.num_gpus else ''} ({row.hardware})"


def _speeds(measured: list[list[SpeedRow]]) -> list[Line]:
    """A line for each operating point of the last column."""
    lines = []
    for own in sorted(measured[-1], key=lambda row: (row.hardware, row.prompts, row.concurrency, row.speculation or 0)):
        alike = [next((row for row in rows if row.like == own.like), None) for rows in measured]
        drafts = f"{own.speculation} drafted a step" if own.speculation else "no speculation"
        at_once = "1 request at a time" if own.concurrency == 1 else f"{own.concurrency} requests at once"
        title = f"output, {at_once} ({own.prompts} prompts, {drafts}, {own.hardware}{_engine(own)})"
        lines.append(Line(title, tuple(MISSING if row is None else _speed(row) for row in alike)))
    return lines[:MOST_SPEEDS]


def _engine(row: SpeedRow) -> str:
    return f", {row.engine}" if row.engine else ""


def _speed(row: SpeedRow) -> str:
    """The geometric means over the repeats, as `assay speed` prints them."""
    cell = f"{row.tokens_s:,.1f} tokens/s"
    if (ttft := mean_of(row, ttft_s)) is not None:
        cell += f", first after {ttft.value:.3g} s"
    if (tpot := mean_of(row, tpot_s)) is not None:
        cell += f", then one every {1000 * tpot.value:.3g} ms"
    return cell
