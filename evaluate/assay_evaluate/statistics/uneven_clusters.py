"""The mean difference over clusters that were sampled, where a few of them may hold all of the loss.

Student's t with a CR2 error takes cluster means for symmetric. Of a loss that sits in a fifth of the clusters, samples with few
of these look both good and certain: t then passes a lost margin in 5 to 10 %. Towards the side of the longer tail the mean is
therefore also compared with

- a Pearson type III distribution with the skewness that the clusters have, of a sample that lacks 4 s clusters (three at most)
  as far off as the farthest one, s that one's share of all squared deviations; the widening from normal to Student's quantile
  is applied to its normal score. `skewed` has the same idea for KL, with 6 s;
- the chance that a sample has none of the lossy clusters at all, (1 - 0.2) ^ (sum n_g)^2 / sum n_g^2. No p of a margin is
  smaller: below 17 clusters of equal size nothing can be claimed of such clusters;
- where sizes are very unequal, the chance of a mean as low as the one seen if a fifth of the clusters lose all of the margin,
  each five times of it, and the others nothing: large clusters may be missing among the lossy ones by chance, and small ones
  say little of it.

`benchmarks/verdicts/uneven/few_clusters.py` compares these with t, Hall's transformation, bootstrap-t, the null-imposed score
test and adjusted empirical likelihood (decision 229).

Sources: Bell & McCaffrey 2002 (Survey Methodology 28:169-181), CR2 and its degrees; Hall 1992 (JRSS B 54:221-228), why the mean
of a skewed sample needs a correction; Fay & Feuer 1997 (Stat. Med. 16:791-801), the added event of the largest weight.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

Floats = NDArray[np.float64]
LOSSY_SHARE = 0.2
"""Of clusters. Damage that so many of them have is excluded at the stated level; of rarer damage nothing is claimed."""
LACKING, MOST_LACKING = 4, 3
"""Clusters as far off as the farthest that a sample is taken to lack: so many times its share of all squared deviations, and at
most so many."""
UNEQUAL = 1.5
"""Times the mean size that the cluster of a random item has, from which on sizes are very unequal."""
MOST_POINTS = 128
"""Of the distribution of the items in lossy clusters."""
SMALLEST_ERROR = 1e-9
"""Of a mean over clusters; below it they do not differ."""
STEPS = 30
"""Of a bisection, between values in [-1, 1]."""


def effective_number(sizes: ArrayLike) -> float:
    """Clusters of equal size that would weigh a random item's cluster as these do: (sum n_g)^2 / sum n_g^2. 3.9 of the twelve
    repositories of SWE-bench Verified."""
    sizes_G = np.asarray(sizes, dtype=np.float64)
    return float(sizes_G.sum() ** 2 / (sizes_G**2).sum())


def chance_of_none(sizes: ArrayLike) -> float:
    """That no cluster of a sample is lossy, where `LOSSY_SHARE` of them are."""
    return float((1 - LOSSY_SHARE) ** effective_number(sizes))


def too_few_clusters(sizes: Sequence[int], level: float, single: str, plural: str) -> str:
    """Why nothing is claimed of clusters like these, in a clause: `12 repositories count as 3.9 of equal size, ...`."""
    needed = math.ceil(math.log((1 - level) / 2) / math.log(1 - LOSSY_SHARE))
    number = len(sizes)
    counted = f"{number} {single} counts" if number == 1 else f"{number} {plural} count"
    none = f"{100 * chance_of_none(sizes):.0f} %"
    return (
        f"{counted} as {effective_number(sizes):.1f} of equal size: damage that one {single} in five has is in none of them "
        f"with a chance of {none}, so nothing is claimed of other {plural} ({needed} would allow it; "
        "`estimand: these_clusters` claims it of these)"
    )


@dataclass(frozen=True)
class UnevenMean:
    """Mean of item differences in [-1, 1] over clusters; arrays for many samples of clusters of the same sizes."""

    value: Floats
    error: Floats
    """CR2 standard error."""
    third: Floats
    """Third central moment of the mean, from the residuals of CR2."""
    highest: Floats
    """What the farthest cluster above the mean adds to it."""
    lowest: Floats
    """The same below, negative."""
    variance_by_item: Floats | None
    """Of the mean with items taken for independent, two items more counted. None: the last rule is left out."""
    sizes: tuple[int, ...]
    degrees: float
    lacking: int = LACKING

    @classmethod
    def of_totals(
        cls, totals_G: ArrayLike, squares: ArrayLike, sizes: tuple[int, ...], factors_G: Floats, degrees: float
    ) -> Self:  # fmt: skip
        """totals: sums of the differences by cluster [..., clusters]. squares: of all squared differences [...]. factors:
        CR2's; degrees: Bell and McCaffrey's."""
        totals, sizes_G = np.asarray(totals_G, dtype=np.float64), np.asarray(sizes, dtype=np.float64)
        n = sizes_G.sum()
        value = totals.sum(axis=-1) / n
        apart = (totals - value[..., None] * sizes_G) * np.sqrt(factors_G) / n
        padded = n + 2
        by_item = ((np.asarray(squares, dtype=np.float64) + 1) / padded - (value * n / padded) ** 2) / padded
        return cls(
            value, np.sqrt((apart**2).sum(axis=-1)), (apart**3).sum(axis=-1), apart.max(axis=-1), apart.min(axis=-1), by_item,
            sizes, degrees,
        )  # fmt: skip

    def p_at_least(self, loss: float) -> Floats:
        """One-sided p of H0: the true mean over such clusters is at least `loss`."""
        away = loss - self.value
        p = np.maximum(self._student(away), np.where(self.third > 0, self._skewed(away, self.highest), 0.0))
        p = np.maximum(p, chance_of_none(self.sizes))
        if self._is_unequal and loss > 0:
            p = np.maximum(p, self._concentrated(np.broadcast_to(loss, np.shape(self.value))))
        return np.where(away > 0, np.minimum(p, 0.5), self._student(away))

    def p_at_most(self, loss: float) -> Floats:
        """One-sided p of H0: the true mean over such clusters is at most `loss`."""
        away = self.value - loss
        p = np.maximum(self._student(away), np.where(self.third < 0, self._skewed(away, -self.lowest), 0.0))
        return np.where(away > 0, np.minimum(p, 0.5), self._student(away))

    def ends(self, level: ArrayLike) -> tuple[Floats, Floats]:
        """Of the interval; the upper one lies below a loss exactly where its p lies below (1 - level) / 2. 1 where nothing can
        be claimed of such clusters."""
        tail = np.broadcast_to((1 - np.asarray(level, dtype=np.float64)) / 2, np.shape(self.value))
        quantile = -special.stdtrit(self.degrees, tail)
        half = np.where(self.error > SMALLEST_ERROR, quantile * self.error, 0.0)
        above = np.maximum(half, np.where(self.third > 0, self._skewed_end(quantile, self.highest), 0.0))
        below = np.maximum(half, np.where(self.third < 0, self._skewed_end(quantile, -self.lowest), 0.0))
        high = np.where(tail <= chance_of_none(self.sizes), 1.0, self.value + above)
        if self._is_unequal:
            high = np.maximum(high, self._concentrated_end(tail))
        return np.asarray(self.value - below), np.asarray(high)

    @property
    def _is_unequal(self) -> bool:
        return self.variance_by_item is not None and len(self.sizes) > UNEQUAL * effective_number(self.sizes)

    def _student(self, away: Floats) -> Floats:
        known = self.error > SMALLEST_ERROR
        p = special.stdtr(self.degrees, -away / np.where(known, self.error, 1.0))
        return np.asarray(np.where(known, p, np.where(away > 0, 0.0, 1.0)))

    def _lacking(self, farthest: Floats) -> tuple[Floats, Floats, Floats]:
        """(what the clusters add that the sample lacks; variance and third moment with them)"""
        variance = np.maximum(self.error**2, SMALLEST_ERROR**2)
        lacking = np.minimum(self.lacking * farthest**2 / variance, MOST_LACKING) * farthest
        return lacking, variance + lacking**2, np.abs(self.third) + lacking**3

    def _skewed(self, away: Floats, farthest: Floats) -> Floats:
        lacking, variance, third = self._lacking(farthest)
        shape = _shape(variance, third)
        from_0 = np.maximum(shape + np.sqrt(shape / variance) * (away - lacking), 0.0)
        p = special.stdtr(self.degrees, special.ndtri(special.gammaincc(shape, from_0)))
        return np.where(self.error > SMALLEST_ERROR, p, 0.0)

    def _skewed_end(self, quantile: Floats, farthest: Floats) -> Floats:
        """Distance of the mean at which `_skewed` is Student's tail beyond `quantile`."""
        lacking, variance, third = self._lacking(farthest)
        shape = _shape(variance, third)
        distance = lacking + (special.gammainccinv(shape, special.ndtr(-quantile)) - shape) * np.sqrt(variance / shape)
        return np.where(self.error > SMALLEST_ERROR, distance, 0.0)

    def _concentrated(self, loss: Floats) -> Floats:
        """Chance of a mean as low as the one seen if lossy clusters hold all of `loss`."""
        assert self.variance_by_item is not None, "`_is_unequal` asks"
        weight_K, chance_K = _items_in_lossy_clusters(self.sizes)
        apart = (self.value[..., None] - loss[..., None] / LOSSY_SHARE * weight_K) / np.sqrt(self.variance_by_item)[..., None]
        return np.asarray(special.ndtr(apart) @ chance_K)

    def _concentrated_end(self, tail: Floats) -> Floats:
        """Largest loss, 1 at most, whose `_concentrated` is no less than `tail`."""
        low, high = np.zeros_like(self.value), np.ones_like(self.value)
        is_open = self._concentrated(high) >= tail
        for _ in range(STEPS):
            middle = (low + high) / 2
            inside = self._concentrated(middle) >= tail
            low, high = np.where(inside, middle, low), np.where(inside, high, middle)
        return np.where(is_open, 1.0, high)


def _shape(variance: Floats, third: Floats) -> Floats:
    """Of a gamma distribution with these central moments; of hardly any skewness that of a normal one."""
    return np.asarray(np.minimum(4 * variance**3 / np.maximum(third, 1e-150) ** 2, 1e8))


@functools.lru_cache(maxsize=64)
def _items_in_lossy_clusters(sizes: tuple[int, ...]) -> tuple[Floats, Floats]:
    """(share of the items that lie in lossy clusters, its chance), shares rounded down to `MOST_POINTS` of them."""
    chance_N = np.zeros(sum(sizes) + 1)
    chance_N[0] = 1.0
    for size in sizes:
        chance_N[size:], chance_N[:size] = (
            (1 - LOSSY_SHARE) * chance_N[size:] + LOSSY_SHARE * chance_N[: len(chance_N) - size],
            (1 - LOSSY_SHARE) * chance_N[:size],
        )
    points = np.arange(len(chance_N)) * MOST_POINTS // len(chance_N)
    first = np.unique(points, return_index=True)[1]
    return first / sum(sizes), np.add.reduceat(chance_N, first)
