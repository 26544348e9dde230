"""What replies say: one text for many questions, texts of other questions or without what was billed, and their thinking."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator

from scipy import stats

from assay.records.measurement import ItemResult
from assay.records.served.evidence import TextCounts
from assay_evaluate.serving_faults.sides import Fault, Finding, Pair, Side, count_of, each_side, is_too_many

SHORTEST_PAGE_CHARS = 32
"""Shorter texts are answers that many questions share."""
FEWEST_ALIKE = 5
ALIKE_SHARE = 0.05
"""Of the questions."""
MOST_AS_USUAL, USUAL = 0.1, 0.9
PARTED_P = 1e-5
"""Shares of these replies, and of the others, that think or are counted: they are made otherwise."""
MOST_RIGHT = 0.1
"""Share of them that may be right: else it is an answer."""
SHORTEST_OTHERS_TOKENS = 24
FEWEST_OTHERS = 3
LESS_TEXT = 0.2
"""Of the tokens that are billed, what the texts of one side may hold less than those of the other."""
FEWEST_SHORT = 2
NEVER, OFTEN = 0.02, 0.5
"""Shares of replies with thinking that no damage of weights turns into each other."""
FEWEST_ENDED = 10
TIMES_LONGER = 4.0
FEWEST_CHARS = 200
"""Of the longer thinking: a word more or less is no effort."""
FEWEST_PAIRS = 20
SAME_DIRECTION = 0.9
SWALLOWED_SHARE, FEWEST_SWALLOWED = 0.03, 5


# ------------------------------------------------------------------------------------------------ texts
@each_side
def one_text(side: Side, other: Side) -> Iterator[Fault]:
    """One text, no answer, for many different questions, made otherwise than the other replies: a page of a gateway.

    Models have phrases, too, and refuse: what thinks and is counted as the other replies of both sides are is theirs.
    """
    replies_of_text: dict[int, list[ItemResult]] = defaultdict(list)
    for item in side.answered:
        if item.text_key is not None and not item.truncated and (item.text_chars or 0) >= SHORTEST_PAGE_CHARS:
            replies_of_text[item.text_key].append(item)
    of = len({item.item for item in side.answered})
    for key, replies in replies_of_text.items():
        num = len({item.item for item in replies})
        is_answer = sum(item.correct is True for item in replies) > MOST_RIGHT * len(replies)
        if is_answer or not is_too_many(num, of, share=ALIKE_SHARE, least=FEWEST_ALIKE):
            continue
        others = [item for item in side.answered if item.text_key != key and item.sample == 0]
        if _are_made_otherwise([item for item in replies if item.sample == 0], others, other.answered):
            begins = "" if side.task.served is None else side.task.served.common_texts.get(key, "")
            yield num, of, (
                f"{side.label} gives one and the same text to {count_of(num, of)} "
                f"questions{f' ({begins!r})' if begins else ''}, right for hardly any: a page of a gateway, not a reply"
            )  # fmt: skip


def _are_made_otherwise(replies: list[ItemResult], others: list[ItemResult], of_other_side: list[ItemResult]) -> bool:
    """Without thinking where the others think, or without counts where the others have them: further apart than by chance, and
    not as a model that thinks only at times would part them by itself, on the other side as well. No weights leave out a count,
    so for these the other side's replies are others, too: a page may have come to every question."""

    def are_parted(has_sign: Callable[[ItemResult], bool], others: list[ItemResult]) -> bool:
        """Hardly any of the replies, nearly all of the others and of the other side; one-sided exact test (Fisher)."""
        num, num_others = sum(map(has_sign, replies)), sum(map(has_sign, others))
        if num > MOST_AS_USUAL * len(replies) or num_others < USUAL * len(others):
            return False
        p_value = stats.hypergeom.cdf(num, len(replies) + len(others), num + num_others, len(replies))
        return bool(p_value < PARTED_P) and sum(map(has_sign, of_other_side)) >= USUAL * len(of_other_side)

    return (
        are_parted(lambda item: bool(item.reasoning_chars), others)
        or are_parted(lambda item: item.output_tokens is not None, [*others, *of_other_side])
        or are_parted(lambda item: item.prompt_tokens is not None, [*others, *of_other_side])
    )


@each_side
def texts_of_others(side: Side, other: Side) -> Iterator[Fault]:
    """Wrong replies that are, letter for letter, the right reply to another question: swapped.

    Looked at only where no two questions share a right reply, and but for questions to which the other side says the same. Not
    for tool calls, since one call may be right for one question and wrong for another.
    """
    if side.task.kind == "tools":
        return
    long = [
        item
        for item in side.answered
        if item.text_key is not None and (item.output_tokens or 0) >= SHORTEST_OTHERS_TOKENS and not item.truncated
    ]
    questions_of_text: dict[int | None, set[str]] = defaultdict(set)
    for item in long:
        if item.correct:
            questions_of_text[item.text_key].add(item.item)
    if any(len(questions) > 1 for questions in questions_of_text.values()):
        return
    num = 0
    for item in long:
        reply = other.by_key.get((item.item, item.sample))
        is_own = questions_of_text.get(item.text_key, {item.item}) == {item.item}
        num += item.correct is False and not is_own and (reply is None or reply.text_key != item.text_key)
    if is_too_many(num, len(side.answered), least=FEWEST_OTHERS):
        yield num, len(side.answered), (
            f"{count_of(num, len(side.answered))} replies of {side.label} are the reply to another question: replies are "
            "swapped"
        )  # fmt: skip


