"""The pictures of a page, from `Report` alone: scores, sizes, drift, long context, bytes, speed. None: there is no data.

Colours and shapes belong to checkpoints and mean the same in every picture; the palette is Okabe & Ito's, darker or lighter
where the theme needs it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from assay.quantities import change, lost_or_gained, points, signed, size, tokens_short
from assay.records.base import Interval
from assay.records.long_context import CellLoss
from assay.records.measurement import Divergence
from assay.records.speed import SpeedRow
from assay.records.verdict import Verdict
from assay_reports.page.findings import ladders
from assay_reports.page.report_rows import candidates, is_unjudged, name_of, scored, title_of
from assay_reports.page.svg import (
    PHONE,
    SERIES,
    Box,
    Picture,
    Scale,
    axis_below,
    axis_left,
    decades,
    legend,
    on_screen_and_phone,
    place_names,
    shape_of,
    steps,
)
from assay_reports.schema import PlanNumbers, Report, Row
from assay_reports.sentences import page as english
from assay_reports.text import SMALLEST_NATS, and_list, count_of

LANE = 20
FAR = 30
"""From a mark to a name that a stroke leads to: others might be taken for another mark's."""
ROLES = (
    "routed_expert", "shared_expert", "attention", "indexer", "dense_mlp", "mtp", "embedding", "lm_head", "router", "norm",
)  # fmt: skip
"""Roles with a shade of their own, in the order of the style sheet; others share the last."""
LEAST_RANGE = 0.10
"""Loss at which colours of a heat map end at least, so that noise does not look like damage."""
SHADES = 4
"""Of losses, and as many of gains."""


def colours(report: Report) -> dict[str, str]:
    """Label -> class: grey for the reference and its repeat."""
    series = {row.label: f"s{i % SERIES}" for i, row in enumerate(candidates(report))}
    return {row.label: "sref" for row in report.rows if row.kind != "candidate"} | series


# ------------------------------------------------------------------------------------------------ quality against size
WITHOUT_LOSS = {"top1_agreement": 1.0, "perplexity_ratio": 1.0}
"""Figures of a gate that are not 0 where nothing is lost."""


@dataclass(frozen=True)
class Decider:
    """The gate that decides a candidate's verdict. use: what was seen of what it allows, 1 at its limit."""

    verdict: Verdict
    use: Interval


def deciding_gate(report: Report, row: Row) -> Decider | None:
    """Of the required gates with the candidate's own verdict the one nearest to its limit, or furthest beyond it, by the end
    of its interval. None: not judged, or what decides has no limit and figure, such as probes or what was not measured."""
    deciders = []
    decided = "PASS" if row.status == "not failed" else row.status
    for verdict in report.verdicts:
        observed, limit = verdict.observed, verdict.limit
        is_deciding = verdict.candidate == row.label and verdict.status == decided and verdict.has_say
        if not is_deciding or observed is None or limit is None or verdict.gate == "probes":
            continue
        zero = next((value for name, value in WITHOUT_LOSS.items() if name in verdict.gate), 0.0)
        if limit != zero:
            low, value, high = ((end - zero) / (limit - zero) for end in (observed.low, observed.value, observed.high))
            use = observed.model_copy(update={"low": min(low, high), "value": value, "high": max(low, high)})
            deciders.append(Decider(verdict, use))
    if row.status == "NOT MEASURED":
        return None
    return max(deciders, key=lambda decider: decider.use.high, default=None)


def title_of_gate(verdict: Verdict) -> str:
    return verdict.title or verdict.gate.removeprefix("score ")


@dataclass(frozen=True)
class Point:
    """A checkpoint in the picture of quality and size. use: None for a reference, which has lost nothing by definition."""

    name: str
    css: str
    num_bytes: int
    use: Interval | None
    hint: str


