"""Which of several changes made together caused how much: two-level designs, effects over texts, interactions.

With F factors that are each on or off, KL(S) of those in S is near zero a quadratic form of what each adds to the logits,
KL(S) = sum a_f + sum b_fg: a cause alone, and what two of them do together beyond that. The main effect of a factor (the mean
where it is on less the mean where it is off, over a balanced design) is then a_f + sum b_fg / 2, its Shapley value: the effects
add up to KL of all together, and each interaction is shared between its two. A design of resolution IV has no pair mixed into a
main effect. What third orders add shows as the difference between that sum and the measured whole.

Sources: Box, Hunter & Hunter 2005 (Statistics for Experimenters), chapters 5 and 6; Shapley 1953.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from assay.records.base import Interval
from assay_evaluate.statistics.clustered import Floats
from assay_evaluate.statistics.skewed import edge, skewed_ends

Bools = NDArray[np.bool_]
MOST_FACTORS = 8
_GENERATORS = {4: (3, ((0, 1, 2),)), 5: (4, ((0, 1, 2),)), 6: (4, ((0, 1, 2), (0, 1, 3))),
               7: (4, ((0, 1, 2), (0, 1, 3), (0, 2, 3))), 8: (4, ((0, 1, 2), (0, 1, 3), (0, 2, 3), (1, 2, 3)))}  # fmt: skip
"""Number of factors -> (those that are varied freely, of which products of three the others are)."""


def design(num_factors: int) -> Bools:
    """Settings [R, F], nothing on first and everything on last. Up to 3 factors all there are; else of resolution IV.

    ValueError: no factor, or more than `MOST_FACTORS`.
    """
    if not 1 <= num_factors <= MOST_FACTORS:
        raise ValueError(f"{num_factors} factors: 1 to {MOST_FACTORS}")
    free, generated = _GENERATORS.get(num_factors, (num_factors, ()))
    signs = np.array([*itertools.product((-1, 1), repeat=free)])
    columns = [signs, *(signs[:, list(of)].prod(1, keepdims=True) for of in generated)]
    made: Bools = np.hstack(columns) > 0
    return made


def mixed_pairs(settings_RF: Bools) -> list[list[tuple[int, int]]]:
    """Pairs of factors in sets that the design cannot tell apart."""
    signs = np.where(settings_RF, 1, -1)
    by_product: dict[bytes, list[tuple[int, int]]] = defaultdict(list)
    for first, second in itertools.combinations(range(signs.shape[1]), 2):
        by_product[(signs[:, first] * signs[:, second]).tobytes()].append((first, second))
    return list(by_product.values())


def main_effects(settings_RF: Bools, kl_RT: Floats) -> Floats:
    """[F, T] of each factor and text, in the unit of `kl_RT`."""
    return np.array([kl_RT[on].mean(0) - kl_RT[~on].mean(0) for on in settings_RF.T])


def pair_effect(settings_RF: Bools, kl_RT: Floats, first: int, second: int) -> Floats:
    """[T] b_fg of a pair, or the sum of those it is mixed with."""
    alike = settings_RF[:, first] == settings_RF[:, second]
    effect: Floats = 2 * (kl_RT[alike].mean(0) - kl_RT[~alike].mean(0))
    return effect


def share(effect_T: Floats, whole_T: Floats, level: float = 0.95) -> Interval | None:
    """Of the whole, over texts that have both: the ratios r at which the mean of effect - r whole may be 0 (Fieller 1954).

    Below 0 where the effect takes away. None: the whole may be 0.
    """
    if len(whole_T) < 2 or whole_T.sum() <= 0:
        return None
    ones_T, stratum_T = np.ones(len(whole_T)), np.zeros(len(whole_T), np.intp)

    def may_be(ratio: float) -> bool:
        low, high = skewed_ends(effect_T - ratio * whole_T, ones_T, stratum_T, level, open_above=False)
        return low <= 0 <= high

    value = float(effect_T.sum() / whole_T.sum())
    if not (effect_T - value * whole_T).any():
        return Interval(value=value, low=value, high=value, n=len(whole_T), level=level, coverage="about")
    ends = []
    for sign in (-1, 1):
        beyond = (value + sign * 2.0**power for power in range(-20, 5))
        if (outside := next((ratio for ratio in beyond if not may_be(ratio)), None)) is None:
            return None
        ends.append(edge(may_be, value, outside))
    return Interval(value=value, low=ends[0], high=ends[1], n=len(whole_T), level=level, coverage="about")


def strong_pairs(settings_RF: Bools, kl_RT: Floats, shares_F: Sequence[float], least: float) -> list[tuple[int, int]]:
    """Pairs that may account for `least` of the whole or more: both have a share of half of that, and what they are mixed with
    is `least` with its interval off 0."""
    whole_T = kl_RT[-1] - kl_RT[0]
    pairs = []
    for mixed in mixed_pairs(settings_RF):
        of_whole = share(pair_effect(settings_RF, kl_RT, *mixed[0]), whole_T)
        if of_whole is not None and abs(of_whole.value) >= least and not of_whole.low <= 0 <= of_whole.high:
            pairs += [pair for pair in mixed if min(abs(shares_F[number]) for number in pair) >= least / 2]
    return pairs
