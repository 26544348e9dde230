"""Reading recipes: one strict YAML file each; a problem is one line with the file, the key and what is allowed.

An unknown key is an error that names the file, the key and the nearest allowed one.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, TypeVar

from assay.errors import RecipeError, did_you_mean
from assay.recipes.base import Recipe, recipe_names, recipes_dir
from assay.recipes.defaults import EXTENDS, MAX_DEPTH, with_defaults
from assay.recipes.family import FamilyBlock, FamilyRecipe
from assay.recipes.gate import GateRecipe
from assay.recipes.model import ModelRecipe
from assay.recipes.precision import PrecisionRecipe
from assay.recipes.problems import problems_in
from assay.recipes.profile import ProfileRecipe
from assay.recipes.suite import SuiteRecipe
from assay.safe_yaml import NotPlainYaml, read_yaml

__all__ = ["KINDS", "load_recipe", "parse_recipe", "recipe_file", "recipe_names", "recipes_dir"]

R = TypeVar("R", bound=Recipe)

KINDS: dict[str, type[Recipe]] = {
    "models": ModelRecipe,
    "precisions": PrecisionRecipe,
    "profiles": ProfileRecipe,
    "suites": SuiteRecipe,
    "gates": GateRecipe,
    "families": FamilyRecipe,
}
"""Folder of `recipes/` -> what a file of it is."""
_FOLDERS: dict[str, type[Recipe]] = {**KINDS, "families/blocks": FamilyBlock}
_PRECISIONS_ALSO_CALLED = {
    **dict.fromkeys(("int4", "w4", "4bit", "4bits", "int4wo", "a16w4"), "w4a16"),
    **dict.fromkeys(("int8", "w8", "8bit", "8bits", "int8w8a8"), "w8a8"),
    "gptq": "w4a16-gptq", "awq": "w4a16-awq", "autoround": "w4a16-autoround", "fp4": "nvfp4",
}  # fmt: skip
"""What people call a precision, in small letters and digits alone -> its recipe."""
_MAX_LISTED = 20
"""More names than that are not a message: `assay recipes KIND` lists them."""
_ONE_OF = {"families": "family", "families/blocks": "block of names"}


def load_recipe(kind: type[R], name_or_path: str) -> R:
    """The recipe called `name_or_path`, or in the file of that path.

    A precision may have `extends: NAME`, where NAME is a shipped precision or the path of a YAML file relative to its own, and
    then holds only what differs. Its values replace the inherited ones; the roles it names under `quantize` and `keep` move
    there (`defaults.py`). The resolved recipe is returned and hashed; `extends` is not part of it.

    Raises RecipeError if there is no recipe of that name, or with all problems of the file (`problems_in`).
    """
    return parse_recipe(kind, recipe_file(kind, name_or_path))


def parse_recipe(kind: type[R], path: Path) -> R:
    """Read and validate one file, together with the recipe it extends."""
    return _parse(kind, path, ())


def recipe_file(kind: type[Recipe], name_or_path: str) -> Path:
    """The file of the shipped recipe of that name, or the YAML file, which is not looked at. RecipeError: no such name."""
    folder = next(folder for folder, model in _FOLDERS.items() if model is kind)
    if Path(name_or_path).suffix in {".yaml", ".yml"}:
        return Path(name_or_path)
    path = recipes_dir() / folder / f"{name_or_path}.yaml"
    if Path(name_or_path).name != name_or_path or not path.is_file():
        known = recipe_names(folder)
        hint = did_you_mean(name_or_path, known)
        if folder == "precisions" and (meant := _PRECISIONS_ALSO_CALLED.get(re.sub(r"[\W_]", "", name_or_path.lower()))):
            hint = f"did you mean {meant}? "
        what = _ONE_OF.get(folder, f"{folder[:-1]} recipe")
        listed = (
            f"known: {', '.join(known)}" if len(known) <= _MAX_LISTED else f"`assay recipes {folder}` lists all {len(known)}"
        )
        raise RecipeError(f"no {what} called {name_or_path!r}; {hint}{listed}")
    return path


def _parse(kind: type[R], path: Path, above: tuple[Path, ...]) -> R:
    """above: the files that led here through `extends`, outermost first."""
    data = _read(path)
    if EXTENDS in data and EXTENDS in kind.loader_keys:
        base = _parse(kind, _extended_file(kind, path, data.pop(EXTENDS), above), (*above, path))
        data = with_defaults(base.model_dump(mode="json", by_alias=True), data)
    if problems := problems_in(kind, data, path.stem):
        listed = problems[0] if len(problems) == 1 else "\n  ".join([f"{len(problems)} problems:", *problems])
        raise RecipeError(f"{path}: {listed}")
    # Of an extended recipe absolute: what it names is not relative to the one that extends it.
    return kind.model_validate(data).found_from(path.parent.absolute() if above else path.parent)


def _extended_file(kind: type[Recipe], path: Path, named: Any, above: tuple[Path, ...]) -> Path:
    """The file that `path` extends. RecipeError: no such file, a circle, or a chain that is too long."""
    if not isinstance(named, str):
        raise RecipeError(f"{path}: extends: must be the name of a precision or the path of its file (got {str(named)[:80]!r})")
    try:
        base = recipe_file(kind, named)
    except RecipeError as error:
        raise RecipeError(f"{path}: extends: {error}") from None
    base = path.parent / base  # the path of a shipped recipe is absolute
    if not base.is_file():
        raise RecipeError(f"{path}: extends: {base}: no such file; the path is relative to the recipe that names it")
    chain = [*above, path, base]
    way = " -> ".join(str(file) for file in chain)
    if base.resolve() in {file.resolve() for file in chain[:-1]}:
        raise RecipeError(f"{chain[0]}: extends: circular, {way}; one of these must not use `extends`")
    if len(chain) > MAX_DEPTH + 1:
        raise RecipeError(f"{chain[0]}: extends: more than {MAX_DEPTH} levels deep, {way}; extend a later recipe of this chain")
    return base


def _read(path: Path) -> dict[Any, Any]:
    try:
        data = read_yaml(path)
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read: {error.strerror}") from None
    except NotPlainYaml as error:
        raise RecipeError(f"{path}: {error}") from None
    if not isinstance(data, dict):
        raise RecipeError(f"{path}: a recipe is a mapping of keys to values, this file holds a {type(data).__name__}")
    return data
