"""The `assay recipes` command."""

from __future__ import annotations

from typing import Annotated

import typer

from assay.recipes.load import KINDS, load_recipe, recipe_names
from assay_cli.options import JsonOption, choice
from assay_cli.terminal import emit, escape, results

DESCRIBED = ("precisions", "suites", "models", "profiles")
"""Kinds of which each recipe has a line; of the rest the names say it."""


def list_recipes(
    kind: Annotated[
        str | None, typer.Argument(metavar="KIND", callback=choice(*KINDS), help=f"One of: {', '.join(KINDS)}. Default: all.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List the recipes that ship with assay, and what each is. With --json: kind -> name -> description.

    Example: assay recipes precisions
    """
    kinds = list(KINDS) if kind is None else [kind]
    if as_json:
        emit({folder: _described(folder) for folder in kinds})
        return
    out = results()
    for folder in kinds:
        if kind is None and folder not in DESCRIBED:
            out.print(f"[bold]{folder}[/]: {', '.join(recipe_names(folder))}")
            continue
        out.print(f"[bold]{folder}[/]")
        described = _described(folder)
        width = max(map(len, described))
        for name, description in described.items():
            out.print(f"  {name:{width}}  {escape(description)}")


def _described(folder: str) -> dict[str, str]:
    return {name: load_recipe(KINDS[folder], name).description for name in recipe_names(folder)}
