"""Questions about documents, with distractor documents around the right ones.

From a local SQuAD (1.1 or 2.0) or HotpotQA file, or about invented facts. Wording: Hsieh et al. 2024 (arXiv 2404.06654).
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from assay_evaluate.tasks.ruler.draft import Blueprint, Draft, RulerError
from assay_evaluate.tasks.ruler.haystacks import cut, num_pieces
from assay_evaluate.tasks.ruler.niah import MOST_UNITS
from assay_evaluate.tasks.ruler.words import ADJECTIVES, NOUNS, split_words, stride
from assay_evaluate.transport.foreign_json import NotJson, read_json

NUM_PUBLISHED = 500
"""Questions of a file that RULER asks: its first ones."""
ONLY_SUPPORT = "reduced to fit: without the question's own distractor documents"
ONLY_THE_ANSWER = "Answer the question based on the given documents. Only give me the answer and do not output any other words."


@dataclass(frozen=True)
class QaQuestion:
    """A question; any of `answers` will do. `documents` are always there; `near` are those put around them first. `support`: of
    the documents, those that the answer is taken from; empty: all."""

    text: str
    answers: tuple[str, ...]
    documents: tuple[str, ...]
    near: tuple[str, ...] = ()
    support: tuple[str, ...] = ()


@dataclass(frozen=True)
class QaSource:
    """All questions of a source, and all its documents once each. `why_not_comparable`: None for published questions."""

    questions: tuple[QaQuestion, ...]
    documents: tuple[str, ...]
    why_not_comparable: str | None = None


def question_blueprint(source: QaSource, order_seed: str, seed: str, index: int) -> Blueprint:
    """The `index`-th question in an order that depends on `order_seed` alone: no question twice before all were asked.

    RULER asks the first NUM_PUBLISHED questions of a file, and so these come first. Units: whole documents without the answer,
    drawn from `seed`, begun again when all were used.
    """
    draw, num_questions = random.Random(order_seed), len(source.questions)
    published, others = [*range(min(NUM_PUBLISHED, num_questions))], [*range(NUM_PUBLISHED, num_questions)]
    draw.shuffle(published)
    draw.shuffle(others)
    question = source.questions[[*published, *others][index % num_questions]]
    smaller = None
    if question.support and set(question.support) != set(question.documents):
        distractors = tuple(document for document in question.documents if document not in question.support)
        reduced = replace(question, documents=question.support, near=distractors + question.near)
        smaller = _documents_blueprint(source, reduced, seed, ONLY_SUPPORT)
    return replace(_documents_blueprint(source, question, seed, source.why_not_comparable), smaller=smaller)


def _documents_blueprint(source: QaSource, question: QaQuestion, seed: str, note: str | None) -> Blueprint:
    draw = random.Random(seed)
    others = _Distractors(source, question, draw)
    shuffle = random.Random(draw.random())
    about = question.support or question.documents
    ranks: list[float] = []

    def build(units: int, pieces: int) -> Draft:
        documents = [*question.documents, *others.first(units + (pieces > 0))]
        if pieces:
            documents[-1] = cut(documents[-1], pieces)
        ranks.extend(shuffle.random() for _ in range(len(documents) - len(ranks)))
        shuffled = [documents[i] for i in sorted(range(len(documents)), key=ranks.__getitem__)]
        context = "\n\n".join(f"Document {i}:\n{document}" for i, document in enumerate(shuffled, 1))
        return Draft(
            question=f"{ONLY_THE_ANSWER}\n\nThe following are given documents.\n\n{context}\n\n{ONLY_THE_ANSWER}\n\n"
            f"Question: {question.text}",
            answer_prefix="Answer:",
            context=context,
            expected=question.answers,
            needles=about,
            facts={"question": question.text, "num_documents": len(documents), "about": " ".join(about[0].split())[:80]},
        )

    most = MOST_UNITS if others.is_endless else 0
    return Blueprint(build, 0, most, "any", note, num_pieces=lambda units: num_pieces(others.first(units + 1)[-1]))


class _Distractors:
    """Documents without the answer's: near ones first, then all of the source, again and again."""

    def __init__(self, source: QaSource, question: QaQuestion, draw: random.Random) -> None:
        self._own = set(question.documents)
        self._near = [document for document in question.near if document not in self._own]
        draw.shuffle(self._near)
        self._documents = [*self._near]
        self._source, self._num_taken = source.documents, 0
        self._next, self._step = draw.randrange(len(self._source)), stride(len(self._source), draw.randrange(len(self._source)))
        self.is_endless = any(self._is_other(document) for document in source.documents)

    def first(self, num_documents: int) -> list[str]:
        while self.is_endless and len(self._documents) < num_documents:
            document = self._source[self._next]
            is_first_round = self._num_taken < len(self._source)
            self._next, self._num_taken = (self._next + self._step) % len(self._source), self._num_taken + 1
            if self._is_other(document) and not (is_first_round and document in self._near):
                self._documents.append(document)
        return self._documents[:num_documents]

    def _is_other(self, document: str) -> bool:
        return document not in self._own and not any(own in document for own in self._own)


# ------------------------------------------------------------------------------------------------ published questions
def read_squad(path: str | Path) -> QaSource:
    """SQuAD 1.1 or 2.0 as published (JSON). Questions without an answer are left out; the other paragraphs of an article are
    near. RulerError if it is something else."""

    def parse(data: Any) -> Iterator[QaQuestion]:
        for article in data["data"]:
            contexts = tuple(dict.fromkeys(paragraph["context"] for paragraph in article["paragraphs"]))
            for paragraph in article["paragraphs"]:
                own = paragraph["context"]
                near = tuple(context for context in contexts if context != own)
                for row in paragraph["qas"]:
                    answers = tuple(dict.fromkeys(answer["text"] for answer in row["answers"]))
                    if answers and not row.get("is_impossible", False):
                        yield QaQuestion(row["question"], answers, (own,), near)

    def documents(data: Any) -> Iterator[str]:
        return (paragraph["context"] for article in data["data"] for paragraph in article["paragraphs"])

    return _read(Path(path), "SQuAD", parse, documents)


