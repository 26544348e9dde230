"""Intervals and tests for scores: pure functions over counts and arrays, no records, no state.

Differences are always *reference minus candidate*: a positive number is a loss. `b` counts the items that only the
reference gets right, `c` those that only the candidate gets right, `n` all paired items. Every interval is two-sided at
`level`; a one-sided statement made from one end of it therefore has an error of at most (1 - level) / 2.

Sources: Wilson 1927; Clopper & Pearson 1934; Newcombe 1998 (Stat. Med. 17:873-890, method 10); Tango 1998 (Stat. Med.
17:891-908); Fagerland, Lydersen & Laake 2013 (mid-p McNemar); Efron 1987 (BCa); Miller 2024 (arXiv 2411.00640, clusters).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import optimize, stats

from assay.records import Interval

POWER = 0.8
"""Chance of seeing an effect of the size called detectable; the field's convention."""


def normal_quantile(level: float) -> float:
    """z such that a two-sided interval at `level` is +-z standard errors wide: 1.96 for 0.95."""
    return float(stats.norm.ppf(0.5 + level / 2))


# ------------------------------------------------------------------------------------------------ one proportion
def wilson(successes: int, n: int, level: float = 0.95) -> Interval:
    """Wilson's score interval of a proportion. Unlike Wald's it is right at 0 and at n. ValueError if n is 0."""
    return _binomial_interval(successes, n, level, "wilson")


def clopper_pearson(successes: int, n: int, level: float = 0.95) -> Interval:
    """The exact interval: covers at least `level` for every true rate. For rare events (0 of n: high ~ 3.7 / n)."""
    return _binomial_interval(successes, n, level, "exact")


def _binomial_interval(successes: int, n: int, level: float, method: str) -> Interval:
    if n < 1 or not 0 <= successes <= n:
        raise ValueError(f"{successes} successes of {n}: a proportion needs n >= 1 and 0 <= successes <= n")
    interval = stats.binomtest(successes, n).proportion_ci(level, method)
    return Interval(value=successes / n, low=float(interval.low), high=float(interval.high), n=n, level=level)


# ------------------------------------------------------------------------------------------------ two proportions, paired
def discordant_counts(reference: Sequence[bool], candidate: Sequence[bool]) -> tuple[int, int]:
    """(b, c) of paired answers: right in the reference only, right in the candidate only."""
    pairs = list(zip(reference, candidate, strict=True))
    return sum(r and not k for r, k in pairs), sum(k and not r for r, k in pairs)


def paired_difference(b: int, c: int, n: int, level: float = 0.95) -> Interval:
    """Tango's score interval of the difference of two paired proportions; `value` is (b - c) / n.

    It is the set of differences that the score test does not reject, with the nuisance parameter at its restricted maximum
    likelihood. Without any discordant pair it is +-z^2 / (n + z^2), where Wald's collapses to a point: ten items never
    support a margin of five points. ValueError if the counts do not fit.
    """
    _check_pairs(b, c, n)
    z = normal_quantile(level)
    value = (b - c) / n
    # The statistic falls strictly with the hypothetical difference: z at the lower end, -z at the upper.
    edge = 1 - 1e-12
    low = -1.0 if b - c == -n else _root(lambda d: _tango_statistic(d, b, c, n) - z, -edge, value)
    high = 1.0 if b - c == n else _root(lambda d: _tango_statistic(d, b, c, n) + z, value, edge)
    return Interval(value=value, low=low, high=high, n=n, level=level)


def _root(function: Callable[[float], float], low: float, high: float) -> float:
    """Zero of a falling function between `low` and `high`; the ends when it has none inside (one pair, say)."""
    if function(low) <= 0:
        return low
    if function(high) >= 0:
        return high
    return float(optimize.brentq(function, low, high, xtol=1e-12))


