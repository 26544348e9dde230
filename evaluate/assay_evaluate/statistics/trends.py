"""Does an error jump with slot, position or concurrency? One change point, with a corrected rank test.

Overflows and stale cache rows show *where* they begin: above a slot, past a position, beyond a number of requests in flight
(vLLM PR #35275: only above 47,935 cache slots). A slope is noise; a step is structure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

MOST_SPLITS = 48
MIN_SIDE = 3
P_VALUE = 1e-4
"""After Bonferroni over the splits tried."""
STEP = 0.01
"""Nats: a smaller step is not told apart from the slow growth of rounding with length."""
FACTOR = 3.0
"""The error above the change point must be this many times the one below as well."""


@dataclass(frozen=True)
class BestSplit:
    """The best split of values by x: `above` is the mean where x >= threshold, `below` where it is less."""

    threshold: float
    below: float
    above: float
    p_value: float
    rho: float
    """Spearman's correlation over all."""

    @property
    def is_structural(self) -> bool:
        """A jump that neither chance nor slow growth makes."""
        return self.p_value < P_VALUE and self.above > FACTOR * self.below + STEP

    def text(self, what: str) -> str:
        return f"{self.above:.3g} nats from {what} {self.threshold:g} on, {self.below:.3g} before (p {self.p_value:.1g})"


def find_step(xs: Sequence[float], values: Sequence[float]) -> BestSplit | None:
    """The split of `values` (errors, >= 0) by `xs` with the clearest rise. None: too few values, or one x only."""
    x, value = np.asarray(xs, float), np.asarray(values, float)
    places = np.unique(x)[1:]
    if len(places) > MOST_SPLITS:
        places = np.unique(np.quantile(x, np.linspace(0, 1, MOST_SPLITS + 2)[1:-1]))
    splits = [t for t in places if (x >= t).sum() >= MIN_SIDE and (x < t).sum() >= MIN_SIDE]
    if not splits:
        return None
    if np.ptp(value) == 0:
        return BestSplit(float(splits[0]), float(value.mean()), float(value.mean()), 1.0, 0.0)
    tested = [(stats.mannwhitneyu(value[x >= t], value[x < t], alternative="greater").pvalue, t) for t in splits]
    least, threshold = min(tested)
    is_above = x >= threshold
    return BestSplit(
        threshold=float(threshold),
        below=float(value[~is_above].mean()),
        above=float(value[is_above].mean()),
        p_value=min(1.0, float(least) * len(splits)),
        rho=float(stats.spearmanr(x, value).statistic),
    )
