"""NVFP4 weights and activations without data: a constant input scale, stored, verified, and emulated as vLLM applies it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from safetensors.torch import load_file, save_file
from tiny_checkpoints import make_tiny_glm4_moe

from assay.recipes.load import load_recipe
from assay.recipes.precision import PrecisionRecipe
from assay.records.plan import Plan
from assay_quantize.calibration.inputs import InputRange
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.engine.quantize import quantize
from assay_quantize.formats.config_groups import quantization_config
from assay_quantize.plan.planner import make_plan
from assay_quantize.verify.verify import verify
from assay_vllm.fake_quant import fake_quantize

NOT_CHECKED = (
    "activations against the constant range that scheme nvfp4 gives them: no data was run; `assay calibrate` counts, on a "
    "model that fits into memory, what lies outside"
)
ACTIVATIONS = QuantizationArgs(
    num_bits=4, type="float", symmetric=True, group_size=16, strategy="tensor_group", dynamic="local",
    scale_dtype=torch.float8_e4m3fn,
)  # fmt: skip


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nvfp4") / "source"
    return make_tiny_glm4_moe(folder, num_layers=2, num_experts=2, hidden=128, dense_intermediate=128)


def plan_of(source: Path, precision: str) -> Plan:
    return make_plan(open_checkpoint(source), load_recipe(PrecisionRecipe, precision), model="tiny", family=None)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


@pytest.fixture(scope="module")
def made(source: Path) -> Path:
    quantize(plan_of(source, "nvfp4"), source, source.parent / "nvfp4")
    return source.parent / "nvfp4"


def test_weights_are_those_of_nvfp4a16_and_every_input_scale_is_one(source: Path, made: Path, tmp_path: Path) -> None:
    quantize(plan_of(source, "nvfp4a16"), source, tmp_path / "a16")
    ours, a16 = tensors(made), tensors(tmp_path / "a16")
    scales = {name: tensor for name, tensor in ours.items() if name.endswith(".input_global_scale")}
    packed = [name for name in ours if name.endswith(".weight_packed")]
    assert sorted(scales) == sorted(name.replace(".weight_packed", ".input_global_scale") for name in packed)
    assert all(torch.equal(scale, torch.ones(1)) for scale in scales.values())
    assert not any("self_attn" in name for name in packed)
    for name in ours.keys() - scales.keys():
        if "self_attn" not in name:
            assert torch.equal(ours[name].view(torch.uint8), a16[name].view(torch.uint8)), name


def test_the_config_declares_activations_as_vllms_nvfp4_class_wants_them(source: Path) -> None:
    (group,) = quantization_config(plan_of(source, "nvfp4"))["config_groups"].values()
    activations = group["input_activations"]
    assert {key: activations[key] for key in ("num_bits", "type", "strategy", "group_size", "dynamic", "symmetric")} == {
        "num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": "local", "symmetric": True,
    }  # fmt: skip


def test_it_verifies_and_says_what_was_not_checked(source: Path, made: Path) -> None:
    found = verify(made, source=source, workers=1)
    assert (found.damages, found.not_checked) == ((), (NOT_CHECKED,))
    without = verify(made, workers=1)
    assert without.damages == () and NOT_CHECKED in without.not_checked


def test_another_input_scale_is_found(source: Path, made: Path) -> None:
    name = "model.layers.1.mlp.experts.1.down_proj.input_global_scale"
    path, stored = next((p, found) for p in made.glob("*.safetensors") if name in (found := load_file(p)))
    original = path.read_bytes()
    try:
        save_file({**stored, name: torch.tensor([0.5])}, path, {"format": "pt"})
        damages = [(d.check, d.where, d.what) for d in verify(made, source=source, hashes=False, workers=1).damages]
    finally:
        path.write_bytes(original)
    weight = name.replace("input_global_scale", "weight")
    assert ("weights", weight, "its input_global_scale is 0.5; scheme nvfp4 stores 1") in damages


# ------------------------------------------------------------------------------------------------ the range of activations
def test_what_the_range_cuts_off_and_what_it_loses() -> None:
    """Each kind of group counted; and the plugin's arithmetic loses exactly the ones that were counted."""
    largest = torch.tensor([3000.0, 2688.0, 1.0, 0.09, 6 * 2.0**-10, 6 * 2.0**-11, 0.0])
    x = torch.zeros(1, 7, 16)
    x[0, :, 3] = largest
    found = InputRange()
    found.add(x.reshape(1, -1))
    assert (found.num_groups, found.num_cut_off, found.num_coarse, found.num_zeroed, found.largest) == (6, 1, 3, 2, 3000.0)
    rounded = fake_quantize(x.reshape(1, -1), ACTIVATIONS, global_scale=torch.ones(1)).reshape(7, 16)[:, 3]
    assert rounded.tolist() == pytest.approx([2688.0, 2688.0, 1.0, 0.09375, 0.0, 0.0, 0.0], rel=0.07)
    assert rounded[4:].tolist() == [0.0, 0.0, 0.0]


def test_kv_cache_is_declared_as_compressed_tensors_reads_it(source: Path) -> None:
    base = load_recipe(PrecisionRecipe, "w4a16").model_dump(by_alias=True)
    plan = make_plan(
        open_checkpoint(source),
        PrecisionRecipe.model_validate({**base, "name": "kv", "kv_cache": "fp8"}),
        model="t",
        family=None,
    )
    declared = quantization_config(plan)["kv_cache_scheme"]
    assert json.loads(QuantizationArgs.model_validate(declared).model_dump_json()) == declared
    assert quantization_config(plan_of(source, "w4a16"))["kv_cache_scheme"] is None
    assert "kv_cache" not in plan_of(source, "w4a16").precision_recipe
