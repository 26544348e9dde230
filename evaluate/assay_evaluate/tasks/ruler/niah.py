"""Needle tasks and variable tracking: what was hidden must be found, among much or among much alike.

`hiding_blueprint` makes all needle items: RULER's, those of the grid, and the codes of the quick suite (`tasks/items.py`).

Configurations and wording: Hsieh et al. 2024 (arXiv 2404.06654), section 3 and appendices.
"""

from __future__ import annotations

import random
import string
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from assay_evaluate.tasks.ruler.draft import Blueprint, Draft
from assay_evaluate.tasks.ruler.haystacks import Sentences, cut, hide, noise, num_pieces
from assay_evaluate.tasks.ruler.languages import WORDINGS, RulerLanguage
from assay_evaluate.tasks.ruler.words import NUM_KEYS, key, stride

NeedleKind = Literal["words", "numbers", "uuids"]

MOST_UNITS = 10_000_000
NUM_HOPS = 4
"""Assignments after the first in variable tracking; the answer has one variable more."""
NUM_EXAMPLE_SENTENCES = 10
"""Noise in the worked example of variable tracking."""


@dataclass(frozen=True)
class Needles:
    """One needle task: `num_keys` keys, `num_values` needles for each, and how many keys are asked for."""

    haystack: Literal["noise", "essay", "needles"]
    keys: NeedleKind = "words"
    values: NeedleKind = "numbers"
    num_keys: int = 1
    num_values: int = 1
    num_queries: int = 1


