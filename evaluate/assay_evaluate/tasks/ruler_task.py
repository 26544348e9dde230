"""RULER and the needle grid as tasks of a suite: the same text for every checkpoint, sized for the reference.

`correct` means that every expected string was found (for questions: any alias of the answer); the published score, the share of
them, is kept beside it as `score`. Gates judge `correct`: exact paired statistics need right or wrong.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assay.recipes.suite import LONGEST, RulerTask
from assay.records.base import sha256_of, sha256_of_file
from assay.records.measurement import ItemResult, TaskResult
from assay_evaluate.asking.dialect import COMPLETIONS
from assay_evaluate.asking.session import Session, end_of_answer, task_result
from assay_evaluate.client.client import NotMeasured
from assay_evaluate.client.journal import Identity, Reply, Request
from assay_evaluate.tasks.cells import (
    RulerCell,
    needed_tokens,
    planned_style,
    ruler_cells,
    ruler_max_tokens,
    settle_longest,
    tokens_kept_for_reply,
)
from assay_evaluate.tasks.counting import prompt_counter
from assay_evaluate.tasks.looks import added_by_looks
from assay_evaluate.tasks.published.choice import Choice, choose, describe, hashes, read_published
from assay_evaluate.tasks.published.pins import SourceName
from assay_evaluate.tasks.ruler.draft import RulerError
from assay_evaluate.tasks.ruler.haystacks import read_text_folder
from assay_evaluate.tasks.ruler.items import GENERATOR_VERSION, RulerItem, Style, from_saved_fields, score
from assay_evaluate.tasks.ruler.qa import read_hotpotqa, read_squad
from assay_evaluate.tasks.ruler.tasks import GRID_TASK, Sources, grid_item, ruler_item
from assay_evaluate.tasks.ruler.tokens import CountTokens

ASKED_CHARACTERS = 2000
"""The end of a prompt, where the question is: enough to see in which scripts it is written."""


def run_ruler(session: Session, task: RulerTask, checkpoint: Path | None, reference: Identity) -> TaskResult:
    """Ask every item of every task and length; what cannot be made or does not fit the context is named in the note.

    checkpoint: folder whose tokenizer counts, if items must be made. reference: for whom they are made, and whose context says
    what `longest` is.
    """
    budget = session.thinking_budget_tokens(task)
    style = planned_style(task, is_chat=session.dialect.is_chat)
    if style != "base" and not session.dialect.is_chat:
        note = f"style {style} needs a chat template, and the checkpoint has none; say `style: auto`"
        return task_result(task.name, "ruler", [], task.max_tokens, note, budget)
    task, longest = _settle_longest(session, task, style, reference)
    chosen = choose(task, session.client.journal)
    own, own_sha256 = _own_sources(task.essays, task.squad, task.hotpotqa)
    sources, texts = describe(task, chosen)
    made_from = {
        "seed": session.seed, "style": style, "reference": reference.checkpoint_sha256, "sources": own_sha256 | hashes(chosen),
        "chat_template_kwargs": session.dialect.chat_template_kwargs, "generator": GENERATOR_VERSION,
    }  # fmt: skip
    maker = _Maker(session, task, style, own, chosen, made_from, checkpoint)
    notes: dict[str, None] = {note: None for note in (longest, texts) if note is not None}

    def made_items() -> Iterator[RulerItem]:
        for cell, added in itertools.product(ruler_cells(task), added_by_looks(task)):
            try:
                items = [maker.item(cell, index) for index in added]
            except (RulerError, NotMeasured) as error:
                notes[f"not measured: {error}"] = None
                continue
            for item in items:
                if item.note:
                    notes[f"not comparable with published scores: {item.note}"] = None
                yield item

    answered = session.ask_items(task, made_items(), functools.partial(_request, session, task))
    results = [_result(session, task, *answer) for answer in answered]
    result = task_result(task.name, "ruler", results, task.max_tokens, "; ".join(notes) or None, budget)
    return result.model_copy(update={"sources": sources})


def _settle_longest(session: Session, task: RulerTask, style: Style, reference: Identity) -> tuple[RulerTask, str | None]:
    """`settle_longest` by the context of the reference, which is asked first; from the journal ever after."""
    if LONGEST not in task.lengths_tokens:
        return task, None
    journal = session.client.journal
    made_from = {
        "reference": [reference.checkpoint_sha256, reference.fingerprint_sha256], "style": style,
        "task": task.model_dump(mode="json", exclude={"num_samples", "num_items"}),
    }  # fmt: skip
    kept = journal.find_items(LONGEST, made_from)
    if kept is None:
        settled_task, note = settle_longest(task, style, session.max_model_len)
        kept = [{"lengths_tokens": settled_task.lengths_tokens, "said": note}]
        journal.keep_items(LONGEST, made_from, kept)
    return task.model_copy(update={"lengths_tokens": tuple(kept[0]["lengths_tokens"])}), kept[0]["said"]


@functools.lru_cache(maxsize=4)
def _own_sources(essays: str | None, squad: str | None, hotpotqa: str | None) -> tuple[Sources, dict[str, str]]:
    """Texts of one's own and the hash of each. RulerError if one cannot be read."""
    sources = Sources(
        essays=None if essays is None else read_text_folder(essays),
        squad=None if squad is None else read_squad(squad),
        hotpotqa=None if hotpotqa is None else read_hotpotqa(hotpotqa),
    )
    hashes = {path: sha256_of_file(Path(path)) for path in (squad, hotpotqa) if path is not None}
    return sources, hashes if sources.essays is None else {**hashes, "essays": sha256_of(sources.essays.sentences)}


