"""Needle retrieval: haystacks sized by the model's own tokenizer and chat template, the same text for every checkpoint."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from assay.recipes.suite import NeedleTask
from assay.records.measurement import TaskResult
from assay_evaluate.asking.dialect import count_tokens
from assay_evaluate.asking.session import Session
from assay_evaluate.tasks.counting import prompt_counter
from assay_evaluate.tasks.generated import run_generated
from assay_evaluate.tasks.items import Item, needle_item
from assay_evaluate.tasks.looks import added_by_looks, made_from
from assay_evaluate.tasks.room import with_reply


@dataclass(frozen=True)
class Haystacks:
    """The items of one needle task. `skipped`: length in tokens -> why it cannot be asked."""

    items: tuple[Item, ...]
    skipped: dict[str, str]


def haystacks(session: Session, task: NeedleTask, depends_on: dict[str, Any], checkpoint: Path | None = None) -> Haystacks:
    """The task's items: generated for the reference the first time, from the journal ever after.

    depends_on: what beside the task makes them other items. checkpoint: whose tokenizer counts, if it counts as the server
    does. None: the server counts.
    """
    counter = functools.cache(lambda: _counter(session, checkpoint))
    found = [_added(session, task, added, depends_on, counter) for added in added_by_looks(task)]
    items = tuple(item for one in found for item in one.items)
    return Haystacks(items, {length: why for one in reversed(found) for length, why in one.skipped.items()})


def _added(
    session: Session, task: NeedleTask, added: range, depends_on: dict[str, Any], counter: Callable[[], Callable[[str], int]]
) -> Haystacks:
    """The items that one look adds."""
    journal = session.client.journal
    key = {"task": made_from(task, added)} | depends_on
    kept = journal.find_items(task.name, key)
    if kept is None:
        made = _make(session, task, added, counter())
        journal.keep_items(task.name, key, [{"items": [asdict(i) for i in made.items], "skipped": made.skipped}])
        return made
    return Haystacks(tuple(Item(**fields) for fields in kept[0]["items"]), kept[0]["skipped"])


def _counter(session: Session, checkpoint: Path | None) -> Callable[[str], int]:
    """Tokens of a question asked as one user message; of a text, where there is no chat template."""
    if checkpoint is None or not session.dialect.is_chat:
        return functools.partial(count_tokens, session.client, session.dialect)
    count = prompt_counter(session, checkpoint, "chat")
    return lambda question: count([{"role": "user", "content": question}])


def _make(session: Session, task: NeedleTask, added: range, counter: Callable[[str], int]) -> Haystacks:
    items: list[Item] = []
    skipped: dict[str, str] = {}
    for length in task.lengths_tokens:
        room = session.max_model_len
        if room is not None and with_reply(task, length) > room:
            skipped[str(length)] = f"{length} + {task.max_tokens} tokens of reply do not fit max_model_len {room}"
            continue
        try:
            items += [
                needle_item(
                    session.seed,
                    i,
                    language,
                    num_needles=task.num_needles,
                    depth=(i - added.start) / (len(added) - 1) if len(added) > 1 else 0.5,
                    max_tokens=length,
                    count_tokens=counter,
                )
                for language in task.languages
                for i in added
            ]
        except ValueError as error:  # the whole length goes: `items` is extended only when all of its items were made
            skipped[str(length)] = str(error)
    return Haystacks(tuple(items), skipped)


def run_needle(session: Session, task: NeedleTask, stacks: Haystacks) -> TaskResult:
    """Ask every item; lengths that cannot be asked are named in the note."""
    note = "; ".join(f"not measured at {length} tokens: {why}" for length, why in stacks.skipped.items())
    return run_generated(session, task, stacks.items, note or None)
