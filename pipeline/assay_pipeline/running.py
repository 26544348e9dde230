"""A whole run: look at it beforehand, make the checkpoints, measure, judge, report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from assay.errors import AssayError, PlanError
from assay.records.preflight.report import PreflightReport
from assay.records.screening import Screening
from assay.records.speed import SpeedRecord
from assay_pipeline.calibration.files import with_files
from assay_pipeline.comparison.checkpoints import of_target
from assay_pipeline.comparison.first_stage import without_refused
from assay_pipeline.comparison.planned_run import planned_run
from assay_pipeline.comparison.screen_texts import check_texts
from assay_pipeline.evaluating import Evaluation, Judged, evaluate
from assay_pipeline.judging import write_again
from assay_pipeline.preflight import preflight
from assay_pipeline.profiles import check_plans_served, require_hardware
from assay_pipeline.quantize_options import QuantizeOptions
from assay_pipeline.quantizing import DEFAULT_OPTIONS, MadeCheckpoint, OnMade, quantize_in_run
from assay_pipeline.speed_ladder import measure_judged


@dataclass(frozen=True)
class RunResult:
    """How far a run came. preflight: None: it was skipped. judged: None: the preflight failed, or a checkpoint is damaged.
    speed: with its reference's label; None: it was not asked for. screening: None: it was not asked for."""

    preflight: PreflightReport | None
    checkpoints: list[MadeCheckpoint]
    judged: Judged | None
    speed: tuple[SpeedRecord, str] | None = None
    screening: Screening | None = None


def run(
    target: str,
    *,
    precisions: list[str] | None = None,
    suite: str | None = None,
    tasks: Sequence[str] | None = None,
    limit: int | None = None,
    gates: str | None = None,
    profile: str | None = None,
    runs: Path = Path("runs"),
    name: str | None = None,
    options: QuantizeOptions = DEFAULT_OPTIONS,
    with_preflight: bool = True,
    with_speed: bool = False,
    screened: bool = False,
    screen_text: Sequence[Path] = (),
    tensor_parallel_size: int | None = None,
    base_model: str | None = None,
    mtp: str | None = None,
    reference: str | None = None,
    on_preflight: Callable[[PreflightReport], None] | None = None,
    on_made: OnMade | None = None,
) -> RunResult:
    """Make and verify every precision, measure it against the reference, judge, write report and cards.

    The same call again does only what is missing. tasks, limit: some tasks of the suite, so many items of each of their parts.
    with_preflight: stop before the first byte where something would fail, unless
    all is made and measured already. with_speed: afterwards measure how fast each checkpoint is served. screened: what a
    screening over `screen_text` refuses is not measured. reference: what candidates are compared with, instead of the recipe's.
    AssayError: what cannot work; it is found before the first byte is written where it can be.
    """
    from assay_evaluate.serving.server import environment_for

    say = options.say
    check_texts(screen_text)
    planned = planned_run(
        target, precisions=precisions, suite=suite, tasks=tasks, limit=limit, gates=gates, profile=profile, runs=runs,
        name=name, stream_from=options.stream_from, here=True, tensor_parallel_size=tensor_parallel_size, base_model=base_model,
        mtp=mtp, reference=reference, say=say,
    )  # fmt: skip
    if planned.is_served_here:
        environment_for(planned.profile)
    elif with_speed:
        raise AssayError(
            f"--speed: profile {planned.profile.name} names servers that run already (`endpoints`), and speed needs one for "
            "each speculation; leave it out, and give what `vllm bench serve` measured on them to `assay speed --import`"
        )
    report: PreflightReport | None = None
    if not with_preflight or planned.is_done:
        require_hardware(planned.profile)
    else:
        report = preflight(planned, say)
        if on_preflight is not None:
            on_preflight(report)
        if report.outcome == "FAIL":
            return RunResult(report, [], None)
    for checkpoint in planned.checkpoints:
        if checkpoint.problem is not None:
            raise PlanError(checkpoint.problem)
    resolved, planned_here = planned.target, with_files(planned.target, planned.plans_to_make, options)
    check_plans_served(planned.plans, resolved, planned.profile)
    for note in planned.source.notes:
        say(f"note: {note}")
    if planned.why_suite is not None:
        say(planned.why_suite)
    made = quantize_in_run(resolved, planned.source, planned_here, options, runs, name, planned.profile, on_made)
    if not all(checkpoint.verification.passed for checkpoint in made):
        return RunResult(report, made, None)
    compared = of_target(  # why precisions were chosen was said above
        replace(resolved, choices=()), runs, name, precisions, planned.profile.endpoints, say=say
    )
    screening: Screening | None = None
    if screened:
        compared, screening = without_refused(compared, planned.run_dir, screen_text, options.memory_bytes, say)
        if len(compared.candidates) == 1:
            return RunResult(report, made, None, screening=screening)
    evaluation = Evaluation(resolved, compared, planned.suite, planned.profile, planned.limits)
    judged = evaluate(evaluation, runs=runs, name=name, say=say)
    if not with_speed:
        return RunResult(report, made, judged, screening=screening)
    speed = measure_judged(judged.run_dir, judged.measurements, resolved, planned.profile, say)
    write_again(judged.run_dir, say)
    return RunResult(report, made, judged, speed, screening)
