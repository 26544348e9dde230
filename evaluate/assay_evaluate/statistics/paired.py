"""Two proportions on the same items: the difference, the test of no difference, and where the answers moved.

Sources: Tango 1998 (Stat. Med. 17:891-908); Fagerland, Lydersen & Laake 2013 (BMC Med. Res. Methodol. 13:91, mid-p McNemar);
Dutta et al. 2024 (arXiv 2407.09141, flips).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import optimize, stats

from assay.records.base import Interval
from assay_evaluate.statistics.proportions import normal_quantile


class Flips(NamedTuple):
    """Where the answers of `n` paired items moved. Net loss and flips are different things: 40 each way is a loss of 0."""

    right_to_wrong: int
    wrong_to_right: int
    wrong_to_other_wrong: int
    """Both wrong, with different answers. An answer that could not be read (None) differs from every answer that could."""
    n: int

    @property
    def rate(self) -> float:
        """Share of items whose correctness changed, in either direction (Dutta et al.)."""
        return (self.right_to_wrong + self.wrong_to_right) / self.n


def count_flips(
    reference: Sequence[bool],
    candidate: Sequence[bool],
    reference_answers: Sequence[str | None],
    candidate_answers: Sequence[str | None],
) -> Flips:
    """Flips of paired items, from correctness and the extracted answers. ValueError without items or for unequal lengths."""
    items = list(zip(reference, candidate, reference_answers, candidate_answers, strict=True))
    if not items:
        raise ValueError("no item: flips need at least one pair")
    b, c = discordant_counts(reference, candidate)
    other_wrong = sum(not r and not k and before != after for r, k, before, after in items)
    return Flips(b, c, other_wrong, len(items))


def discordant_counts(reference: Sequence[bool], candidate: Sequence[bool]) -> tuple[int, int]:
    """(b, c) of paired answers: right in the reference only, right in the candidate only."""
    pairs = list(zip(reference, candidate, strict=True))
    return sum(r and not k for r, k in pairs), sum(k and not r for r, k in pairs)


def paired_difference(b: int, c: int, n: int, level: float = 0.95) -> Interval:
    """Tango's score interval of the difference of two paired proportions; `value` is (b - c) / n.

    It is the set of differences that the score test does not reject, with the nuisance parameter at its restricted maximum
    likelihood. Without any discordant pair it is +-z^2 / (n + z^2), where Wald's collapses to a point: ten items never
    support a margin of five points. Its coverage, and why no interval covers exactly 95 % with few discordant pairs, is in
    docs/decisions/015-paired-differences-use-tangos-interval.md. ValueError if the counts do not fit.
    """
    check_pairs(b, c, n)
    z = normal_quantile(level)
    value = (b - c) / n
    # The statistic falls strictly with the hypothetical difference: z at the lower end, -z at the upper.
    edge = 1 - 1e-12
    low = -1.0 if b - c == -n else _root(lambda d: _statistic(d, b, c, n) - z, -edge, value)
    high = 1.0 if b - c == n else _root(lambda d: _statistic(d, b, c, n) + z, value, edge)
    return Interval(value=value, low=low, high=high, n=n, level=level)


def _root(function: Callable[[float], float], low: float, high: float) -> float:
    """Zero of a falling function between `low` and `high`; the ends when it has none inside (one pair, say)."""
    if function(low) <= 0:
        return low
    if function(high) >= 0:
        return high
    return float(optimize.brentq(function, low, high, xtol=1e-12))


def _statistic(difference: float, b: int, c: int, n: int) -> float:
    """`score_statistic` of one table, in scalars: a root search calls it dozens of times."""
    linear = -b - c + (2 * n - b + c) * difference
    constant = -c * difference * (1 - difference)
    p_c = (math.sqrt(max(linear * linear - 8 * n * constant, 0.0)) - linear) / (4 * n)
    variance = n * (2 * p_c + difference * (1 - difference))
    score = b - c - n * difference
    if variance <= 0:
        return 0.0 if score == 0 else math.copysign(math.inf, score)
    return score / math.sqrt(variance)


def score_statistic(difference: float, b: ArrayLike, c: ArrayLike, n: int) -> NDArray[np.float64]:
    """Tango's score statistic of H0: p_b - p_c = `difference` (1998, eq. 18-22), for arrays of tables with `n` pairs each.

    Asymptotically standard normal under H0; positive where the seen loss is larger than `difference`. At 0 it is McNemar's
    (b - c) / sqrt(b + c). Where H0 leaves no variance: 0 if the table is what H0 says, else +-inf.
    """
    b, c = np.asarray(b, dtype=np.float64), np.asarray(c, dtype=np.float64)
    linear = -b - c + (2 * n - b + c) * difference
    constant = -c * difference * (1 - difference)
    p_c = (np.sqrt(np.maximum(linear * linear - 8 * n * constant, 0.0)) - linear) / (4 * n)
    variance = n * (2 * p_c + difference * (1 - difference))
    score = b - c - n * difference
    with np.errstate(divide="ignore", invalid="ignore"):
        statistic = score / np.sqrt(np.maximum(variance, 0.0))
    return np.asarray(np.where((variance <= 0) & (score == 0), 0.0, statistic), dtype=np.float64)


def mcnemar_midp(b: int, c: int) -> float:
    """Two-sided mid-p value of the exact McNemar test: is one side right more often? 1.0 without discordant pairs."""
    if b < 0 or c < 0:
        raise ValueError(f"discordant counts {b} and {c} must not be negative")
    if b == c:
        return 1.0 if b == 0 else float(1 - stats.binom.pmf(b, b + c, 0.5))
    smaller = min(b, c)
    return float(2 * stats.binom.cdf(smaller, b + c, 0.5) - stats.binom.pmf(smaller, b + c, 0.5))


def check_pairs(b: int, c: int, n: int) -> None:
    """ValueError unless `b` and `c` can be discordant pairs among `n`."""
    if n < 1 or b < 0 or c < 0 or b + c > n:
        raise ValueError(f"discordant pairs {b} and {c} of {n}: need n >= 1, b >= 0, c >= 0, b + c <= n")
