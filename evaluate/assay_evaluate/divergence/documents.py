"""The texts that both sides score: what the reference wrote, and text that no model here wrote.

Drift shows in what a model says itself, above all in long replies, so most texts are replies the *reference* samples at T=1,
top_p=1, no penalties: to questions of our own, and to those of the suite's tasks, thinking included. Only on such text is the
corrected KL unbiased. Held-out text is kept apart: it is the same for every model, and as long as one likes.

Texts are made once and kept with their exact token ids; nothing is tokenized again, for another split into tokens would be
another document.
"""

from __future__ import annotations

import contextlib
import json
import random
import sqlite3
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from assay.errors import MeasureError
from assay.foreign_text import one_line
from assay.recipes.suite import DivergenceSpec, SuiteRecipe
from assay.records.divergence import TextSet
from assay.records.measurement import ItemResult
from assay_evaluate.asking.dialect import sampling
from assay_evaluate.asking.session import Session
from assay_evaluate.client.client import NotMeasured
from assay_evaluate.client.journal import Identity, Journal, Request, unpacked
from assay_evaluate.tasks.items import Item, arithmetic_item, filler_sentence, haystack, writing_item

TASK_WRITE = "divergence.write"
MOST_DOCUMENTS = 24
"""Of a language: 48 texts in two languages give an interval; the reference writes up to four times as many. Of the tasks'
questions a candidate answers as many as the reference, for only these texts reach the later spans, which need twenty."""


