"""One suite on one served checkpoint: tasks, acceptance, divergence."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assay.callbacks import Say
from assay.quantities import interval_name
from assay.recipes.model import Serving
from assay.recipes.suite import ArithmeticTask, LmEvalTask, NeedleTask, RulerTask, SuiteRecipe, SweTask, TaskBase, ToolsTask
from assay.records.base import sha256_of
from assay.records.measurement import AskedWith, TaskResult
from assay.records.serving import Fingerprint
from assay.safe_files import read_json_object
from assay_evaluate.asking.acceptance import acceptance, server_counters
from assay_evaluate.asking.dialect import Dialect, learn_dialect, takes_seeds
from assay_evaluate.asking.evidence import ReferenceComparison
from assay_evaluate.asking.session import Session, task_result
from assay_evaluate.client.client import Client, NotMeasured
from assay_evaluate.client.journal import Identity, Journal
from assay_evaluate.divergence.phase import DivergencePhase, ReferenceText
from assay_evaluate.run.reply_evidence import ask_twice, with_evidence
from assay_evaluate.serving.server import Server
from assay_evaluate.tasks.generated import arithmetic_items, haystacks, run_generated, run_needle
from assay_evaluate.tasks.lm_eval.task import run_lm_eval
from assay_evaluate.tasks.looks import has_second_replies
from assay_evaluate.tasks.ruler_task import run_ruler
from assay_evaluate.tasks.swebench.task import run_swe_task
from assay_evaluate.tasks.tools.task import grammar_notes, run_tools

NO_TEMPLATE = "the checkpoint has no chat template: questions were asked as plain completions"


@dataclass(frozen=True)
class ServedCheckpoint:
    """One served checkpoint, and how it is asked the questions of a suite. checkpoint: its folder; None: it is not known."""

    suite: SuiteRecipe
    server: Server
    journal: Journal
    who: Identity
    checkpoint: Path | None
    serving: Serving
    concurrency: int
    on_progress: Say

    @contextmanager
    def session(self, *, is_repeat: bool = False) -> Iterator[Session]:
        """is_repeat: of the noise floor, in another batch composition: with other concurrency, in reverse order."""
        in_flight = max(2, self.concurrency // 2 + 1) if is_repeat else self.concurrency
        with Client(
            self.server, self.journal, self.who, concurrency=in_flight, newest_first=is_repeat, on_progress=self.on_progress
        ) as client:
            dialect = learn_dialect(client, self.serving.chat_template_kwargs)
            has_parser = self.serving.reasoning_parser is not None
            seeds = takes_seeds(self.server.fingerprint)
            yield Session(client, dialect, self.suite.seed, int(is_repeat), has_parser, seeds)

    def divergence_phase(self, session: Session, text: ReferenceText | None) -> DivergencePhase:
        return DivergencePhase(session, self.suite, self.who, text, self.checkpoint, self.server.fingerprint)


def measure_suite(
    served: ServedCheckpoint,
    text: ReferenceText | None,
    *,
    is_noise_floor: bool,
    tasks: Sequence[TaskBase] | None = None,
    asks_twice: bool = True,
) -> dict[str, Any]:
    """Fields `tasks, divergence, acceptance, not_measured, notes` and how busy the servers were, of a Measurement.

    text: what the reference wrote; None if this is the reference, which then writes and scores it. tasks: those of the suite as
    they are asked now; None: as the suite has them. asks_twice: a few questions once more, to see whether the server does as it
    is told. The noise-floor pass asks everything again; of tasks that the reference has answered twice already it takes the
    second replies.
    """
    suite, journal, who, fingerprint = served.suite, served.journal, served.who, served.server.fingerprint
    reference = who if text is None else text.who
    with served.session(is_repeat=is_noise_floor) as session:
        notes = [] if session.dialect.is_chat else [NO_TEMPLATE]
        notes += grammar_notes(suite, fingerprint)
        asked_with = describe_asking(served.checkpoint, served.serving, fingerprint, session.dialect, session.sends_seeds)
        phase = served.divergence_phase(session, text)
        second_replies = {task.name for task in suite.tasks if is_noise_floor and has_second_replies(task)}
        key = f"{suite.sha256}:{who.checkpoint_sha256}:{who.fingerprint_sha256}:{session.sample}"
        with server_counters(served.server.metrics, journal, key):
            steps: list[Callable[[], TaskResult | None]] = [
                functools.partial(
                    _measure_task,
                    dataclasses.replace(session, takes_second_replies=task.name in second_replies),
                    suite,
                    task,
                    reference,
                    served.checkpoint,
                )
                for task in (suite.tasks if tasks is None else tasks)
            ]
            results = [result for result in session.ahead.run([*steps, phase.begin]) if result is not None]
        accepted = acceptance(session.tally, journal.counters(key))
        asked_twice = ask_twice(session, suite.tasks) if asks_twice else ()
        not_measured = {result.task: result.note or "" for result in results if result.accuracy is None}
        if suite.acceptance and accepted is None:
            drafts = fingerprint.speculation is not None
            not_measured["acceptance"] = "the server drafted nothing" if drafts else "served without speculative decoding"
        divergence = phase.finish(results)
        not_measured |= phase.not_measured
        shares = session.client.flight.shares() or (None, None)
    return {
        "requests_in_flight_share": shares[0],
        "mean_requests_in_flight": shares[1],
        "asked_with": asked_with,
        "asked_twice": asked_twice,
        "tasks": tuple(results),
        "divergence": divergence,
        "acceptance": accepted if suite.acceptance else None,
        "not_measured": not_measured,
        "notes": (*notes, *phase.notes, *(note for result in results for note in task_notes(result))),
    }


def ask_tasks(served: ServedCheckpoint, tasks: Sequence[TaskBase], reference: Identity) -> list[TaskResult]:
    """Some of the suite's tasks, as they are asked now; what the journal has already is not asked again. Scores only."""
    with served.session() as session:
        return session.ahead.run(
            [functools.partial(_measure_task, session, served.suite, task, reference, served.checkpoint) for task in tasks]
        )


