"""Calibrated scales of activations and of the KV cache: what the file says, one for all that vLLM gives one; and verified."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import Run
from compressed_tensors.quantization import QuantizationScheme
from hollow import hollow_glm5
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file, save_file
from tiny_checkpoints import make_tiny_glm4_moe
from tiny_families import deepseek_v3, make_tiny

from assay.errors import PlanError, QuantizeError
from assay.recipes.load import load_recipe
from assay.recipes.precision import PrecisionRecipe
from assay.records.plan import Plan
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.checkpoint.importance import load_importance
from assay_quantize.engine.quantize import quantize
from assay_quantize.formats.config_groups import quantization_config
from assay_quantize.plan.calibrated import constant_scale, static_scales
from assay_quantize.plan.planner import make_plan
from assay_quantize.verify.verify import verify
from assay_vllm.fake_quant import fake_quantize

NOT_GIVEN = "static scales against the calibration file, --importance: it was not given"
LAYER = "model.layers.1"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("static") / "source"
    return make_tiny_glm4_moe(folder, num_layers=2, num_experts=3, hidden=128, dense_intermediate=128)


@pytest.fixture(scope="module")
def file(source: Path) -> Path:
    """Magnitudes that differ for every module; expert 2 of layer 1 saw no token."""
    found: dict[str, np.ndarray] = {}
    draw = np.random.default_rng(0)
    for name in sorted(open_checkpoint(source).tensors):
        if name.endswith("_proj.weight") and ".layers.2." not in name and ".experts.2." not in name:
            found[name.replace(".weight", ".input_amax")] = draw.uniform(0.5, 20, 1).astype(np.float32)
    for layer in range(2):
        for leaf in ("k_amax", "v_amax"):
            found[f"model.layers.{layer}.self_attn.{leaf}"] = draw.uniform(2, 9, 1).astype(np.float32)
    path = source.parent / "w.safetensors"
    save_arrays(found, path)
    return path


@pytest.fixture(scope="module")
def latent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with latent attention."""
    return make_tiny(tmp_path_factory.mktemp("latent") / "source", deepseek_v3())


def plan_of(source: Path, precision: str, file: Path | None, **changes: Any) -> Plan:
    recipe = load_recipe(PrecisionRecipe, precision).model_copy(update=changes)
    made = make_plan(open_checkpoint(source), recipe, model="tiny", family=None)
    return made if file is None else made.model_copy(update={"importance_sha256": load_importance(file).sha256})


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def made(source: Path, file: Path, precision: str) -> Path:
    folder = source.parent / precision
    quantize(plan_of(source, precision, file), source, folder, importance=file)
    return folder


def spoiled(folder: Path, name: str, value: float) -> tuple[Path, bytes]:
    """`folder` with another number under `name`; (file, what it was)."""
    path, stored = next((p, found) for p in folder.glob("*.safetensors") if name in (found := load_file(p)))
    before = path.read_bytes()
    save_file({**stored, name: torch.full_like(stored[name], value)}, path, {"format": "pt"})
    return path, before