@dataclass(frozen=True)
class Document:
    """A prompt and what follows it, as token ids. The tokens that follow are scored."""

    item: str
    language: str
    prompt_ids: tuple[int, ...]
    reply_ids: tuple[int, ...]
    texts: TextSet = "replies"
    domain: str = ""
    num_thinking: int | None = None
    """The first so many of `reply_ids` are thinking. None: the server does not say."""
    cluster: str | None = None
    """Of texts that answer one question in several languages, or at several lengths. None: no other text shares it."""

    @property
    def ids(self) -> list[int]:
        return [*self.prompt_ids, *self.reply_ids]

    @property
    def ids_key(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What two documents share that are one text."""
        return self.prompt_ids, self.reply_ids


@dataclass(frozen=True)
class TextQuestion:
    """What the reference is asked for a text."""

    language: str
    texts: TextSet
    domain: str
    request: Request
    cluster: str | None = None


@dataclass(frozen=True)
class KeptTexts:
    """The texts of a run and how they were scored by the reference: every candidate is asked the same way."""

    documents: tuple[Document, ...]
    top_k: int
    form: Any
    """`scoring.Form`."""
    no_held_out: str | None = None
    """Why there is no held-out text though it was asked for."""


def document_items(spec: DivergenceSpec, seed: str) -> list[Item]:
    """The questions the texts answer: per language, half ask for a text, half for a calculation."""
    items = []
    for language in spec.languages:
        num_writing = (spec.num_documents + 1) // 2
        items += [writing_item(f"{seed}:divergence", i, language) for i in range(num_writing)]
        items += [
            arithmetic_item(f"{seed}:divergence", i, language, (3, 4, 5)[i % 3])
            for i in range(spec.num_documents - num_writing)
        ]
    return items


def own_suite(suite: SuiteRecipe) -> SuiteRecipe | None:
    """The suite with the texts that a candidate writes. None: the suite has no divergence, so there are none."""
    spec = suite.divergence
    if spec is None:
        return None
    fewer: dict[str, Any] = {"num_documents": min(spec.num_documents, MOST_DOCUMENTS), "exact": False}
    return suite.model_copy(update={"divergence": spec.model_copy(update=fewer)})


# ------------------------------------------------------------------------------------------------ kept texts
def find_texts(journal: Journal, made_from: Any) -> KeptTexts | None:
    """The texts kept under `made_from`, or None."""
    kept = journal.find_items(TASK_WRITE, made_from)
    if kept is None:
        return None
    ids = ("prompt_ids", "reply_ids")
    documents = tuple(Document(**d | {name: tuple(d[name]) for name in ids}) for d in kept[0]["documents"])
    return KeptTexts(documents, kept[0]["top_k"], kept[0].get("form", "completions"), kept[0].get("no_held_out"))


def texts_of_run(run_dir: Path) -> list[Document]:
    """The texts that the reference of a run wrote and every side scored, as token ids. MeasureError: there are none."""
    path = run_dir / "journal.db"
    try:
        with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=30)) as db:
            rows = db.execute("SELECT items FROM items WHERE what = ? ORDER BY rowid", (TASK_WRITE,)).fetchall()
        kept = [entry for (stored,) in rows for entry in json.loads(unpacked(stored))]
        ids = ("prompt_ids", "reply_ids")
        documents = [
            Document(**fields | {name: tuple(fields[name]) for name in ids}) for entry in kept for fields in entry["documents"]
        ]
    except (sqlite3.Error, ValueError, KeyError, TypeError, zlib.error) as error:
        raise MeasureError(f"{path}: its texts cannot be read: {one_line(str(error))}") from None
    own = [document for document in documents if document.texts != "held_out" and document.reply_ids]
    if not own:
        raise MeasureError(f"{run_dir}: its reference wrote no texts; its suite measures no divergence")
    return list({document.ids_key: document for document in own}.values())


def keep_texts(journal: Journal, made_from: Any, texts: KeptTexts) -> None:
    """Keep them under `made_from`: a sampled text cannot be written twice alike."""
    documents = [asdict(document) for document in texts.documents]
    how = {"top_k": texts.top_k, "form": texts.form, "no_held_out": texts.no_held_out}
    journal.keep_items(TASK_WRITE, made_from, [{**how, "documents": documents}])


# ------------------------------------------------------------------------------------------------ what the reference writes
def own_questions(session: Session, spec: DivergenceSpec) -> list[TextQuestion]:
    """Our own questions: open texts and calculations."""
    questions = []
    for item in document_items(spec, session.seed):
        messages: list[dict[str, Any]] = [{"role": "user", "content": item.prompt}]
        request = session.request(
            TASK_WRITE, item.id, messages, max_tokens=spec.max_tokens, temperature=1.0, with_ids=True
        )  # fmt: skip
        questions.append(TextQuestion(item.language, "replies", item.kind, request))
    return questions


def suite_questions(
    session: Session, spec: DivergenceSpec, who: Identity, results: Mapping[tuple[str, str], ItemResult]
) -> list[TextQuestion]:
    """Questions that the tasks of the suite asked the reference, to be answered once more at T=1 with their own budgets.

    `spec.suite_documents` of every task, spread over its items. results: of (task, item), for its language and cluster.
    """
    if not spec.suite_documents:
        return []
    questions = []
    for task, answered in session.client.journal.answered_items(who).items():
        if task.startswith("divergence."):
            continue
        items = [(item, key) for item, key in answered if "#" not in item]  # repeats ask the same
        step = max(1, len(items) / spec.suite_documents)
        chosen = [items[int(i * step)] for i in range(min(len(items), spec.suite_documents))]
        for item, key in chosen:
            path, body = session.client.journal.request_of(key)
            # The same question, its reply drawn from the model's own distribution; with its token ids.
            body = {name: value for name, value in body.items() if name != "seed"} | sampling(1.0, None)
            request = Request(TASK_WRITE, f"{task}/{item}", 0, path, body | {"return_token_ids": True})
            result = results.get((task, item))
            language, cluster = ("", None) if result is None else (result.language, result.cluster)
            own = None if cluster is None else f"{task}/{cluster}"
            questions.append(TextQuestion(language, "suite_replies", task, request, own))
    return questions


def write_replies(session: Session, questions: Sequence[TextQuestion]) -> list[Document]:
    """Let the reference answer. NotMeasured if the server does not return token ids, or nearly no reply came."""
    documents, reason = [], ""
    replies = session.client.ask([question.request for question in questions])
    for question, reply in zip(questions, replies, strict=True):
        if reply.status != "answered":
            reason = reason or f"; the first error: {reply.error}"
        elif reply.token_ids is None or reply.prompt_token_ids is None:
            reason = reason or "; the server returns no token ids (vLLM's return_token_ids), so texts cannot be scored exactly"
        else:
            # One position must stay free: scoring asks for one new token.
            room = len(reply.token_ids)
            if session.max_model_len is not None:
                room = min(room, session.max_model_len - 1 - len(reply.prompt_token_ids))
            if room > 0:
                thinking = None if reply.thinking_tokens is None else min(reply.thinking_tokens, room)
                item, language, texts = question.request.item, question.language, question.texts
                ids = reply.prompt_token_ids, reply.token_ids[:room]
                documents.append(Document(item, language, *ids, texts, question.domain, thinking, question.cluster))
    if len(documents) < max(2, len(questions) // 2):
        raise NotMeasured(f"only {len(documents)} of {len(questions)} texts were written by the reference{reason}")
    return documents


# ------------------------------------------------------------------------------------------------ held-out text
def held_out_documents(session: Session, spec: DivergenceSpec) -> list[Document]:
    """Texts of `spec.held_out_tokens` tokens, split by the server's tokenizer. NotMeasured if it offers none, or text is short.

    From the .txt files of `spec.held_out` in order of their names, as many as asked for; else notes of simple sentences, as
    many per language. A model's drift on text unlike what it writes says little about its replies: give text of its use.
    """
    if not spec.held_out_documents:
        return []
    length = spec.held_out_tokens
    if session.max_model_len is not None:
        length = min(length, session.max_model_len - 1)
    documents: list[Document] = []
    for name, language, text in _texts(spec, session.seed, length):
        response = session.client.post("/tokenize", {"prompt": text, "add_special_tokens": False})
        if not (ids := response.tokens):
            raise NotMeasured(f"held-out text cannot be tokenized: /tokenize: HTTP {response.status}: {response.message}")
        windows = [ids[at : at + length] for at in range(0, len(ids) - length + 1, length)]
        if spec.held_out is None:
            windows = windows[:1]
        domain = "held-out" if spec.held_out is None else Path(name).stem
        documents += [
            # Nothing predicts a text's first token.
            Document(f"held-out/{name}/{i}", language, ids[:1], ids[1:], "held_out", domain)
            for i, ids in enumerate(windows)
        ]
        if spec.held_out is not None and len(documents) >= spec.held_out_documents:
            break
    documents = documents if spec.held_out is None else documents[: spec.held_out_documents]
    if len(documents) < 2:
        raise NotMeasured(f"held-out text: fewer than two texts of {length} tokens; give longer files or fewer tokens")
    return documents


def _texts(spec: DivergenceSpec, seed: str, length: int) -> Iterator[tuple[str, str, str]]:
    """(name, language, text)."""
    if spec.held_out is not None:
        for path in sorted(Path(spec.held_out).rglob("*.txt")):
            yield path.name, "", path.read_text(encoding="utf-8", errors="replace")
        return
    for language in spec.languages:
        for number in range(spec.held_out_documents):
            draw = random.Random(f"{seed}:held-out:{language}:{number}")
            # Every sentence has more than two tokens, whatever the tokenizer.
            yield (
                f"{language}/{number}",
                language,
                haystack([filler_sentence(draw, language) for _ in range(length // 2)], language),
            )


def num_tokens(documents: Iterable[Document]) -> int:
    """Scored tokens of the texts."""
    return sum(len(document.reply_ids) for document in documents)
