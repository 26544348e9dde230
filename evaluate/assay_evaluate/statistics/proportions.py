"""One proportion, and the difference of two independent ones.

Sources: Wilson 1927; Clopper & Pearson 1934; Newcombe 1998 (Stat. Med. 17:873-890, method 10).
"""

from __future__ import annotations

import functools
import math

from scipy import stats

from assay.records.base import Interval


def normal_quantile(level: float) -> float:
    """z such that a two-sided interval at `level` is +-z standard errors wide: 1.96 for 0.95."""
    return float(stats.norm.ppf(0.5 + level / 2))


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
