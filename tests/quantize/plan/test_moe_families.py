"""Families of `hollow_moe.py`: planned at published widths, and quantized small with real weights."""

from __future__ import annotations

import re
from pathlib import Path

import hollow_moe
import pytest
import torch
from safetensors.torch import load_file
from tiny_checkpoints import random_tensors, write_json, write_shards

from assay.recipes.families import family_of, num_experts
from assay.recipes.family_names import names_of
from assay.recipes.load import load_recipe
from assay.recipes.precision import PrecisionRecipe
from assay.records.plan import Plan
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.engine.quantize import quantize
from assay_quantize.plan.planner import make_plan
from assay_quantize.verify.verify import verify


def _plan(folder: Path, precision: str) -> Plan:
    return make_plan(open_checkpoint(folder), load_recipe(PrecisionRecipe, precision), model="m", family=None)


@pytest.mark.parametrize("family", hollow_moe.MODELS)
def test_every_expert_is_quantized_and_towers_are_kept(tmp_path: Path, family: str) -> None:
    config = hollow_moe.cut(family)
    folder = hollow_moe.write(tmp_path / family, family, config)
    assert family_of(config) == family
    plan = _plan(folder, "w4a16-g32")
    names = names_of(family)
    experts = [tensor for tensor in plan.tensors if ".experts." in tensor.name and tensor.name.endswith(".weight")]
    of_layer: dict[str, int] = {}
    for tensor in experts:
        of_layer[tensor.module.partition(".experts.")[0]] = of_layer.get(tensor.module.partition(".experts.")[0], 0) + 1
    assert set(of_layer.values()) == {num_experts(family, config) * len(names.projections)}
    assert {tensor.action for tensor in experts if tensor.role != "mtp"} == {"quantize"}
    kept = [tensor for tensor in plan.tensors if tensor.name.startswith(tuple(f"{module}." for module in names.kept))]
    assert {(tensor.action, [output.name for output in tensor.outputs] == [tensor.name]) for tensor in kept} <= {("keep", True)}
    assert bool(kept) == bool(names.kept)
    assert {tensor.action for tensor in plan.tensors if tensor.part in ("router", "router_bias", "other")} == {"keep"}
    assert plan.drops_mtp is False


@pytest.mark.parametrize("family", hollow_moe.MODELS)
def test_small_checkpoints_are_quantized_and_verified(tmp_path: Path, family: str) -> None:
    """What is quantized is close to what was stored, sliced here by torch; what is kept has the same bytes."""
    source = _small(tmp_path / "source", family)
    plan = _plan(source, "fp8-channel")
    made = tmp_path / "made"
    quantize(plan, source, made)
    result = verify(made, source=source)
    assert result.passed, result
    stored, original = load_file(made / "model-00001-of-00001.safetensors"), load_file(source / "model.safetensors")
    singles = _singles(family, original)
    assert {tensor.name for tensor in plan.tensors} == singles.keys()
    for name, tensor in singles.items():
        if (scale := stored.get(f"{name}_scale")) is None:
            assert torch.equal(stored[name], tensor), name
        else:
            error = (stored[name].float() * scale.float() - tensor.float()).norm() / tensor.float().norm()
            assert error < 0.04, (name, error)


def _small(folder: Path, family: str) -> Path:
    config = hollow_moe.small(family)
    folder.mkdir()
    write_json(folder / "config.json", config)
    tensors = random_tensors(dict(hollow_moe.MODELS[family].shapes(config)), 0, torch.bfloat16)
    for name in tensors:
        if hollow_moe.is_in_fp32(family, name):
            tensors[name] = tensors[name].float()
    write_shards(folder, {"model.safetensors": {name: tensor.contiguous() for name, tensor in tensors.items()}})
    return folder


_STACKED = re.compile(
    r"(.+?)\.(?:experts\.)?(gate_up_proj|gate_proj|up_proj|down_proj|input_linear|output_linear)(?:\.weight)?"
)


def _singles(family: str, stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Experts one by one, by the forms that these models have: gate above up, beside it and the other way round, or apart."""
    made: dict[str, torch.Tensor] = {}
    for name, tensor in stored.items():
        if tensor.dim() != 3 or not (match := _STACKED.fullmatch(name)):
            made[name] = tensor
            continue
        alone = {"output_linear": "down_proj"}.get(match[2], match[2])
        for expert, weight in enumerate(tensor):
            outputs = weight.T if family in ("qwen3_vl_moe", "llama4") else weight
            pair = dict(zip(("gate_proj", "up_proj"), outputs.chunk(2), strict=True))
            parts = {alone: outputs} if alone in ("gate_proj", "up_proj", "down_proj") else pair
            made |= {f"{match[1]}.experts.{expert}.{part}.weight": rows.contiguous() for part, rows in parts.items()}
    return made
