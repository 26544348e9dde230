"""The `assay run` command: all of `quantize`, `evaluate` and `gate`."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from assay.errors import AssayError, PlanError
from assay_cli.commands.measure.speed import measure_speed
from assay_cli.options import (
    DeviceOption,
    GatesOption,
    ImportanceOption,
    JsonOption,
    NameOption,
    PrecisionsOption,
    ProfileOption,
    RunnerOption,
    RunsOption,
    StreamOption,
    SuiteOption,
    TargetArgument,
    TextOption,
    WithholdOption,
    WorkersOption,
)
from assay_cli.progress import track
from assay_cli.shown.checkpoint import print_made
from assay_cli.shown.preflight import show, skipped
from assay_cli.shown.verdicts import print_summary
from assay_cli.terminal import console, emit, results, say
from assay_pipeline.calibrating.in_run import with_files
from assay_pipeline.evaluating import evaluate_in_run
from assay_pipeline.judging import load_report, passed, write_again
from assay_pipeline.profiles import check_plans_served, require_hardware
from assay_pipeline.quantize_options import TextOptions
from assay_pipeline.quantizing import quantize_in_run, quantize_options


def run(
    target: TargetArgument,
    precisions: PrecisionsOption = None,
    suite: SuiteOption = None,
    gates: GatesOption = None,
    profile: ProfileOption = None,
    runs: RunsOption = Path("runs"),
    name: NameOption = None,
    runner: RunnerOption = "local",
    workers: WorkersOption = None,
    memory: Annotated[
        str | None, typer.Option("--memory", help="Most memory the quantizer may use, e.g. 1.5GiB or 800MB. Default: 2GiB.")
    ] = None,
    device: DeviceOption = "auto",
    importance: ImportanceOption = None,
    text: TextOption = None,
    withhold: WithholdOption = None,
    stream_from: StreamOption = None,
    no_preflight: Annotated[
        bool, typer.Option("--no-preflight", help="Begin without `assay preflight`, which stops what would fail.")
    ] = False,
    with_speed: Annotated[
        bool, typer.Option("--speed", help="Afterwards measure how fast each checkpoint is served, as `assay speed` does.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Do everything: make and verify every precision, measure it against the reference, judge, write report and cards.

    The same command again does only what is missing. Exit 1 unless every candidate is PASS.
    """
    from assay_evaluate.serving.server import interpreter_for
    from assay_pipeline.candidates.of_target import of_target
    from assay_pipeline.candidates.planned import planned_run
    from assay_pipeline.preflight import preflight

    # What cannot work fails before the first byte is written.
    said = TextOptions(tuple(text or ()), None if withhold is None else tuple(withhold), runs)
    options = quantize_options(device, runner, workers, memory, importance, stream_from, text=said, say=say, track=track)
    planned = planned_run(
        target, precisions=precisions, suite=suite, gates=gates, profile=profile, runs=runs, name=name, stream_from=stream_from,
        here=True, say=say,
    )  # fmt: skip
    if planned.is_served_here:
        interpreter_for(planned.profile)
    elif with_speed:
        raise AssayError(
            f"--speed: profile {planned.profile.name} names servers that run already (`endpoints`), and speed needs one for "
            "each speculation; leave it out, and give what `vllm bench serve` measured on them to `assay speed --import`"
        )
    out = results(as_json=as_json)
    if no_preflight or planned.is_done:
        require_hardware(planned.profile)
    else:
        found = preflight(planned, say)
        failed = found.outcome == "FAIL"
        show(found, out if failed else console, whole=False)
        if failed:
            if as_json:
                emit(found)
            say(skipped("--no-preflight"))
            raise typer.Exit(1)
    for one in planned.checkpoints:
        if one.problem is not None:
            raise PlanError(one.problem)
    aim, wanted = planned.aim, with_files(planned.aim, planned.wanted, options)
    check_plans_served(planned.plans, aim, planned.profile)
    for note in planned.source.notes:
        say(f"note: {note}")
    if planned.why_suite is not None:
        say(planned.why_suite)
    show_made = functools.partial(print_made, out=out)
    made = quantize_in_run(aim, planned.source, wanted, options, runs, name, planned.profile, show_made)
    if not all(checkpoint.verification.passed for checkpoint in made):
        say("nothing is measured: a checkpoint is damaged")
        raise typer.Exit(1)
    compared = of_target(
        replace(aim, choices=()), runs, name, precisions, planned.profile.endpoints, say=say
    )  # were said above
    judged = evaluate_in_run(aim, compared, planned.suite, planned.profile, planned.limits, runs, name, say=say)
    if with_speed:
        measure_speed(judged, aim, profile)
        write_again(judged.run_dir, say)
    if as_json:
        emit(load_report(judged.run_dir))
    else:
        print_summary(judged.gates, judged.measurements, out)
    say(f"report: {judged.run_dir / 'report' / 'index.html'}")
    if not passed(judged.gates):
        raise typer.Exit(1)
