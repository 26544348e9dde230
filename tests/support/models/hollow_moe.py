"""Mixture-of-experts models beside those of `hollow.py`: configs as published, and the names and shapes of their tensors.

What a config says is the published model's, but for towers, which are small, and lists of layers,
    which are cut to four. The names
are held against what transformers writes where it has the model (`test_hollow_moe.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hollow
import hollow_deepseek_v41
import hollow_hybrids
import hollow_later
from hollow_parts import (
    NORMS,
    SMALL,
    TEXT,
    W123,
    Config,
    Model,
    Shapes,
    experts_of,
    gqa_of,
    linears,
    mlp_of,
    norms_of,
    whole_model,
)
from towers import tower_shapes

from assay.recipes.text_config import changing_text, text_of

# ------------------------------------------------------------------------------------------------ Mixtral, OLMoE, Phi-3.5-MoE,
MIXTRAL = TEXT | {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336,
    "max_position_embeddings": 32768, "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "num_local_experts": 8, "rms_norm_eps": 1e-05, "rope_theta": 1e6, "sliding_window": None,
    "vocab_size": 32000,
}  # fmt: skip


def mixtral_layer(prefix: str, text: Config, number: int) -> Shapes:
    hidden = text["hidden_size"]
    yield from norms_of(prefix, hidden, *NORMS)
    yield from gqa_of(f"{prefix}.self_attn", text)
    yield f"{prefix}.block_sparse_moe.gate.weight", (text["num_local_experts"], hidden)
    yield from experts_of(
        f"{prefix}.block_sparse_moe.experts", text["num_local_experts"], hidden, text["intermediate_size"], W123
    )


PHIMOE = TEXT | {
    "architectures": ["PhiMoEForCausalLM"], "model_type": "phimoe", "attention_bias": True, "hidden_size": 4096,
    "intermediate_size": 6400, "lm_head_bias": True, "max_position_embeddings": 131072, "num_attention_heads": 32,
    "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 16, "rms_norm_eps": 1e-05,
    "original_max_position_embeddings": 4096, "rope_theta": 10000.0, "router_jitter_noise": 0.01, "sliding_window": 131072,
    "vocab_size": 32064,
}  # fmt: skip


def phimoe_shapes(config: Config) -> Shapes:
    """Mixtral's layers with biases of attention and norms, and of the head."""
    hidden = config["hidden_size"]

    def layer(prefix: str, text: Config, number: int) -> Shapes:
        yield from norms_of(prefix, hidden, *NORMS, bias=True)
        yield from gqa_of(f"{prefix}.self_attn", text, bias=True)
        yield from (item for item in mixtral_layer(prefix, text, number) if "block_sparse_moe" in item[0])

    yield from whole_model(config, layer)
    yield "model.norm.bias", (hidden,)
    yield "lm_head.bias", (config["vocab_size"],)


OLMOE = TEXT | {
    "architectures": ["OlmoeForCausalLM"], "model_type": "olmoe", "attention_bias": False, "clip_qkv": None,
    "hidden_size": 2048,
    "intermediate_size": 1024, "max_position_embeddings": 4096, "norm_topk_prob": False, "num_attention_heads": 16,
    "num_experts": 64, "num_experts_per_tok": 8, "num_hidden_layers": 16, "num_key_value_heads": 16, "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0, "vocab_size": 50304,
}  # fmt: skip


