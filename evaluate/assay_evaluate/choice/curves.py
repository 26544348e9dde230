"""Throughput and latency of a setup over streams, between its rows; and who is best where, with the noise of the rows.

Between two rows both are linear in the logarithms, and there is nothing beyond the first and last row. Noise, drawn anew in
every draw: of a setup's starts, one shift of all its rows, and of each row's repeats (`speed/noise.py`); of rows of one run it
is assumed. The fastest of several is partly the luckiest, so draws are shrunk towards what setups near the top share
(`_shrink`). A checkpoint that has passed fails in as many draws as the intervals of its losses say. A setup that is not known
at some number of streams is no choice there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from assay_evaluate.choice import english
from assay_evaluate.speed.noise import Noise, Sample, noise_of

Array = npt.NDArray[np.float64]
LEVEL = 0.95
GRID = 400
"""Points between the fewest and the most streams, even in the logarithm."""
NOBODY = -1
CONTENDERS = 3.0
"""Standard errors of a difference within which a setup is compared with the fastest for the shrinkage."""
_SHARES = np.linspace(0.01, 0.99, 50)
"""Shares of shrinkage that are weighed."""
ROUNDING = 1e-12
"""Share by which a limit may be exceeded: what is equal to it but for the last digits of arithmetic meets it."""


@dataclass(frozen=True)
class Known:
    """One row. sample: logarithms of the tokens/s of its repeats, by starts of the server."""

    concurrency: int
    sample: Sample
    limits: Mapping[str, float]
    """`ttft_s`, `tpot_s`, `end_to_end_s`, those that are known: an objective on another is missed."""

    @property
    def log(self) -> float:
        return self.sample.mean


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

    noisy: whether there are other draws. passed[d]: whether in draw d every checkpoint keeps its PASS, so that only speeds are
    drawn. logs: (number of a curve, streams of a row) -> logarithm of its tokens/s in every draw. noise: None: no draws.
    """

    streams: Array
    best: npt.NDArray[np.int64]
    noisy: bool
    passed: npt.NDArray[np.bool_]
    logs: Mapping[tuple[int, int], Array] = field(default_factory=dict)
    noise: Noise | None = None

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
    rng, draws = np.random.default_rng(seed), num_draws + 1
    if not curves:
        return Envelope(streams, np.full((1, len(streams)), NOBODY), noisy=False, passed=np.ones(1, dtype=np.bool_))
    top = np.full((draws, len(streams)), -np.inf)
    best = np.full((draws, len(streams)), NOBODY)
    failed: dict[str, npt.NDArray[np.bool_]] = {}
    able = [
        replace(curve, rows=tuple(row for row in curve.rows if objective.keys() <= row.limits.keys())) for curve in curves
    ]  # fmt: skip
    noise = noise_of([[row.sample for row in curve.rows] for curve in curves if curve.spread <= 1])
    moves = _drawn(able, noise, num_draws, rng)
    for number, curve in enumerate(able):  # one at a time: of 200 curves all scores together would take gigabytes
        if not curve.rows:
            continue
        if curve.checkpoint not in failed:
            failed[curve.checkpoint] = np.concatenate([[False], rng.random(num_draws) < curve.chance_of_failing])
        scores = _scores(curve, streams, moves[number], objective)
        scores[failed[curve.checkpoint]] = -np.inf
        better = scores > top
        best[better] = number
        np.maximum(top, scores, out=top)
    passed = ~np.any([np.zeros(draws, dtype=np.bool_), *failed.values()], axis=0)
    logs = {
        (number, row.concurrency): row.log + moves[number][:, place]
        for number, curve in enumerate(able) for place, row in enumerate(curve.rows)
    }  # fmt: skip
    return Envelope(streams, best, num_draws > 0, passed, logs, noise if num_draws else None)