# ------------------------------------------------------------------------------------------------ what is stored
def test_nvfp4_has_the_range_that_was_seen_with_headroom(source: Path, file: Path) -> None:
    folder, seen = made(source, file, "nvfp4-calibrated"), load_file(file)
    stored = {name: float(value) for name, value in tensors(folder).items() if name.endswith(".input_global_scale")}

    def amax(*modules: str) -> float:
        return max(float(seen[f"{module}.input_amax"]) for module in modules)

    first = amax(*(f"{LAYER}.mlp.experts.{e}.{part}_proj" for e in (0, 1) for part in ("gate", "up")))
    inner = amax(*(f"{LAYER}.mlp.experts.{e}.down_proj" for e in (0, 1)))
    for expert in range(3):
        for part, most in (("gate", first), ("up", first), ("down", inner)):
            value = stored.pop(f"{LAYER}.mlp.experts.{expert}.{part}_proj.input_global_scale")
            assert value == float(np.float32(2688) / (np.float32(most) * np.float32(8))), (expert, part)
    for owner in ("model.layers.0.mlp", f"{LAYER}.mlp.shared_experts"):
        both = amax(f"{owner}.gate_proj", f"{owner}.up_proj")
        for part, most in (("gate", both), ("up", both), ("down", amax(f"{owner}.down_proj"))):
            value = stored.pop(f"{owner}.{part}_proj.input_global_scale")
            assert value == float(np.float32(2688) / (np.float32(most) * np.float32(8))), (owner, part)
    assert not stored
    constant = source.parent / "constant"
    quantize(plan_of(source, "nvfp4", None), source, constant)
    ours, theirs = tensors(folder), tensors(constant)
    assert ours.keys() == theirs.keys()
    for name in ours:
        if not name.endswith(".input_global_scale"):
            assert torch.equal(ours[name].view(torch.uint8), theirs[name].view(torch.uint8)), name


def test_fp8_static_has_one_step_for_all_that_vllm_merges(source: Path, file: Path) -> None:
    folder, seen = made(source, file, "fp8-static"), load_file(file)
    ours = tensors(folder)
    scales = {name: float(value) for name, value in ours.items() if name.endswith(".input_scale")}
    attention = f"{LAYER}.self_attn"
    merged = max(float(seen[f"{attention}.{part}_proj.input_amax"]) for part in "qkv")
    step = float(np.float32(merged) * np.float32(4) / np.float32(448))
    assert [scales[f"{attention}.{part}_proj.input_scale"] for part in "qkv"] == [step] * 3
    own = float(seen[f"{attention}.o_proj.input_amax"])
    assert scales[f"{attention}.o_proj.input_scale"] == float(np.float32(own) * np.float32(4) / np.float32(448))
    assert not any(".experts." in name for name in scales)
    channel = source.parent / "channel"
    by_row = {
        "attention": "fp8_channel",
        "dense_mlp": "fp8_channel",
        "shared_expert": "fp8_channel",
        "routed_expert": "fp8_block",
    }
    quantize(plan_of(source, "fp8-static", None, quantize=by_row, headroom=1.0), source, channel)
    theirs = tensors(channel)
    assert ours.keys() - theirs.keys() == scales.keys()
    assert all(torch.equal(ours[name].view(torch.uint8), theirs[name].view(torch.uint8)) for name in theirs)


def test_the_config_declares_static_activations_as_vllm_reads_them(source: Path) -> None:
    groups = quantization_config(plan_of(source, "fp8-static", None))["config_groups"]
    static, dynamic = (QuantizationScheme.model_validate(group).input_activations for group in reversed(groups.values()))
    assert static is not None and (static.num_bits, static.strategy, static.dynamic) == (8, "tensor", False)
    assert dynamic is not None and dynamic.dynamic is True


def test_the_kv_cache_has_a_scale_for_keys_and_one_for_values(source: Path, file: Path) -> None:
    folder, seen = made(source, file, "fp8-kv"), load_file(file)
    stored = {name: value for name, value in tensors(folder).items() if name.endswith((".k_scale", ".v_scale"))}
    assert sorted(stored) == [f"model.layers.{n}.self_attn.{leaf}" for n in (0, 1) for leaf in ("k_scale", "v_scale")]
    for name, value in stored.items():
        amax = np.float32(float(seen[name.replace("_scale", "_amax")]))
        assert value.shape == (1,) and float(value) == float(amax * np.float32(4) / np.float32(448)), name
    declared = quantization_config(plan_of(source, "fp8-kv", None))["kv_cache_scheme"]
    assert (declared["num_bits"], declared["strategy"], declared["dynamic"]) == (8, "tensor", False)


KV_B = "model.layers.0.self_attn.kv_b_proj"


