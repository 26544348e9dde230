"""Questions about documents, with distractor documents around the right ones.

From a local SQuAD (1.1 or 2.0) or HotpotQA file, or about invented facts. Wording: Hsieh et al. 2024 (arXiv 2404.06654).
"""

from __future__ import annotations

import functools
import json
import random
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from assay_evaluate.tasks.ruler.draft import Blueprint, Draft, RulerError
from assay_evaluate.tasks.ruler.haystacks import cut, num_pieces, split_sentences
from assay_evaluate.tasks.ruler.niah import MOST_UNITS
from assay_evaluate.tasks.ruler.words import stride

ONLY_THE_ANSWER = "Answer the question based on the given documents. Only give me the answer and do not output any other words."


@dataclass(frozen=True)
class QaQuestion:
    """A question; any of `answers` will do. `documents` hold the answer; `near` are those put around them first."""

    text: str
    answers: tuple[str, ...]
    documents: tuple[str, ...]
    near: tuple[str, ...] = ()


@dataclass(frozen=True)
class QaSource:
    """All questions of a source, and all its documents once each. `why_not_comparable`: None for published questions."""

    questions: tuple[QaQuestion, ...]
    documents: tuple[str, ...]
    why_not_comparable: str | None = None


def question_blueprint(source: QaSource, order_seed: str, seed: str, index: int) -> Blueprint:
    """The `index`-th question in an order that depends on `order_seed` alone: no question twice before all were asked.

    Units: sentences of distractors, in an order drawn from `seed`; begun again when all were used.
    """
    order = list(range(len(source.questions)))
    random.Random(order_seed).shuffle(order)
    question = source.questions[order[index % len(order)]]
    draw = random.Random(seed)
    places = sorted(draw.random() for _ in question.documents)
    gold = list(question.documents)
    draw.shuffle(gold)
    stream = _Distractors(source, question, draw)

    def build(units: int, pieces: int) -> Draft:
        documents = stream.first(units, pieces)
        num_others = len(documents)
        for place, document in sorted(zip(places, gold, strict=True), reverse=True):
            documents.insert(round(place * num_others), document)
        context = "\n\n".join(f"Document {i}:\n{document}" for i, document in enumerate(documents, 1))
        return Draft(
            question=f"{ONLY_THE_ANSWER}\n\nThe following are given documents.\n\n{context}\n\n{ONLY_THE_ANSWER}\n\n"
            f"Question: {question.text}",
            answer_prefix="Answer:",
            context=context,
            expected=question.answers,
            needles=question.documents,
            facts={"question": question.text, "num_documents": len(documents)},
        )

    most = MOST_UNITS if stream.is_endless else 0
    return Blueprint(build, 0, most, "any", source.why_not_comparable, num_pieces=stream.num_pieces)


class _Distractors:
    """Documents without the answer's, cut at a sentence when the last one is too long."""

    def __init__(self, source: QaSource, question: QaQuestion, draw: random.Random) -> None:
        own = set(question.documents)
        self._documents = [document for document in question.near if document not in own]
        self._ends = list(accumulate(map(_num_sentences, self._documents)))
        self._own, self._known = own, own.union(self._documents)
        self.is_endless = any(self._is_other(document) for document in source.documents)
        self._source = source.documents
        self._next, self._step = draw.randrange(len(self._source)), stride(len(self._source), draw.randrange(len(self._source)))

    def first(self, num_sentences: int, pieces: int) -> list[str]:
        """Documents with that many sentences in all, and so many pieces of the next sentence."""
        self._reach(num_sentences + 1)
        whole = bisect_right(self._ends, num_sentences)
        left = num_sentences - (self._ends[whole - 1] if whole else 0)
        documents = self._documents[:whole]
        if left or pieces:
            sentences = split_sentences(self._documents[whole])
            rest = [cut(sentences[left], pieces)] if pieces else []
            documents.append(" ".join([*sentences[:left], *rest]))
        return documents

    def num_pieces(self, num_sentences: int) -> int:
        """Pieces of the sentence after the first `num_sentences`."""
        if not self.is_endless:
            return 0
        self._reach(num_sentences + 1)
        whole = bisect_right(self._ends, num_sentences)
        left = num_sentences - (self._ends[whole - 1] if whole else 0)
        return num_pieces(split_sentences(self._documents[whole])[left])

    def _is_other(self, document: str) -> bool:
        return document not in self._known and not any(own in document for own in self._own)

    def _reach(self, num_sentences: int) -> None:
        while self.is_endless and (not self._ends or self._ends[-1] < num_sentences):
            document = self._source[self._next]
            self._next = (self._next + self._step) % len(self._source)
            if self._is_other(document):
                self._documents.append(document)
                self._ends.append(_num_sentences(document) + (self._ends[-1] if self._ends else 0))


@functools.lru_cache(maxsize=300_000)
def _num_sentences(document: str) -> int:
    return len(split_sentences(document))


# ------------------------------------------------------------------------------------------------ published questions
def read_squad(path: str | Path) -> QaSource:
    """SQuAD 1.1 or 2.0 as published (JSON). Questions without an answer are left out. RulerError if it is something else."""

    def parse(data: Any) -> Iterator[QaQuestion]:
        for article in data["data"]:
            for paragraph in article["paragraphs"]:
                for asked in paragraph["qas"]:
                    answers = tuple(dict.fromkeys(answer["text"] for answer in asked["answers"]))
                    if answers and not asked.get("is_impossible", False):
                        yield QaQuestion(asked["question"], answers, (paragraph["context"],))

    documents = _unique(lambda data: (paragraph["context"] for article in data["data"] for paragraph in article["paragraphs"]))
    return _read(Path(path), "SQuAD", parse, documents)


def read_hotpotqa(path: str | Path) -> QaSource:
    """HotpotQA as published (JSON, distractor setting). The supporting documents are the question's, the rest its near ones."""

    def paragraphs(row: Any) -> dict[str, str]:
        return {title: f"{title}\n{''.join(sentences)}" for title, sentences in row["context"]}

    def parse(data: Any) -> Iterator[QaQuestion]:
        for row in data:
            texts = paragraphs(row)
            titles = dict.fromkeys(title for title, _ in row["supporting_facts"])
            own = tuple(texts[title] for title in titles if title in texts)
            if len(own) == len(titles):
                near = tuple(text for title, text in texts.items() if title not in titles)
                yield QaQuestion(row["question"], (row["answer"],), own, near)

    return _read(Path(path), "HotpotQA", parse, _unique(lambda data: (t for row in data for t in paragraphs(row).values())))


def _unique(find: Callable[[Any], Iterator[str]]) -> Callable[[Any], tuple[str, ...]]:
    return lambda data: tuple(dict.fromkeys(find(data)))


def _read(
    path: Path, name: str, parse: Callable[[Any], Iterator[QaQuestion]], documents: Callable[[Any], tuple[str, ...]]
) -> QaSource:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise RulerError(f"{path}: cannot be read as {name} JSON ({error}); give the file as it was published") from error
    try:
        found = QaSource(tuple(parse(data)), documents(data))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RulerError(
            f"{path}: not {name} as published ({type(error).__name__}: {error}); give the JSON file as it was published"
        ) from error
    if not found.questions or len(found.documents) < 2:
        raise RulerError(
            f"{path}: no question with an answer and another document to set beside it; give the whole {name} file"
        )
    return found
