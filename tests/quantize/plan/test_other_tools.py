"""Checkpoints as tools that train, prune, merge and resize models leave them: what is planned, noted or refused.

Each kind is made anew from a public report, whose address stands with it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hollow
import pytest
from engine_sources import KEEP, plan_of, precision
from hollow import write_hollow, write_hollow_shard, write_index

from assay.errors import CheckpointError, PlanError
from assay.records.plan import Plan
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.formats.config_groups import config_json

Shapes = dict[str, tuple[int, ...]]
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
GLM: dict[str, Any] = {
    **hollow.GLM47_CONFIG, "num_hidden_layers": 4, "first_k_dense_replace": 1, "n_routed_experts": 4, "hidden_size": 256,
    "intermediate_size": 256, "moe_intermediate_size": 128, "vocab_size": 512, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 64,
}  # fmt: skip
QWEN: dict[str, Any] = {
    **hollow.QWEN3_30B_CONFIG, "num_hidden_layers": 2, "num_experts": 4, "hidden_size": 256, "intermediate_size": 256,
    "moe_intermediate_size": 128, "vocab_size": 512, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64,
}  # fmt: skip


def glm(folder: Path, edit: Callable[[Shapes], object] = len, **config: Any) -> Path:
    """Four layers with four experts and an MTP block, edited."""
    shapes = dict(hollow.glm4_shapes(GLM))
    edit(shapes)
    return write_hollow(folder, {**GLM, **config}, iter(shapes.items()), shards=2)


def qwen(folder: Path, *, dtypes: dict[str, str] | None = None, edit: Callable[[Shapes], object] = len, **config: Any) -> Path:
    shapes = dict(hollow.qwen3_moe_shapes(QWEN))
    edit(shapes)
    return write_hollow(folder, {**QWEN, **config}, iter(shapes.items()), shards=2, dtypes=dtypes)


def refused(folder: Path, recipe: Any = "w4a16") -> str:
    with pytest.raises((PlanError, CheckpointError)) as caught:
        plan_of(folder, recipe)
    return str(caught.value)


def renamed(pattern: str, shape: Callable[[tuple[int, ...]], tuple[int, ...]]) -> Callable[[Shapes], object]:
    """An edit: another shape of what matches."""

    def edit(shapes: Shapes) -> None:
        names = [name for name in shapes if re.search(pattern, name)]
        assert names
        shapes.update({name: shape(shapes[name]) for name in names})

    return edit


def without(pattern: str) -> Callable[[Shapes], object]:
    def edit(shapes: Shapes) -> None:
        names = [name for name in shapes if re.search(pattern, name)]
        assert names
        for name in names:
            del shapes[name]

    return edit


# ------------------------------------------------------------------------------------------------ a block that was lost
LOST = (
    " is declared in config.json (MTP), but no shard holds any tensor of it{more}; transformers loads and saves a model "
    "without the block, and so do tools that fine-tune with it: copy its tensors from the base model's files, complete the "
    "download, or leave the block out with `--mtp drop`"
)


def test_a_model_that_lost_its_mtp_block_is_planned_without_it(tmp_path: Path) -> None:
    """A fine-tune drops `mtp.*` and leaves config.json as it was: https://github.com/modelscope/ms-swift/issues/9802 (inside a
    multimodal config), https://github.com/modelscope/ms-swift/issues/7848 (a family that has no block at all: nothing is
    missing, and the new config.json declares none)."""
    text = {**hollow.QWEN35_35B["text_config"], "num_hidden_layers": 4, "num_experts": 2, "mtp_num_hidden_layers": 1}
    vision = {**hollow.QWEN35_35B["vision_config"], "depth": 1}
    config = {**hollow.QWEN35_35B, "text_config": text, "vision_config": vision}
    shapes = ((name, shape) for name, shape in hollow.qwen35_shapes(config) if not name.startswith("mtp."))
    wrapped = write_hollow(tmp_path / "wrapped", config, shapes, shards=2)
    inlined = glm(tmp_path / "inlined", without(r"layers\.4\."))
    none_known = qwen(tmp_path / "none_known", num_nextn_predict_layers=1)
    wheres = {wrapped: "mtp.layers.0", inlined: "model.layers.4"}
    for folder, where in wheres.items():
        more = " (and 4 more like this)" if folder == wrapped else ""
        assert refused(folder) == f"{folder}: {where}" + LOST.format(more=more)
    drop = precision(mtp="drop")
    made = config_json(plan_of(wrapped, drop))["text_config"]
    assert {key: value for key, value in made.items() if text[key] != value} == {"mtp_num_hidden_layers": 0}
    for folder, recipe in ((inlined, drop), (none_known, drop), (none_known, precision())):
        made = config_json(plan_of(folder, recipe))
        assert made.pop("quantization_config")["quant_method"] == "compressed-tensors"
        assert made == {**json.loads((folder / "config.json").read_text()), "num_nextn_predict_layers": 0}


def test_a_config_that_declares_no_block_is_left_as_it_is(tmp_path: Path) -> None:
    made = config_json(plan_of(qwen(tmp_path), precision(mtp="drop")))
    assert made.pop("quantization_config") and made == QWEN


# ------------------------------------------------------------------------------------------------ shapes
PRUNED = (
    "cut the router to the experts that are left, in their order, as the tool that pruned them should have, or correct the "
    "config"
)


@pytest.mark.parametrize(
    ("edit", "config", "message"),
    [
        # experts were pruned and the router was not: https://github.com/vllm-project/llm-compressor/issues/2864
        (renamed(r"mlp\.gate\.", lambda shape: (8, *shape[1:])), {},
         "model.layers.1.mlp.gate.weight has 8 rows, config.json declares 4 experts (and 7 more like this); " + PRUNED),
        (renamed(r"layers\.2\.mlp\.gate\.e_score", lambda shape: (8,)), {},
         "model.layers.2.mlp.gate.e_score_correction_bias has 8 values, config.json declares 4 experts; " + PRUNED),
        (len, {"moe_intermediate_size": 96},
         "model.layers.1.mlp.experts.0.down_proj.weight is [256, 128], config.json says moe_intermediate_size 96 (and 47 more "
         "like this); correct the config"),
        # experts pruned by width, each by its own
        (renamed(r"layers\.1\.mlp\.experts\.3\.(gate|up)", lambda shape: (64, 256)), {},
         "model.layers.1.mlp.experts.3.gate_proj.weight [64, 256] is unlike model.layers.1.mlp.experts.0.gate_proj.weight "
         "[128, 256]: vLLM has one shape for the experts of a layer (and 1 more like this); make the experts alike, or take "
         "another checkpoint"),
        # an embedding that was resized or padded: vLLM asserts on its rows
        # (https://github.com/vllm-project/vllm/issues/15124)
        (renamed(r"^(lm_head|model\.embed_tokens)|layers\.4\.(shared_head\.head|embed_tokens)", lambda shape: (576, 256)), {},
         "model.embed_tokens.weight has 576 rows, config.json says vocab_size 512: vLLM takes no other number (and 3 more like "
         "this); set vocab_size to 576, or cut the rows behind the first 512"),
        (len, {"vocab_size": 640},
         "model.embed_tokens.weight has 512 rows, config.json says vocab_size 640: vLLM takes no other number (and 3 more like "
         "this); set vocab_size to 512"),
        (renamed(r"^model\.embed_tokens", lambda shape: (576, 256)), {},
         "model.embed_tokens.weight has 576 rows, config.json says vocab_size 512: vLLM takes no other number; give embedding "
         "and head the same number of rows, and set vocab_size to it"),
        # layers were pruned, or config.json copied from a model that is not this one
        (len, {"first_k_dense_replace": 3},
         "layer 1 holds experts, and config.json makes it dense (first_k_dense_replace 3) (and 1 more like this); set "
         "first_k_dense_replace to 1"),
        (len, {"first_k_dense_replace": 0},
         "layer 0 holds no experts, and should (first_k_dense_replace 0); set first_k_dense_replace to 1"),
        (len, {"moe_layer_freq": 2},
         "layer 1 holds experts, and config.json makes it dense (first_k_dense_replace 1, moe_layer_freq 2) (and 1 more like "
         "this); correct first_k_dense_replace, moe_layer_freq"),
        (len, {"moe_layer_freq": [0, 1, 0, 1]},
         "layer 2 holds experts, and config.json makes it dense (moe_layer_freq [0, 1, 0, 1]); correct moe_layer_freq"),
    ],
)  # fmt: skip
def test_shapes_are_held_against_config_json(
    tmp_path: Path, edit: Callable[[Shapes], object], config: dict[str, Any], message: str
) -> None:
    assert refused(glm(tmp_path, edit, **config), "w4a16-g32") == f"{tmp_path}: {message}"


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ({"mlp_only_layers": [1]},
         "(mlp_only_layers [1], decoder_sparse_step 1); correct mlp_only_layers, decoder_sparse_step"),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]},
         "(mlp_only_layers [1], decoder_sparse_step 2) (and 1 more like this); correct mlp_only_layers, decoder_sparse_step"),
    ],
)  # fmt: skip
def test_layers_that_config_json_makes_dense(tmp_path: Path, config: dict[str, Any], what: str) -> None:
    layer = 0 if "decoder_sparse_step" in config else 1
    assert refused(qwen(tmp_path, **{"decoder_sparse_step": 1, **config})) == (
        f"{tmp_path}: layer {layer} holds experts, and config.json makes it dense {what}"
    )


def test_members_of_one_parameter_in_two_dtypes_are_refused_with_a_remedy(tmp_path: Path) -> None:
    """A merge of an adapter left some weights in another dtype: https://github.com/2U1/Qwen-VL-Series-Finetune/issues/259."""
    folder = qwen(tmp_path, dtypes={"model.layers.1.self_attn.v_proj.weight": "F32"})
    assert refused(folder) == (
        "model.layers.1.self_attn.qkv_proj: vLLM loads its members into one parameter, but they disagree: "
        "model.layers.1.self_attn.q_proj.weight quantize BF16 [128, 256], "
        "model.layers.1.self_attn.k_proj.weight quantize BF16 [128, 256], "
        "model.layers.1.self_attn.v_proj.weight quantize F32 [128, 256]; store all of them as BF16 or F32 (load_file, "
        "Tensor.to and save_file of safetensors.torch)"
    )


