"""The `assay run` command: all of `quantize`, `evaluate` and `gate`."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated

import typer

from assay.records.preflight.report import PreflightReport
from assay.records.speed import SPEED_RECORD
from assay_cli.options import (
    BaseModelOption,
    DeviceOption,
    FamilyOption,
    GatesOption,
    ImportanceOption,
    JsonOption,
    LimitOption,
    MtpOption,
    NameOption,
    PrecisionsOption,
    ProfileOption,
    ReferenceOption,
    RunnerOption,
    RunsOption,
    StreamOption,
    SuiteOption,
    TargetArgument,
    TasksOption,
    TensorParallelOption,
    TextOption,
    WithholdOption,
    WorkersOption,
)
from assay_cli.progress import track
from assay_cli.shown.checkpoint import print_made
from assay_cli.shown.preflight import show, skipped
from assay_cli.shown.screening import print_screening
from assay_cli.shown.speed import print_speed
from assay_cli.shown.verdicts import print_summary
from assay_cli.terminal import console, emit, results, say
from assay_pipeline.judging import load_report, passed
from assay_pipeline.quantize_options import TextOptions
from assay_pipeline.quantizing import quantize_options
from assay_pipeline.running import run as run_all

SCREEN_TEXT = typer.Option(
    "--screen-text", metavar="FILE|RUN",
    help="Texts of the screening, as `assay screen --text` takes them: long replies of the reference tell most.",
)  # fmt: skip


def run(
    target: TargetArgument,
    precisions: PrecisionsOption = None,
    suite: SuiteOption = None,
    tasks: TasksOption = None,
    limit: LimitOption = None,
    gates: GatesOption = None,
    profile: ProfileOption = None,
    tensor_parallel_size: TensorParallelOption = None,
    runs: RunsOption = Path("runs"),
    name: NameOption = None,
    runner: RunnerOption = "local",
    workers: WorkersOption = None,
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory",
            help="Most memory the quantizer, and a screening, may use, e.g. 1.5GiB or 800MB. Default: 2GiB, and what is free.",
        ),
    ] = None,
    device: DeviceOption = "auto",
    importance: ImportanceOption = None,
    text: TextOption = None,
    withhold: WithholdOption = None,
    stream_from: StreamOption = None,
    base_model: BaseModelOption = None,
    mtp: MtpOption = None,
    reference: ReferenceOption = None,
    no_preflight: Annotated[
        bool, typer.Option("--no-preflight", help="Begin without `assay preflight`, which stops what would fail.")
    ] = False,
    with_speed: Annotated[
        bool, typer.Option("--speed", help="Afterwards measure how fast each checkpoint is served, as `assay speed` does.")
    ] = False,
    screened: Annotated[
        bool, typer.Option("--screened", help="First screen, as `assay screen` does: what it fails is not measured.")
    ] = False,
    screen_text: Annotated[list[Path] | None, SCREEN_TEXT] = None,
    family: FamilyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Do everything: make and verify every precision, measure it against the reference, judge, write report and cards.

    The same command again does only what is missing. Exit 1 unless every candidate is PASS.
    """
    words = TextOptions(tuple(text or ()), None if withhold is None else tuple(withhold), runs)
    options = quantize_options(
        device, runner, workers, memory, importance, stream_from, text=words, say=say, track=track
    )  # fmt: skip
    out = results(as_json=as_json)

    def show_preflight(report: PreflightReport) -> None:
        show(report, out if report.outcome == "FAIL" else console, whole=False)

    done = run_all(
        target, precisions=precisions, suite=suite, tasks=tasks, limit=limit, gates=gates, profile=profile, runs=runs,
        name=name, options=options, with_preflight=not no_preflight, with_speed=with_speed,
        screened=screened or bool(screen_text), screen_text=screen_text or (), tensor_parallel_size=tensor_parallel_size,
        base_model=base_model, mtp=mtp, reference=reference, on_preflight=show_preflight,
        on_made=functools.partial(print_made, out=out),
    )  # fmt: skip
    if (judged := done.judged) is None:
        if done.screening is not None:
            if as_json:
                emit(done.screening)
            else:
                print_screening(done.screening, out)
            say("nothing is measured: the screening fails every candidate")
        elif done.checkpoints:
            say("nothing is measured: a checkpoint is damaged")
        else:
            if as_json and done.preflight is not None:
                emit(done.preflight)
            say(skipped("--no-preflight"))
        raise typer.Exit(1)
    if done.speed is not None:
        print_speed(*done.speed, console)
        say(f"record: {judged.run_dir / SPEED_RECORD}")
    if as_json:
        emit(load_report(judged.run_dir))
    else:
        print_summary(judged.gates, judged.measurements, out)
    say(f"report: {judged.run_dir / 'report' / 'index.html'}")
    if not passed(judged.gates):
        raise typer.Exit(1)
