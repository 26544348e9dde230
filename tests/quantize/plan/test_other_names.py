"""Plans of models that vLLM names otherwise than their checkpoints do, and of multimodal ones."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import hollow
import pytest

from assay.recipes.load import load_recipe
from assay.recipes.precision import PrecisionRecipe
from assay.records.plan import Plan
from assay_pipeline.targets import source_label
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.formats.config_groups import config_json
from assay_quantize.plan.planner import make_plan

MODELS = ("minimax-m2", "qwen3.5-35b-a3b", "kimi-k2.5", "ernie-4.5-21b")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Four layers with four experts each, at true widths."""
    root = tmp_path_factory.mktemp("hollow")
    return {model: hollow.hollow_model(root / model, model) for model in MODELS}


def plan_of(folder: Path, precision: str, **changes: Any) -> Plan:
    recipe = load_recipe(PrecisionRecipe, precision)
    if changes:
        recipe = PrecisionRecipe.model_validate({**recipe.model_dump(by_alias=True), **changes})
    return make_plan(open_checkpoint(folder), recipe, model="m", family=None)


def actions(plan: Plan, part: str) -> Counter[tuple[str, str | None]]:
    """(action, dtype of the first output) of all tensors of a role."""
    of_role = (tensor for tensor in plan.tensors if tensor.part == part)
    return Counter((tensor.action, tensor.outputs[0].dtype if tensor.outputs else None) for tensor in of_role)


# ------------------------------------------------------------------------------------------------ names
def test_schemes_and_ignored_modules_are_named_as_in_the_checkpoint_and_as_in_vllm(folders: dict[str, Path]) -> None:
    """vLLM asks for `mlp.experts`, compressed-tensors for `block_sparse_moe.experts`."""
    plan = plan_of(folders["minimax-m2"], "w4a16-fp8-attention")
    groups = config_json(plan)["quantization_config"]["config_groups"].values()
    assert [group["targets"] for group in groups] == [
        [r"re:.*\.self_attn\.(k_proj|o_proj|q_proj|v_proj)$"],
        [r"re:.*\.block_sparse_moe\.experts\.\d+\.(w1|w2|w3)$", r"re:.*\.mlp\.experts\.\d+\.(w1|w2|w3)$"],
    ]
    assert plan.ignore == (
        r"re:(.*\.)?lm_head$", r"re:(.*\.)?embed_tokens$", r"re:.*\.block_sparse_moe\.gate$", r"re:.*\.mlp\.gate$",
    )  # fmt: skip


def test_layers_of_a_multimodal_model_are_named_by_both_roots(folders: dict[str, Path]) -> None:
    plan = plan_of(folders["qwen3.5-35b-a3b"], "w4a16", layers={"3": {"routed_expert": "bf16"}})
    assert plan.ignore[-2:] == (
        r"re:(.*\.)?language_model\.model\.layers\.3\.mlp\.experts\.\d+\.(down_proj|gate_proj|up_proj)$",
        r"re:(.*\.)?model\.language_model\.layers\.3\.mlp\.experts\.\d+\.(down_proj|gate_proj|up_proj)$",
    )


