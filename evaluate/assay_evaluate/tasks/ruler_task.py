"""RULER and the needle grid as tasks of a suite: the same text for every checkpoint, sized for the reference.

`correct` means that every expected string was found (for questions: any alias of the answer); the published score, the share of
them, is kept beside it as `score`. Gates judge `correct`: exact paired statistics need right or wrong.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assay.recipes.suite import RulerTask
from assay.records.base import sha256_of, sha256_of_file
from assay.records.measurement import ItemResult, TaskResult
from assay_evaluate.asking.dialect import COMPLETIONS
from assay_evaluate.asking.session import Session, task_result
from assay_evaluate.client.client import NotMeasured
from assay_evaluate.client.journal import Reply, Request
from assay_evaluate.tasks.counting import prompt_counter
from assay_evaluate.tasks.ruler import (
    GENERATOR_VERSION,
    REPLY_TOKENS,
    CountTokens,
    RulerError,
    RulerItem,
    Sources,
    Style,
    grid_item,
    read_hotpotqa,
    read_squad,
    read_text_folder,
    ruler_item,
    score,
)
from assay_evaluate.tasks.ruler.grid import GRID_TASK
from assay_evaluate.tasks.ruler.grid import REPLY_TOKENS as GRID_REPLY_TOKENS
from assay_evaluate.tasks.ruler.items import from_saved_fields, saved_fields

ASKED_CHARACTERS = 2000
"""The end of a prompt, where the question is: enough to see in which scripts it is written."""


@dataclass(frozen=True)
class RulerCell:
    """All items of one task at one length; of the grid, also of one depth and language."""

    task: str
    length_tokens: int
    depth: float | None = None
    language: str = "en"

    @property
    def published_reply_tokens(self) -> int:
        return REPLY_TOKENS.get(self.task, GRID_REPLY_TOKENS)


def run_ruler(session: Session, task: RulerTask, checkpoint: Path | None, reference_sha256: str) -> TaskResult:
    """Ask every item of every task and length; what cannot be made or does not fit the context is named in the note.

    checkpoint: folder whose tokenizer counts, if items must be made. reference_sha256: for whom they are made.
    """
    budget = session.thinking_budget_tokens(task)
    try:
        style = _style(session, task)
    except NotMeasured as error:
        return task_result(task.name, "ruler", [], task.max_tokens, str(error), budget)
    sources, sources_sha256 = _sources(task.essays, task.squad, task.hotpotqa)
    made_from = {
        "seed": session.seed, "style": style, "reference": reference_sha256, "sources": sources_sha256,
        "chat_template_kwargs": session.dialect.chat_template_kwargs, "generator": GENERATOR_VERSION,
    }  # fmt: skip
    maker = _Maker(session, task, style, sources, made_from, checkpoint)
    notes: dict[str, None] = {}

    def made_items() -> Iterator[RulerItem]:
        for cell in cells(task):
            try:
                items = [maker.item(cell, index) for index in range(task.num_items)]
            except (RulerError, NotMeasured) as error:
                notes[f"not measured: {error}"] = None
                continue
            for item in items:
                if item.note:
                    notes[f"not comparable with published scores: {item.note}"] = None
                yield item

    answered = session.ask_items(task, made_items(), functools.partial(_request, session, task))
    results = [_result(session, task, *one) for one in answered]
    return task_result(task.name, "ruler", results, task.max_tokens, "; ".join(notes) or None, budget)


def cells(task: RulerTask) -> Iterator[RulerCell]:
    """All that the task asks, before it is known what fits."""
    for name in task.tasks:
        for length_tokens in task.lengths_tokens:
            if name != GRID_TASK:
                yield RulerCell(name, length_tokens)
                continue
            for depth in task.depths:
                yield from (RulerCell(name, length_tokens, depth, language) for language in task.languages)


def needed_tokens(task: RulerTask, style: Style, cell: RulerCell) -> int:
    """Of prompt and reply together, at most; what needs more than the context is not measured."""
    return cell.length_tokens - _reply_within(task, cell) + _max_tokens(task, style, cell.task)


def _reply_within(task: RulerTask, cell: RulerCell) -> int:
    """Tokens that the length of the cell keeps for the reply."""
    return task.max_tokens if task.reply_within_length else cell.published_reply_tokens


def _style(session: Session, task: RulerTask) -> Style:
    if task.style == "auto":
        return "chat" if session.dialect.is_chat else "base"
    if task.style != "base" and not session.dialect.is_chat:
        raise NotMeasured(f"style {task.style} needs a chat template, and the checkpoint has none; say `style: auto`")
    return task.style


@functools.lru_cache(maxsize=4)
def _sources(essays: str | None, squad: str | None, hotpotqa: str | None) -> tuple[Sources, dict[str, str]]:
    """Texts of one's own and the hash of each. RulerError if one cannot be read."""
    found = Sources(
        essays=None if essays is None else read_text_folder(essays),
        squad=None if squad is None else read_squad(squad),
        hotpotqa=None if hotpotqa is None else read_hotpotqa(hotpotqa),
    )
    hashes = {path: sha256_of_file(Path(path)) for path in (squad, hotpotqa) if path is not None}
    return found, hashes if found.essays is None else {**hashes, "essays": sha256_of(found.essays.sentences)}


