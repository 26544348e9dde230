"""From paired counts and a margin to a word: non-inferiority, equivalence (TOST), Holm, the verdict.

PASS of a candidate needs every gate to pass, an intersection-union test (Berger 1982): each part is tested at the full level,
and nothing is adjusted. FAIL needs one gate, a union: with twenty tasks a harmless candidate would fail one by chance
every other run. Holm's step-down procedure is therefore applied to what can fail a candidate, over all its tasks.

Sources: Tango 1998; Lloyd & Moldovan 2008 (Stat. Med. 27:3540-3549); Schuirmann 1987 (TOST); Holm 1979 (Scand. J. Stat.
6:65-70); Berger 1982 (Technometrics 24:295-300).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from scipy import stats

from assay.records.base import Interval
from assay.records.verdict import Status
from assay_evaluate.statistics.clustered import ClusteredMean
from assay_evaluate.statistics.paired import check_pairs, exact_tail, mcnemar_midp, paired_difference, score_statistic

Claim = Literal["non_inferior", "equivalent"]
"""non_inferior: the loss is below the margin. equivalent: loss and gain both are."""


def noninferiority_p(b: int, c: int, n: int, margin: float) -> float:
    """One-sided p of H0: loss >= margin. Small: the candidate is non-inferior. Dual to the upper end of Tango's interval.

    margin may be negative: H0 is then a gain of at most that much, the mirror image of `inferiority_p`.
    """
    _check_margin(margin, b, c, n)
    return float(stats.norm.cdf(score_statistic(margin, b, c, n))) if margin > 0 else float(exact_tail(-margin, c, b, n))


def inferiority_p(b: int, c: int, n: int, margin: float) -> float:
    """One-sided p of H0: loss <= margin. Small: more than the margin is lost. Dual to the lower end of the interval.

    By `exact_tail`: the normal tail fails a candidate that loses just the margin in up to twice the level (decision 127). Of a
    negative margin it is the mirror image of `noninferiority_p`.
    """
    _check_margin(margin, b, c, n)
    return float(exact_tail(margin, b, c, n)) if margin > 0 else float(stats.norm.sf(score_statistic(margin, b, c, n)))


def equivalence_p(b: int, c: int, n: int, margin: float) -> float:
    """TOST: the larger p of the two one-sided tests against +margin and -margin."""
    return max(noninferiority_p(b, c, n, margin), inferiority_p(b, c, n, -margin))


def _check_margin(margin: float, b: int, c: int, n: int) -> None:
    check_pairs(b, c, n)
    if not -1 < margin < 1 or margin == 0:
        raise ValueError(f"margin {margin} must lie between 0 and 1")


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm-adjusted p values, in the order given: reject where they are <= alpha, and the family-wise error is <= alpha."""
    if any(not 0 <= p <= 1 for p in p_values):
        raise ValueError(f"p values {list(p_values)} must lie between 0 and 1")
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


@dataclass(frozen=True)
class PairedEvidence:
    """What `n` paired items say about one margin."""

    b: int
    c: int
    drop: Interval
    margin: float
    claim: Claim
    p_difference: float
    """Two-sided mid-p McNemar: is there any difference?"""
    p_pass: float
    """One-sided p of the claim (TOST for equivalence)."""
    p_fail: float
    """One-sided p of its opposite: more than the margin was lost (for equivalence: or gained)."""


def paired_evidence(
    b: int, c: int, n: int, margin: float, *, level: float = 0.95, claim: Claim = "non_inferior"
) -> PairedEvidence:
    """Interval and p values of one task against one margin. ValueError if counts or margin do not fit."""
    drop = paired_difference(b, c, n, level)
    worse = inferiority_p(b, c, n, margin)
    no_worse = noninferiority_p(b, c, n, margin)
    equivalent = claim == "equivalent"
    return PairedEvidence(
        b=b, c=c, drop=drop, margin=margin, claim=claim, p_difference=mcnemar_midp(b, c),
        p_pass=equivalence_p(b, c, n, margin) if equivalent else no_worse,
        p_fail=min(worse, noninferiority_p(b, c, n, -margin)) if equivalent else worse,
    )  # fmt: skip


def widen(evidence: PairedEvidence, clustered: ClusteredMean | None) -> PairedEvidence:
    """Evidence that took items for independent, with their clusters besides: a word only where both would say it.

    clustered: mean of reference - candidate over the same items; None: nothing to add. The interval is the wider at each end,
    each p of the margin the larger of the two. `p_difference` stays McNemar's, of these items.
    """
    if clustered is None:
        return evidence
    p_pass, p_fail = clustered.p_at_least(evidence.margin), clustered.p_at_most(evidence.margin)
    if evidence.claim == "equivalent":
        p_pass = max(p_pass, clustered.p_at_most(-evidence.margin))
        p_fail = min(p_fail, clustered.p_at_least(-evidence.margin))
    return dataclasses.replace(
        evidence,
        drop=wider(evidence.drop, clustered),
        p_pass=max(evidence.p_pass, p_pass),
        p_fail=max(evidence.p_fail, p_fail),
    )


def wider(by_item: Interval, clustered: ClusteredMean | None) -> Interval:
    """At each end the outer one of the interval over items and that over their clusters, within -1 and 1."""
    if clustered is None:
        return by_item
    found = clustered.interval(by_item.level)
    low, high = max(min(by_item.low, found.low), -1.0), min(max(by_item.high, found.high), 1.0)
    return by_item.model_copy(update={"low": low, "high": high, "coverage": "at_least"})


def decide(evidence: PairedEvidence, *, min_items: int, p_fail_adjusted: float | None = None) -> Status:
    """PASS, FAIL or UNDERPOWERED, each at one-sided level (1 - level) / 2.

    FAIL if the (Holm-adjusted, where given) p of more than the margin is small enough; else PASS if the claim's p is and there
    are at least `min_items` pairs; else UNDERPOWERED. A loss that only looks too large asks for more items, not for a verdict.
    """
    alpha = (1 - evidence.drop.level) / 2
    if (evidence.p_fail if p_fail_adjusted is None else p_fail_adjusted) < alpha:
        return "FAIL"
    return "PASS" if evidence.p_pass < alpha and evidence.drop.n >= min_items else "UNDERPOWERED"
