"""One suite on one served checkpoint: tasks, acceptance, divergence."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from assay.quantities import interval_name
from assay.recipes.model import Serving
from assay.recipes.suite import ArithmeticTask, LmEvalTask, NeedleTask, RulerTask, SuiteRecipe, SweTask, TaskBase, ToolsTask
from assay.records.measurement import Acceptance, TaskResult
from assay_evaluate.asking.acceptance import acceptance, server_counters
from assay_evaluate.asking.dialect import learn_dialect, takes_seeds
from assay_evaluate.asking.session import Session, task_result
from assay_evaluate.client.client import Client, NotMeasured
from assay_evaluate.client.journal import Identity, Journal
from assay_evaluate.divergence.phase import DivergencePhase, ReferenceText
from assay_evaluate.run.answering.served import ask_twice, hold_beside, with_evidence
from assay_evaluate.run.asked_with import describe
from assay_evaluate.serving.server import Server
from assay_evaluate.tasks.generated import arithmetic_items, haystacks, run_generated, run_needle
from assay_evaluate.tasks.lm_eval.task import run_lm_eval
from assay_evaluate.tasks.looks import has_second_replies
from assay_evaluate.tasks.ruler_task import run_ruler
from assay_evaluate.tasks.swebench.task import run_swe_task
from assay_evaluate.tasks.tools.task import grammar_notes, run_tools

NO_TEMPLATE = "the checkpoint has no chat template: questions were asked as plain completions"


def measure_suite(
    suite: SuiteRecipe,
    server: Server,
    journal: Journal,
    who: Identity,
    text: ReferenceText | None,
    *,
    checkpoint: Path | None,
    serving: Serving,
    is_noise_floor: bool,
    concurrency: int,
    on_progress: Callable[[str], None],
    tasks: Sequence[TaskBase] | None = None,
    asks_twice: bool = True,
) -> dict[str, Any]:
    """Fields `tasks, divergence, acceptance, not_measured, notes` and how busy the servers were, of a Measurement.

    text: what the reference wrote; None if this is the reference, which then writes and scores it. tasks: those of the suite as
    they are asked now; None: as the suite has them. asks_twice: a few questions once more, to see whether the server does as it
    is told. The noise-floor pass asks everything again in another batch composition:
    other concurrency, reverse order; of tasks that the reference has answered twice already it takes the second replies.
    """
    in_flight = max(2, concurrency // 2 + 1) if is_noise_floor else concurrency
    not_measured: dict[str, str] = {}
    with Client(server, journal, who, concurrency=in_flight, newest_first=is_noise_floor, on_progress=on_progress) as client:
        dialect = learn_dialect(client, serving.chat_template_kwargs)
        seeds = takes_seeds(server.fingerprint)
        session = Session(client, dialect, suite.seed, int(is_noise_floor), serving.reasoning_parser is not None, seeds)
        notes = [] if dialect.is_chat else [NO_TEMPLATE]
        notes += grammar_notes(suite, server.fingerprint)
        asked_with = describe(checkpoint, serving, server.fingerprint, dialect, seeds)
        reference = who if text is None else text.who
        phase = DivergencePhase(session, suite, who, text, checkpoint, server.fingerprint)
        results, accepted = _run_tasks(
            session, suite, suite.tasks if tasks is None else tasks, server, who, reference, checkpoint, phase
        )
        twice = ask_twice(session, suite.tasks) if asks_twice else ()
        not_measured |= {task.task: task.note or "" for task in results if task.accuracy is None}
        if suite.acceptance and accepted is None:
            drafts = server.fingerprint.speculation is not None
            not_measured["acceptance"] = "the server drafted nothing" if drafts else "served without speculative decoding"
        divergence = phase.finish(results)
        not_measured |= phase.not_measured
        shares = client.flight.shares() or (None, None)
    return {
        "requests_in_flight_share": shares[0],
        "mean_requests_in_flight": shares[1],
        "asked_with": asked_with,
        "asked_twice": twice,
        "tasks": tuple(results),
        "divergence": divergence,
        "acceptance": accepted if suite.acceptance else None,
        "not_measured": not_measured,
        "notes": (*notes, *phase.notes, *(note for task in results for note in task_notes(task))),
    }


def ask_tasks(
    suite: SuiteRecipe,
    tasks: Sequence[TaskBase],
    server: Server,
    journal: Journal,
    who: Identity,
    reference: Identity,
    *,
    checkpoint: Path | None,
    serving: Serving,
    concurrency: int,
    on_progress: Callable[[str], None],
) -> list[TaskResult]:
    """Some of the suite's tasks, as they are asked now; what the journal has already is not asked again. Scores only."""
    with Client(server, journal, who, concurrency=concurrency, newest_first=False, on_progress=on_progress) as client:
        dialect = learn_dialect(client, serving.chat_template_kwargs)
        has_parser = serving.reasoning_parser is not None
        session = Session(client, dialect, suite.seed, 0, has_parser, takes_seeds(server.fingerprint))
        return session.ahead.run(
            [functools.partial(_measure_task, session, suite, task, reference, checkpoint) for task in tasks]
        )