@pytest.mark.parametrize(
    ("scheme", "activations", "leaf"),
    [
        ("fp8_static", "calibrated", "input_scale"),
        ("nvfp4", "calibrated", "input_global_scale"),
        ("nvfp4", "constant", "input_global_scale"),
    ],
)
def test_vllm_reads_the_weight_of_mla_back_through_its_inputs(
    latent: Path, tmp_path: Path, scheme: str, activations: str, leaf: str
) -> None:
    """vLLM's `get_and_maybe_dequant_weights` sends the identity through a quantized `kv_b_proj`: 1 must stay 1, 0 stay 0."""
    by_role = dict.fromkeys(("dense_mlp", "shared_expert", "routed_expert"), "fp8_block") | {"attention": scheme}
    plan = plan_of(latent, "fp8-static", None, quantize=by_role, activations=activations, headroom=4.0)
    (tensor,) = (one for one in plan.tensors if one.name == f"{KV_B}.weight")
    groups = [QuantizationScheme.model_validate(one) for one in quantization_config(plan)["config_groups"].values()]
    (args,) = (one.input_activations for one in groups if any("kv_b_proj" in target for target in one.targets))
    identity = torch.eye(64)
    for amax in (0.02, 0.5, 1.0, 4.4, 7.3, 64.0, 900.0):
        names = (name for name in open_checkpoint(latent).tensors if name.endswith("_proj.weight"))
        seen = {name.replace(".weight", ".input_amax"): np.array([amax], np.float32) for name in names}
        save_arrays(seen, tmp_path / "w.safetensors")
        scales = static_scales(plan, load_importance(tmp_path / "w.safetensors"))
        scale = scales.get(f"{KV_B}.{leaf}", constant_scale(tensor, f"{KV_B}.{leaf}"))
        assert scale is not None
        value = torch.tensor([scale])
        assert torch.equal(fake_quantize(identity, args, static_scale=value, global_scale=value), identity), amax
        # and what was seen still fits, with less than twice the headroom
        if leaf == "input_scale":
            step = scales["model.layers.0.self_attn.o_proj.input_scale"]
            assert step == float(np.float32(amax) * np.float32(4) / np.float32(448))
            assert step <= scale and (scale < 2 * step or scale == 2**-8), amax
        elif activations == "calibrated":
            divisor = scales["model.layers.0.self_attn.o_proj.input_global_scale"]
            assert divisor == float(np.float32(2688) / (np.float32(amax) * np.float32(4)))
            assert scale <= divisor and (scale > divisor / 2 or scale == 6 * 2**8), amax
        else:
            assert scale == 0.75


# ------------------------------------------------------------------------------------------------ verification
@pytest.mark.parametrize("precision", ["nvfp4-calibrated", "fp8-static", "fp8-kv"])
def test_it_verifies_with_and_without_file_and_source(source: Path, file: Path, precision: str) -> None:
    folder = made(source, file, precision)
    whole = verify(folder, source=source, importance=file, workers=1)
    assert (whole.damages, whole.not_checked) == ((), ())
    without = verify(folder, source=source, workers=1)
    assert (without.damages, without.not_checked) == ((), (NOT_GIVEN,))
    alone = verify(folder, importance=file, workers=1)
    assert alone.damages == () and NOT_GIVEN not in alone.not_checked
    other = source.parent / "other.safetensors"
    save_arrays({"a.input_amax": np.ones(1, np.float32)}, other)
    (said,) = verify(folder, source=source, importance=other, workers=1).not_checked
    assert "other.safetensors is not the file that was used" in said or "other.safetensors is another file" in said


