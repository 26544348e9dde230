"""Mixture-of-experts models of more families, for `hollow_moe.py`: configs as published, names and shapes of their tensors.

Sources of the configs stand at each. Names are those that transformers writes where it has the model, else those that vLLM's
class takes.
"""

from __future__ import annotations

from hollow_parts import NORMS, SMALL, TEXT, Config, Model, Shapes, experts_of, gqa_of, linears, mlp_of, norms_of, whole_model

_WINDOWS = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
_MORE = {key: value for key, value in SMALL.items() if key != "num_hidden_layers"} | {
    "num_hidden_layers": 4, "num_experts": 4, "moe_intermediate_size": 128, "intermediate_size": 256,
}  # fmt: skip


def _head_norms(prefix: str, text: Config, *names: str) -> Shapes:
    return norms_of(f"{prefix}.self_attn", text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"], *names)


# ------------------------------------------------------------------------------------------------ K-EXAONE, Hy3, Trinity
EXAONE_MOE = TEXT | {
    "architectures": ["ExaoneMoEForCausalLM"], "model_type": "exaone_moe", "attention_dropout": 0.0, "bos_token_id": 1,
    "eos_token_id": 53, "first_last_k_dense_replace": 1, "head_dim": 128, "hidden_size": 6144, "intermediate_size": 18432,
    "is_moe_layer": [False, True, True, True], "layer_types": _WINDOWS, "max_position_embeddings": 262144,
    "moe_intermediate_size": 2048, "n_group": 1, "norm_topk_prob": True, "num_attention_heads": 64, "num_experts": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 8, "num_shared_experts": 1, "pad_token_id": 0,
    "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 1000000, "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid", "sliding_window": 128, "sliding_window_pattern": "LLLG", "topk_group": 1,
    "topk_method": "noaux_tc", "vocab_size": 153600,
}  # fmt: skip
"""LGAI-EXAONE/K-EXAONE-236B-A23B (TensorRT-LLM's test of its class has a copy), without its MTP layer."""


def exaone_moe_layer(prefix: str, text: Config, number: int) -> Shapes:
    hidden, width, moe = text["hidden_size"], text["moe_intermediate_size"], f"{prefix}.mlp"
    yield from norms_of(prefix, hidden, *NORMS)
    yield from gqa_of(f"{prefix}.self_attn", text)
    yield from _head_norms(prefix, text, "q_norm", "k_norm")
    if not text["is_moe_layer"][number]:
        yield from mlp_of(moe, hidden, text["intermediate_size"])
        return
    yield f"{moe}.gate.weight", (text["num_experts"], hidden)
    yield f"{moe}.e_score_correction_bias", (text["num_experts"],)
    yield from mlp_of(f"{moe}.shared_experts", hidden, width * text["num_shared_experts"])
    yield from experts_of(f"{moe}.experts", text["num_experts"], hidden, width)


HY_V3 = TEXT | {
    "architectures": ["HYV3ForCausalLM"], "model_type": "hy_v3", "enable_lm_head_fp32": True, "expert_hidden_dim": 1536,
    "first_k_dense_replace": 1, "head_dim": 128, "hidden_size": 4096, "intermediate_size": 13312,
    "max_position_embeddings": 262144, "moe_intermediate_size": 1536, "moe_router_enable_expert_bias": True,
    "moe_router_use_sigmoid": True, "num_attention_heads": 64, "num_experts": 192, "num_experts_per_tok": 8,
    "num_hidden_layers": 80, "num_key_value_heads": 8, "num_nextn_predict_layers": 1, "num_shared_experts": 1,
    "qk_norm": True, "rms_norm_eps": 1e-05, "rope_parameters": {"rope_theta": 11158840.0, "rope_type": "default"},
    "route_norm": True, "router_scaling_factor": 2.826, "vocab_size": 120832,
}  # fmt: skip
"""tencent/Hy3."""


def hy_v3_layer(prefix: str, text: Config, number: int) -> Shapes:
    hidden, width, moe = text["hidden_size"], text["moe_intermediate_size"], f"{prefix}.mlp"
    yield from norms_of(prefix, hidden, *NORMS)
    yield from gqa_of(f"{prefix}.self_attn", text)
    yield from _head_norms(prefix, text, "q_norm", "k_norm")
    if number < text["first_k_dense_replace"]:
        yield from mlp_of(moe, hidden, text["intermediate_size"])
        return
    yield f"{moe}.router.gate.weight", (text["num_experts"], hidden)
    yield f"{moe}.expert_bias", (text["num_experts"],)
    yield from mlp_of(f"{moe}.shared_mlp", hidden, width * text["num_shared_experts"])
    yield from experts_of(f"{moe}.experts", text["num_experts"], hidden, width)


def hy_v3_shapes(config: Config) -> Shapes:
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    yield from whole_model(config, hy_v3_layer)
    for number in range(layers, layers + config["num_nextn_predict_layers"]):
        prefix = f"model.layers.{number}"
        yield from hy_v3_layer(prefix, config, number)
        yield f"{prefix}.eh_proj.weight", (hidden, 2 * hidden)
        yield from norms_of(prefix, hidden, "enorm", "hnorm", "final_layernorm")


AFMOE = TEXT | {
    "architectures": ["AfmoeForCausalLM"], "model_type": "afmoe", "attention_dropout": 0.0, "global_attn_every_n_layers": 4,
    "head_dim": 128, "hidden_size": 2048, "intermediate_size": 6144, "layer_types": _WINDOWS,
    "max_position_embeddings": 131072, "moe_intermediate_size": 1024, "mup_enabled": True, "n_group": 1,
    "num_attention_heads": 32, "num_dense_layers": 2, "num_expert_groups": 1, "num_experts": 128, "num_experts_per_tok": 8,
    "num_hidden_layers": 32, "num_key_value_heads": 4, "num_limited_groups": 1, "num_shared_experts": 1,
    "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000, "route_norm": True, "route_scale": 2.826,
    "score_func": "sigmoid", "sliding_window": 2048, "topk_group": 1, "vocab_size": 200192,
}  # fmt: skip
"""arcee-ai/Trinity-Mini (a test of Megatron-Bridge's afmoe has a copy)."""


def afmoe_layer(prefix: str, text: Config, number: int) -> Shapes:
    """Four norms, and a gate on what attention puts out."""
    hidden, width, moe = text["hidden_size"], text["moe_intermediate_size"], f"{prefix}.mlp"
    yield from norms_of(prefix, hidden, *NORMS, "pre_mlp_layernorm", "post_mlp_layernorm")
    yield from gqa_of(f"{prefix}.self_attn", text)
    yield f"{prefix}.self_attn.gate_proj.weight", (text["num_attention_heads"] * text["head_dim"], hidden)
    yield from _head_norms(prefix, text, "q_norm", "k_norm")
    if number < text["num_dense_layers"]:
        yield from mlp_of(moe, hidden, text["intermediate_size"])
        return
    yield f"{moe}.router.gate.weight", (text["num_experts"], hidden)
    yield f"{moe}.expert_bias", (text["num_experts"],)
    yield from mlp_of(f"{moe}.shared_experts", hidden, width * text["num_shared_experts"])
    yield from experts_of(f"{moe}.experts", text["num_experts"], hidden, width)


# ------------------------------------------------------------------------------------------------ Laguna, North-Mini-Code
LAGUNA = TEXT | {
    "architectures": ["LagunaForCausalLM"], "model_type": "laguna", "attention_bias": False, "gating": "per-head",
    "head_dim": 128, "hidden_size": 2048, "intermediate_size": 8192,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "sliding_attention"],
    "max_position_embeddings": 262144, "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "moe_apply_router_weight_on_input": False, "moe_intermediate_size": 512, "moe_routed_scaling_factor": 2.5,
    "norm_topk_prob": True, "num_attention_heads": 48, "num_experts": 256, "num_experts_per_tok": 8, "num_hidden_layers": 40,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "shared_expert_intermediate_size": 512, "sliding_window": 512,
    "vocab_size": 100352,
}  # fmt: skip
"""poolside/Laguna-XS.2.1; its layers with a window have as many heads as the others here."""