def points_of(report: Report) -> list[Point]:
    """The reference, and every candidate whose size and deciding gate are known."""
    shades, marks = colours(report), []
    for row in candidates(report):
        if (decider := deciding_gate(report, row)) is not None and row.checkpoint_bytes:
            gate = title_of_gate(decider.verdict)
            clause = decider.verdict.clause or decider.verdict.detail
            hint = english.DECIDED_BY.format(status=row.status, gate=gate, clause=clause)
            marks.append(Point(row.label, shades[row.label], row.checkpoint_bytes, decider.use, hint))
    reference = next(row for row in report.rows if row.kind == "reference")
    if not marks or not reference.checkpoint_bytes:
        return marks
    return [Point(report.reference, "sref", reference.checkpoint_bytes, None, english.COMPARED_WITH), *marks]


def quality_caption(report: Report) -> str:
    """How to read it: the rule about 100 % only where all marks follow it, and who is not drawn."""
    drawn = {row.label: decider for row in candidates(report) if (decider := deciding_gate(report, row)) is not None}
    is_rule = all((decider.use.high < 1) == (decider.verdict.status == "PASS") for decider in drawn.values())
    missing = [row.label for row in candidates(report) if row.label not in drawn or not row.checkpoint_bytes]
    caption = english.QUALITY_CAPTION + (english.QUALITY_RULE if is_rule else "")
    return caption + (english.NOT_DRAWN.format(labels=and_list(missing)) if missing else "")


def quality_and_size(marks: Sequence[Point]) -> Markup | None:
    """What the deciding gate saw of what it allows, against the size of the checkpoint."""
    uses = [point.use for point in marks if point.use is not None]
    if not uses:
        return None
    largest = max(point.num_bytes for point in marks)
    unit, each = ("GB", 1e9) if largest >= 1e9 else ("MB", 1e6)
    right = 1.1 * largest / each
    top = max(1.25, *(min(use.high, 6.0) for use in uses))
    bottom = min(0.0, *(max(use.low, -1.0) for use in uses))
    hints = [f"{point.name}, {size(point.num_bytes)}: {point.hint}" for point in marks]
    label, height = english.QUALITY.format(points=". ".join(hints)), 330

    def draw(width: int, css: str) -> Markup:
        picture = Picture(width, height, label, css)
        across, up = Scale(0, right, 54, width - 12), Scale(bottom, top, height - 48, 40)
        picture.rect(54, up(top), width - 66, up(1) - up(top), "beyond")
        axis_left(picture, up, 54, steps(bottom, top, 5), lambda v: f"{100 * v:.0f} %", english.QUALITY_AXIS, width - 12)
        size_axis = english.SIZE_AXIS.format(unit=unit)
        axis_below(picture, across, height - 48, steps(0, right), lambda v: f"{v:g}", size_axis, 40)
        picture.line(54, up(1), width - 12, up(1), "limit")
        picture.text(width - 16, up(1) - 5, english.ALLOWED, "limit-name", "end")
        places: list[tuple[float, float, str]] = []
        taken: list[Box] = [(54, up(1) - 1, width - 12, up(1) + 1), (width - 80, up(1) - 18, width - 12, up(1))]
        for point, hint in zip(marks, hints, strict=True):
            x, use = across(point.num_bytes / each), point.use
            y = up(0) if use is None else up(_within(use.value, bottom, top))
            places.append((x, y, point.name))
            if use is not None:  # what lies beyond the picture stands on its edge
                low, high = up(_within(use.low, bottom, top)), up(_within(use.high, bottom, top))
                picture.line(x, low, x, high, f"bar {point.css}")
                taken.append((x - 2, high, x + 2, low))
            picture.mark(x, y, point.css, 3 if use is None else shape_of(point.css), hint, 5 if use is None else 6)
        names = place_names(places, (54, 40, width - 12, height - 48), taken)
        for (x, y, anchor, name), place, point in zip(names, places, marks, strict=True):
            if abs(y - place[1]) > FAR:
                picture.line(*place[:2], x, y - 4, f"thin {point.css}")
            picture.text(x, y, name, "name", anchor)
        return picture.drawn()

    return on_screen_and_phone(draw, 560)


