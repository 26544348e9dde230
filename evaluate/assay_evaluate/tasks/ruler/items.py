"""One item: made for a model's tokenizer and template, the same whenever and in whatever company it is made.

All randomness comes from `random.Random(f"{seed}:{task}:{length}:{index}...")`. The style of the prompt is no part of it: the
three styles of one item ask the same, but for the filler that fits. How much fits is found with few exact counts, since at 1M
tokens counting is the cost.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from assay_evaluate.tasks.ruler.draft import Blueprint, Match, RulerError
from assay_evaluate.tasks.ruler.tokens import CountTokens, Prompt

# ------------------------------------------------------------------------------------------------ how much filler fits
PROBE_UNITS = 16
"""So much is counted first, to learn what a unit costs."""
PROBE_SHARE = 0.04
"""Share of the room that is counted next: a better price per unit, still cheap."""
SLACK = 0.003
"""Share of the room that may stay empty once more than a unit would fit; spares counts where units are many."""


@dataclass(frozen=True)
class Fitted:
    """The most units that fit, and the tokens of all."""

    units: int
    num_tokens: int


def largest_fitting(
    count: Callable[[int], int], room_tokens: int, first: int, last: int, slack: float = SLACK
) -> Fitted | None:
    """The largest number of units in first..last whose count stays within the room; None if even `first` does not.

    Binary search in which the middle is foretold from the tokens per unit seen so far; plain halving after ten steps. `count`
    should grow with its argument. Ends at the unit, or when less than `slack` of the room (but at least a unit) is empty.
    A pure function of its arguments: the same item is found in whatever company it is made.
    """
    low = Fitted(first, count(first))
    if low.num_tokens > room_tokens:
        return None
    high = last + 1  # the first number known, or declared, not to fit
    per_unit = 0.0
    for step in range(200):
        left = room_tokens - low.num_tokens
        if high - low.units == 1 or (per_unit and per_unit <= left <= slack * room_tokens):
            return low
        if step == 0:
            units = first + PROBE_UNITS
        elif step < 10 and per_unit:
            probe = PROBE_SHARE * room_tokens
            # what should fill what is left, up to the middle of the slack; first only as much as the second probe
            guess = probe if low.num_tokens < probe and left > 2 * probe else max(left - SLACK * room_tokens / 2, per_unit)
            units = low.units + int(guess / per_unit)
        else:
            units = (low.units + high) // 2
        units = min(max(units, low.units + 1), high - 1)
        num_tokens = count(units)
        if num_tokens <= room_tokens:
            per_unit = (num_tokens - low.num_tokens) / (units - low.units) or per_unit
            low = Fitted(units, num_tokens)
        else:
            high = units
            per_unit = (num_tokens - low.num_tokens) / (high - low.units)
    raise AssertionError("200 steps of a binary search")


# ------------------------------------------------------------------------------------------------ items
GENERATOR_VERSION = "2"
"""Raised whenever the same arguments would give another item."""
LEAST_FILL = 0.95
"""Of the tokens an item may have; a shorter one would carry a length it has not."""

Style = Literal["base", "chat", "prefill"]
"""`base`: one text that ends with the first words of the answer. `chat`: a question, for models that think before they answer.
`prefill`: a question, and a reply that has already begun."""
STYLES: tuple[Style, ...] = get_args(Style)


@dataclass(frozen=True)
class RulerItem:
    """One question of one length.

    `length_tokens` is prompt and reply together; `reply_tokens` of them are left for the reply. `fill` is `prompt_tokens` over
    what was left for the prompt. `depths`: where each needle begins in the context, 0..1 by characters; empty where the answer
    is spread over all of it. `comparable`: whether scores may be compared with published ones; `note` says why not.
    """

    task: str
    length_tokens: int
    index: int
    language: str
    style: Style
    question: str
    answer_prefix: str
    expected: tuple[str, ...]
    match: Match
    prompt_tokens: int
    reply_tokens: int
    fill: float
    depths: tuple[float, ...]
    comparable: bool
    note: str | None
    facts: Mapping[str, Any]
    seed: str
    generator_version: str = GENERATOR_VERSION

    @property
    def id(self) -> str:
        return f"{self.task}/{self.length_tokens}/{self.index}"

    @property
    def prompt(self) -> Prompt:
        """What to send: a text (`base`) or messages; `prefill` ends with the assistant, whose message is to be continued."""
        return prompt_of(self.style, self.question, self.answer_prefix)

    @property
    def sha256(self) -> str:
        """Of every field, in a fixed form."""
        text = json.dumps(asdict(self), sort_keys=True, ensure_ascii=False, separators=(",", ":"))
        return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()  # an edited file may hold lone surrogates


def prompt_of(style: Style, question: str, answer_prefix: str) -> Prompt:
    """The prompt in one of the three styles."""
    if style == "base":
        return f"{question} {answer_prefix}"
    messages = [{"role": "user", "content": question}]
    return messages if style == "chat" else [*messages, {"role": "assistant", "content": answer_prefix}]


def size_item(
    blueprint: Blueprint,
    *,
    task: str,
    length_tokens: int,
    index: int,
    language: str,
    style: Style,
    seed: str,
    reply_tokens: int,
    count_tokens: CountTokens,
) -> RulerItem:
    """Fill `length_tokens - reply_tokens` with as much of the blueprint as fits. RulerError below LEAST_FILL of it."""
    room_tokens = length_tokens - reply_tokens
    where = f"{task} at {length_tokens} tokens (item {index}, style {style})"

    def count(blueprint: Blueprint, units: int, pieces: int) -> int:
        draft = blueprint.build(units, pieces)
        return count_tokens(prompt_of(style, draft.question, draft.answer_prefix))

    fitted = None
    while fitted is None:
        # a unit is a token at least, so there is no need to look further than one for each
        last = min(blueprint.most, blueprint.least + max(room_tokens, 0))
        fitted = largest_fitting(functools.partial(count, blueprint, pieces=0), room_tokens, blueprint.least, last)
        if fitted is None:
            if blueprint.smaller is None:
                raise RulerError(
                    f"{where}: what must be in it needs more than the {room_tokens} tokens there are; ask for a greater length"
                )
            blueprint = blueprint.smaller
    pieces, num_tokens = 0, fitted.num_tokens
    has_more = fitted.units < blueprint.most
    if num_tokens < LEAST_FILL * room_tokens and has_more:  # to some tokenizers one sentence is much: pieces of the next one
        last = blueprint.num_pieces(fitted.units) - 1
        of_pieces = functools.partial(count, blueprint, fitted.units)
        best = largest_fitting(of_pieces, room_tokens, 0, last) if last > 0 else None
        pieces, num_tokens = (best.units, best.num_tokens) if best is not None else (0, num_tokens)
    fill = num_tokens / room_tokens
    if fill < LEAST_FILL:
        remedy = "one unit of filler is too much: ask for a greater length"
        if not has_more:
            remedy = f"there is no more filler than {blueprint.most} units: ask for a smaller length or give a larger source"
        raise RulerError(
            f"{where}: {num_tokens} of {room_tokens} tokens, {fill:.1%} full, and at least {LEAST_FILL:.0%} are needed; "
            + remedy
        )
    draft = blueprint.build(fitted.units, pieces)
    for needle in draft.needles:  # a text of one's own that holds one would make the answer ambiguous
        if (times := draft.context.count(needle)) != 1:
            raise RulerError(f"{where}: the context holds {needle[:60]!r} {times} times instead of once")
    return RulerItem(
        task=task,
        length_tokens=length_tokens,
        index=index,
        language=language,
        style=style,
        question=draft.question,
        answer_prefix=draft.answer_prefix,
        expected=draft.expected,
        match=blueprint.match,
        prompt_tokens=num_tokens,
        reply_tokens=reply_tokens,
        fill=fill,
        depths=draft.depths(),
        comparable=blueprint.why_not_comparable is None,
        note=blueprint.why_not_comparable,
        facts=draft.facts,
        seed=seed,
    )


def from_saved_fields(fields: Mapping[str, Any]) -> RulerItem:
    """The inverse of `dataclasses.asdict`, after a way through JSON."""
    return RulerItem(**{**fields, **{name: tuple(fields[name]) for name in ("expected", "depths")}})


# ------------------------------------------------------------------------------------------------ scores
def score(item: RulerItem, text: str) -> float:
    """Score in 0..1 of a reply to `item`: without its reasoning, and without the beginning that the prompt gave it.

    The share of the expected strings found in it, upper and lower case alike; of aliases of one answer any is enough.
    """
    return share_found(text, item.expected, item.match)


def share_found(text: str, expected: Sequence[str], match: Match) -> float:
    """By `Match`, upper and lower case alike."""
    found = [string.lower() in text.lower() for string in expected]
    return sum(found) / len(found) if match == "all" else float(any(found))