def laguna_layer(prefix: str, text: Config, number: int) -> Shapes:
    hidden, moe = text["hidden_size"], f"{prefix}.mlp"
    yield from norms_of(prefix, hidden, *NORMS)
    yield from gqa_of(f"{prefix}.self_attn", text)
    yield f"{prefix}.self_attn.g_proj.weight", (text["num_attention_heads"], hidden)
    yield from _head_norms(prefix, text, "q_norm", "k_norm")
    if text["mlp_layer_types"][number] == "dense":
        yield from mlp_of(moe, hidden, text["intermediate_size"])
        return
    yield f"{moe}.gate.weight", (text["num_experts"], hidden)
    yield f"{moe}.experts.e_score_correction_bias", (text["num_experts"],)
    yield from mlp_of(f"{moe}.shared_expert", hidden, text["shared_expert_intermediate_size"])
    yield from experts_of(f"{moe}.experts", text["num_experts"], hidden, text["moe_intermediate_size"])


COHERE2_MOE = TEXT | {
    "architectures": ["Cohere2MoeForCausalLM"], "model_type": "cohere2_moe", "attention_bias": False,
    "expert_selection_fn": "sigmoid", "first_k_dense_replace": 1, "head_dim": 128, "hidden_size": 2048,
    "intermediate_size": 768, "layer_norm_eps": 1e-05, "layer_types": _WINDOWS[::-1], "max_position_embeddings": 500000,
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "norm_topk_prob": False, "num_attention_heads": 32,
    "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 49, "num_key_value_heads": 4, "num_shared_experts": 0,
    "prefix_dense_intermediate_size": 3072, "prefix_dense_sliding_window_pattern": 1, "rms_norm_eps": 1e-06,
    "rope_theta": 50000.0, "sliding_window": 4096, "tie_word_embeddings": True, "use_parallel_block": True,
    "use_qk_norm": False, "vocab_size": 262144,
}  # fmt: skip
"""CohereLabs/North-Mini-Code-1.0 (https://github.com/ml-explore/mlx-lm/pull/1487 says the same of it)."""


