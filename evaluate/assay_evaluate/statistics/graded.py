"""Scores between 0 and 1 on paired items: partial credit, or the mean of several samples of an item.

The same questions as `paired`, `decisions` and `power` answer for right or wrong. A p value here is the level at which the
interval just reaches the margin, so that p values, intervals and verdicts never disagree.

Sources: Hall 1992 (J. R. Stat. Soc. B 54:221-228), the mean of a skewed sample; Agresti & Min 2005 (Stat. Med. 24:729-740), two
items more; Miller 2024 (arXiv 2411.00640, sections 3 to 5).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

from assay.records.base import Coverage, Interval
from assay_evaluate.statistics.clustered import cluster_bootstrap_mean
from assay_evaluate.statistics.decisions import Claim, PairedEvidence, margin_p
from assay_evaluate.statistics.paired import FEW_DISCORDANT
from assay_evaluate.statistics.power import POWER, items_needed, minimum_detectable_effect
from assay_evaluate.statistics.proportions import detection_quantile, wilson

Floats = NDArray[np.float64]
LEAST_SKEWNESS = 1e-6
"""Below it the correction is rounding."""
POWERS = (1, 2, 3, 4)
"""Of the differences, of which a `MeanDifference` needs the sums."""


@dataclass(frozen=True)
class MeanDifference:
    """Mean of differences reference - candidate of scores in [0, 1], corrected for their skewness; arrays for many samples.

    A few items that are lost wholly, among many that agree, skew the mean and its standard error together: Student's t passes
    a loss of the margin in 4 to 5 %. Hall's monotone transformation of t takes the skewness out. It can be inverted, so it
    gives intervals and p values at any level in closed form.

    Towards the longer tail the variance is itself known from a few items only, so t has the degrees that their kurtosis leaves
    it (`_degrees`): with n - 1 a loss of the margin passed in up to 2.84 % (decision 133).
    """

    estimate: Floats
    n: NDArray[np.int64]
    padded_n: NDArray[np.int64]
    """With two items more, of which one half is lost and one half gained: equal differences do not make a point."""
    padded_mean: Floats
    padded_deviation: Floats
    skewness: Floats
    kurtosis: Floats

    @classmethod
    def of(cls, reference: ArrayLike, candidate: ArrayLike) -> Self:
        reference_N, candidate_N = np.asarray(reference, dtype=np.float64), np.asarray(candidate, dtype=np.float64)
        if reference_N.ndim != 1 or reference_N.shape != candidate_N.shape:
            raise ValueError(f"reference {reference_N.shape} and candidate {candidate_N.shape} must be paired")
        for scores in (reference_N, candidate_N):
            if not ((scores >= 0) & (scores <= 1)).all():
                raise ValueError("scores must lie in [0, 1]")
        if len(reference_N) < 2:
            raise ValueError(f"{len(reference_N)} item: an interval needs at least two")
        differences = reference_N - candidate_N
        return cls.of_sums(len(differences), [(differences**power).sum() for power in POWERS])

    @classmethod
    def of_sums(cls, num_items: ArrayLike, sums: Sequence[ArrayLike]) -> Self:
        """sums: of the differences, and of their second, third and fourth powers, over so many items each."""
        count = np.asarray(num_items, dtype=np.int64)
        n, added = count + 2, (0, 1, 0, 0.5)  # two items more, of +-sqrt(1 / 2)
        mean, square, cube, fourth = (
            (np.asarray(total, dtype=np.float64) + more) / n for total, more in zip(sums, added, strict=True)
        )
        variance = square - mean**2
        skewness = (cube - 3 * mean * square + 2 * mean**3) / variance**1.5
        kurtosis = (fourth - 4 * mean * cube + 6 * mean**2 * square - 3 * mean**4) / variance**2
        return cls(mean * n / count, count, n, mean, np.sqrt(variance), skewness, kurtosis)

    @property
    def variance(self) -> Floats:
        """Of the mean."""
        return np.asarray(self.padded_deviation**2 / self.padded_n)

    def ends(self, level: ArrayLike) -> tuple[Floats, Floats]:
        """Of the interval. Neither end is nearer to the value than z^2 / (n + z^2), Tango's half-width without discordant
        pairs."""
        tail = (1 - np.asarray(level, dtype=np.float64)) / 2
        square = special.ndtri(tail) ** 2
        least = square / (self.n + square)
        below, above = (special.stdtrit(self._degrees(sign), tail) for sign in (-1, 1))
        low = np.minimum(self.padded_mean - self._distance(-below), self.estimate - least)
        high = np.maximum(self.padded_mean - self._distance(above), self.estimate + least)
        return np.maximum(low, -1.0), np.minimum(high, 1.0)

    def interval(self, level: float) -> Interval:
        """Of a single sample."""
        low, high = self.ends(level)
        # of differences from their mean, without the two items more: of one reply to each item, about the discordant pairs
        squares = float(self.padded_n * self.padded_deviation**2) - 1
        coverage: Coverage = "at_least" if squares < FEW_DISCORDANT else "nominal"
        return Interval(
            value=float(self.estimate), low=float(low), high=float(high), n=int(self.n), level=level, coverage=coverage
        )

    def p_at_least(self, loss: float) -> Floats:
        """One-sided p of H0: the true mean is at least `loss`; the greatest (1 - level) / 2 whose interval holds it."""
        return np.where(loss <= self.estimate, 1.0, self._p(loss))

    def p_at_most(self, loss: float) -> Floats:
        return np.where(loss >= self.estimate, 1.0, self._p(loss))

    def _p(self, loss: float) -> Floats:
        """By the transformation or by the least half-width, whichever is larger; never above one half."""
        sign = np.where(loss > self.estimate, 1, -1)
        by_skewness = special.stdtr(self._degrees(sign), sign * self._transformed(loss))
        away = np.minimum(np.abs(loss - self.estimate), 1 - 1e-12)
        by_items = special.ndtr(-np.sqrt(self.n * away / (1 - away)))
        return np.asarray(np.minimum(0.5, np.maximum(by_skewness, by_items)))

    def _degrees(self, sign: ArrayLike) -> Floats:
        """Of a truth above the value (sign 1), or below it (-1): where the longer tail is, 2 n / (kurtosis - 1), the degrees of
        the chi-squared distribution that varies as much as the variance of such values does."""
        by_kurtosis = 2 * self.padded_n / np.maximum(self.kurtosis - 1, 1e-12)
        is_long = np.asarray(sign) * self.skewness > LEAST_SKEWNESS
        return np.where(is_long, np.minimum(by_kurtosis, self.padded_n - 1), self.padded_n - 1)

    def _transformed(self, loss: float) -> Floats:
        """Hall's transformation of the t statistic of H0: the true mean is `loss`; about a t."""
        standardized, root = (self.padded_mean - loss) / self.padded_deviation, np.sqrt(self.padded_n)
        g = self._skewed
        corrected = root * ((1 + g * standardized / 3) ** 3 - 1) / g + g / (6 * root)
        return np.where(np.abs(self.skewness) < LEAST_SKEWNESS, root * standardized, corrected)

    def _distance(self, quantile: Floats) -> Floats:
        """Between the mean and the loss at which the transformation is `quantile`."""
        g, root = self._skewed, np.sqrt(self.padded_n)
        corrected = self.padded_deviation * 3 / g * (np.cbrt(1 + g * (quantile - g / (6 * root)) / root) - 1)
        return np.where(np.abs(self.skewness) < LEAST_SKEWNESS, self.padded_deviation * quantile / root, corrected)

    @property
    def _skewed(self) -> Floats:
        """The skewness where the correction is more than rounding, else 1: it is divided by."""
        return np.where(np.abs(self.skewness) < LEAST_SKEWNESS, 1.0, self.skewness)


