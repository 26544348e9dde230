"""The `assay recipes` command."""

from __future__ import annotations

from assay.recipes.load import recipe_names


def list_recipes() -> None:
    """Names of all recipes that ship with assay."""
    for kind in ("models", "precisions", "profiles", "suites", "gates"):
        print(f"{kind:11} {', '.join(recipe_names(kind))}")
