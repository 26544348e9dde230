"""Group-sequential tests: looking at the evidence several times, with one error rate for all looks together.

Alpha is spent by a function of the *planned* share of the samples, so that it does not depend on what is seen (Lan & DeMets
1983); how far two looks share their data is taken from the information that was found: corr(Z_j, Z_k) = sqrt(I_j / I_k), where
I is 1 / variance of the estimated difference. Each look adds replies or items to those of the look before, and the estimate is
the mean over all of them, so cov(D_j, D_k) = var(D_k), which gives this correlation for "these items" and "such items" alike.

Tests are one-sided and nothing is given up for futility: a test of "the loss is below the margin" and one of "the loss is
above it" are run side by side, each at its own alpha. A look rejects if its p value lies below its nominal level. A sequential
p value is the smallest alpha at which the test would have rejected by now (Liu & Anderson 2008); Holm over several of them
keeps the family-wise error although tasks stop at different looks (Ye et al. 2013; Maurer & Bretz 2013). With one look it is
the p value of that look.

Sources: Lan & DeMets 1983 (Biometrika 70:659-663); Hwang, Shih & DeCani 1990 (Stat. Med. 9:1439-1445); Armitage, McPherson &
Rowe 1969 (JRSS A 132:235-244) and Jennison & Turnbull 2000, ch. 19 (the recursion); Liu & Anderson 2008 (J. Am. Stat. Assoc.
103:1621-1630); Ye, Li, Liu & Yao 2013 (Stat. Med. 32:1112-1124); Maurer & Bretz 2013 (Stat. Biopharm. Res. 5:311-320).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special, stats

Floats = NDArray[np.float64]
SpendingName = Literal["obrien_fleming", "pocock", "hwang_shih_decani"]

LEAST_GROWTH = 1.002
"""Information of a look is taken to be at least so many times that of the look before. An estimate that does not grow, or
falls, is noise; a smaller correlation than the true one makes the boundary stricter."""
LOWEST = -9.0
"""Z below which nothing is looked for: its probability is 1e-19."""
SMALLEST_P = 1e-14
"""p values are not told apart below it."""


@dataclass(frozen=True)
class Spending:
    """How much of alpha may be spent by a share of the planned samples."""

    name: SpendingName = "pocock"
    gamma: float = -2.0
    """Of hwang_shih_decani: -4 is close to O'Brien and Fleming's boundaries, 1 to Pocock's."""
    part: float = 1.0
    """So much of alpha is spent by all looks together, if there are several: below 1 where the test of a look is right in the
    limit only."""

    def spent(self, time: float, alpha: float) -> float:
        """Alpha spent at `time` in [0, 1]; `part` of it from 1 on. ValueError for a time below 0."""
        if time < 0:
            raise ValueError(f"time {time} must not be negative")
        alpha *= self.part
        if time >= 1:
            return alpha
        if time == 0:
            return 0.0
        if self.name == "obrien_fleming":
            return float(2 * stats.norm.sf(stats.norm.isf(alpha / 2) / math.sqrt(time)))
        if self.name == "pocock":
            return alpha * math.log1p((math.e - 1) * time)
        if self.gamma == 0:
            return alpha * time
        return alpha * math.expm1(-self.gamma * time) / math.expm1(-self.gamma)


def check_looks(times: Sequence[float], informations: Sequence[float]) -> None:
    """ValueError unless there is a look, times ascend within (0, 1], and every information is a positive number."""
    if not times or len(times) != len(informations):
        raise ValueError(f"{len(times)} times and {len(informations)} informations: need one of each for every look")
    if any(before >= after for before, after in pairwise([0.0, *times])) or times[-1] > 1:
        raise ValueError(f"times {list(times)} must ascend within (0, 1]")
    if any(not (value > 0 and math.isfinite(value)) for value in informations):
        raise ValueError(f"informations {list(informations)} must be positive and finite")


def nominal_levels(
    times: Sequence[float], informations: Sequence[float], alpha: float, spending: Spending | None = None
) -> list[float]:
    """One-sided level of each look: it rejects where its p value is below. Their joint error is what is spent by then.

    times: planned shares of the samples at the looks, ascending; 1 at the last one that is planned. informations: 1 / variance
    of the estimate at each look, in any unit. ValueError as `check_looks`, and unless 0 < alpha < 1.
    """
    check_looks(times, informations)
    if not 0 < alpha < 1:
        raise ValueError(f"alpha {alpha} must lie between 0 and 1")
    rule = Spending() if spending is None else spending
    if len(times) == 1:  # the only look has all of alpha
        return [alpha if times[0] >= 1 else rule.spent(times[0], alpha)]
    growing = [informations[0]]
    for value in informations[1:]:
        growing.append(max(value, LEAST_GROWTH * growing[-1]))
    ratios = tuple(round(after / before, 6) for before, after in pairwise(growing))
    return list(_nominal_levels(tuple(times), ratios, alpha, rule))