# ------------------------------------------------------------------------------------------------ noise
def _drawn(curves: Sequence[Curve], noise: Noise, num_draws: int, rng: np.random.Generator) -> list[Array]:
    """By how much the logarithms of each curve's rows are moved, (draws, rows) each; not at all in draw 0."""
    starts = noise.start_variances(num_draws, rng)
    moves, variances = [], []
    for curve in curves:
        move = np.zeros((num_draws + 1, len(curve.rows)))
        shift = rng.standard_normal(num_draws)
        square = np.zeros((num_draws, len(curve.rows)))
        for place, row in enumerate(curve.rows if curve.spread <= 1 else ()):
            by_start, by_repeat = noise.variances(row.sample, starts, rng)
            move[1:, place] = np.sqrt(by_start) * shift + np.sqrt(by_repeat) * rng.standard_normal(num_draws)
            square[:, place] = by_start + by_repeat
        if curve.spread > 1:
            move[1:] += rng.normal(0, math.log(curve.spread) / 2, (num_draws, 1))
        moves.append(move)
        variances.append(square)
    for at in sorted({row.concurrency for curve in curves for row in curve.rows}) if num_draws else ():
        places = [
            (number, place) for number, curve in enumerate(curves) if curve.spread <= 1
            for place, row in enumerate(curve.rows) if row.concurrency == at
        ]  # fmt: skip
        _shrink(places, curves, moves, variances, rng)
    return moves


def _shrink(
    places: Sequence[tuple[int, int]], curves: Sequence[Curve], moves: Sequence[Array], variances: Sequence[Array],
    rng: np.random.Generator,
) -> None:  # fmt: skip
    """Shrink the draws of one number of streams towards the mean of the setups that may be the fastest there.

    Empirical Bayes, of normal effects about an unknown mean: the share s2 / (s2 + w2) of shrinkage is taken for uniform on
    (0, 1) beforehand (the uniform shrinkage prior: Daniels 1999, doi:10.2307/3316114), and weighed by how far apart the
    setups lie for their noise. Those that are surely slower tell nothing of the fastest, and are left as they are.
    """
    if len(places) < 2:
        return
    logs = np.array([curves[number].rows[place].log for number, place in places])
    squares = np.stack([variances[number][:, place] for number, place in places], axis=1)
    typical = np.median(squares, axis=0)
    top = int(np.argmax(logs))
    near = np.flatnonzero(logs[top] - logs <= CONTENDERS * np.sqrt(typical + typical[top]))
    if len(near) < 2:
        return
    logs, squares, typical = logs[near], squares[:, near], typical[near]
    between = typical.mean() * (1 - _SHARES) / _SHARES
    weights = 1 / (typical + between[:, None])
    means = (weights * logs).sum(axis=1) / weights.sum(axis=1)
    likely = np.log(weights).sum(axis=1) / 2 - np.log(weights.sum(axis=1)) / 2
    likely -= (weights * (logs - means[:, None]) ** 2).sum(axis=1) / 2
    chances = np.exp(likely - likely.max())
    spread = rng.choice(between, len(squares), p=chances / chances.sum())[:, None]
    weight = 1 / (squares + spread)
    total = weight.sum(axis=1)
    centre = (weight * logs).sum(axis=1) / total + rng.standard_normal(len(squares)) / np.sqrt(total)
    share = squares * weight
    for column, (number, place) in enumerate(places[int(which)] for which in near):
        move = moves[number][1:, place]
        kept = np.sqrt(1 - share[:, column]) * move
        moves[number][1:, place] = kept + share[:, column] * (centre - logs[column])


def _scores(curve: Curve, streams: Array, noise: Array, objective: Mapping[str, float]) -> Array:
    """Logarithm of tokens/s of every draw; -inf where it is not known or misses the objective."""
    at = np.log([row.concurrency for row in curve.rows])
    where = np.log(streams)
    logs = np.array([row.log for row in curve.rows])
    scores = _between(where, at, logs + noise)
    moved = np.zeros_like(scores)
    if "tpot_s" in objective:
        moved = np.where(np.isfinite(scores), _between(where, at, noise), 0.0)  # beyond the rows there is nothing to move
    for name, most in objective.items():
        taken = _between(where, at, np.log([max(row.limits[name], 1e-9) for row in curve.rows]))
        slower = moved if name == "tpot_s" else np.zeros_like(moved)  # what writes faster takes less time a token
        scores = np.where(taken - slower <= math.log(most) + ROUNDING, scores, -np.inf)
    return scores


