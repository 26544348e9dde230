"""The `assay card` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from assay.records.run import PLAN_INSIDE, plan_of
from assay_cli.options import JsonOption, RunsOption, ScreeningOption, complete_run, named_run
from assay_cli.terminal import emit, escape, results, say
from assay_pipeline.gate_choice import registered_gates
from assay_pipeline.judging import card_block, write_cards


def card(
    ctx: typer.Context,
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN|DIR", autocompletion=complete_run,
            help="A run's folder, or a model's name under --runs; or the folder of a checkpoint that lies in no run.",
        ),
    ],
    screening: ScreeningOption = None,
    runs: RunsOption = Path("runs"),
    as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Write the model card (README.md) of every checkpoint of a run again, from its records only.

    With --json: paths that were written, and a line for each card that was left as it is. Exit 2 if one cannot be written.

    With --screening a card says how far the checkpoint is from its base, if the record is of its weights; of a checkpoint that
    assay did not make that part is printed, to be pasted.
    """
    folder = Path(run)
    if screening is not None and (folder / "config.json").is_file() and not plan_of(folder).is_file():
        block = card_block(folder, screening)
        emit({"written": [], "left": [], "block": block}) if as_json else typer.echo(block, nl=False)
        return
    if not (folder / PLAN_INSIDE).is_file():
        folder = named_run(ctx, run, runs)
        registered_gates(folder)  # what `assay gate` refuses is not shown either
    cards = write_cards(folder, say, screening=screening)
    if as_json:
        emit({"written": [str(path) for path in cards.written], "left": [*cards.left, *cards.refused, *cards.failed]})
    else:
        for path in cards.written:
            results().print(escape(str(path)))
    for line in cards.failed:
        say(line)
    if cards.refused or cards.failed:
        raise typer.Exit(2)
