"""The pictures of scores, sizes and speed, from `Report` alone. A picture without data is None.

Colours and shapes belong to checkpoints and mean the same in every picture; the palette is Okabe & Ito's, darker or lighter
where the theme needs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from assay.quantities import change, lost_or_gained, points_short, signed, size
from assay.records.base import Interval
from assay.records.speed import SpeedRow
from assay_reports.page.findings import candidates, ladders, name_of, scored
from assay_reports.page.svg import SERIES, Box, Picture, Scale, axis_below, axis_left, legend, place_names, shape_of, steps
from assay_reports.schema import Report, Row, TaskNumbers

LANE = 20
FAR = 30
"""From a mark to a name that a stroke leads to: others might be taken for another mark's."""
ROLES = (
    "routed_expert", "shared_expert", "attention", "indexer", "dense_mlp", "mtp", "embedding", "lm_head", "router", "norm",
)  # fmt: skip
"""Roles with a shade of their own, in the order of the style sheet; others share the last."""


def colours(report: Report) -> dict[str, str]:
    """Label -> class: grey for the reference and its repeat."""
    found = {row.label: f"s{i % SERIES}" for i, row in enumerate(candidates(report))}
    return {row.label: "sref" for row in report.rows if row.kind != "candidate"} | found


# ------------------------------------------------------------------------------------------------ quality against size
@dataclass(frozen=True)
class Worst:
    """Of one candidate the task that comes nearest to its margin, or is furthest beyond it, by the end of its interval."""

    row: Row
    task: TaskNumbers
    use: Interval
    """Loss / margin."""


def worst_of(report: Report, row: Row) -> Worst | None:
    used = [(task, _use(task)) for task in scored(report, row) if task.margin]
    known = [(task, use) for task, use in used if use is not None]
    if not known:
        return None
    task, use = max(known, key=lambda one: one[1].high)
    return Worst(row, task, use)


def _use(task: TaskNumbers) -> Interval | None:
    if task.drop is None or not task.margin:
        return None
    drop, margin = task.drop, task.margin
    return drop.model_copy(update={"value": drop.value / margin, "low": drop.low / margin, "high": drop.high / margin})


@dataclass(frozen=True)
class Point:
    """A checkpoint in the picture of quality and size. use: None for a reference, which has lost nothing by definition."""

    name: str
    css: str
    num_bytes: int
    use: Interval | None
    said: str


def points_of(report: Report) -> list[Point]:
    """The reference, and every candidate whose size and worst task are known."""
    shade = colours(report)
    found = [
        Point(w.row.label, shade[w.row.label], w.row.checkpoint_bytes, w.use, _sentence(w))
        for row in candidates(report)
        if (w := worst_of(report, row)) is not None and w.row.checkpoint_bytes
    ]
    reference = next(row for row in report.rows if row.kind == "reference")
    if not found or not reference.checkpoint_bytes:
        return found
    return [Point(report.reference, "sref", reference.checkpoint_bytes, None, "what the others are compared with"), *found]