def task_notes(task: TaskResult) -> list[str]:
    """How a measured task was measured, its partial credit, and how often its thinking was ended by the budget."""
    found = [f"{task.task}: {task.note}"] if task.note and task.accuracy is not None else []
    if task.mean_score is not None:
        mean = task.mean_score
        name = interval_name(mean.level, mean.coverage)
        found.append(
            f"{task.task}: mean score {mean.value:.3f} ({name} {mean.low:.3f} to {mean.high:.3f}), with partial credit"
        )
    if task.num_thinking_cut:
        found.append(
            f"{task.task}: thinking was ended at its {task.thinking_budget_tokens} tokens in {task.num_thinking_cut} of "
            f"{task.num_items - task.num_failed} replies"
        )
    return found


def _run_tasks(
    session: Session, suite: SuiteRecipe, asked: Sequence[TaskBase], server: Server, who: Identity, reference: Identity,
    checkpoint: Path | None, phase: DivergencePhase,
) -> tuple[list[TaskResult], Acceptance | None]:  # fmt: skip
    key = f"{suite.sha256}:{who.checkpoint_sha256}:{who.fingerprint_sha256}:{session.sample}"
    journal = session.client.journal
    with server_counters(server.metrics, journal, key):
        todo: list[Callable[[], TaskResult | None]] = [
            functools.partial(_measure_task, _session_of(session, suite, task), suite, task, reference, checkpoint)
            for task in asked
        ]
        tasks = [result for result in session.ahead.run([*todo, phase.begin]) if result is not None]
    return tasks, acceptance(session.tally, journal.counters(key))


def _session_of(session: Session, suite: SuiteRecipe, task: TaskBase) -> Session:
    """Of the noise-floor pass: the one that takes second replies, for a task that has them."""
    takes = bool(session.sample) and has_second_replies(next(one for one in suite.tasks if one.name == task.name))
    return dataclasses.replace(session, takes_second_replies=True) if takes else session


def _measure_task(
    session: Session, suite: SuiteRecipe, task: TaskBase, reference: Identity, checkpoint: Path | None
) -> TaskResult:
    hold_beside(session, task, reference)
    found = with_evidence(session, task, _run_task(session, suite, task, reference, checkpoint), checkpoint)
    return found.model_copy(
        update={"chance": task.chance, "title": task.title, "is_second_replies": session.takes_second_replies}
    )


def _run_task(session: Session, suite: SuiteRecipe, task: TaskBase, reference: Identity, checkpoint: Path | None) -> TaskResult:
    if isinstance(task, ArithmeticTask):
        return run_generated(session, task, arithmetic_items(task, suite.seed))
    if isinstance(task, NeedleTask):
        # Sized once, by the reference's tokenizer and template: every checkpoint must get the same text.
        depends_on = {
            "seed": suite.seed,
            "reference": reference.checkpoint_sha256,
            "chat": session.dialect.is_chat,
            "chat_template_kwargs": session.dialect.chat_template_kwargs,
            "max_model_len": session.max_model_len,
        }
        try:
            return run_needle(session, task, haystacks(session, task, depends_on, checkpoint))
        except NotMeasured as error:
            return task_result(task.name, "needle", [], task.max_tokens, str(error))
    if isinstance(task, RulerTask):
        return run_ruler(session, task, checkpoint, reference)
    if isinstance(task, ToolsTask):
        return run_tools(session, task, reference)
    if isinstance(task, SweTask):
        return run_swe_task(session, task)
    assert isinstance(task, LmEvalTask)
    return run_lm_eval(session, task)
