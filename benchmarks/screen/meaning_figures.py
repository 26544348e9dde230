"""Figures of `meaning.py`: candidates as points, how KL is ordered beside served KL and loss at tasks, tables and picture."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from assay.records.base import Interval
from assay_evaluate.sensitivity.ranks import FEWEST_PARTS, spearman_interval
from assay_evaluate.statistics.paired import discordant_counts, paired_difference
from assay_reports.page.svg import Picture, Scale, axis_below, axis_left, decades, steps
from assay_reports.screening import nats, plain_nats

DRAWS = 4000
Floats = npt.NDArray[np.float64]
Item = tuple[str, str]
"""Task and item."""


@dataclass(frozen=True)
class Point:
    """A candidate. screened, served: mean KL, nats. loss: of all items the share that the source answers right and it does not,
    less the share the other way round; None: it was not asked. task_losses: the same of each task."""

    model: str
    label: str
    is_damage: bool
    screened: Interval
    served: Interval
    loss: Interval | None = None
    task_losses: Mapping[str, float] = field(default_factory=dict)


def loss_of(reference: Mapping[Item, bool | None], candidate: Mapping[Item, bool | None]) -> Interval:
    """Net share lost of the items that both were scored at; by item."""
    both = [item for item, correct in reference.items() if correct is not None and candidate.get(item) is not None]
    b, c = discordant_counts([bool(reference[item]) for item in both], [bool(candidate[item]) for item in both])
    return paired_difference(b, c, len(both))


def correlation(points: Sequence[Point], x: Callable[[Point], float], y: Callable[[Point], float]) -> Interval | None:
    """Spearman's of two readings; candidates are resampled. None: too few, or one reading is the same for all."""
    values_P2 = np.array([[x(point), y(point)] for point in points])
    if len(points) < FEWEST_PARTS or (np.ptp(values_P2, axis=0) == 0).any():
        return None
    return spearman_interval(values_P2, [[row] for row in range(len(points))], random.Random("meaning"))


def log_slope(points: Sequence[Point]) -> Interval:
    """Least squares of log screened KL on log served KL; 95 % of resampled candidates."""
    x_P, y_P = (np.log([reading(point) for point in points]) for reading in (_served, _screened))
    rows_DP = np.random.default_rng(0).integers(0, len(points), (DRAWS, len(points)))
    slopes_D = _slopes(x_P[rows_DP], y_P[rows_DP])
    low, high = np.quantile(slopes_D[np.isfinite(slopes_D)], [0.025, 0.975])
    value = float(_slopes(x_P[None], y_P[None])[0])
    return Interval(value=value, low=min(float(low), value), high=max(float(high), value), n=len(points), coverage="about")


def _slopes(x_DP: Floats, y_DP: Floats) -> Floats:
    """Of each row; NaN where all of its x are one."""
    apart_DP = x_DP - x_DP.mean(1, keepdims=True)
    squares_D = (apart_DP**2).sum(1)
    return np.divide((apart_DP * y_DP).sum(1), squares_D, out=np.full_like(squares_D, np.nan), where=squares_D > 1e-12)


def is_inside(point: Point) -> bool:
    """Whether the screened figure lies in the interval of the served one."""
    return point.served.low <= point.screened.value <= point.served.high


# ------------------------------------------------------------------------------------------------ the page
def summary(points: Sequence[Point]) -> Iterator[str]:
    """A table: of all candidates, of each model, of precisions and of damages."""
    groups: dict[str, list[Point]] = {"all": list(points)}
    for name in dict.fromkeys(point.model for point in points):
        groups[name] = [point for point in points if point.model == name]
    groups["precisions"] = [point for point in points if not point.is_damage]
    groups["damages"] = [point for point in points if point.is_damage]
    yield (
        "| candidates | number | rank correlation with served KL | slope of log screened on log served "
        "| screened / served, median | least to largest | inside the served interval | rank correlation with loss at tasks |"
    )
    yield f"|{'---|' * 8}"
    for name, group in groups.items():
        if len(group) < FEWEST_PARTS:
            continue
        ratios = [point.screened.value / point.served.value for point in group]
        yield (
            f"| {name} | {len(group)} | {_rho(correlation(group, _screened, _served))} | {_rho(log_slope(group), 3)} "
            f"| {np.median(ratios):.3f} | {min(ratios):.3f} to {max(ratios):.3f} "
            f"| {sum(map(is_inside, group))} of {len(group)} "
            f"| {_rho(correlation([point for point in group if point.loss is not None], _screened, _loss))} |"
        )


