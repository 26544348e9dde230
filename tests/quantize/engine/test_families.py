"""A small checkpoint of each newer family, made, quantized and verified; its bytes against compressed-tensors' own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from quantized_checkpoints import quantize_weight, scheme_of
from small_models import TINY, make_tiny_model
from tiny_checkpoints import read_shards

from assay.recipes.load import load_recipe
from assay.recipes.precision import PrecisionRecipe
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.engine.quantize import quantize
from assay_quantize.plan.planner import make_plan
from assay_quantize.verify.verify import verify

PRESETS = {"w4a16": "W4A16", "fp8": "FP8_BLOCK"}
"""Precisions without scales that several weights share -> compressed-tensors' preset."""


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("families")
    return {model: make_tiny_model(folder / model, model) for model in TINY}


@pytest.mark.parametrize("model", TINY)
@pytest.mark.parametrize("precision", ["w4a16", "fp8", "nvfp4a16", "w4a16-mtp"])
def test_each_family_is_quantized_and_verified(
    sources: dict[str, Path], tmp_path: Path, model: str, precision: str
) -> None:  # fmt: skip
    source = sources[model]
    plan = make_plan(open_checkpoint(source), load_recipe(PrecisionRecipe, precision), model=model, family=None)
    made = tmp_path / "made"
    quantize(plan, source, made, device="cpu")
    assert verify(made, source=source).damages == ()
    before, after = stored(source), stored(made)
    quantized = [tensor for tensor in plan.tensors if tensor.scheme is not None]
    assert {tensor.part for tensor in quantized} >= {"attention", "routed_expert"}
    for tensor in quantized if precision in PRESETS else ():
        parts = quantize_weight(before[tensor.name], scheme_of(PRESETS[precision]))
        for output in tensor.outputs:
            leaf = output.name.rpartition(".")[2]
            if leaf != "weight_shape":
                assert same_bits(after[output.name], parts[leaf].to(after[output.name].dtype)), output.name
    for tensor in plan.tensors:
        if tensor.action == "keep":
            assert same_bits(after[tensor.name], before[tensor.name]), tensor.name


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for tensors in read_shards(folder).values() for name, tensor in tensors.items()}


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.shape == right.shape and torch.equal(left.view(torch.uint8), right.view(torch.uint8))
