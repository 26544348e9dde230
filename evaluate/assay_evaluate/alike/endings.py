"""How replies end: cut at one length, cut before they need be, `stop` where it is not, at strings that nobody sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from scipy import stats

from assay.records.measurement import ItemResult
from assay_evaluate.alike.sides import Finding, Pair, Side, exceeds, found, says_it_ended, some

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
    for side, _ in pair:
        cap = _cap_of([item for item in side.answered if item.output_tokens is not None and says_it_ended(item)], right)
        if cap is None:
            continue
        length, num, of = cap
        yield found(
            pair, side,
            f"{some(num, of)} replies of {side.label} end at exactly {length} tokens without an answer, and say that they "
            "ended by themselves: something caps replies",
            num, of,
        )  # fmt: skip


def _cap_of(ended: list[ItemResult], right: list[ItemResult]) -> tuple[int, int, int] | None:
    """(length, replies that end there unfinished, replies in all). None: there is no such length."""
    at_length = Counter(item.output_tokens or 0 for item in ended)
    ends_tell = sum(item.ends_open is True for item in right) <= OPEN_SHARE * len(right)
    unfinished = _num_unfinished(ended, ends_tell=ends_tell)
    for length, num in unfinished.most_common():
        if length < SHORTEST_CAP_TOKENS or not exceeds(num, len(ended), share=CAP_SHARE, least=FEWEST_AT_CAP):
            continue
        if num < (1 - MOST_FINISHED) * at_length[length] or _is_form(length, right):
            continue
        if len(right) < FEWEST_RIGHT and not all(item.text_chars == 0 for item in ended if item.output_tokens == length):
            continue
        near = sum(n for one, n in unfinished.items() if one != length and abs(one - length) <= NEIGHBOURS * length)
        expected = (near + 1) / (2 * NEIGHBOURS * length)
        if stats.poisson.sf(num - 1, expected) * len(at_length) < CAP_P:
            return length, num, len(ended)
    return None


def _num_unfinished(ended: list[ItemResult], *, ends_tell: bool) -> Counter[int]:
    """Length -> wrong replies that are broken off there: no answer after thinking, or no mark at the end of the text. One text
    that is given to many questions counts once: it is a phrase of the model.

    ends_tell: right replies end with a mark, so one without is broken off. Where they end without one, as a bare number does,
    only a text in which no answer is found is: the others may be wrong answers of one form.
    """
    found: Counter[int] = Counter()
    texts: set[tuple[int, int | None]] = set()
    for item in ended:
        if item.correct is not False or item.text_chars is None or item.output_tokens is None:
            continue
        is_new = (item.output_tokens, item.text_key) not in texts
        is_open = item.ends_open is True and (ends_tell or item.answer is None)
        if item.text_chars == 0 or (is_open and is_new):
            found[item.output_tokens] += 1
            texts.add((item.output_tokens, item.text_key))
    return found


def _is_form(length: int, right: list[ItemResult]) -> bool:
    """Right replies, of either side, have this length too, give or take a token: it is that of the answer."""
    near = sum(item.output_tokens is not None and abs(item.output_tokens - length) <= 1 for item in right)
    return near > FORM_SHARE * len(right)


def cut_early(pair: Pair) -> Iterator[Finding]:
    """`length` although the reply is shorter than was allowed and the context is not full: something lowers max_tokens."""
    for side, _ in pair:
        cut = [
            item
            for item in side.answered
            if (item.truncated_by, item.finish_reason) == ("length", "length")
            if item.output_tokens is not None and item.output_tokens < side.task.max_tokens
        ]
        if not exceeds(len(cut), len(side.answered)):
            continue
        lengths = Counter(item.output_tokens for item in cut)
        length, most = lengths.most_common(1)[0]
        where = f"at {length} tokens" if most == len(cut) else f"as early as at {min(filter(None, lengths))} tokens"
        yield found(
            pair, side,
            f"{some(len(cut), len(side.answered))} replies of {side.label} are cut off {where}, {side.task.max_tokens} were "
            "allowed: something lowers max_tokens",
            len(cut), len(side.answered),
        )  # fmt: skip


def stop_at_budget(pair: Pair) -> Iterator[Finding]:
    """`stop` on replies that fill their budget exactly, more than by the lengths below it: the reason of the end is not the
    server's. Where many are nearly as long, some just fit."""
    for side, _ in pair:
        full = [item for item in side.answered if item.output_tokens == side.task.max_tokens > SHORTEST_CAP_TOKENS]
        turned = [item for item in full if item.finish_reason == "stop" and item.tool is None]
        is_many = len(turned) >= FEWEST_TURNED and len(turned) >= TURNED_SHARE * len(full)
        if is_many and stats.poisson.sf(len(turned) - 1, _num_just_fitting(side)) < TURNED_P:
            yield found(
                pair, side,
                f"{some(len(turned), len(full))} replies of {side.label} that fill their {side.task.max_tokens} tokens say "
                "`stop`: something changes finish_reason",
                len(turned), len(full),
            )  # fmt: skip


def _num_just_fitting(side: Side) -> float:
    """Replies to expect at exactly the budget, by the lengths a little and a quarter below it."""
    budget = side.task.max_tokens
    lengths = Counter(budget - item.output_tokens for item in side.answered if item.output_tokens is not None)
    near = sum(num for below, num in lengths.items() if 0 < below <= NEIGHBOURS * budget)
    most_next = max(lengths[below] for below in range(1, NEXT_LENGTHS + 1))
    return max((near + 1) / (NEIGHBOURS * budget), TIMES_AS_MANY * most_next)


# ------------------------------------------------------------------------------------------------ what nobody sent
def unsent_stop(pair: Pair) -> Iterator[Finding]:
    """Replies that a stop string ended, though none was sent."""
    for side, _ in pair:
        served = side.task.served
        if served is None:
            continue
        num = sum(served.stop_strings.values())
        if exceeds(num, served.num_replies):
            text = max(served.stop_strings, key=lambda one: served.stop_strings[one])
            yield found(
                pair, side,
                f"{some(num, served.num_replies)} replies of {side.label} were ended by a stop string that was not sent "
                f"({text!r}): something adds one",
                num, served.num_replies,
            )  # fmt: skip


def contradicting_usage(pair: Pair) -> Iterator[Finding]:
    """Token counts that contradict themselves or the text: where replies were cut off cannot be seen."""
    for side, _ in pair:
        served = side.task.served
        if served is None:
            continue
        num = served.num_usage_problems
        if exceeds(num, served.num_replies):
            yield found(
                pair, side,
                f"the usage of {some(num, served.num_replies)} replies of {side.label} contradicts itself "
                f"({served.usage_problem}), so it cannot be seen which replies were cut off",
                num, served.num_replies,
            )  # fmt: skip
