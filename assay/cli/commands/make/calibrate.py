"""The `assay calibrate` command: channel weights for precisions that search scales."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from assay.cli.options import refuse_unused, several
from assay.cli.terminal import emit, escape, results, say

SHOWN = 3
"""Weights that are named of those that saw too few tokens."""


def calibrate(
    ctx: typer.Context,
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="A model recipe's name, a checkpoint folder, or a Hugging Face id.")
    ],
    out: Annotated[Path, typer.Option("--out", help="File to write, for `assay quantize --importance`.")],
    text: Annotated[
        list[str] | None,
        typer.Option(
            "--text",
            metavar="FILE,...",
            callback=several,
            help="Plain text, or .jsonl with text, prompt or messages. Default: text that the model samples at temperature 1.",
        ),
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens that go through the model.")] = 65_536,
    length: Annotated[int, typer.Option("--length", min=8, help="Length of the sequences, in tokens.")] = 512,
    min_tokens: Annotated[
        int, typer.Option("--min-tokens", min=1, help="Weights (experts) that see fewer tokens are left out, and named.")
    ] = 64,
    device: Annotated[
        str,
        typer.Option(
            "--device",
            metavar="auto|cpu|cuda-untested",
            help="cpu (auto is the same); cuda-untested: CUDA code that has never been run on a GPU.",
        ),
    ] = "auto",
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the model's own text.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the record as JSON on stdout.")] = False,
) -> None:
    """Run the model in transformers and record the mean squared input of every weight, by channel. It must fit into memory.

    `assay quantize -p w4a16-mse --importance FILE` then rounds the channels with the largest inputs most carefully.
    """  # fmt: skip
    from assay.cli.stages import device_of
    from assay.cli.targets import local_checkpoint, resolve_target
    from assay_quantize.calibration.calibrate import calibrate as run
    from assay_quantize.calibration.text import Text

    if text is not None:
        refuse_unused(ctx, "with --text, as nothing is sampled then", "seed")
    where, aim = device_of(device), resolve_target(target)
    made = run(
        local_checkpoint(aim.location),
        out,
        Text(tuple(map(Path, text or ())), seed),
        model_name=aim.recipe.name,
        num_tokens=tokens,
        length=length,
        min_tokens=min_tokens,
        device=where,
        report=say,
    )
    if as_json:
        emit(made)
        return
    shown = results()
    shown.print(f"{escape(str(out))}: channel weights of {made.weights:,} weights over {made.num_tokens:,} tokens")
    if made.tokens_by_expert is not None:
        least, median, most = made.tokens_by_expert
        shown.print(f"tokens of a routed expert: {least:,} (least), {median:,} (median), {most:,} (most)")
    found = made.nvfp4_inputs
    shown.print(
        f"activations in the constant range of nvfp4: {found.num_cut_off / found.num_groups:.2%} of the groups are cut off "
        f"(largest {found.largest:.4g} of 2688, {escape(found.largest_at)}), "
        f"{found.num_coarse / found.num_groups:.2%} have a coarse scale, "
        f"{found.num_zeroed / found.num_groups:.2%} become 0 (most: {found.most_zeroed:.2%}, {escape(found.most_zeroed_at)})"
    )
    if made.starved:
        names = ", ".join(f"{name} ({count})" for name, count in list(made.starved.items())[:SHOWN])
        more = f" and {len(made.starved) - SHOWN:,} more" if len(made.starved) > SHOWN else ""
        shown.print(f"left out, fewer than {min_tokens} tokens: {escape(names)}{more}; raise --tokens to have them in")
