"""The `assay gate` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from assay_cli.options import JsonOption, RunArgument, RunsOption, completes, named, named_run, recipe
from assay_cli.shown.verdicts import print_summary
from assay_cli.terminal import emit, results, say
from assay_pipeline.judging import judge, load_measurements, passed


def gate(
    ctx: typer.Context,
    run: RunArgument,
    gates: Annotated[
        str | None,
        typer.Option(
            "--gates",
            metavar="NAME|FILE",
            callback=recipe("gates"),
            autocompletion=completes("gates"),
            help=f"{named('gates')} Default: those registered before the run.",
        ),
    ] = None,
    runs: RunsOption = Path("runs"),
    as_json: JsonOption = False,
) -> None:
    """Judge a run again, from its records. Exit 1 unless every candidate is PASS, 2 on an error.

    FAIL, UNDERPOWERED, NOT MEASURED and, of a suite without tasks, not failed exit 1; `overall` of --json tells them apart.
    """
    run_dir = named_run(ctx, run, runs)
    report = judge(run_dir, gates, say=say)
    if as_json:
        emit(report)
    else:
        print_summary(report, load_measurements(run_dir), results())
    if not passed(report):
        raise typer.Exit(1)