def cohere2_moe_layer(prefix: str, text: Config, number: int) -> Shapes:
    hidden, width, moe = text["hidden_size"], text["intermediate_size"], f"{prefix}.mlp"
    yield from norms_of(prefix, hidden, "input_layernorm")
    yield from gqa_of(f"{prefix}.self_attn", text)
    if text["mlp_layer_types"][number] == "dense":
        yield from mlp_of(moe, hidden, text["prefix_dense_intermediate_size"])
        return
    yield f"{moe}.gate.weight", (text["num_experts"], hidden)
    if text["num_shared_experts"]:
        yield from mlp_of(f"{moe}.shared_experts", hidden, width * text["num_shared_experts"])
    yield from experts_of(f"{moe}.experts", text["num_experts"], hidden, width)


# ------------------------------------------------------------------------------------------------ Hunyuan-A13B, dots.llm1
HUNYUAN_MOE = TEXT | {
    "architectures": ["HunYuanMoEV1ForCausalLM"], "model_type": "hunyuan_v1_moe", "attention_bias": False, "head_dim": 128,
    "hidden_size": 4096, "intermediate_size": 3072, "max_position_embeddings": 32768, "moe_intermediate_size": [3072] * 32,
    "moe_topk": [8] * 32, "num_attention_heads": 32, "num_experts": 64, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "num_shared_expert": [1] * 32, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "tie_word_embeddings": True,
    "use_qk_norm": True, "vocab_size": 128167,
}  # fmt: skip
"""tencent/Hunyuan-A13B-Instruct."""


def hunyuan_moe_layer(prefix: str, text: Config, number: int) -> Shapes:
    hidden, width, moe = text["hidden_size"], text["intermediate_size"], f"{prefix}.mlp"
    yield from norms_of(prefix, hidden, *NORMS)
    yield from gqa_of(f"{prefix}.self_attn", text)
    yield from _head_norms(prefix, text, "query_layernorm", "key_layernorm")
    yield f"{moe}.gate.wg.weight", (text["num_experts"], hidden)
    yield from mlp_of(f"{moe}.shared_mlp", hidden, width)
    yield from experts_of(f"{moe}.experts", text["num_experts"], hidden, width)


