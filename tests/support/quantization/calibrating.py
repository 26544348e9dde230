"""Calibrations of tiny models: plans, layers and whole checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from assay.recipes.load import load_recipe
from assay.recipes.precision import PrecisionRecipe
from assay.records.plan import Plan
from assay_quantize.calibration.layerwise import calibrate_layers
from assay_quantize.calibration.text import Text
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.engine.quantize import quantize
from assay_quantize.plan.planner import make_plan
from assay_quantize.verify.verify import verify

LENGTH, SEQUENCES = 32, 6


def plan_of(folder: Path, precision: str = "w4a16-gptq", **options: Any) -> Plan:
    """options: of `calibration`, others than the recipe's."""
    recipe = load_recipe(PrecisionRecipe, precision)
    if recipe.calibration != "none":
        options = {"tokens": LENGTH * SEQUENCES, "length": LENGTH, **options}
        recipe = recipe.model_copy(update={"calibration": recipe.calibration.model_copy(update=options)})
    return make_plan(open_checkpoint(folder), recipe, model="tiny", family=None)


def layer_tensors(work: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in sorted(work.glob("layer-*.safetensors")) for name, tensor in load_file(path).items()}


def load_all(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def made_and_verified(
    source: Path, words: Path, folder: Path, precision: str = "w4a16-gptq", **options: Any
) -> tuple[Plan, Any]:  # fmt: skip
    plan = plan_of(source, precision, **options)
    work = folder / "work"
    plan = plan.model_copy(update={"calibrated": calibrate_layers(plan, source, work, Text((words,)))})
    quantize(plan, source, folder / "made", calibrated=work)
    return plan, verify(folder / "made", source=source)
