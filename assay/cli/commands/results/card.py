"""The `assay card` command."""

from __future__ import annotations

from pathlib import Path

from assay.cli.options import JsonOption, RunArgument, RunsOption
from assay.cli.run_folders import find_run
from assay.cli.stages import write_cards
from assay.cli.terminal import emit, escape, results


def card(run: RunArgument, runs: RunsOption = Path("runs"), as_json: JsonOption = False) -> None:
    """Write the model card (README.md) of every checkpoint of a run again, from its records only.

    With --json: paths that were written, and a line for each card that was left as it is.
    """
    written, left = write_cards(find_run(run, runs))
    if as_json:
        emit({"written": [str(path) for path in written], "left": left})
        return
    for path in written:
        results().print(escape(str(path)))