def _between(where: Array, at: Array, values: Array) -> Array:
    """Linear interpolation along the last axis of `values`; -inf beyond the ends."""
    right = np.clip(np.searchsorted(at, where), 1, max(1, len(at) - 1))
    left = right - 1
    right = np.minimum(right, len(at) - 1)  # of one row both ends are the same
    share = (where - at[left]) / np.where(at[right] > at[left], at[right] - at[left], 1.0)
    interpolated = values[..., left] * (1 - share) + values[..., right] * share
    return np.where((where >= at[0]) & (where <= at[-1]), interpolated, -np.inf)


@dataclass(frozen=True)
class Turn:
    """The choice changes from one curve to another (`NOBODY`: to or from none)."""

    before: int
    after: int
    at: float
    low: float | None
    high: float | None
    chance: float | None


def turns(envelope: Envelope) -> list[Turn]:
    """Of draw 0; with the range over those draws in which the same change happens, the nearest where it does twice.

    Where draw 0 itself has a change twice, one of another draw is of the turn that it is nearer to.
    """
    made = []
    first = envelope.best[0]
    changes = [
        (int(first[at]), int(first[at + 1]), _middle(envelope.streams, int(at)))
        for at in np.flatnonzero(first[1:] != first[:-1])
    ]
    for before, after, place in changes:
        low = high = chance = None
        if envelope.noisy:
            rivals = [other for *same, other in changes if same == [before, after] and other != place]
            places = _same_change(envelope, before, after, place, rivals)
            chance = len(places) / (len(envelope.best) - 1)
            if places:
                low, high = (float(np.quantile(places, q)) for q in ((1 - LEVEL) / 2, (1 + LEVEL) / 2))
        made.append(Turn(before, after, place, low, high, chance))
    return made


def gap(envelope: Envelope, turn: Turn, curves: Sequence[Curve], objective: Mapping[str, float]) -> str | None:
    """Who is not known on the other side of the change, in a clause: it is where rows end, and not where curves cross. None: it
    is where they cross, or where one misses the objective."""
    above, below = envelope.streams[envelope.streams > turn.at].min(), envelope.streams[envelope.streams < turn.at].max()
    clauses = []
    if turn.before != NOBODY and max(_known(curves[turn.before], objective)) < above:
        clauses.append(english.UNKNOWN_BEYOND.format(setup=curves[turn.before].setup))
    if turn.after != NOBODY and min(_known(curves[turn.after], objective)) > below:
        clauses.append(english.UNKNOWN_BELOW.format(setup=curves[turn.after].setup))
    return " and ".join(clauses) or None


def _known(curve: Curve, objective: Mapping[str, float]) -> list[int]:
    return [row.concurrency for row in curve.rows if objective.keys() <= row.limits.keys()]


def _middle(streams: Array, at: int) -> float:
    return float(math.sqrt(streams[at] * streams[at + 1]))


def _same_change(envelope: Envelope, before: int, after: int, place: float, rivals: Sequence[float]) -> list[float]:
    """Of every draw that has it the nearest, unless that is nearer to one of `rivals`."""
    places = []
    for draw in envelope.best[1:]:
        changes = (_middle(envelope.streams, int(at)) for at in np.flatnonzero((draw[:-1] == before) & (draw[1:] == after)))
        nearer = [change for change in changes if all(_apart(change, place) <= _apart(change, rival) for rival in rivals)]
        if nearer:
            places.append(min(nearer, key=lambda change: _apart(change, place)))
    return places


def _apart(streams: float, other_streams: float) -> float:
    return abs(math.log(streams / other_streams))
