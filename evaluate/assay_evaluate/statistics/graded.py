"""Scores between 0 and 1 on paired items: partial credit, or the mean of several samples of an item.

The same questions as `paired`, `decisions` and `power` answer for right or wrong. A p value here is the level at which the
interval just reaches the margin, so that p values, intervals and verdicts never disagree.

Sources: Hall 1992 (J. R. Stat. Soc. B 54:221-228), the mean of a skewed sample; Agresti & Min 2005 (Stat. Med. 24:729-740), two
items more; Miller 2024 (arXiv 2411.00640, sections 3 to 5).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from assay.records.base import Interval
from assay_evaluate.statistics.clustered import cluster_bootstrap_mean
from assay_evaluate.statistics.decisions import Claim, PairedEvidence
from assay_evaluate.statistics.power import POWER, items_needed, minimum_detectable_effect
from assay_evaluate.statistics.proportions import normal_quantile, wilson

LEAST_SKEWNESS = 1e-6
"""Below it the correction is rounding."""


@dataclass(frozen=True)
class _MeanDifference:
    """Mean of differences reference - candidate of scores in [0, 1], corrected for their skewness.

    A few items that are lost wholly, among many that agree, skew the mean and its standard error together: Student's t passes
    a loss of the margin in 4 to 5 %. Hall's monotone transformation of t takes the skewness out. It can be inverted, so it
    gives intervals and p values at any level in closed form.
    """

    estimate: float
    n: int
    padded_n: int
    """With two items more, of which one half is lost and one half gained: equal differences do not make a point."""
    padded_mean: float
    padded_deviation: float
    skewness: float

    @classmethod
    def of(cls, reference: ArrayLike, candidate: ArrayLike) -> Self:
        ours, theirs = np.asarray(reference, dtype=np.float64), np.asarray(candidate, dtype=np.float64)
        if ours.ndim != 1 or ours.shape != theirs.shape:
            raise ValueError(f"reference {ours.shape} and candidate {theirs.shape} must be paired")
        for scores in (ours, theirs):
            if not ((scores >= 0) & (scores <= 1)).all():
                raise ValueError("scores must lie in [0, 1]")
        if len(ours) < 2:
            raise ValueError(f"{len(ours)} item: an interval needs at least two")
        differences = ours - theirs
        n = len(differences) + 2
        mean = float(differences.sum()) / n
        squares, cubes = (float((differences**2).sum()) + 1) / n, float((differences**3).sum()) / n
        variance = squares - mean**2
        skewness = (cubes - 3 * mean * squares + 2 * mean**3) / variance**1.5
        return cls(float(differences.mean()), len(differences), n, mean, math.sqrt(variance), skewness)

    def interval(self, level: float) -> Interval:
        """Neither end is nearer to the value than z^2 / (n + z^2), Tango's half-width without discordant pairs."""
        quantile = float(stats.t.ppf(0.5 + level / 2, self.padded_n - 1))
        least = normal_quantile(level) ** 2 / (self.n + normal_quantile(level) ** 2)
        low = min(self.padded_mean - self._distance(quantile), self.estimate - least)
        high = max(self.padded_mean - self._distance(-quantile), self.estimate + least)
        return Interval(value=self.estimate, low=max(low, -1.0), high=min(high, 1.0), n=self.n, level=level)

    def p_at_least(self, loss: float) -> float:
        """One-sided p of H0: the true mean is at least `loss`; the greatest (1 - level) / 2 whose interval holds it."""
        return 1.0 if loss <= self.estimate else self._p(loss)

    def p_at_most(self, loss: float) -> float:
        return 1.0 if loss >= self.estimate else self._p(loss)

    def _p(self, loss: float) -> float:
        """By the transformation or by the least half-width, whichever is larger; never above one half."""
        sign = 1 if loss > self.estimate else -1
        by_skewness = float(stats.t.sf(-sign * self._transformed(loss), self.padded_n - 1))
        away = min(abs(loss - self.estimate), 1 - 1e-12)
        return min(0.5, max(by_skewness, float(stats.norm.sf(math.sqrt(self.n * away / (1 - away))))))

    def _transformed(self, loss: float) -> float:
        """Hall's transformation of the t statistic of H0: the true mean is `loss`; about a t."""
        standardized, root = (self.padded_mean - loss) / self.padded_deviation, math.sqrt(self.padded_n)
        g = self.skewness
        if abs(g) < LEAST_SKEWNESS:
            return root * standardized
        return root * ((1 + g * standardized / 3) ** 3 - 1) / g + g / (6 * root)

    def _distance(self, quantile: float) -> float:
        """Between the mean and the loss at which the transformation is `quantile`."""
        g, root = self.skewness, math.sqrt(self.padded_n)
        if abs(g) < LEAST_SKEWNESS:
            return self.padded_deviation * quantile / root
        return self.padded_deviation * 3 / g * (float(np.cbrt(1 + g * (quantile - g / (6 * root)) / root)) - 1)


