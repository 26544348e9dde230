"""The `assay preflight` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from assay_cli.options import (
    FamilyOption,
    GatesOption,
    JsonOption,
    LimitOption,
    MtpOption,
    NameOption,
    PrecisionsOption,
    ProfileOption,
    ReferenceOption,
    RunsOption,
    StreamOption,
    SuiteOption,
    TargetArgument,
    TasksOption,
    TensorParallelOption,
)
from assay_cli.shown.preflight import show, skipped
from assay_cli.terminal import emit, results, say


def preflight(
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
    stream_from: StreamOption = None,
    mtp: MtpOption = None,
    reference: ReferenceOption = None,
    first: Annotated[
        bool,
        typer.Option(
            "--first",
            help="As the first step of a run on this machine: the profile's GPUs must be here, and nothing is looked at when "
            "everything is made and measured already.",
        ),
    ] = False,
    family: FamilyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find out what would fail before anything is downloaded, made or served: disk, memory, vLLM's loaders and more.

    Reads headers only. With --profile, also for a machine that is not this one. Exit 1 if something would fail.
    """
    from assay_pipeline.comparison.planned_run import planned_run
    from assay_pipeline.preflight import preflight as look
    from assay_pipeline.preflight import report_of

    run = planned_run(
        target, precisions=precisions, suite=suite, tasks=tasks, limit=limit, gates=gates, profile=profile, runs=runs,
        name=name, stream_from=stream_from, here=first, tensor_parallel_size=tensor_parallel_size, mtp=mtp,
        reference=reference, say=say,
    )  # fmt: skip
    if first and run.is_done:
        say(f"preflight: nothing is looked at, {run.run_dir} is made and measured already")
        if as_json:
            emit(report_of(run))
        return
    report = look(run, say)
    if as_json:
        emit(report)
    else:
        show(report, results(), whole=not first)
    if report.outcome == "FAIL":
        if first:
            say(skipped("PREFLIGHT=0"))
        raise typer.Exit(1)
