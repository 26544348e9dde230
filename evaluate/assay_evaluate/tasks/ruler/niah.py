"""Needle tasks and variable tracking: what was hidden must be found, among much or among much alike.

`hiding_blueprint` makes all needle items: RULER's, those of the grid, and the codes of the quick suite (`tasks/items.py`).

Configurations and wording: Hsieh et al. 2024 (arXiv 2404.06654), section 3 and appendices.
"""

from __future__ import annotations

import random
import string
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from assay_evaluate.tasks.ruler.draft import Blueprint, Draft
from assay_evaluate.tasks.ruler.haystacks import Index, Sentences, as_published, cut, hide, nearest, noise, num_pieces
from assay_evaluate.tasks.ruler.languages import WORDINGS, RulerLanguage
from assay_evaluate.tasks.ruler.words import NUM_KEYS, key, stride

NeedleKind = Literal["words", "numbers", "uuids"]

MOST_UNITS = 10_000_000
NUM_HOPS = 4
"""Assignments after the first in variable tracking; the answer has one variable more."""
NUM_EXAMPLE_LINES, FEW_EXAMPLE_LINES = 16, 2
"""Noise in the worked example of variable tracking, which RULER fills up to 500 tokens; and where that does not fit."""
SHORT_EXAMPLE = "the worked example is shortened to fit"
DEPTHS = tuple(round(100 * i / 39) for i in range(40))
"""Places of needles in essays, in percent of the sentences; no two needles have the same."""


@dataclass(frozen=True)
class Needles:
    """One needle task: `num_keys` keys, `num_values` needles for each, and how many keys are asked for."""

    haystack: Literal["noise", "essay", "needles"]
    keys: NeedleKind = "words"
    values: NeedleKind = "numbers"
    num_keys: int = 1
    num_values: int = 1
    num_queries: int = 1


