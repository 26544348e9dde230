"""The `tools` task of a suite: makes the items, asks them with `tools` and `tool_choice: auto`, scores what comes back.

Never sends `parallel_tool_calls: false` nor `strict`: vLLM 0.32 turns both into a grammar, and what a grammar forbids
cannot show damage.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from assay.errors import MeasureError
from assay.recipes.suite import SuiteRecipe, ToolsTask
from assay.records.base import canonical_json
from assay.records.measurement import ItemResult, TaskResult
from assay.records.serving import Fingerprint
from assay_evaluate.asking.dialect import CHAT, count_prompt
from assay_evaluate.asking.session import Session, task_result
from assay_evaluate.client.client import NotMeasured
from assay_evaluate.client.journal import Identity, Reply, Request
from assay_evaluate.tasks.cells import tokens_with_reply
from assay_evaluate.tasks.looks import added_by_looks, look_key
from assay_evaluate.tasks.tools.calls import answer_of, is_correct, judge, tool_calls
from assay_evaluate.tasks.tools.catalogue import CATALOGUE_VERSION, all_tools
from assay_evaluate.tasks.tools.dialogue import fit, messages_of
from assay_evaluate.tasks.tools.questions import ToolQuestion, tool_question

GRAMMAR_PARSERS = frozenset({"glm45", "glm47"})
"""Parsers of vLLM 0.32 that hold calls to a grammar without being asked (glm47_moe_tool_parser.py: FUNCTION level)."""
NO_TOOLS = "set the model's serving.tool_call_parser (vLLM: --enable-auto-tool-choice --tool-call-parser)"

TEMPLATE_IGNORES_TOOLS = "the chat template does not show tools to the model: a prompt with a tool is as long as one without"


@dataclass(frozen=True)
class SizedQuestions:
    """The questions that can be asked, each with its sentences of dialogue. skipped: cell -> why it cannot be asked."""

    questions: tuple[tuple[ToolQuestion, int], ...] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)


def run_tools(session: Session, task: ToolsTask, reference: Identity) -> TaskResult:
    """Ask and score every item; on a candidate, against the reference's replies to the same requests in the journal."""
    try:
        reason = reason_without_tools(session)
        sized = SizedQuestions() if reason is not None else _size_questions(session, task, reference)
    except NotMeasured as error:
        reason = str(error)
    if reason is not None:
        return task_result(task.name, "tools", [], task.max_tokens, reason)
    answered = session.ask_items(task, sized.questions, lambda pair, sample: _request(session, task, *pair, sample))
    results = [_result(session, task, question, reply, sample) for (question, _), sample, reply in answered]
    first = [result for result in results if result.sample == 0]  # shares of cells are over items
    notes = [f"not measured {cell}: {reason}" for cell, reason in sized.skipped.items()]
    budget = session.thinking_budget_tokens(task)
    result = task_result(task.name, "tools", results, task.max_tokens, "; ".join(notes) or None, budget)
    return result.model_copy(update={"tools": tool_calls(first, _reference_results(session, task, sized, reference))})


def _reference_results(
    session: Session, task: ToolsTask, sized: SizedQuestions, reference: Identity
) -> list[ItemResult] | None:
    """The reference's own first results, from the journal; None on its first pass."""
    if session.client.who == reference and session.sample == 0:
        return None
    results, as_first = [], dataclasses.replace(session, takes_second_replies=False)
    for question, num_sentences in sized.questions:
        first = dataclasses.replace(_request(as_first, task, question, num_sentences), sample=0)
        reply = session.client.journal.find(first.key(reference))
        if reply is not None:
            results.append(_result(session, task, question, reply))
    return results


def _request(session: Session, task: ToolsTask, question: ToolQuestion, num_sentences: int, sample: int = 0) -> Request:
    offered = {"tools": [tool.definition for tool in question.tools], "tool_choice": "auto"}
    return session.question(task, question.id, messages_of(question, num_sentences, session.seed), sample, more=offered)


def _result(session: Session, task: ToolsTask, question: ToolQuestion, reply: Reply, sample: int = 0) -> ItemResult:
    judged = judge(question, reply)
    result = session.result(
        task,
        reply,
        item=question.id,
        sample=sample,
        language=question.language,
        prompt=question.question,
        expected=canonical_json(question.expected),
        correct=is_correct(judged, reply),
        answer=answer_of(reply, judged),
    )
    return dataclasses.replace(
        result,
        tool=judged if reply.status == "answered" else None,
        subtask=f"{question.num_tools} {'tool' if question.num_tools == 1 else 'tools'}",
        length_tokens=question.prompt_tokens,
    )


