"""The `assay verify` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from assay_cli.options import FamilyOption, JsonOption
from assay_cli.progress import track
from assay_cli.terminal import emit, print_verification, results
from assay_pipeline.quantizing import verify as verify_checkpoint


def verify(
    checkpoint: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a quantized checkpoint.")],
    source: Annotated[
        Path | None,
        typer.Option(
            "--source",
            help="Folder of the checkpoint it was made from. Every byte of every tensor is then made again and compared, and "
            "every copied file.",
        ),
    ] = None,
    sample: Annotated[
        float | None,
        typer.Option(
            "--sample",
            metavar="SHARE",
            min=0.0,
            max=1.0,
            help="Look only at this share of the tensors' contents, drawn anew each time, and at the beginning of each. "
            "Default: 1.",
        ),
    ] = None,
    importance: Annotated[
        Path | None, typer.Option("--importance", help="Channel weights it was made with (`assay quantize --importance`).")
    ] = None,
    workers: Annotated[
        int | None, typer.Option("--workers", min=1, help="Threads. Default: every core this process may use.")
    ] = None,
    hashes_only: Annotated[
        bool, typer.Option("--hashes-only", help="Check files, headers, config and hashes, but not the contents of tensors.")
    ] = False,
    family: FamilyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Reopen a quantized checkpoint and check everything anew. Exit 1 names every tensor that is wrong."""
    result = verify_checkpoint(
        checkpoint, source, track, workers=workers, contents=not hashes_only, sample=sample, importance=importance
    )
    if as_json:
        emit(result)
    else:
        print_verification(result, results())
    if not result.passed:
        raise typer.Exit(1)
