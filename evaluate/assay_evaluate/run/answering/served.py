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
    BesideReference,
    CountPrompt,
    CountText,
    all_said,
    key_of,
)
from assay_evaluate.asking.session import Session
from assay_evaluate.client.journal import Identity, Reply, Request
from assay_evaluate.tasks.ruler import RulerError, TokenCounter

TASK = "asked twice"
"""Under which the journal keeps these requests."""
FIRST_QUESTIONS, MOST_QUESTIONS = 24, 256
"""So many are asked twice; more where some of them came back with different replies. Of 24, some do in 99.5 of 100 servers that
answer a fifth of their questions otherwise."""
SHORT_TOKENS = 64
"""Of each reply: enough to see sampling, and hardly enough for the noise of batches to show."""


# ------------------------------------------------------------------------------------------------ of a task
def hold_beside(session: Session, task: TaskBase, reference: Identity) -> None:
    """From now on hold the replies to a greedy task against the reference's, unless this is its first pass."""
    is_first = session.client.who == reference and session.sample == 0
    if task.temperature == 0 and not is_first and session.served[task.name].beside is None:
        session.served[task.name].beside = BesideReference(session.client.journal, reference)


def with_evidence(session: Session, task: TaskBase, result: TaskResult, checkpoint: Path | None) -> TaskResult:
    """The result with what its replies carry; as it is, if the client did not ask it. Prompts are counted in first passes."""
    if isinstance(task, SweTask) or task.name not in session.served:
        return result
    tally = session.served[task.name]
    first = session.sample == 0
    found = tally.evidence(
        temperature=task.temperature,
        asked_model=session.client.endpoint.model,
        count_prompt=_prompt_counter(session, checkpoint) if first else None,
        count_text=_text_counter(session),
    )
    return result.model_copy(update={"served": found})


def _prompt_counter(session: Session, checkpoint: Path | None) -> CountPrompt | None:
    if session.dialect.can_tokenize:
        return functools.partial(_count_on_server, session)
    if checkpoint is None or not session.dialect.is_chat:
        return None
    return functools.partial(_count_here, TokenCounter(checkpoint, session.dialect.chat_template_kwargs))


def _count_on_server(session: Session, body: dict[str, Any]) -> int | None:
    """Tokens of a request's prompt, template and tools and all; None: the server does not say."""
    alike = ("messages", "prompt", "tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")
    response = session.client.post("/tokenize", {name: body[name] for name in alike if name in body})
    return response.num_prompt_tokens if response.status == 200 else None


def _count_here(count: TokenCounter, body: dict[str, Any]) -> int | None:
    """The same by the checkpoint's own tokenizer; None: it cannot, or tools are offered, which it does not write."""
    if "messages" not in body or "tools" in body:
        return None
    try:
        return count(body["messages"])
    except RulerError:
        return None


def _text_counter(session: Session) -> CountText | None:
    """Of a reply's text. None: the server has no /tokenize."""
    if not session.dialect.can_tokenize:
        return None

    def count(text: str) -> int | None:
        if not text:
            return 0
        response = session.client.post("/tokenize", {"prompt": text, "add_special_tokens": False})
        return response.num_prompt_tokens if response.status == 200 else None

    return count


# ------------------------------------------------------------------------------------------------ at the end of a suite
def ask_twice(session: Session, tasks: Sequence[TaskBase]) -> tuple[AskedTwice, ...]:
    """A few of the questions of these tasks, each twice with the same words, and once more with another seed where seeds are
    sent; in short, and not counted among the replies of any task. Nothing in a repeat."""
    if session.sample:
        return ()
    kinds: tuple[tuple[Literal["zero", "above zero"], bool], ...] = (("zero", True), ("above zero", False))
    found = []
    for kind, is_zero in kinds:
        questions = _questions(session, [task.name for task in tasks if (task.temperature == 0) == is_zero])
        if not questions:
            continue
        some = _asked(session, kind, questions[:FIRST_QUESTIONS])
        if some.num_different and is_zero and len(questions) > FIRST_QUESTIONS:
            some = _asked(session, kind, questions)
        found.append(some)
    return tuple(found)


def _questions(session: Session, names: Sequence[str]) -> list[Request]:
    """Of every task in turn, those with the shortest prompts; of long ones a few, whatever the number of tasks."""
    kept = [session.served[name].shortest_questions for name in names if name in session.served]
    chosen: list[Request] = []
    num_long = 0
    for request in (one for some in itertools.zip_longest(*kept) for one in some if one is not None):
        is_long = len(request.body_json) > LONG_QUESTION_CHARS
        num_long += is_long
        if not is_long or num_long <= NUM_LONG_QUESTIONS:
            chosen.append(request)
    return chosen[:MOST_QUESTIONS]


def _asked(session: Session, kind: Literal["zero", "above zero"], questions: Sequence[Request]) -> AskedTwice:
    """What the journal has already is not asked again."""
    first = session.client.ask([_short(session, one, 1) for one in questions])
    again = session.client.ask([_short(session, one, 2) for one in questions])
    others = again
    if session.sends_seeds:
        others = session.client.ask([_short(session, one, 3) for one in questions])
    both = [(one, other) for one, other in zip(first, others, strict=True) if _came(one) and _came(other)]
    same = [(one, other) for one, other in zip(first, again, strict=True) if _came(one) and _came(other)]
    ids = [one.reply_id for one, _ in same if one.reply_id is not None]
    are_names = len(set(ids)) == len(ids)  # else the server gives several replies one id, whatever they are
    tokens = [one.output_tokens for one, _ in both if one.output_tokens is not None]
    return AskedTwice(
        temperature=kind,
        num_questions=len(both),
        num_different=sum(_said(one) != _said(other) for one, other in both),
        num_same_id=sum(one.reply_id is not None and one.reply_id == other.reply_id for one, other in same) if are_names else 0,
        mean_output_tokens=sum(tokens) / len(tokens) if tokens else None,
    )


def _short(session: Session, request: Request, number: int) -> Request:
    """number: 1 and 2 say the same, 3 has another seed. The first is the task's own request, where that is short already."""
    body = {**request.body, "max_tokens": min(int(request.body["max_tokens"]), SHORT_TOKENS)}
    if number == 1 and body == request.body:
        return request
    if number == 3:
        body["seed"] = seed_of(session.seed, TASK, request.task, request.item)
    return dataclasses.replace(request, task=TASK, item=f"{request.task}/{request.item}", sample=number, body=body)


def _came(reply: Reply) -> bool:
    return reply.status == "answered"


def _said(reply: Reply) -> int:
    return key_of(all_said(reply))