def test_a_moe_of_which_no_expert_is_quantized_is_refused(tmp_path: Path) -> None:
    """Experts in a layout that a tool does not know are left in 16 bits in silence:
    https://github.com/vllm-project/llm-compressor/issues/3086, https://github.com/NVIDIA/Model-Optimizer/issues/1173."""

    def in_three_dimensions(shapes: Shapes) -> None:
        without(r"\.experts\.")(shapes)
        shapes["model.visual.experts"] = (4, 256, 256)

    text = {**hollow.QWEN35_35B["text_config"], "num_hidden_layers": 4, "num_experts": 4}
    config = {**hollow.QWEN35_35B, "text_config": text, "vision_config": {**hollow.QWEN35_35B["vision_config"], "depth": 1}}
    shapes = dict(hollow.qwen35_shapes(config))
    in_three_dimensions(shapes)
    folder = write_hollow(tmp_path / "none", config, iter(shapes.items()), shards=2)
    drop = precision(mtp="drop")
    assert refused(folder, drop) == (
        f"{folder}: precision w4a16 quantizes routed experts, and no tensor is one by the names of family qwen3_5_moe "
        "(model.language_model.layers.LAYER.mlp.experts.EXPERT.gate_proj.weight); stored in three dimensions, as experts of a "
        "layer may be: model.language_model.layers.0.linear_attn.conv1d.weight [8192, 1, 4] and 3 more; a checkpoint with all "
        "its experts in 16 bits is not made: name them in the family's file, or leave routed_expert out of `quantize`"
    )
    attention = precision(quantize=["attention"], mtp="drop", keep={
        **KEEP, "bf16": [*KEEP["bf16"], "dense_mlp", "shared_expert", "routed_expert"],
    })  # fmt: skip
    assert {tensor.part for tensor in plan_of(folder, attention).tensors if tensor.scheme} == {"attention"}


