"""Pictures of courses: drift against the position in the text, and losses over length and depth as a heat map."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from assay.quantities import change, lost_or_gained, points, tokens_short
from assay.records.long_context import CellLoss, LongContext
from assay.records.measurement import Divergence
from assay_reports.page.charts import colours
from assay_reports.page.findings import candidates, name_of, unjudged
from assay_reports.page.svg import Picture, Scale, axis_below, axis_left, decades, legend, shape_of
from assay_reports.schema import Report

SMALLEST_NATS = 1e-9
"""What a logarithmic axis begins at: log-probabilities in single precision tell nothing below."""
LEAST_RANGE = 0.10
"""Loss at which colours of a heat map end at least, so that noise does not look like damage."""
SHADES = 4
"""Of losses, and as many of gains."""


@dataclass(frozen=True)
class Course:
    """Mean KL, lower bound, at the middle of a span of positions, with the ends of its interval if it has one."""

    position: float
    value: float
    low: float | None
    high: float | None
    said: str


def drift(report: Report) -> Markup | None:
    """Mean KL, lower bound, against position, both logarithmic. Solid: sampled texts; dotted: held-out; dashed: noise floor."""
    lines: list[tuple[str, str, list[Course]]] = []
    for row in report.rows:
        for texts, course in courses(row.divergence):
            if course:
                floor = row.kind == "noise floor"
                kind = "dash" if floor else ("dot" if texts == "held_out" else "")
                lines.append((row.label + {"held_out": ", held-out text"}.get(texts, ""), kind, course))
    if not lines:
        return None
    values = [v for _, _, course in lines for one in course for v in (one.value, one.high or one.value)]
    low, high = min(one.value for _, _, course in lines for one in course) / 1.6, max(values) * 1.3
    places = [one.position for _, _, course in lines for one in course]
    width, height = 760, 380
    to = Picture(
        width,
        height,
        f"Mean KL, lower bound, from {report.reference} against the position in the text: "
        + "; ".join(name for name, _, _ in lines),
    )
    across, up = Scale(min(places) / 1.3, max(places) * 1.3, 64, width - 14, True), Scale(low, high, height - 48, 34, True)
    axis_left(to, up, 64, _ticks(low, high), lambda v: f"{v:g}", "mean KL, lower bound, nats a token", width - 14)
    axis_below(
        to, across, height - 48, decades(min(places) / 1.3, max(places) * 1.3, 2), _position, "position in the text, tokens", 34
    )
    shade = colours(report)
    for name, kind, course in lines:
        css = shade[name.split(", held-out")[0]]
        to.path([(across(one.position), up(one.value)) for one in course], f"path {css} {kind}")
        for one in course:
            x = across(one.position)
            if one.low is not None and one.high is not None:
                to.line(x, up(max(one.low, low)), x, up(min(one.high, high)), f"bar thin {css}")
            to.mark(x, up(one.value), css, shape_of(css), f"{name}, tokens {one.said}", 3.5)
    shown = list(dict.fromkeys(name.split(", held-out")[0] for name, _, _ in lines))
    return legend([(name, shade[name], shape_of(shade[name])) for name in shown]) + to.drawn()


def courses(divergence: Divergence | None) -> list[tuple[str, list[Course]]]:
    """By kind of text; of records from before drift was, by position in the reply."""
    if divergence is None:
        return []
    found: list[tuple[str, list[Course]]] = []
    for one in divergence.drift:
        if one.texts not in ("all", "held_out"):
            continue
        spans = [span for span in one.curve if span.kl_mean > SMALLEST_NATS]
        ends = [(s.kl_mean_interval.low, s.kl_mean_interval.high) if s.kl_mean_interval else (None, None) for s in spans]
        course = [
            Course(
                _middle(s.first, s.last),
                s.kl_mean,
                e[0],
                e[1],
                f"{s.first} to {s.last}: {s.kl_mean:.3g} nats, {s.num_documents} texts",
            )
            for s, e in zip(spans, ends, strict=True)
        ]
        found.append((one.texts, course))
    if not any(course for _, course in found):
        return [("all", [
            Course(_middle(b.first, b.last), b.kl_mean, None, None, f"{b.first} to {b.last}: {b.kl_mean:.3g} nats")
            for b in divergence.by_position if b.kl_mean > SMALLEST_NATS
        ])]  # fmt: skip
    return found


def _middle(first: int, last: int) -> float:
    """As a logarithmic axis has it; the first span begins at 0, which such an axis does not have."""
    return math.sqrt(max(first, last / 4, 1) * (last + 1))


def _ticks(low: float, high: float) -> list[float]:
    whole = decades(low, high)
    if len(whole) >= 3:
        return whole
    found = [m * 10.0**e for e in range(-12, 4) for m in (1, 2, 5)]
    return [tick for tick in found if low <= tick <= high]


def _position(value: float) -> str:
    return f"{value / 1024:g}K" if value >= 1024 else f"{value:g}"


# ------------------------------------------------------------------------------------------------ heat maps
@dataclass(frozen=True)
class Heat:
    """One heat map, and what it is of."""

    candidate: str
    title: str
    picture: Markup


def heat_maps(report: Report) -> list[Heat]:
    """By length and depth, and by length and part, of every candidate and task that has a result; the worst cell first.

    Maps in which no cell differs from 0 are left out.
    """
    labels = {row.label for row in candidates(report)}
    titles = {task.task: name_of(task) for row in report.rows for task in row.tasks}
    found: list[tuple[LongContext, str, Sequence[CellLoss]]] = []
    for one in report.long_context:
        if one.candidate not in labels or unjudged(report, one.candidate, one.task):
            continue
        title = titles.get(one.task, one.task)
        found += [(one, f"{title} by {what}", cells) for what, cells in (("depth", one.by_depth), ("part", one.by_subtask))]
    differing = [entry for entry in found if any(cell.drop.value for cell in entry[2])]
    differing.sort(key=lambda entry: -max(cell.drop.value for cell in entry[2]))
    most = max((abs(cell.drop.value) for _, _, cells in differing for cell in cells), default=0.0)
    drawn = [(one, title, heat_map(cells, f"{one.candidate}, {title}", most)) for one, title, cells in differing]
    return [Heat(one.candidate, title, picture) for one, title, picture in drawn if picture is not None]


def heat_map(cells: Sequence[CellLoss], title: str, most: float) -> Markup | None:
    """Points lost, in each cell with its number: lengths from left to right. None: a single cell is no map.

    most: loss at which the colours end, one for all maps of a page, so that a colour means the same in each.
    """
    lengths = sorted({cell.length_tokens for cell in cells})
    rows = list(dict.fromkeys(_row(cell) for cell in cells))
    if len(lengths) * len(rows) < 2:
        return None
    left, side, tall = 150, 74, 30
    most = max(LEAST_RANGE, most)
    to = Picture(
        left + side * len(lengths) + 8, 30 + tall * len(rows), f"Points lost, {title}: " + "; ".join(_hint(c) for c in cells)
    )
    for number, length in enumerate(lengths):
        to.text(left + side * (number + 0.5), 20, tokens_short(length), "tick", "middle")
    for number, row in enumerate(rows):
        to.text(left - 8, 30 + tall * (number + 0.5) + 5, row, "tick", "end")
    for cell in cells:
        x, y = left + side * lengths.index(cell.length_tokens), 30 + tall * rows.index(_row(cell))
        shade = _shade(cell.drop.value / most)
        mark = '<rect x="{x}" y="{y}" width="{w}" height="{h}" class="{css}"><title>{t}</title></rect>'
        to.add(mark, x=x + 1, y=y + 1, w=side - 2, h=tall - 2, css=shade, t=_hint(cell))
        to.text(x + side / 2, y + tall / 2 + 5, points(cell.drop.value), f"cell {shade}", "middle")
    return to.drawn()


def _shade(share: float) -> str:
    """`heat0`, `lost1` to `lost4`, `gained1` to `gained4`."""
    step = min(SHADES, math.ceil(abs(share) * SHADES - 0.5))
    return "heat0" if step <= 0 else f"{'lost' if share > 0 else 'gained'}{step}"


def _row(cell: CellLoss) -> str:
    return (
        cell.subtask
        if cell.depth is None and cell.subtask is not None
        else ("all" if cell.depth is None else f"depth {cell.depth:g}")
    )


def _hint(cell: CellLoss) -> str:
    where = f"{_row(cell)}, {cell.length_tokens:,} tokens"
    return f"{where}: {change(cell.drop.value)} ({lost_or_gained(cell.drop.low, cell.drop.high)}), {cell.num_pairs} items"