def test_an_mtp_block_that_vllm_counts_on_behind_the_layers(folders: dict[str, Path]) -> None:
    """ERNIE-4.5's `model.mtp_block.0` is layer 4 of vLLM, where the model has four; unquantized it must be named so."""
    assert plan_of(folders["ernie-4.5-21b"], "w4a16").ignore == (
        r"re:(.*\.)?embed_tokens$", r"re:.*\.mlp\.gate$", r"re:(.*\.)?model\.mtp_block\..*$",
        r"re:(.*\.)?model\.mtp_emb_norm\..*$", r"re:(.*\.)?model\.mtp_hidden_norm\..*$",
        r"re:(.*\.)?model\.mtp_linear_proj\..*$", r"re:(.*\.)?model\.layers\.4\..*$",
    )  # fmt: skip
    quantized = plan_of(folders["ernie-4.5-21b"], "w4a16-mtp")
    assert quantized.ignore[-1] == r"re:(.*\.)?model\.mtp_linear_proj\.\d+$"
    block = {t.name.removeprefix("model."): t.scheme for t in quantized.tensors if t.role == "mtp" and len(t.shape) == 2}
    linears = [f"self_attn.{part}_proj" for part in "qkvo"] + [f"mlp.{part}_proj" for part in ("down", "gate", "up")]
    assert block == {
        **{f"mtp_block.0.{name}.weight": "w4a16" for name in linears}, "mtp_linear_proj.0.weight": None,
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------ what stays
@pytest.mark.parametrize("model", ["minimax-m2", "ernie-4.5-21b"])
def test_a_router_that_is_published_in_fp32_stays_so(folders: dict[str, Path], model: str) -> None:
    """Though `keep` says bf16: rounded, it would choose other experts."""
    plan = plan_of(folders[model], "w4a16")
    assert "router" in plan.precision_recipe["keep"]["bf16"]
    assert actions(plan, "router") == {("keep", "F32"): 4 if model == "minimax-m2" else 3}


def test_a_vision_tower_stays_as_it_is(folders: dict[str, Path]) -> None:
    counts = {model: sum(t.part == "other" for t in plan_of(folders[model], "w4a16").tensors) for model in MODELS}
    assert counts == {"minimax-m2": 0, "qwen3.5-35b-a3b": 33 + 3, "kimi-k2.5": 2 * 12 + 11, "ernie-4.5-21b": 0}
    for model in ("qwen3.5-35b-a3b", "kimi-k2.5"):
        assert {action for action, _ in actions(plan_of(folders[model], "w4a16"), "other")} == {"keep"}


def test_the_decay_of_qwen35_stays_in_fp32_where_attention_is_bf16(folders: dict[str, Path]) -> None:
    plan = plan_of(folders["qwen3.5-35b-a3b"], "w4a16-experts")
    decay = [tensor for tensor in plan.tensors if tensor.name.endswith("linear_attn.A_log")]
    assert [(tensor.action, tensor.outputs[0].dtype) for tensor in decay] == [("keep", "F32")] * 3


# ------------------------------------------------------------------------------------------------ published formats
def test_experts_in_3d_and_one_by_one_in_one_model(folders: dict[str, Path]) -> None:
    """The layers of Qwen3.5 have theirs in 3-D, its MTP block one by one."""
    plan = plan_of(folders["qwen3.5-35b-a3b"], "w4a16-mtp")
    experts = Counter((t.role, t.scheme, t.shape) for t in plan.tensors if t.part == "routed_expert")
    up, down = (512, 2048), (2048, 512)
    assert experts == {
        ("routed_expert", "w4a16", up): 32, ("routed_expert", "w4a16", down): 16,
        ("mtp", "w4a16", up): 8, ("mtp", "w4a16", down): 4,
    }  # fmt: skip


def test_a_dropped_block_is_declared_where_the_model_declares_it(folders: dict[str, Path]) -> None:
    config = config_json(plan_of(folders["qwen3.5-35b-a3b"], "w4a16-nomtp"))
    assert config["text_config"]["mtp_num_hidden_layers"] == 0 and "mtp_num_hidden_layers" not in config


def test_int4_experts_that_the_text_config_declares(folders: dict[str, Path]) -> None:
    """Carried over where the recipe asks for their groups; the new declaration is the only one."""
    source = open_checkpoint(folders["kimi-k2.5"])
    assert source.notes == ("36 weights are packed INT4; they are read as BF16",)
    assert "quantization_config" not in source.config and source_label(source.config) == "source"
    groups = {"routed_expert": "w4a16_g32", "attention": "fp8_block", "dense_mlp": "fp8_block", "shared_expert": "fp8_block"}
    plan = plan_of(folders["kimi-k2.5"], "w4a16", scheme=None, quantize=groups)
    experts = Counter((t.action, t.scheme) for t in plan.tensors if t.part == "routed_expert" and t.name.endswith(".weight"))
    assert experts == {("keep", "w4a16_g32"): 36}
    config = config_json(plan)
    assert "quantization_config" not in config["text_config"]
    assert config["quantization_config"]["format"] == "mixed-precision"
    assert source.config["text_config"]["quantization_config"] == hollow.INT4_EXPERTS