def test_where_config_json_says_that_no_layer_has_experts_none_is_asked_for(tmp_path: Path) -> None:
    """The first layers of a model, cut off for a try, may all be dense."""
    config = {**hollow.GLM47_CONFIG, "num_hidden_layers": 1, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0}
    shapes = {name: shape for name, shape in hollow.glm4_shapes(config) if ".experts." not in name}
    plan = plan_of(write_hollow(tmp_path / "dense", config, iter(shapes.items()), shards=1))
    assert {tensor.part for tensor in plan.tensors if tensor.scheme} == {"attention", "dense_mlp"}
    shapes["model.layers.0.mlp.gate_up"] = (8, 256, 256)  # experts all the same, by a name that no family knows
    with pytest.raises(PlanError, match="family glm4_moe has no such tensor"):
        plan_of(write_hollow(tmp_path / "stacked", config, iter(shapes.items()), shards=1))


# ------------------------------------------------------------------------------------------------ files
def test_files_that_the_index_does_not_name_are_left_out_if_they_are_not_the_models(tmp_path: Path) -> None:
    """Mistral's own layout beside the shards: https://github.com/vllm-project/vllm/issues/40765; an adapter; a copy."""
    folder = qwen(tmp_path)
    before = plan_of(folder)
    write_hollow_shard(folder / "consolidated.safetensors", [("layers.0.attention.wq.weight", "BF16", (8, 8))])
    write_hollow_shard(folder / "adapter_model.safetensors", [("base_model.model.model.layers.0.q.lora_A", "BF16", (8, 8))])
    write_hollow_shard(folder / "copy.safetensors", [("model.norm.weight", "BF16", (256,))])
    index, which = "model.safetensors.index.json", "is not in model.safetensors.index.json"
    checkpoint = open_checkpoint(folder)
    assert checkpoint.notes == (
        f"adapter_model.safetensors {which}, so vLLM does not read it, and none of its 1 tensors "
        "(base_model.model.model.layers.0.q.lora_A, ...) is the model's: left out",
        f"consolidated.safetensors {which}, so vLLM does not read it, and none of its 1 tensors "
        "(layers.0.attention.wq.weight, ...) is the model's: left out",
        f"copy.safetensors {which} and holds nothing new: left out",
    )
    assert plan_of(folder).tensors == before.tensors
    write_hollow_shard(folder / "more.safetensors", [("model.layers.2.mlp.x", "BF16", (8,)), ("optimizer.step", "F32", (1,))])
    assert refused(folder) == (
        f"{folder}/more.safetensors: is not in {index}, so vLLM does not read it, and holds optimizer.step, which the model "
        "lacks, beside 1 tensors that it has; move the file away, or take the model's own"
    )