def task_notes(task: TaskResult) -> list[str]:
    """How a measured task was measured, its partial credit, and how often its thinking was ended by the budget."""
    notes = [f"{task.task}: {task.note}"] if task.note and task.accuracy is not None else []
    if task.mean_score is not None:
        mean = task.mean_score
        name = interval_name(mean.level, mean.coverage)
        notes.append(
            f"{task.task}: mean score {mean.value:.3f} ({name} {mean.low:.3f} to {mean.high:.3f}), with partial credit"
        )
    if task.num_thinking_cut:
        notes.append(
            f"{task.task}: thinking was ended at its {task.thinking_budget_tokens} tokens in {task.num_thinking_cut} of "
            f"{task.num_items - task.num_failed} replies"
        )
    return notes


def _measure_task(
    session: Session, suite: SuiteRecipe, task: TaskBase, reference: Identity, checkpoint: Path | None
) -> TaskResult:
    is_first = session.client.who == reference and session.sample == 0
    if task.temperature == 0 and not is_first and session.served[task.name].comparison is None:
        session.served[task.name].comparison = ReferenceComparison(session.client.journal, reference)
    result = with_evidence(session, task, _run_task(session, suite, task, reference, checkpoint), checkpoint)
    return result.model_copy(
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


# ------------------------------------------------------------------------------------------------ how questions are asked
def describe_asking(
    checkpoint: Path | None, serving: Serving, fingerprint: Fingerprint, dialect: Dialect, sends_seeds: bool
) -> AskedWith:
    """What stands between a question and the tokens the model sees: chat template, its arguments, parser, seeds."""
    flag = fingerprint.flags.get("chat-template")
    return AskedWith(
        is_chat=dialect.is_chat,
        chat_template_sha256=template_sha256(checkpoint, None if flag is None else Path(str(flag))),
        chat_template_kwargs=dialect.chat_template_kwargs,
        reasoning_parser=serving.reasoning_parser,
        tool_call_parser=serving.tool_call_parser,
        sends_seeds=sends_seeds,
    )


def template_sha256(checkpoint: Path | None, instead: Path | None = None) -> str | None:
    """Hash of the chat template's text; None if there is none here to read (a server elsewhere may have one).

    instead: the file that a flag puts in its place. CheckpointError: tokenizer_config.json is no JSON object.
    """
    for file in (instead, None if checkpoint is None else checkpoint / "chat_template.jinja"):
        if file is not None and file.is_file():
            return sha256_of(file.read_text(encoding="utf-8", errors="replace"))
    if checkpoint is None or not (checkpoint / "tokenizer_config.json").is_file():
        return None
    template = read_json_object(checkpoint, "tokenizer_config.json").get("chat_template")
    return None if template is None else sha256_of(template)