def _tango_statistic(difference: float, b: int, c: int, n: int) -> float:
    """Score statistic of H0: p_b - p_c = difference (Tango 1998, eq. 18-22)."""
    linear = -b - c + (2 * n - b + c) * difference
    constant = -c * difference * (1 - difference)
    p_c = (math.sqrt(max(linear * linear - 8 * n * constant, 0.0)) - linear) / (4 * n)
    variance = n * (2 * p_c + difference * (1 - difference))
    score = b - c - n * difference
    if variance <= 0:
        return 0.0 if score == 0 else math.copysign(math.inf, score)
    return score / math.sqrt(variance)


def mcnemar_midp(b: int, c: int) -> float:
    """Two-sided mid-p value of the exact McNemar test: is one side right more often? 1.0 without discordant pairs."""
    if b < 0 or c < 0:
        raise ValueError(f"discordant counts {b} and {c} must not be negative")
    if b == c:
        return 1.0 if b == 0 else float(1 - stats.binom.pmf(b, b + c, 0.5))
    smaller = min(b, c)
    return float(2 * stats.binom.cdf(smaller, b + c, 0.5) - stats.binom.pmf(smaller, b + c, 0.5))


def minimum_detectable_effect(b: int, c: int, n: int, level: float = 0.95, power: float = POWER) -> float:
    """Smallest true loss that n pairs would show (`paired_difference` clear of 0) with chance `power`.

    Exact, given the seen discordant rate D = (b + c) / n. A loss d needs a discordant rate of at least d, so where D is
    smaller (above all, D = 0) it is taken to be d: ten clean pairs do not mean that any loss would have been seen. 1.0 if
    not even the loss of every item would show.
    """
    _check_pairs(b, c, n)
    rate = (b + c) / n
    low, high = 0.0, 1.0
    while high - low > 1e-5:
        middle = (low + high) / 2
        enough = detection_power(middle, max(rate, middle), n, level) >= power
        low, high = (low, middle) if enough else (middle, high)
    return high


def detection_power(loss: float, discordant_rate: float, n: int, level: float = 0.95) -> float:
    """Chance that the interval of n pairs lies above 0 when `loss` is true; the score test at 0 is McNemar's, by counts."""
    if not 0 <= loss <= discordant_rate <= 1:
        raise ValueError(f"loss {loss} and discordant rate {discordant_rate}: need 0 <= loss <= discordant rate <= 1")
    if discordant_rate == 0:
        return 0.0
    discordant = np.arange(n + 1)
    # (b - c) / sqrt(b + c) > z, with b + c = discordant
    enough = np.floor((discordant + normal_quantile(level) * np.sqrt(discordant)) / 2) + 1
    share = (discordant_rate + loss) / (2 * discordant_rate)
    chance = stats.binom.pmf(discordant, n, discordant_rate) * stats.binom.sf(enough - 1, discordant, share)
    return float(chance.sum())


def items_for_margin(b: int, c: int, n: int, margin: float, level: float = 0.95, power: float = POWER) -> int:
    """Paired items needed so that a candidate without any true loss passes a margin with chance `power`.

    With the discordant rate seen so far; never fewer than pass with no discordant pair at all (z^2 (1 - margin) / margin).
    """
    _check_pairs(b, c, n)
    if not 0 < margin < 1:
        raise ValueError(f"margin {margin} must lie between 0 and 1")
    z = normal_quantile(level)
    by_power = (z + float(stats.norm.ppf(power))) ** 2 * ((b + c) / n) / margin**2
    at_zero = z**2 * (1 - margin) / margin
    return max(math.ceil(by_power), math.floor(at_zero) + 1)


def _check_pairs(b: int, c: int, n: int) -> None:
    if n < 1 or b < 0 or c < 0 or b + c > n:
        raise ValueError(f"discordant pairs {b} and {c} of {n}: need n >= 1, b >= 0, c >= 0, b + c <= n")