DOTS1 = TEXT | {
    "architectures": ["Dots1ForCausalLM"], "model_type": "dots1", "attention_bias": False, "first_k_dense_replace": 1,
    "hidden_size": 4096, "intermediate_size": 10944, "max_position_embeddings": 32768, "moe_intermediate_size": 1408,
    "n_routed_experts": 128, "n_shared_experts": 2, "norm_topk_prob": True, "num_attention_heads": 32,
    "num_experts_per_tok": 6, "num_hidden_layers": 62, "num_key_value_heads": 32, "rms_norm_eps": 1e-05,
    "rope_theta": 10000000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "vocab_size": 152064,
}  # fmt: skip
"""rednote-hilab/dots.llm1.inst."""


def dots1_layer(prefix: str, text: Config, number: int) -> Shapes:
    hidden, width, moe = text["hidden_size"], text["moe_intermediate_size"], f"{prefix}.mlp"
    yield from norms_of(prefix, hidden, *NORMS)
    yield from gqa_of(f"{prefix}.self_attn", text)
    yield from _head_norms(prefix, text, "q_norm", "k_norm")
    if number < text["first_k_dense_replace"]:
        yield from mlp_of(moe, hidden, text["intermediate_size"])
        return
    yield f"{moe}.gate.weight", (text["n_routed_experts"], hidden)
    yield f"{moe}.gate.e_score_correction_bias", (text["n_routed_experts"],)
    yield from mlp_of(f"{moe}.shared_experts", hidden, width * text["n_shared_experts"])
    yield from experts_of(f"{moe}.experts", text["n_routed_experts"], hidden, width)


# ------------------------------------------------------------------------------------------------ Ling
BAILING_MOE = TEXT | {
    "architectures": ["BailingMoeV2ForCausalLM"], "model_type": "bailing_moe", "embedding_dropout": 0.0,
    "first_k_dense_replace": 1, "head_dim": 128, "hidden_size": 2048, "intermediate_size": 5120,
    "max_position_embeddings": 32768, "moe_intermediate_size": 512, "moe_router_enable_expert_bias": True,
    "moe_shared_expert_intermediate_size": 512, "n_group": 8, "norm_topk_prob": True, "num_attention_heads": 16,
    "num_experts": 256, "num_experts_per_tok": 8, "num_hidden_layers": 20, "num_key_value_heads": 4,
    "num_nextn_predict_layers": 0, "num_shared_experts": 1, "output_dropout": 0.0, "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-06, "rope_parameters": {"rope_theta": 600000, "rope_type": "default"}, "routed_scaling_factor": 2.5,
    "router_dtype": "fp32", "score_function": "sigmoid", "topk_group": 4, "use_bias": False, "use_qk_norm": True,
    "use_qkv_bias": False, "use_rmsnorm": True, "vocab_size": 157184,
}  # fmt: skip
"""inclusionAI/Ling-mini-2.0 (https://github.com/inclusionAI/Ling-V2 has its configuration class)."""


def bailing_moe_layer(prefix: str, text: Config, number: int) -> Shapes:
    """Queries, keys and values in one tensor."""
    hidden, heads, width = text["hidden_size"], text["num_attention_heads"], text["head_dim"]
    attention, moe = f"{prefix}.attention", f"{prefix}.mlp"
    yield from norms_of(prefix, hidden, *NORMS)
    rows = (heads + 2 * text["num_key_value_heads"]) * width
    yield from linears(attention, query_key_value=(rows, hidden), dense=(hidden, heads * width))
    yield from norms_of(attention, width, "query_layernorm", "key_layernorm")
    yield from _bailing_mlp(moe, text, number)


