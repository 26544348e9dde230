"""The `assay card` command."""

from __future__ import annotations

from pathlib import Path

from assay.cli.options import RunArgument, RunsOption
from assay.cli.run_folders import find_run
from assay.cli.stages import write_cards


def card(run: RunArgument, runs: RunsOption = Path("runs")) -> None:
    """Write the model card (README.md) of every candidate of a run again, from its records only."""
    run_dir = find_run(run, runs)
    for path in write_cards(run_dir):
        print(path)
