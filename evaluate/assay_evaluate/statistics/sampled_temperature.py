"""The temperature at which tokens were drawn, from their log-probabilities and those of the likeliest tokens beside them.

Drawing at temperature T gives a token of log-probability v the weight exp(v / T): the model's own distribution tilted by
exp(t v) with t = 1/T - 1. The likelihood ratio of t is therefore known exactly for every token whatever the model writes, and
its signed root, corrected as by Barndorff-Nielsen (Biometrika 73, 1986), is a standard normal at T = 1. The correction matters:
single unlikely tokens make the sum of log-probabilities so skewed that its plain z passes -4 up to 30 times as often as a
standard normal (200 tokens of a likeliest probability of 0.99; 10^6 draws).
Tokens that are not listed count as one whose log-probability lies `OUTSIDE_NATS` below the last listed one: exact at T = 1. Of
other temperatures the estimate is rough where few tokens are listed: 1.3 came out as 1.28 to 1.32 with twenty of them, as 1.28
to 1.37 with five, and as 2.1 to 2.8 with one (a vocabulary of 200 tokens with random logits).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
from scipy import stats
from scipy.optimize import brentq

from assay.quantities import percent_plain

OUTSIDE_NATS = 1.0
COLDEST, HOTTEST = 0.05, 20.0
"""Temperatures that are told apart."""
LEAST_TILT, MOST_TILT = 1 / HOTTEST - 1, 1 / COLDEST - 1
NEAR_ZERO = 1e-2
"""Signed roots below this are not corrected: the correction is a quotient of two numbers near 0."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class DrawnTokens:
    """P drawn tokens, each one of K alternatives: the listed tokens and one for all others.

    drawn_P: log-probability in nats of the alternative that was drawn; values_PK and logp_PK: that of each, as it counts and as
    its probability (they differ for the last one); -inf in logp_PK: no such alternative.
    """

    drawn_P: Floats
    values_PK: Floats
    logp_PK: Floats

    @property
    def num_tokens(self) -> int:
        return len(self.drawn_P)

    @property
    def num_listed(self) -> int:
        """At the places where the most are listed."""
        return int(self.values_PK.shape[1]) - 1

    @property
    def nats(self) -> float:
        return float(self.drawn_P.sum())

    @property
    def expected_nats(self) -> float:
        return self._cumulants(0.0)[1]

    def _cumulants(self, tilt: float) -> tuple[float, float, float]:
        """Cumulant generating function of the summed log-probability at `tilt`, and its first and second derivative."""
        weights_PK = self.logp_PK + tilt * self.values_PK
        most_P1 = weights_PK.max(axis=1, keepdims=True)
        p_PK = np.exp(weights_PK - most_P1)
        total_P1 = p_PK.sum(axis=1, keepdims=True)
        p_PK /= total_P1
        mean_P = (p_PK * self.values_PK).sum(axis=1)
        variance_P = (p_PK * self.values_PK**2).sum(axis=1) - mean_P**2
        return float((most_P1 + np.log(total_P1)).sum()), float(mean_P.sum()), float(np.maximum(variance_P, 0).sum())

    @cached_property
    def _best_tilt(self) -> float:
        if not self.num_tokens:
            return 0.0
        if self._cumulants(LEAST_TILT)[1] >= self.nats:
            return LEAST_TILT
        if self._cumulants(MOST_TILT)[1] <= self.nats:
            return MOST_TILT
        return float(brentq(lambda tilt: self._cumulants(tilt)[1] - self.nats, LEAST_TILT, MOST_TILT, xtol=1e-9))

    def _log_likelihood(self, tilt: float) -> float:
        """Less that at temperature 1."""
        return tilt * self.nats - self._cumulants(tilt)[0] + self._cumulants(0.0)[0]

    @cached_property
    def standard_errors(self) -> float:
        """Standard normal at temperature 1; positive where the drawn tokens are too likely: a lower temperature."""
        tilt = self._best_tilt
        root = math.copysign(math.sqrt(max(0.0, 2 * self._log_likelihood(tilt))), tilt)
        spread = tilt * math.sqrt(self._cumulants(tilt)[2])
        is_at_edge = tilt in (LEAST_TILT, MOST_TILT) or spread == 0.0
        return root if abs(root) < NEAR_ZERO or is_at_edge else root + math.log(spread / root) / root

    @property
    def temperature(self) -> float:
        """The likeliest one, within COLDEST and HOTTEST."""
        return _temperature_of(self._best_tilt)

    def temperature_interval(self, level: float) -> tuple[float, float]:
        """Those that the likelihood ratio does not exclude at `level`, within COLDEST and HOTTEST."""
        least = self._log_likelihood(self._best_tilt) - float(stats.chi2.ppf(level, 1)) / 2

        def excess(tilt: float) -> float:
            return self._log_likelihood(tilt) - least

        best = self._best_tilt
        low = LEAST_TILT if excess(LEAST_TILT) >= 0 else float(brentq(excess, LEAST_TILT, best, xtol=1e-6))
        high = MOST_TILT if excess(MOST_TILT) >= 0 else float(brentq(excess, best, MOST_TILT, xtol=1e-6))
        return _temperature_of(high), _temperature_of(low)

    def describe_temperature(self, level: float) -> str:
        """`1.02 (0.97 to 1.07 at 95 %)`, or `0.05 or less`."""
        if self._best_tilt == MOST_TILT:
            return f"{COLDEST:g} or less"
        if self._best_tilt == LEAST_TILT:
            return f"{HOTTEST:g} or more"
        low, high = self.temperature_interval(level)
        return f"{self.temperature:.2f} ({low:.2f} to {high:.2f} at {percent_plain(level)})"


