"""A checkpoint that was made and verified."""

from __future__ import annotations

from rich.console import Console

from assay.quantities import size
from assay_cli.terminal import escape, print_verification
from assay_pipeline.quantizing import MadeCheckpoint


def print_made(made: MadeCheckpoint, out: Console) -> None:
    """Sizes and time, then what verification says; one line for what was there before."""
    precision, manifest = made.plan.precision, made.manifest
    if manifest is None:
        out.print(escape(f"{precision:10} done before and verified: {made.folder}"))
        return
    sizes = f"{size(manifest.bytes_in)} -> {size(manifest.bytes_out)} in {manifest.seconds:.0f} s"
    out.print(escape(f"{precision:10} {sizes}: {made.folder}"))
    print_verification(made.verification, out, indent=" " * 11)
