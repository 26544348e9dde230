"""From paired counts and a margin to a word: non-inferiority, equivalence (TOST), Holm, many subgroups, the verdict.

PASS of a candidate needs every gate to pass, an intersection-union test (Berger 1982): each part is tested at the full level,
and nothing is adjusted. FAIL needs one gate, a union: with twenty tasks a harmless candidate would fail one by chance
every other run. Holm's step-down procedure is therefore applied to what can fail a candidate, over all its tasks.

Of some sixty subgroups of the tasks a few look bad by chance. Losses are shown at a false-discovery rate: of a candidate that
lost nothing, some subgroup is named in no more than that share of runs. Subgroups overlap (a language and a length share
items), which keeps the rate where their tests are positively dependent.

Sources: Tango 1998; Lloyd & Moldovan 2008 (Stat. Med. 27:3540-3549); Schuirmann 1987 (TOST); Holm 1979 (Scand. J. Stat.
6:65-70); Berger 1982 (Technometrics 24:295-300); Benjamini & Hochberg 1995 (JRSS B 57:289-300); Benjamini & Yekutieli
2001 (Ann. Stat. 29:1165-1188).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from assay.records.base import Interval
from assay.records.verdict import Status
from assay_evaluate.statistics.clustered import ClusteredMean
from assay_evaluate.statistics.paired import check_pairs, exact_tail, mcnemar_midp, paired_difference, score_statistic

Bools = NDArray[np.bool_]
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


class Screened(NamedTuple):
    """Of each subgroup [..., subgroups]. beyond: surely lost more than its limit. shown: surely lost something. unbounded:
    shown, and a loss of the limit is not excluded."""

    beyond: Bools
    shown: Bools
    unbounded: Bools


def screen_subgroups(
    p_loss: ArrayLike, p_beyond: ArrayLike, high: ArrayLike, limits: ArrayLike, *, false_discovery: float, alpha: float
) -> Screened:  # fmt: skip
    """p_loss, p_beyond: one-sided, of no loss and of one of the limit at most. high: upper ends of the losses. alpha: rate at
    which subgroups are said to be beyond their limits. Without subgroups all are empty."""
    ends, most = np.asarray(high, dtype=np.float64), np.asarray(limits, dtype=np.float64)
    beyond = benjamini_hochberg(p_beyond) < alpha
    shown = (benjamini_hochberg(p_loss) < false_discovery) | beyond
    return Screened(beyond, shown, shown & (ends >= most) & ~beyond)


def benjamini_hochberg(p_values: ArrayLike) -> NDArray[np.float64]:
    """By Benjamini and Hochberg, over the last axis."""
    p = np.asarray(p_values, dtype=np.float64)
    return p if p.shape[-1] == 0 else np.asarray(stats.false_discovery_control(p, axis=-1))


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
    is_equivalence = claim == "equivalent"
    return PairedEvidence(
        b=b, c=c, drop=drop, margin=margin, claim=claim, p_difference=mcnemar_midp(b, c),
        p_pass=equivalence_p(b, c, n, margin) if is_equivalence else no_worse,
        p_fail=min(worse, noninferiority_p(b, c, n, -margin)) if is_equivalence else worse,
    )  # fmt: skip


class MeanLoss(Protocol):
    """A mean loss that can be tested; arrays for many samples."""

    def p_at_least(self, loss: float, /) -> Any: ...
    def p_at_most(self, loss: float, /) -> Any: ...


def margin_p(mean: MeanLoss, margin: float, claim: Claim) -> tuple[Any, Any]:
    """One-sided p values of a claim about a margin, and of its opposite."""
    p_pass, p_fail = mean.p_at_least(margin), mean.p_at_most(margin)
    if claim == "equivalent":
        p_pass = np.maximum(p_pass, mean.p_at_most(-margin))
        p_fail = np.minimum(p_fail, mean.p_at_least(-margin))
    return p_pass, p_fail


def widen_by_clusters(evidence: PairedEvidence, clustered: ClusteredMean | None) -> PairedEvidence:
    """Evidence that took items for independent, with their clusters besides: a word only where both would say it.

    clustered: mean of reference - candidate over the same items; None: nothing to add. The interval is the wider at each end,
    each p of the margin the larger of the two. `p_difference` stays McNemar's, of these items.
    """
    if clustered is None:
        return evidence
    p_pass, p_fail = margin_p(clustered, evidence.margin, evidence.claim)
    return dataclasses.replace(
        evidence,
        drop=wider_interval(evidence.drop, clustered),
        p_pass=max(evidence.p_pass, float(p_pass)),
        p_fail=max(evidence.p_fail, float(p_fail)),
    )


def wider_interval(by_item: Interval, clustered: ClusteredMean | None) -> Interval:
    """At each end the outer one of the interval over items and that over their clusters, within -1 and 1."""
    if clustered is None:
        return by_item
    by_cluster = clustered.interval(by_item.level)
    low, high = max(min(by_item.low, by_cluster.low), -1.0), min(max(by_item.high, by_cluster.high), 1.0)
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
