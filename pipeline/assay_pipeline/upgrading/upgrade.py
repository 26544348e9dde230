"""`assay upgrade-check`: one checkpoint on two engines, and where between them a loss came in.

The engine of today is the reference, that of tomorrow a variant of it that differs in its Python or its address, so questions,
gates, probes and report are those of any comparison. After a FAIL the engines in between are tried by bisection, each against
the first one and only on the tasks that were lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from assay.callbacks import Say, say_nothing
from assay.errors import AssayError
from assay.foreign_text import one_line
from assay.recipes.variant import variant_of
from assay.records.speed import SpeedRecord, SpeedRow
from assay.records.upgrade import UPGRADE_RECORD, Engine, UpgradeCheck, UpgradeSpeed, UpgradeStep
from assay_pipeline.targets import url_in
from assay_pipeline.upgrading.engines import check_same_kind, engine_at, installed_between, labelled

if TYPE_CHECKING:
    from assay.recipes.variant import Variant
    from assay.records.verdict import GateReport
    from assay_pipeline.evaluating import Evaluation, Judged

SUITE = "upgrade"


@dataclass(frozen=True)
class Question:
    """What all engines are asked: as of `evaluating.prepare`. target: None, if only servers that run already know."""

    target: str | None
    suite: str = SUITE
    tasks: tuple[str, ...] | None = None
    limit: int | None = None
    gates: str | None = None
    profile: str | None = None
    tensor_parallel_size: int | None = None
    api_key_env: str | None = None


@dataclass(frozen=True)
class Checked:
    """The record, and the run that holds it."""

    run_dir: Path
    record: UpgradeCheck


def upgrade_check(
    question: Question,
    before: str,
    after: str,
    *,
    between: Sequence[str] = (),
    with_speed: bool = True,
    runs: Path = Path("runs"),
    name: str | None = None,
    say: Say = say_nothing,
) -> Checked:
    """Judge `after` against `before`, and find between which two of the engines in between a loss came in.

    Engines: the Python of an environment, its folder, or the URL of a server that runs already and serves the checkpoint.
    between: from old to new; empty: of the serving environments on this machine those whose vLLM lies between the two.
    with_speed: measure how fast both are, unless they are servers of somebody else.

    AssayError: an engine is missing or has no vLLM, two are the same, or one is served here and the other is not.
    """
    from assay_pipeline.judging import write_again

    key = question.api_key_env
    first, last = labelled([engine_at(before, "--from", key), engine_at(after, "--to", key)])
    check_same_kind(first, last)
    if question.target is None and url_in(first.where) is None:
        raise AssayError("TARGET is missing: the checkpoint that both engines are to serve")
    given = [engine_at(text, "--between", key) for text in between]
    for engine in given:
        check_same_kind(first, engine)
    judged, evaluation = _judged(question, first, [last], runs, name, say)
    first = first.model_copy(update={"label": judged.gates.reference})
    status = judged.gates.overall[last.label]
    record = UpgradeCheck(
        model=judged.gates.model, suite=evaluation.suite.name, before=first, after=last, status=status,
        reason=judged.gates.reasons.get(last.label, ""),
    )  # fmt: skip
    record.save(judged.run_dir / UPGRADE_RECORD)
    if status == "FAIL":
        chain = labelled([first, *(given or installed_between(first, last)), last], kept=(first, last))
        record = _bisected(question, record, judged, chain, runs, say)
        record.save(judged.run_dir / UPGRADE_RECORD)
    if with_speed:
        record = _with_speeds(record, evaluation, judged, say)
        record.save(judged.run_dir / UPGRADE_RECORD)
    write_again(judged.run_dir, say)
    return Checked(judged.run_dir, record)


# ------------------------------------------------------------------------------------------------ judging
def _variant(engine: Engine) -> Variant:
    """Of a server that runs already the Python is not known, and declared to be another: only then may versions differ."""
    is_url = url_in(engine.where) is not None
    fields = {"url": engine.where, "interpreter": f"that of {engine.where}"} if is_url else {"interpreter": engine.where}
    return variant_of(engine.label, fields, engine.label)


def _judged(
    question: Question, first: Engine, others: Sequence[Engine], runs: Path, name: str | None, say: Say
) -> tuple[Judged, Evaluation]:
    """The checkpoint on `first`, and on others, in one run."""
    from assay_pipeline.evaluating import evaluate, prepare

    target, url = question.target, url_in(first.where)
    is_folder = target is not None and Path(target).is_dir()
    reference = None
    if url is not None:
        reference = f"{first.label}={url}{f',{target}' if is_folder else ''}"
    elif is_folder:
        reference = f"{first.label}={target}"
    evaluation = prepare(
        None if is_folder else target, reference=reference, variants=[_variant(engine) for engine in others],
        api_key_env=question.api_key_env, suite=question.suite, gates=question.gates, profile=question.profile,
        interpreter=None if url is not None else first.where, runs=runs, name=name, only_reference=reference is None,
        tasks=question.tasks, limit=question.limit, tensor_parallel_size=question.tensor_parallel_size, say=say,
    )  # fmt: skip
    return evaluate(evaluation, runs=runs, name=name, own_texts=False, say=say), evaluation


def lost_tasks(gates: GateReport, candidate: str, tasks: Sequence[str]) -> list[str]:
    """Of `tasks`, those whose score gates failed."""
    failed = {
        verdict.gate.removeprefix("score ")
        for verdict in gates.verdicts
        if verdict.candidate == candidate and verdict.status == "FAIL" and verdict.gate.startswith("score ")
    }
    return [task for task in tasks if task in failed]


def _bisected(
    question: Question, record: UpgradeCheck, judged: Judged, chain: Sequence[Engine], runs: Path, say: Say
) -> UpgradeCheck:
    """chain: from the first engine, which is good, to the last, which is not."""
    all_tasks = [task["name"] for task in judged.measurements[0].suite_recipe.get("tasks", [])]
    lost = lost_tasks(judged.gates, record.after.label, all_tasks)
    narrowed = replace(question, tasks=tuple(lost))
    name, steps = f"{judged.run_dir.name}-bisect", list[UpgradeStep]()
    tried: list[Engine] = []

    def is_lost(engine: Engine) -> bool | None:
        asked = ", ".join(lost) if lost else "divergence and probes"
        say(f"bisection: {engine.label} against {record.before.label} on {asked}")
        try:
            step, _ = _judged(narrowed, chain[0], [*tried, engine], runs, name, say)
        except AssayError as error:
            steps.append(UpgradeStep(engine=engine, status=None, reason=one_line(str(error).splitlines()[0])))
            return None
        tried.append(engine)
        status = step.gates.overall[engine.label]
        steps.append(UpgradeStep(engine=engine, status=status, reason=step.gates.reasons.get(engine.label, "")))
        return {"PASS": False, "not failed": False, "FAIL": True}.get(status)

    good, bad, num_untold = bisect(chain, is_lost)
    return record.model_copy(
        update={
            "tried_on": tuple(lost) if steps else (), "steps": tuple(steps), "last_good": good, "first_bad": bad,
            "num_untold": num_untold, "bisected_in": name if steps else None,
        }
    )  # fmt: skip


def bisect(chain: Sequence[Engine], is_lost: Callable[[Engine], bool | None]) -> tuple[Engine, Engine, int]:
    """The last engine that is known to be good, the first that is known to be bad behind it, and how many lie between them.

    chain: the first is good, the last is bad. is_lost: None where it cannot be told; such engines are stepped over, so that the
    two may not be neighbours.
    """
    low, high = 0, len(chain) - 1
    untold: set[int] = set()
    while inner := [place for place in range(low + 1, high) if place not in untold]:
        middle = min(inner, key=lambda place: abs(2 * place - low - high))
        answer = is_lost(chain[middle])
        if answer is None:
            untold.add(middle)
        elif answer:
            high = middle
        else:
            low = middle
    return chain[low], chain[high], high - low - 1


# ------------------------------------------------------------------------------------------------ speed
def _with_speeds(record: UpgradeCheck, evaluation: Evaluation, judged: Judged, say: Say) -> UpgradeCheck:
    from assay_pipeline.speed_ladder import Place, measure_in_run

    if url_in(record.before.where) is not None:
        return record.model_copy(update={"speeds_not_measured": "both are servers that run already, on hardware nobody states"})
    place = Place(judged.run_dir, evaluation.target, tuple(judged.measurements))
    speed = measure_in_run(place, [record.before.label, record.after.label], evaluation.profile, {}, say)
    speeds = speeds_of(speed, record.before.label, record.after.label)
    reasons = [point.reason for point in speed.not_measured if point.checkpoint in (record.before.label, record.after.label)]
    missing = reasons[0] if reasons else None if speeds else "no point was measured on both"
    return record.model_copy(update={"speeds": speeds, "speeds_not_measured": missing})


def speeds_of(record: SpeedRecord, before: str, after: str) -> tuple[UpgradeSpeed, ...]:
    """Of every operating point that was measured on both engines: by drafts, then by requests in flight."""
    from assay_evaluate.speed.ratio import ratio, why_unlike

    def point(row: SpeedRow) -> tuple[object, ...]:
        return row.prompts, row.concurrency, row.speculation

    of_before = {point(row): row for row in record.rows if row.origin == "measured" and row.checkpoint == before}
    speeds = []
    for row in (row for row in record.rows if row.origin == "measured" and row.checkpoint == after):
        base = of_before.get(point(row))
        like = row if base is None else row.model_copy(update={"engine": base.engine})  # in which they are meant to differ
        if base is None or why_unlike(like, base) is not None:
            continue
        estimate = ratio(like, base)
        speeds.append(
            UpgradeSpeed(
                prompts=row.prompts, concurrency=row.concurrency, speculation=row.speculation, before_tokens_s=base.tokens_s,
                after_tokens_s=row.tokens_s, ratio=estimate.value, interval=estimate.interval,
            )
        )  # fmt: skip
    return tuple(sorted(speeds, key=lambda speed: (speed.prompts, speed.speculation or 0, speed.concurrency)))
