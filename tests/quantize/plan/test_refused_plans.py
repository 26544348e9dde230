"""Plans that are refused: what a user can get wrong."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hollow
import pytest
from engine_sources import KEEP, plan_of, precision
from hollow import write_hollow
from tiny_checkpoints import make_tiny_glm4_moe

from assay.errors import PlanError
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.plan.planner import check_ignore, make_plan


# ------------------------------------------------------------------------------------------------ what a user can get wrong
def test_lm_head_cannot_be_quantized(tiny_glm: Path) -> None:
    keep = {**KEEP, "bf16": ["mtp", "embedding", "router", "indexer"]}
    recipe = precision(quantize=["attention", "dense_mlp", "shared_expert", "routed_expert", "lm_head"], keep=keep)
    with pytest.raises(PlanError, match="precision w4a16: lm_head cannot be quantized: vLLM's quantization target"):
        plan_of(tiny_glm, recipe)


def test_a_family_that_the_config_contradicts(tiny_glm: Path) -> None:
    with pytest.raises(PlanError, match=r"its config.json is of family glm4_moe, the model recipe says qwen3_moe; correct"):
        make_plan(open_checkpoint(tiny_glm), precision(), model="m", family="qwen3_moe")


def test_nothing_quantized_is_refused(tmp_path: Path) -> None:
    everything = {
        "source": ["norm", "attention", "dense_mlp", "shared_expert", "routed_expert"],
        "bf16": ["mtp", "lm_head", "embedding", "router"],
        "fp32": ["router_bias"],
    }
    folder = make_tiny_glm4_moe(tmp_path)
    with pytest.raises(PlanError, match=r"precision w4a16: nothing in .* is quantized; name roles under `quantize`"):
        plan_of(folder, precision(quantize=["indexer"], keep=everything))


Edit = Callable[[dict[str, Any], dict[str, tuple[int, ...]]], object]


def _without(part: str) -> Edit:
    def edit(config: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> None:
        gone = [name for name in shapes if re.search(part, name)]
        assert gone
        for name in gone:
            del shapes[name]

    return edit


def _config(**values: Any) -> Edit:
    return lambda config, shapes: config.update(values)


def _reshape(**values: Any) -> Edit:
    return lambda config, shapes: shapes.update({name.replace("__", "."): shape for name, shape in values.items()})


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (_without(r"layers\.4\."),
         "{folder}: model.layers.4 is declared in config.json (MTP), but no shard holds any tensor of it; transformers loads "
         "and saves a model without the block, and so do tools that fine-tune with it: copy its tensors from the base model's "
         "files, complete the download, or leave the block out with `--mtp drop`"),
        (_config(num_nextn_predict_layers=0),
         "{folder}: model.layers.4 holds an MTP block, but config.json declares 0 MTP layers; correct the number, or leave "
         "the block out with `--mtp drop`"),
        (_without(r"layers\.4\.mlp\.experts\.2\."),
         "{folder}: model.layers.4.mlp.experts.2.down_proj.weight is missing from the MTP block: vLLM would load it and draft "
         "noise (and 2 more like this); complete the download, or leave the block out with `--mtp drop`"),
        (_without(r"layers\.4\.mlp\.experts\."),
         "{folder}: model.layers.4.mlp.experts.0.down_proj.weight is missing from the MTP block: vLLM would load it and draft "
         "noise (and 11 more like this); complete the download, or leave the block out with `--mtp drop`"),
        (_without(r"eh_proj"),
         "{folder}: model.layers.4.eh_proj.weight is missing from the MTP block: vLLM would load it and draft noise; complete "
         "the download, or leave the block out with `--mtp drop`"),
        (_without(r"layers\.4\.self_attn\.o_proj"),
         "{folder}: model.layers.4.self_attn.o_proj.weight is missing from the MTP block: vLLM would load it and draft noise; "
         "complete the download, or leave the block out with `--mtp drop`"),
        (_without(r"layers\.2\."),
         "{folder}: config.json declares 4 layers, but there is no tensor of layer 2; complete the download"),
        (_without(r"layers\.3\.self_attn\.k_proj\.weight"),
         "{folder}: layer 3 has no self_attn.k_proj.weight, which layer 1 has; complete the download"),
        (_without(r"layers\.3\.mlp\.experts\.1\.up_proj"),
         "{folder}: layer 3 has no up_proj of expert 1; 4 of 4 experts are there; complete the download"),
        (_config(n_routed_experts=3),
         "{folder}: layer 1 has expert 3, config.json declares 3 experts; correct the config"),
        (_without(r"lm_head\.weight"),
         "{folder}: lm_head.weight is not there, and tie_word_embeddings is not set; complete the download"),
        (_without(r"model\.norm"),
         "{folder}: model.embed_tokens.weight or model.norm.weight is not there; complete the download"),
        (_config(num_hidden_layers="4"),
         "config.json: num_hidden_layers must be a number from 0 to 100000, got '4'; correct the config"),
        (_reshape(model__layers__2__mlp__experts__0__down_proj__weight=(256, 100)),
         "model.layers.2.mlp.experts.0.down_proj.weight: shape [256, 100] does not fit scheme w4a16: 100 columns are not a "
         "multiple of the group size 128; keep its role in 16 bits (`keep: {{bf16: [...]}}`), or choose another scheme"),
        (_reshape(model__layers__2__mlp__experts__0__up_proj__weight=(128, 512)),
         "model.layers.2.mlp.experts.0.gate_up_proj: vLLM loads its members into one parameter, but they disagree: "
         "model.layers.2.mlp.experts.0.gate_proj.weight quantize BF16 [128, 256], "
         "model.layers.2.mlp.experts.0.up_proj.weight quantize BF16 [128, 512]"),
        (_reshape(model__layers__2__mlp__experts__0__extra=(8,)),
         "model.layers.2.mlp.experts.0.extra: family glm4_moe has no such tensor; nearest known form: "
         "model.layers.{{layer}}.mlp.experts.{{expert}}.up_proj.weight; unknown tensors are never guessed"),
        (_config(architectures=["LlamaForCausalLM"], n_routed_experts=None),
         "config.json: LlamaForCausalLM has none of n_routed_experts, num_experts, num_local_experts, moe_num_experts, "
         "num_moe_experts, and moe_intermediate_size is not read as a number of experts; assay is for mixture-of-experts "
         "(docs/families.md)"),
    ],
)  # fmt: skip
def test_a_source_that_does_not_fit_is_one_line(tmp_path: Path, edit: Edit, message: str) -> None:
    config = {
        **hollow.GLM47_CONFIG, "num_hidden_layers": 4, "first_k_dense_replace": 1, "n_routed_experts": 4, "hidden_size": 256,
        "intermediate_size": 256, "moe_intermediate_size": 128, "vocab_size": 512, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 64,
    }  # fmt: skip
    shapes = dict(hollow.glm4_shapes(config))
    edit(config, shapes)
    write_hollow(tmp_path, config, iter(shapes.items()), shards=2)
    with pytest.raises(PlanError) as caught:
        plan_of(tmp_path)
    assert str(caught.value) == message.format(folder=tmp_path)


def test_incomplete_mtp_can_be_dropped(tmp_path: Path) -> None:
    config = {**hollow.GLM47_CONFIG, "num_hidden_layers": 4, "n_routed_experts": 4}
    shapes = ((n, s) for n, s in hollow.glm4_shapes(config) if "layers.4.mlp.experts.2." not in n)
    write_hollow(tmp_path, config, shapes, shards=2)
    assert {t.action for t in plan_of(tmp_path, precision(mtp="drop")).tensors if t.role == "mtp"} == {"drop"}


def test_a_layer_that_no_group_divides(tmp_path: Path) -> None:
    """GLM-4.5-Air's dense layer is 10,944 wide: neither FP8 blocks nor INT4 groups of 128 divide it."""
    hollow.hollow_model(tmp_path, "glm-4.5-air")
    for name in ("fp8", "w4a16"):
        with pytest.raises(PlanError, match="10944 columns are not a multiple of the group size 128"):
            plan_of(tmp_path, name)
    assert plan_of(tmp_path, "nvfp4a16").bytes_out > 0