@functools.lru_cache(maxsize=4096)
def _nominal_levels(times: tuple[float, ...], ratios: tuple[float, ...], alpha: float, rule: Spending) -> tuple[float, ...]:
    """ratios: of each look's information to that of the look before."""
    spent = [rule.spent(time, alpha) for time in times]
    levels = [spent[0]]
    bound = float(stats.norm.isf(max(spent[0], 1e-300)))
    nodes_N, weights_N = _grid(bound, ratios[0])
    density_N = weights_N * np.exp(-(nodes_N**2) / 2) / math.sqrt(2 * math.pi)
    for look, ratio in enumerate(ratios, 1):
        # Z_k = Z_j sqrt(I_j / I_k) + sqrt(1 - I_j / I_k) times a standard normal: independent increments.
        shrunk_N, spread = nodes_N / math.sqrt(ratio), math.sqrt(1 - 1 / ratio)
        bound = _bound(density_N, shrunk_N, spread, spent[look] - spent[look - 1])
        levels.append(float(stats.norm.sf(bound)))
        if look < len(ratios):
            nodes_M, weights_M = _grid(bound, min(ratio, ratios[look]))
            kernel_MN = np.exp(-(((nodes_M[:, None] - shrunk_N[None, :]) / spread) ** 2) / 2) / (
                spread * math.sqrt(2 * math.pi)
            )
            nodes_N, density_N = nodes_M, weights_M * (kernel_MN @ density_N)
    return tuple(levels)


def _grid(bound: float, ratio: float) -> tuple[Floats, Floats]:
    """Gauss-Legendre nodes and weights over the values of Z that go on, fine enough for the step to the next look."""
    num_nodes = 128 if ratio > 1.05 else 768
    nodes, weights = _legendre(num_nodes)
    half = (max(bound, LOWEST + 1e-6) - LOWEST) / 2
    return LOWEST + half * (nodes + 1), half * weights


@functools.lru_cache(maxsize=4)
def _legendre(num_nodes: int) -> tuple[Floats, Floats]:
    nodes, weights = np.polynomial.legendre.leggauss(num_nodes)
    return np.asarray(nodes, dtype=np.float64), np.asarray(weights, dtype=np.float64)


def _bound(density_N: Floats, shrunk_N: Floats, spread: float, to_spend: float) -> float:
    """Z whose chance to be exceeded now, and at no look before, is `to_spend`."""

    def excess(bound: float) -> float:
        return float(density_N @ special.ndtr((shrunk_N - bound) / spread)) - to_spend

    low, high = LOWEST, 40.0
    if excess(low) <= 0:
        return low
    return high if excess(high) >= 0 else float(optimize.brentq(excess, low, high, xtol=1e-10))


def sequential_p(
    p_values: Sequence[float], times: Sequence[float], informations: Sequence[float], spending: Spending | None = None
) -> float:
    """Smallest alpha at which the test would have rejected by now, from the one-sided p of each look so far.

    With one look at time 1 it is that look's p, bit for bit. 1 where half of everything spent would not have rejected.
    ValueError as `nominal_levels`, and for p values outside [0, 1].
    """
    check_looks(times, informations)
    if len(p_values) != len(times) or any(not 0 <= p <= 1 for p in p_values):
        raise ValueError(f"p values {list(p_values)}: need one between 0 and 1 for each of {len(times)} looks")
    if times[0] >= 1:
        return p_values[0]

    def excess(log_alpha: float) -> float:
        """Above 0 where some look rejects."""
        levels = nominal_levels(times, informations, math.exp(log_alpha), spending)
        return max(_log(level) - _log(p) for level, p in zip(levels, p_values, strict=True))

    low, high = math.log(SMALLEST_P), math.log(0.5)
    if excess(high) <= 0:
        return 1.0
    if excess(low) >= 0:
        return SMALLEST_P
    return math.exp(float(optimize.brentq(excess, low, high, xtol=1e-6)))


def _log(p: float) -> float:
    return math.log(max(p, 1e-300))
