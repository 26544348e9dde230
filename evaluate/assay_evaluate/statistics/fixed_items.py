"""The mean difference on these very items, of which each side was asked several replies: only the replies are a sample.

With r replies of the reference and c of the candidate to an item, shares p and q of them right, the variance of the mean of
p - q over n items is sum(p (1 - p) / (r - 1) + q (1 - q) / (c - 1)) / n^2, without bias whatever the items are. Items that lose
unequally do not widen it, as they do where items are a sample (`graded`). Each side's replies to an item are one stratum of a
stratified sample (Cochran 1977, Sampling Techniques, 5.3); degrees of freedom are Satterthwaite's over the strata.

As in `graded`, two pairs of replies more are counted, of which one half is lost and one half gained, and no end of the
interval is nearer to the mean than z^2 / (N + z^2), Tango's half-width of N pairs of replies without a difference.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from assay.records.base import Coverage, Interval
from assay_evaluate.statistics.decisions import Claim, PairedEvidence, margin_p
from assay_evaluate.statistics.proportions import detection_quantile, normal_quantile

LARGEST_VARIANCE = 0.25
"""Of one reply, for a stratum of which one alone came."""


@dataclass(frozen=True)
class FixedItems:
    """Mean over the items of reference - candidate, and how far it varies from one draw of replies to another."""

    value: float
    standard_error: float
    degrees: float
    num_items: int
    num_pairs: int
    """Pairs of replies: items, times the replies of the side that has fewer."""

    def interval(self, level: float) -> Interval:
        z2 = normal_quantile(level) ** 2
        half, least = float(stats.t.ppf(0.5 + level / 2, self.degrees)) * self.standard_error, z2 / (self.num_pairs + z2)
        coverage: Coverage = "at_least" if half < least else "nominal"
        half = max(half, least)
        low, high = max(self.value - half, -1.0), min(self.value + half, 1.0)
        return Interval(value=self.value, low=low, high=high, n=self.num_items, level=level, coverage=coverage)

    def p_at_least(self, loss: float) -> float:
        """One-sided p of H0: at least `loss` is lost on these items; the greatest (1 - level) / 2 whose interval holds it."""
        return 1.0 if loss <= self.value else self._p(loss)

    def p_at_most(self, loss: float) -> float:
        return 1.0 if loss >= self.value else self._p(loss)

    def _p(self, loss: float) -> float:
        away = min(abs(loss - self.value), 1 - 1e-12)
        by_error = float(stats.t.sf(away / self.standard_error, self.degrees))
        return min(0.5, max(by_error, float(stats.norm.sf(math.sqrt(self.num_pairs * away / (1 - away))))))

    def evidence(self, margin: float, *, b: int, c: int, level: float, claim: Claim) -> PairedEvidence:
        """b, c: items on which the reference, or the candidate, does better."""
        p_pass, p_fail = (float(p) for p in margin_p(self, margin, claim))
        return PairedEvidence(
            b=b, c=c, drop=self.interval(level), margin=margin, claim=claim, p_difference=self.p_difference, p_pass=p_pass,
            p_fail=p_fail,
        )  # fmt: skip

    @property
    def p_difference(self) -> float:
        return min(1.0, 2 * min(self.p_at_least(0), self.p_at_most(0)))

    def replies_needed(self, num_replies: int, room: float, level: float, power: float) -> int:
        """Replies of each side to every item with which a true loss that lies `room` below the margin would pass it with chance
        `power`; num_replies: of which there are now. ValueError unless room > 0."""
        if not room > 0:
            raise ValueError(f"room {room} must be above 0: no number of replies passes a loss of the margin")
        return max(num_replies, math.ceil(num_replies * (detection_quantile(level, power) * self.standard_error / room) ** 2))


def fixed_items(
    reference: ArrayLike, candidate: ArrayLike, num_reference: ArrayLike, num_candidate: ArrayLike
) -> FixedItems | None:
    """From each item's share of right replies and number of replies, of both sides. None: a side has one reply to every item,
    which says nothing of how its replies vary. ValueError for unequal lengths, or an item without a reply."""
    shares = [np.asarray(share, dtype=np.float64) for share in (reference, candidate)]
    counts = [np.asarray(count, dtype=np.int64) for count in (num_reference, num_candidate)]
    n = len(shares[0])
    if any(array.shape != (n,) for array in (*shares, *counts)) or n == 0 or min(int(count.min()) for count in counts) < 1:
        raise ValueError("need a share and at least one reply of both sides for every item")
    if min(int(count.max()) for count in counts) < 2:
        return None
    num_each = min(int(count.max()) for count in counts)
    spread = squares = 0.0
    for share, count in zip(shares, counts, strict=True):
        degrees = np.maximum(count - 1, 1).astype(np.float64)
        variance = np.where(count > 1, share * (1 - share) / degrees, LARGEST_VARIANCE)
        spread += float(variance.sum())
        squares += float((variance**2 / degrees).sum())
    pairs_in_items = n + 2 / num_each
    return FixedItems(
        value=float((shares[0] - shares[1]).mean()),
        standard_error=math.sqrt(spread + 1 / num_each**2) / pairs_in_items,
        degrees=max(spread**2 / squares, 1.0) if squares > 0 else float(n * (num_each - 1)),
        num_items=n,
        num_pairs=n * num_each,
    )
