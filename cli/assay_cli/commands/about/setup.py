"""The `assay setup` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from assay_cli.options import JsonOption
from assay_cli.terminal import emit, escape, results, say


def setup(
    python: Annotated[
        Path | None,
        typer.Option("--python", help="Python that the environment is made with, 3.11 or newer. Default: this one."),
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Build it anew, even if it is ready.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Build the environment that serves checkpoints: vLLM for this machine's GPUs, or for its CPU, with assay's plugin.

    It is kept in $XDG_DATA_HOME/assay/serve (~/.local/share/assay/serve), 3.4 GiB for CPUs and 8.6 GiB for GPUs. Servers that
    run already need none of it. `assay doctor` says what is there.
    """
    from assay_pipeline.serving_setup import build_serving_environment

    folder = build_serving_environment(python, say, again=again)
    if as_json:
        emit({"folder": str(folder)})
    else:
        results().print(escape(f"serving environment: {folder}"))
