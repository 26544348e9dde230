"""The acceptance of drafted tokens: a ratio over replies, of which each has an acceptance of its own.

Replies are what is sampled: code is drafted better than prose, so drafted tokens of one reply are not independent. Variance of
a ratio over replies by linearisation: Cochran 1977, Sampling Techniques, section 6.4. Two sides that answered the same prompts
are compared prompt by prompt: what prompts differ in then drops out, as in a difference of two ratio estimates over one sample
(6.7 there). `benchmarks/verdicts/paired_drafts.py` has both intervals beside each other.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from assay.records.base import Interval
from assay.records.measurement import Acceptance
from assay_evaluate.statistics.clustered import cr2_factors, degrees_by_kurtosis, satterthwaite_degrees
from assay_evaluate.statistics.proportions import independent_difference
from assay_evaluate.statistics.uneven_clusters import UnevenMean

Squares = tuple[float, float, float]
"""Sums over replies: drafted^2, drafted x accepted, accepted^2, in tokens."""


def ratio_standard_error(num_replies: int, drafted: float, accepted: float, squares: Squares) -> float | None:
    """Of sum(accepted) / sum(drafted) over replies. None: fewer than two replies."""
    if num_replies < 2:
        return None
    rate = accepted / drafted
    deviations = squares[2] - 2 * rate * squares[1] + rate**2 * squares[0]
    return math.sqrt(max(deviations, 0.0) * num_replies / (num_replies - 1)) / drafted


def has_counts_by_reply(before: Acceptance, after: Acceptance) -> bool:
    """Of both sides, so that `acceptance_difference` is an interval over replies."""
    return before.rate_standard_error is not None and after.rate_standard_error is not None


def paired_acceptance_difference(counts: ArrayLike, level: float) -> Interval:
    """Rate before minus rate after, over prompts that both sides answered; n counts them.

    Prompts are clusters of tokens of unequal size: CR2 and its degrees, or those that the kurtosis of what prompts add leaves,
    if these are fewer. With n - 1 degrees a drop of the margin passed in up to 3.6 % of 40 prompts. A few prompts may hold all
    of the drop, and a few long replies most of the tokens: t then passed it in up to 23 %. So the ends are also those of
    `UnevenMean`, and the upper one is 1 where tokens lie in too few prompts to claim anything of others (decision 239).

    counts: of each prompt drafted and accepted tokens before, drafted and accepted after [prompts, 4], over all its replies.
    ValueError: fewer than two prompts, or a side that drafted nothing.
    """
    data = np.asarray(counts, dtype=np.float64)
    if data.ndim != 2 or data.shape[1] != 4 or len(data) < 2:
        raise ValueError(f"counts {data.shape}: need [prompts, 4] of at least two prompts")
    drafted, accepted = data[:, [0, 2]], data[:, [1, 3]]
    if (drafted.sum(axis=0) <= 0).any():
        raise ValueError("a side drafted nothing")
    rates = accepted.sum(axis=0) / drafted.sum(axis=0)
    apart = (accepted - rates * drafted) / drafted.sum(axis=0)
    n, value = len(data), float(rates[0] - rates[1])
    sizes = drafted.sum(axis=1)
    residuals = (apart[:, 0] - apart[:, 1]) * np.sqrt(cr2_factors(sizes))
    squares = residuals**2
    degrees = max(1.0, min(satterthwaite_degrees(sizes), degrees_by_kurtosis(residuals)))
    half = float(stats.t.ppf(0.5 + level / 2, degrees)) * math.sqrt(float(squares.sum()))
    half = max(half, LEAST_TOKENS / float(drafted.sum(axis=0).min()))
    uneven = UnevenMean(
        np.asarray(value), np.sqrt(squares.sum()), (residuals**3).sum(), residuals.max(), residuals.min(), None,
        tuple(sizes.astype(int).tolist()), satterthwaite_degrees(sizes), LACKING_PROMPTS,
    )  # fmt: skip
    below, above = (float(end) for end in uneven.ends(level))
    low, high = max(min(value - half, below), -1.0), min(max(value + half, above), 1.0)
    return Interval(value=value, low=low, high=high, n=n, level=level)


LACKING_PROMPTS = 6
"""`UnevenMean.lacking` of prompts: their lengths differ more than clusters of items do."""
LEAST_TOKENS = 3.0
"""Tokens more or fewer that an interval leaves open, whatever was seen: equal counts do not make a point (3 in n, the rule of
three)."""


def acceptance_difference(before: Acceptance, after: Acceptance, level: float) -> Interval:
    """Rate before minus rate after; n is the smaller number of replies, with t of one degree less.

    Where the server told totals only, drafted tokens are taken for independent, and counted: too narrow by an unknown factor.
    Both sides must have a rate.
    """
    if before.rate_standard_error is None or after.rate_standard_error is None:
        return independent_difference(
            before.num_accepted_tokens, before.num_draft_tokens, after.num_accepted_tokens, after.num_draft_tokens, level
        )
    assert before.rate is not None and after.rate is not None and before.num_replies and after.num_replies
    value, n = before.rate - after.rate, min(before.num_replies, after.num_replies)
    half = float(stats.t.ppf(0.5 + level / 2, n - 1)) * math.hypot(before.rate_standard_error, after.rate_standard_error)
    return Interval(value=value, low=max(value - half, -1.0), high=min(value + half, 1.0), n=n, level=level)
