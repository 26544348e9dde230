"""What will happen to every tensor: whole small plans, bytes by hand, MTP and dtypes, what is printed."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import hollow
import pytest
from engine_sources import KEEP, plan_of, precision
from hollow import write_hollow
from rich.console import Console
from tiny_checkpoints import make_tiny_glm4_moe

from assay.recipes.load import load_recipe
from assay.recipes.precision import PrecisionRecipe
from assay.records.plan import OutputTensor, Plan, TensorPlan
from assay_quantize.plan.planner import bytes_by_role
from assay_quantize.plan.show import gigabytes, print_plan


# ------------------------------------------------------------------------------------------------ whole plans
def test_the_whole_plan_of_a_small_checkpoint(tmp_path: Path) -> None:
    folder = make_tiny_glm4_moe(
        tmp_path, num_layers=1, first_dense=0, num_experts=2, mtp=False, attention_bias=False, shards=1
    )  # fmt: skip
    plan = plan_of(folder)
    layer = "model.layers.0."
    expert, shared, attention = f"{layer}mlp.experts.", f"{layer}mlp.shared_experts.", f"{layer}self_attn."
    expected = [
        ("model.embed_tokens.weight", "embedding", "keep", None, 512 * 256 * 2),
        (f"{layer}input_layernorm.weight", "norm", "keep", None, 512),
        *(
            (f"{expert}{e}.{p}_proj.weight", "routed_expert", "quantize", group and f"{expert}{e}.{group}",
             16384 + scales + 16)
            for e in (0, 1)
            for p, group, scales in (
                ("down", None, 256 * 1 * 2), ("gate", "gate_up_proj", 128 * 2 * 2), ("up", "gate_up_proj", 128 * 2 * 2)
            )
        ),
        (f"{layer}mlp.gate.e_score_correction_bias", "router_bias", "keep", None, 2 * 4),
        (f"{layer}mlp.gate.weight", "router", "keep", None, 2 * 256 * 2),
        (f"{shared}down_proj.weight", "shared_expert", "quantize", None, 16384 + 512 + 16),
        (f"{shared}gate_proj.weight", "shared_expert", "quantize", f"{shared}gate_up_proj", 16384 + 512 + 16),
        (f"{shared}up_proj.weight", "shared_expert", "quantize", f"{shared}gate_up_proj", 16384 + 512 + 16),
        (f"{layer}post_attention_layernorm.weight", "norm", "keep", None, 512),
        (f"{attention}k_norm.weight", "norm", "keep", None, 128),
        (f"{attention}k_proj.weight", "attention", "quantize", f"{attention}qkv_proj", 16384 + 512 + 16),
        (f"{attention}o_proj.weight", "attention", "quantize", None, 32768 + 1024 + 16),
        (f"{attention}q_norm.weight", "norm", "keep", None, 128),
        (f"{attention}q_proj.weight", "attention", "quantize", f"{attention}qkv_proj", 32768 + 1024 + 16),
        (f"{attention}v_proj.weight", "attention", "quantize", f"{attention}qkv_proj", 16384 + 512 + 16),
        ("model.norm.weight", "norm", "keep", None, 512),
        ("lm_head.weight", "lm_head", "keep", None, 512 * 256 * 2),
    ]  # fmt: skip
    found = sorted(
        (t.name, t.role, t.action, t.fused_group, sum(o.num_bytes for o in t.outputs)) for t in plan.tensors
    )  # fmt: skip
    assert found == sorted(expected)
    assert {t.part == t.role and t.shard_in == "model.safetensors" for t in plan.tensors} == {True}
    assert {t.shard_out for t in plan.tensors} == {"model-00001-of-00001.safetensors"}
    assert plan.ignore == (r"re:(.*\.)?lm_head$", r"re:(.*\.)?embed_tokens$", r"re:.*\.mlp\.gate$")
    assert plan.mtp_layers == ()
    assert plan.tensors[[t.name for t in plan.tensors].index(f"{shared}gate_proj.weight")] == TensorPlan(
        name=f"{shared}gate_proj.weight",
        role="shared_expert",
        part="shared_expert",
        module=f"{shared}gate_proj",
        action="quantize",
        scheme="w4a16",
        fused_group=f"{shared}gate_up_proj",
        dtype="BF16",
        shape=(128, 256),
        num_bytes=65536,
        shard_in="model.safetensors",
        shard_out="model-00001-of-00001.safetensors",
        outputs=(
            OutputTensor(f"{shared}gate_proj.weight_packed", "I32", (128, 32), 16384),
            OutputTensor(f"{shared}gate_proj.weight_scale", "BF16", (128, 2), 512),
            OutputTensor(f"{shared}gate_proj.weight_shape", "I64", (2,), 16),
        ),
    )


ATTENTION = 3 * (256 * 256 * 2 + 128 * 256 * 2)
BIASES = 3 * (256 + 128 + 128) * 2
DENSE, SHARED, ROUTED = 3 * 256 * 256, 2 * 3 * 256 * 128, 2 * 4 * 3 * 256 * 128
KEPT = {
    "embedding": (1, 262144, 262144), "lm_head": (1, 262144, 262144), "norm": (13, 4352, 4352), "router": (2, 4096, 4096),
    "router_bias": (2, 32, 32), "mtp": (34, 2168592, 2168592),
}  # fmt: skip
COUNTS = {"attention": (12, ATTENTION), "dense_mlp": (3, DENSE), "shared_expert": (6, SHARED), "routed_expert": (24, ROUTED)}


@pytest.mark.parametrize(
    ("name", "out_bytes"),
    [
        # FP8 values and one BF16 scale per block of 128 x 128
        ("fp8", lambda weights, values: values + values // 128**2 * 2),
        # 4 bits, one BF16 scale per group of 128, the shape as two I64
        ("w4a16", lambda weights, values: values // 2 + values // 128 * 2 + weights * 16),
        # 4 bits, one FP8 scale per group of 16, one F32 scale
        ("nvfp4a16", lambda weights, values: values // 2 + values // 16 + weights * 4),
    ],
)
def test_bytes_by_hand(tiny_glm: Path, name: str, out_bytes: Callable[[int, int], int]) -> None:
    plan = plan_of(tiny_glm, name)
    expected = dict(KEPT)
    for role, (weights, values) in COUNTS.items():
        biases, num_biases = (BIASES, 9) if role == "attention" else (0, 0)
        expected[role] = (weights + num_biases, values * 2 + biases, out_bytes(weights, values) + biases)
    assert bytes_by_role(plan) == expected
    assert plan.bytes_in == sum(path.stat().st_size for path in tiny_glm.glob("*.safetensors")) - _headers(tiny_glm)
    assert plan.bytes_out == sum(size for _, _, size in expected.values())


def _headers(folder: Path) -> int:
    return sum(8 + int.from_bytes(path.read_bytes()[:8], "little") for path in folder.glob("*.safetensors"))


def test_a_plan_is_saved_and_read_back_equal(tiny_glm: Path, tmp_path: Path) -> None:
    plan = plan_of(tiny_glm)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert PrecisionRecipe.model_validate(plan.precision_recipe) == load_recipe(PrecisionRecipe, "w4a16")


def test_the_same_checkpoint_and_recipe_give_the_same_plan(tiny_glm: Path) -> None:
    assert plan_of(tiny_glm) == plan_of(tiny_glm)
    assert plan_of(tiny_glm).source_sha256 == plan_of(tiny_glm, "fp8").source_sha256
    assert plan_of(tiny_glm).recipe_sha256 != plan_of(tiny_glm, "fp8").recipe_sha256


# ------------------------------------------------------------------------------------------------ MTP and dtypes
def _by_name(plan: Plan) -> dict[str, TensorPlan]:
    return {tensor.name: tensor for tensor in plan.tensors}


def test_mtp_quantize_leaves_what_vllm_loads_only_plain(tiny_glm: Path) -> None:
    plan = plan_of(tiny_glm, precision(mtp="quantize"))
    block = {t.name.removeprefix("model.layers.3."): t.action for t in plan.tensors if t.role == "mtp"}
    kept = {name for name, action in block.items() if action == "keep"}
    assert {name for name in kept if not name.endswith(("norm.weight", "bias"))} == {
        "eh_proj.weight", "embed_tokens.weight", "shared_head.head.weight", "mlp.gate.weight",
    }  # fmt: skip
    assert set(block.values()) == {"keep", "quantize"}
    assert sum(action == "quantize" for action in block.values()) == 4 + 3 + 4 * 3
    assert plan.ignore[-1] == r"re:.*layers\.3\.(eh_proj|embed_tokens|shared_head\.head|head)$"
    assert plan.mtp_layers == (3,)


def test_mtp_drop_removes_the_block_and_renumbers_shards(tmp_path: Path) -> None:
    folder = make_tiny_glm4_moe(tmp_path, mtp_file=True)
    plan = plan_of(folder, precision(mtp="drop"))
    dropped = [t for t in plan.tensors if t.action == "drop"]
    assert len(dropped) == 34
    assert {(t.shard_in, t.shard_out, t.outputs) for t in dropped} == {("mtp.safetensors", None, ())}
    assert {t.shard_out for t in plan.tensors if t.action != "drop"} == {
        "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
    }  # fmt: skip
    assert not any("layers" in pattern for pattern in plan.ignore)
    kept = plan_of(folder)
    assert {t.shard_out for t in kept.tensors if t.role == "mtp"} == {"model-00003-of-00003.safetensors"}


def test_qwen3_next_mtp_and_linear_attention(tmp_path: Path) -> None:
    hollow.hollow_model(tmp_path, "qwen3-next-80b-a3b")
    plan = plan_of(tmp_path, precision(mtp="quantize"))
    actions = {name: tensor.action for name, tensor in _by_name(plan).items()}
    assert actions["mtp.fc.weight"] == "keep"
    assert actions["mtp.layers.0.mlp.experts.3.up_proj.weight"] == "quantize"
    assert actions["mtp.layers.0.mlp.gate.weight"] == "keep"
    assert actions["model.layers.0.linear_attn.in_proj_qkvz.weight"] == "quantize"
    assert actions["model.layers.0.linear_attn.in_proj_ba.weight"] == "keep"
    assert actions["model.layers.0.linear_attn.conv1d.weight"] == "keep"
    assert actions["model.layers.0.mlp.shared_expert_gate.weight"] == "keep"
    assert r"re:(.*\.)?mtp\.fc$" in plan.ignore
    assert plan.mtp_layers == ()


def test_a_quantized_indexer_is_wq_b_alone(tmp_path: Path) -> None:
    hollow.hollow_model(tmp_path, "glm-5")
    keep = {**KEEP, "bf16": ["mtp", "lm_head", "embedding", "router"]}
    roles = ["attention", "dense_mlp", "shared_expert", "routed_expert", "indexer"]
    plan = plan_of(tmp_path, precision(quantize=roles, keep=keep))
    indexer = {t.name.split("indexer.")[1]: t.action for t in plan.tensors if t.name.startswith("model.layers.2.self_attn.ind")}
    assert indexer == {
        "wq_b.weight": "quantize", "wk.weight": "keep", "weights_proj.weight": "keep", "k_norm.weight": "keep",
        "k_norm.bias": "keep",
    }  # fmt: skip
    assert r"re:.*\.self_attn\.indexer\.(wk|weights_proj)$" in plan.ignore


@pytest.mark.parametrize(
    ("dtype", "treatments"),
    [
        ("fp32", {"embed": ("cast", "BF16"), "norm": ("keep", "F32"), "bias": ("keep", "F32"), "router_bias": ("keep", "F32"),
                  "eh_proj": ("cast", "BF16"), "mtp_norm": ("keep", "F32")}),
        ("fp16", {"embed": ("cast", "BF16"), "norm": ("keep", "F16"), "bias": ("keep", "F16"), "router_bias": ("keep", "F32"),
                  "eh_proj": ("cast", "BF16"), "mtp_norm": ("keep", "F16")}),
    ],
)  # fmt: skip
def test_kept_tensors_get_the_dtype_of_the_recipe(tmp_path: Path, dtype: str, treatments: dict[str, tuple[str, str]]) -> None:
    tensors = _by_name(plan_of(make_tiny_glm4_moe(tmp_path, dtype=dtype)))
    names = {
        "embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "bias": "model.layers.0.self_attn.q_proj.bias",
        "router_bias": "model.layers.3.mlp.gate.e_score_correction_bias", "eh_proj": "model.layers.3.eh_proj.weight",
        "mtp_norm": "model.layers.3.enorm.weight",
    }  # fmt: skip
    assert {key: (tensors[n].action, tensors[n].outputs[0].dtype) for key, n in names.items()} == treatments
    assert tensors["model.embed_tokens.weight"].outputs[0].num_bytes == 512 * 256 * 2


def test_router_bias_in_bf16_is_cast_up(tmp_path: Path) -> None:
    base, shapes = hollow.MODELS["glm-4.7"]
    config = {**base, "num_hidden_layers": 4, "n_routed_experts": 4}
    name = "model.layers.3.mlp.gate.e_score_correction_bias"
    write_hollow(tmp_path, config, shapes(config), shards=1, dtypes={name: "BF16"})
    tensor = _by_name(plan_of(tmp_path))[name]
    assert (tensor.action, tensor.outputs) == ("cast", (OutputTensor(name, "F32", (4,), 16),))


# ------------------------------------------------------------------------------------------------ what is printed
def test_what_is_printed(tiny_glm: Path) -> None:
    console = Console(width=100, record=True, file=open(os.devnull, "w"), highlight=False)  # noqa: SIM115
    print_plan(plan_of(tiny_glm, "nvfp4a16"), console)
    text = console.export_text()
    assert "m -> nvfp4a16   family glm4_moe   source" in text
    assert "107 tensors, 6.24 MB -> 3.70 MB (59.3%) in 2 shards" in text
    assert "│ attention     │      21 │  1.18 MB │ 334.9 kB │ 12 nvfp4a16, 9 BF16 as is  │" in text
    assert "MTP: layer 3 (34 tensors, 2.17 MB) is kept, 33 BF16 as is, 1 F32 as is" in text
    assert "ignore: 4 patterns" in text
    assert r"re:.*layers\.3\..*$" in text
    assert re.search(r"│ 4xh200 +│ +135 │ +0.0 │ +126 │ yes │ +[\d.]+ M fp8 │ +yes │", text)


@pytest.mark.parametrize(
    ("extends", "calibration", "rows", "block"),
    [
        (
            "w4a16", "{method: awq+gptq, mtp: true}",
            {
                "attention": "12 w4a16 by AWQ and GPTQ", "norm": "6 BF16 scaled by AWQ", "router": "BF16 scaled by AWQ",
                "mtp": "19 w4a16 by AWQ and GPTQ, 11 BF16 as is, 3 BF16 scaled by AWQ",
            },
            "calibrated, too",
        ),
        (
            "w8a8", "{method: smoothquant}",
            {"routed_expert": "w8a8 by SmoothQuant", "norm": "6 BF16 scaled by SmoothQuant"}, "rounded without text",
        ),
        ("w4a16", "{method: gptq}", {"attention": "12 w4a16 by GPTQ", "norm": "BF16 as is"}, "rounded without text"),
    ],
)  # fmt: skip
def test_what_text_changes_is_said(
    tmp_path: Path, tiny_glm: Path, extends: str, calibration: str, rows: dict[str, str], block: str
) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(f"schema: 1\nname: recipe\nextends: {extends}\nmtp: quantize\ncalibration: {calibration}\n")
    console = Console(width=140, record=True, file=open(os.devnull, "w"), highlight=False)  # noqa: SIM115
    print_plan(plan_of(tiny_glm, str(path)), console)
    text = console.export_text()
    for role, what in rows.items():
        assert re.search(rf"│ {role} .*{re.escape(what)}", text), text
    assert f"its input projection and head are not; {block}" in text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (4096, "4.10 kB"), (6_243_376, "6.24 MB"), (1_506_700_000_000, "1,506.7 GB")],
)
def test_sizes_are_read_easily(num_bytes: int, text: str) -> None:
    assert gigabytes(num_bytes) == text


def test_a_checkpoint_changed_after_the_plan_has_another_identity(tmp_path: Path) -> None:
    first = plan_of(make_tiny_glm4_moe(tmp_path / "a"))
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    second = plan_of(make_tiny_glm4_moe(tmp_path / "b", num_experts=8))
    assert first.config == config
    assert first.source_sha256 != second.source_sha256
