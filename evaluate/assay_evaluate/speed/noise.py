"""How far a measured speed may lie from the one that a server would show again: noise of repeats, and of starts of the server.

Everything is on logarithms. A repeat is `speed of the setup + effect of this start of its server + noise`. Effects of starts
(placement of memory, clocks, compilation, neighbours) are shared by all repeats of a start, so repeats of one start never show
them. Their spread comes from setups that were started more than once, all together, beside what is assumed: `START`, worth
`START_WORTH` setups. Where nothing was restarted it is the assumption alone. The spread of repeats is each row's own, drawn
towards that of all rows (a moderated variance: Smyth 2004, doi:10.2202/1544-6115.1027), or `REPEAT` where nothing was repeated.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import stats

from assay.quantities import percent, percent_short
from assay.records.speed import SpeedRepeat, SpeedRow

Array = npt.NDArray[np.float64]
Quantity = Callable[[SpeedRepeat], float | None]
START, REPEAT = 0.03, 0.02
"""Standard deviations that are assumed: from one start of a server to another, and from repeat to repeat."""
START_WORTH, REPEAT_WORTH = 4, 4
"""Degrees of freedom that the assumption, and the spread of all rows together, count for."""
_SPREADS = np.exp(np.linspace(math.log(1e-3), math.log(0.3), 60))
"""Standard deviations of starts that are weighed."""


@dataclass(frozen=True)
class Sample:
    """Logarithms of one quantity of one row: `starts[s]` those of the repeats of one start."""

    starts: tuple[tuple[float, ...], ...]

    @property
    def mean(self) -> float:
        """Every start counts alike."""
        return statistics.fmean(map(statistics.fmean, self.starts))

    @property
    def num_repeats(self) -> int:
        return sum(map(len, self.starts))

    @property
    def repeat_weight(self) -> float:
        """By which the variance of a repeat is multiplied in that of `mean`."""
        return sum(1 / len(start) for start in self.starts) / len(self.starts) ** 2

    @property
    def within(self) -> tuple[float, int]:
        """(sum of squares of repeats about their start's mean, its degrees of freedom)."""
        squares = sum(sum((log - statistics.fmean(start)) ** 2 for log in start) for start in self.starts)
        return squares, self.num_repeats - len(self.starts)


def sample_of(row: SpeedRow, quantity: Quantity) -> Sample | None:
    """None: no repeat has the quantity."""
    starts: dict[int | None, list[float]] = defaultdict(list)
    for repeat in row.repeats:
        value = quantity(repeat)
        if value is not None and value > 0:
            starts[repeat.server_start].append(math.log(value))
    return Sample(tuple(map(tuple, starts.values()))) if starts else None


@dataclass(frozen=True)
class Noise:
    """start_weights: of `_SPREADS`. repeat: standard deviation of a repeat over all rows. num_restarted, num_repeated: setups
    that were started more than once, rows with more than one repeat of a start."""

    start_weights: Array
    repeat: float
    num_restarted: int
    num_repeated: int

    @property
    def start(self) -> float:
        """Standard deviation of the effects of starts: that of Student's t, which effects of an uncertain spread follow."""
        return float((self.start_weights @ _SPREADS**-2.0) ** -0.5)

    @property
    def words(self) -> str:
        """What the intervals of these speeds rest on, in a clause."""
        if self.num_restarted:
            several = f"{self.num_restarted} setup{'s' * (self.num_restarted != 1)} started more than once"
            starts = f"starts of a server differ by {percent(self.start)}, from {several} and an assumed {percent_short(START)}"
        else:
            starts = (
                f"no setup was measured in two starts of its server: that starts differ by {percent_short(START)} is assumed"
            )
        repeats = "" if self.num_repeated else f", and repeats by {percent_short(REPEAT)}"
        return starts + repeats

    def variances(self, sample: Sample, start_variances: Array, rng: np.random.Generator) -> tuple[Array, Array]:
        """Of every draw, of `sample.mean`: (variance by starts, by repeats)."""
        squares, freedom = sample.within
        repeat = (squares + REPEAT_WORTH * self.repeat**2) / rng.chisquare(freedom + REPEAT_WORTH, len(start_variances))
        return start_variances / len(sample.starts), repeat * sample.repeat_weight

    def start_variances(self, num_draws: int, rng: np.random.Generator) -> Array:
        return np.asarray(rng.choice(_SPREADS, num_draws, p=self.start_weights) ** 2)

    def error(self, sample: Sample) -> float:
        """Standard error of `sample.mean`."""
        squares, freedom = sample.within
        repeat = (squares + REPEAT_WORTH * self.repeat**2) / (freedom + REPEAT_WORTH)
        return math.sqrt(self.start**2 / len(sample.starts) + repeat * sample.repeat_weight)

    def quantile(self, level: float) -> float:
        """Of Student's t with as many degrees of freedom as the spread of starts has, for an interval of `level`."""
        return float(stats.t.ppf((1 + level) / 2, START_WORTH + self.num_restarted))


def noise_of(setups: Iterable[Sequence[Sample]]) -> Noise:
    """setups: rows of each checkpoint, speculation and parallelism, whose starts are the same ones at all its points."""
    groups = [list(samples) for samples in setups]
    every = [sample for samples in groups for sample in samples]
    squares = sum(sample.within[0] for sample in every)
    freedom = sum(sample.within[1] for sample in every)
    repeat = math.sqrt((squares + REPEAT_WORTH * REPEAT**2) / (freedom + REPEAT_WORTH))
    repeat = math.sqrt(squares / freedom) if freedom >= REPEAT_WORTH and squares > 0 else repeat
    log_weights = -START_WORTH * (np.log(_SPREADS) + START**2 / (2 * _SPREADS**2))
    restarted = 0
    for samples in groups:
        known = [sample for sample in samples if len(sample.starts) > 1]
        if not known:
            continue
        restarted += 1
        # Points of one setup share their starts: they count as one, with the mean of what each shows.
        for sample in known:
            means = np.array([statistics.fmean(start) for start in sample.starts])
            variances = _SPREADS**2 + repeat**2 * sample.repeat_weight * len(means)
            spread = float(((means - means.mean()) ** 2).sum())
            log_weights += -((len(means) - 1) / 2 * np.log(variances) + spread / (2 * variances)) / len(known)
    weights = np.exp(log_weights - log_weights.max())
    return Noise(weights / weights.sum(), repeat, restarted, sum(sample.within[1] > 0 for sample in every))


def noise_of_rows(rows: Iterable[SpeedRow], quantity: Quantity) -> Noise:
    """Of the rows that were not predicted."""
    setups: dict[tuple[object, ...], list[Sample]] = defaultdict(list)
    for row in rows:
        sample = sample_of(row, quantity) if row.origin != "predicted" else None
        if sample is not None:
            setups[(*row.point[:4], *row.like[2:-1])].append(sample)
    return noise_of(setups.values())
