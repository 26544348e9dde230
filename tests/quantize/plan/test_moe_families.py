"""Families of `hollow_moe.py`: planned at published widths, and quantized small with real weights."""

from __future__ import annotations

import json
import re
from pathlib import Path

import hollow_moe
import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from safetensors.torch import load_file
from tiny_checkpoints import random_tensors, write_json, write_shards

from assay.errors import PlanError
from assay.recipes.families import family_of, num_experts
from assay.recipes.family_names import names_of
from assay.recipes.load import load_recipe
from assay.recipes.precision import PrecisionRecipe
from assay.records.plan import Plan
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.engine.quantize import quantize
from assay_quantize.inspection.files import FolderFiles
from assay_quantize.inspection.inspect import inspect
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


IN_ANY_SCHEME = [family for family in hollow_moe.MODELS if not names_of(family).expert_schemes]


@pytest.mark.parametrize("family", IN_ANY_SCHEME)
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


# ------------------------------------------------------------------------------------------------ gpt-oss in 16 bits
EXPERTS = "model.layers.1.mlp.experts"


@pytest.fixture
def gpt_oss(tmp_path: Path) -> tuple[Path, Path]:
    """(source, what was made of it in groups of 32)."""
    source = _small(tmp_path / "source", "gpt_oss")
    quantize(_plan(source, "w4a16-g32"), source, tmp_path / "made")
    return source, tmp_path / "made"


def test_experts_of_gpt_oss_are_packed_under_vllms_names(gpt_oss: tuple[Path, Path]) -> None:
    """Rows of gate and up still take turns; scales and biases have the names of their weight, which vLLM's mapper knows."""
    source, made = gpt_oss
    original, stored = load_file(source / "model.safetensors"), load_file(made / "model-00001-of-00001.safetensors")
    index = json.loads((made / "model.safetensors.index.json").read_text(encoding="utf-8"))["weight_map"]
    assert index.keys() == stored.keys()
    assert {name.removeprefix(f"{EXPERTS}.3.") for name in stored if name.startswith(f"{EXPERTS}.3.")} == {
        "w13_weight_packed", "gate_up_proj.weight_scale", "gate_up_proj.weight_shape", "gate_up_proj.bias",
        "w2_weight_packed", "down_proj.weight_scale", "down_proj.weight_shape", "down_proj.bias",
    }  # fmt: skip
    for packed, part in (("w13_weight_packed", "gate_up_proj"), ("w2_weight_packed", "down_proj")):
        w_OI, scale_OG = original[f"{EXPERTS}.{part}"][3].T.float(), stored[f"{EXPERTS}.3.{part}.weight_scale"].float()
        codes_OI = unpack_from_int32(stored[f"{EXPERTS}.3.{packed}"], 4, w_OI.shape)
        error = (codes_OI.float() * scale_OG.repeat_interleave(32, 1) - w_OI).norm() / w_OI.norm()
        assert error < 0.12, (part, error)
        assert torch.equal(stored[f"{EXPERTS}.3.{part}.bias"], original[f"{EXPERTS}.{part}_bias"][3])
    kept = ["model.layers.0.self_attn.sinks", "model.layers.0.self_attn.o_proj.bias", "model.layers.0.mlp.router.bias"]
    assert all(torch.equal(stored[name], original[name]) for name in kept)


def test_what_is_made_of_gpt_oss_is_verified_and_inspected(gpt_oss: tuple[Path, Path]) -> None:
    source, made = gpt_oss
    assert verify(made, source=source).passed
    for found in (inspect(FolderFiles(source)), inspect(FolderFiles(made), source=FolderFiles(source), weights=True)):
        assert (found.facts.family, [finding.defect for finding in found.findings]) == ("gpt_oss", ["tokenizer_absent"])
    shard = made / "model-00001-of-00001.safetensors"
    header = json.loads(shard.read_bytes()[8 : 8 + int.from_bytes(shard.read_bytes()[:8], "little")])
    with shard.open("r+b") as file:
        begin = 8 + int.from_bytes(file.read(8), "little") + header[f"{EXPERTS}.2.w13_weight_packed"]["data_offsets"][0]
        file.seek(begin)
        byte = file.read(1)[0]
        file.seek(begin)
        file.write(bytes([byte ^ 1]))
    damages = verify(made, source=source, hashes=False).damages
    assert {damage.where for damage in damages} == {f"{EXPERTS}.2.gate_up_proj.weight"}


@pytest.mark.parametrize(
    ("precision", "how"),
    [("fp8-channel", "as fp8_channel"), ("nvfp4a16", "as nvfp4a16"), ("w4a16-channel", "as w4a16_channel")],
)
def test_experts_of_gpt_oss_that_vllm_would_not_load_are_refused(tmp_path: Path, precision: str, how: str) -> None:
    folder = hollow_moe.write(tmp_path / "gpt_oss", "gpt_oss", hollow_moe.cut("gpt_oss"))
    with pytest.raises(PlanError) as caught:
        _plan(folder, precision)
    assert str(caught.value) == (
        f"precision {precision}: model.layers.0.mlp.experts.0.gate_up_proj.weight would be stored {how}, and vLLM 0.32 does "
        "not load experts of family gpt_oss so; their schemes are w4a16, w4a16_g64, w4a16_g32: take w4a16-g32 or "
        "w4a16-experts-g32"
    )


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