def needle_blueprint(spec: Needles, seed: str, essays: Sentences, *, by_word: bool = False) -> Blueprint:
    """essays: the sentences of an essay haystack, by their number or (by_word) by that of their words; whether those are
    comparable is the caller's to say."""
    draw = random.Random(seed)
    stream = key_stream(draw) if spec.keys == "words" else lambda _: str(uuid.UUID(int=draw.getrandbits(128), version=4))
    keys = [stream(i) for i in range(spec.num_keys)]
    values: list[str] = []
    while len(set(values)) < spec.num_keys * spec.num_values:
        values = [_value_of(spec.values, draw) for _ in range(spec.num_keys * spec.num_values)]
    is_essay = spec.haystack == "essay"
    places = [depth / 100 for depth in draw.sample(DEPTHS, len(values))] if is_essay else [draw.random() for _ in values]
    sentences = [_needle(spec.values, keys[i // spec.num_values], value) for i, value in enumerate(values)]
    num_asked = spec.num_queries * spec.num_values
    asked = draw.sample(range(spec.num_keys), spec.num_queries)
    chosen = [i * spec.num_values + j for i in asked for j in range(spec.num_values)]
    distractors = _distractors(spec, draw, stream, frozenset(values))
    filler = {"noise": noise, "essay": essays, "needles": distractors}[spec.haystack]
    before, question, prefix = _wording(spec.values, [keys[i] for i in asked], num_asked)

    most = NUM_KEYS - spec.num_keys if filler is distractors and spec.keys == "words" else MOST_UNITS
    return hiding_blueprint(
        filler,
        list(zip(places, sentences, strict=True)),
        asked=[sentences[i] for i in chosen],
        expected=[values[i] for i in chosen],
        keys=[keys[i] for i in asked],
        before=before,
        question=question,
        answer_prefix=prefix,
        joint=" " if is_essay else "\n",
        most=most,
        index=as_published,
        is_divided=not (is_essay and by_word),
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
    index: Index = nearest,
    is_divided: bool = True,
) -> Blueprint:
    """The one generator of needle items: sentences hidden in filler, with what is said before it and asked after it.

    placed: (share of the filler before it 0..1, needle) of all; asked: those that hold the answer; keys: what they are asked
    by. Units: what `filler` counts, as a rule its sentences; is_divided: the last of them may be cut.
    """

    def build(units: int, pieces: int) -> Draft:
        sentences = filler(units + (pieces > 0))
        if pieces:
            sentences[-1] = cut(sentences[-1], pieces)
        context = hide(sentences, placed, joint, index)
        return Draft(
            question=f"{before}\n{context}\n{question}",
            answer_prefix=answer_prefix,
            context=context,
            expected=tuple(expected),
            needles=tuple(asked),
            facts={"keys": list(keys), "num_units": units},
        )

    return Blueprint(build, 0, most, "all", num_pieces=lambda units: num_pieces(filler(units + 1)[-1]) if is_divided else 0)


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
    if kind == "numbers":
        return str(draw.randint(1_000_000, 9_999_999))
    return str(uuid.UUID(int=draw.getrandbits(128), version=4))


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
        singular = kind[:-1]
        return (
            f"A special magic {singular} is hidden within the following text. Make sure to memorize it. "
            f"I will quiz you about the {singular} afterwards.",
            f"What is the special magic {singular} for {asked} mentioned in the provided text?",
            f"The special magic {singular} for {asked} mentioned in the provided text is",
        )
    return (
        f"Some special magic {kind} are hidden within the following text. Make sure to memorize it. "
        f"I will quiz you about the {kind} afterwards.",
        f"What are all the special magic {kind} for {asked} mentioned in the provided text?",
        f"The special magic {kind} for {asked} mentioned in the provided text are",
    )


# ------------------------------------------------------------------------------------------------ variable tracking
def tracking_blueprint(seed: str) -> Blueprint:
    """One chain of assignments in noise, in order; all variables that hold the value are asked for. One worked example."""
    return _tracking(seed, NUM_EXAMPLE_LINES, None, _tracking(seed, FEW_EXAMPLE_LINES, SHORT_EXAMPLE, None))


def _tracking(seed: str, num_example_lines: int, note: str | None, smaller: Blueprint | None) -> Blueprint:
    draw = random.Random(seed)
    names, example_names = _variable_names(draw, 5), _variable_names(draw, 3)
    value, example_value = draw.sample(range(10_000, 99_999), 2)
    example = _track(example_names, example_value, f"{seed}:example", num_example_lines)
    worked_example = f"{example.question} {example.answer_prefix} {' '.join(example.expected)}\n\n"

    def build(units: int, pieces: int) -> Draft:
        draft = _track(names, value, seed, units)
        return replace(draft, question=worked_example + draft.question)

    return Blueprint(build, 0, MOST_UNITS, "all", note, smaller=smaller)


def _variable_names(draw: random.Random, num_letters: int) -> list[str]:
    names: dict[str, None] = {}
    while len(names) < NUM_HOPS + 1:
        names["".join(draw.choices(string.ascii_uppercase, k=num_letters))] = None
    return list(names)


def _track(names: list[str], value: int, seed: str, num_lines: int) -> Draft:
    """The chain before lines of noise, no two assignments before the same one where there are enough; written as RULER's
    scripts write it, with a space at the end and no full stop."""
    chain = [f"VAR {names[0]} = {value}"] + [f"VAR {name} = VAR {holder} " for holder, name in pairwise(names)]
    draw = random.Random(f"{seed}:lines:{num_lines}")
    places, k = range(num_lines), len(chain)
    before = draw.sample(places, k) if num_lines >= k else draw.choices([*places, num_lines], k=k)
    lines = noise(num_lines)
    for place, assignment in reversed([*zip(sorted(before), chain, strict=True)]):
        lines.insert(place, assignment)
    context = "\n".join(lines)
    return Draft(
        question="Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
        f"{context}\nQuestion: Find all variables that are assigned the value {value} in the text above.",
        answer_prefix="Answer: According to the chain(s) of variable assignment in the text above, "
        f"{len(names)} variables are assigned the value {value}, they are:",
        context=context,
        expected=tuple(names),
        needles=tuple(chain),
        facts={"value": str(value), "num_units": num_lines},
    )