# ------------------------------------------------------------------------------------------------ items
def _size_questions(session: Session, task: ToolsTask, reference: Identity) -> SizedQuestions:
    """The task's items; how much dialogue each gets comes from the journal, or is measured now and kept.

    Measured once, by the reference's tokenizer and template: every checkpoint must get the same text.
    """
    sized: list[tuple[ToolQuestion, int]] = []
    skipped: dict[str, str] = {}
    for added in added_by_looks(task):
        questions = [
            tool_question(session.seed, index, num_tools, length or None, task.share_without_tool, language)
            for num_tools in task.num_tools
            for length in task.prompt_tokens
            for language in task.languages
            for index in added
        ]
        journal = session.client.journal
        key = {
            "seed": session.seed,
            "task": look_key(task, added),
            "catalogue": CATALOGUE_VERSION,
            "reference": reference.checkpoint_sha256,
            "chat_template_kwargs": session.dialect.chat_template_kwargs,
            "max_model_len": session.max_model_len,
        }
        kept = journal.find_items(task.name, key)
        if kept is None:
            kept = [_measure(session, task, questions)]
            journal.keep_items(task.name, key, kept)
        sentences = kept[0]["num_sentences"]
        sized += [(question, sentences[question.id]) for question in questions if question.id in sentences]
        skipped = kept[0]["skipped"] | skipped  # of several looks the first says why
    return SizedQuestions(tuple(sized), skipped)


def _measure(session: Session, task: ToolsTask, questions: Sequence[ToolQuestion]) -> dict[str, Any]:
    """{"num_sentences": id -> sentences, "skipped": cell -> why}; a cell with one item that does not fit goes as a whole."""
    room = session.max_model_len
    sentences: dict[str, int] = {}
    skipped: dict[str, str] = {}
    for question in questions:
        cell = _cell(question)
        if cell in skipped:
            continue
        try:
            definitions = [tool.definition for tool in question.tools]
            count = functools.partial(count_prompt, session.client, session.dialect, tools=definitions)
            num_sentences = fit(question, session.seed, count)
            tokens = question.prompt_tokens
            if room is not None:
                tokens = tokens or count(messages_of(question, 0, session.seed))
                if tokens_with_reply(task, tokens) > room:
                    raise ValueError(f"{tokens} + {task.max_tokens} tokens of reply do not fit max_model_len {room}")
        except ValueError as error:
            skipped[cell] = str(error)
            continue
        sentences[question.id] = num_sentences
    kept = {question.id: sentences[question.id] for question in questions if _cell(question) not in skipped}
    return {"num_sentences": kept, "skipped": skipped}


def _cell(question: ToolQuestion) -> str:
    length = "" if question.prompt_tokens is None else f" at {question.prompt_tokens} tokens"
    return f"with {question.num_tools} {'tool' if question.num_tools == 1 else 'tools'}{length}"


# ------------------------------------------------------------------------------------------------ can it be measured at all
def reason_without_tools(session: Session) -> str | None:
    """Why this server cannot be asked with tools; None if it can. Two small requests. MeasureError if it is unwell."""
    client, dialect = session.client, session.dialect
    if not dialect.is_chat:
        return "the checkpoint has no chat template, so it cannot be shown tools"
    messages = [{"role": "user", "content": "1 + 1"}]
    definitions = [all_tools()[0].definition]
    body = {"messages": messages, "max_tokens": 1, "tools": definitions, "tool_choice": "auto"}
    response = client.post(CHAT, body)
    if response.status in {400, 422, 501}:
        message = response.message
        remedy = f"; {NO_TOOLS}" if "tool" in message and "pars" in message else ""
        return f"the server does not accept tool calls: HTTP {response.status}: {message}{remedy}"
    if response.status != 200:
        raise MeasureError(f"{client.endpoint.base_url}{CHAT}: HTTP {response.status}: {response.message}")
    try:
        with_tools = count_prompt(client, dialect, messages, definitions)
        without = count_prompt(client, dialect, messages)
    except NotMeasured:
        return None  # nothing to tell it by; the replies will show
    return TEMPLATE_IGNORES_TOOLS if with_tools <= without else None


def grammar_notes(suite: SuiteRecipe, fingerprint: Fingerprint | None) -> list[str]:
    """What to say if the server holds calls to a grammar, so that their validity is not the model's alone."""
    names = [task.name for task in suite.tasks if isinstance(task, ToolsTask)]
    if not names or fingerprint is None:
        return []
    parser, level = fingerprint.flags.get("tool-call-parser"), fingerprint.flags.get("tool-strict-level")
    switched_off = str(fingerprint.environment.get("VLLM_ENFORCE_STRICT_TOOL_CALLING", "1")).lower() not in {"1", "true"}
    if switched_off or not (level in {"function", "parameter"} or (parser in GRAMMAR_PARSERS and level in {None, "auto"})):
        return []
    return [
        f"{', '.join(names)}: the server (tool-call-parser {parser}) holds calls to a grammar, so schema validity is not the "
        "model's alone; VLLM_ENFORCE_STRICT_TOOL_CALLING=0 in the profile's environment shows the model's"
    ]
