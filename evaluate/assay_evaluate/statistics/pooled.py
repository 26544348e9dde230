"""Several tasks as one number: the interval of a weighted sum of independent estimates, each with an interval of its own.

MOVER, the method of variance estimates recovery: the upper limit of sum(w d) lies sqrt(sum(w^2 (u - d)^2)) above it, u being
the upper limits of the parts. Each part keeps what its own interval takes care of (few discordant pairs, clusters, several
replies to an item), so that whole and parts never contradict each other.

Sources: Zou & Donner 2008 (Stat. Med. 27:1693-1702); Zou, Huang & Zhang 2009 (Comput. Stat. Data Anal. 53:1080-1085).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from assay.records.base import Interval
from assay_evaluate.statistics.proportions import normal_quantile


def weighted_sum(parts: Sequence[Interval], weights: Sequence[float]) -> Interval:
    """Interval of sum(weight x part) over independent parts, at their common level; n counts the parts.

    ValueError without parts, for parts of different levels, or a weight that is not above 0.
    """
    if not parts:
        raise ValueError("no part: a weighted sum needs at least one")
    if len({part.level for part in parts}) > 1:
        raise ValueError(f"parts of levels {sorted({part.level for part in parts})} have no common interval")
    if any(weight <= 0 for weight in weights):
        raise ValueError(f"weights {list(weights)} must be above 0")
    both = list(zip(parts, weights, strict=True))
    value = sum(weight * part.value for part, weight in both)
    below = float(half_width([weight * (part.value - part.low) for part, weight in both]))
    above = float(half_width([weight * (part.high - part.value) for part, weight in both]))
    return Interval(value=value, low=value - below, high=value + above, n=len(both), level=parts[0].level)


def half_width(parts: Sequence[ArrayLike]) -> NDArray[np.float64]:
    """Of a sum, from those of its parts, each times its weight; arrays for many sums."""
    return np.asarray(np.sqrt(np.square(np.asarray(parts, dtype=np.float64)).sum(axis=0)))


def p_at_least(found: Interval, limit: float) -> float:
    """One-sided p of H0: the truth is at least `limit`, at the standard error that the upper end implies.

    Below (1 - level) / 2 exactly where that end is below `limit`.
    """
    return _tail(limit - found.value, found.high - found.value, found.level)


def p_at_most(found: Interval, limit: float) -> float:
    """One-sided p of H0: the truth is at most `limit`."""
    return _tail(found.value - limit, found.value - found.low, found.level)


def _tail(distance: float, half_width: float, level: float) -> float:
    if half_width <= 0:
        return 0.0 if distance > 0 else 1.0
    return float(stats.norm.sf(distance / half_width * normal_quantile(level)))