def _bailing_mlp(moe: str, text: Config, number: int) -> Shapes:
    width = text.get("moe_shared_expert_intermediate_size", text["moe_intermediate_size"])
    hidden, shared = text["hidden_size"], width * text["num_shared_experts"]
    if number < text["first_k_dense_replace"]:
        yield from mlp_of(moe, hidden, text["intermediate_size"])
        return
    yield f"{moe}.gate.weight", (text["num_experts"], hidden)
    yield f"{moe}.gate.expert_bias", (text["num_experts"],)
    yield from mlp_of(f"{moe}.shared_experts", hidden, shared)
    yield from experts_of(f"{moe}.experts", text["num_experts"], hidden, text["moe_intermediate_size"])


def bailing_moe_shapes(config: Config) -> Shapes:
    """With the MTP layers that Ling 2.5 declares."""
    layers = {"BailingMoeV3ForCausalLM": bailing_v3_layer, "BailingMoeV2_5ForCausalLM": bailing_v25_layer}
    shapes = whole_model(config, layers.get(config["architectures"][0], bailing_moe_layer))
    yield from ((name.replace("embed_tokens", "word_embeddings"), shape) for name, shape in shapes)
    hidden, count = config["hidden_size"], config["num_hidden_layers"]
    for number in range(count, count + config.get("num_nextn_predict_layers", 0)):
        prefix = f"model.layers.{number}"
        yield from norms_of(prefix, hidden, *NORMS, "enorm", "hnorm", "final_layernorm")
        yield f"{prefix}.eh_proj.weight", (hidden, 2 * hidden)
        yield from _bailing_latent_attention(f"{prefix}.attention", config)
        yield from _bailing_mlp(f"{prefix}.mlp", config, number)


BAILING_V2_5 = TEXT | {
    "architectures": ["BailingMoeV2_5ForCausalLM"], "model_type": "bailing_hybrid", "embedding_dropout": 0.0,
    "first_k_dense_replace": 1, "group_norm_size": 4, "head_dim": 128, "hidden_size": 2048, "intermediate_size": 5120,
    "kv_lora_rank": 512, "layer_group_size": 5, "linear_silu": False, "max_position_embeddings": 32768,
    "moe_intermediate_size": 512, "moe_router_enable_expert_bias": True, "n_group": 8, "num_attention_heads": 16,
    "num_experts": 256, "num_experts_per_tok": 8, "num_hidden_layers": 20, "num_key_value_heads": 4,
    "num_nextn_predict_layers": 1, "num_shared_experts": 1, "output_dropout": 0.0, "partial_rotary_factor": 0.5,
    "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_interleave": True,
    "rope_parameters": {"rope_theta": 600000, "rope_type": "default"}, "routed_scaling_factor": 1.0, "router_dtype": "fp32",
    "score_function": "sigmoid", "topk_group": 4, "use_bias": False, "use_qk_norm": True, "use_qkv_bias": False,
    "v_head_dim": 128, "vocab_size": 157184,
}  # fmt: skip
"""The defaults of the makers' class, with an MTP layer (https://github.com/inclusionAI/Ring-V2.5 has it, and names of tensors);
Ring-2.5-1T's own config was not at hand."""


def bailing_v25_layer(prefix: str, text: Config, number: int) -> Shapes:
    """Layers of linear attention with a gate, then one of latent attention."""
    hidden, head, attention = text["hidden_size"], text["head_dim"], f"{prefix}.attention"
    wide = text["num_attention_heads"] * head
    yield from norms_of(prefix, hidden, *NORMS)
    if (number + 1) % text["layer_group_size"]:
        yield from linears(attention, query_key_value=(3 * wide, hidden), g_proj=(wide, hidden), dense=(hidden, wide))
        yield from norms_of(attention, head, "query_layernorm", "key_layernorm")
        yield from norms_of(attention, wide, "g_norm")
    else:
        yield from _bailing_latent_attention(attention, text)
    yield from _bailing_mlp(f"{prefix}.mlp", text, number)


