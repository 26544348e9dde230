"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

TargetArgument = Annotated[
    str, typer.Argument(metavar="TARGET", help="A model recipe's name, a checkpoint folder, or a Hugging Face id.")
]

RunArgument = Annotated[
    str, typer.Argument(metavar="RUN", help="A run's folder (runs/tiny-glm), or a model's name under --runs.")
]
RunsOption = Annotated[Path, typer.Option("--runs", help="Folder of all runs.")]

NameOption = Annotated[
    str | None,
    typer.Option("--name", help="Name of the run's folder under --runs; default: the model's, and what tells it apart."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="The record as JSON on stdout.")]

WorkersOption = Annotated[
    int | None, typer.Option("--workers", min=1, help="Threads; default: every core this process may use.")
]

PrecisionsOption = Annotated[
    str | None,
    typer.Option("--precisions", help="Comma-separated names of recipes/precisions/; default: the model's list."),
]
