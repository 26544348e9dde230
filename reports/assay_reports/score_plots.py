"""The plots of the scores section: losses against their margins, and what the replies cost in tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from assay.records.base import Interval
from assay_reports.plot_layout import Figure, axis, base_layout
from assay_reports.schema import Report, TaskNumbers

LANE = 18
"""Pixels between two checkpoints of one task."""
MARGIN_COLOUR = "#b00020"


class Mark(NamedTuple):
    """A value and the ends of its interval, in the unit of the axis."""

    value: float
    low: float
    high: float


def losses(report: Report, colour: dict[str, str]) -> Figure | None:
    """Change in points with its interval, a line for every task and candidate; the margin of the task's gate as a stroke.

    A task whose gate says NOT MEASURED (cut off too often, nothing to lose) is left out: its bar would look like a result.
    """
    unmeasured = {(verdict.candidate, verdict.gate) for verdict in report.verdicts if verdict.status == "NOT MEASURED"}

    def mark_of(label: str, task: TaskNumbers) -> Mark | None:
        return None if (label, f"score {task.task}") in unmeasured else changed_points(task)

    return _lanes(report, colour, mark_of, "change in points (− is a loss)", "points", has_margins=True)


def reply_lengths(report: Report, colour: dict[str, str]) -> Figure | None:
    """How much longer replies are than the reference's, in percent of its mean length, with intervals."""
    title = "longer than the reference's replies, % of their tokens"
    return _lanes(report, colour, lambda _, task: extra_length(task), title, "%", has_margins=False)


def changed_points(task: TaskNumbers) -> Mark | None:
    """Candidate minus reference."""
    if task.drop is None:
        return None
    return Mark(-100 * task.drop.value, -100 * task.drop.high, -100 * task.drop.low)


def extra_length(task: TaskNumbers) -> Mark | None:
    if task.extra_output_tokens is None or not task.reference_mean_output_tokens:
        return None
    return _scaled(task.extra_output_tokens, 100 / task.reference_mean_output_tokens)


def _scaled(interval: Interval, factor: float) -> Mark:
    return Mark(factor * interval.value, factor * interval.low, factor * interval.high)


def _lanes(
    report: Report, colour: dict[str, str],
    mark_of: Callable[[str, TaskNumbers], Mark | None], title: str, unit: str, *, has_margins: bool,
) -> Figure | None:  # fmt: skip
    """Tasks from top to bottom, in each a lane for every candidate. None: nothing to draw. mark_of: of (label, task)."""
    rows = [row for row in report.rows if row.kind == "candidate"]
    tasks = list(dict.fromkeys(t.task for row in rows for t in row.tasks if mark_of(row.label, t) is not None))
    if not tasks:
        return None
    places = {task: float(len(tasks) - 1 - i) for i, task in enumerate(tasks)}
    gap = 0.8 / len(rows)
    data = []
    for lane, row in enumerate(rows):
        found = [(t.task, mark) for t in row.tasks if (mark := mark_of(row.label, t)) is not None]
        below = (lane - (len(rows) - 1) / 2) * gap
        data.append(_trace(row.label, colour[row.label], found, [places[name] - below for name, _ in found], unit))
    margins = {t.task: t.margin for row in rows for t in row.tasks if t.margin is not None and t.task in places}
    if has_margins and margins:
        data.append(_strokes(margins, [places[name] for name in margins], LANE * len(rows)))
    layout = base_layout(height=130 + (LANE * len(rows) + 12) * len(tasks))
    layout["xaxis"] = axis(title, zeroline=True)
    layout["yaxis"] = axis(
        None, tickmode="array", tickvals=list(places.values()), ticktext=tasks, range=[-0.6, len(tasks) - 0.4], showgrid=False
    )
    return {"data": data, "layout": layout}


def _trace(label: str, colour: str, found: Sequence[tuple[str, Mark]], heights: list[float], unit: str) -> Figure:
    marks = [mark for _, mark in found]
    return {
        "type": "scatter", "mode": "markers", "name": label, "x": [mark.value for mark in marks], "y": heights,
        "customdata": [name for name, _ in found], "marker": {"color": colour, "size": 8},
        "error_x": {
            "type": "data", "symmetric": False, "thickness": 1.5, "width": 4,
            "array": [mark.high - mark.value for mark in marks], "arrayminus": [mark.value - mark.low for mark in marks],
        },
        "hovertemplate": f"{label}, %{{customdata}}: %{{x:.1f}} {unit}<extra></extra>",
    }  # fmt: skip


def _strokes(margins: dict[str, float], heights: list[float], pixels: int) -> Figure:
    return {
        "type": "scatter", "mode": "markers", "name": "margin", "x": [-100 * margin for margin in margins.values()],
        "y": heights, "customdata": list(margins), "hovertemplate": "%{customdata}: %{x:g} points allowed<extra></extra>",
        "marker": {"symbol": "line-ns-open", "size": pixels / 1.4, "color": MARGIN_COLOUR, "line": {"width": 2}},
    }  # fmt: skip
