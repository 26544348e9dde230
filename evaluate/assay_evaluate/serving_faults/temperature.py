"""Temperature that is not obeyed: a few questions asked twice, at zero and above."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

from scipy import stats

from assay.records.served.evidence import AskedTwice
from assay_evaluate.serving_faults.sides import SHORT_TOKENS, Fault, Finding, Pair, Side, count_of, each_side

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
"""As `NOISE_TOKENS`, of ordinary servers under load: what the other side may lack that is batch-invariant, or asked one by
one."""
TIMES_NOISIER = 3.0
"""What one side may be noisier than the other by its kernels."""
FEWEST_QUESTIONS = 8
SHORTEST_DRAW_TOKENS = 32
MOST_CUT = 0.2
ALWAYS, SELDOM = 0.9, 0.5
"""Shares of questions above temperature 0 that come back alike: of a side that does not sample, and of one that does."""


@each_side
def not_greedy(side: Side, other: Side) -> Iterator[Fault]:
    """Other replies to the same question at temperature 0, beyond what batches change, on one side or both."""
    twice, other_twice = _asked_at(side, "zero"), _asked_at(other, "zero")
    if not _asks_at_zero(side) or twice is None or twice.num_questions == 0:
        return
    num, of, repeated = twice.num_different, twice.num_questions, side.repeated
    is_noise = twice.mean_output_tokens is None or not _exceeds_noise(
        twice, twice.mean_output_tokens / NOISE_TOKENS, ABSOLUTE_P
    )
    if not is_noise or _is_noisier(twice, other, other_twice):
        place = ""
        if other_twice is not None and other_twice.num_questions:
            place = f", {other.label} to {other_twice.num_different or 'none'} of {other_twice.num_questions}"
        yield num, of, (
            f"asked twice at temperature 0, {side.label} gives another reply to {count_of(num, of)} questions{place}: "
            "temperature 0 is not obeyed there"
        )  # fmt: skip
    elif repeated is not None and stats.binom.sf(repeated.num_turned - 1, repeated.num_short, MOST_TURNED) < TURNED_P:
        yield repeated.num_turned, repeated.num_short, (
            f"at temperature 0 {repeated.num_turned} of {repeated.num_short} short replies of {side.label} are right in one "
            "pass and wrong in the other: temperature 0 is not obeyed there"
        )  # fmt: skip


def not_sampled(pair: Pair) -> Iterator[Finding]:
    """The same reply of the candidate each time above temperature 0, where the reference varies.

    Not the other way round: a reference may be nearly sure of its words, and a damaged candidate not.
    """
    side, other = pair.candidate, pair.reference
    twice, other_twice = _asked_at(side, "above zero"), _asked_at(other, "above zero")
    if _asks_at_zero(side) or twice is None or other_twice is None:
        return
    if min(twice.num_questions, other_twice.num_questions) < FEWEST_QUESTIONS:
        return
    # Replies must be such that draws differ: not a word or two, nor what damaged weights repeat without end.
    num_cut = sum(item.truncated or item.loops is True for item in side.answered)
    is_long = twice.mean_output_tokens is not None and twice.mean_output_tokens >= SHORTEST_DRAW_TOKENS
    if not is_long or num_cut > MOST_CUT * len(side.answered):
        return
    num, of = twice.num_questions - twice.num_different, twice.num_questions
    other_num, other_of = other_twice.num_questions - other_twice.num_different, other_twice.num_questions
    if num >= ALWAYS * of and other_num <= SELDOM * other_of:
        clause = (
            f"asked twice above temperature 0, {side.label} gives the same reply to {count_of(num, of)} questions, "
            f"{other.label} to {other_num or 'none'} of {other_of}: temperature is not obeyed, or a cache answers"
        )
        yield Finding("candidate", clause, num, of)


def _asks_at_zero(side: Side) -> bool:
    return side.task.served is not None and side.task.served.temperature == 0


def _asked_at(side: Side, kind: Literal["zero", "above zero"]) -> AskedTwice | None:
    return next((twice for twice in side.asked_twice if twice.temperature == kind), None)


def _exceeds_noise(twice: AskedTwice, num_differences: float, p_value: float) -> bool:
    """More than the noise of batches could change. num_differences: that batches make in a reply, on average."""
    by_noise = max(LEAST_NOISE, 1 - math.exp(-num_differences))
    return bool(stats.binom.sf(twice.num_different - 1, twice.num_questions, by_noise) < p_value)


def _is_noisier(twice: AskedTwice, other: Side, other_twice: AskedTwice | None) -> bool:
    """Beyond what the other side shows of itself, by far: asked twice as well, and in its second pass. The other may show
    none, being batch-invariant, so it must be beyond what batches usually do, too."""
    tokens = SHORT_TOKENS if twice.mean_output_tokens is None else twice.mean_output_tokens
    if not _exceeds_noise(twice, tokens / USUAL_NOISE_TOKENS, RELATIVE_P):
        return False
    num, of = (0, 0) if other_twice is None else (other_twice.num_different, other_twice.num_questions)
    if other.repeated is not None:
        num, of = num + other.repeated.num_different, of + other.repeated.num_compared
    if of == 0:
        return False
    weight = TIMES_NOISIER * twice.num_questions
    p_value = stats.binom.sf(twice.num_different - 1, twice.num_different + num, weight / (weight + of))
    return bool(p_value < RELATIVE_P)