@pytest.mark.parametrize(
    ("precision", "leaf", "check"),
    [
        ("nvfp4-calibrated", "mlp.experts.2.down_proj.input_global_scale", "weights"),
        ("fp8-static", "self_attn.q_proj.input_scale", "weights"),
        ("fp8-kv", "self_attn.v_scale", "static_scales"),
    ],
)
def test_another_scale_is_found(source: Path, file: Path, precision: str, leaf: str, check: str) -> None:
    folder, name = made(source, file, precision), f"{LAYER}.{leaf}"
    part = leaf.rpartition(".")[2]
    for value, with_file, what in (
        (0.5, True, f"its {part} is 0.5; the calibration file makes it "),
        (0.0, False, f"its {part} is 0; a scale is above 0, and finite"),
        (float("inf"), False, f"its {part} is inf; a scale is above 0, and finite"),
    ):
        path, before = spoiled(folder, name, value)
        try:
            damages = verify(folder, source=source, importance=file if with_file else None, hashes=False, workers=1).damages
        finally:
            path.write_bytes(before)
        assert any(one.check == check and one.what.startswith(what) for one in damages), damages


def test_a_cache_without_its_scale_is_found(source: Path, file: Path) -> None:
    folder, name = made(source, file, "fp8-kv"), f"{LAYER}.self_attn.k_scale"
    path, stored = next((p, found) for p in folder.glob("*.safetensors") if name in (found := load_file(p)))
    before = path.read_bytes()
    try:
        save_file({key: value for key, value in stored.items() if key != name}, path, {"format": "pt"})
        damages = verify(folder, source=source, importance=file, hashes=False, workers=1).damages
    finally:
        path.write_bytes(before)
    assert any(one.where == name and "is in no shard" in one.what for one in damages), damages


# ------------------------------------------------------------------------------------------------ refused
def test_what_cannot_be_calibrated_is_one_line(source: Path, file: Path, tmp_path: Path) -> None:
    with pytest.raises(QuantizeError, match=r"precision nvfp4-calibrated: its scales .* and none was given; make one with"):
        quantize(plan_of(source, "nvfp4-calibrated", None), source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    plan = plan_of(source, "nvfp4-calibrated", file, mtp="quantize")
    with pytest.raises(PlanError, match=r"entered model\.layers\.2\.mlp.*transformers builds no MTP block: say `mtp: keep`"):
        static_scales(plan, load_importance(file))
    few = tmp_path / "few.safetensors"
    save_arrays({name: value.numpy() for name, value in load_file(file).items() if "layers.1.mlp.experts" not in name}, few)
    with pytest.raises(PlanError, match=r"nothing entered model\.layers\.1\.mlp\.experts\.\d\.\w+_proj in the calibration"):
        static_scales(plan_of(source, "nvfp4-calibrated", few), load_importance(few))


def test_latent_attention_has_no_scales_of_a_cache(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"no attention with keys of its own \(`k_proj`\); of latent attention \(MLA\) vLLM"):
        plan_of(hollow_glm5(tmp_path), "fp8-kv", None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activations": "calibrated"}, "needs a scheme that stores scales of activations: fp8_static, nvfp4"),
        ({"headroom": 2.0}, "headroom is of scales that are calibrated, and nothing is"),
        ({"scheme": "fp8_static"}, "role routed_expert cannot have scheme fp8_static"),
    ],
)
def test_recipes_that_contradict_themselves(changes: dict[str, Any], message: str) -> None:
    base = load_recipe(PrecisionRecipe, "w4a16").model_dump(by_alias=True)
    with pytest.raises(ValueError, match=message):
        PrecisionRecipe.model_validate({**base, **changes, "name": "mine"})


def test_the_command_line_wants_the_file_and_says_what_it_has(run: Run, source: Path, file: Path, tmp_path: Path) -> None:
    command = ("quantize", source, "-p", "fp8-kv", "--out", tmp_path / "out")
    code, _, said = run(*command)
    assert code == 2 and "make one with `assay calibrate TARGET --out FILE`, then say --importance FILE" in said
    code, _, said = run(*command, "--importance", file)
    assert code == 0 and "w.safetensors: 4 static scales, headroom 4" in said
    code, said, _ = run("verify", tmp_path / "out", "--source", source, "--importance", file)
    assert code == 0