def quality_and_size(found: Sequence[Point]) -> Markup | None:
    """Share of the allowed loss that the worst task uses, against the size of the checkpoint."""
    uses = [point.use for point in found if point.use is not None]
    if not uses:
        return None
    largest = max(point.num_bytes for point in found)
    unit, each = ("GB", 1e9) if largest >= 1e9 else ("MB", 1e6)
    top = max(1.25, *(min(use.high, 6.0) for use in uses))
    bottom = min(0.0, *(max(use.low, -1.0) for use in uses))
    width, height = 560, 330
    said = ". ".join(f"{point.name}, {size(point.num_bytes)}: {point.said}" for point in found)
    to = Picture(width, height, f"Quality against size. {said}")
    across = Scale(0, 1.1 * largest / each, 54, width - 12)
    up = Scale(bottom, top, height - 48, 40)
    to.add(
        '<rect x="54" y="{y}" width="{w}" height="{h}" class="beyond"/>', y=up(top), w=width - 66, h=round(up(1) - up(top), 1)
    )
    axis_left(
        to,
        up,
        54,
        steps(bottom, top, 5),
        lambda v: f"{100 * v:.0f} %",
        "loss on the worst task, % of what is allowed",
        width - 12,
    )
    axis_below(
        to, across, height - 48, steps(0, 1.1 * largest / each), lambda v: f"{v:g}", f"size of the checkpoint, {unit}", 40
    )
    to.line(54, up(1), width - 12, up(1), "limit")
    to.text(width - 16, up(1) - 5, "allowed", "limit-name", "end")
    marks: list[tuple[float, float, str]] = []
    taken: list[Box] = [(54, up(1) - 1, width - 12, up(1) + 1), (width - 80, up(1) - 18, width - 12, up(1))]
    for point in found:
        x, hint = across(point.num_bytes / each), f"{point.name}, {size(point.num_bytes)}: {point.said}"
        marks.append((x, up(_within(point.use.value, bottom, top) if point.use is not None else 0), point.name))
        if point.use is not None:  # what lies beyond the picture stands on its edge
            high, low = (up(_within(end, bottom, top)) for end in (point.use.high, point.use.low))
            to.line(x, low, x, high, f"bar {point.css}")
            taken.append((x - 2, high, x + 2, low))
        shape, large = (3, 5) if point.use is None else (shape_of(point.css), 6)
        to.mark(x, marks[-1][1], point.css, shape, hint, large)
    names = place_names(marks, (54, 40, width - 12, height - 48), taken)
    for (x, y, anchor, name), mark, point in zip(names, marks, found, strict=True):
        if abs(y - mark[1]) > FAR:
            to.line(*mark[:2], x, y - 4, f"thin {point.css}")
        to.text(x, y, name, "name", anchor)
    return to.drawn()