@pytest.mark.parametrize(
    ("listed", "what", "replaced", "odd"),
    [
        (FIRST, f"puts it in {FIRST}", "the one of the index", SECOND),
        (SECOND, f"puts it in {SECOND}", f"that in {FIRST}", FIRST),
        (None, "does not list it", f"that in {FIRST}", SECOND),
    ],
)
def test_a_tensor_in_two_shards(tmp_path: Path, listed: str | None, what: str, replaced: str, odd: str) -> None:
    """vLLM reads every listed file whole, so a stale copy wins: https://github.com/vllm-project/vllm/issues/54230."""
    (tmp_path / "config.json").write_text("{}")
    write_hollow_shard(tmp_path / FIRST, [("a", "BF16", (2,)), ("b", "BF16", (2,))])
    write_hollow_shard(tmp_path / SECOND, [("b", "BF16", (2,)), ("c", "BF16", (2,))])
    write_index(tmp_path, {"a": FIRST, "c": SECOND} | ({} if listed is None else {"b": listed}), 12)
    assert refused(tmp_path) == (
        f"{tmp_path}: b is in {FIRST} and in {SECOND}, and model.safetensors.index.json {what}; vLLM 0.32 loads whole the "
        f"files it lists: the copy in {SECOND} replaces {replaced}; write {odd} again without it (another download would bring "
        "the same files)"
    )