def graded_difference(reference: ArrayLike, candidate: ArrayLike, *, level: float = 0.95) -> Interval:
    """Mean of reference - candidate of scores in [0, 1] (partial credit, several samples per item), one pair for each item.

    Of equal differences, whatever n, no point: neither end is nearer to the value than z^2 / (n + z^2), Tango's half-width
    without discordant pairs. ValueError for scores outside [0, 1], or fewer than two items.
    """
    return MeanDifference.of(reference, candidate).interval(level)


def graded_evidence(
    reference: ArrayLike, candidate: ArrayLike, margin: float, *, level: float = 0.95, claim: Claim = "non_inferior"
) -> PairedEvidence:
    """`paired_evidence` of scores in [0, 1], one pair for each item: of several samples, their mean.

    b and c count the items on which the reference, or the candidate, does better. ValueError as `graded_difference`.
    """
    mean = MeanDifference.of(reference, candidate)
    better = np.sign(np.asarray(reference, dtype=np.float64) - np.asarray(candidate, dtype=np.float64))
    p_pass, p_fail = (float(p) for p in margin_p(mean, margin, claim))
    return PairedEvidence(
        b=int((better > 0).sum()), c=int((better < 0).sum()), drop=mean.interval(level), margin=margin, claim=claim,
        p_difference=min(1.0, 2 * float(min(mean.p_at_least(0), mean.p_at_most(0)))), p_pass=p_pass, p_fail=p_fail,
    )  # fmt: skip


def graded_minimum_detectable_effect(differences: ArrayLike, level: float = 0.95) -> float:
    """Smallest true mean difference that as many items of this spread would show; never below that of clean right-or-wrong
    items, for a spread of 0 does not mean that any loss would have been seen."""
    data = np.asarray(differences, dtype=np.float64)
    effect = detection_quantile(level, POWER) * float(data.std(ddof=1)) / math.sqrt(len(data)) if len(data) > 1 else 1.0
    return min(1.0, max(effect, minimum_detectable_effect(0, 0, len(data), level, POWER)))


def graded_items_needed(differences: ArrayLike, margin: float, level: float = 0.95, power: float = POWER) -> int:
    """Items of this spread so that a candidate without any true loss passes `margin` with chance `power`; never fewer than
    right-or-wrong items without a discordant pair need."""
    data = np.asarray(differences, dtype=np.float64)
    spread = float(data.std(ddof=1)) if len(data) > 1 else 1.0
    by_spread = math.ceil((detection_quantile(level, power) * spread / margin) ** 2)
    return max(by_spread, items_needed(margin, 0.0, power, level=level))


def mean_of_shares(shares: ArrayLike, level: float = 0.95) -> Interval:
    """Mean over items of each item's share of right samples, with a BCa interval over items; Wilson's where all are alike, for
    a bootstrap of equal values is a point."""
    data = np.asarray(shares, dtype=np.float64)
    if len(data) > 1 and np.ptp(data) > 0:
        return cluster_bootstrap_mean(data, np.arange(len(data)), level=level)
    mean = float(data.mean())
    around = wilson(round(float(data.sum())), len(data), level)
    return around.model_copy(update={"value": mean, "low": min(around.low, mean), "high": max(around.high, mean)})
