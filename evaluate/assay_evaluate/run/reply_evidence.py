"""What a task's replies say of who gave them, at its end; and a few questions asked twice at the end of a suite."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from assay.recipes.suite import SweTask, TaskBase
from assay.records.measurement import TaskResult
from assay.records.served.evidence import AskedTwice
from assay_evaluate.asking.dialect import seed_of
from assay_evaluate.asking.evidence import (
    LONG_QUESTION_CHARS,
    NUM_LONG_QUESTIONS,
    CountPrompt,
    full_text,
    key_of,
)
from assay_evaluate.asking.session import Session
from assay_evaluate.client.journal import Reply, Request
from assay_evaluate.tasks.ruler.draft import RulerError
from assay_evaluate.tasks.ruler.tokens import TokenCounter

TASK = "asked twice"
"""Under which the journal keeps these requests."""
FIRST_QUESTIONS, MOST_QUESTIONS = 24, 256
"""So many are asked twice; more where some of them came back with different replies. Of 24, some do in 99.5 of 100 servers that
answer a fifth of their questions otherwise."""
SHORT_TOKENS = 64
"""Of each reply: enough to see sampling, and hardly enough for the noise of batches to show."""
PROMPT_FIELDS = ("messages", "prompt", "tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")
"""Of a request, what /tokenize must be told to count its prompt, template and tools and all."""


# ------------------------------------------------------------------------------------------------ of a task
def with_evidence(session: Session, task: TaskBase, result: TaskResult, checkpoint: Path | None) -> TaskResult:
    """The result with what its replies carry; as it is, if the client did not ask it. Prompts are counted in first passes."""
    if isinstance(task, SweTask) or task.name not in session.served:
        return result
    evidence = session.served[task.name].evidence(
        temperature=task.temperature,
        asked_model=session.client.endpoint.model,
        count_prompt=_prompt_counter(session, checkpoint) if session.sample == 0 else None,
        count_text=functools.partial(_count_text, session) if session.dialect.can_tokenize else None,
    )
    return result.model_copy(update={"served": evidence})


def _prompt_counter(session: Session, checkpoint: Path | None) -> CountPrompt | None:
    """Of a request: by the server, or by the checkpoint's own tokenizer. None: neither can."""
    if session.dialect.can_tokenize:
        return lambda body: _count_on_server(session, {name: body[name] for name in PROMPT_FIELDS if name in body})
    if checkpoint is None or not session.dialect.is_chat:
        return None
    count = TokenCounter(checkpoint, session.dialect.chat_template_kwargs)

    def count_here(body: dict[str, Any]) -> int | None:
        if "messages" not in body or "tools" in body:  # which the tokenizer does not write
            return None
        try:
            return count(body["messages"])
        except RulerError:
            return None

    return count_here


def _count_text(session: Session, text: str) -> int | None:
    return _count_on_server(session, {"prompt": text, "add_special_tokens": False}) if text else 0


def _count_on_server(session: Session, body: dict[str, Any]) -> int | None:
    """Tokens by the server's /tokenize; None: it does not say."""
    response = session.client.post("/tokenize", body)
    return response.num_prompt_tokens if response.status == 200 else None


# ------------------------------------------------------------------------------------------------ at the end of a suite
def ask_twice(session: Session, tasks: Sequence[TaskBase]) -> tuple[AskedTwice, ...]:
    """A few of the questions of these tasks, each twice with the same words, and once more with another seed where seeds are
    sent; in short, and not counted among the replies of any task. Nothing in a repeat."""
    if session.sample:
        return ()
    results = []
    kinds: tuple[tuple[Literal["zero", "above zero"], bool], ...] = (("zero", True), ("above zero", False))
    for kind, is_zero in kinds:
        names = [task.name for task in tasks if (task.temperature == 0) == is_zero and task.name in session.served]
        questions = _choose_questions([session.served[name].prompts.shortest for name in names])
        if not questions:
            continue
        result = _ask_twice(session, kind, questions[:FIRST_QUESTIONS])
        if result.num_different and is_zero and len(questions) > FIRST_QUESTIONS:
            result = _ask_twice(session, kind, questions)
        results.append(result)
    return tuple(results)


def _choose_questions(shortest_of_tasks: Sequence[Sequence[Request]]) -> list[Request]:
    """Of every task in turn, those with the shortest prompts; of long ones a few, whatever the number of tasks."""
    chosen: list[Request] = []
    num_long = 0
    for request in (request for turn in itertools.zip_longest(*shortest_of_tasks) for request in turn if request is not None):
        is_long = len(request.body_json) > LONG_QUESTION_CHARS
        num_long += is_long
        if not is_long or num_long <= NUM_LONG_QUESTIONS:
            chosen.append(request)
    return chosen[:MOST_QUESTIONS]


def _ask_twice(session: Session, kind: Literal["zero", "above zero"], questions: Sequence[Request]) -> AskedTwice:
    """What the journal has already is not asked again."""
    first, again = (session.client.ask([_shortened(session, question, n) for question in questions]) for n in (1, 2))
    reseeded = again
    if session.sends_seeds:
        reseeded = session.client.ask([_shortened(session, question, 3) for question in questions])
    pairs, reseeded_pairs = _answered_pairs(first, again), _answered_pairs(first, reseeded)
    ids = [reply.reply_id for reply, _ in pairs if reply.reply_id is not None]
    are_names = len(set(ids)) == len(ids)  # else the server gives several replies one id, whatever they are
    num_same_id = sum(reply.reply_id is not None and reply.reply_id == other.reply_id for reply, other in pairs)
    tokens = [reply.output_tokens for reply, _ in reseeded_pairs if reply.output_tokens is not None]
    return AskedTwice(
        temperature=kind,
        num_questions=len(reseeded_pairs),
        num_different=sum(key_of(full_text(reply)) != key_of(full_text(other)) for reply, other in reseeded_pairs),
        num_same_id=num_same_id if are_names else 0,
        mean_output_tokens=sum(tokens) / len(tokens) if tokens else None,
    )


def _answered_pairs(first: Sequence[Reply], others: Sequence[Reply]) -> list[tuple[Reply, Reply]]:
    pairs = zip(first, others, strict=True)
    return [(reply, other) for reply, other in pairs if reply.status == other.status == "answered"]


def _shortened(session: Session, request: Request, number: int) -> Request:
    """number: 1 and 2 say the same, 3 has another seed. The first is the task's own request, where that is short already."""
    body = {**request.body, "max_tokens": min(int(request.body["max_tokens"]), SHORT_TOKENS)}
    if number == 1 and body == request.body:
        return request
    if number == 3:
        body["seed"] = seed_of(session.seed, TASK, request.task, request.item)
    return dataclasses.replace(request, task=TASK, item=f"{request.task}/{request.item}", sample=number, body=body)