# ------------------------------------------------------------------------------------------------ scales, heads
def test_scales_of_the_kv_cache_are_left_out_with_a_note(tmp_path: Path) -> None:
    """Beside the projections as ModelOpt writes them, or beside their module:
    https://github.com/vllm-project/vllm/issues/35656."""

    def with_scales(shapes: Shapes) -> None:
        for layer in range(2):
            shapes[f"model.layers.{layer}.self_attn.k_proj.k_scale"] = ()
            shapes[f"model.layers.{layer}.self_attn.v_scale"] = (1,)

    dtypes = {
        f"model.layers.{layer}.self_attn.{leaf}": "F32" for layer in range(2) for leaf in ("k_proj.k_scale", "v_scale")
    }  # fmt: skip
    folder = qwen(tmp_path, dtypes=dtypes, edit=with_scales)
    assert open_checkpoint(folder).notes == (
        "4 scales of the KV cache (model.layers.0.self_attn.k_proj.k_scale, ...) are left out: they were measured for the "
        "checkpoint as it is; `kv_cache: fp8_calibrated` of a precision measures new ones",
    )
    scales = {tensor.name: tensor.action for tensor in plan_of(folder).tensors if tensor.name in dtypes}
    assert scales == dict.fromkeys(dtypes, "consume")
    again = [t for t in plan_of(folder, precision(kv_cache="fp8_calibrated")).tensors if t.name.endswith("self_attn.v_scale")]
    assert [(tensor.name, tensor.action) for tensor in again] == [
        ("model.layers.0.self_attn.v_scale", "add"), ("model.layers.1.self_attn.v_scale", "add"),
    ]  # fmt: skip


def test_a_head_that_is_stored_though_tied_is_kept_with_a_note(tmp_path: Path) -> None:
    """vLLM takes the stored one since https://github.com/vllm-project/vllm/pull/51665; before, its loaders differed."""
    folder = qwen(tmp_path, tie_word_embeddings=True)
    assert open_checkpoint(folder).notes == (
        "lm_head.weight is stored, and config.json ties the head to the embedding (tie_word_embeddings): vLLM 0.32 serves the "
        "stored one, older loaders the embedding; set tie_word_embeddings to false, or delete lm_head.weight if the two are "
        "equal",
    )
    head = next(tensor for tensor in plan_of(folder).tensors if tensor.name == "lm_head.weight")
    assert (head.action, [output.name for output in head.outputs]) == ("keep", ["lm_head.weight"])
    assert open_checkpoint(qwen(tmp_path / "untied")).notes == ()


# ------------------------------------------------------------------------------------------------ without its wrapper
def test_the_language_model_of_qwen35_alone_is_planned_as_inside_its_wrapper(tmp_path: Path) -> None:
    """`Qwen3_5MoeForCausalLM`, cut out of the multimodal model: https://github.com/ggml-org/llama.cpp/issues/25024."""
    wrapped = hollow.hollow_model(tmp_path / "wrapped", "qwen3.5-35b-a3b")
    folder = hollow.hollow_model(tmp_path / "alone", "qwen3.5-35b-a3b-text")

    def rows(plan: Plan) -> Counter[tuple[Any, ...]]:
        return Counter(
            (tensor.name.replace("model.language_model.", "model."), tensor.role, tensor.action, tensor.scheme, tensor.shape)
            for tensor in plan.tensors
            if not tensor.name.startswith("model.visual.")
        )

    for name in ("w4a16", "fp8", "w4a16-mtp", "w4a16-nomtp"):
        assert rows(plan_of(folder, name)) == rows(plan_of(wrapped, name)), name
    assert plan_of(folder).family == "qwen3_5_moe_text"