def olmoe_layer(prefix: str, text: Config, number: int) -> Shapes:
    """Norms over all heads together."""
    hidden = text["hidden_size"]
    yield from norms_of(prefix, hidden, *NORMS)
    yield from gqa_of(f"{prefix}.self_attn", text)
    for norm, heads in (("q_norm", "num_attention_heads"), ("k_norm", "num_key_value_heads")):
        yield f"{prefix}.self_attn.{norm}.weight", (hidden // text["num_attention_heads"] * text[heads],)
    yield f"{prefix}.mlp.gate.weight", (text["num_experts"], hidden)
    yield from experts_of(f"{prefix}.mlp.experts", text["num_experts"], hidden, text["intermediate_size"])


QWEN2_MOE = TEXT | {
    "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "decoder_sparse_step": 1, "hidden_size": 3584,
    "intermediate_size": 18944, "max_position_embeddings": 32768, "moe_intermediate_size": 2560, "norm_topk_prob": False,
    "num_attention_heads": 28, "num_experts": 64, "num_experts_per_tok": 8, "num_hidden_layers": 28, "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06, "rope_theta": 1e6, "shared_expert_intermediate_size": 20480, "use_sliding_window": False,
    "vocab_size": 151936,
}  # fmt: skip
"""Qwen2-57B-A14B."""


def qwen2_moe_layer(prefix: str, text: Config, number: int) -> Shapes:
    hidden = text["hidden_size"]
    yield from norms_of(prefix, hidden, *NORMS)
    yield from gqa_of(f"{prefix}.self_attn", text, bias=True, o_bias=False)
    yield f"{prefix}.mlp.gate.weight", (text["num_experts"], hidden)
    yield from experts_of(f"{prefix}.mlp.experts", text["num_experts"], hidden, text["moe_intermediate_size"])
    yield from mlp_of(f"{prefix}.mlp.shared_expert", hidden, text["shared_expert_intermediate_size"])
    yield f"{prefix}.mlp.shared_expert_gate.weight", (1, hidden)


# ------------------------------------------------------------------------------------------------ wrapped in multimodal models
QWEN_VISION = {
    "depth": 1, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 96, "in_channels": 3, "intermediate_size": 160,
    "num_heads": 8,
    "num_position_embeddings": 16, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2,
    "deepstack_visual_indexes": [0],
}  # fmt: skip
MROPE = {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"}
QWEN3_VL_TEXT = TEXT | {
    "model_type": "qwen3_vl_moe_text", "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128, "hidden_size": 2048,
    "intermediate_size": 6144, "max_position_embeddings": 262144, "mlp_only_layers": [], "moe_intermediate_size": 768,
    "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
    "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_scaling": MROPE, "rope_theta": 5e6, "vocab_size": 151936,
}  # fmt: skip
QWEN3_VL_MOE = {
    "architectures": ["Qwen3VLMoeForConditionalGeneration"], "model_type": "qwen3_vl_moe", "image_token_id": 151655,
    "text_config": QWEN3_VL_TEXT, "tie_word_embeddings": False, "video_token_id": 151656,
    "vision_config": QWEN_VISION | {"model_type": "qwen3_vl_moe", "out_hidden_size": 2048},
    "vision_end_token_id": 151653, "vision_start_token_id": 151652,
}  # fmt: skip
"""Qwen3-VL-30B-A3B."""


def _qwen3_attention(prefix: str, text: Config) -> Shapes:
    yield from norms_of(prefix, text["hidden_size"], *NORMS)
    yield from gqa_of(f"{prefix}.self_attn", text)
    yield from norms_of(f"{prefix}.self_attn", text["head_dim"], "q_norm", "k_norm")


def qwen3_vl_layer(prefix: str, text: Config, number: int) -> Shapes:
    """Experts as they are published: [experts, inputs, outputs], gate and up side by side."""
    hidden, experts, width = text["hidden_size"], text["num_experts"], text["moe_intermediate_size"]
    yield from _qwen3_attention(prefix, text)
    yield f"{prefix}.mlp.gate.weight", (experts, hidden)
    yield f"{prefix}.mlp.experts.gate_up_proj", (experts, hidden, 2 * width)
    yield f"{prefix}.mlp.experts.down_proj", (experts, width, hidden)


QWEN3_OMNI_MOE = {
    "architectures": ["Qwen3OmniMoeForConditionalGeneration"], "model_type": "qwen3_omni_moe", "enable_audio_output": False,
    "thinker_config": {
        "model_type": "qwen3_omni_moe_thinker", "audio_token_id": 151675, "image_token_id": 151655, "video_token_id": 151656,
        "audio_start_token_id": 151669, "vision_start_token_id": 151652, "position_id_per_seconds": 13, "dtype": "bfloat16",
        "text_config": QWEN3_VL_TEXT | {"model_type": "qwen3_omni_moe_text", "max_position_embeddings": 65536,
        "rope_theta": 1e6},
        "vision_config": QWEN_VISION | {"model_type": "qwen3_omni_moe_vision_encoder", "image_size": 64,
        "apply_vit_abs_pos_embed": True,
        "out_hidden_size": 2048},
        "audio_config": {
            "model_type": "qwen3_omni_moe_audio_encoder", "d_model": 64, "downsample_hidden_size": 32,
            "encoder_attention_heads": 8,
            "encoder_ffn_dim": 96, "encoder_layers": 1, "max_source_positions": 1500, "n_window": 50, "n_window_infer": 800,
            "num_mel_bins": 128, "output_dim": 2048, "conv_chunksize": 500,
        },
    },
}  # fmt: skip
"""Qwen3-Omni-30B-A3B without what speaks (`talker`, `code2wav`)."""


def qwen3_omni_layer(prefix: str, text: Config, number: int) -> Shapes:
    yield from _qwen3_attention(prefix, text)
    yield f"{prefix}.mlp.gate.weight", (text["num_experts"], text["hidden_size"])
    yield from experts_of(f"{prefix}.mlp.experts", text["num_experts"], text["hidden_size"], text["moe_intermediate_size"])


GLM4V_MOE = {
    "architectures": ["Glm4vMoeForConditionalGeneration"], "model_type": "glm4v_moe", "image_token_id": 151363,
    "video_token_id": 151364,
    "image_start_token_id": 151339, "image_end_token_id": 151340, "video_start_token_id": 151341, "video_end_token_id": 151342,
    "text_config": TEXT | {
        "model_type": "glm4v_moe_text", "attention_bias": True, "first_k_dense_replace": 1, "head_dim": 128,
        "hidden_size": 4096,
        "intermediate_size": 10944, "max_position_embeddings": 65536, "moe_intermediate_size": 1408, "n_group": 1,
        "n_routed_experts": 128, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 96,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 46, "num_key_value_heads": 8, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05,
        "rope_scaling": {"mrope_section": [8, 12, 12], "rope_type": "default"}, "rope_theta": 10000.0,
        "routed_scaling_factor": 1.0,
        "topk_group": 1, "use_qk_norm": False, "vocab_size": 151552,
    },
    "tie_word_embeddings": False,
    "vision_config": {
        "model_type": "glm4v_moe_vision", "attention_bias": False, "depth": 1, "hidden_act": "silu", "hidden_size": 96,
        "image_size": 336,
        "in_channels": 3, "intermediate_size": 160, "num_heads": 8, "out_hidden_size": 4096, "patch_size": 14,
        "rms_norm_eps": 1e-05,
        "spatial_merge_size": 2, "temporal_patch_size": 2,
    },
}  # fmt: skip
"""GLM-4.5V."""


def glm4v_moe_layer(prefix: str, text: Config, number: int) -> Shapes:
    hidden, experts, width = text["hidden_size"], text["n_routed_experts"], text["moe_intermediate_size"]
    yield from norms_of(prefix, hidden, *NORMS)
    yield from gqa_of(f"{prefix}.self_attn", text, bias=True, o_bias=False)
    if number < text["first_k_dense_replace"]:
        yield from mlp_of(f"{prefix}.mlp", hidden, text["intermediate_size"])
        return
    yield f"{prefix}.mlp.gate.weight", (experts, hidden)
    yield f"{prefix}.mlp.gate.e_score_correction_bias", (experts,)
    yield from mlp_of(f"{prefix}.mlp.shared_experts", hidden, width * text["n_shared_experts"])
    yield from experts_of(f"{prefix}.mlp.experts", experts, hidden, width)


LLAMA4 = {
    "architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4", "boi_token_index": 200080,
    "eoi_token_index": 200081,
    "image_token_index": 200092, "tie_word_embeddings": False,
    "text_config": TEXT | {
        "model_type": "llama4_text", "attention_bias": False, "attention_chunk_size": 8192, "attn_scale": 0.1,
        "attn_temperature_tuning": True,
        "floor_scale": 8192, "for_llm_compressor": False, "head_dim": 128, "hidden_size": 5120, "interleave_moe_layer_step": 2,
        "intermediate_size": 8192, "intermediate_size_mlp": 16384, "max_position_embeddings": 1048576, "no_rope_layers": [1, 0],
        "num_attention_heads": 40, "num_experts_per_tok": 1, "num_hidden_layers": 48, "num_key_value_heads": 8,
        "num_local_experts": 128, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 500000.0,
        "router_aux_loss_coef": 0.001,
        "use_qk_norm": False, "vocab_size": 202048,
    },
    "vision_config": {
        "model_type": "llama4_vision_model", "hidden_act": "gelu", "hidden_size": 96, "image_size": 28,
        "intermediate_size": 384,
        "multi_modal_projector_bias": False, "norm_eps": 1e-05, "num_attention_heads": 8, "num_channels": 3,
        "num_hidden_layers": 1,
        "patch_size": 14, "pixel_shuffle_ratio": 0.5, "projector_dropout": 0.0, "projector_input_dim": 112,
        "projector_output_dim": 112,
        "rope_theta": 10000, "vision_feature_layer": -1, "vision_feature_select_strategy": "default", "vision_output_dim": 112,
    },
}  # fmt: skip
"""Llama-4-Maverick-17B-128E."""


def llama4_layer(prefix: str, text: Config, number: int) -> Shapes:
    hidden, experts, width = text["hidden_size"], text["num_local_experts"], text["intermediate_size"]
    yield from norms_of(prefix, hidden, *NORMS)
    yield from gqa_of(f"{prefix}.self_attn", text)
    if (number + 1) % text["interleave_moe_layer_step"]:
        yield from mlp_of(f"{prefix}.feed_forward", hidden, text["intermediate_size_mlp"])
        return
    yield f"{prefix}.feed_forward.router.weight", (experts, hidden)
    yield from mlp_of(f"{prefix}.feed_forward.shared_expert", hidden, width)
    yield f"{prefix}.feed_forward.experts.gate_up_proj", (experts, hidden, 2 * width)
    yield f"{prefix}.feed_forward.experts.down_proj", (experts, width, hidden)


GEMMA4 = {
    "architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "audio_config": None, "audio_token_id": 258881,
    "boi_token_id": 255999, "eoi_token_id": 258882, "image_token_id": 258880, "video_token_id": 258884, "boa_token_id": 256000,
    "eoa_token_index": 258883, "tie_word_embeddings": True, "dtype": "bfloat16",
    "text_config": {
        "model_type": "gemma4_text", "attention_bias": False, "attention_k_eq_v": True, "dtype": "bfloat16",
        "enable_moe_block": True,
        "final_logit_softcapping": 30.0, "global_head_dim": 512, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 2816, "hidden_size_per_layer_input": 0, "intermediate_size": 2112,
        "layer_types": ["sliding_attention", "full_attention"], "max_position_embeddings": 262144, "moe_intermediate_size": 704,
        "num_attention_heads": 16, "num_experts": 128, "num_global_key_value_heads": 2, "num_hidden_layers": 30,
        "num_key_value_heads": 8,
        "num_kv_shared_layers": 0, "rms_norm_eps": 1e-06, "sliding_window": 1024, "tie_word_embeddings": True,
        "top_k_experts": 8,
        "use_double_wide_mlp": False, "vocab_size": 262144, "vocab_size_per_layer_input": 262144,
        "rope_parameters": {
            "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"},
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
    },
    "vision_config": {
        "model_type": "gemma4_vision", "global_head_dim": 48, "head_dim": 48, "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 96,
        "intermediate_size": 160, "num_attention_heads": 2, "num_hidden_layers": 1, "num_key_value_heads": 2,
    },
}  # fmt: skip
"""Gemma 4 26B-A4B. Its layers with full attention have wider heads, fewer of them for keys, and no values of their own."""


def gemma4_layer(prefix: str, text: Config, number: int) -> Shapes:
    hidden, experts, width = text["hidden_size"], text["num_experts"], text["moe_intermediate_size"]
    full = text["layer_types"][number] == "full_attention"
    head = text["global_head_dim"] if full else text["head_dim"]
    kv_heads = text["num_global_key_value_heads"] if full else text["num_key_value_heads"]
    norms = ("post_feedforward_layernorm", "post_feedforward_layernorm_1", "post_feedforward_layernorm_2")
    yield from norms_of(prefix, hidden, *NORMS, *norms, "pre_feedforward_layernorm", "pre_feedforward_layernorm_2")
    for name, shape in gqa_of(f"{prefix}.self_attn", {**text, "head_dim": head, "num_key_value_heads": kv_heads}):
        if not (full and "v_proj" in name):
            yield name, shape
    yield from norms_of(f"{prefix}.self_attn", head, "q_norm", "k_norm")
    yield from mlp_of(f"{prefix}.mlp", hidden, text["intermediate_size"])
    yield f"{prefix}.router.proj.weight", (experts, hidden)
    yield f"{prefix}.router.scale", (hidden,)
    yield f"{prefix}.router.per_expert_scale", (experts,)
    yield f"{prefix}.layer_scalar", (1,)
    yield f"{prefix}.experts.gate_up_proj", (experts, 2 * width, hidden)
    yield f"{prefix}.experts.down_proj", (experts, hidden, width)


# ------------------------------------------------------------------------------------------------ Granite, LFM2
GRANITE_MOE = TEXT | {
    "architectures": ["GraniteMoeForCausalLM"], "model_type": "granitemoe", "attention_bias": False,
    "attention_multiplier": 0.015625,
    "embedding_multiplier": 12.0, "hidden_size": 1536, "intermediate_size": 512, "logits_scaling": 6.0,
    "max_position_embeddings": 131072,
    "num_attention_heads": 24, "num_experts_per_tok": 8, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "num_local_experts": 40,
    "residual_multiplier": 0.22, "rms_norm_eps": 1e-06, "rope_theta": 10000000, "tie_word_embeddings": True,
    "vocab_size": 49155,
}  # fmt: skip
"""Granite-3.1-3B-A800M."""


def granite_layer(prefix: str, text: Config, number: int) -> Shapes:
    hidden, experts, width = text["hidden_size"], text["num_local_experts"], text["intermediate_size"]
    yield from norms_of(prefix, hidden, *NORMS)
    if "layer_types" in text and text["layer_types"][number] == "mamba":
        yield from _granite_mamba(f"{prefix}.mamba", text)
    else:
        yield from gqa_of(f"{prefix}.self_attn", text)
    yield f"{prefix}.block_sparse_moe.router.layer.weight", (experts, hidden)
    yield f"{prefix}.block_sparse_moe.input_linear.weight", (experts, 2 * width, hidden)
    yield f"{prefix}.block_sparse_moe.output_linear.weight", (experts, hidden, width)
    if shared := text.get("shared_intermediate_size"):
        yield from linears(f"{prefix}.shared_mlp", input_linear=(2 * shared, hidden), output_linear=(hidden, shared))


def _granite_mamba(prefix: str, text: Config) -> Shapes:
    hidden, heads = text["hidden_size"], text["mamba_n_heads"]
    width, states = heads * text["mamba_d_head"], 2 * text["mamba_n_groups"] * text["mamba_d_state"]
    yield from linears(prefix, in_proj=(2 * width + states + heads, hidden), out_proj=(hidden, width))
    yield from linears(prefix, bias=True, conv1d=(width + states, 1, text["mamba_d_conv"]))
    for name in ("A_log", "D", "dt_bias"):
        yield f"{prefix}.{name}", (heads,)
    yield f"{prefix}.norm.weight", (width,)


GRANITE_HYBRID = GRANITE_MOE | {
    "architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid", "attention_multiplier": 0.0078125,
    "hidden_size": 4096, "intermediate_size": 768, "layer_types": ["mamba", "attention"], "logits_scaling": 16.0,
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 128, "mamba_proj_bias": False, "num_attention_heads": 32, "num_experts_per_tok": 10,
    "num_hidden_layers": 40,
    "num_local_experts": 72, "position_embedding_type": "nope", "rms_norm_eps": 1e-05, "rope_theta": 10000,
    "shared_intermediate_size": 1536, "vocab_size": 100352,
}  # fmt: skip
"""Granite-4.0-H-Small."""
LFM2_MOE = {
    "architectures": ["Lfm2MoeForCausalLM"], "model_type": "lfm2_moe", "dtype": "bfloat16", "conv_L_cache": 3,
    "conv_bias": False,
    "hidden_size": 2048, "intermediate_size": 7168, "layer_types": ["conv", "conv", "full_attention", "conv"],
    "max_position_embeddings": 128000, "moe_intermediate_size": 1792, "norm_eps": 1e-05, "norm_topk_prob": True,
    "num_attention_heads": 32, "num_dense_layers": 2, "num_experts": 32, "num_experts_per_tok": 4, "num_hidden_layers": 24,
    "num_key_value_heads": 8, "rope_theta": 1e6, "routed_scaling_factor": 1.0, "tie_word_embeddings": True,
    "use_expert_bias": True,
    "vocab_size": 65536,
}  # fmt: skip
"""LFM2-8B-A1B."""


def lfm2_layer(prefix: str, text: Config, number: int) -> Shapes:
    hidden, moe = text["hidden_size"], f"{prefix}.feed_forward"
    yield from norms_of(prefix, hidden, "operator_norm", "ffn_norm")
    if text["layer_types"][number] == "conv":
        yield from linears(f"{prefix}.conv", in_proj=(3 * hidden, hidden), out_proj=(hidden, hidden))
        yield f"{prefix}.conv.conv.weight", (hidden, 1, text["conv_L_cache"])
    else:
        yield from gqa_of(f"{prefix}.self_attn", text, o="out_proj")
        yield from norms_of(f"{prefix}.self_attn", hidden // text["num_attention_heads"], "q_layernorm", "k_layernorm")
    if number < text["num_dense_layers"]:
        yield from mlp_of(moe, hidden, text["intermediate_size"], W123)
        return
    yield f"{moe}.gate.weight", (text["num_experts"], hidden)
    yield f"{moe}.expert_bias", (text["num_experts"],)
    yield from experts_of(f"{moe}.experts", text["num_experts"], hidden, text["moe_intermediate_size"], W123)


# ------------------------------------------------------------------------------------------------ MiniMax-M3, Step-3.7
MINIMAX_M3 = {
    "architectures": ["MiniMaxM3SparseForConditionalGeneration"], "model_type": "minimax_m3_vl", "image_token_index": 200025,
    "video_token_index": 200026, "image_seq_length": 576, "projector_hidden_act": "gelu", "projector_hidden_size": 6144,
    "multimodal_projector_bias": True, "vision_feature_layer": -1, "vision_feature_select_strategy": "full",
    "dtype": "bfloat16",
    "text_config": {
        "architectures": ["MiniMaxM3SparseForCausalLM"], "hidden_size": 6144, "intermediate_size": 3072,
        "dense_intermediate_size": 12288, "shared_intermediate_size": 3072, "num_hidden_layers": 60, "num_attention_heads": 64,
        "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 200064, "max_position_embeddings": 1048576,
        "rms_norm_eps": 1e-6,
        "use_gemma_norm": True, "attention_output_gate": False, "rope_theta": 5000000, "rotary_dim": 64,
        "partial_rotary_factor": 0.5,
        "hidden_act": "swigluoai", "use_qk_norm": True, "qk_norm_type": "per_head", "tie_word_embeddings": False,
        "num_local_experts": 128, "num_experts_per_tok": 4, "n_shared_experts": 1, "scoring_func": "sigmoid",
        "use_routing_bias": True, "routed_scaling_factor": 2.0, "swiglu_alpha": 1.702, "swiglu_limit": 7.0,
        "moe_layer_freq": [0, 1],
        "num_mtp_modules": 7, "num_nextn_predict_layers": 1, "dtype": "bfloat16",
        "sparse_attention_config": {
            "use_sparse_attention": True, "sparse_index_dim": 128, "sparse_num_index_heads": 4, "sparse_topk_blocks": 16,
            "sparse_block_size": 128, "sparse_score_type": "max", "sparse_init_block": 0, "sparse_local_block": 1,
            "sparse_attention_freq": [0, 1], "sparse_disable_index_value": [0, 1],
        },
    },
    "vision_config": {
        "model_type": "clip_vision_model", "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 1,
        "num_attention_heads": 8, "patch_size": 14, "image_size": 2016, "projection_dim": 6144,
        "position_embedding_type": "rope",
        "rope_mode": "3d", "rope_theta": 10000.0, "hidden_act": "gelu", "layer_norm_eps": 1e-5, "num_channels": 3,
        "attention_dropout": 0.0, "vision_segment_max_frames": 4,
        "img_token_compression_config": {
            "image_token_compression_method": "patch_merge", "spatial_merge_size": 2, "temporal_patch_size": 2,
        },
    },
}  # fmt: skip
"""MiniMaxAI/MiniMax-M3. It declares MTP layers, and its index lists none."""


def minimax_m3_layer(prefix: str, text: Config, number: int) -> Shapes:
    hidden, experts, moe = text["hidden_size"], text["num_local_experts"], f"{prefix}.block_sparse_moe"
    yield from _qwen3_attention(prefix, text)
    if not text["moe_layer_freq"][number]:
        yield from mlp_of(f"{prefix}.mlp", hidden, text["dense_intermediate_size"])
        return
    sparse = text["sparse_attention_config"]
    width = sparse["sparse_index_dim"]
    rows = sparse["sparse_num_index_heads"] * width
    yield from linears(f"{prefix}.self_attn", index_q_proj=(rows, hidden), index_k_proj=(width, hidden))
    yield from norms_of(f"{prefix}.self_attn", width, "index_q_norm", "index_k_norm")
    yield f"{moe}.gate.weight", (experts, hidden)
    yield f"{moe}.e_score_correction_bias", (experts,)
    yield from mlp_of(f"{moe}.shared_experts", hidden, text["shared_intermediate_size"])
    yield from experts_of(f"{moe}.experts", experts, hidden, text["intermediate_size"], W123)


def minimax_m3_shapes(config: Config) -> Shapes:
    yield from whole_model(config, minimax_m3_layer, "language_model.model", head="language_model.lm_head")
    hidden = text_of(config)["hidden_size"]
    wide = config["projector_hidden_size"]
    for name, shape in tower_shapes("minimax_m3", hidden):
        if name == "patch_merge_mlp.linear_1.weight":
            shape = (wide, 4 * hidden)
        yield name, tuple(wide if size == 6144 else size for size in shape)


# ------------------------------------------------------------------------------------------------ GLM-5.3-Flash, Qwen3.8-Flash-
GLM5_NEXT = {
    "architectures": ["Glm5NextForConditionalGeneration"], "model_type": "glm5_next", "dtype": "bfloat16",
    "image_end_token_id": 154831, "image_start_token_id": 154830, "image_token_id": 154854, "video_end_token_id": 154833,
    "video_start_token_id": 154832, "video_token_id": 154855, "tie_word_embeddings": False,
    "text_config": TEXT | {
        "model_type": "glm5_next_text", "attention_bias": False, "hc_eps": 1e-06, "hc_mult": 4, "hc_sinkhorn_iters": 20,
        "head_dim": 0, "hidden_size": 4096, "index_head_dim": 128, "index_kpool": 4, "index_kpool_always_select_tail": True,
        "index_n_heads": 32, "index_share_for_mtp_iteration": True, "index_topk": 2048, "indexer_rope_interleave": True,
        "indexer_types": ["full"] * 4, "intermediate_size": 12288, "kv_lora_rank": 512,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "deepseek_sparse_attention"],
        "linear_attn_config": {
            "full_attn_layers": [3], "gate_lower_bound": -5.0, "head_dim": 128, "kda_layers": [0, 1, 2], "num_heads": 64,
            "short_conv_kernel_size": 4,
        },
        "max_position_embeddings": 1048576, "mhc": True, "mla_use_nope": True,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "moe_intermediate_size": 2048, "n_group": 1,
        "n_routed_experts": 288, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 64,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 45, "num_key_value_heads": 64, "num_nextn_predict_layers": 1, "q_lora_rank": 1536,
        "qk_nope_head_dim": 256, "qk_rope_head_dim": 0, "rms_norm_eps": 1e-05, "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid", "swiglu_limit": 10.0, "topk_group": 1, "topk_method": "noaux_tc", "v_head_dim": 256,
        "vocab_size": 154880,
    },
    "vision_config": {
        "model_type": "glm5_next_vision", "attention_bias": True, "depth": 1, "hidden_act": "silu", "hidden_size": 96,
        "image_size": 336, "in_channels": 3, "intermediate_size": 160, "num_heads": 8, "out_hidden_size": 4096,
        "patch_size": 14,
        "rms_norm_eps": 1e-05, "spatial_merge_size": 2, "temporal_patch_size": 2,
    },
}  # fmt: skip
"""zai-org/GLM-5.3-Flash."""


def glm5_next_layer(prefix: str, text: Config, number: int) -> Shapes:
    """Streams that are mixed (`hc_`), linear attention (KDA) or latent attention with an indexer, which an MTP layer has."""
    hidden, layers = text["hidden_size"], text["num_hidden_layers"]
    yield from norms_of(prefix, hidden, *NORMS)
    streams = text["hc_mult"]
    for part in ("attn", "ffn") if number < layers else ():
        mixed = streams * (streams + 2)
        yield f"{prefix}.hc_{part}_fn", (mixed, streams * hidden)
        yield f"{prefix}.hc_{part}_base", (mixed,)
        yield f"{prefix}.hc_{part}_scale", (3,)
    if number < layers and text["layer_types"][number] == "linear_attention":
        yield from _kda(f"{prefix}.self_attn", text)
    else:
        yield from _latent_attention(f"{prefix}.self_attn", text)
    if number < layers and text["mlp_layer_types"][number] == "dense":
        yield from mlp_of(f"{prefix}.mlp", hidden, text["intermediate_size"])
        return
    experts, width = text["n_routed_experts"], text["moe_intermediate_size"]
    yield f"{prefix}.mlp.gate.weight", (experts, hidden)
    yield f"{prefix}.mlp.gate.e_score_correction_bias", (experts,)
    yield from mlp_of(f"{prefix}.mlp.shared_experts", hidden, width * text["n_shared_experts"])
    yield from experts_of(f"{prefix}.mlp.experts", experts, hidden, width)


def _kda(prefix: str, text: Config) -> Shapes:
    hidden, own = text["hidden_size"], text["linear_attn_config"]
    heads, head = own["num_heads"], own["head_dim"]
    yield from linears(prefix, **{f"{name}_proj": (heads * head, hidden) for name in "qkv"}, o_proj=(hidden, heads * head))
    yield from linears(prefix, **{f"{name}_conv1d": (heads * head, 1, own["short_conv_kernel_size"]) for name in "qkv"})
    yield from linears(prefix, f_a_proj=(head, hidden), f_b_proj=(heads * head, head), b_proj=(heads, hidden))
    yield from linears(prefix, g_a_proj=(head, hidden), g_b_proj=(heads * head, head))
    yield f"{prefix}.A_log", (heads,)
    yield f"{prefix}.dt_bias", (heads * head,)
    yield f"{prefix}.o_norm.weight", (head,)


def _latent_attention(prefix: str, text: Config) -> Shapes:
    hidden, heads, rank, q_rank = (text[key] for key in ("hidden_size", "num_attention_heads", "kv_lora_rank", "q_lora_rank"))
    key, rope, value = text["qk_nope_head_dim"], text["qk_rope_head_dim"], text["v_head_dim"]
    index, index_heads = text["index_head_dim"], text["index_n_heads"]
    yield from linears(prefix, q_a_proj=(q_rank, hidden), q_b_proj=(heads * (key + rope), q_rank))
    yield from linears(prefix, kv_a_proj_with_mqa=(rank + rope, hidden), kv_b_proj=(heads * (key + value), rank))
    yield from linears(prefix, o_proj=(hidden, heads * value))
    yield from norms_of(prefix, q_rank, "q_a_layernorm")
    yield from norms_of(prefix, rank, "kv_a_layernorm")
    yield from linears(
        f"{prefix}.indexer", wq_b=(index_heads * index, q_rank), wk=(index, hidden), weights_proj=(index_heads, hidden)
    )
    yield from norms_of(f"{prefix}.indexer", index, "k_norm", bias=True)
    yield f"{prefix}.indexer.index_kpool_compress_ape", (text["index_kpool"], index)
    yield f"{prefix}.indexer.index_kpool_compress_gate", (index, hidden)


def glm5_next_shapes(config: Config) -> Shapes:
    text, root = text_of(config), "model.language_model"
    hidden, layers = text["hidden_size"], text["num_hidden_layers"]
    yield from whole_model(config, glm5_next_layer, root, tower="glm5_next")
    for number in range(layers, layers + text["num_nextn_predict_layers"]):
        prefix = f"{root}.layers.{number}"
        yield from glm5_next_layer(prefix, text, number)
        yield f"{prefix}.eh_proj.weight", (hidden, 2 * hidden)
        yield from norms_of(prefix, hidden, "enorm", "hnorm", "shared_head.norm")


QWEN4_EXP = {
    "architectures": ["Qwen4ExpForConditionalGeneration"], "model_type": "qwen4_exp", "image_token_id": 248056,
    "video_token_id": 248057, "vision_end_token_id": 248054, "vision_start_token_id": 248053, "tie_word_embeddings": False,
    "text_config": TEXT | {
        "model_type": "qwen4_exp_text", "attention_bias": False, "eos_token_id": 248044, "hc_count": 4, "hc_lowrank": 320,
        "head_dim": 256, "heads_per_ngram": 8, "hidden_size": 2560, "indexer_budget": 2048, "indexer_compress_ratio": 4,
        "indexer_head_dim": 128, "indexer_kv_heads": 1, "indexer_n_heads": 4, "layer_types": ["linear_attention",
        "qwen_sparse_attention"],
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "linear_value_head_dim": 128, "make_ngram_vocab_size_divisible_by": 128, "max_position_embeddings": 262144,
        "moe_intermediate_size": 640, "mtp_num_hidden_layers": 1, "ngram_size": 3, "ngram_vocab_size_base": 2000,
        "norm_topk_prob": True,
        "num_attention_heads": 24, "num_experts": 512, "num_experts_per_tok": 10, "num_hidden_layers": 48,
        "num_key_value_heads": 2,
        "number_of_conv_states": 1, "output_gate_type": "sigmoid", "ple_conv_kernel_size": 4, "ple_embed_dim": 2560,
        "ple_layer_ids": [1],
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25, "rope_theta": 10000000,
            "rope_type": "default",
        },
        "seed": 1234, "shared_expert_intermediate_size": 640, "split_ngram_parts": 4, "vocab_size": 248320,
    },
    "vision_config": QWEN_VISION | {"model_type": "qwen4_exp_vision", "deepstack_visual_indexes": [], "out_hidden_size": 2560},
}  # fmt: skip
"""Qwen3.8-Flash-Next; its tables of n-grams are small here."""


def qwen4_exp_layer(prefix: str, text: Config, number: int) -> Shapes:
    """Qwen3.5's linear attention, or attention to blocks of keys; streams that are mixed; n-grams in some layers."""
    hidden, streams, rank = text["hidden_size"], text["hc_count"], text["hc_lowrank"]
    for part in ("attn_hyper_connection", "mlp_hyper_connection"):
        yield from _streams(f"{prefix}.{part}", hidden, streams, rank)
        yield f"{prefix}.{part}.block_inject_weight.weight", (streams, streams * hidden)
    if text["layer_types"][number] == "linear_attention":
        yield from _gated_delta_net(f"{prefix}.linear_attn", text)
    else:
        head, index = text["head_dim"], text["indexer_head_dim"]
        yield from gqa_of(f"{prefix}.self_attn", {**text, "num_attention_heads": 2 * text["num_attention_heads"]}, o="unused")
        yield f"{prefix}.self_attn.o_proj.weight", (hidden, text["num_attention_heads"] * head)
        yield from norms_of(f"{prefix}.self_attn", head, "q_norm", "k_norm")
        rows = (text["indexer_n_heads"] + text["indexer_kv_heads"]) * index
        yield from linears(f"{prefix}.self_attn.indexer", index_qk_proj=(rows, hidden))
        yield from norms_of(f"{prefix}.self_attn.indexer", index, "q_layernorm", "k_layernorm")
    if number + 1 in text["ple_layer_ids"]:
        yield from _ngrams(f"{prefix}.ple", text)
    yield f"{prefix}.mlp.gate.weight", (text["num_experts"], hidden)
    yield from experts_of(f"{prefix}.mlp.experts", text["num_experts"], hidden, text["moe_intermediate_size"])
    yield from mlp_of(f"{prefix}.mlp.shared_expert", hidden, text["shared_expert_intermediate_size"])
    yield f"{prefix}.mlp.shared_expert_gate.weight", (1, hidden)


def _streams(prefix: str, hidden: int, streams: int, rank: int) -> Shapes:
    wide = streams * hidden
    yield from norms_of(prefix, wide, "hc_norm")
    yield from linears(prefix, input_mix_weight_down=(rank, wide), input_mix_weight_up=(wide, rank))


def _gated_delta_net(prefix: str, text: Config) -> Shapes:
    hidden, heads = text["hidden_size"], text["linear_num_value_heads"]
    keys, values = text["linear_num_key_heads"] * text["linear_key_head_dim"], heads * text["linear_value_head_dim"]
    yield from linears(prefix, in_proj_qkv=(2 * keys + values, hidden), in_proj_z=(values, hidden), out_proj=(hidden, values))
    yield from linears(prefix, in_proj_a=(heads, hidden), in_proj_b=(heads, hidden))
    yield f"{prefix}.conv1d.weight", (2 * keys + values, 1, text["linear_conv_kernel_dim"])
    yield f"{prefix}.A_log", (heads,)
    yield f"{prefix}.dt_bias", (heads,)
    yield f"{prefix}.norm.weight", (text["linear_value_head_dim"],)


def _ngrams(prefix: str, text: Config) -> Shapes:
    hidden, wide, width = text["hidden_size"], text["hc_count"] * text["hidden_size"], text["ple_embed_dim"]
    yield from linears(prefix, key_proj=(wide, width), value_proj=(hidden, width))
    yield f"{prefix}.conv1d.weight", (wide, 1, text["ple_conv_kernel_size"])
    yield from norms_of(prefix, wide, "norm_conv", "norm_key", "norm_query")
    heads = (text["ngram_size"] - 1) * text["heads_per_ngram"]
    for name, count in (
        ("layer_multipliers", text["ngram_size"]),
        ("ngram_heads_offsets", heads),
        ("ngram_heads_vocab_sizes", heads),
    ):
        yield f"{prefix}.ple_embedding.{name}", (count,)
    for part in range(text["split_ngram_parts"]):
        yield f"{prefix}.ple_embedding.ngram_embedding.shard_{part}.weight", (8256, width // heads)


def qwen4_exp_shapes(config: Config) -> Shapes:
    text, root = text_of(config), "model.language_model"
    shapes = whole_model(config, qwen4_exp_layer, root, tower="qwen4_exp")
    yield from ((name, shape) for name, shape in shapes if ".unused." not in name and name != f"{root}.norm.weight")
    hidden, streams, rank = text["hidden_size"], text["hc_count"], text["hc_lowrank"]
    yield from _streams(f"{root}.hyper_connection_mixer", hidden, streams, rank)
    for number in range(text["mtp_num_hidden_layers"]):
        one_kind = {**text, "layer_types": ["qwen_sparse_attention"], "ple_layer_ids": []}
        block = qwen4_exp_layer(f"mtp.layers.{number}", one_kind, 0)
        yield from ((name, shape) for name, shape in block if ".unused." not in name)
        yield from linears("mtp", fc_embedding=(hidden, hidden), fc_hidden=(hidden, hidden))
        yield from norms_of("mtp", hidden, "pre_fc_norm_embedding")
        yield from norms_of("mtp", streams * hidden, "pre_fc_norm_hidden")
        yield from _streams("mtp.hyper_connection_mixer", hidden, streams, rank)


# ------------------------------------------------------------------------------------------------ Kimi-K3, Step-3.7
KIMI_K3 = {
    "architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "bos_token_id": 163584, "dtype": "bfloat16",
    "eos_token_id": 163586, "ignore_index": -100, "media_placeholder_token_id": 163605, "pad_token_id": 163839,
    "tie_word_embeddings": False,
    "text_config": {
        "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0, "attn_res_block_size": 12, "dtype": "bfloat16", "first_k_dense_replace": 1,
        "hidden_act": "situ", "hidden_size": 7168, "intermediate_size": 33792, "kv_lora_rank": 512, "latent_moe_use_norm": True,
        "linear_attn_config": {
            "full_attn_layers": [4], "gate_lower_bound": -5.0, "head_dim": 128, "kda_layers": [1, 2, 3], "num_heads": 96,
            "short_conv_kernel_size": 4, "use_full_rank_gate": True,
        },
        "max_position_embeddings": 1048576, "mla_use_nope": True, "mla_use_output_gate": True, "moe_intermediate_size": 3072,
        "moe_layer_freq": 1, "moe_renormalize": True, "moe_router_activation_func": "sigmoid", "num_attention_heads": 96,
        "num_expert_group": 1, "num_experts": 896, "num_experts_per_token": 16, "num_hidden_layers": 93,
        "num_key_value_heads": 96,
        "num_nextn_predict_layers": 0, "num_shared_experts": 2, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05, "routed_expert_hidden_size": 3584, "routed_scaling_factor": 1.0,
        "tie_word_embeddings": False, "topk_group": 1, "topk_method": "noaux_tc", "use_grouped_topk": True, "v_head_dim": 128,
        "vocab_size": 163840,
    },
    "vision_config": {
        "activation_func": "gelu_pytorch_tanh", "attn_bias": False, "init_pos_emb_height": 64, "init_pos_emb_time": 4,
        "init_pos_emb_width": 64, "linear_bias": False, "merge_kernel_size": [2, 2], "merge_type": "sd2_tpool",
        "mlp_type": "mlp2",
        "mm_hidden_size": 96, "mm_projector_type": "patchmergerv2", "norm_type": "rmsnorm", "patch_embed_proj_bias": False,
        "patch_size": 14, "pos_emb_type": "divided_fixed", "projector_hidden_act": "gelu", "projector_ln_eps": 1e-05,
        "qkv_hidden_size": 128, "text_hidden_size": 7168, "vt_hidden_size": 96, "vt_intermediate_size": 160,
        "vt_num_attention_heads": 8, "vt_num_hidden_layers": 1,
    },
}  # fmt: skip
"""moonshotai/Kimi-K3 with its experts in 16 bits; they are published in MXFP4."""
KIMI_K3_QUANTIZATION = {
    "config_groups": {"group_0": {
        "format": "mxfp4-pack-quantized", "input_activations": None, "output_activations": None, "targets": ["Linear"],
        "weights": {"actorder": None, "block_structure": None, "dynamic": False, "group_size": 32, "num_bits": 4,
                    "observer": "minmax", "observer_kwargs": {}, "scale_dtype": "torch.uint8", "strategy": "group",
                    "symmetric": True, "type": "float"},
    }},
    "format": "mxfp4-pack-quantized",
    "ignore": [
        "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*", "re:.*lm_head.*",
        "re:.*vision_tower.*", "re:.*mm_projector.*",
    ],
    "quant_method": "compressed-tensors", "quantization_status": "compressed",
}  # fmt: skip
"""`quantization_config` of moonshotai/Kimi-K3, in its `text_config`."""


def kimi_k3_published(config: Config, shapes: Shapes) -> tuple[Config, Shapes, dict[str, str]]:
    """Routed experts as codes of two in a byte, and an exponent in a byte for 32 columns."""
    made: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, str] = {}
    for name, shape in shapes:
        if ".experts." in name:
            made |= {f"{name}_packed": (shape[0], shape[1] // 2), f"{name}_scale": (shape[0], shape[1] // 32)}
            dtypes |= {f"{name}_packed": "U8", f"{name}_scale": "U8"}
        else:
            made[name] = shape
    return changing_text(config, lambda text: {**text, "quantization_config": KIMI_K3_QUANTIZATION}), iter(made.items()), dtypes


def kimi_k3_layer(prefix: str, text: Config, number: int) -> Shapes:
    hidden, attention, moe = text["hidden_size"], f"{prefix}.self_attn", f"{prefix}.block_sparse_moe"
    own = text["linear_attn_config"]
    heads, head, value = own["num_heads"], own["head_dim"], text["num_attention_heads"] * text["v_head_dim"]
    yield from norms_of(prefix, hidden, *NORMS, "self_attention_res_norm", "mlp_res_norm")
    yield from linears(prefix, self_attention_res_proj=(1, hidden), mlp_res_proj=(1, hidden))
    if number + 1 in own["full_attn_layers"]:
        for name, shape in _latent_attention(attention, {**text, "index_head_dim": 1, "index_n_heads": 1, "index_kpool": 1}):
            if ".indexer." not in name:
                yield name, shape
        yield from linears(attention, g_proj=(value, hidden))
    else:
        yield from (item for item in _kda(attention, text) if ".g_" not in item[0] and not item[0].endswith(".A_log"))
        yield from linears(attention, g_proj=(heads * head, hidden))
        yield f"{attention}.A_log", (128,)  # padded
    if number < text["first_k_dense_replace"]:
        yield from mlp_of(f"{prefix}.mlp", hidden, text["intermediate_size"])
        return
    narrow, width, experts = text["routed_expert_hidden_size"], text["moe_intermediate_size"], text["num_experts"]
    yield f"{moe}.gate.weight", (experts, hidden)
    yield f"{moe}.gate.e_score_correction_bias", (experts,)
    yield from linears(moe, routed_expert_down_proj=(narrow, hidden), routed_expert_up_proj=(hidden, narrow))
    yield from norms_of(moe, narrow, "routed_expert_norm")
    yield from mlp_of(f"{moe}.shared_experts", hidden, width * text["num_shared_experts"])
    yield from experts_of(f"{moe}.experts", experts, narrow, width, W123)


def kimi_k3_shapes(config: Config) -> Shapes:
    hidden = text_of(config)["hidden_size"]
    yield from whole_model(config, kimi_k3_layer, "language_model.model", head="language_model.lm_head", tower="kimi_k3")
    yield from norms_of("language_model.model", hidden, "output_attn_res_norm")
    yield from linears("language_model.model", output_attn_res_proj=(1, hidden))


_STEP_TEXT = hollow_hybrids.cut_to(hollow_hybrids.STEP35_FLASH_CONFIG, 3)
STEP37 = {
    "architectures": ["Step3p7ForConditionalGeneration"], "model_type": "step3p7", "tie_word_embeddings": False,
    "text_config": {key: value[:3] if isinstance(value, list) else value for key, value in _STEP_TEXT.items()}
    | {"num_nextn_predict_layers": 0},
    "vision_config": {
        "model_type": "perception_encoder", "heads": 8, "hidden_act": "quick_gelu", "image_size": 728, "layers": 1,
        "ls_init_value": 0.1, "mlp_ratio": 560 / 96, "output_dim": None, "patch_size": 14, "use_abs_posemb": True,
        "use_cls_token": False, "use_ln_post": False, "use_ln_pre": True, "use_rope2d": True, "width": 96,
    },
}  # fmt: skip
"""stepfun-ai/Step-3.7-Flash: the language model of Step-3.5-Flash, without MTP layers here, and a tower."""


def step37_shapes(config: Config) -> Shapes:
    yield from hollow_hybrids.stacked(hollow_hybrids.step35_shapes(text_of(config)))
    yield from tower_shapes("step3p7", text_of(config)["hidden_size"])


WITHOUT_HEAD_DIM = {key: value for key, value in SMALL.items() if key != "head_dim"}
QWEN_SMALL = {**SMALL, "num_experts": 4, "moe_intermediate_size": 128, "intermediate_size": 256}
MODELS: dict[str, Model] = {
    "mixtral": Model(
        "Mixtral-8x7B", MIXTRAL, lambda config: whole_model(config, mixtral_layer),
        {**WITHOUT_HEAD_DIM, "num_local_experts": 4, "intermediate_size": 128}, ("MixtralConfig", "MixtralForCausalLM"),
    ),
    "phimoe": Model(
        "Phi-3.5-MoE", PHIMOE, phimoe_shapes, {**WITHOUT_HEAD_DIM, "num_local_experts": 4, "intermediate_size": 128},
        ("PhimoeConfig", "PhimoeForCausalLM"),
    ),
    "olmoe": Model(
        "OLMoE-1B-7B", OLMOE, lambda config: whole_model(config, olmoe_layer),
        {**WITHOUT_HEAD_DIM, "num_experts": 4, "intermediate_size": 128, "num_key_value_heads": 4}, ("OlmoeConfig",
        "OlmoeForCausalLM"),
    ),
    "qwen2_moe": Model(
        "Qwen2-57B-A14B", QWEN2_MOE, lambda config: whole_model(config, qwen2_moe_layer),
        {**WITHOUT_HEAD_DIM, "num_experts": 4, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 256},
        ("Qwen2MoeConfig", "Qwen2MoeForCausalLM"), most_ranks=4,
    ),
    "qwen3_vl_moe": Model(
        "Qwen3-VL-30B-A3B", QWEN3_VL_MOE, lambda config: whole_model(config, qwen3_vl_layer, "model.language_model",
        tower="qwen3_vl_moe"), QWEN_SMALL,
    ),
    "qwen3_omni_moe": Model(
        "Qwen3-Omni-30B-A3B", QWEN3_OMNI_MOE,
        lambda config: whole_model(config, qwen3_omni_layer, "thinker.model", head="thinker.lm_head", tower="qwen3_omni_moe"),
        QWEN_SMALL,
        made_by=("Qwen3OmniMoeConfig", "Qwen3OmniMoeForConditionalGeneration"),
    ),
    "glm4v_moe": Model(
        "GLM-4.5V", GLM4V_MOE, lambda config: whole_model(config, glm4v_moe_layer, "model.language_model", tower="glm4v_moe"),
        {**SMALL, "n_routed_experts": 4, "moe_intermediate_size": 128, "intermediate_size": 256},
        made_by=("Glm4vMoeConfig", "Glm4vMoeForConditionalGeneration"),
    ),
    "llama4": Model(
        "Llama-4-Maverick", LLAMA4, lambda config: whole_model(config, llama4_layer, "language_model.model",
        head="language_model.lm_head",
            tower="llama4"),
        {**SMALL, "num_local_experts": 4, "intermediate_size": 128, "intermediate_size_mlp": 256, "num_experts_per_tok": 1,
         "no_rope_layers": [1, 0]},
        made_by=("Llama4Config", "Llama4ForConditionalGeneration"),
    ),
    "gemma4": Model(
        "Gemma-4-26B-A4B", GEMMA4, lambda config: whole_model(config, gemma4_layer, "model.language_model", tower="gemma4"),
        {**SMALL, "num_experts": 4, "moe_intermediate_size": 128, "intermediate_size": 256, "global_head_dim": 128,
         "num_global_key_value_heads": 1, "top_k_experts": 2, "vocab_size_per_layer_input": 512},
        made_by=("Gemma4Config", "Gemma4ForConditionalGeneration"),
    ),
    "minimax_m3": Model(
        "MiniMax-M3", MINIMAX_M3, minimax_m3_shapes,
        {**SMALL, "num_local_experts": 4, "intermediate_size": 128, "dense_intermediate_size": 256,
        "shared_intermediate_size": 128,
         "head_dim": 128},
        in_fp32=r"block_sparse_moe\.gate\.weight",
    ),
    "glm5_next": Model(
        "GLM-5.3-Flash", GLM5_NEXT, glm5_next_shapes,
        {**{key: value for key, value in SMALL.items() if key != "head_dim"}, "num_hidden_layers": 4, "n_routed_experts": 4,
         "moe_intermediate_size": 128, "intermediate_size": 256, "num_key_value_heads": 4, "q_lora_rank": 128,
         "index_n_heads": 4,
         "linear_attn_config": {**GLM5_NEXT["text_config"]["linear_attn_config"], "num_heads": 4}},
        layers=4, mtp=True, in_fp32=r"\.hc_|A_log|dt_bias",
    ),
    "qwen4_exp": Model(
        "Qwen3.8-Flash-Next", QWEN4_EXP, qwen4_exp_shapes,
        {**QWEN_SMALL, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "shared_expert_intermediate_size": 128,
        "hc_lowrank": 32,
         "indexer_n_heads": 4, "indexer_head_dim": 64, "ple_embed_dim": 64},
        in_fp32=r"A_log|linear_attn\.norm", mtp=True,
        made_by=("Qwen4ExpConfig", "Qwen4ExpForConditionalGeneration"),
    ),
    "kimi_k3": Model(
        "Kimi-K3", KIMI_K3, kimi_k3_shapes,
        {**WITHOUT_HEAD_DIM, "num_hidden_layers": 4, "num_experts": 4, "moe_intermediate_size": 128, "intermediate_size": 256,
         "routed_expert_hidden_size": 128, "num_experts_per_token": 2, "q_lora_rank": 128, "num_key_value_heads": 4,
         "linear_attn_config": {**KIMI_K3["text_config"]["linear_attn_config"], "num_heads": 4}},
        layers=4, in_fp32=r"A_log|dt_bias|conv1d|o_norm", published=kimi_k3_published,
    ),
    "step3p7": Model(
        "Step-3.7-Flash", STEP37, step37_shapes,
        {**SMALL, "num_hidden_layers": 3, "moe_num_experts": 4, "moe_top_k": 2, "moe_intermediate_size": 128,
        "intermediate_size": 256,
         "share_expert_dim": 128, "num_attention_groups": 2,
         "attention_other_setting": {
             "attention_type": "sliding_attention", "num_attention_heads": 8, "num_attention_groups": 2, "head_dim": 64,
         }},
        layers=3,
    ),
    "granitemoe": Model(
        "Granite-3.1-3B-A800M", GRANITE_MOE, lambda config: whole_model(config, granite_layer),
        {**WITHOUT_HEAD_DIM, "num_local_experts": 4, "intermediate_size": 128}, ("GraniteMoeConfig", "GraniteMoeForCausalLM"),
    ),
    "granitemoehybrid": Model(
        "Granite-4.0-H-Small", GRANITE_HYBRID, lambda config: whole_model(config, granite_layer),
        {**WITHOUT_HEAD_DIM, "num_local_experts": 4, "intermediate_size": 128, "shared_intermediate_size": 128,
        "mamba_n_heads": 8},
        ("GraniteMoeHybridConfig", "GraniteMoeHybridForCausalLM"),
    ),
    "lfm2_moe": Model(
        "LFM2-8B-A1B", LFM2_MOE, lambda config: whole_model(config, lfm2_layer, norm="embedding_norm"),
        {**WITHOUT_HEAD_DIM, "num_hidden_layers": 4, "num_experts": 4, "moe_intermediate_size": 128, "intermediate_size": 256},
        ("Lfm2MoeConfig", "Lfm2MoeForCausalLM"), layers=4,
    ),
    **hollow_later.MODELS,
    **hollow_deepseek_v41.MODELS,
}  # fmt: skip
"""Family -> a model of it."""
_BIASES = ("e_score_correction_bias", "expert_bias", "router_bias")


def small(name: str) -> Config:
    """The config of a small checkpoint."""
    model = MODELS[name]
    return _with_width(changing_text(model.config, lambda text: {**text, **model.small}))


def cut(name: str, *, experts: int = 4) -> Config:
    """The published config with so few layers and experts that one of each kind is left."""
    model, key = MODELS[name], expert_key(MODELS[name].config)
    return changing_text(model.config, lambda text: {**text, "num_hidden_layers": model.layers, key: experts})


def write(folder: Path, name: str, config: Config) -> Path:
    """A hollow checkpoint of one file, in the form in which the model is published."""
    shapes = list(MODELS[name].shapes(config))
    dtypes = {tensor: "F32" for tensor, _ in shapes if is_in_fp32(name, tensor)}
    if (published := MODELS[name].published) is not None:
        config, stored, of_release = published(config, iter(shapes))
        return hollow.write_hollow(folder, config, stored, shards=1, dtypes=dtypes | of_release)
    return hollow.write_hollow(folder, config, iter(shapes), shards=1, dtypes=dtypes)


def is_in_fp32(name: str, tensor: str) -> bool:
    """Whether the model stores a tensor as FP32."""
    return tensor.endswith(_BIASES) or re.search(MODELS[name].in_fp32, tensor) is not None


def expert_key(config: Mapping[str, Any]) -> str:
    text = text_of(config)
    return next(key for key in ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts") if text.get(key))


def _with_width(config: Config) -> Config:
    """Towers end in the width of the language model."""
    hidden = text_of(config)["hidden_size"]
    own = config.get("thinker_config", config)
    made = {**own}
    for part, key in (("vision_config", "out_hidden_size"), ("audio_config", "output_dim")):
        if isinstance(own.get(part), dict) and key in own[part]:
            made[part] = {**own[part], key: hidden}
    return {**config, "thinker_config": made} if "thinker_config" in config else made
