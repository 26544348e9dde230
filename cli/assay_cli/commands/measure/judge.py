"""The `assay judge` command: the quick look of `evaluate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from assay_cli.options import (
    ApiKeyOption,
    FamilyOption,
    GatesOption,
    JsonOption,
    LimitOption,
    NameOption,
    ProfileOption,
    RunsOption,
    TasksOption,
    TensorParallelOption,
    completes,
    named,
    recipe,
)
from assay_cli.shown.verdicts import print_summary
from assay_cli.terminal import emit, results, say
from assay_pipeline.evaluating import evaluate, prepare
from assay_pipeline.judging import load_report, passed


def judge(
    reference: Annotated[
        str,
        typer.Argument(
            metavar="REFERENCE", help="What to compare with: a server's URL, or a checkpoint folder; LABEL= before it names it."
        ),
    ],
    candidates: Annotated[list[str], typer.Argument(metavar="CANDIDATE...", help="What to judge: URLs or folders.")],
    suite: Annotated[
        str,
        typer.Option(
            "--suite", metavar="NAME|FILE", callback=recipe("suites"), autocompletion=completes("suites"),
            help=f"What is measured. {named('suites')}",
        ),
    ] = "first-look",
    tasks: TasksOption = None,
    limit: LimitOption = None,
    again: Annotated[
        list[str] | None,
        typer.Option("--again", metavar="LABEL", help="Measure this label anew, whatever was answered before."),
    ] = None,
    gates: GatesOption = None,
    api_key_env: ApiKeyOption = None,
    profile: ProfileOption = None,
    family: FamilyOption = None,
    tensor_parallel_size: TensorParallelOption = None,
    runs: RunsOption = Path("runs"),
    name: NameOption = None,
    as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Compare candidates with a reference in minutes: the same questions to each, a verdict with its interval, a report.

    Exit 1 unless every candidate is PASS, 2 on an error; `rows` of --json tell FAIL, UNDERPOWERED and NOT MEASURED apart.
    `assay evaluate` asks the same way for as long as a decision needs.

    Example: assay judge http://localhost:8000 http://localhost:8001
    """
    from assay_reports.page.findings import first_screen

    evaluation = prepare(
        reference=reference, candidates=candidates, suite=suite, tasks=tasks, limit=limit, gates=gates, api_key_env=api_key_env,
        profile=profile, tensor_parallel_size=tensor_parallel_size, runs=runs, name=name, say=say,
    )  # fmt: skip
    judged = evaluate(evaluation, runs=runs, name=name, again=again or (), say=say)
    if as_json:
        emit(load_report(judged.run_dir))
    else:
        print_summary(judged.gates, judged.measurements, results())
    if not passed(judged.gates):
        for step in first_screen(load_report(judged.run_dir)).steps:
            say(f"next: {step.sentence}{f': `{step.command}`' if step.command else ''}")
    say(f"report: {judged.run_dir / 'report' / 'index.html'}")
    if not passed(judged.gates):
        raise typer.Exit(1)