# ------------------------------------------------------------------------------------------------ two proportions, unpaired
def independent_difference(successes_a: int, n_a: int, successes_b: int, n_b: int, level: float = 0.95) -> Interval:
    """Newcombe's hybrid score interval of p_a - p_b for two independent samples; `n` is the smaller one."""
    a, b = wilson(successes_a, n_a, level), wilson(successes_b, n_b, level)
    value = a.value - b.value
    low = value - math.hypot(a.value - a.low, b.high - b.value)
    high = value + math.hypot(a.high - a.value, b.value - b.low)
    return Interval(value=value, low=low, high=high, n=min(n_a, n_b), level=level)


# ------------------------------------------------------------------------------------------------ means
def cluster_bootstrap_mean(
    values: ArrayLike, clusters: ArrayLike, *, level: float = 0.95, seed: int = 0, num_resamples: int = 2000
) -> Interval:
    """Mean of all `values` with a BCa bootstrap interval that resamples whole clusters (documents, tasks).

    Values of one cluster rise and fall together; an interval that took them for independent would be too narrow. `n` is the
    number of clusters, for they are what is sampled. If all cluster means are equal the interval is that point; a single
    cluster allows no interval: ValueError, as do non-finite values.
    """
    data: NDArray[np.float64] = np.asarray(values, dtype=np.float64)
    labels = np.asarray(clusters)
    if data.ndim != 1 or data.shape != labels.shape:
        raise ValueError(f"values {data.shape} and clusters {labels.shape} must be 1-D and of equal length")
    if not np.isfinite(data).all():
        raise ValueError("values must be finite; count and report the others apart")
    names, index = np.unique(labels, return_inverse=True)
    if len(names) < 2:
        raise ValueError(f"{len(names)} cluster: an interval needs at least two")
    sums: NDArray[np.float64] = np.bincount(index, weights=data).astype(np.float64)
    counts = np.bincount(index).astype(np.float64)
    mean = float(data.mean())
    if np.ptp(sums / counts) == 0:
        return Interval(value=mean, low=mean, high=mean, n=len(names), level=level)
    resampled = _resampled_ratios(sums, counts, num_resamples, np.random.default_rng(seed))
    left_out = (sums.sum() - sums) / (counts.sum() - counts)
    low, high = np.quantile(resampled, _bca_probabilities(resampled, sums.sum() / counts.sum(), left_out, level))
    return Interval(value=mean, low=float(low), high=float(high), n=len(names), level=level)


def _resampled_ratios(
    sums: NDArray[np.float64], counts: NDArray[np.float64], num_resamples: int, rng: np.random.Generator
) -> NDArray[np.float64]:
    """Means over clusters drawn with replacement; drawn in pieces, so that memory stays small for many clusters."""
    at_once = max(1, 2_000_000 // len(sums))
    pieces = []
    for start in range(0, num_resamples, at_once):
        drawn = rng.integers(0, len(sums), (min(at_once, num_resamples - start), len(sums)))
        pieces.append(sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1))
    return np.concatenate(pieces)


def _bca_probabilities(
    resampled: NDArray[np.float64], estimate: float, left_out: NDArray[np.float64], level: float
) -> list[float]:
    """The two quantiles of the bootstrap distribution that bound a BCa interval (Efron 1987)."""
    tails = [0.5 - level / 2, 0.5 + level / 2]
    below = float((resampled < estimate).mean() + (resampled == estimate).mean() / 2)
    if not 0 < below < 1:  # every resample on one side: no bias correction exists, the plain percentiles remain
        return tails
    bias = float(stats.norm.ppf(below))
    deviations = left_out.mean() - left_out
    acceleration = float((deviations**3).sum() / (6 * (deviations**2).sum() ** 1.5))
    shifted = [bias + float(stats.norm.ppf(tail)) for tail in tails]
    return [float(stats.norm.cdf(bias + z / (1 - acceleration * z))) for z in shifted]