def _within(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def _sentence(w: Worst) -> str:
    assert w.task.drop is not None and w.task.margin is not None
    drop = w.task.drop
    ends, margin = lost_or_gained(drop.low, drop.high), points_short(w.task.margin)
    return f"{change(drop.value)} on {name_of(w.task)} ({ends}), {margin} allowed"


# ------------------------------------------------------------------------------------------------ changes
def changes(report: Report) -> Markup | None:
    """Change of every task on every candidate, with its interval, beside the loss that its gate allows."""
    rows = candidates(report)
    lanes = {(row.label, task.task): task for row in rows for task in scored(report, row)}
    tasks = list(dict.fromkeys(task.task for row in rows for task in row.tasks if (row.label, task.task) in lanes))
    if not tasks:
        return None
    titles = {task.task: name_of(task) for task in lanes.values()}
    drops = [task.drop for task in lanes.values() if task.drop is not None]
    margins = {task.task: task.margin for task in lanes.values() if task.margin}
    low = min(-1.0, *(-100 * drop.high for drop in drops), *(-110 * margin for margin in margins.values()))
    high = max(1.0, *(-100 * drop.low for drop in drops))
    left, width, block = 190, 760, LANE * len(rows) + 14
    height = 30 + block * len(tasks) + 50
    to = Picture(
        width, height, "Change of every task in points, with intervals. " + ". ".join(_changed(k, t) for k, t in lanes.items())
    )
    across = Scale(low * 1.04, high * 1.04, left, width - 14)
    base = height - 46
    axis_below(
        to, across, base, steps(low, high, 8), lambda v: signed(v).removesuffix(".0"), "change in points (− is a loss)", 24
    )
    to.line(across(0), 18, across(0), base, "zero")
    shade = colours(report)
    for number, task in enumerate(tasks):
        top = 26 + number * block
        to.text(left - 10, top + block / 2, titles[task], "tick strong", "end")
        if margin := margins.get(task):
            to.line(across(-100 * margin), top, across(-100 * margin), top + block - 8, "limit")
        for lane, row in enumerate(rows):
            found = lanes.get((row.label, task))
            if found is None or found.drop is None:
                continue
            y, css, drop = top + 8 + lane * LANE, shade[row.label], found.drop
            to.line(across(-100 * drop.high), y, across(-100 * drop.low), y, f"bar {css}")
            to.mark(across(-100 * drop.value), y, css, shape_of(css), _changed((row.label, task), found), 4.5)
    return legend([(row.label, shade[row.label], shape_of(shade[row.label])) for row in rows]) + to.drawn()


def _changed(where: tuple[str, str], task: TaskNumbers) -> str:
    assert task.drop is not None
    return f"{where[0]}, {name_of(task)}: {change(task.drop.value)} ({lost_or_gained(task.drop.low, task.drop.high)})"


# ------------------------------------------------------------------------------------------------ bytes
def bytes_per_role(report: Report) -> Markup | None:
    """Stacked bars: the source, and every checkpoint that was planned."""
    if not report.plans:
        return None
    source = report.plans[0]
    bars = [
        (
            "source",
            {r: sum(x.bytes_in for x in source.roles if x.role == r) for r in dict.fromkeys(x.role for x in source.roles)},
        )
    ]
    bars += [
        (
            plan.precision,
            {r: sum(x.bytes_out for x in plan.roles if x.role == r) for r in dict.fromkeys(x.role for x in plan.roles)},
        )
        for plan in report.plans
    ]
    most = max(sum(sums.values()) for _, sums in bars)
    order = sorted(bars[0][1], key=lambda role: -bars[0][1][role])
    to = Picture(
        760, 14 + 34 * len(bars), "Bytes by role. " + ". ".join(f"{name}: {size(sum(sums.values()))}" for name, sums in bars)
    )
    across = Scale(0, most, 110, 660)
    for number, (name, sums) in enumerate(bars):
        y, at = 8 + 34 * number, 0.0
        to.text(102, y + 17, name, "tick strong", "end")
        for role in order:
            if not (num_bytes := sums.get(role, 0)):
                continue
            x, right = across(at), across(at + num_bytes)
            mark = '<rect x="{x}" y="{y}" width="{w}" height="24" class="role {css}"><title>{t}</title></rect>'
            to.add(mark, x=x, y=y, w=round(max(right - x, 0.3), 1), css=_role(role), t=f"{name}, {role}: {size(num_bytes)}")
            at += num_bytes
        to.text(across(at) + 8, y + 17, size(sum(sums.values())), "tick")
    names = [(role.replace("_", " "), f"role {_role(role)}", 1) for role in order]
    return legend(names) + to.drawn()


def _role(role: str) -> str:
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
    made = []
    for rows in ladders(report.speed.rows).values():
        first = rows[0]
        tokens = "1 token" if first.speculation == 1 else f"{first.speculation} tokens"
        draft = f"{tokens} drafted a step" if first.speculation else "speculation off"
        title = f"{first.hardware}, {first.prompts}, {draft}, {first.origin} by {first.source}"
        made.append(
            Ladder(title, _ladder(report, rows, title), tuple(sorted(rows, key=lambda r: (r.checkpoint, r.concurrency))))
        )
    return made


def _ladder(report: Report, rows: Sequence[SpeedRow], title: str) -> Markup:
    names = list(dict.fromkeys(row.checkpoint for row in rows))
    known = colours(report)
    shade = {name: known.get(name, f"s{i % SERIES}") for i, name in enumerate(names)}
    streams = sorted({row.concurrency for row in rows})
    most = 1.08 * max(max(repeat.output_tokens_s for repeat in row.repeats) for row in rows)
    width, height = 560, 300
    to = Picture(width, height, f"Tokens a second against requests in flight; {title}")
    across = Scale(max(streams[0] / 1.2, 0.5), streams[-1] * 1.6, 60, width - 12, is_log=True)
    up = Scale(0, most, height - 48, 34)
    axis_left(to, up, 60, steps(0, most, 5), lambda v: f"{v:,g}", "output tokens/s, all requests together", width - 12)
    axis_below(to, across, height - 48, streams, lambda v: f"{v:g}", "requests in flight", 34)
    for name in names:
        mine = sorted((row for row in rows if row.checkpoint == name), key=lambda row: row.concurrency)
        to.path([(across(row.concurrency), up(row.tokens_s)) for row in mine], f"path {shade[name]}")
        for row in mine:
            speeds = [repeat.output_tokens_s for repeat in row.repeats]
            x = across(row.concurrency)
            to.line(x, up(min(speeds)), x, up(max(speeds)), f"bar {shade[name]}")
            said = f"{name}, {row.concurrency} in flight: {row.tokens_s:,.1f} tokens/s ({len(speeds)} repeats)"
            to.mark(x, up(row.tokens_s), shade[name], shape_of(shade[name]), said)
        to.text(across(mine[-1].concurrency) + 9, up(mine[-1].tokens_s) + 4, name, "name")
    return to.drawn()