def _bailing_latent_attention(attention: str, text: Config) -> Shapes:
    hidden, heads, rank = text["hidden_size"], text["num_attention_heads"], text["kv_lora_rank"]
    key, rope, value = text["qk_nope_head_dim"], text["qk_rope_head_dim"], text["v_head_dim"]
    if (q_rank := text["q_lora_rank"]) is None:
        yield from linears(attention, q_proj=(heads * (key + rope), hidden))
    else:
        yield from linears(attention, q_a_proj=(q_rank, hidden), q_b_proj=(heads * (key + rope), q_rank))
        yield from norms_of(attention, q_rank, "q_a_layernorm")
    yield from linears(attention, kv_a_proj_with_mqa=(rank + rope, hidden), kv_b_proj=(heads * (key + value), rank))
    yield from linears(attention, dense=(hidden, heads * value))
    yield from norms_of(attention, rank, "kv_a_layernorm")


BAILING_V3 = TEXT | {
    "architectures": ["BailingMoeV3ForCausalLM"], "model_type": "bailing_hybrid", "first_k_dense_replace": 1,
    "gated_attention_proj_granularity_type": "head_wise", "head_dim": 128, "hidden_size": 1536, "intermediate_size": 4608,
    "kda_lower_bound": -5, "kda_safe_gate": True, "kv_lora_rank": 512, "layer_group_size": 4,
    "max_position_embeddings": 131072, "moe_intermediate_size": 512, "moe_router_enable_expert_bias": True,
    "moe_shared_expert_intermediate_size": 512, "n_group": 8, "no_kda_lora": True, "norm_topk_prob": True,
    "num_attention_heads": 16, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 24,
    "num_key_value_heads": 16, "num_shared_experts": 1, "q_lora_rank": 256, "qk_head_dim": 192, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_interleave": True,
    "rope_parameters": {"rope_theta": 6000000, "rope_type": "default"}, "routed_scaling_factor": 2.5,
    "score_function": "sigmoid", "short_conv_kernel_size": 4, "topk_group": 4, "use_bias": False, "use_qk_norm": True,
    "v_head_dim": 128,
    "vocab_size": 157184,
}  # fmt: skip
"""inclusionAI/Ling-3.0-tiny (a test of mlx-swift's class has a copy)."""


def bailing_v3_layer(prefix: str, text: Config, number: int) -> Shapes:
    """Three layers of linear attention (KDA) without low-rank gates, then one of latent attention with a gate for each head."""
    hidden, heads, head, attention = text["hidden_size"], text["num_attention_heads"], text["head_dim"], f"{prefix}.attention"
    wide = heads * head
    yield from norms_of(prefix, hidden, *NORMS)
    if (number + 1) % text["layer_group_size"]:
        yield from linears(attention, **{f"{part}_proj": (wide, hidden) for part in "qkvfg"}, o_proj=(hidden, wide))
        yield from linears(attention, b_proj=(heads, hidden))
        yield from linears(attention, **{f"{part}_conv1d": (wide, 1, text["short_conv_kernel_size"]) for part in "qkv"})
        yield f"{attention}.A_log", (1, 1, heads, 1)
        yield f"{attention}.dt_bias", (wide,)
        yield from norms_of(attention, head, "o_norm")
    else:
        yield from _bailing_latent_attention(attention, text)
        yield from linears(attention, g_proj=(heads, hidden))
    yield from _bailing_mlp(f"{prefix}.mlp", text, number)


# ------------------------------------------------------------------------------------------------ gpt-oss in BF16
GPT_OSS = TEXT | {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "attention_bias": True, "head_dim": 64,
    "hidden_size": 2880, "initial_context_length": 4096, "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"], "max_position_embeddings": 131072, "num_attention_heads": 64,
    "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32,
    "rms_norm_eps": 1e-05, "rope_theta": 150000, "sliding_window": 128, "swiglu_limit": 7.0, "vocab_size": 201088,
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096, "rope_type": "yarn",
        "truncate": False,
    },
}  # fmt: skip
"""openai/gpt-oss-20b without its `quantization_config`, as fine-tunes in 16 bits have it."""


