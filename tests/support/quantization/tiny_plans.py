"""Plans of small checkpoints, by shipped precision recipes, changed or as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from assay.recipes.load import load_recipe
from assay.recipes.precision import PrecisionRecipe
from assay.records.plan import Plan
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.plan.planner import make_plan

KEEP = {"source": ["norm"], "bf16": ["mtp", "lm_head", "embedding", "router", "indexer"], "fp32": ["router_bias"]}


def precision(name: str = "w4a16", **changes: Any) -> PrecisionRecipe:
    """A shipped precision recipe, changed."""
    return PrecisionRecipe.model_validate({**load_recipe(PrecisionRecipe, name).model_dump(by_alias=True), **changes})


def plan_of(folder: Path, recipe: PrecisionRecipe | str = "w4a16") -> Plan:
    made = load_recipe(PrecisionRecipe, recipe) if isinstance(recipe, str) else recipe
    return make_plan(open_checkpoint(folder), made, model="m", family=None)
