"""How replies end: cut at one length, cut before they need be, `stop` where it is not, at strings that nobody sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from scipy import stats

from assay.records.measurement import ItemResult
from assay_evaluate.serving_faults.sides import Fault, Finding, Pair, Side, count_of, each_side, is_too_many

SHORTEST_CAP_TOKENS = 16
"""Shorter replies have one length by their form."""
FEWEST_AT_CAP = 5
CAP_SHARE = 0.02
NEIGHBOURS = 0.25
"""Lengths so near to a length, in its own size, say how many replies to expect there."""
CAP_P = 1e-6
"""Of so many replies without an answer at one length, over all lengths."""
MOST_FINISHED = 0.2
"""Share of the replies of that length which may be finished ones: else it is the length of a form."""
FORM_SHARE = 0.1
"""Share of the right replies of that length which shows that it is a form."""
OPEN_SHARE = 0.5
"""Share of the right replies that may end without a mark where a missing mark shows a broken end."""
FEWEST_RIGHT = 5
"""Replies without which nobody knows what an answer looks like; thinking without an answer is none all the same."""
FEWEST_TURNED = 3
TURNED_SHARE = 0.5
TURNED_P = 1e-4
NEXT_LENGTHS = 3
TIMES_AS_MANY = 2
"""What a peak of the lengths at the budget may have, next to the most frequent of so many lengths just below it."""


# ------------------------------------------------------------------------------------------------ cut
def capped(pair: Pair) -> Iterator[Finding]:
    """Many replies that end at one length, without an answer and without `length`: a cap that says stop."""
    right = [item for side in (pair.reference, pair.candidate) for item in side.answered if item.correct]

    def find_cap(side: Side, other: Side) -> Iterator[Fault]:
        # The server says that they ended by themselves, and no count says otherwise.
        ended = [
            item
            for item in side.answered
            if item.output_tokens is not None
            and (not item.truncated or item.truncated_by not in {"length", "budget", "context"})
        ]
        if (cap := _cap_of(ended, right)) is not None:
            length, num = cap
            yield num, len(ended), (
                f"{count_of(num, len(ended))} replies of {side.label} end at exactly {length} tokens without an answer, and "
                "say that they ended by themselves: something caps replies"
            )  # fmt: skip

    yield from each_side(find_cap)(pair)


def _cap_of(ended: list[ItemResult], right: list[ItemResult]) -> tuple[int, int] | None:
    """(length, replies that end there unfinished). None: there is no such length."""
    at_length = Counter(item.output_tokens or 0 for item in ended)
    ends_tell = sum(item.ends_open is True for item in right) <= OPEN_SHARE * len(right)
    unfinished = _num_unfinished(ended, ends_tell=ends_tell)
    for length, num in unfinished.most_common():
        if length < SHORTEST_CAP_TOKENS or not is_too_many(num, len(ended), share=CAP_SHARE, least=FEWEST_AT_CAP):
            continue
        # Right replies, of either side, that have this length too, give or take a token: it is that of the answer.
        num_right = sum(item.output_tokens is not None and abs(item.output_tokens - length) <= 1 for item in right)
        if num < (1 - MOST_FINISHED) * at_length[length] or num_right > FORM_SHARE * len(right):
            continue
        if len(right) < FEWEST_RIGHT and not all(item.text_chars == 0 for item in ended if item.output_tokens == length):
            continue
        near = sum(n for other, n in unfinished.items() if other != length and abs(other - length) <= NEIGHBOURS * length)
        expected = (near + 1) / (2 * NEIGHBOURS * length)
        if stats.poisson.sf(num - 1, expected) * len(at_length) < CAP_P:
            return length, num
    return None


def _num_unfinished(ended: list[ItemResult], *, ends_tell: bool) -> Counter[int]:
    """Length -> wrong replies that are broken off there: no answer after thinking, or no mark at the end of the text. One text
    that is given to many questions counts once: it is a phrase of the model.

    ends_tell: right replies end with a mark, so one without is broken off. Where they end without one, as a bare number does,
    only a text in which no answer is found is: the others may be wrong answers of one form.
    """
    counts: Counter[int] = Counter()
    texts: set[tuple[int, int | None]] = set()
    for item in ended:
        if item.correct is not False or item.text_chars is None or item.output_tokens is None:
            continue
        is_new = (item.output_tokens, item.text_key) not in texts
        is_open = item.ends_open is True and (ends_tell or item.answer is None)
        if item.text_chars == 0 or (is_open and is_new):
            counts[item.output_tokens] += 1
            texts.add((item.output_tokens, item.text_key))
    return counts


@each_side
def cut_early(side: Side, other: Side) -> Iterator[Fault]:
    """`length` although the reply is shorter than was allowed and the context is not full: something lowers max_tokens."""
    budget = side.task.max_tokens
    if budget is None:
        return
    lengths = Counter(
        item.output_tokens
        for item in side.answered
        if (item.truncated_by, item.finish_reason) == ("length", "length")
        if item.output_tokens is not None and item.output_tokens < budget
    )
    num, of = lengths.total(), len(side.answered)
    if is_too_many(num, of):
        length, most = lengths.most_common(1)[0]
        where = f"at {length} tokens" if most == num else f"as early as at {min(filter(None, lengths))} tokens"
        yield num, of, (
            f"{count_of(num, of)} replies of {side.label} are cut off {where}, {budget} were allowed: something "
            "lowers max_tokens"
        )  # fmt: skip


@each_side
def stop_at_budget(side: Side, other: Side) -> Iterator[Fault]:
    """`stop` on replies that fill their budget exactly, more than by the lengths below it: the reason of the end is not the
    server's. Where many are nearly as long, some just fit."""
    if (budget := side.task.max_tokens) is None:
        return
    full = [item for item in side.answered if item.output_tokens == budget > SHORTEST_CAP_TOKENS]
    num = sum(item.finish_reason == "stop" and item.tool is None for item in full)
    if num < FEWEST_TURNED or num < TURNED_SHARE * len(full):
        return
    # Replies to expect at exactly the budget, by the lengths a little and a quarter below it.
    lengths = Counter(budget - item.output_tokens for item in side.answered if item.output_tokens is not None)
    near = sum(n for below, n in lengths.items() if 0 < below <= NEIGHBOURS * budget)
    most_next = max(lengths[below] for below in range(1, NEXT_LENGTHS + 1))
    expected = max((near + 1) / (NEIGHBOURS * budget), TIMES_AS_MANY * most_next)
    if stats.poisson.sf(num - 1, expected) < TURNED_P:
        yield num, len(full), (
            f"{count_of(num, len(full))} replies of {side.label} that fill their {budget} tokens say `stop`: something changes "
            "finish_reason"
        )  # fmt: skip


# ------------------------------------------------------------------------------------------------ what nobody sent
@each_side
def unsent_stop(side: Side, other: Side) -> Iterator[Fault]:
    """Replies that a stop string ended, though none was sent."""
    served = side.task.served
    if served is None:
        return
    num, of = sum(served.stop_strings.values()), served.num_replies
    if is_too_many(num, of):
        text = max(served.stop_strings, key=lambda string: served.stop_strings[string])
        yield num, of, (
            f"{count_of(num, of)} replies of {side.label} were ended by a stop string that was not sent ({text!r}): something "
            "adds one"
        )  # fmt: skip


@each_side
def contradicting_usage(side: Side, other: Side) -> Iterator[Fault]:
    """Token counts that contradict themselves or the text: where replies were cut off cannot be seen."""
    served = side.task.served
    if served is not None and is_too_many(served.num_usage_problems, served.num_replies):
        yield served.num_usage_problems, served.num_replies, (
            f"the usage of {count_of(served.num_usage_problems, served.num_replies)} replies of {side.label} contradicts "
            f"itself ({served.usage_problem}), so it cannot be seen which replies were cut off"
        )  # fmt: skip