def _temperature_of(tilt: float) -> float:
    return {LEAST_TILT: HOTTEST, MOST_TILT: COLDEST}.get(tilt, 1 / (1 + tilt))


def drawn_tokens(chosen_P: Floats, top_PK: Floats) -> DrawnTokens:
    """Of P drawn tokens with the K likeliest log-probabilities at each place, best first; NaN where there are fewer."""
    is_known_P = np.isfinite(chosen_P) & np.isfinite(top_PK[:, 0])
    chosen_P, top_PK = chosen_P[is_known_P], np.minimum(top_PK[is_known_P], 0.0)
    last_P = (np.nanmin(top_PK, axis=1) if len(top_PK) else chosen_P) - OUTSIDE_NATS
    rest_P = np.clip(1 - np.nansum(np.exp(top_PK), axis=1), 0.0, 1.0)
    with np.errstate(divide="ignore"):
        logp_PK = np.column_stack([np.nan_to_num(top_PK, nan=-np.inf), np.log(rest_P)])
    if len(logp_PK):
        logp_PK = logp_PK - np.log(np.exp(logp_PK).sum(axis=1, keepdims=True))
    is_listed_P = chosen_P >= last_P + OUTSIDE_NATS
    return DrawnTokens(
        drawn_P=np.where(is_listed_P, np.minimum(chosen_P, 0.0), last_P),
        values_PK=np.column_stack([np.nan_to_num(top_PK), last_P]),
        logp_PK=logp_PK,
    )


def together(replies: Sequence[DrawnTokens]) -> DrawnTokens:
    """The tokens of all of these replies."""
    if not replies:
        return DrawnTokens(np.empty(0), np.empty((0, 1)), np.empty((0, 1)))
    width = max(reply.values_PK.shape[1] for reply in replies)

    def stacked(parts: Sequence[Floats], missing: float) -> Floats:
        return np.concatenate([np.pad(part, ((0, 0), (0, width - part.shape[1])), constant_values=missing) for part in parts])

    return DrawnTokens(
        np.concatenate([reply.drawn_P for reply in replies]),
        stacked([reply.values_PK for reply in replies], 0.0),
        stacked([reply.logp_PK for reply in replies], -np.inf),
    )
