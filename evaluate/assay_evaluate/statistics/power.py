"""What a number of items can show, and how many items a margin needs: exact powers of the tests that the gates use.

With b + c ~ Binomial(n, D) and b | b + c ~ Binomial(b + c, (D + loss) / 2 D) a power is a sum over b + c, not a simulation.
Compare Connor 1987 (Biometrics 43:207-211) for the normal approximation.
"""

from __future__ import annotations

import functools
import math

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from assay_evaluate.statistics.paired import NEAR_0, check_pairs, exact_tail, score_statistic
from assay_evaluate.statistics.proportions import normal_quantile

POWER = 0.8
"""Chance of seeing an effect of the size called detectable; the field's convention."""


@functools.lru_cache(maxsize=4096)  # a report and every card of a run ask for the same ones
def minimum_detectable_effect(b: int, c: int, n: int, level: float = 0.95, power: float = POWER) -> float:
    """Smallest true loss that n pairs would show (`paired_difference` clear of 0) with chance `power`.

    Exact, given the seen discordant rate D = (b + c) / n. A loss d needs a discordant rate of at least d, so where D is
    smaller (above all, D = 0) it is taken to be d: ten clean pairs do not mean that any loss would have been seen. 1.0 if
    not even the loss of every item would show.
    """
    check_pairs(b, c, n)
    rate = (b + c) / n
    about = _smallest(rate, n, _fewest_by_score(n, level), power, most=1.0)
    if about == 1:
        return about
    # The score test is near: more discordant pairs than it needs are hardly ever seen, and need no exact tail.
    beyond = min(1.0, 1.25 * about)
    num_pairs = int(stats.binom.isf(1e-10, n, max(rate, beyond)))
    return _smallest(rate, n, _fewest_lost(n, num_pairs, level), power, most=beyond)


def _smallest(rate: float, n: int, enough_M: NDArray[np.float64], power: float, most: float) -> float:
    """Loss up to `most` that is shown with chance `power`."""
    low, high = 0.0, most
    while high - low > 1e-5:
        middle = (low + high) / 2
        is_shown = _detection_power(middle, max(rate, middle), n, enough_M) >= power
        low, high = (low, middle) if is_shown else (middle, high)
    return high


def _detection_power(loss: float, discordant_rate: float, n: int, enough_M: NDArray[np.float64]) -> float:
    """enough: of 0, 1, ... discordant pairs, so many of which must be lost."""
    if discordant_rate == 0:
        return 0.0
    discordant = np.arange(len(enough_M))
    share = (discordant_rate + loss) / (2 * discordant_rate)
    chance = stats.binom.pmf(discordant, n, discordant_rate) * stats.binom.sf(enough_M - 1, discordant, share)
    return float(chance.sum())


def _fewest_by_score(n: int, level: float) -> NDArray[np.float64]:
    """Least b of which the score test says that more is lost than gained: (b - c) / sqrt(b + c) > z."""
    discordant = np.arange(n + 1)
    return np.asarray(np.floor((discordant + normal_quantile(level) * np.sqrt(discordant)) / 2) + 1)


def _fewest_lost(n: int, most: int, level: float) -> NDArray[np.float64]:
    """The same by `exact_tail`, of at most so many discordant pairs: never far from the score test."""
    discordant, by_score = np.arange(most + 1), _fewest_by_score(n, level)[: most + 1]
    lost_MO = by_score[:, None] + np.arange(-2, 4)
    tables = (lost_MO >= 0) & (lost_MO <= discordant[:, None])
    gained_MO = discordant[:, None] - lost_MO
    tail_MO = np.ones(lost_MO.shape)
    tail_MO[tables] = exact_tail(NEAR_0, lost_MO[tables], gained_MO[tables], n)
    shown_MO = tail_MO < (1 - level) / 2
    least = lost_MO[np.arange(most + 1), shown_MO.argmax(axis=1)]
    return np.where(shown_MO.any(axis=1), least, discordant + 1)


def noninferiority_power(margin: float, discordance: float, n: int, *, loss: float = 0.0, level: float = 0.95) -> float:
    """Chance that n pairs PASS a margin (upper end of `paired_difference` below it) when `loss` is true.

    At `loss` = `margin` it is the chance of a false PASS. Negative losses are gains. ValueError unless 0 < margin < 1,
    |loss| <= discordance <= 1 and n >= 1.
    """
    _check_design(margin, discordance, loss)
    if n < 1:
        raise ValueError(f"{n} items: need at least one")
    fewest, most = stats.binom.ppf(1e-10, n, discordance), stats.binom.isf(1e-10, n, discordance)
    num_discordant = np.arange(int(fewest), int(most) + 1)
    # For a fixed b + c the statistic grows with b: halve towards the largest b that still passes (-1: none does).
    passing, failing = np.full(num_discordant.shape, -1), num_discordant + 1
    while (apart := failing - passing > 1).any():
        middle = np.maximum((passing + failing) // 2, 0)
        passes = score_statistic(margin, middle, num_discordant - middle, n) < -normal_quantile(level)
        passing, failing = np.where(apart & passes, middle, passing), np.where(apart & ~passes, middle, failing)
    share = (discordance + loss) / (2 * discordance) if discordance > 0 else 0.5
    chance = stats.binom.pmf(num_discordant, n, discordance) * stats.binom.cdf(passing, num_discordant, share)
    return float(chance.sum())


def items_needed(margin: float, discordance: float, power: float = POWER, *, loss: float = 0.0, level: float = 0.95) -> int:
    """Paired items so that a candidate with true `loss` and discordant rate `discordance` passes `margin` with chance `power`.

    What a user is told whose verdict is UNDERPOWERED. Exact power, found by bisection; because counts are whole numbers the
    power saws a little with n, and a few items fewer may do as well. Without discordant pairs it is the n at which
    z^2 / (n + z^2) falls below the margin. ValueError unless loss < margin and 0 < power < 1, or as `noninferiority_power`.
    """
    _check_design(margin, discordance, loss)
    if not loss < margin:
        raise ValueError(f"loss {loss} is not below the margin {margin}: no number of items makes it pass")
    if not 0 < power < 1:
        raise ValueError(f"power {power} must lie between 0 and 1")

    def enough(n: int) -> bool:
        return noninferiority_power(margin, discordance, n, loss=loss, level=level) >= power

    too_few, enough_items = 0, max(1, math.ceil(normal_quantile(level) ** 2 * (1 - margin) / margin))
    while not enough(enough_items):
        too_few, enough_items = enough_items, 2 * enough_items
    while enough_items - too_few > 1:
        middle = (too_few + enough_items) // 2
        too_few, enough_items = (too_few, middle) if enough(middle) else (middle, enough_items)
    return enough_items


def items_for_margin(b: int, c: int, n: int, margin: float, level: float = 0.95, power: float = POWER) -> int:
    """`items_needed` for a candidate without any true loss, at the discordant rate that n pairs have shown."""
    check_pairs(b, c, n)
    return items_needed(margin, (b + c) / n, power, level=level)


def _check_design(margin: float, discordance: float, loss: float) -> None:
    if not 0 < margin < 1:
        raise ValueError(f"margin {margin} must lie between 0 and 1")
    if not abs(loss) <= discordance <= 1:
        raise ValueError(f"loss {loss} and discordant rate {discordance}: need |loss| <= discordant rate <= 1")
