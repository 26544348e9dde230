"""The `assay inspect` command."""

from __future__ import annotations

from typing import Annotated

import typer

from assay_cli.options import FamilyOption, JsonOption
from assay_cli.progress import track
from assay_cli.shown.inspection import print_inspection
from assay_cli.terminal import emit, results
from assay_pipeline.comparison.inspecting import inspect as inspect_target


def inspect(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET", help="A checkpoint folder, a GGUF file, a Hugging Face id, or a URL below which files lie."
        ),
    ],
    source: Annotated[
        str | None,
        typer.Option(
            "--source",
            help="The base it was made from, named the same way: kept tensors are compared byte for byte, tokenizer, templates "
            "and config with it; with --deep also the error of every quantized weight.",
        ),
    ] = None,
    deep: Annotated[
        bool,
        typer.Option(
            "--deep", help="Read the weights as well. Of a hub id or URL (TARGET or --source) this transfers all of them."
        ),
    ] = False,
    headers_only: Annotated[
        bool, typer.Option("--headers-only", help="Read headers and small files only, also of a folder; no scale.")
    ] = False,
    family: FamilyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say what a published checkpoint is and what is wrong with it, from its headers: no GPU, no download of weights.

    Every finding says where it is, what it does when vLLM serves the checkpoint, and whether and how it can be mended
    (docs/inspect.md). Exit 1 on a defect; notes alone exit 0.
    """
    result = inspect_target(target, source=source, deep=deep, headers_only=headers_only, track=track)
    if as_json:
        emit(result)
    else:
        print_inspection(result, results())
    if not result.is_clean:
        raise typer.Exit(1)
