"""Hollow checkpoints: true names, shapes and dtypes in true safetensors headers, and no data (sparse files).

They plan, and nothing else. `hollow_glm5` has the size of the real one: 59,585 tensors, 282 shards, 1.5 TB apparent, on
a few megabytes of disk. Names and shapes follow the models' configs and vLLM's loaders; `test_families.py` compares the names
with what transformers itself writes.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import hollow_deepseek_v4
import hollow_hybrids
import hollow_mimo
from published_configs import ERNIE_45_21B, KIMI_K25, MINIMAX_FP8, MINIMAX_M2, QWEN35_35B, QWEN35_35B_TEXT

from assay_quantize.checkpoint.fused_experts import FUSED_PARTS
from assay_quantize.plan.stored import StoredModel

Shapes = Iterator[tuple[str, tuple[int, ...]]]
DTYPE_BYTES = {
    "BF16": 2,
    "F16": 2,
    "F32": 4,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I8": 1,
    "U8": 1,
    "I16": 2,
    "I32": 4,
    "U32": 4,
    "I64": 8,
}

GLM5_CONFIG: dict[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "dtype": "bfloat16",
    "num_hidden_layers": 78, "first_k_dense_replace": 3, "num_nextn_predict_layers": 1,
    "hidden_size": 6144, "intermediate_size": 12288, "moe_intermediate_size": 2048, "vocab_size": 154880,
    "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1, "num_attention_heads": 64,
    "num_key_value_heads": 64, "q_lora_rank": 2048, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64,
    "v_head_dim": 256, "index_n_heads": 32, "index_head_dim": 128, "index_topk": 2048, "tie_word_embeddings": False,
    "topk_method": "noaux_tc", "scoring_func": "sigmoid", "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "max_position_embeddings": 202752,
}  # fmt: skip
GLM52_INDEXERS = {0, 1, 2, *range(6, 78, 4)}
"""Layers of GLM-5.2 and 5.3 that have an indexer of their own; the other 57 share one (`index_topk_freq` 4, offset 3)."""
SHARED_INDEXERS = {"index_topk_freq": 4, "index_skip_topk_offset": 3}

GLM47_FLASH_CONFIG: dict[str, Any] = {
    "architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite", "dtype": "bfloat16", "attention_bias": False,
    "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 10240, "max_position_embeddings": 202752,
    "moe_intermediate_size": 1536, "topk_method": "noaux_tc", "norm_topk_prob": True, "num_attention_heads": 20, "n_group": 1,
    "topk_group": 1, "n_routed_experts": 64, "n_shared_experts": 1, "routed_scaling_factor": 1.8, "num_experts_per_tok": 4,
    "first_k_dense_replace": 1, "num_hidden_layers": 47, "num_key_value_heads": 20, "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 1.0, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 1000000,
    "tie_word_embeddings": False, "q_lora_rank": 768, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64,
    "v_head_dim": 256, "vocab_size": 154880,
}  # fmt: skip
"""zai-org/GLM-4.7-Flash; its MTP block has an embedding and a head of its own."""
GLM45_AIR_CONFIG: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "dtype": "bfloat16", "num_hidden_layers": 46,
    "first_k_dense_replace": 1, "num_nextn_predict_layers": 1, "hidden_size": 4096, "intermediate_size": 10944,
    "moe_intermediate_size": 1408, "vocab_size": 151552, "n_routed_experts": 128, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128, "attention_bias": True,
    "use_qk_norm": False, "tie_word_embeddings": False,
}  # fmt: skip
GLM47_CONFIG: dict[str, Any] = {
    **GLM45_AIR_CONFIG, "num_hidden_layers": 92, "first_k_dense_replace": 3, "hidden_size": 5120, "intermediate_size": 12288,
    "moe_intermediate_size": 1536, "n_routed_experts": 160, "use_qk_norm": True,
}  # fmt: skip
DEEPSEEK_V3_CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "dtype": "bfloat16", "num_hidden_layers": 61,
    "first_k_dense_replace": 3, "num_nextn_predict_layers": 1, "hidden_size": 7168, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "vocab_size": 129280, "n_routed_experts": 256, "num_experts_per_tok": 8,
    "n_shared_experts": 1, "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "tie_word_embeddings": False,
    "topk_method": "noaux_tc", "scoring_func": "sigmoid", "n_group": 8, "topk_group": 4, "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "max_position_embeddings": 163840,
}  # fmt: skip
DEEPSEEK_V32_CONFIG: dict[str, Any] = {
    **DEEPSEEK_V3_CONFIG, "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "index_head_dim": 128,
    "index_n_heads": 64, "index_topk": 2048, "hidden_act": "silu", "rms_norm_eps": 1e-06, "rope_theta": 10000,
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
}  # fmt: skip
"""deepseek-ai/DeepSeek-V3.2: DeepSeek-V3 with an indexer in every layer; norms are stored as FP32."""
KIMI_K2_CONFIG: dict[str, Any] = {
    **DEEPSEEK_V3_CONFIG, "model_type": "kimi_k2", "first_k_dense_replace": 1, "num_nextn_predict_layers": 0,
    "vocab_size": 163840, "n_routed_experts": 384, "num_attention_heads": 64, "num_key_value_heads": 64, "n_group": 1,
    "topk_group": 1, "max_position_embeddings": 131072,
}  # fmt: skip
KIMI_K2_THINKING_CONFIG: dict[str, Any] = {
    **KIMI_K2_CONFIG, "max_position_embeddings": 262144, "rms_norm_eps": 1e-05, "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827, "hidden_act": "silu",
}  # fmt: skip
"""moonshotai/Kimi-K2-Thinking: Kimi-K2 with its routed experts in INT4."""
QWEN3_30B_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "dtype": "bfloat16", "num_hidden_layers": 48,
    "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "vocab_size": 151936, "num_experts": 128,
    "num_experts_per_tok": 8, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "mlp_only_layers": [],
    "tie_word_embeddings": False,
}  # fmt: skip
QWEN3_NEXT_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643, "decoder_sparse_step": 1,
    "eos_token_id": 151645, "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu", "hidden_size": 2048,
    "initializer_range": 0.02, "intermediate_size": 5120, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128,
    "max_position_embeddings": 262144, "mlp_only_layers": [], "model_type": "qwen3_next", "moe_intermediate_size": 512,
    "norm_topk_prob": True, "num_attention_heads": 16, "num_experts": 512, "num_experts_per_tok": 10,
    "num_hidden_layers": 48, "num_key_value_heads": 2, "output_router_logits": False, "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 10000000, "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 512, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.57.0.dev0", "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
"""All keys of the published config.json of Qwen3-Next-80B-A3B: it says nothing of the MTP block that its index lists."""

FP8_RELEASES = ("deepseek-v3", "deepseek-v3.2", "kimi-k2", "minimax-m2", "mimo-v2-flash")
"""Models whose source is published in FP8 only."""
FP8_BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
STACKED_RELEASES = ("step-3.5-flash",)
"""Models that are published with the experts of a layer in three 3-D tensors."""
JOINED_RELEASES = ("mimo-v2.5",)
"""Models that are published in FP8 with queries, keys and values of a layer in one tensor."""
DEEPSEEK_V4 = ("deepseek-v4-flash", "deepseek-v4-pro")
"""Models that are published with experts in FP4 and other linears in FP8."""
O_PROJ_IN_16_BITS = ("mimo-v2-flash",)
"""Models whose FP8 release keeps `o_proj` and lists it under `ignored_layers`."""
CHANNEL_RELEASES = ("glm-4.5-air", "glm-4.7")
"""Model recipes whose FP8 reference was made by llm-compressor, one scale per row. GLM-4.7-FP8 is taken to be like the Air."""
_FP8 = {"type": "float", "num_bits": 8, "symmetric": True}
FP8_CHANNELS = {
    "quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed",
    "ignore": ["lm_head", r"re:.*\.mlp\.gate$", r"re:.*\.eh_proj$"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"], "weights": {**_FP8, "strategy": "channel", "dynamic": False},
            "input_activations": {**_FP8, "strategy": "token", "dynamic": True},
        }
    },
}  # fmt: skip
IN_FP32 = {
    "deepseek-v3.2": r"norm\.", "minimax-m2": r"\.gate\.weight", "ernie-4.5-21b": r"\.gate\.weight",
    **dict.fromkeys(("qwen3.5-35b-a3b", "qwen3.5-35b-a3b-text"), r"linear_attn\.(A_log|norm\.weight)"),
    **dict.fromkeys(("deepseek-v4-flash", "deepseek-v4-pro"), rf"^{hollow_deepseek_v4.IN_FP32.pattern}$"),
}  # fmt: skip
"""Model -> which names are stored as FP32 beside the router's bias."""
INT4_RELEASES = ("kimi-k2-thinking", "kimi-k2.5")
"""Models whose source is published with its routed experts in INT4 only."""
INT4_EXPERTS = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"],
    "config_groups": {"group_0": {
        "targets": ["Linear"], "input_activations": None, "output_activations": None,
        "weights": {"actorder": None, "block_structure": None, "dynamic": False, "group_size": 32, "num_bits": 4,
                    "observer": "minmax", "observer_kwargs": {}, "strategy": "group", "symmetric": True, "type": "int"},
    }},
}  # fmt: skip
"""`quantization_config` of Kimi-K2-Thinking and Kimi-K2.5."""
LISTED_RELEASES = (
    "nemotron-3-super", "qwen3-30b-a3b", "qwen3-next-80b-a3b", "qwen3.5-35b-a3b", "qwen3.5-35b-a3b-text",
)  # fmt: skip
"""Model recipes whose FP8 reference lists what it keeps in `modules_to_not_convert`: vLLM would quantize their routers, or
`eh_proj`."""
IN_FP8 = re.compile(
    r".*(?<!\.eh)(?<!\.weights)_proj(_with_mqa|_qkvz)?\.weight|.*\.indexer\.(wq_b|wk)\.weight|.*\.experts\.\d+\.w[123]\.weight"
)
"""Weights that are FP8 in these releases: every linear but `eh_proj`, `indexer.weights_proj`, and Qwen3-Next's `in_proj_ba`
(https://github.com/vllm-project/vllm/pull/25079)."""


