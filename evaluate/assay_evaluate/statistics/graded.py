"""Scores between 0 and 1 on paired items: partial credit, or the mean of several samples of an item.

The same questions as `paired`, `decisions` and `power` answer for right or wrong. A p value here is the level at which the
interval just reaches the margin, so that p values, intervals and verdicts never disagree.

Sources: Efron & Tibshirani 1993, ch. 14 and 15.6 (tests from BCa intervals); Miller 2024 (arXiv 2411.00640, sections 3 to 5).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import ArrayLike

from assay.records.base import Interval
from assay_evaluate.statistics.clustered import Floats, bca_interval, checked, cluster_bootstrap_mean, resampled_ratios
from assay_evaluate.statistics.decisions import Claim, PairedEvidence
from assay_evaluate.statistics.power import POWER, items_needed, minimum_detectable_effect
from assay_evaluate.statistics.proportions import normal_quantile, wilson

NUM_RESAMPLES = 2000
SMALLEST_P = 1e-4
"""p values below it are not looked for: 2,000 resamples do not tell them apart."""


@dataclass(frozen=True)
class _PairedBootstrap:
    """Differences reference - candidate of scores in [0, 1], resampled by cluster: intervals at any level."""

    estimate: float
    resampled: Floats
    left_out: Floats
    n: int
    """Clusters."""

    @classmethod
    def of(cls, reference: ArrayLike, candidate: ArrayLike, clusters: ArrayLike | None, seed: int) -> Self:
        ours, theirs = np.asarray(reference, dtype=np.float64), np.asarray(candidate, dtype=np.float64)
        if ours.shape != theirs.shape:
            raise ValueError(f"reference {ours.shape} and candidate {theirs.shape} must be paired")
        for scores in (ours, theirs):
            if ((scores < 0) | (scores > 1)).any():
                raise ValueError("scores must lie in [0, 1]")
        data, index, n = checked(ours - theirs, np.arange(len(ours)) if clusters is None else clusters)
        sums: Floats = np.bincount(index, weights=data).astype(np.float64)
        counts: Floats = np.bincount(index).astype(np.float64)
        resampled = resampled_ratios(sums, counts, NUM_RESAMPLES, np.random.default_rng(seed))
        left_out = (sums.sum() - sums) / (counts.sum() - counts)
        return cls(float(sums.sum() / counts.sum()), resampled, left_out, n)

    def interval(self, level: float) -> Interval:
        """BCa; neither end is nearer to the value than z^2 / (n + z^2), Tango's half-width without discordant pairs."""
        least = normal_quantile(level) ** 2 / (self.n + normal_quantile(level) ** 2)
        low = high = self.estimate
        if np.ptp(self.left_out) > 0:
            low, high = bca_interval(self.resampled, self.estimate, self.left_out, level)
        low, high = min(low, self.estimate - least), max(high, self.estimate + least)
        return Interval(value=self.estimate, low=max(low, -1.0), high=min(high, 1.0), n=self.n, level=level)

    def p_of(self, is_compatible: Callable[[Interval], bool]) -> float:
        """One-sided p of a hypothesis: the greatest (1 - level) / 2 whose interval does not exclude it; 1 from 0.5 on."""
        low, high = SMALLEST_P, 0.499
        if is_compatible(self.interval(1 - 2 * high)):
            return 1.0
        if not is_compatible(self.interval(1 - 2 * low)):
            return low
        while high / low > 1.001:
            middle = math.sqrt(low * high)
            low, high = (middle, high) if is_compatible(self.interval(1 - 2 * middle)) else (low, middle)
        return high


def graded_difference(
    reference: ArrayLike, candidate: ArrayLike, clusters: ArrayLike | None = None, *, level: float = 0.95, seed: int = 0
) -> Interval:
    """`paired_mean_difference` of scores in [0, 1] (partial credit, several samples per item), safe to hold against a margin.

    A bootstrap of equal differences is a point, whatever n: neither end is therefore nearer to the value than
    z^2 / (n + z^2), Tango's half-width without discordant pairs; n counts clusters. ValueError for scores outside [0, 1].
    """
    return _PairedBootstrap.of(reference, candidate, clusters, seed).interval(level)


def graded_evidence(
    reference: ArrayLike, candidate: ArrayLike, margin: float, *, level: float = 0.95, claim: Claim = "non_inferior"
) -> PairedEvidence:
    """`paired_evidence` of scores in [0, 1], one pair for each item: of several samples, their mean.

    b and c count the items on which the reference, or the candidate, does better; p values are 0.0001 at least. ValueError as
    `graded_difference`.
    """
    ours, theirs = np.asarray(reference, dtype=np.float64), np.asarray(candidate, dtype=np.float64)
    bootstrap = _PairedBootstrap.of(ours, theirs, None, 0)
    at_least = bootstrap.p_of(lambda found: found.high >= margin)
    at_most = bootstrap.p_of(lambda found: found.low <= margin)
    no_loss, no_gain = bootstrap.p_of(lambda found: found.low <= 0), bootstrap.p_of(lambda found: found.high >= 0)
    if claim == "equivalent":
        p_pass = max(at_least, bootstrap.p_of(lambda found: found.low <= -margin))
        p_fail = min(at_most, bootstrap.p_of(lambda found: found.high >= -margin))
    else:
        p_pass, p_fail = at_least, at_most
    return PairedEvidence(
        b=int((ours > theirs).sum()), c=int((ours < theirs).sum()), drop=bootstrap.interval(level), margin=margin, claim=claim,
        p_difference=min(1.0, 2 * min(no_loss, no_gain)), p_pass=p_pass, p_fail=p_fail,
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