def graded_difference(reference: ArrayLike, candidate: ArrayLike, *, level: float = 0.95) -> Interval:
    """Mean of reference - candidate of scores in [0, 1] (partial credit, several samples per item), one pair for each item.

    Of equal differences, whatever n, no point: neither end is nearer to the value than z^2 / (n + z^2), Tango's half-width
    without discordant pairs. ValueError for scores outside [0, 1], or fewer than two items.
    """
    return _MeanDifference.of(reference, candidate).interval(level)


def graded_evidence(
    reference: ArrayLike, candidate: ArrayLike, margin: float, *, level: float = 0.95, claim: Claim = "non_inferior"
) -> PairedEvidence:
    """`paired_evidence` of scores in [0, 1], one pair for each item: of several samples, their mean.

    b and c count the items on which the reference, or the candidate, does better. ValueError as `graded_difference`.
    """
    ours, theirs = np.asarray(reference, dtype=np.float64), np.asarray(candidate, dtype=np.float64)
    found = _MeanDifference.of(ours, theirs)
    p_pass, p_fail = found.p_at_least(margin), found.p_at_most(margin)
    if claim == "equivalent":
        p_pass, p_fail = max(p_pass, found.p_at_most(-margin)), min(p_fail, found.p_at_least(-margin))
    return PairedEvidence(
        b=int((ours > theirs).sum()), c=int((ours < theirs).sum()), drop=found.interval(level), margin=margin, claim=claim,
        p_difference=min(1.0, 2 * min(found.p_at_least(0), found.p_at_most(0))), p_pass=p_pass, p_fail=p_fail,
    )  # fmt: skip


def graded_minimum_detectable_effect(differences: ArrayLike, level: float = 0.95, power: float = POWER) -> float:
    """Smallest true mean difference that as many items of this spread would show; never below that of clean right-or-wrong
    items, for a spread of 0 does not mean that any loss would have been seen."""
    data = np.asarray(differences, dtype=np.float64)
    found = _quantiles(level, power) * float(data.std(ddof=1)) / math.sqrt(len(data)) if len(data) > 1 else 1.0
    return min(1.0, max(found, minimum_detectable_effect(0, 0, len(data), level, power)))


def graded_items_needed(differences: ArrayLike, margin: float, level: float = 0.95, power: float = POWER) -> int:
    """Items of this spread so that a candidate without any true loss passes `margin` with chance `power`; never fewer than
    right-or-wrong items without a discordant pair need."""
    data = np.asarray(differences, dtype=np.float64)
    spread = float(data.std(ddof=1)) if len(data) > 1 else 1.0
    return max(math.ceil((_quantiles(level, power) * spread / margin) ** 2), items_needed(margin, 0.0, power, level=level))


def _quantiles(level: float, power: float) -> float:
    return normal_quantile(level) + normal_quantile(2 * power - 1)


def mean_of_shares(shares: ArrayLike, level: float = 0.95) -> Interval:
    """Mean over items of each item's share of right samples, with a BCa interval over items; Wilson's where all are alike, for
    a bootstrap of equal values is a point."""
    data = np.asarray(shares, dtype=np.float64)
    if len(data) > 1 and np.ptp(data) > 0:
        return cluster_bootstrap_mean(data, np.arange(len(data)), level=level)
    mean = float(data.mean())
    around = wilson(round(float(data.sum())), len(data), level)
    return around.model_copy(update={"value": mean, "low": min(around.low, mean), "high": max(around.high, mean)})
