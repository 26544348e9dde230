"""Temperature that is not obeyed: a few questions asked twice, at zero and above."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

from scipy import stats

from assay.records.served.evidence import AskedTwice
from assay_evaluate.alike.sides import SHORT_TOKENS, Finding, Pair, Repeated, Side, found, some

NOISE_TOKENS = 150.0
"""A greedy reply whose batch changes may leave its way once in so many tokens: more noise than was ever published (vLLM and
others: a first difference after 100 tokens and more)."""
LEAST_NOISE = 0.05
"""Share of questions that batches may change however short the reply: one letter may be nearly a tie."""
MOST_TURNED, TURNED_P = 0.1, 1e-6
"""Share of short greedy replies that turn from right to wrong, or back, from one pass to the next: batches turn one or two of a
hundred."""
ABSOLUTE_P = 1e-4
RELATIVE_P = 1e-3
USUAL_NOISE_TOKENS = 350.0
"""The same of ordinary servers under load: what the other side may lack that is batch-invariant, or asked one by one."""
TIMES_NOISIER = 3.0
"""What one side may be noisier than the other by its kernels."""
FEWEST_QUESTIONS = 8
SHORTEST_DRAW_TOKENS = 32
MOST_CUT = 0.2
ALWAYS, SELDOM = 0.9, 0.5
"""Shares of questions above temperature 0 that come back alike: of a side that does not sample, and of one that does."""


def not_greedy(pair: Pair) -> Iterator[Finding]:
    """Other replies to the same question at temperature 0, beyond what batches change, on one side or both."""
    for side, other in pair:
        ours = _of(side, "zero")
        if not _asks_at_zero(side) or ours is None or ours.num_questions == 0:
            continue
        theirs = _of(other, "zero")
        if _beyond_any_noise(ours) or _noisier(ours, other, theirs):
            there = f", {other.label} to {_none_or(theirs)}" if theirs is not None and theirs.num_questions else ""
            yield found(
                pair, side,
                f"asked twice at temperature 0, {side.label} gives another reply to "
                f"{some(ours.num_different, ours.num_questions)} questions{there}: temperature 0 is not obeyed there",
                ours.num_different, ours.num_questions,
            )  # fmt: skip
        elif side.repeated is not None and _turns(side.repeated):
            yield found(
                pair, side,
                f"at temperature 0 {side.repeated.num_turned} of {side.repeated.num_short} short replies of {side.label} are "
                "right in one pass and wrong in the other: temperature 0 is not obeyed there",
                side.repeated.num_turned, side.repeated.num_short,
            )  # fmt: skip


def not_sampled(pair: Pair) -> Iterator[Finding]:
    """The same reply of the candidate each time above temperature 0, where the reference varies.

    Not the other way round: a reference may be nearly sure of its words, and a damaged candidate not.
    """
    side, other = pair.candidate, pair.reference
    ours, theirs = _of(side, "above zero"), _of(other, "above zero")
    if _asks_at_zero(side) or ours is None or theirs is None:
        return
    if min(ours.num_questions, theirs.num_questions) < FEWEST_QUESTIONS or not _is_prose(ours, side):
        return
    alike, alike_there = (one.num_questions - one.num_different for one in (ours, theirs))
    if alike >= ALWAYS * ours.num_questions and alike_there <= SELDOM * theirs.num_questions:
        yield found(
            pair, side,
            f"asked twice above temperature 0, {side.label} gives the same reply to {some(alike, ours.num_questions)} "
            f"questions, {other.label} to {alike_there or 'none'} of {theirs.num_questions}: temperature is not obeyed, or a "
            "cache answers",
            alike, ours.num_questions,
        )  # fmt: skip


def _is_prose(ours: AskedTwice, side: Side) -> bool:
    """Whether replies are such that draws must differ: not a word or two, nor what damaged weights repeat without end."""
    cut = sum(item.truncated or item.loops is True for item in side.answered)
    is_long = ours.mean_output_tokens is not None and ours.mean_output_tokens >= SHORTEST_DRAW_TOKENS
    return is_long and cut <= MOST_CUT * len(side.answered)


def _none_or(twice: AskedTwice) -> str:
    return f"{twice.num_different or 'none'} of {twice.num_questions}"


def _asks_at_zero(side: Side) -> bool:
    return side.task.served is not None and side.task.served.temperature == 0


def _of(side: Side, kind: Literal["zero", "above zero"]) -> AskedTwice | None:
    return next((one for one in side.asked_twice if one.temperature == kind), None)


def _beyond_any_noise(ours: AskedTwice) -> bool:
    """More than the noise of batches could change in so few tokens."""
    if ours.mean_output_tokens is None:
        return False
    return _exceeds_noise(ours, ours.mean_output_tokens / NOISE_TOKENS, ABSOLUTE_P)


def _exceeds_noise(ours: AskedTwice, num_differences: float, p_value: float) -> bool:
    """num_differences: that batches make in a reply, on average."""
    by_noise = max(LEAST_NOISE, 1 - math.exp(-num_differences))
    return bool(stats.binom.sf(ours.num_different - 1, ours.num_questions, by_noise) < p_value)


def _turns(repeated: Repeated) -> bool:
    return bool(stats.binom.sf(repeated.num_turned - 1, repeated.num_short, MOST_TURNED) < TURNED_P)


def _noisier(ours: AskedTwice, other: Side, theirs: AskedTwice | None) -> bool:
    """Beyond what the other side shows of itself, by far: asked twice as well, and in its second pass. The other may show
    none, being batch-invariant, so it must be beyond what batches usually do, too."""
    tokens = SHORT_TOKENS if ours.mean_output_tokens is None else ours.mean_output_tokens
    if not _exceeds_noise(ours, tokens / USUAL_NOISE_TOKENS, RELATIVE_P):
        return False
    num, of = (0, 0) if theirs is None else (theirs.num_different, theirs.num_questions)
    if other.repeated is not None:
        num, of = num + other.repeated.num_different, of + other.repeated.num_compared
    if of == 0:
        return False
    weight = TIMES_NOISIER * ours.num_questions
    p_value = stats.binom.sf(ours.num_different - 1, ours.num_different + num, weight / (weight + of))
    return bool(p_value < RELATIVE_P)
