"""The `assay quantize` command."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated

import typer

from assay_cli.options import (
    AUTOMATIC_HELP,
    BaseModelOption,
    DeviceOption,
    FamilyOption,
    ImportanceOption,
    JsonOption,
    MtpOption,
    NameOption,
    PrecisionsOption,
    ReferenceOption,
    RunnerOption,
    RunsOption,
    StreamOption,
    TargetArgument,
    TextOption,
    WithholdOption,
    WorkersOption,
    completes,
    precision_or_automatic,
    recipe_option,
    refuse_unused,
)
from assay_cli.progress import track
from assay_cli.shown.checkpoint import print_made
from assay_cli.terminal import emit, results, say
from assay_pipeline.quantize_options import TextOptions
from assay_pipeline.quantizing import quantize as run_quantize
from assay_pipeline.quantizing import quantize_options


def quantize(
    ctx: typer.Context,
    target: TargetArgument,
    precision: Annotated[
        str | None,
        typer.Option(
            "--precision",
            "-p",
            metavar="NAME|FILE",
            callback=precision_or_automatic,
            autocompletion=completes("precisions"),
            help="Make this precision alone, and not the reference that a comparison needs. A name of "
            "`assay recipes precisions`, "
            f"or a YAML file. {AUTOMATIC_HELP} With --out, the checkpoint goes there.",
        ),
    ] = None,
    precisions: PrecisionsOption = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Folder of the new checkpoint. Default: RUNS/MODEL/PRECISION/checkpoint."),
    ] = None,
    runs: RunsOption = Path("runs"),
    name: NameOption = None,
    device: DeviceOption = "auto",
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
        str | None, typer.Option("--memory", help="Most memory this process may use, e.g. 1.5GiB or 800MB. Default: 2GiB.")
    ] = None,
    importance: ImportanceOption = None,
    text: TextOption = None,
    withhold: WithholdOption = None,
    allow_not_finite: Annotated[
        bool,
        typer.Option(
            "--allow-not-finite",
            help="Copy NaN and infinity in what is not quantized (norms, router, embedding), which are an error otherwise.",
        ),
    ] = False,
    stream_from: StreamOption = None,
    base_model: BaseModelOption = None,
    mtp: MtpOption = None,
    reference: ReferenceOption = None,
    family: FamilyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make quantized checkpoints, shard by shard, and verify each. If it is killed, the same command resumes."""
    if out is not None:
        refuse_unused(ctx, "with --out, which is the folder of the checkpoint itself", "runs", "name")
    words = TextOptions(tuple(text or ()), None if withhold is None else tuple(withhold), runs)
    options = quantize_options(
        device, runner, workers, memory, importance, stream_from, allow_not_finite=allow_not_finite, text=words,
        say=say, track=track
    )  # fmt: skip
    made = run_quantize(
        target, precisions, precision=precision, out=out, options=options, profile=profile, runs=runs, name=name,
        base_model=base_model, mtp=mtp, reference=reference,
        on_made=functools.partial(print_made, out=results(as_json=as_json)),
    )  # fmt: skip
    if as_json:
        emit([checkpoint.verification.model_dump(mode="json") for checkpoint in made])
    if not all(checkpoint.verification.passed for checkpoint in made):
        raise typer.Exit(1)
