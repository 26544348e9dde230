"""One proportion, the difference of two independent ones, and several tasks as one number.

The interval of a weighted sum of independent estimates is MOVER's, the method of variance estimates recovery: the upper limit
of sum(w d) lies sqrt(sum(w^2 (u - d)^2)) above it, u being the upper limits of the parts. Each part keeps what its own interval
takes care of (few discordant pairs, clusters, several replies to an item), so that whole and parts never contradict each other.

Sources: Wilson 1927; Clopper & Pearson 1934; Newcombe 1998 (Stat. Med. 17:873-890, method 10); Zou & Donner 2008 (Stat. Med.
27:1693-1702); Zou, Huang & Zhang 2009 (Comput. Stat. Data Anal. 53:1080-1085).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from assay.records.base import Interval


def normal_quantile(level: float) -> float:
    """z such that a two-sided interval at `level` is +-z standard errors wide: 1.96 for 0.95."""
    return float(stats.norm.ppf(0.5 + level / 2))


def detection_quantile(level: float, power: float) -> float:
    """Standard errors off a limit at which the truth lies beyond it, by an interval at `level`, with chance `power`."""
    return normal_quantile(level) + normal_quantile(2 * power - 1)


def wilson(successes: int, n: int, level: float = 0.95) -> Interval:
    """Wilson's score interval of a proportion. Unlike Wald's it is right at 0 and at n. ValueError if n is 0."""
    return _binomial_interval(successes, n, level, "wilson")


def clopper_pearson(successes: int, n: int, level: float = 0.95) -> Interval:
    """The exact interval: covers at least `level` for every true rate. For rare events (0 of n: high ~ 3.7 / n)."""
    return _binomial_interval(successes, n, level, "exact")


@functools.lru_cache(maxsize=4096)  # a report and its cards state the same counts many times
def _binomial_interval(successes: int, n: int, level: float, method: str) -> Interval:
    if n < 1 or not 0 <= successes <= n:
        raise ValueError(f"{successes} successes of {n}: a proportion needs n >= 1 and 0 <= successes <= n")
    interval = stats.binomtest(successes, n).proportion_ci(level, method)
    return Interval(
        value=successes / n, low=float(interval.low), high=float(interval.high), n=n, level=level,
        coverage="at_least" if method == "exact" else "nominal",
    )  # fmt: skip


def independent_difference(successes_a: int, n_a: int, successes_b: int, n_b: int, level: float = 0.95) -> Interval:
    """Newcombe's hybrid score interval of p_a - p_b for two independent samples; `n` is the smaller one."""
    a, b = wilson(successes_a, n_a, level), wilson(successes_b, n_b, level)
    return difference_of(a, b)


def difference_of(a: Interval, b: Interval) -> Interval:
    """Of a - b from intervals of two independent estimates at one level (MOVER; Zou & Donner 2008, Stat. Med. 27:1693-1702);
    with Wilson's it is Newcombe's. `n` is the smaller one."""
    value = a.value - b.value
    low = value - math.hypot(a.value - a.low, b.high - b.value)
    high = value + math.hypot(a.high - a.value, b.value - b.low)
    return Interval(value=value, low=low, high=high, n=min(a.n, b.n), level=a.level)


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
    weighted = list(zip(parts, weights, strict=True))
    value = sum(weight * part.value for part, weight in weighted)
    below = float(half_width([weight * (part.value - part.low) for part, weight in weighted]))
    above = float(half_width([weight * (part.high - part.value) for part, weight in weighted]))
    return Interval(value=value, low=value - below, high=value + above, n=len(weighted), level=parts[0].level)


def half_width(parts: Sequence[ArrayLike]) -> NDArray[np.float64]:
    """Of a sum, from those of its parts, each times its weight; arrays for many sums."""
    return np.asarray(np.sqrt(np.square(np.asarray(parts, dtype=np.float64)).sum(axis=0)))


def p_at_least(interval: Interval, limit: float) -> float:
    """One-sided p of H0: the truth is at least `limit`, at the standard error that the upper end implies.

    Below (1 - level) / 2 exactly where that end is below `limit`.
    """
    return _tail(limit - interval.value, interval.high - interval.value, interval.level)


def p_at_most(interval: Interval, limit: float) -> float:
    """One-sided p of H0: the truth is at most `limit`."""
    return _tail(interval.value - limit, interval.value - interval.low, interval.level)


def _tail(distance: float, half_width: float, level: float) -> float:
    if half_width <= 0:
        return 0.0 if distance > 0 else 1.0
    return float(stats.norm.sf(distance / half_width * normal_quantile(level)))
