"""The `assay gate` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from assay.errors import AssayError
from assay_cli.options import (
    JsonOption,
    NameOption,
    RunsOption,
    complete_run,
    completes,
    named,
    named_run,
    recipe,
    refuse_unused,
)
from assay_cli.shown.verdicts import print_summary
from assay_cli.terminal import emit, results, say
from assay_pipeline.comparison.importing import import_results
from assay_pipeline.judging import judge, load_measurements, passed


def gate(
    ctx: typer.Context,
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN|REFERENCE",
            autocompletion=complete_run,
            help="A run's folder (runs/tiny-glm), or a model's name under --runs. With --import: a file or folder of the "
            "reference's results; LABEL= before it names it.",
        ),
    ],
    candidates: Annotated[
        list[str] | None, typer.Argument(metavar="CANDIDATE", help="With --import: the same of each candidate.")
    ] = None,
    imports: Annotated[
        bool,
        typer.Option(
            "--import",
            help="Judge what other harnesses scored: lm-eval (--log_samples), inspect, NeMo Evaluator, SWE-bench, or tables of "
            "item and score.",
        ),
    ] = False,
    metric: Annotated[
        str | None,
        typer.Option("--metric", help="With --import: the score to take where there are several. Default: the first."),
    ] = None,
    gates: Annotated[
        str | None,
        typer.Option(
            "--gates",
            metavar="NAME|FILE",
            callback=recipe("gates"),
            autocompletion=completes("gates"),
            help=f"{named('gates')} Default: those registered before the run; with --import: default.",
        ),
    ] = None,
    runs: RunsOption = Path("runs"),
    name: NameOption = None,
    as_json: JsonOption = False,
) -> None:
    """Judge a run again, from its records; or results of other harnesses. Exit 1 unless every candidate is PASS, 2 on an error.

    FAIL, UNDERPOWERED, NOT MEASURED and, of a suite without tasks, not failed exit 1; `overall` of --json tells them apart.

    Example: assay gate --import bf16=results/bf16 fp8=results/fp8
    """
    if imports:
        run_dir, report = import_results(run, candidates or (), gates=gates, metric=metric, runs=runs, name=name, say=say)
    else:
        refuse_unused(ctx, "without --import", "metric", "name")
        if candidates:
            raise AssayError(f"gate: {1 + len(candidates)} runs are named; judge one, or import results by --import")
        run_dir = named_run(ctx, run, runs)
        report = judge(run_dir, gates, say=say)
    if as_json:
        emit(report)
    else:
        print_summary(report, load_measurements(run_dir), results())
    if imports:
        say(f"report: {run_dir / 'report' / 'index.html'}")
    if not passed(report):
        raise typer.Exit(1)
