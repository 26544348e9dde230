"""What replies say: one text for many questions, texts of other questions, and texts that lack what was billed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator

from scipy import stats

from assay.records.measurement import ItemResult
from assay_evaluate.alike.sides import LEAST_SHARE, Finding, Pair, Side, exceeds, found, some

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


def one_text(pair: Pair) -> Iterator[Finding]:
    """One text, no answer, for many different questions, made otherwise than the other replies: a page of a gateway.

    Models have phrases, too, and refuse: what thinks and is counted as the other replies of both sides are is theirs.
    """
    for side, other in pair:
        said: dict[int, list[ItemResult]] = defaultdict(list)
        for item in side.answered:
            if item.text_key is not None and not item.truncated and (item.text_chars or 0) >= SHORTEST_PAGE_CHARS:
                said[item.text_key].append(item)
        questions = len({item.item for item in side.answered})
        for key, replies in said.items():
            alike = len({item.item for item in replies})
            is_answer = sum(item.correct is True for item in replies) > MOST_RIGHT * len(replies)
            if is_answer or not exceeds(alike, questions, share=ALIKE_SHARE, least=FEWEST_ALIKE):
                continue
            others = [item for item in side.answered if item.text_key != key and item.sample == 0]
            if _made_otherwise([item for item in replies if item.sample == 0], others, other.answered):
                begins = "" if side.task.served is None else side.task.served.common_texts.get(key, "")
                yield found(
                    pair, side,
                    f"{side.label} gives one and the same text to {some(alike, questions)} questions"
                    f"{f' ({begins!r})' if begins else ''}, right for hardly any: a page of a gateway, not a reply",
                    alike, questions,
                )  # fmt: skip


def _made_otherwise(replies: list[ItemResult], others: list[ItemResult], of_other_side: list[ItemResult]) -> bool:
    """Without thinking where the others think, or without counts where the others have them: further apart than by chance, and
    not as a model that thinks only at times would part them by itself, on the other side as well. No weights leave out a count,
    so for these the other side's replies are others, too: a page may have come to every question."""

    def parts(sign: Callable[[ItemResult], bool], others: list[ItemResult]) -> bool:
        is_parted = _are_parted([sum(map(sign, group)) for group in (replies, others)], [len(replies), len(others)])
        return is_parted and sum(map(sign, of_other_side)) >= USUAL * len(of_other_side)

    return (
        parts(lambda item: bool(item.reasoning_chars), others)
        or parts(lambda item: item.output_tokens is not None, [*others, *of_other_side])
        or parts(lambda item: item.prompt_tokens is not None, [*others, *of_other_side])
    )


def _are_parted(num: list[int], of: list[int]) -> bool:
    """Hardly any of the first, nearly all of the second; one-sided exact test (Fisher)."""
    if num[0] > MOST_AS_USUAL * of[0] or num[1] < USUAL * of[1]:
        return False
    return bool(stats.hypergeom.cdf(num[0], sum(of), sum(num), of[0]) < PARTED_P)


def texts_of_others(pair: Pair) -> Iterator[Finding]:
    """Wrong replies that are, letter for letter, the right reply to another question: swapped.

    Looked at only where no two questions share a right reply, and but for questions to which the other side says the same.
    """
    if pair.reference.task.kind == "tools":
        return  # one call may be right for one question and wrong for another
    for side, other in pair:
        long = [
            item
            for item in side.answered
            if item.text_key is not None and (item.output_tokens or 0) >= SHORTEST_OTHERS_TOKENS and not item.truncated
        ]
        right: dict[int | None, set[str]] = defaultdict(set)
        for item in long:
            if item.correct:
                right[item.text_key].add(item.item)
        if any(len(questions) > 1 for questions in right.values()):
            continue
        strayed = [
            item
            for item in long
            if item.correct is False and right.get(item.text_key, {item.item}) != {item.item} and not _says(other, item)
        ]
        if exceeds(len(strayed), len(side.answered), share=LEAST_SHARE, least=FEWEST_OTHERS):
            yield found(
                pair, side,
                f"{some(len(strayed), len(side.answered))} replies of {side.label} are the reply to another question: replies "
                "are swapped",
                len(strayed), len(side.answered),
            )  # fmt: skip


def _says(side: Side, item: ItemResult) -> bool:
    """Whether the side gives the very text to the same question."""
    there = side.by_key.get((item.item, item.sample))
    return there is not None and there.text_key == item.text_key


def lost_text(pair: Pair) -> Iterator[Finding]:
    """Texts with far fewer tokens than were billed: their rest was lost on the way."""
    for side, other in pair:
        served, beside = side.task.served, pair.candidate.task.served
        num, of = (0, 0) if beside is None else (beside.num_cut_short, beside.num_beside)
        if beside is not None and side is pair.reference:
            num = beside.num_reference_cut_short
        if exceeds(num, of):
            yield found(
                pair, side,
                f"the text of {some(num, of)} replies of {side.label} is the beginning of {other.label}'s to the same question "
                "and no more, though as many tokens were billed: something loses text",
                num, of,
            )  # fmt: skip
            continue
        counts = None if served is None else served.texts
        if counts is None:
            continue
        if (less := _less_than(side, other)) is not None:
            yield found(pair, side, less, counts.num_typical, counts.num_typical)
        elif counts.shortest is not None and exceeds(counts.num_short, len(side.answered), least=FEWEST_SHORT):
            one = counts.shortest
            yield found(
                pair, side,
                f"the text of {some(counts.num_short, len(side.answered))} replies of {side.label} lacks tokens that were "
                f"billed ({one.counted} of {one.billed} in one): something loses text",
                counts.num_short, len(side.answered),
            )  # fmt: skip


def _less_than(side: Side, other: Side) -> str | None:
    """What is said where nearly all texts of a side hold less than those of the other."""
    ours = None if side.task.served is None else side.task.served.texts
    theirs = None if other.task.served is None else other.task.served.texts
    if ours is None or theirs is None or min(ours.num_typical, theirs.num_typical) < FEWEST_ALIKE:
        return None
    if ours.typical_share >= theirs.typical_share - LESS_TEXT:
        return None
    return (
        f"texts of {side.label} hold {100 * ours.typical_share:.0f} % of the tokens that are billed for them, those of "
        f"{other.label} {100 * theirs.typical_share:.0f} %: thinking is kept back, or text is lost, on one side"
    )