# ------------------------------------------------------------------------------------------------ names and shapes
def glm5_shapes(config: dict[str, Any], indexers: set[int] | None = None, *, mtp_head: bool = False) -> Shapes:
    """MLA + MoE with indexers in layers `indexers` (None: none at all), MTP layers inlined; DeepSeek-V3 and Kimi-K2 too.

    mtp_head: whether the MTP block has an embedding and a head of its own (DeepSeek-V3 has, GLM-5 has not).
    """
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for layer in range(layers + config["num_nextn_predict_layers"]):
        prefix = f"model.layers.{layer}"
        yield from _norms(prefix, hidden)
        yield from _mla(f"{prefix}.self_attn", config)
        if indexers is not None and (layer in indexers or layer >= layers):
            yield from _indexer(f"{prefix}.self_attn.indexer", config)
        yield from _glm_mlp(prefix, config, layer)
        if layer >= layers:
            yield from _mtp_extras(prefix, config, head=mtp_head)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (config["vocab_size"], hidden)


def glm4_shapes(config: dict[str, Any], *, mtp_head: bool = True) -> Shapes:
    """Grouped-query attention + MoE, MTP layers inlined."""
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for layer in range(layers + config["num_nextn_predict_layers"]):
        prefix = f"model.layers.{layer}"
        yield from _norms(prefix, hidden)
        yield from _gqa(f"{prefix}.self_attn", config, bias=config["attention_bias"], qk_norm=config["use_qk_norm"])
        yield from _glm_mlp(prefix, config, layer)
        if layer >= layers:
            yield from _mtp_extras(prefix, config, head=mtp_head)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (config["vocab_size"], hidden)


