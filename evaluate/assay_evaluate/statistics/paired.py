"""Two proportions on the same items: the difference, the test of no difference, and where the answers moved.

Sources: Tango 1998 (Stat. Med. 17:891-908); Lloyd & Moldovan 2008 (Stat. Med. 27:3540-3549, tails of his statistic by
estimation); Fagerland, Lydersen & Laake 2013 (BMC Med. Res. Methodol. 13:91, mid-p McNemar); Dutta et al. 2024 (arXiv
2407.09141, flips).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import optimize, special, stats

from assay.records.base import Coverage, Interval
from assay_evaluate.statistics.proportions import normal_quantile

FEW_DISCORDANT = 15
"""Discordant pairs below which no interval covers just what it says: with fewer than 5 expected, 95 % covers 97 to 100 %, and
with 5 to 15 it covers 95 to 98 %, never less (docs/decisions/intervals.md, 174)."""


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
    """`score_interval`; where that lies clear of 0, its end near 0 is that of `exact_tail` instead: what says "more than the
    margin is lost".

    Its coverage, and why no interval covers exactly 95 % with few discordant pairs, is in
    docs/decisions/paired-scores.md (015, 127). ValueError if the counts do not fit.
    """
    interval = score_interval(b, c, n, level)
    low, high = interval.low, interval.high
    if low > 0:
        low = _exact_end(b, c, n, interval.value, level)
    if high < 0:
        high = -_exact_end(c, b, n, -interval.value, level)
    coverage: Coverage = "at_least" if b + c < FEW_DISCORDANT else "nominal"
    return Interval(value=interval.value, low=low, high=high, n=n, level=level, coverage=coverage)


def score_interval(b: int, c: int, n: int, level: float = 0.95) -> Interval:
    """Tango's score interval of the difference of two paired proportions (1998); `value` is (b - c) / n.

    It is the set of differences that the score test does not reject, with the nuisance parameter at its restricted maximum
    likelihood. Without any discordant pair it is +-z^2 / (n + z^2), where Wald's collapses to a point: ten items never
    support a margin of five points. ValueError if the counts do not fit.
    """
    check_pairs(b, c, n)
    z = normal_quantile(level)
    value = (b - c) / n
    # The statistic falls strictly with the hypothetical difference: z at the lower end, -z at the upper.
    edge = 1 - 1e-12
    low = -1.0 if b - c == -n else _root(lambda d: _statistic(d, b, c, n) - z, -edge, value)
    high = 1.0 if b - c == n else _root(lambda d: _statistic(d, b, c, n) + z, value, edge)
    return Interval(value=value, low=low, high=high, n=n, level=level)


def _exact_end(b: int, c: int, n: int, value: float, level: float) -> float:
    """Smallest difference above 0 whose upper tail is (1 - level) / 2; 0 if none is so small."""
    tail = (1 - level) / 2
    end = _root(lambda d: tail - float(exact_tail(d, b, c, n)), NEAR_0, min(value, 1 - 1e-9), xtol=1e-6)
    return end if end > NEAR_0 else 0.0


def _root(function: Callable[[float], float], low: float, high: float, xtol: float = 1e-12) -> float:
    """Zero of a falling function between `low` and `high`; the ends when it has none inside (one pair, say)."""
    if function(low) <= 0:
        return low
    if function(high) >= 0:
        return high
    return float(optimize.brentq(function, low, high, xtol=xtol))


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
    p_c = _restricted_p_c(difference, b, c, n)
    variance = n * (2 * p_c + difference * (1 - difference))
    score = b - c - n * difference
    with np.errstate(divide="ignore", invalid="ignore"):
        statistic = score / np.sqrt(np.maximum(variance, 0.0))
    return np.asarray(np.where((variance <= 0) & (score == 0), 0.0, statistic), dtype=np.float64)


def _restricted_p_c(difference: float, b: NDArray[np.float64], c: NDArray[np.float64], n: int) -> NDArray[np.float64]:
    """Maximum likelihood of p_c where p_b - p_c = `difference`."""
    linear = -b - c + (2 * n - b + c) * difference
    constant = -c * difference * (1 - difference)
    return np.asarray((np.sqrt(np.maximum(linear * linear - 8 * n * constant, 0.0)) - linear) / (4 * n))


def exact_tail(difference: float, b: ArrayLike, c: ArrayLike, n: int) -> NDArray[np.float64]:
    """Upper tail of Tango's statistic under H0: p_b - p_c = `difference`, p_c at its restricted maximum likelihood.

    That is the chance of a table whose statistic is as large as the one seen, or larger. For arrays of tables with `n` pairs.

    The normal tail is too light on this side: of few expected discordant pairs the statistic is skewed, and a test at 0.5 %
    rejects in up to 1.1 %, this one in 0.55 % at most. ValueError unless 0 < difference < 1.
    """
    if not 0 < difference < 1:
        raise ValueError(f"difference {difference} must lie between 0 and 1")
    b, c = np.broadcast_arrays(np.asarray(b, dtype=np.float64), np.asarray(c, dtype=np.float64))
    b_T, c_T = b.ravel(), c.ravel()
    seen_T = score_statistic(difference, b_T, c_T, n)
    p_c_T = _restricted_p_c(difference, b_T, c_T, n)
    rate_T = np.minimum(2 * p_c_T + difference, 1.0)
    # Each number m of discordant pairs that has a chance; of each the least b whose statistic is no smaller than the one seen.
    fewest_T, most_T = stats.binom.ppf(NEGLIGIBLE, n, rate_T), stats.binom.isf(NEGLIGIBLE, n, rate_T)
    m_TM = fewest_T[:, None] + np.arange(int((most_T - fewest_T).max(initial=0)) + 1)
    chance_TM = np.where(m_TM > most_T[:, None], 0.0, stats.binom.pmf(m_TM, n, rate_T[:, None]))
    m_TM = np.minimum(m_TM, n)
    too_few_TM, enough_TM = np.full(m_TM.shape, -1.0), m_TM + 1
    while (apart := enough_TM - too_few_TM > 1).any():
        middle = np.maximum((too_few_TM + enough_TM) // 2, 0)
        is_enough = score_statistic(difference, middle, m_TM - middle, n) >= seen_T[:, None] - SAME
        enough_TM = np.where(apart & is_enough, middle, enough_TM)
        too_few_TM = np.where(apart & ~is_enough, middle, too_few_TM)
    share_TM = np.broadcast_to(((p_c_T + difference) / rate_T)[:, None], m_TM.shape)
    with np.errstate(invalid="ignore"):
        tail_TM = special.betainc(np.maximum(enough_TM, 1e-300), m_TM - enough_TM + 1, share_TM)
    tail_TM = np.where(enough_TM <= 0, 1.0, np.where(enough_TM > m_TM, 0.0, tail_TM))
    return np.asarray(np.minimum((chance_TM * tail_TM).sum(axis=1), 1.0).reshape(b.shape))


NEAR_0 = 1e-9
"""Difference that stands for "any loss": the tail is that of one above 0."""
NEGLIGIBLE = 1e-11
"""Chance of all the numbers of discordant pairs that a tail leaves out, at either end."""
SAME = 1e-9
"""Statistics nearer to each other are equal."""


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