def lost_text(pair: Pair) -> Iterator[Finding]:
    """Texts with far fewer tokens than were billed: their rest was lost on the way."""
    compared = pair.candidate.task.served

    def find_lost(side: Side, other: Side) -> Iterator[Fault]:
        num, of = (0, 0) if compared is None else (compared.num_cut_short, compared.num_beside)
        if compared is not None and side is pair.reference:
            num = compared.num_reference_cut_short
        counts = None if side.task.served is None else side.task.served.texts
        if is_too_many(num, of):
            yield num, of, (
                f"the text of {count_of(num, of)} replies of {side.label} is the beginning of {other.label}'s to the same "
                "question and no more, though as many tokens were billed: something loses text"
            )  # fmt: skip
        elif counts is None:
            return
        elif (less := _less_than(counts, side, other)) is not None:
            yield counts.num_typical, counts.num_typical, less
        elif counts.shortest is not None and is_too_many(counts.num_short, len(side.answered), least=FEWEST_SHORT):
            yield counts.num_short, len(side.answered), (
                f"the text of {count_of(counts.num_short, len(side.answered))} replies of {side.label} lacks tokens that were "
                f"billed ({counts.shortest.counted} of {counts.shortest.billed} in one): something loses text"
            )  # fmt: skip

    yield from each_side(find_lost)(pair)


def _less_than(counts: TextCounts, side: Side, other: Side) -> str | None:
    """A clause where nearly all texts of a side hold less than those of the other."""
    others = None if other.task.served is None else other.task.served.texts
    if others is None or min(counts.num_typical, others.num_typical) < FEWEST_ALIKE:
        return None
    if counts.typical_share >= others.typical_share - LESS_TEXT:
        return None
    return (
        f"texts of {side.label} hold {100 * counts.typical_share:.0f} % of the tokens that are billed for them, those of "
        f"{other.label} {100 * others.typical_share:.0f} %: thinking is kept back, or text is lost, on one side"
    )


# ------------------------------------------------------------------------------------------------ thinking
def thinking_on_one_side(pair: Pair) -> Iterator[Finding]:
    """Thinking in most replies of one side and in none of the other: switched, or not parsed, there.

    Of replies that were not cut off: damaged weights loop, and then what stands where says nothing of the server.
    """
    for side, other in ((pair.reference, pair.candidate), (pair.candidate, pair.reference)):
        thinks, other_thinks = (
            [
                bool(item.reasoning_chars)
                for item in one_side.answered
                if item.reasoning_chars is not None and not item.truncated and not item.loops
            ]
            for one_side in (side, other)
        )
        num, of, other_num, other_of = sum(thinks), len(thinks), sum(other_thinks), len(other_thinks)
        if min(of, other_of) >= FEWEST_ENDED and num >= OFTEN * of and other_num <= NEVER * other_of:
            other_share = "none" if other_num == 0 else f"{other_num} of {other_of}"
            clause = f"{count_of(num, of)} replies of {side.label} have thinking, {other_share} of {other.label}"
            yield Finding("both", f"{clause}: it is switched off, or not parsed, on one side", num, of)


def longer_thinking(pair: Pair) -> Iterator[Finding]:
    """Several times as much thinking on nearly every question: another reasoning effort."""
    lengths = [
        (a.reasoning_chars, b.reasoning_chars)
        for a, b in pair.matched
        if a.reasoning_chars and b.reasoning_chars and not (a.truncated or b.truncated)
    ]
    if len(lengths) < FEWEST_PAIRS:
        return
    reference, candidate = (statistics.median(of_side) for of_side in zip(*lengths, strict=True))
    is_candidate = candidate > reference
    times = max(reference, candidate) / min(reference, candidate)
    num_longer = sum((after > before) == is_candidate for before, after in lengths)
    is_much = max(reference, candidate) >= FEWEST_CHARS and times >= TIMES_LONGER
    if is_much and num_longer >= SAME_DIRECTION * len(lengths):
        longer, shorter = (pair.candidate, pair.reference) if is_candidate else (pair.reference, pair.candidate)
        clause = (
            f"{longer.label} thinks {times:.1f} times as long as {shorter.label} (median of {len(lengths)} questions), and "
            f"longer on {num_longer} of them: another reasoning effort on one side"
        )
        yield Finding("both", clause, num_longer, len(lengths))


@each_side
def answers_in_thinking(side: Side, other: Side) -> Iterator[Fault]:
    """No answer, and the right one at the end of the thinking, in a reply that ended by itself: the parser's fault."""
    known = [item.answer_in_reasoning for item in side.answered if item.answer_in_reasoning is not None]
    num, of = sum(known), len(known)
    if is_too_many(num, of, share=SWALLOWED_SHARE, least=FEWEST_SWALLOWED):
        num_empty, other_empty = (
            sum(not item.text_chars and bool(item.reasoning_chars) for item in one_side.answered) for one_side in (side, other)
        )
        yield num, of, (
            f"{num_empty} of {of} replies of {side.label} have thinking and no answer ({other.label}: "
            f"{other_empty or 'none'}), and in {num} of them the answer stands at its end: the reasoning parser, not the "
            "weights"
        )  # fmt: skip