def gpt_oss_layer(prefix: str, text: Config, number: int) -> Shapes:
    """Biases everywhere; all experts in one tensor, [experts, inputs, outputs], rows of gate and up in turns."""
    hidden, width, experts = text["hidden_size"], text["intermediate_size"], text["num_local_experts"]
    yield from norms_of(prefix, hidden, *NORMS)
    yield from gqa_of(f"{prefix}.self_attn", text, bias=True)
    yield f"{prefix}.self_attn.sinks", (text["num_attention_heads"],)
    yield from linears(f"{prefix}.mlp", bias=True, router=(experts, hidden))
    for name, inputs, outputs in (("gate_up_proj", hidden, 2 * width), ("down_proj", width, hidden)):
        yield f"{prefix}.mlp.experts.{name}", (experts, inputs, outputs)
        yield f"{prefix}.mlp.experts.{name}_bias", (experts, outputs)


_WITHOUT_EXPERT_WIDTH = {key: value for key, value in _MORE.items() if key != "moe_intermediate_size"}
MODELS: dict[str, Model] = {
    "exaone_moe": Model(
        "K-EXAONE-236B-A23B", EXAONE_MOE, lambda config: whole_model(config, exaone_moe_layer), _MORE,
        ("ExaoneMoeConfig", "ExaoneMoeForCausalLM"), layers=4,
    ),
    "hy_v3": Model(
        "Hy3", HY_V3, hy_v3_shapes, _MORE, ("HYV3Config", "HYV3ForCausalLM"),
    ),
    "afmoe": Model(
        "Trinity-Mini", AFMOE, lambda config: whole_model(config, afmoe_layer), _MORE,
        ("AfmoeConfig", "AfmoeForCausalLM"), layers=4,
    ),
    "laguna": Model(
        "Laguna-XS-2.1", LAGUNA, lambda config: whole_model(config, laguna_layer),
        {**_MORE, "shared_expert_intermediate_size": 128}, ("LagunaConfig", "LagunaForCausalLM"), layers=4,
    ),
    "cohere2_moe": Model(
        "North-Mini-Code-1.0", COHERE2_MOE, lambda config: whole_model(config, cohere2_moe_layer),
        {**_WITHOUT_EXPERT_WIDTH, "num_shared_experts": 1, "prefix_dense_intermediate_size": 256},
        ("Cohere2MoeConfig", "Cohere2MoeForCausalLM"), layers=4,
    ),
    "hunyuan_v1_moe": Model(
        "Hunyuan-A13B", HUNYUAN_MOE, lambda config: whole_model(config, hunyuan_moe_layer),
        {**_WITHOUT_EXPERT_WIDTH, "moe_topk": 2, "intermediate_size": 128, "moe_intermediate_size": [128] * 4},
        ("HunYuanMoEV1Config", "HunYuanMoEV1ForCausalLM"),
    ),
    "dots1": Model(
        "dots.llm1", DOTS1, lambda config: whole_model(config, dots1_layer),
        {**{key: value for key, value in _MORE.items() if key not in ("num_experts", "head_dim")}, "n_routed_experts": 4},
        ("Dots1Config", "Dots1ForCausalLM"),
    ),
    "gpt_oss": Model(
        "gpt-oss-20b in BF16", GPT_OSS, lambda config: whole_model(config, gpt_oss_layer),
        {**SMALL, "num_local_experts": 4, "intermediate_size": 128}, ("GptOssConfig", "GptOssForCausalLM"),
    ),
    "bailing_moe": Model(
        "Ling-mini-2.0", BAILING_MOE, bailing_moe_shapes, {**_MORE, "moe_shared_expert_intermediate_size": 128}, most_ranks=8,
        in_fp32=r"mlp\.gate\.weight",
    ),
    "bailing_moe_v2_5": Model(
        "defaults", BAILING_V2_5, bailing_moe_shapes,
        {**_MORE, "num_hidden_layers": 2, "group_norm_size": 2, "layer_group_size": 2, "q_lora_rank": 128}, layers=5,
        most_ranks=4, mtp=True, in_fp32=r"mlp\.gate\.weight",
    ),
    "bailing_moe_v3": Model(
        "Ling-3.0-tiny", BAILING_V3, bailing_moe_shapes,
        {**_MORE, "num_key_value_heads": 4, "moe_shared_expert_intermediate_size": 128, "q_lora_rank": 128}, layers=4,
        in_fp32=r"mlp\.gate\.weight|A_log|dt_bias|conv1d",
    ),
}  # fmt: skip
"""Family -> a model of it."""
