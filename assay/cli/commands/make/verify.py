"""The `assay verify` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from assay.cli.options import JsonOption
from assay.cli.stages import verify_one
from assay.cli.terminal import emit, print_verification, results


def verify(
    checkpoint: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a quantized checkpoint.")],
    source: Annotated[
        Path | None,
        typer.Option(
            "--source", help="Folder of the checkpoint it was made from. Kept tensors are then compared byte for byte."
        ),
    ] = None,
    workers: Annotated[
        int | None, typer.Option("--workers", min=1, help="Threads. Default: every core this process may use.")
    ] = None,
    hashes_only: Annotated[
        bool, typer.Option("--hashes-only", help="Check files, headers, config and hashes, but not the contents of tensors.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Reopen a quantized checkpoint and check everything anew. Exit 1 names every tensor that is wrong."""
    result = verify_one(checkpoint, source, workers=workers, contents=not hashes_only)
    if as_json:
        emit(result)
    else:
        print_verification(result, results())
    if not result.passed:
        raise typer.Exit(1)