def table(points: Sequence[Point]) -> Iterator[str]:
    """A row for each candidate, in the order of its screened KL."""
    tasks = list(dict.fromkeys(task for point in points for task in point.task_losses))
    yield " ".join(["| model | candidate | screened KL | served KL | points lost at tasks |", *(f"{task} |" for task in tasks)])
    yield f"|{'---|' * (5 + len(tasks))}"
    for point in sorted(points, key=lambda point: (point.model, point.screened.value)):
        loss, by_task = point.loss, [f"{100 * point.task_losses[task]:.1f}" if point.loss else "-" for task in tasks]
        lost = "-" if loss is None else f"{100 * loss.value:.1f} ({100 * loss.low:.1f} to {100 * loss.high:.1f})"
        cells = [point.model, point.label, plain_nats(point.screened.value), nats(point.served), lost, *by_task]
        yield f"| {' | '.join(cells)} |"


PANEL, TOP, BOTTOM, LEFT = 360, 40, 340, 62
STYLE = (
    "text{font:12px sans-serif;fill:#222}.paper{fill:#fff}.grid{stroke:#ddd}.equal{stroke:#888;stroke-dasharray:4 3}"
    ".tiny-glm{fill:#2f6f9f}.tiny-qwen{fill:#b8643c}.damage{fill-opacity:.45}"
)


def picture(points: Sequence[Point]) -> str:
    """SVG of two panels over screened KL: served KL, and points lost at tasks. Squares are damages, circles precisions."""
    values = [value for point in points for value in (point.screened.value, point.served.value)]
    low, high = 10.0 ** math.floor(math.log10(min(values))), 10.0 ** math.ceil(math.log10(max(values)))
    asked = [point for point in points if point.loss is not None]
    losses = [100 * _loss(point) for point in asked] or [0.0]
    x = Scale(low, high, LEFT, LEFT + PANEL - 90, is_log=True)
    by_kl = Scale(low, high, BOTTOM, TOP, is_log=True)
    by_loss = Scale(min(0.0, *losses) - 2, max(losses) + 2, BOTTOM, TOP)
    drawn = Picture(
        2 * PANEL, BOTTOM + 50, "screened KL beside served KL and beside points lost at tasks, one mark a candidate"
    )
    drawn.add("<style>{css}</style>", css=STYLE)
    drawn.rect(0, 0, drawn.width, drawn.height, "paper")
    panels: tuple[tuple[Scale, Sequence[Point], list[float], Callable[[float], str], str, Callable[[Point], float]], ...] = (
        (by_kl, points, decades(low, high), _power, "served KL, nats", _served),
        (by_loss, asked, steps(by_loss.low, by_loss.high), "{:g}".format, "points lost at tasks", lambda at: 100 * _loss(at)),
    )
    for number, (y, shown, ticks, name, title, value_of) in enumerate(panels):
        drawn.add('<g transform="translate({left} 0)">', left=number * PANEL)
        axis_below(drawn, x, BOTTOM, decades(low, high), _power, "screened KL, nats", TOP)
        axis_left(drawn, y, x.begin, ticks, name, title, x.end)
        if y is by_kl:
            drawn.line(x(low), y(low), x(high), y(high), "equal")
        for point in shown:
            css = f"{point.model} damage" if point.is_damage else point.model
            drawn.mark(x(_screened(point)), y(value_of(point)), css, int(point.is_damage), f"{point.model}: {point.label}", 4)
        drawn.add("</g>")
    for number, model in enumerate(dict.fromkeys(point.model for point in points)):
        drawn.mark(PANEL + 180 + 90 * number, TOP - 16, model, 0, model)
        drawn.text(PANEL + 188 + 90 * number, TOP - 12, model)
    drawn.text(LEFT + 84, TOP - 12, "circles: precisions, squares: damages")
    return str(drawn.drawn()).replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1) + "\n"


def _power(value: float) -> str:
    return f"1e{round(math.log10(value))}"


def _screened(point: Point) -> float:
    return point.screened.value


def _served(point: Point) -> float:
    return point.served.value


def _loss(point: Point) -> float:
    assert point.loss is not None, "of those that were asked"
    return point.loss.value


def _rho(value: Interval | None, places: int = 2) -> str:
    return "-" if value is None else f"{value.value:.{places}f} ({value.low:.{places}f} to {value.high:.{places}f})"
