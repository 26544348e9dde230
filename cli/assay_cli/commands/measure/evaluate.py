"""The `assay evaluate` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from assay.records.measurement import BudgetCheck
from assay_cli.options import (
    ApiKeyOption,
    FamilyOption,
    GatesOption,
    JsonOption,
    LimitOption,
    NameOption,
    PrecisionsOption,
    ProfileOption,
    RunsOption,
    SuiteOption,
    TasksOption,
    TensorParallelOption,
    VariantOption,
    completes,
    refuse_unused,
)
from assay_cli.shown.verdicts import print_summary
from assay_cli.terminal import emit, escape, results, say
from assay_pipeline.evaluating import SweOptions, check_budgets, prepare
from assay_pipeline.evaluating import evaluate as run_evaluation
from assay_pipeline.judging import load_report


def evaluate(
    ctx: typer.Context,
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="TARGET",
            autocompletion=completes("models"),
            help="A model recipe's name, a checkpoint folder, or a Hugging Face id.",
        ),
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(
            "--reference",
            metavar="[LABEL=]DIR|URL|URL,DIR",
            help="Without TARGET: the checkpoint to compare with. A folder, or the URL of a vLLM server that runs already; "
            "after a comma, the folder that it serves.",
        ),
    ] = None,
    candidate: Annotated[
        list[str] | None,
        typer.Option("--candidate", metavar="[LABEL=]DIR|URL|URL,DIR", help="Without TARGET: a checkpoint to judge."),
    ] = None,
    variant: VariantOption = None,
    api_key_env: ApiKeyOption = None,
    same_weights: Annotated[
        bool,
        typer.Option(
            "--same-weights", help="Allow two of the given servers to have the same weights, to compare one setup with another."
        ),
    ] = False,
    again: Annotated[
        list[str] | None,
        typer.Option(
            "--again",
            metavar="LABEL",
            help="Measure this label anew, whatever was answered before: its server was repaired, say. With the reference's "
            "label all are, since its texts are what they are compared with.",
        ),
    ] = None,
    precisions: PrecisionsOption = None,
    suite: SuiteOption = None,
    gates: GatesOption = None,
    profile: ProfileOption = None,
    family: FamilyOption = None,
    tensor_parallel_size: TensorParallelOption = None,
    runs: RunsOption = Path("runs"),
    name: NameOption = None,
    own_texts: Annotated[
        bool | None,
        typer.Option(
            "--own-texts/--no-own-texts",
            help="Let every candidate write texts of its own, which `assay deployment` needs. Default: where the model's "
            "recipe names deployment profiles.",
        ),
    ] = None,
    budget_check: Annotated[
        bool,
        typer.Option(
            "--budget-check",
            help="Only ask the reference twenty items of every task, and say whether the token budgets suffice; exit 1 if not.",
        ),
    ] = False,
    tasks: TasksOption = None,
    limit: LimitOption = None,
    swe_slice: Annotated[
        str | None, typer.Option("--slice", help="SWE-bench: a slice of the instances sorted by id, e.g. 0:50.")
    ] = None,
    swe_filter: Annotated[
        str | None,
        typer.Option("--filter", help="SWE-bench: only instances whose id begins with a match of this regular expression."),
    ] = None,
    swe_repeats: Annotated[int | None, typer.Option("--repeats", min=1, help="SWE-bench: trajectories per instance.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Serve the reference and every candidate alike, measure and judge them, and write report and cards.

    Exits 0 when everything was measured, whatever the verdicts; `assay gate` exits 1 unless all are PASS.
    """

    if budget_check:
        unused = (
            "precisions",
            "candidate",
            "variant",
            "same_weights",
            "again",
            "own_texts",
            "swe_slice",
            "swe_filter",
            "swe_repeats",
        )
        refuse_unused(ctx, "with --budget-check, which asks the reference single questions only", *unused)
    if reference is not None:
        refuse_unused(ctx, "with --reference, whose candidates are named by --candidate", "precisions")
    else:
        refuse_unused(ctx, "without --reference: a profile's `endpoints` name their keys themselves", "api_key_env")
    evaluation = prepare(
        target, reference=reference, candidates=candidate or (), variants=variant or (), api_key_env=api_key_env,
        precisions=precisions, suite=suite,
        gates=gates, profile=profile, runs=runs, name=name, same_weights=same_weights, own_texts=own_texts,
        only_reference=budget_check, swe=SweOptions(swe_slice, swe_filter, swe_repeats), tasks=tasks, limit=limit,
        tensor_parallel_size=tensor_parallel_size, say=say,
    )  # fmt: skip
    if budget_check:
        checked = check_budgets(evaluation, runs=runs, name=name, say=say)
        _print_budgets(checked, results(as_json=as_json))
        if as_json:
            emit(checked)
        if not checked.suffices:
            raise typer.Exit(1)
        return
    judged = run_evaluation(
        evaluation, runs=runs, name=name, same_weights=same_weights, own_texts=own_texts, again=again or (), say=say
    )
    if as_json:
        emit(load_report(judged.run_dir))
    else:
        print_summary(judged.gates, judged.measurements, results())
    say(f"report: {judged.run_dir / 'report' / 'index.html'}")


def _print_budgets(checked: BudgetCheck, out: Console) -> None:
    """One line a task, then what to do."""
    for task in checked.tasks:
        mark = "[green]ok   [/]" if task.suffices else "[red]short[/]" if task.is_required else "[yellow]note [/]"
        excuse = "" if task.suffices or task.is_required else " (its gate is not required: this fails nothing)"
        out.print(f"{mark} {task.task:16} {escape(task.detail)}{excuse}")
