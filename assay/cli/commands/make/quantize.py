"""The `assay quantize` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from assay.cli.options import (
    JsonOption,
    NameOption,
    PrecisionsOption,
    RunnerOption,
    RunsOption,
    StreamOption,
    TargetArgument,
    WorkersOption,
    named,
    recipe_option,
    refuse_unused,
    several,
)
from assay.cli.stages import check_plans_served, plans_for, precisions_for, quantize_one, quantize_options, with_importance
from assay.cli.terminal import emit, results
from assay.cli.whole_run import quantize_in_run
from assay.errors import PlanError
from assay.recipes.load import load_recipe
from assay.recipes.profile import ProfileRecipe


def quantize(
    ctx: typer.Context,
    target: TargetArgument,
    precision: Annotated[
        str | None,
        recipe_option(
            "--precision",
            "-p",
            "precisions",
            help=f"One precision, without the reference. {named('precisions')} With --out, the checkpoint goes there.",
        ),
    ] = None,
    precisions: PrecisionsOption = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Folder of the new checkpoint. Default: RUNS/MODEL/PRECISION/checkpoint."),
    ] = None,
    runs: RunsOption = Path("runs"),
    name: NameOption = None,
    device: Annotated[
        str,
        typer.Option(
            "--device",
            metavar="auto|cpu|cuda-untested",
            help="cpu (auto is the same); cuda-untested: CUDA code that has never been run on a GPU.",
        ),
    ] = "auto",
    runner: RunnerOption = "local",
    profile: Annotated[
        str | None,
        recipe_option(
            "--profile",
            "profiles",
            help="For GPUs of this profile: the recipe's precisions for it, and an error if it cannot serve them.",
        ),
    ] = None,
    workers: WorkersOption = None,
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory", help="Most memory this process may use, e.g. 1.5GiB or 800MB. Default: 2GiB, with cuda-untested 8GiB."
        ),
    ] = None,
    importance: Annotated[
        Path | None, typer.Option("--importance", help="Channel weights for precisions that search scales (observer: mse).")
    ] = None,
    text: Annotated[
        list[str] | None,
        typer.Option(
            "--text",
            metavar="FILE,...",
            callback=several,
            help="For calibrated precisions: plain text, or .jsonl with text, prompt or messages. Default: text that the model "
            "samples at temperature 1, for which it must fit into memory whole.",
        ),
    ] = None,
    allow_not_finite: Annotated[
        bool,
        typer.Option(
            "--allow-not-finite",
            help="Copy NaN and infinity in what is not quantized (norms, router, embedding), which are an error otherwise.",
        ),
    ] = False,
    stream_from: StreamOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make quantized checkpoints, shard by shard, and verify each. If it is killed, the same command resumes."""
    from assay.cli.targets import resolve_target

    if out is not None:
        refuse_unused(ctx, "with --out, which is the folder of the checkpoint itself", "runs", "name")
    options = quantize_options(
        device, runner, workers, memory, importance, stream_from, allow_not_finite=allow_not_finite,
        text=text or (),
    )  # fmt: skip
    aim = resolve_target(target)
    chosen = None if profile is None else load_recipe(ProfileRecipe, profile)
    if chosen is not None:
        aim = aim.on_profile(chosen)
    recipes = precisions_for(aim, precision, precisions, with_reference=out is None and precision is None)
    if out is not None and len(recipes) != 1:
        raise PlanError("--out takes one checkpoint: say --precision P as well")
    # Every plan is made before the first byte is written: what cannot work fails at once.
    plans = [with_importance(made, importance) for made in plans_for(aim, recipes.values())]
    if chosen is not None:
        check_plans_served(plans, aim, chosen)
    shown = results(as_json=as_json)
    if out is not None:
        records = [quantize_one(aim, plans[0], out, options, shown, in_run=False)]
    else:
        records = quantize_in_run(aim, plans, options, runs, name, shown)
    if as_json:
        emit([record.model_dump(mode="json") for record in records])
    if not all(record.passed for record in records):
        raise typer.Exit(1)
