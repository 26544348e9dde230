"""Throughput and latency of a setup over streams, between its rows; and who is best where, with the noise of the rows.

Between two rows both are linear in the logarithms, and there is nothing beyond the first and last row. Noise: of a row with
several repeats Student's t of the mean of their logarithms, drawn anew in every draw; a checkpoint that has passed fails in as
many draws as the intervals of its losses say. A setup that is not known at some number of streams is no choice there.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
LEVEL = 0.95
GRID = 400
"""Points between the fewest and the most streams, even in the logarithm."""
NOBODY = -1
ROUNDING = 1e-12
"""Share by which a limit may be exceeded: what is equal to it but for the last digits of arithmetic meets it."""


@dataclass(frozen=True)
class Known:
    """One row. values: tokens/s of its repeats."""

    concurrency: int
    values: tuple[float, ...]
    limits: Mapping[str, float]
    """`ttft_s`, `tpot_s`, `end_to_end_s`, those that are known: an objective on another is missed."""

    @property
    def log(self) -> float:
        return statistics.fmean(map(math.log, self.values))

    @property
    def error(self) -> float | None:
        """Standard error of `log`; None: one repeat."""
        if len(self.values) < 2:
            return None
        return statistics.stdev(map(math.log, self.values)) / math.sqrt(len(self.values))


@dataclass(frozen=True)
class Curve:
    """Rows of one setup, by streams. chance_of_failing: of its checkpoint's quality. spread: factor by which every number of it
    may be wrong together, for predictions; 1: none."""

    setup: str
    checkpoint: str
    rows: tuple[Known, ...]
    chance_of_failing: float = 0.0
    spread: float = 1.0


@dataclass(frozen=True)
class Envelope:
    """best[d, g]: number of the curve that is chosen in draw d at streams[g]; `NOBODY`: none. Draw 0 has no noise.

    noisy: whether the other draws differ from it for a reason. passed[d]: whether in draw d every checkpoint keeps its PASS, so
    that only speeds are drawn.
    """

    streams: Array
    best: npt.NDArray[np.int64]
    noisy: bool
    passed: npt.NDArray[np.bool_]

    def at(self, concurrency: float) -> npt.NDArray[np.int64]:
        """The choice of every draw there."""
        return self.best[:, int(np.argmin(np.abs(np.log(self.streams) - math.log(concurrency))))]


def envelope(
    curves: Sequence[Curve], points: Sequence[int], objective: Mapping[str, float], *, num_draws: int, seed: int
) -> Envelope:
    """Who is best on a grid that holds all `points`, without noise and in `num_draws` draws."""
    low, high = math.log(min(points)), math.log(max(points))
    streams = np.unique(np.concatenate([np.exp(np.linspace(low, high, GRID)), np.array(sorted(points), dtype=np.float64)]))
    streams = streams[(streams >= min(points)) & (streams <= max(points))]
    rng = np.random.default_rng(seed)
    draws = num_draws + 1
    if not curves:
        return Envelope(streams, np.full((1, len(streams)), NOBODY), noisy=False, passed=np.ones(1, dtype=np.bool_))
    top = np.full((draws, len(streams)), -np.inf)
    best = np.full((draws, len(streams)), NOBODY)
    failed: dict[str, npt.NDArray[np.bool_]] = {}
    noisy = False
    for number, whole in enumerate(curves):  # one at a time: of 200 curves all scores together would take gigabytes
        curve = replace(whole, rows=tuple(row for row in whole.rows if objective.keys() <= row.limits.keys()))
        if not curve.rows:
            continue
        noise = np.zeros((draws, len(curve.rows)))
        for at, row in enumerate(curve.rows):
            if row.error:
                noise[1:, at] += row.error * rng.standard_t(len(row.values) - 1, num_draws)
        if curve.spread > 1:
            noise[1:] += rng.normal(0, math.log(curve.spread) / 2, (num_draws, 1))
        noisy |= bool(noise.any()) or curve.chance_of_failing > 0
        if curve.checkpoint not in failed:
            failed[curve.checkpoint] = np.concatenate([[False], rng.random(num_draws) < curve.chance_of_failing])
        scores = _scores(curve, streams, noise, objective)
        scores[failed[curve.checkpoint]] = -np.inf
        better = scores > top
        best[better] = number
        np.maximum(top, scores, out=top)
    passed = ~np.any([np.zeros(draws, dtype=np.bool_), *failed.values()], axis=0)
    return Envelope(streams, best, noisy, passed)


def _scores(curve: Curve, streams: Array, noise: Array, objective: Mapping[str, float]) -> Array:
    """Logarithm of tokens/s of every draw; -inf where it is not known or misses the objective."""
    at = np.log([row.concurrency for row in curve.rows])
    where = np.log(streams)
    logs = np.array([row.log for row in curve.rows])
    found = _between(where, at, logs + noise)
    moved = np.zeros_like(found)
    if "tpot_s" in objective:
        moved = np.where(np.isfinite(found), _between(where, at, noise), 0.0)  # beyond the rows there is nothing to move
    for name, most in objective.items():
        taken = _between(where, at, np.log([max(row.limits[name], 1e-9) for row in curve.rows]))
        slower = moved if name == "tpot_s" else np.zeros_like(moved)  # what writes faster takes less time a token
        found = np.where(taken - slower <= math.log(most) + ROUNDING, found, -np.inf)
    return found


def _between(where: Array, at: Array, values: Array) -> Array:
    """Linear interpolation along the last axis of `values`; -inf beyond the ends."""
    right = np.clip(np.searchsorted(at, where), 1, max(1, len(at) - 1))
    left = right - 1
    right = np.minimum(right, len(at) - 1)  # of one row both ends are the same
    share = (where - at[left]) / np.where(at[right] > at[left], at[right] - at[left], 1.0)
    found = values[..., left] * (1 - share) + values[..., right] * share
    return np.where((where >= at[0]) & (where <= at[-1]), found, -np.inf)


@dataclass(frozen=True)
class Turn:
    """The choice changes from one curve to another (`NOBODY`: to or from none)."""

    before: int
    after: int
    at: float
    low: float | None
    high: float | None
    chance: float | None


def turns(found: Envelope) -> list[Turn]:
    """Of draw 0; with the range over those draws in which the same change happens, the nearest where it does twice.

    Where draw 0 itself has a change twice, one of another draw is of the turn that it is nearer to.
    """
    made = []
    changes = [
        (int(found.best[0, at]), int(found.best[0, at + 1]), _middle(found.streams, at)) for at in _changes(found.best[0])
    ]
    for before, after, place in changes:
        low = high = chance = None
        if found.noisy:
            rivals = [other for *same, other in changes if same == [before, after] and other != place]
            places = _same_change(found, before, after, place, rivals)
            chance = len(places) / (len(found.best) - 1)
            if places:
                low, high = (float(np.quantile(places, q)) for q in ((1 - LEVEL) / 2, (1 + LEVEL) / 2))
        made.append(Turn(before, after, place, low, high, chance))
    return made


def gap(found: Envelope, turn: Turn, curves: Sequence[Curve], objective: Mapping[str, float]) -> str | None:
    """Who is not known on the other side of the change, in a clause: it is where rows end, and not where curves cross. None: it
    is where they cross, or where one misses the objective."""
    above, below = found.streams[found.streams > turn.at].min(), found.streams[found.streams < turn.at].max()
    said = []
    if turn.before != NOBODY and max(_known(curves[turn.before], objective)) < above:
        said.append(f"beyond which nothing is known of {curves[turn.before].setup}")
    if turn.after != NOBODY and min(_known(curves[turn.after], objective)) > below:
        said.append(f"below which nothing is known of {curves[turn.after].setup}")
    return " and ".join(said) or None


def _known(curve: Curve, objective: Mapping[str, float]) -> list[int]:
    return [row.concurrency for row in curve.rows if objective.keys() <= row.limits.keys()]


def _changes(best: npt.NDArray[np.int64]) -> list[int]:
    return [int(at) for at in np.flatnonzero(best[1:] != best[:-1])]


def _middle(streams: Array, at: int) -> float:
    return float(math.sqrt(streams[at] * streams[at + 1]))


def _same_change(found: Envelope, before: int, after: int, place: float, rivals: Sequence[float]) -> list[float]:
    """Of every draw that has it the nearest, unless that is nearer to one of `rivals`."""
    places = []
    for draw in found.best[1:]:
        there = (_middle(found.streams, int(at)) for at in np.flatnonzero((draw[:-1] == before) & (draw[1:] == after)))
        mine = [one for one in there if all(_apart(one, place) <= _apart(one, rival) for rival in rivals)]
        if mine:
            places.append(min(mine, key=lambda one: _apart(one, place)))
    return places


def _apart(one: float, other: float) -> float:
    return abs(math.log(one / other))