def _within(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


# ------------------------------------------------------------------------------------------------ changes
def changes(report: Report) -> Markup | None:
    """Change of every task on every candidate, with its interval, beside the loss that its gate allows."""
    rows, shades = candidates(report), colours(report)
    lanes = {(row.label, task.task): (task, task.drop) for row in rows for task in scored(report, row) if task.drop is not None}
    tasks = list(dict.fromkeys(task.task for row in rows for task in row.tasks if (row.label, task.task) in lanes))
    if not tasks:
        return None
    titles = {task.task: name_of(task) for task, _ in lanes.values()}
    margins = {task.task: task.margin for task, _ in lanes.values() if task.margin}
    low = min(-1.0, *(-100 * drop.high for _, drop in lanes.values()), *(-110 * margin for margin in margins.values()))
    high = max(1.0, *(-100 * drop.low for _, drop in lanes.values()))
    hints = {
        (label, name): english.CHANGE.format(
            label=label, task=name_of(task), change=change(drop.value), ends=lost_or_gained(drop.low, drop.high)
        )
        for (label, name), (task, drop) in lanes.items()
    }
    said = english.CHANGES.format(changes=". ".join(hints.values()))

    def draw(width: int, css: str) -> Markup:
        """Names of tasks stand beside their lanes; on a phone over them, which takes room `above`."""
        left, right, most_ticks, above = (20, 20, 5, 20) if css == PHONE else (190, 14, 8, 0)
        block = above + LANE * len(rows) + 14
        height = 30 + block * len(tasks) + 50
        picture = Picture(width, height, said, css)
        across, base = Scale(low * 1.04, high * 1.04, left, width - right), height - 46
        ticks = steps(low, high, most_ticks)
        axis_below(picture, across, base, ticks, lambda v: signed(v).removesuffix(".0"), english.CHANGE_AXIS, 24)
        picture.line(across(0), 18, across(0), base, "zero")
        for number, name in enumerate(tasks):
            top = 26 + number * block + above
            if above:
                picture.text(0, top - 6, titles[name], "tick strong")
            else:
                picture.text(left - 10, top + block / 2, titles[name], "tick strong", "end")
            if margin := margins.get(name):
                picture.line(across(-100 * margin), top, across(-100 * margin), top + block - above - 8, "limit")
            for lane, row in enumerate(rows):
                if (row.label, name) in lanes:
                    y, colour, drop = top + 8 + lane * LANE, shades[row.label], lanes[row.label, name][1]
                    picture.line(across(-100 * drop.high), y, across(-100 * drop.low), y, f"bar {colour}")
                    picture.mark(across(-100 * drop.value), y, colour, shape_of(colour), hints[row.label, name], 4.5)
        return picture.drawn()

    colours_named = legend([(row.label, shades[row.label], shape_of(shades[row.label])) for row in rows])
    return colours_named + on_screen_and_phone(draw)


# ------------------------------------------------------------------------------------------------ bytes
def bytes_per_role(report: Report) -> Markup | None:
    """Stacked bars: the source, and every checkpoint that was planned."""
    if not report.plans:
        return None
    bars = [(english.SOURCE, _bytes_of_roles(report.plans[0], "bytes_in"))]
    bars += [(plan.precision, _bytes_of_roles(plan, "bytes_out")) for plan in report.plans]
    totals = [sum(sums.values()) for _, sums in bars]
    order = sorted(bars[0][1], key=lambda role: -bars[0][1][role])
    sizes = ". ".join(f"{name}: {size(total)}" for (name, _), total in zip(bars, totals, strict=True))
    label = english.BYTES.format(sizes=sizes)

    def draw(width: int, css: str) -> Markup:
        picture = Picture(width, 10 + 48 * len(bars), label, css)
        across = Scale(0, max(totals), 0, width - 80)
        for number, ((name, sums), total) in enumerate(zip(bars, totals, strict=True)):
            y, begin = 20 + 48 * number, 0.0
            picture.text(0, y - 6, name, "tick strong")
            for role in order:
                if num_bytes := sums.get(role, 0):
                    x, right = across(begin), across(begin + num_bytes)
                    hint = f"{name}, {role}: {size(num_bytes)}"
                    picture.rect(x, y, max(right - x, 0.3), 24, f"role {_shade_of_role(role)}", hint)
                    begin += num_bytes
            picture.text(across(begin) + 8, y + 17, size(total), "tick")
        return picture.drawn()

    roles = legend([(role.replace("_", " "), f"role {_shade_of_role(role)}", 1) for role in order])
    return roles + on_screen_and_phone(draw)


def _bytes_of_roles(plan: PlanNumbers, side: str) -> dict[str, int]:
    sums: dict[str, int] = {}
    for role in plan.roles:
        sums[role.role] = sums.get(role.role, 0) + int(getattr(role, side))
    return sums


def _shade_of_role(role: str) -> str:
    return f"r{ROLES.index(role)}" if role in ROLES else f"r{len(ROLES) - 1}"


# ------------------------------------------------------------------------------------------------ speed
@dataclass(frozen=True)
class Ladder:
    """One picture of speed: rows that may stand in it together."""

    title: str
    picture: Markup
    rows: tuple[SpeedRow, ...]


def speed_ladders(report: Report) -> list[Ladder]:
    """A picture for each set of rows that are alike; unlike ones never share an axis."""
    if report.speed is None:
        return []
    drawn = []
    for rows in ladders(report.speed.rows).values():
        first = rows[0]
        tokens = count_of(first.speculation or 0, "token")
        drafting = english.DRAFTED.format(tokens=tokens) if first.speculation else english.NO_DRAFTS
        title = english.LADDER.format(
            hardware=first.hardware, prompts=first.prompts, drafting=drafting, origin=first.origin, source=first.source
        )
        ordered = tuple(sorted(rows, key=lambda row: (row.checkpoint, row.concurrency)))
        drawn.append(Ladder(title, _ladder(report, rows, title), ordered))
    return drawn


def _ladder(report: Report, rows: Sequence[SpeedRow], title: str) -> Markup:
    names = list(dict.fromkeys(row.checkpoint for row in rows))
    known = colours(report)
    streams = sorted({row.concurrency for row in rows})
    most = 1.08 * max(repeat.output_tokens_s for row in rows for repeat in row.repeats)
    label, height = english.SPEED_PICTURE.format(title=title), 300
    shades = {name: known.get(name, f"s{number % SERIES}") for number, name in enumerate(names)}

    def draw(width: int, css: str) -> Markup:
        picture = Picture(width, height, label, css)
        across = Scale(max(streams[0] / 1.2, 0.5), streams[-1] * 1.2, 60, width - 12, is_log=True)
        up = Scale(0, most, height - 48, 34)
        axis_left(picture, up, 60, steps(0, most, 5), lambda v: f"{v:,g}", english.SPEED_AXIS, width - 12)
        axis_below(picture, across, height - 48, streams, lambda v: f"{v:g}", english.STREAMS_AXIS, 34)
        for name, shade in shades.items():
            ladder = sorted((row for row in rows if row.checkpoint == name), key=lambda row: row.concurrency)
            places = [(across(row.concurrency), up(row.tokens_s)) for row in ladder]
            picture.path(places, f"path {shade}")
            for row, (x, y) in zip(ladder, places, strict=True):
                speeds = [repeat.output_tokens_s for repeat in row.repeats]
                picture.line(x, up(min(speeds)), x, up(max(speeds)), f"bar {shade}")
                hint = english.SPEED_POINT.format(label=name, streams=row.concurrency, speed=row.tokens_s, repeats=len(speeds))
                picture.mark(x, y, shade, shape_of(shade), hint)
        return picture.drawn()

    return legend([(name, shade, shape_of(shade)) for name, shade in shades.items()]) + on_screen_and_phone(draw, 560)


# ------------------------------------------------------------------------------------------------ drift along the text
@dataclass(frozen=True)
class Span:
    """Mean KL, lower bound, at the middle of a span of positions, with the ends of its interval if it has one."""

    position: float
    value: float
    low: float | None
    high: float | None
    hint: str


def drift(report: Report) -> Markup | None:
    """Drift against the position in the text: sampled text, held-out text (dotted) and the noise floor (dashed)."""
    shades = colours(report)
    lines = [
        (row, english.HELD_OUT.format(label=row.label) if texts == "held_out" else row.label,
         "dash" if row.kind == "noise floor" else ("dot" if texts == "held_out" else ""), course)
        for row in report.rows for texts, course in courses(row.divergence) if course
    ]  # fmt: skip
    if not lines:
        return None
    spans = [span for *_, course in lines for span in course]
    low = min(span.value for span in spans) / 1.6
    high = max(max(span.value, span.high or 0.0) for span in spans) * 1.3
    first, last = min(span.position for span in spans) / 1.3, max(span.position for span in spans) * 1.3
    names, height = "; ".join(name for _, name, _, _ in lines), 380
    said = english.DRIFT.format(reference=report.reference, lines=names)
    ticks = decades(low, high)
    if len(ticks) < 3:
        ticks = [m * 10.0**e for e in range(-12, 4) for m in (1, 2, 5) if low <= m * 10.0**e <= high]

    def draw(width: int, css: str) -> Markup:
        picture = Picture(width, height, said, css)
        across, up = Scale(first, last, 64, width - 14, is_log=True), Scale(low, high, height - 48, 34, is_log=True)
        axis_left(picture, up, 64, ticks, lambda v: f"{v:g}", english.DRIFT_AXIS, width - 14)
        axis_below(
            picture, across, height - 48, decades(first, last, 4 if css == PHONE else 2),
            lambda v: f"{v / 1024:g}K" if v >= 1024 else f"{v:g}", english.POSITION_AXIS, 34,
        )  # fmt: skip
        for row, name, kind, course in lines:
            shade = shades[row.label]
            picture.path([(across(span.position), up(span.value)) for span in course], f"path {shade} {kind}")
            for span in course:
                x = across(span.position)
                if span.low is not None and span.high is not None:
                    picture.line(x, up(max(span.low, low)), x, up(min(span.high, high)), f"bar thin {shade}")
                picture.mark(x, up(span.value), shade, shape_of(shade), f"{name}, tokens {span.hint}", 3.5)
        return picture.drawn()

    labels = dict.fromkeys(row.label for row, *_ in lines)
    return legend([(label, shades[label], shape_of(shades[label])) for label in labels]) + on_screen_and_phone(draw)


def courses(divergence: Divergence | None) -> list[tuple[str, list[Span]]]:
    """By kind of text; of records from before drift was, by position in the reply."""
    if divergence is None:
        return []
    by_texts: list[tuple[str, list[Span]]] = []
    for of_texts in divergence.drift:
        if of_texts.texts in ("all", "held_out"):
            course = []
            for span in of_texts.curve:
                if span.kl_mean > SMALLEST_NATS:
                    hint = english.SPAN.format(first=span.first, last=span.last, kl=span.kl_mean)
                    hint += english.SPAN_TEXTS.format(texts=span.num_documents)
                    interval = span.kl_mean_interval
                    low, high = (interval.low, interval.high) if interval else (None, None)
                    course.append(Span(_middle(span.first, span.last), span.kl_mean, low, high, hint))
            by_texts.append((of_texts.texts, course))
    if any(course for _, course in by_texts):
        return by_texts
    buckets = [bucket for bucket in divergence.by_position if bucket.kl_mean > SMALLEST_NATS]
    return [("all", [
        Span(_middle(bucket.first, bucket.last), bucket.kl_mean, None, None,
             english.SPAN.format(first=bucket.first, last=bucket.last, kl=bucket.kl_mean))
        for bucket in buckets
    ])]  # fmt: skip


def _middle(first: int, last: int) -> float:
    """As a logarithmic axis has it; the first span begins at 0, which such an axis does not have."""
    return math.sqrt(max(first, last / 4, 1) * (last + 1))


# ------------------------------------------------------------------------------------------------ heat maps
@dataclass(frozen=True)
class HeatMap:
    """One heat map, and what it is of."""

    candidate: str
    title: str
    picture: Markup


def heat_maps(report: Report) -> list[HeatMap]:
    """By length and depth, and by length and part, of every candidate and task that has a result; the worst cell first.

    Maps in which no cell differs from 0, and those of a single cell, are left out. A colour means the same in each.
    """
    labels = {row.label for row in candidates(report)}
    maps: list[tuple[str, str, Sequence[CellLoss]]] = []
    for losses in report.long_context:
        if losses.candidate in labels and not is_unjudged(report, losses.candidate, losses.task):
            for template, cells in ((english.BY_DEPTH, losses.by_depth), (english.BY_PART, losses.by_subtask)):
                if any(cell.drop.value for cell in cells):
                    maps.append((losses.candidate, template.format(task=title_of(report, losses.task)), cells))
    maps.sort(key=lambda entry: -max(cell.drop.value for cell in entry[2]))
    most = max((abs(cell.drop.value) for *_, cells in maps for cell in cells), default=0.0)
    drawn = [(label, title, _heat_map(cells, f"{label}, {title}", max(LEAST_RANGE, most))) for label, title, cells in maps]
    return [HeatMap(label, title, picture) for label, title, picture in drawn if picture is not None]


def _heat_map(cells: Sequence[CellLoss], title: str, most: float) -> Markup | None:
    """Points lost, in each cell with its number: lengths from left to right. None: a single cell is no map."""
    lengths = sorted({cell.length_tokens for cell in cells})
    rows = list(dict.fromkeys(_row_name(cell) for cell in cells))
    if len(lengths) * len(rows) < 2:
        return None
    hints = [
        english.HEAT_CELL.format(
            row=_row_name(cell),
            length=cell.length_tokens,
            change=change(cell.drop.value),
            ends=lost_or_gained(cell.drop.low, cell.drop.high),
            items=cell.num_pairs,
        )
        for cell in cells
    ]
    label = english.HEAT_MAP.format(title=title, cells="; ".join(hints))

    def draw(width: int, css: str) -> Markup:
        left, tall = (112, 30) if css == PHONE else (150, 30)
        side = max(44, (width - left - 8) // len(lengths)) if css == PHONE else 74
        picture = Picture(left + side * len(lengths) + 8, 30 + tall * len(rows), label, css)
        for number, length in enumerate(lengths):
            picture.text(left + side * (number + 0.5), 20, tokens_short(length), "tick", "middle")
        for number, row in enumerate(rows):
            picture.text(left - 8, 30 + tall * (number + 0.5) + 5, row, "tick", "end")
        for cell, hint in zip(cells, hints, strict=True):
            x, y = left + side * lengths.index(cell.length_tokens), 30 + tall * rows.index(_row_name(cell))
            step = min(SHADES, math.ceil(abs(cell.drop.value / most) * SHADES - 0.5))
            shade = "heat0" if step <= 0 else f"{'lost' if cell.drop.value > 0 else 'gained'}{step}"
            picture.rect(x + 1, y + 1, side - 2, tall - 2, shade, hint)
            picture.text(x + side / 2, y + tall / 2 + 5, points(cell.drop.value), f"cell {shade}", "middle")
        return picture.drawn()

    return on_screen_and_phone(draw)


def _row_name(cell: CellLoss) -> str:
    if cell.depth is not None:
        return english.DEPTH.format(depth=cell.depth)
    return cell.subtask or english.ALL_DEPTHS
