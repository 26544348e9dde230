"""One item: made for a model's tokenizer and template, the same whenever and in whatever company it is made.

All randomness comes from `random.Random(f"{seed}:{task}:{length}:{index}...")`. The style of the prompt is no part of it: the
three styles of one item ask the same, but for the filler that fits.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from assay_evaluate.tasks.ruler.draft import Blueprint, Draft, Match, RulerError
from assay_evaluate.tasks.ruler.sizing import Fitted, largest_fitting
from assay_evaluate.tasks.ruler.tokens import CountTokens, Prompt

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
    is spread over all of it. `comparable`: whether scores may be held against published ones; `note` says why not.
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
    blueprint, fitted = _fit(blueprint, style, room_tokens, count_tokens, where)
    pieces, num_tokens = 0, fitted.num_tokens
    if num_tokens < LEAST_FILL * room_tokens and fitted.units < blueprint.most:
        pieces, num_tokens = _add_pieces(blueprint, fitted, style, room_tokens, count_tokens)
    fill = num_tokens / room_tokens
    if fill < LEAST_FILL:
        raise RulerError(
            f"{where}: {num_tokens} of {room_tokens} tokens, {fill:.1%} full, and at least {LEAST_FILL:.0%} are needed; "
            f"{_remedy(blueprint, fitted)}"
        )
    draft = blueprint.build(fitted.units, pieces)
    _check(draft, where)
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


def _fit(
    blueprint: Blueprint, style: Style, room_tokens: int, count_tokens: CountTokens, where: str
) -> tuple[Blueprint, Fitted]:
    """The blueprint, or the first of its smaller ones of which at least the least fits."""
    trial: Blueprint | None = blueprint
    while trial is not None:
        counter = _Counter(trial, style, count_tokens)
        # a unit is a token at least, so there is no need to look further than one for each
        last = min(trial.most, trial.least + max(room_tokens, 0))
        fitted = largest_fitting(counter.of_units, room_tokens, trial.least, last)
        if fitted is not None:
            return trial, fitted
        trial = trial.smaller
    raise RulerError(
        f"{where}: what must be in it needs more than the {room_tokens} tokens there are; ask for a greater length"
    )


def _add_pieces(
    blueprint: Blueprint, fitted: Fitted, style: Style, room_tokens: int, count_tokens: CountTokens
) -> tuple[int, int]:
    """Pieces of the next unit that still fit, and the tokens of all: for tokenizers to which one sentence is much."""
    last = blueprint.num_pieces(fitted.units) - 1
    counter = _Counter(blueprint, style, count_tokens, fitted.units)
    best = largest_fitting(counter.of_pieces, room_tokens, 0, last) if last > 0 else None
    return (best.units, best.num_tokens) if best is not None else (0, fitted.num_tokens)


@dataclass(frozen=True)
class _Counter:
    blueprint: Blueprint
    style: Style
    count_tokens: CountTokens
    units: int = 0

    def of_units(self, units: int) -> int:
        return self._count(self.blueprint.build(units, 0))

    def of_pieces(self, pieces: int) -> int:
        return self._count(self.blueprint.build(self.units, pieces))

    def _count(self, draft: Draft) -> int:
        return self.count_tokens(prompt_of(self.style, draft.question, draft.answer_prefix))


def _remedy(blueprint: Blueprint, fitted: Fitted) -> str:
    if fitted.units >= blueprint.most:
        return f"there is no more filler than {blueprint.most} units: ask for a smaller length or give a larger source"
    return "one unit of filler is too much: ask for a greater length"


def _check(draft: Draft, where: str) -> None:
    """Every needle is there once; a text of one's own that holds one would make the answer ambiguous."""
    for needle in draft.needles:
        if draft.context.count(needle) != 1:
            raise RulerError(f"{where}: the context holds {needle[:60]!r} {draft.context.count(needle)} times instead of once")


def saved_fields(item: RulerItem) -> dict[str, Any]:
    """The item as plain data, without its hash."""
    return asdict(item)


def from_saved_fields(fields: Mapping[str, Any]) -> RulerItem:
    """The inverse of `saved_fields`, after a way through JSON."""
    tuples: Sequence[str] = ("expected", "depths")
    return RulerItem(**{**fields, **{name: tuple(fields[name]) for name in tuples}})
