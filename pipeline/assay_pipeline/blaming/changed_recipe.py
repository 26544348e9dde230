"""The precision recipe of a candidate with a change that `assay blame` proposes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from assay.errors import RecipeError
from assay.quantities import number_ranges
from assay.recipes.load import parse_recipe
from assay.recipes.precision import PrecisionRecipe, layer_numbers
from assay.records.base import write_text_atomically
from assay_pipeline.blaming.factors import Factor

WEIGHT_ONLY = {"nvfp4": "nvfp4a16"}
"""Scheme -> the same weights with activations in 16 bits."""


def changed_recipe(
    recipe: PrecisionRecipe, restored: Sequence[Factor], num_layers: int, name: str, what: str
) -> PrecisionRecipe | None:
    """The candidate's recipe with a change, what it is in words; None: no recipe says that."""
    told: dict[str, Any] = recipe.model_dump(mode="json", by_alias=True, exclude_defaults=True) | {"schema": 1, "name": name}
    for factor in restored:
        if factor.kind == "kv_cache":
            told.pop("kv_cache", None)
        elif factor.kind == "activations" and set(recipe.schemes) <= {*WEIGHT_ONLY, *WEIGHT_ONLY.values()}:
            told = _with_weight_only(told)
        elif factor.kind != "weights" or not _keep(told, recipe, factor, num_layers):
            return None
    told["description"] = f"{recipe.name}, but {what} as in the reference: by `assay blame`."
    try:
        return PrecisionRecipe.model_validate(told)
    except ValueError:
        return None


def _with_weight_only(told: dict[str, Any]) -> dict[str, Any]:
    def renamed(part: Any) -> Any:
        if isinstance(part, dict):
            return {key: renamed(value) for key, value in part.items()}
        return WEIGHT_ONLY.get(part, part) if isinstance(part, str) else part

    for key in ("scheme", "quantize", "layers"):
        if key in told and not isinstance(told[key], list):
            told[key] = renamed(told[key])
    told.pop("activations", None)
    told.pop("headroom", None)
    return told


def _keep(told: dict[str, Any], recipe: PrecisionRecipe, factor: Factor, num_layers: int) -> bool:
    """Have the weights of a factor kept in BF16. False: they are not quantized, so that keeping them changes nothing."""
    for role in sorted({place.role for place in factor.places}):
        if role not in recipe.quantize:
            return False
        if factor.is_part:
            kept = {place.layer: {role: "bf16"} for place in factor.places if place.role == role}
            told["layers"] = _joined(
                {number: roles | kept.get(number, {}) for number, roles in _by_layer(told, num_layers).items()}
            )
            continue
        quantize = told["quantize"]
        told["quantize"] = (
            {other: scheme for other, scheme in quantize.items() if other != role}
            if isinstance(quantize, dict)
            else [other for other in quantize if other != role]
        )
        told["keep"]["bf16"] = [*told["keep"].get("bf16", ()), role]
        told["layers"] = _joined(
            {
                number: {other: scheme for other, scheme in roles.items() if other != role}
                for number, roles in _by_layer(told, num_layers).items()
            }
        )
    return True


def _by_layer(told: dict[str, Any], num_layers: int) -> dict[int, dict[str, str]]:
    """`layers` of a recipe, layer by layer."""
    by_number: dict[int, dict[str, str]] = {number: {} for number in range(num_layers)}
    for text, roles in told.get("layers", {}).items():
        for number in layer_numbers(text):
            by_number[number] = by_number.get(number, {}) | roles
    return by_number


def _joined(by_number: dict[int, dict[str, str]]) -> dict[str, dict[str, str]]:
    """`layers` of a recipe: layers that are alike under one key."""
    alike: dict[tuple[tuple[str, str], ...], list[int]] = defaultdict(list)
    for number in sorted(by_number):
        if roles := by_number[number]:
            alike[tuple(sorted(roles.items()))].append(number)
    return {number_ranges(numbers): dict(roles) for roles, numbers in alike.items()}


def write_recipe(recipe: PrecisionRecipe, file: Path) -> None:
    """As `assay quantize --precision FILE` reads it. RecipeError: it does not read back as what was written."""
    told = {"schema": 1} | recipe.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    write_text_atomically(file, yaml.safe_dump(told, sort_keys=False, allow_unicode=True, width=120))
    if parse_recipe(PrecisionRecipe, file).sha256 != recipe.sha256:
        raise RecipeError(f"{file}: does not read back as what was written")