def read_hotpotqa(path: str | Path) -> QaSource:
    """HotpotQA as published (JSON, distractor setting). All ten documents of a question are always there."""

    def paragraphs(row: Any) -> dict[str, str]:
        return {title: f"{title}\n{''.join(sentences)}" for title, sentences in row["context"]}

    def parse(data: Any) -> Iterator[QaQuestion]:
        for row in data:
            texts = paragraphs(row)
            titles = dict.fromkeys(title for title, _ in row["supporting_facts"])
            support = tuple(texts[title] for title in titles if title in texts)
            yield QaQuestion(row["question"], (row["answer"],), tuple(texts.values()), support=support)

    def documents(data: Any) -> Iterator[str]:
        return (text for row in data for text in paragraphs(row).values())

    return _read(Path(path), "HotpotQA", parse, documents)


def _read(
    path: Path, name: str, parse: Callable[[Any], Iterator[QaQuestion]], documents: Callable[[Any], Iterator[str]]
) -> QaSource:
    try:
        data = read_json(path.read_bytes())
    except (OSError, NotJson) as error:
        raise RulerError(f"{path}: cannot be read as {name} JSON ({error}); give the file as it was published") from error
    try:
        source = QaSource(tuple(parse(data)), tuple(dict.fromkeys(documents(data))))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RulerError(
            f"{path}: not {name} as published ({type(error).__name__}: {error}); give the JSON file as it was published"
        ) from error
    if not source.questions or len(source.documents) < 2:
        raise RulerError(
            f"{path}: no question with an answer and another document to set beside it; give the whole {name} file"
        )
    return source


# ------------------------------------------------------------------------------------------------ invented questions
INVENTED = "the questions are about facts invented by assay"


_ONSETS = split_words("Bar Cal Dor Fen Gal Har Ister Jor Kel Lan Mar Nor Ost Pel Quin Ros Sel Tar Ulm Ver Wes Yar Zel Alt")
_MIDDLES = tuple(f"{first}{middle}{last}" for first in "aeiou" for middle in "rlnd" for last in "ao")
_TOWN_ENDS = split_words("burg ton wick dale mouth ford field haven stead bridge minster leigh")
_PERSON_ENDS = split_words("son man sen berg ley ster win sky ner dahl quist maker")
_FIRST_NAMES = split_words("Ada Bruno Clara David Edith Felix Greta Hugo Irene Jonas Karin Louis Maria Nils Olga Peter")
_BUILDINGS = tuple(
    part.replace("_", " ")
    for part in split_words("lighthouse town_hall old_bridge clock_tower library grain_mill chapel harbor_wall")
)
_TRADES = split_words("architect mason carpenter engineer surveyor")

NUM_NAMES = len(_ONSETS) * len(_MIDDLES) * len(_TOWN_ENDS)
"""Distinct towns, and as many people."""
assert len(_TOWN_ENDS) == len(_PERSON_ENDS)


def _name(number: int, ends: tuple[str, ...]) -> str:
    rest, end = divmod(number, len(ends))
    return _ONSETS[rest // len(_MIDDLES)] + _MIDDLES[rest % len(_MIDDLES)] + ends[end]


@functools.lru_cache(maxsize=4)
def invented_questions(seed: str, *, is_two_hop: bool) -> QaSource:
    """A question about each of NUM_NAMES towns. One hop: who built something there. Two hops: where that person was born."""
    draw = random.Random(f"{seed}:facts")
    step, shift = stride(NUM_NAMES, draw.randrange(NUM_NAMES)), draw.randrange(NUM_NAMES)
    questions, documents = [], []
    for number in range(NUM_NAMES):
        town = _name(number, _TOWN_ENDS)
        surname = _name((shift + number * step) % NUM_NAMES, _PERSON_ENDS)
        builder = f"{draw.choice(_FIRST_NAMES)} {surname}"
        building, birthplace = draw.choice(_BUILDINGS), _name(draw.randrange(NUM_NAMES), _TOWN_ENDS)
        about_town = _town(draw, town, building, builder)
        about_person = _person(draw, builder, birthplace)
        documents += [about_town, about_person]
        if is_two_hop:
            text = f"In which town was the person born who built the {building} of {town}?"
            questions.append(QaQuestion(text, (birthplace,), (about_town, about_person)))
        else:
            questions.append(QaQuestion(f"Who built the {building} of {town}?", (builder, surname), (about_town,)))
    return QaSource(tuple(questions), tuple(documents), INVENTED)


def _town(draw: random.Random, town: str, building: str, builder: str) -> str:
    return (
        f"{town}\n{town} is a {draw.choice(ADJECTIVES)} town near a {draw.choice(ADJECTIVES)} {draw.choice(NOUNS)}. "
        f"Its {building} was built by {builder} in {draw.randint(1500, 1950)}. "
        f"The town is known for {draw.choice(NOUNS)} and {draw.choice(NOUNS)}. "
        f"About {draw.randint(2, 90)} thousand people live there."
    )


def _person(draw: random.Random, name: str, birthplace: str) -> str:
    return (
        f"{name}\n{name} was a {draw.choice(_TRADES)} with a {draw.choice(ADJECTIVES)} style. "
        f"{name.split()[0]} was born in {birthplace} in {draw.randint(1450, 1920)}. "
        f"A drawing of a {draw.choice(ADJECTIVES)} {draw.choice(NOUNS)} hangs in the museum there."
    )
