"""Thinking on one side only, far more of it on one, and answers that stand in it."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from assay.records.measurement import ItemResult
from assay_evaluate.alike.sides import Finding, Pair, Side, exceeds, found, some

NEVER, OFTEN = 0.02, 0.5
"""Shares of replies with thinking that no damage of weights turns into each other."""
FEWEST_ENDED = 10
TIMES_LONGER = 4.0
FEWEST_CHARS = 200
"""Of the longer thinking: a word more or less is no effort."""
FEWEST_PAIRS = 20
SAME_DIRECTION = 0.9
SWALLOWED_SHARE, FEWEST_SWALLOWED = 0.03, 5


def _ended(side: Side) -> list[ItemResult]:
    """Replies that were not cut off: damaged weights loop, and then what stands where says nothing of the server."""
    return [item for item in side.answered if item.reasoning_chars is not None and not item.truncated and not item.loops]


def thinking_on_one_side(pair: Pair) -> Iterator[Finding]:
    """Thinking in most replies of one side and in none of the other: switched, or not parsed, there."""
    for side, other in pair:
        ours, theirs = _ended(side), _ended(other)
        if min(len(ours), len(theirs)) < FEWEST_ENDED:
            continue
        num, num_there = (sum(bool(item.reasoning_chars) for item in ended) for ended in (ours, theirs))
        if num >= OFTEN * len(ours) and num_there <= NEVER * len(theirs):
            none = "none" if num_there == 0 else f"{num_there} of {len(theirs)}"
            yield Finding(
                "both",
                f"{some(num, len(ours))} replies of {side.label} have thinking, {none} of {other.label}: it is switched off, "
                "or not parsed, on one side",
                num, len(ours),
            )  # fmt: skip


def longer_thinking(pair: Pair) -> Iterator[Finding]:
    """Several times as much thinking on nearly every question: another reasoning effort."""
    pairs = [
        (ours.reasoning_chars, theirs.reasoning_chars)
        for ours, theirs in pair.both
        if ours.reasoning_chars and theirs.reasoning_chars and not (ours.truncated or theirs.truncated)
    ]
    if len(pairs) < FEWEST_PAIRS:
        return
    ours, theirs = (statistics.median(one[side] for one in pairs) for side in (0, 1))
    times = max(ours, theirs) / min(ours, theirs)
    longer = sum((after > before) == (theirs > ours) for before, after in pairs)
    if max(ours, theirs) >= FEWEST_CHARS and times >= TIMES_LONGER and longer >= SAME_DIRECTION * len(pairs):
        more, less = (
            (pair.candidate.label, pair.reference.label) if theirs > ours else (pair.reference.label, pair.candidate.label)
        )
        yield Finding(
            "both",
            f"{more} thinks {times:.1f} times as long as {less} (median of {len(pairs)} questions), and longer on {longer} of "
            "them: another reasoning effort on one side",
            longer, len(pairs),
        )  # fmt: skip


def answers_in_thinking(pair: Pair) -> Iterator[Finding]:
    """No answer, and the right one at the end of the thinking, in a reply that ended by itself: the parser's fault."""
    for side, other in pair:
        num, of = _swallowed(side)
        if exceeds(num, of, share=SWALLOWED_SHARE, least=FEWEST_SWALLOWED):
            empty = sum(not item.text_chars and bool(item.reasoning_chars) for item in side.answered)
            there = sum(not item.text_chars and bool(item.reasoning_chars) for item in other.answered)
            yield found(
                pair, side,
                f"{empty} of {of} replies of {side.label} have thinking and no answer ({other.label}: {there or 'none'}), and "
                f"in {num} of them the answer stands at its end: the reasoning parser, not the weights",
                num, of,
            )  # fmt: skip


def _swallowed(side: Side) -> tuple[int, int]:
    known = [item for item in side.answered if item.answer_in_reasoning is not None]
    return sum(item.answer_in_reasoning is True for item in known), len(known)
