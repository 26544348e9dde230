"""Plans for sources that are published in FP8: what becomes of weights and scales, and how much it is."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import hollow
import pytest
from rich.console import Console

from assay.errors import PlanError
from assay.recipes.load import load_recipe
from assay.recipes.model import ModelRecipe
from assay.recipes.precision import PrecisionRecipe
from assay.records.plan import OutputTensor, Plan, TensorPlan
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.plan.planner import make_plan
from assay_quantize.plan.show import print_plan

SHARD = "model.safetensors"


def plan_of(folder: Path, precision: str, **changes: object) -> Plan:
    recipe = load_recipe(PrecisionRecipe, precision)
    recipe = PrecisionRecipe.model_validate({**recipe.model_dump(by_alias=True), **changes})
    return make_plan(open_checkpoint(folder), recipe, model="m", family=None)


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """DeepSeek-V3 in its true shapes and FP8 blocks, with 3 dense layers, one of experts, and MTP."""
    return hollow.hollow_model(tmp_path_factory.mktemp("deepseek"), "deepseek-v3", layers=4, experts=2, shards=1)


def by_name(plan: Plan) -> dict[str, TensorPlan]:
    return {tensor.name: tensor for tensor in plan.tensors}


@pytest.mark.parametrize("model", ["deepseek-v3"])
@pytest.mark.parametrize("precision", ["w4a16", "nvfp4a16", "fp8"])
def test_recipes_of_models_published_in_fp8(tmp_path: Path, model: str, precision: str) -> None:
    """Every source tensor has one action; nothing FP8 is left but what is stored in the scheme that is wanted."""
    recipe = load_recipe(ModelRecipe, model)
    checkpoint = open_checkpoint(hollow.hollow_model(tmp_path, model))
    plan = make_plan(checkpoint, load_recipe(PrecisionRecipe, precision), model=model, family=recipe.family)
    assert [tensor.name for tensor in plan.tensors] == list(checkpoint.tensors)
    assert plan.bytes_in == sum(header.num_bytes for header in checkpoint.tensors.values())
    scales = [tensor for tensor in plan.tensors if tensor.name.endswith("_scale_inv")]
    weights = [tensor for tensor in plan.tensors if tensor.dtype == "F8_E4M3"]
    assert [tensor.scale for tensor in weights] == [tensor.name for tensor in scales]
    kept = precision == "fp8"
    for weight, scale in zip(weights, scales, strict=True):
        by_recipe = weight.role in ("attention", "dense_mlp", "shared_expert", "routed_expert")
        action = ("keep" if kept else "quantize") if by_recipe else "dequantize"
        assert (weight.action, scale.action) == (action, "keep" if action == "keep" else "consume"), weight.name


def test_the_plan_of_a_ragged_weight(deepseek: Path) -> None:
    """kv_a_proj_with_mqa has 576 rows: five rows of scales, the last for 64 rows only."""
    name = "model.layers.3.self_attn.kv_a_proj_with_mqa"
    found = by_name(plan_of(deepseek, "fp8"))
    common = {"role": "attention", "part": "attention", "module": name, "shard_in": SHARD}
    out = "model-00001-of-00001.safetensors"
    assert found[f"{name}.weight"] == TensorPlan(
        name=f"{name}.weight", action="keep", scheme="fp8_block", dtype="F8_E4M3", shape=(576, 7168), num_bytes=576 * 7168,
        fused_group="model.layers.3.self_attn.fused_qkv_a_proj", shard_out=out, scale=f"{name}.weight_scale_inv",
        outputs=(OutputTensor(f"{name}.weight", "F8_E4M3", (576, 7168), 576 * 7168),), **common,
    )  # fmt: skip
    assert found[f"{name}.weight_scale_inv"] == TensorPlan(
        name=f"{name}.weight_scale_inv", action="keep", scheme=None, dtype="F32", shape=(5, 56), num_bytes=5 * 56 * 4,
        fused_group=None, shard_out=out, outputs=(OutputTensor(f"{name}.weight_scale", "F32", (5, 56), 5 * 56 * 4),), **common,
    )  # fmt: skip
    found = by_name(plan_of(deepseek, "w4a16"))
    weight, scale = found[f"{name}.weight"], found[f"{name}.weight_scale_inv"]
    assert (weight.action, weight.scheme, weight.logical_dtype, weight.shard_out) == ("quantize", "w4a16", "BF16", out)
    assert [(o.name.rpartition(".")[2], o.dtype, o.shape) for o in weight.outputs] == [
        ("weight_packed", "I32", (576, 896)), ("weight_scale", "BF16", (576, 56)), ("weight_shape", "I64", (2,)),
    ]  # fmt: skip
    assert (scale.action, scale.outputs, scale.shard_out) == ("consume", (), None)


def test_kept_roles_come_out_of_fp8_in_16_or_32_bits(deepseek: Path) -> None:
    keep = {"source": ["norm", "attention"], "bf16": ["mtp", "embedding", "router", "indexer", "dense_mlp"],
            "fp32": ["router_bias", "lm_head"]}  # fmt: skip
    found = by_name(plan_of(deepseek, "w4a16", quantize=["shared_expert", "routed_expert"], keep=keep))
    made = {
        "model.layers.3.self_attn.o_proj.weight": ("dequantize", "BF16"),
        "model.layers.0.mlp.up_proj.weight": ("dequantize", "BF16"),
        "model.layers.4.mlp.experts.1.up_proj.weight": ("dequantize", "BF16"),
        "model.layers.4.eh_proj.weight": ("keep", "BF16"),
        "lm_head.weight": ("cast", "F32"),
    }
    assert {name: (found[name].action, found[name].outputs[0].dtype) for name in made} == made
    assert found["model.layers.0.mlp.up_proj.weight"].outputs[0].num_bytes == 2 * 18432 * 7168
    assert found["model.layers.4.mlp.experts.1.up_proj.weight_scale_inv"].action == "consume"


def test_a_dropped_mtp_block_takes_its_scales_along(deepseek: Path) -> None:
    plan = plan_of(deepseek, "w4a16", mtp="drop")
    block = [tensor for tensor in plan.tensors if tensor.role == "mtp"]
    assert {tensor.action for tensor in block} == {"drop"} and len([t for t in block if "scale" in t.name]) == 14
    assert not [t for t in plan.tensors if t.role != "mtp" and t.action == "drop"]


def test_a_shard_of_scales_alone_makes_no_shard(tmp_path: Path) -> None:
    small = {**hollow.KIMI_K2_CONFIG, "num_hidden_layers": 2, "n_routed_experts": 2}
    shapes, dtypes = hollow.fp8_blocks(hollow.glm5_shapes(small))
    tensors = [(name, dtypes.get(name, hollow.dtype_of(name)), shape) for name, shape in shapes]
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    pieces = {first: [t for t in tensors if "scale" in t[0]], second: [t for t in tensors if "scale" not in t[0]]}
    for file, piece in pieces.items():
        hollow.write_hollow_shard(tmp_path / file, piece)
    hollow.write_index(tmp_path, {name: file for file, piece in pieces.items() for name, _, _ in piece}, 0)
    (tmp_path / "config.json").write_text(json.dumps({**small, "quantization_config": hollow.FP8_BLOCKS}))
    assert {t.shard_out for t in plan_of(tmp_path, "w4a16").tensors} == {None, "model-00001-of-00001.safetensors"}
    kept = plan_of(tmp_path, "fp8")
    assert Counter(t.shard_out for t in kept.tensors if "scale" in t.name) == {first: 22}
    assert {t.shard_out for t in kept.tensors if t.name.endswith("weight")} == {second}


def test_fused_members_in_fp8_and_bf16_are_quantized_alike(tmp_path: Path) -> None:
    """A list that lies: k_proj of one layer is BF16, q and v are FP8. All three start from BF16."""
    config = {**hollow.GLM45_AIR_CONFIG, "num_hidden_layers": 2, "n_routed_experts": 2, "intermediate_size": 2048}
    shapes, dtypes = hollow.fp8_blocks(hollow.glm4_shapes(config))
    odd = "model.layers.1.self_attn.k_proj.weight"
    names = {name: shape for name, shape in shapes if name != f"{odd}_scale_inv"}
    config["quantization_config"] = {**hollow.FP8_BLOCKS, "modules_to_not_convert": ["lm_head"]}
    hollow.write_hollow(tmp_path, config, iter(names.items()), shards=2, dtypes={**dtypes, odd: "BF16"})
    assert open_checkpoint(tmp_path).notes == (
        f"config.json: modules_to_not_convert does not list {odd.removesuffix('.weight')}, stored unquantized: the tensors are "
        "right",
    )
    for precision in ("w4a16", "fp8"):
        found = by_name(plan_of(tmp_path, precision))
        group = [found[f"model.layers.1.self_attn.{p}_proj.weight"] for p in "qkv"]
        assert [(t.action, t.dtype, t.logical_dtype) for t in group] == [
            ("quantize", "F8_E4M3", "BF16"), ("quantize", "BF16", "BF16"), ("quantize", "F8_E4M3", "BF16"),
        ]  # fmt: skip


def test_a_scheme_that_does_not_divide_still_says_so(tmp_path: Path) -> None:
    """GLM-4.5-Air: 10,944 columns are no multiple of 128, whatever the source is stored in."""
    config = {**hollow.GLM45_AIR_CONFIG, "num_hidden_layers": 2, "n_routed_experts": 2}
    config["quantization_config"] = hollow.FP8_BLOCKS
    shapes, dtypes = hollow.fp8_blocks(hollow.glm4_shapes(config))
    hollow.write_hollow(tmp_path, config, shapes, shards=2, dtypes=dtypes)
    with pytest.raises(PlanError, match="10944 columns are not a multiple of the group size 128"):
        plan_of(tmp_path, "fp8")
    found = by_name(plan_of(tmp_path, "w4a16-experts"))
    assert found["model.layers.0.mlp.down_proj.weight"].action == "dequantize"
    assert found["model.layers.0.mlp.down_proj.weight_scale_inv"].shape == (32, 86)


def test_the_layer_map_counts_scales(deepseek: Path) -> None:
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    print_plan(plan_of(deepseek, "fp8"), console)
    text = console.export_text()
    assert "6 fp8_block as is, 6 scales as is" in text
    assert "14 F8_E4M3 to BF16, 14 scales folded in" in text
