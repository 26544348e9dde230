"""The `assay calibrate` command: what enters the weights of a model, for precisions that need to know."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from assay.recipes.calibrated.texts import MAX_LENGTH
from assay_cli.options import TEXT_HELP, DeviceOption, FamilyOption, RunsOption, WithholdOption, refuse_unused, several
from assay_cli.terminal import emit, escape, results, say
from assay_pipeline.calibration.files import calibrate as pipeline_calibrate
from assay_pipeline.calibration.sentences import lines
from assay_pipeline.calibration.texts import text_sources


def calibrate(
    ctx: typer.Context,
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="A model recipe's name, a checkpoint folder, or a Hugging Face id.")
    ],
    out: Annotated[Path, typer.Option("--out", help="File to write, for `assay quantize --importance`.")],
    text: Annotated[
        list[str] | None,
        typer.Option("--text", metavar="SOURCE[@WEIGHT],...", callback=several, help=f"{TEXT_HELP} Default: own."),
    ] = None,
    withhold: WithholdOption = None,
    runs: RunsOption = Path("runs"),
    tokens: Annotated[
        int, typer.Option("--tokens", min=1, help="Tokens that go through the model; the most, with --tokens-per-expert.")
    ] = 65_536,
    tokens_per_expert: Annotated[
        int | None, typer.Option("--tokens-per-expert", min=1, help="End as soon as every routed expert saw so many tokens.")
    ] = None,
    length: Annotated[int, typer.Option("--length", min=8, max=MAX_LENGTH, help="Length of the sequences, in tokens.")] = 512,
    min_tokens: Annotated[
        int, typer.Option("--min-tokens", min=1, help="Weights (experts) that see fewer get no channel weights, and are named.")
    ] = 64,
    device: DeviceOption = "auto",
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the model's own text.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the record as JSON on stdout.")] = False,
    family: FamilyOption = None,
) -> None:
    """Run the model in transformers and record what enters every weight: mean squares by channel, and the largest magnitude.

    It must fit into memory. `assay quantize -p w4a16-mse --importance FILE` then rounds the channels with the largest inputs
    most carefully; `-p nvfp4-calibrated` and `-p fp8-static` make scales of activations from it. Its record lies beside it.
    """  # fmt: skip
    if text and all(weighted.source is not None for weighted in text_sources(text)):
        refuse_unused(ctx, "with --text, as nothing is sampled then", "seed")
    made = pipeline_calibrate(
        target, out, text=text or (), withhold=withhold, runs=runs, num_tokens=tokens, tokens_per_expert=tokens_per_expert,
        length=length, min_tokens=min_tokens, device=device, seed=seed, say=say,
    )  # fmt: skip
    if as_json:
        emit(made)
        return
    shown = results()
    for line in lines(made):
        shown.print(escape(line))
