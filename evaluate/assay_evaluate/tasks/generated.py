"""The quick suite's own questions, asked and scored: generated from a seed, answered after `####`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from assay.recipes.suite import ArithmeticTask, NeedleTask
from assay.records.measurement import TaskResult
from assay_evaluate.asking.session import Session, task_result
from assay_evaluate.client.journal import Request
from assay_evaluate.tasks.items import Item, arithmetic_item, extract_answer, score


def run_generated(
    session: Session, task: ArithmeticTask | NeedleTask, items: Iterable[Item], note: str | None = None
) -> TaskResult:
    """Ask and score by `items.score`; items are made as they are asked and not kept. note: what to say beside the result."""

    def request(item: Item, sample: int) -> Request:
        return session.request(
            task.name,
            item.id,
            [{"role": "user", "content": item.prompt}],
            max_tokens=task.max_tokens,
            temperature=task.temperature,
            repeat=sample,
            more=session.parameters(task),
        )

    results = [
        dataclasses.replace(
            session.result(
                reply,
                item=item.id,
                sample=sample,
                language=item.language,
                prompt=item.prompt,
                expected=item.answer or "",
                correct=bool(score(item, reply.text)),
                answer=extract_answer(reply.text),
                thinking_budget_tokens=session.thinking_budget_tokens(task),
                max_tokens=task.max_tokens,
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