# ------------------------------------------------------------------------------------------------ making items
@dataclass(frozen=True)
class _Maker:
    """Items of one task: made the first time, from the journal ever after."""

    session: Session
    task: RulerTask
    style: Style
    sources: Sources
    made_from: dict[str, Any]
    checkpoint: Path | None

    def item(self, cell: RulerCell, index: int) -> RulerItem:
        """RulerError if it cannot be made; NotMeasured if it does not fit, or tokens cannot be counted."""
        reply_tokens = _reply_within(self.task, cell)
        self._require_room(cell)
        key = {**self.made_from, "cell": dataclasses.asdict(cell), "index": index, "reply_tokens": reply_tokens}
        journal = self.session.client.journal
        kept = journal.find_items("ruler", key)
        if kept is not None:
            return from_saved_fields(kept[0])
        made = self._make(cell, index, reply_tokens)
        journal.keep_items("ruler", key, [saved_fields(made)])
        return made

    def _require_room(self, cell: RulerCell) -> None:
        room, wanted = self.session.max_model_len, needed_tokens(self.task, self.style, cell)
        if room is not None and wanted > room:
            raise NotMeasured(
                f"{cell.task} at {cell.length_tokens} tokens: prompt and reply need up to {wanted}, max_model_len is {room}"
            )

    def _make(self, cell: RulerCell, index: int, reply_tokens: int) -> RulerItem:
        common: dict[str, Any] = {
            "seed": self.session.seed, "style": self.style, "count_tokens": self._count, "sources": self.sources,
            "reply_tokens": reply_tokens,
        }  # fmt: skip
        if cell.depth is None:
            return ruler_item(cell.task, cell.length_tokens, index, **common)
        return grid_item(cell.length_tokens, cell.depth, index, language=cell.language, **common)  # type: ignore[arg-type]

    @functools.cached_property
    def _count(self) -> CountTokens:
        return prompt_counter(self.session, self.checkpoint, self.style)


# ------------------------------------------------------------------------------------------------ asking, scoring
def _max_tokens(task: RulerTask, style: Style, name: str) -> int:
    """A base model does not know when to stop: it gets the published tokens, others the suite's budget."""
    return min(task.max_tokens, REPLY_TOKENS.get(name, GRID_REPLY_TOKENS)) if style == "base" else task.max_tokens


def _request(session: Session, task: RulerTask, item: RulerItem, sample: int) -> Request:
    prompt = item.prompt
    messages: Sequence[dict[str, str]] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    request = session.request(
        task.name,
        item.id,
        messages,
        max_tokens=_max_tokens(task, item.style, item.task),
        temperature=task.temperature,
        repeat=sample,
        more=session.parameters(task),
    )
    if not isinstance(prompt, str):
        return request
    body = {name: value for name, value in request.body.items() if name not in {"messages", "chat_template_kwargs"}}
    return dataclasses.replace(request, path=COMPLETIONS, body={**body, "prompt": prompt})


def _result(session: Session, task: RulerTask, item: RulerItem, sample: int, reply: Reply) -> ItemResult:
    value = score(item, reply.text)
    found = session.result(
        reply,
        item=item.id,
        sample=sample,
        language=item.language,
        prompt=item.question[-ASKED_CHARACTERS:],
        expected=" ".join(item.expected),
        correct=value == 1,
        answer=reply.text.strip()[:200],
        thinking_budget_tokens=session.thinking_budget_tokens(task),
        max_tokens=_max_tokens(task, item.style, item.task),
        score=value,
    )
    subtask = GRID_TASK if "depth" in item.facts else item.task
    found = dataclasses.replace(found, subtask=subtask, length_tokens=item.length_tokens, depth=_depth(item))
    if "question" in item.facts:  # of qa_1 and qa_2: the same one, in the same documents, at every length
        found = dataclasses.replace(found, cluster=f"{item.task}: {item.facts['question']}")
    if item.style == "base" and found.truncated_by in {"length", "budget"}:  # by design, as published
        return dataclasses.replace(found, truncated=False, truncated_by=None, loops=False)
    return found


def _depth(item: RulerItem) -> float | None:
    """Of the one place that holds the answer; in the grid the depth asked for."""
    asked: float | None = item.facts.get("depth")
    if asked is None and len(item.depths) == 1:
        return item.depths[0]
    return asked