def qwen3_moe_shapes(config: dict[str, Any]) -> Shapes:
    """Grouped-query attention with QK norm, every layer MoE, no MTP."""
    hidden = config["hidden_size"]
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        yield from _norms(prefix, hidden)
        yield from _gqa(f"{prefix}.self_attn", config, bias=False, qk_norm=True)
        yield from _qwen_moe(prefix, config)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (config["vocab_size"], hidden)


def qwen3_next_shapes(config: dict[str, Any]) -> Shapes:
    """Three linear-attention layers, then one with full attention; MTP as `mtp.*`."""
    hidden = config["hidden_size"]
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        full = (layer + 1) % config["full_attention_interval"] == 0
        yield from _qwen_next_layer(prefix, config, full=full)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (config["vocab_size"], hidden)
    yield "mtp.fc.weight", (hidden, 2 * hidden)
    yield from _qwen_next_layer("mtp.layers.0", config, full=True)
    for norm in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        yield f"mtp.{norm}.weight", (hidden,)


def minimax_shapes(config: dict[str, Any]) -> Shapes:
    """Grouped-query attention with norms over all heads, every layer with experts, no MTP layer stored."""
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        yield from _norms(prefix, hidden)
        yield from _gqa(f"{prefix}.self_attn", config, bias=False, qk_norm=False)
        yield f"{prefix}.self_attn.q_norm.weight", (config["num_attention_heads"] * head_dim,)
        yield f"{prefix}.self_attn.k_norm.weight", (config["num_key_value_heads"] * head_dim,)
        moe, experts = f"{prefix}.block_sparse_moe", config["num_local_experts"]
        yield f"{moe}.gate.weight", (experts, hidden)
        yield f"{moe}.e_score_correction_bias", (experts,)
        for expert in range(experts):
            for name, shape in zip("123", _up_down_up(config), strict=True):
                yield f"{moe}.experts.{expert}.w{name}.weight", shape
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (config["vocab_size"], hidden)


def _up_down_up(config: dict[str, Any]) -> tuple[tuple[int, int], ...]:
    up = (config["intermediate_size"], config["hidden_size"])
    return up, up[::-1], up


