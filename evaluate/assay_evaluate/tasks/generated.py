"""The quick suite's own questions, asked and scored: generated from a seed, answered after `####`.

Haystacks of needle items are sized by the model's own tokenizer and chat template, the same text for every checkpoint.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assay.recipes.suite import ArithmeticTask, NeedleTask
from assay.records.measurement import TaskResult
from assay_evaluate.asking.dialect import count_prompt
from assay_evaluate.asking.session import Session, task_result
from assay_evaluate.client.journal import Request
from assay_evaluate.tasks.cells import tokens_with_reply
from assay_evaluate.tasks.counting import prompt_counter
from assay_evaluate.tasks.items import Item, arithmetic_item, extract_answer, needle_item, score
from assay_evaluate.tasks.looks import added_by_looks, look_key
from assay_evaluate.tasks.ruler.tokens import CountTokens


def run_generated(
    session: Session, task: ArithmeticTask | NeedleTask, items: Iterable[Item], note: str | None = None
) -> TaskResult:
    """Ask and score by `items.score`; items are made as they are asked and not kept. note: what to say beside the result."""

    def request(item: Item, sample: int) -> Request:
        return session.question(task, item.id, [{"role": "user", "content": item.prompt}], sample)

    results = [
        dataclasses.replace(
            session.result(
                task,
                reply,
                item=item.id,
                sample=sample,
                language=item.language,
                prompt=item.prompt,
                expected=item.answer or "",
                correct=bool(score(item, reply.text)),
                answer=extract_answer(reply.text),
            ),
            length_tokens=item.facts.get("length_tokens"),
            depth=item.facts.get("depth"),
        )
        for item, sample, reply in session.ask_items(task, items, request)
    ]
    return task_result(task.name, task.kind, results, task.max_tokens, note, session.thinking_budget_tokens(task))


def arithmetic_items(task: ArithmeticTask, seed: str) -> Iterator[Item]:
    """The task's questions: so many per language, with the numbers of steps taken in turn."""
    for language in task.languages:
        for i in range(task.num_made):
            yield arithmetic_item(seed, i, language, task.num_steps[i % len(task.num_steps)])


# ------------------------------------------------------------------------------------------------ needle
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
    journal = session.client.journal
    counter = functools.cache(lambda: _counter(session, checkpoint))
    stacks = []
    for added in added_by_looks(task):
        key = {"task": look_key(task, added)} | depends_on
        kept = journal.find_items(task.name, key)
        if kept is None:
            stack = _make(session, task, added, counter())
            items = [dataclasses.asdict(item) for item in stack.items]
            journal.keep_items(task.name, key, [{"items": items, "skipped": stack.skipped}])
        else:
            stack = Haystacks(tuple(Item(**fields) for fields in kept[0]["items"]), kept[0]["skipped"])
        stacks.append(stack)
    skipped = {length: reason for stack in reversed(stacks) for length, reason in stack.skipped.items()}
    return Haystacks(tuple(item for stack in stacks for item in stack.items), skipped)


def _counter(session: Session, checkpoint: Path | None) -> Callable[[str], int]:
    """Tokens of a question asked as one user message; of a text, where there is no chat template."""
    count: CountTokens = functools.partial(count_prompt, session.client, session.dialect)
    if checkpoint is not None and session.dialect.is_chat:
        count = prompt_counter(session, checkpoint, "chat")
    return lambda question: count([{"role": "user", "content": question}])


def _make(session: Session, task: NeedleTask, added: range, counter: Callable[[str], int]) -> Haystacks:
    items: list[Item] = []
    skipped: dict[str, str] = {}
    for length in task.lengths_tokens:
        room = session.max_model_len
        if room is not None and tokens_with_reply(task, length) > room:
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
    note = "; ".join(f"not measured at {length} tokens: {reason}" for length, reason in stacks.skipped.items())
    return run_generated(session, task, stacks.items, note or None)
