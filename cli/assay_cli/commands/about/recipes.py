"""The `assay recipes` command."""

from __future__ import annotations

from assay.recipes.load import KINDS, load_recipe, recipe_names
from assay_cli.options import JsonOption
from assay_cli.terminal import emit


def list_recipes(as_json: JsonOption = False) -> None:
    """List the recipes that ship with assay. With --json: kind -> name -> description."""
    if as_json:
        emit(
            {
                folder: {name: load_recipe(kind, name).description for name in recipe_names(folder)}
                for folder, kind in KINDS.items()
            }
        )
        return
    for folder in KINDS:
        print(f"{folder:11} {', '.join(recipe_names(folder))}")


def _described(folder: str) -> dict[str, str]:
    return {name: load_recipe(KINDS[folder], name).description for name in recipe_names(folder)}