def qwen35_text_shapes(config: dict[str, Any]) -> Shapes:
    """Qwen3-Next, MTP block included, but in its layers four inputs of linear attention, and experts in 3-D."""
    hidden, experts, width = config["hidden_size"], config["num_experts"], config["moe_intermediate_size"]
    for name, shape in qwen3_next_shapes(config):
        layer, is_expert, _ = name.partition(".mlp.experts.")
        if name.startswith("mtp.") or not name.startswith("model."):
            yield name, shape
        elif is_expert and name.endswith(".0.down_proj.weight"):
            yield f"{layer}.mlp.experts.gate_up_proj", (experts, 2 * width, hidden)
            yield f"{layer}.mlp.experts.down_proj", (experts, hidden, width)
        elif name.endswith("linear_attn.in_proj_qkvz.weight"):
            value = config["linear_num_value_heads"] * config["linear_value_head_dim"]
            yield name.replace("qkvz", "qkv"), (shape[0] - value, hidden)
            yield name.replace("qkvz", "z"), (value, hidden)
        elif name.endswith("linear_attn.in_proj_ba.weight"):
            yield name.replace("_ba", "_b"), (shape[0] // 2, hidden)
            yield name.replace("_ba", "_a"), (shape[0] // 2, hidden)
        elif not is_expert:
            yield name, shape


def qwen35_shapes(config: dict[str, Any]) -> Shapes:
    """The language model inside a multimodal one, and a vision tower."""
    for name, shape in qwen35_text_shapes(config["text_config"]):
        yield _wrapped(name) if name.startswith("model.") else name, shape
    yield from _qwen_vision(config["vision_config"])


def _wrapped(name: str) -> str:
    return name.replace("model.", "model.language_model.", 1)


def _qwen_vision(config: dict[str, Any]) -> Shapes:
    root, width, patch = "model.visual", config["hidden_size"], config["patch_size"]
    yield from _biased(f"{root}.patch_embed.proj", width, config["in_channels"], config["temporal_patch_size"], patch, patch)
    yield f"{root}.pos_embed.weight", (config["num_position_embeddings"], width)
    for number in range(config["depth"]):
        block = f"{root}.blocks.{number}"
        yield from _biased(f"{block}.norm1", width)
        yield from _biased(f"{block}.norm2", width)
        yield from _biased(f"{block}.attn.qkv", 3 * width, width)
        yield from _biased(f"{block}.attn.proj", width, width)
        yield from _biased(f"{block}.mlp.linear_fc1", config["intermediate_size"], width)
        yield from _biased(f"{block}.mlp.linear_fc2", width, config["intermediate_size"])
    merged = width * config["spatial_merge_size"] ** 2
    yield from _biased(f"{root}.merger.norm", width)
    yield from _biased(f"{root}.merger.linear_fc1", merged, merged)
    yield from _biased(f"{root}.merger.linear_fc2", config["out_hidden_size"], merged)


def kimi_k25_shapes(config: dict[str, Any]) -> Shapes:
    """DeepSeek-V3 without MTP layers under `language_model`, and a vision tower."""
    for name, shape in glm5_shapes(config["text_config"]):
        yield f"language_model.{name}", shape
    vision = config["vision_config"]
    width, wide, patch = vision["vt_hidden_size"], vision["vt_intermediate_size"], vision["patch_size"]
    merged = width * 4
    yield from _biased("mm_projector.pre_norm", width)
    yield from _biased("mm_projector.proj.0", merged, merged)
    yield from _biased("mm_projector.proj.2", vision["text_hidden_size"], merged)
    for number in range(vision["vt_num_hidden_layers"]):
        block = f"vision_tower.encoder.blocks.{number}"
        yield from _biased(f"{block}.norm0", width)
        yield from _biased(f"{block}.norm1", width)
        yield from _biased(f"{block}.wqkv", 3 * width, width)
        yield from _biased(f"{block}.wo", width, width)
        yield from _biased(f"{block}.mlp.fc0", wide, width)
        yield from _biased(f"{block}.mlp.fc1", width, wide)
    yield from _biased("vision_tower.encoder.final_layernorm", width)
    yield "vision_tower.patch_embed.pos_emb.weight", (vision["init_pos_emb_height"], vision["init_pos_emb_width"], width)
    yield from _biased("vision_tower.patch_embed.proj", width, 3, patch, patch)


def _biased(module: str, *shape: int) -> Shapes:
    yield f"{module}.weight", shape
    yield f"{module}.bias", shape[:1]


def ernie_shapes(config: dict[str, Any]) -> Shapes:
    """Grouped-query attention, experts from `moe_layer_start_index` on, an MTP block with a dense MLP beside the layers."""
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    blocks = range(config["num_nextn_predict_layers"])
    for prefix in (*(f"model.layers.{n}" for n in range(layers)), *(f"model.mtp_block.{n}" for n in blocks)):
        yield from _norms(prefix, hidden)
        yield from _gqa(f"{prefix}.self_attn", config, bias=False, qk_norm=False)
        if "mtp" in prefix or int(prefix.rpartition(".")[2]) < config["moe_layer_start_index"]:
            yield from _mlp(f"{prefix}.mlp", hidden, config["intermediate_size"])
        else:
            yield from _ernie_moe(f"{prefix}.mlp", config)
    for number in blocks:
        yield f"model.mtp_emb_norm.{number}.weight", (hidden,)
        yield f"model.mtp_hidden_norm.{number}.weight", (hidden,)
        yield f"model.mtp_linear_proj.{number}.weight", (hidden, 2 * hidden)
    yield "model.norm.weight", (hidden,)


def _ernie_moe(prefix: str, config: dict[str, Any]) -> Shapes:
    hidden, width, experts = config["hidden_size"], config["moe_intermediate_size"], config["moe_num_experts"]
    yield f"{prefix}.gate.weight", (experts, hidden)
    yield f"{prefix}.moe_statics.e_score_correction_bias", (1, experts)
    yield from _mlp(f"{prefix}.shared_experts", hidden, width * config["moe_num_shared_experts"])
    for expert in range(experts):
        yield from _mlp(f"{prefix}.experts.{expert}", hidden, width)


def _norms(prefix: str, hidden: int) -> Shapes:
    yield f"{prefix}.input_layernorm.weight", (hidden,)
    yield f"{prefix}.post_attention_layernorm.weight", (hidden,)


def _mla(prefix: str, config: dict[str, Any]) -> Shapes:
    hidden, heads, q_rank, kv_rank = (
        config[key] for key in ("hidden_size", "num_attention_heads", "q_lora_rank", "kv_lora_rank")
    )
    nope, rope, value = (config[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    yield f"{prefix}.q_a_proj.weight", (q_rank, hidden)
    yield f"{prefix}.q_a_layernorm.weight", (q_rank,)
    yield f"{prefix}.q_b_proj.weight", (heads * (nope + rope), q_rank)
    yield f"{prefix}.kv_a_proj_with_mqa.weight", (kv_rank + rope, hidden)
    yield f"{prefix}.kv_a_layernorm.weight", (kv_rank,)
    yield f"{prefix}.kv_b_proj.weight", (heads * (nope + value), kv_rank)
    yield f"{prefix}.o_proj.weight", (hidden, heads * value)


def _indexer(prefix: str, config: dict[str, Any]) -> Shapes:
    heads, head_dim = config["index_n_heads"], config["index_head_dim"]
    yield f"{prefix}.wq_b.weight", (heads * head_dim, config["q_lora_rank"])
    yield f"{prefix}.wk.weight", (head_dim, config["hidden_size"])
    yield f"{prefix}.k_norm.weight", (head_dim,)
    yield f"{prefix}.k_norm.bias", (head_dim,)
    yield f"{prefix}.weights_proj.weight", (heads, config["hidden_size"])


def _gqa(prefix: str, config: dict[str, Any], *, bias: bool, qk_norm: bool, q_gate: int = 1) -> Shapes:
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    q_size, kv_size = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    for name, size in (("q", q_size * q_gate), ("k", kv_size), ("v", kv_size)):
        yield f"{prefix}.{name}_proj.weight", (size, hidden)
        if bias:
            yield f"{prefix}.{name}_proj.bias", (size,)
    yield f"{prefix}.o_proj.weight", (hidden, q_size)
    if qk_norm:
        yield f"{prefix}.q_norm.weight", (head_dim,)
        yield f"{prefix}.k_norm.weight", (head_dim,)


def _mlp(prefix: str, hidden: int, intermediate: int) -> Shapes:
    yield f"{prefix}.down_proj.weight", (hidden, intermediate)
    yield f"{prefix}.gate_proj.weight", (intermediate, hidden)
    yield f"{prefix}.up_proj.weight", (intermediate, hidden)


def _glm_mlp(prefix: str, config: dict[str, Any], layer: int) -> Shapes:
    hidden, experts = config["hidden_size"], config["n_routed_experts"]
    if layer < config["first_k_dense_replace"]:
        yield from _mlp(f"{prefix}.mlp", hidden, config["intermediate_size"])
        return
    yield f"{prefix}.mlp.gate.weight", (experts, hidden)
    yield f"{prefix}.mlp.gate.e_score_correction_bias", (experts,)
    yield from _mlp(f"{prefix}.mlp.shared_experts", hidden, config["moe_intermediate_size"] * config["n_shared_experts"])
    for expert in range(experts):
        yield from _mlp(f"{prefix}.mlp.experts.{expert}", hidden, config["moe_intermediate_size"])


def _qwen_moe(prefix: str, config: dict[str, Any]) -> Shapes:
    yield f"{prefix}.mlp.gate.weight", (config["num_experts"], config["hidden_size"])
    for expert in range(config["num_experts"]):
        yield from _mlp(f"{prefix}.mlp.experts.{expert}", config["hidden_size"], config["moe_intermediate_size"])


def _qwen_next_layer(prefix: str, config: dict[str, Any], *, full: bool) -> Shapes:
    hidden = config["hidden_size"]
    yield from _norms(prefix, hidden)
    if full:
        yield from _gqa(f"{prefix}.self_attn", config, bias=False, qk_norm=True, q_gate=2)
    else:
        key_size = config["linear_num_key_heads"] * config["linear_key_head_dim"]
        value_heads, value_dim = config["linear_num_value_heads"], config["linear_value_head_dim"]
        value_size = value_heads * value_dim
        yield f"{prefix}.linear_attn.A_log", (value_heads,)
        yield f"{prefix}.linear_attn.dt_bias", (value_heads,)
        yield f"{prefix}.linear_attn.conv1d.weight", (2 * key_size + value_size, 1, config["linear_conv_kernel_dim"])
        yield f"{prefix}.linear_attn.in_proj_qkvz.weight", (2 * key_size + 2 * value_size, hidden)
        yield f"{prefix}.linear_attn.in_proj_ba.weight", (2 * value_heads, hidden)
        yield f"{prefix}.linear_attn.norm.weight", (value_dim,)
        yield f"{prefix}.linear_attn.out_proj.weight", (hidden, value_size)
    yield from _qwen_moe(prefix, config)
    yield from _mlp(f"{prefix}.mlp.shared_expert", hidden, config["shared_expert_intermediate_size"])
    yield f"{prefix}.mlp.shared_expert_gate.weight", (1, hidden)


def _mtp_extras(prefix: str, config: dict[str, Any], *, head: bool) -> Shapes:
    hidden = config["hidden_size"]
    yield f"{prefix}.eh_proj.weight", (hidden, 2 * hidden)
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        yield f"{prefix}.{norm}.weight", (hidden,)
    if head:
        yield f"{prefix}.embed_tokens.weight", (config["vocab_size"], hidden)
        yield f"{prefix}.shared_head.head.weight", (config["vocab_size"], hidden)


# ------------------------------------------------------------------------------------------------ files
def dtype_of(name: str) -> str:
    """Published checkpoints are BF16 but for the router's bias."""
    return "F32" if name.endswith(("e_score_correction_bias", "router_bias")) else "BF16"


def write_hollow(
    folder: Path, config: dict[str, Any], shapes: Shapes, *, shards: int, dtypes: dict[str, str] | None = None
) -> Path:
    """Sparse shards of about equal size with an index. dtypes: name -> dtype where it is not `dtype_of`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    tensors = [(name, (dtypes or {}).get(name, dtype_of(name)), shape) for name, shape in shapes]
    total = sum(math.prod(shape) * DTYPE_BYTES[dtype] for _, dtype, shape in tensors)
    pieces: list[list[tuple[str, str, tuple[int, ...]]]] = [[] for _ in range(shards)]
    done = 0
    for name, dtype, shape in tensors:
        pieces[min(shards - 1, done * shards // total)].append((name, dtype, shape))
        done += math.prod(shape) * DTYPE_BYTES[dtype]
    weight_map = {}
    for number, piece in enumerate(pieces):
        file = "model.safetensors" if shards == 1 else f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        write_hollow_shard(folder / file, piece)
        weight_map.update({name: file for name, _, _ in piece})
    if shards > 1:
        write_index(folder, weight_map, total)
    return folder


def write_index(folder: Path, weight_map: dict[str, str], total: int) -> None:
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def write_hollow_shard(path: Path, tensors: list[tuple[str, str, tuple[int, ...]]]) -> None:
    """One safetensors file with a true header and holes for data."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, dtype, shape in tensors:
        end = position + math.prod(shape) * DTYPE_BYTES[dtype]
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + position)


def hollow_glm5(folder: Path, *, own_indexers: bool = False) -> Path:
    """GLM-5 at full size, 282 shards. Default: 59,585 tensors, as in GLM-5.2 and 5.3 (57 layers share an indexer);
    own_indexers: 59,870 tensors, as in GLM-5 (every layer has one)."""
    indexers = set(range(78)) if own_indexers else GLM52_INDEXERS
    extra = {} if own_indexers else SHARED_INDEXERS
    return write_hollow(folder, {**GLM5_CONFIG, **extra}, glm5_shapes(GLM5_CONFIG, indexers), shards=282)


def hollow_glm5_fp8(folder: Path, *, shards: int = 141) -> Path:
    """The FP8 release of GLM-5.2 at full size: 118,629 tensors, 756 GB."""
    config = {**GLM5_CONFIG, **SHARED_INDEXERS, "quantization_config": FP8_BLOCKS}
    shapes, dtypes = fp8_blocks(glm5_shapes(GLM5_CONFIG, GLM52_INDEXERS))
    return write_hollow(folder, config, shapes, shards=shards, dtypes=dtypes)


def fp8_blocks(shapes: Shapes, kept_part: str | None = None) -> tuple[Shapes, dict[str, str]]:
    """(names and shapes of an FP8 release, dtypes of what is not as `dtype_of` says): scales behind each FP8 weight.

    kept_part: of names that stay in 16 bits all the same.
    """
    made: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, str] = {}
    for name, shape in shapes:
        made[name] = shape
        if IN_FP8.fullmatch(name) and (kept_part is None or kept_part not in name):
            scale = f"{name}_scale_inv"
            made[scale] = (math.ceil(shape[0] / 128), math.ceil(shape[1] / 128))
            dtypes |= {name: "F8_E4M3", scale: "F32"}
    return iter(made.items()), dtypes


def hollow_model(
    folder: Path,
    model: str,
    *,
    layers: int = 4,
    experts: int = 4,
    shards: int = 3,
    dense: int | None = None,
    release: bool = False,
) -> Path:
    """A hollow checkpoint with the true shapes of a model recipe, but fewer layers and experts; FP8 where the release is.

    dense: layers without experts, at the beginning; None: as many as the model has. release: the reference that the recipe
    names, in the format in which it is published, instead of the source.
    """
    base, shapes_of = MODELS[model]
    config = changed(hollow_hybrids.cut_to(base, layers), num_hidden_layers=layers, **{_experts_key(base): experts})
    if dense is not None and "first_k_dense_replace" in base:
        config["first_k_dense_replace"] = dense
    vision = base.get("vision_config", {})
    if "depth" in vision:
        config["vision_config"] = {**vision, "depth": 2}
    if "vt_num_hidden_layers" in vision:  # Kimi-K2.5's config has not the name under which vLLM asks for it
        config["vision_config"] = {**vision, "vt_num_hidden_layers": 2, "num_hidden_layers": 2}
    shapes, dtypes = as_published(config, shapes_of(config), model, release=release)
    return write_hollow(folder, config, shapes, shards=shards, dtypes=dtypes)


def changed(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """`config` with other values of what describes the language model, in its `text_config` if it has one."""
    if "text_config" in config:
        return {**config, "text_config": {**config["text_config"], **changes}}
    return {**config, **changes}


def one_by_one(shapes: Shapes) -> Shapes:
    """`shapes` with experts that are stored in 3-D one by one."""
    for name, shape in shapes:
        layer, _, leaf = name.partition(".experts.")
        for expert in range(shape[0]) if leaf in FUSED_PARTS else ():
            for part in FUSED_PARTS[leaf]:
                yield f"{layer}.experts.{expert}.{part}.weight", (shape[1] // len(FUSED_PARTS[leaf]), shape[2])
        if leaf not in FUSED_PARTS:
            yield name, shape


def int4_experts(shapes: Shapes) -> tuple[Shapes, dict[str, str]]:
    """As `fp8_blocks`, for routed experts in INT4: codes in words of 32 bits, a BF16 scale for 32 columns, the shape."""
    made: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, str] = {}
    for name, shape in shapes:
        if ".mlp.experts." not in name:
            made[name] = shape
            continue
        rows, columns = shape
        made |= {f"{name}_packed": (rows, columns // 8), f"{name}_scale": (rows, columns // 32), f"{name}_shape": (2,)}
        dtypes |= {f"{name}_packed": "I32", f"{name}_shape": "I32"}
    return iter(made.items()), dtypes


def hollow_shapes(folder: Path, model: str, *, release: bool = False) -> Path:
    """All layers of a model recipe at true shapes, with two experts a layer; `at_true_size` puts the rest into sums.

    release: as of `hollow_model`.
    """
    base, shapes_of = MODELS[model]
    config = changed(base, **{_experts_key(base): 2})
    indexers = {"glm-5": set(range(78)), "glm-5.2": GLM52_INDEXERS}
    every = glm5_shapes(config, indexers[model]) if model in indexers else shapes_of(config)
    shapes, dtypes = as_published(config, every, model, release=release)
    return write_hollow(folder, config, shapes, shards=1, dtypes=dtypes)


def _experts_key(config: dict[str, Any]) -> str:
    text = config.get("text_config", config)
    return next(key for key in ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts") if key in text)


def as_published(config: dict[str, Any], shapes: Shapes, model: str, *, release: bool) -> tuple[Shapes, dict[str, str]]:
    """Names and shapes, and dtypes, of the source or the release; the latter's `quantization_config` is put into `config`."""
    if model in DEEPSEEK_V4:
        config["quantization_config"] = hollow_deepseek_v4.QUANTIZATION
        return hollow_deepseek_v4.as_published(shapes)
    if model in JOINED_RELEASES:
        every = list(shapes)
        ignored = [
            name.removesuffix(".weight") for name, _ in every if re.fullmatch(r"model\.layers\..*\.o_proj\.weight", name)
        ]
        ignored.append("model.decoder.self_attn.o_proj")
        config["quantization_config"] = {**FP8_BLOCKS, "store_dtype": "fp8", "ignored_layers": ignored}
        return hollow_mimo.as_published(config, iter(every), IN_FP8)
    if model in STACKED_RELEASES:
        return hollow_hybrids.stacked(shapes), {}
    if model in CHANNEL_RELEASES and release:
        config["quantization_config"] = FP8_CHANNELS
        return fp8_channels(shapes)
    if model in FP8_RELEASES or release:
        every = list(shapes)
        config["quantization_config"] = MINIMAX_FP8 if model == "minimax-m2" else FP8_BLOCKS
        if model in LISTED_RELEASES:
            kept = [name.removesuffix(".weight") for name, shape in every if len(shape) > 1 and not IN_FP8.fullmatch(name)]
            config["quantization_config"] = {**FP8_BLOCKS, "modules_to_not_convert": kept}
        kept_part = ".o_proj." if model in O_PROJ_IN_16_BITS else None
        if kept_part is not None:
            ignored = [name.removesuffix(".weight") for name, _ in every if kept_part in name]
            config["quantization_config"] = {**FP8_BLOCKS, "ignored_layers": ignored}
        made, dtypes = fp8_blocks(iter(every), kept_part)
        return made, dtypes | in_fp32(model, every)
    if model in INT4_RELEASES:
        config.get("text_config", config)["quantization_config"] = INT4_EXPERTS
        return int4_experts(shapes)
    every = list(shapes)
    return iter(every), in_fp32(model, every)


def in_fp32(model: str, shapes: list[tuple[str, tuple[int, ...]]]) -> dict[str, str]:
    """Dtypes of the names that `model` stores as FP32 against `dtype_of`."""
    return {name: "F32" for name, _ in shapes if model in IN_FP32 and re.search(IN_FP32[model], name)}


def fp8_channels(shapes: Shapes) -> tuple[Shapes, dict[str, str]]:
    """As `fp8_blocks`, with one scale per row, as llm-compressor makes it."""
    made: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, str] = {}
    for name, shape in shapes:
        made[name] = shape
        if IN_FP8.fullmatch(name):
            made[f"{name}_scale"] = (shape[0], 1)
            dtypes |= {name: "F8_E4M3"}
    return iter(made.items()), dtypes


def at_true_size(model: StoredModel, name: str) -> StoredModel:
    """A model of `hollow_shapes` with the bytes of all its experts; for sums only."""
    base, _ = MODELS[name]
    factor = base.get("text_config", base)[_experts_key(base)] // 2
    weights = (
        weight._replace(num_bytes=weight.num_bytes * factor) if ".mlp.experts." in weight.name else weight
        for weight in model.weights
    )
    return replace(model, weights=tuple(weights))


MODELS: dict[str, tuple[dict[str, Any], Any]] = {
    "glm-5": (GLM5_CONFIG, lambda config: glm5_shapes(config, set(range(config["num_hidden_layers"])))),
    "glm-5.2": ({**GLM5_CONFIG, **SHARED_INDEXERS}, lambda config: glm5_shapes(config, {0, 1, 2})),
    "glm-4.5-air": (GLM45_AIR_CONFIG, glm4_shapes),
    "glm-4.7": (GLM47_CONFIG, lambda config: glm4_shapes(config, mtp_head=False)),
    "deepseek-v3": (DEEPSEEK_V3_CONFIG, lambda config: glm5_shapes(config, mtp_head=True)),
    "deepseek-v3.2": (
        DEEPSEEK_V32_CONFIG,
        lambda config: glm5_shapes(config, set(range(config["num_hidden_layers"])), mtp_head=True),
    ),
    "kimi-k2": (KIMI_K2_CONFIG, glm5_shapes),
    "kimi-k2-thinking": (KIMI_K2_THINKING_CONFIG, glm5_shapes),
    "glm-4.7-flash": (GLM47_FLASH_CONFIG, lambda config: glm5_shapes(config, mtp_head=True)),
    "qwen3-30b-a3b": (QWEN3_30B_CONFIG, qwen3_moe_shapes),
    "qwen3-next-80b-a3b": (QWEN3_NEXT_CONFIG, qwen3_next_shapes),
    "minimax-m2": (MINIMAX_M2, minimax_shapes),
    "qwen3.5-35b-a3b": (QWEN35_35B, qwen35_shapes),
    "qwen3.5-35b-a3b-text": (QWEN35_35B_TEXT, qwen35_text_shapes),
    "kimi-k2.5": (KIMI_K25, kimi_k25_shapes),
    "ernie-4.5-21b": (ERNIE_45_21B, ernie_shapes),
    **hollow_hybrids.MODELS,
    "mimo-v2.5": (hollow_mimo.MIMO_V25_CONFIG, hollow_mimo.mimo_v25_shapes),
    "deepseek-v4-flash": (hollow_deepseek_v4.DEEPSEEK_V4_FLASH_CONFIG, hollow_deepseek_v4.deepseek_v4_shapes),
    "deepseek-v4-pro": (hollow_deepseek_v4.DEEPSEEK_V4_PRO_CONFIG, hollow_deepseek_v4.deepseek_v4_shapes),
}
"""Model recipe -> (config, names and shapes)."""