# ------------------------------------------------------------------------------------------------ making items
@dataclass(frozen=True)
class _Maker:
    """Items of one task: made the first time, from the journal ever after."""

    session: Session
    task: RulerTask
    style: Style
    own: Sources
    chosen: Mapping[SourceName, Choice]
    made_from: dict[str, Any]
    checkpoint: Path | None

    def item(self, cell: RulerCell, index: int) -> RulerItem:
        """RulerError if it cannot be made; NotMeasured if it does not fit, or tokens cannot be counted."""
        reply_tokens = tokens_kept_for_reply(self.task, cell)
        context, needed = self.session.max_model_len, needed_tokens(self.task, self.style, cell)
        if context is not None and needed > context:
            raise NotMeasured(
                f"{cell.task} at {cell.length_tokens} tokens: prompt and reply need up to {needed}, max_model_len is {context}"
            )
        key = {**self.made_from, "cell": dataclasses.asdict(cell), "index": index, "reply_tokens": reply_tokens}
        journal = self.session.client.journal
        kept = journal.find_items("ruler", key)
        if kept is not None:
            return from_saved_fields(kept[0])
        common: dict[str, Any] = {
            "seed": self.session.seed, "style": self.style, "count_tokens": self._count, "sources": self.sources,
            "reply_tokens": reply_tokens,
        }  # fmt: skip
        if cell.depth is None:
            item = ruler_item(cell.task, cell.length_tokens, index, **common)
        else:
            item = grid_item(cell.length_tokens, cell.depth, index, language=cell.language, **common)  # type: ignore[arg-type]
        journal.keep_items("ruler", key, [dataclasses.asdict(item)])
        return item

    @functools.cached_property
    def sources(self) -> Sources:
        """Read when the first item is made; one that the journal has needs none."""
        published = read_published(self.chosen)
        return Sources(
            essays=self.own.essays or published.essays,
            squad=self.own.squad or published.squad,
            hotpotqa=self.own.hotpotqa or published.hotpotqa,
        )

    @functools.cached_property
    def _count(self) -> CountTokens:
        return prompt_counter(self.session, self.checkpoint, self.style)


# ------------------------------------------------------------------------------------------------ asking, scoring
def _request(session: Session, task: RulerTask, item: RulerItem, sample: int) -> Request:
    prompt = item.prompt
    messages: Sequence[dict[str, str]] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    request = session.question(task, item.id, messages, sample, max_tokens=ruler_max_tokens(task, item.style, item.task))
    if not isinstance(prompt, str):
        return request
    body = {name: value for name, value in request.body.items() if name not in {"messages", "chat_template_kwargs"}}
    return dataclasses.replace(request, path=COMPLETIONS, body={**body, "prompt": prompt})


def _result(session: Session, task: RulerTask, item: RulerItem, sample: int, reply: Reply) -> ItemResult:
    value = score(item, reply.text)
    result = session.result(
        task,
        reply,
        item=item.id,
        sample=sample,
        language=item.language,
        prompt=item.question[-ASKED_CHARACTERS:],
        expected=" ".join(item.expected),
        correct=value == 1,
        answer=reply.text.strip()[:200],
        max_tokens=ruler_max_tokens(task, item.style, item.task),
        score=value,
    )
    subtask = GRID_TASK if "depth" in item.facts else item.task
    # of the only place that holds the answer; in the grid the depth asked for
    depth = item.facts.get("depth", item.depths[0] if len(item.depths) == 1 else None)
    expected = None if result.expected is None else end_of_answer("\n".join(item.expected))
    result = dataclasses.replace(result, subtask=subtask, length_tokens=item.length_tokens, depth=depth, expected=expected)
    if "about" in item.facts:  # of qa_1 and qa_2: questions about one document, of which the same are asked at every length
        result = dataclasses.replace(result, cluster=f"{item.task}: {item.facts['about']}")
    if item.style == "base" and result.truncated_by in {"length", "budget"}:  # by design, as published
        return dataclasses.replace(result, truncated=False, truncated_by=None, loops=False)
    return result