def test_fp8_blocks_must_end_where_the_next_weight_of_the_parameter_begins(tmp_path: Path) -> None:
    """576 rows of kv_a are fine behind q_a; 576 rows of q_a in front of it are not."""
    base, _ = hollow.MODELS["kimi-k2"]
    config = {**base, "num_hidden_layers": 2, "n_routed_experts": 2}
    write_hollow(tmp_path / "fine", config, hollow.glm5_shapes(config), shards=1)
    assert plan_of(tmp_path / "fine", "fp8").bytes_out > 0
    odd = {**config, "q_lora_rank": 576}
    write_hollow(tmp_path / "odd", odd, hollow.glm5_shapes(odd), shards=1)
    with pytest.raises(PlanError, match=r"q_a_proj.weight: shape .* 576 rows are not a multiple of the block size 128"):
        plan_of(tmp_path / "odd", precision("fp8", quantize=["attention"], keep=ONLY_ATTENTION))


ONLY_ATTENTION = {**KEEP, "bf16": [*KEEP["bf16"], "dense_mlp", "shared_expert", "routed_expert"]}


@pytest.mark.parametrize(
    ("ignore", "message"),
    [
        (lambda kept: kept[:-1], "model.layers.3.eh_proj: kept, but the ignore list misses it: no pattern matches"),
        (lambda kept: (*kept, "re:.*layers.1"), "model.layers.1.mlp.experts.0.down_proj: quantized, but the ignore list"),
        (lambda kept: (*kept, r"re:.*mlp\.gate"), "model.layers.0.mlp.gate_proj: quantized, but the ignore list covers it"),
        (lambda kept: kept[1:], "lm_head: kept, but the ignore list misses it: no pattern matches"),
        (lambda kept: (*kept, r"re:model\.layers\.0\.self_attn\.qkv_proj$"),
         "model.layers.0.self_attn.k_proj is w4a16, but vLLM would load model.layers.0.self_attn.qkv_proj as unquantized: "),
    ],
)  # fmt: skip
def test_an_ignore_list_that_says_something_else_is_found(
    tiny_glm: Path, ignore: Callable[[tuple[str, ...]], tuple[str, ...]], message: str
) -> None:
    plan = plan_of(tiny_glm)
    check_ignore(plan)
    with pytest.raises(PlanError) as caught:
        check_ignore(plan.model_copy(update={"ignore": ignore(plan.ignore)}))
    assert str(caught.value).startswith(message)
