"""Heat maps of long context: points lost by length and depth, and by length and part of the task."""

from __future__ import annotations

from collections.abc import Sequence

from assay.quantities import change, lost_or_gained, points, tokens_short
from assay.records.long_context import CellLoss, LongContext
from assay_reports.plot_layout import Figure, axis, base_layout

SCALE = [[0.0, "#0072B2"], [0.5, "#f2f2f2"], [1.0, "#D55E00"]]
"""Gains, nothing, losses; safe for colour-blind readers."""
LEAST_RANGE = 10.0
"""Points at which the colours end at least, so that noise does not look like damage."""


def long_context_figures(found: Sequence[LongContext]) -> dict[str, Figure]:
    """Id of the plot's place in the page -> heat map; none for cells that are a single row or column."""
    made: dict[str, Figure | None] = {}
    for number, one in enumerate(found):
        made[f"long-depth-{number}"] = heat_map(one.by_depth, "depth of what is asked for (0: the front)")
        made[f"long-part-{number}"] = heat_map(one.by_subtask, None)
    return {name: figure for name, figure in made.items() if figure is not None}


def heat_map(cells: Sequence[CellLoss], title: str | None) -> Figure | None:
    """Points lost, in each cell with its number: lengths from left to right. Cells that nobody answered are empty."""
    lengths = sorted({cell.length_tokens for cell in cells})
    rows = list(dict.fromkeys(_row(cell) for cell in cells))
    if len(lengths) < 2 or len(rows) < 2:
        return None
    at = {(_row(cell), cell.length_tokens): cell for cell in cells}
    table = [[at.get((row, length)) for length in lengths] for row in rows]
    losses = [[None if cell is None else 100 * cell.drop.value for cell in line] for line in table]
    most = max([LEAST_RANGE, *(abs(value) for line in losses for value in line if value is not None)])
    layout = base_layout(height=120 + 26 * len(rows))
    layout["xaxis"] = axis("length, tokens", type="category")
    layout["yaxis"] = axis(title, type="category", autorange="reversed")
    trace = {
        "type": "heatmap", "x": [tokens_short(length) for length in lengths], "y": rows, "z": losses, "zmin": -most,
        "zmax": most, "colorscale": SCALE, "xgap": 2, "ygap": 2, "colorbar": {"title": {"text": "points<br>lost"}},
        "text": [["" if cell is None else points(cell.drop.value) for cell in line] for line in table],
        "texttemplate": "%{text}", "customdata": [[_hover(cell) for cell in line] for line in table],
        "hovertemplate": "%{y}, %{x}: %{customdata}<extra></extra>", "textfont": {"color": "#222222"},
    }  # fmt: skip
    return {"data": [trace], "layout": layout}


def _row(cell: CellLoss) -> str:
    return cell.subtask if cell.depth is None and cell.subtask is not None else f"{cell.depth:g}"


def _hover(cell: CellLoss | None) -> str:
    if cell is None:
        return ""
    return f"{change(cell.drop.value)} ({lost_or_gained(cell.drop.low, cell.drop.high)}), {cell.num_pairs} items"
