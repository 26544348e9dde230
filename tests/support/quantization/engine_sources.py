"""Plans of small checkpoints, a small source of two shards for tests of the engine, and the bytes that came out."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from assay.recipes.load import load_recipe
from assay.recipes.precision import PrecisionRecipe
from assay.records.plan import Plan
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.plan.planner import make_plan

TINY: dict[str, Any] = {"num_layers": 2, "num_experts": 2, "hidden": 128, "dense_intermediate": 128}
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


KEEP = {"source": ["norm"], "bf16": ["mtp", "lm_head", "embedding", "router", "indexer"], "fp32": ["router_bias"]}


def precision(name: str = "w4a16", **changes: Any) -> PrecisionRecipe:
    """A shipped precision recipe, changed."""
    return PrecisionRecipe.model_validate({**load_recipe(PrecisionRecipe, name).model_dump(by_alias=True), **changes})


def plan_of(folder: Path, recipe: PrecisionRecipe | str = "w4a16") -> Plan:
    made = load_recipe(PrecisionRecipe, recipe) if isinstance(recipe, str) else recipe
    return make_plan(open_checkpoint(folder), made, model="m", family=None)


def plan_for(source: Path, precision: str, **changes: Any) -> Plan:
    recipe = load_recipe(PrecisionRecipe, precision).model_copy(update=changes)
    return make_plan(open_checkpoint(source), recipe, model="tiny", family=None)


def bytes_of(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("*.safetensors"))}
