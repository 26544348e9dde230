"""A small checkpoint of each newer family, made, quantized and verified; its bytes against compressed-tensors' own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from deepseek_v4_checkpoints import decoded_deepseek_v4
from mimo_checkpoints import decoded_mimo
from quantized_checkpoints import quantize_weight, scheme_of
from small_models import TINY, as_published, make_tiny_model
from tiny_checkpoints import decompressed_int4, dequantized, read_shards

from assay.recipes.load import load_recipe
from assay.recipes.precision import PrecisionRecipe
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.engine.quantize import quantize
from assay_quantize.plan.planner import make_plan
from assay_quantize.verify.verify import verify

pytestmark = pytest.mark.slow


PRESETS = {"w4a16": "W4A16", "fp8": "FP8_BLOCK"}
"""Precisions without scales that several weights share -> compressed-tensors' preset."""


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("families")
    return {model: as_published(make_tiny_model(folder / f"{model}-plain", model), folder / model, model) for model in TINY}


@pytest.mark.parametrize("model", TINY)
@pytest.mark.parametrize("precision", ["w4a16", "fp8", "nvfp4a16", "w4a16-mtp"])
def test_each_family_is_quantized_and_verified(
    sources: dict[str, Path], tmp_path: Path, model: str, precision: str
) -> None:  # fmt: skip
    source = sources[model]
    plan = make_plan(open_checkpoint(source), load_recipe(PrecisionRecipe, precision), model=model, family=None)
    made = tmp_path / "made"
    quantize(plan, source, made)
    assert verify(made, source=source).damages == ()
    raw, after = stored(source), stored(made)
    before = as_read(source, tmp_path, model)
    in_fp32 = {name for name, tensor in before.items() if tensor.dtype == torch.float32}
    assert {name for name in in_fp32 if after[name].dtype != torch.float32} == set()
    quantized = [tensor for tensor in plan.tensors if tensor.scheme is not None]
    assert {tensor.part for tensor in quantized} >= {"attention", "routed_expert"}
    for tensor in quantized if precision in PRESETS else ():
        if tensor.action == "keep":  # FP8 in the blocks that it has
            continue
        parts = quantize_weight(before[tensor.name], scheme_of(PRESETS[precision]))
        for output in tensor.outputs:
            leaf = output.name.rpartition(".")[2]
            if leaf != "weight_shape":
                assert same_codes(after[output.name], parts[leaf].to(after[output.name].dtype)), output.name
    for tensor in plan.tensors:
        if tensor.action == "keep":
            assert same_bits(after[tensor.outputs[0].name], raw[tensor.name]), tensor.name


def as_read(source: Path, folder: Path, model: str) -> dict[str, torch.Tensor]:
    """The weights that a plan names, by compressed-tensors and torch: INT4, FP4 and FP8 as BF16, experts in 3-D one by one."""
    dense = {
        "kimi-k2.5": decompressed_int4, "minimax-m2": dequantized, "deepseek-v4-flash": decoded_deepseek_v4,
        "mimo-v2.5": decoded_mimo,
    }  # fmt: skip
    weights = stored(dense[model](source, folder / "dense") if model in dense else source)
    for name in [name for name in weights if name.endswith((".experts.gate_up_proj", ".experts.down_proj"))]:
        experts, _, leaf = name.rpartition(".")
        parts = ("gate_proj", "up_proj") if leaf == "gate_up_proj" else ("down_proj",)
        for expert, weight_OI in enumerate(weights.pop(name)):
            weights |= {
                f"{experts}.{expert}.{part}.weight": w for part, w in zip(parts, weight_OI.chunk(len(parts)), strict=True)
            }
    for name in [name for name in weights if re.search(r"\.moe\.(gate|up|down)_proj\.weight$", name)]:  # Step-3.5
        moe, part, _ = name.rsplit(".", 2)
        weights |= {f"{moe}.experts.{expert}.{part}.weight": w for expert, w in enumerate(weights.pop(name))}
    return weights


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for tensors in read_shards(folder).values() for name, tensor in tensors.items()}


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.shape == right.shape and torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def same_codes(left: torch.Tensor, right: torch.Tensor) -> bool:
    """compressed-tensors adds a zero point of 0, which makes 0.0 of -0.0, a code of published FP8; that sign says nothing."""
    if left.dtype == right.dtype == torch.float8_e4m3fn:
        return left.shape == right.shape and torch.equal(left.float(), right.float())
    return same_bits(left, right)