def needle_blueprint(spec: Needles, seed: str, essays: Sentences) -> Blueprint:
    """`essays`: the sentences of an essay haystack; whether those are comparable is the caller's to say."""
    draw = random.Random(seed)
    stream = key_stream(draw) if spec.keys == "words" else lambda _: str(uuid.UUID(int=draw.getrandbits(128), version=4))
    keys = [stream(i) for i in range(spec.num_keys)]
    values = _distinct([_value_of(spec.values, draw) for _ in range(spec.num_keys * spec.num_values)], spec.values, draw)
    places = [draw.random() for _ in values]
    sentences = [_needle(spec.values, keys[i // spec.num_values], value) for i, value in enumerate(values)]
    num_asked = spec.num_queries * spec.num_values
    asked = draw.sample(range(spec.num_keys), spec.num_queries)
    chosen = [i * spec.num_values + j for i in asked for j in range(spec.num_values)]
    others = _distractors(spec, draw, stream, frozenset(values))
    filler = {"noise": noise, "essay": essays, "needles": others}[spec.haystack]
    before, question, prefix = _wording(spec.values, [keys[i] for i in asked], num_asked)

    most = NUM_KEYS - spec.num_keys if filler is others and spec.keys == "words" else MOST_UNITS
    return hiding_blueprint(
        filler,
        list(zip(places, sentences, strict=True)),
        asked=[sentences[i] for i in chosen],
        expected=[values[i] for i in chosen],
        keys=[keys[i] for i in asked],
        before=before,
        question=question,
        answer_prefix=prefix,
        most=most,
    )


def hiding_blueprint(
    filler: Sentences,
    placed: Sequence[tuple[float, str]],
    *,
    asked: Sequence[str],
    expected: Sequence[str],
    keys: Sequence[str],
    before: str,
    question: str,
    answer_prefix: str = "",
    joint: str = " ",
    most: int = MOST_UNITS,
) -> Blueprint:
    """The one generator of needle items: sentences hidden in filler, with what is said before it and asked after it.

    placed: (share of the filler before it 0..1, needle) of all; asked: those that hold the answer; keys: what they are asked
    by. Units: sentences of `filler`.
    """

    def build(units: int, pieces: int) -> Draft:
        sentences = filler(units + (pieces > 0))
        if pieces:
            sentences[-1] = cut(sentences[-1], pieces)
        context = hide(sentences, placed, joint)
        return Draft(
            question=f"{before}\n{context}\n{question}",
            answer_prefix=answer_prefix,
            context=context,
            expected=tuple(expected),
            needles=tuple(asked),
            facts={"keys": list(keys), "num_sentences": units},
        )

    return Blueprint(build, 0, most, "all", num_pieces=lambda units: num_pieces(filler(units + 1)[-1]))


def grid_blueprint(language: RulerLanguage, depth: float, seed: str, essays: Sentences) -> Blueprint:
    """One needle at `depth` (0 first sentence, 1 last), in any of `LANGUAGES`; the value is a number of seven digits."""
    words = WORDINGS[language]
    draw = random.Random(seed)
    name, value = words.key(draw), _value_of("numbers", draw)
    needle = words.needle.format(key=name, value=value)

    return hiding_blueprint(
        essays,
        [(depth, needle)],
        asked=[needle],
        expected=[value],
        keys=[name],
        before=words.before,
        question=words.question.format(key=name),
        answer_prefix=words.answer_prefix.format(key=name),
        joint=words.joint,
    )


def key_stream(draw: random.Random) -> Callable[[int], str]:
    """number -> a key in words, different for every number below NUM_KEYS."""
    start, step = draw.randrange(NUM_KEYS), stride(NUM_KEYS, draw.randrange(NUM_KEYS))
    return lambda number: key((start + number * step) % NUM_KEYS)


def _value_of(kind: NeedleKind, draw: random.Random) -> str:
    return (
        str(draw.randint(1_000_000, 9_999_999)) if kind == "numbers" else str(uuid.UUID(int=draw.getrandbits(128), version=4))
    )


def _distinct(values: list[str], kind: NeedleKind, draw: random.Random) -> list[str]:
    while len(set(values)) < len(values):
        values = [_value_of(kind, draw) for _ in values]
    return values


def _needle(kind: NeedleKind, name: str, value: str) -> str:
    return f"One of the special magic {kind} for {name} is: {value}."


def _distractors(
    spec: Needles, draw: random.Random, stream: Callable[[int], str], taken: frozenset[str]
) -> Callable[[int], list[str]]:
    """Needles that nobody asks for: other keys, other values."""
    made: list[str] = []

    def first(num_sentences: int) -> list[str]:
        while len(made) < num_sentences:
            value = _value_of(spec.values, draw)
            if value not in taken:
                made.append(_needle(spec.values, stream(spec.num_keys + len(made)), value))
        return made[:num_sentences]

    return first


def _wording(kind: NeedleKind, names: list[str], num_values: int) -> tuple[str, str, str]:
    """What stands before the haystack, what after it, and how the answer begins."""
    asked = names[0] if len(names) == 1 else f"{', '.join(names[:-1])}, and {names[-1]}"
    if num_values == 1:
        one = kind[:-1]
        return (
            f"A special magic {one} is hidden within the following text. Make sure to memorize it. "
            f"I will quiz you about the {one} afterwards.",
            f"What is the special magic {one} for {asked} mentioned in the provided text?",
            f"The special magic {one} for {asked} mentioned in the provided text is",
        )
    return (
        f"Some special magic {kind} are hidden within the following text. Make sure to memorize them. "
        f"I will quiz you about the {kind} afterwards.",
        f"What are all the special magic {kind} for {asked} mentioned in the provided text?",
        f"The special magic {kind} for {asked} mentioned in the provided text are",
    )


# ------------------------------------------------------------------------------------------------ variable tracking
def tracking_blueprint(seed: str) -> Blueprint:
    """One chain of assignments in noise, in order; all variables that hold the value are asked for. One worked example."""
    draw = random.Random(seed)
    names = _variable_names(draw, 2 * (NUM_HOPS + 1))
    first, second = draw.sample(range(10_000, 100_000), 2)
    example = _track(names[: NUM_HOPS + 1], first, sorted(draw.random() for _ in range(NUM_HOPS + 1)), NUM_EXAMPLE_SENTENCES)
    shown = f"{example.question} {example.answer_prefix} {' '.join(example.expected)}\n\n"
    places = sorted(draw.random() for _ in range(NUM_HOPS + 1))

    def build(units: int, pieces: int) -> Draft:
        draft = _track(names[NUM_HOPS + 1 :], second, places, units)
        return Draft(shown + draft.question, draft.answer_prefix, draft.context, draft.expected, draft.needles, draft.facts)

    return Blueprint(build, 0, MOST_UNITS, "all")


def _variable_names(draw: random.Random, num_names: int) -> list[str]:
    names: dict[str, None] = {}
    while len(names) < num_names:
        names["".join(draw.choices(string.ascii_uppercase, k=5))] = None
    return list(names)


def _track(names: list[str], value: int, places: list[float], num_sentences: int) -> Draft:
    chain = [f"VAR {names[0]} = {value}."] + [f"VAR {name} = VAR {before}." for before, name in pairwise(names)]
    context = hide(noise(num_sentences), list(zip(places, chain, strict=True)))
    return Draft(
        question="Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
        f"{context}\nQuestion: Find all variables that are assigned the value {value} in the text above.",
        answer_prefix="Answer: According to the chain(s) of variable assignment in the text above, "
        f"{len(names)} variables are assigned the value {value}, they are:",
        context=context,
        expected=tuple(names),
        needles=tuple(chain),
        facts={"value": str(value), "num_sentences": num_sentences},
    )
