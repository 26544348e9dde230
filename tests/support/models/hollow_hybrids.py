"""Configs, names and shapes of models whose layers differ in kind, for `hollow.py`: what the published config.json say."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import hollow_deepseek_v4

Shapes = Iterator[tuple[str, tuple[int, ...]]]

_STEP_LAYERS = 48
STEP35_FLASH_CONFIG: dict[str, Any] = {
    "architectures": ["Step3p5ForCausalLM"], "model_type": "step3p5", "torch_dtype": "bfloat16", "att_impl_type": "GQA",
    "hidden_size": 4096, "intermediate_size": 11264, "num_hidden_layers": 45, "num_nextn_predict_layers": 3,
    "vocab_size": 128896, "max_seq_len": 262144, "max_position_embeddings": 262144, "num_attention_heads": 64,
    "num_attention_groups": 8, "head_dim": 128, "use_head_wise_attn_gate": True, "use_qk_norm": True, "sliding_window": 512,
    "attention_other_setting": {
        "attention_type": "sliding_attention", "num_attention_heads": 96, "num_attention_groups": 8, "head_dim": 128,
        "true_head_dim": 128,
    },
    "layer_types": ["sliding_attention" if layer % 4 else "full_attention" for layer in range(_STEP_LAYERS)],
    "rope_theta": [10_000.0 if layer % 4 else 5_000_000.0 for layer in range(_STEP_LAYERS)],
    "partial_rotary_factors": [1.0 if layer % 4 else 0.5 for layer in range(_STEP_LAYERS)], "use_rope_layers": [],
    "yarn_only_types": ["full_attention"],
    "rope_scaling": {
        "rope_type": "llama3", "factor": 2.0, "original_max_position_embeddings": 131072, "low_freq_factor": 1.0,
        "high_freq_factor": 32.0,
    },
    "use_moe": True, "moe_layers_enum": ",".join(str(layer) for layer in range(3, 45)), "moe_num_experts": 288, "moe_top_k": 8,
    "moe_intermediate_size": 1280, "share_expert_dim": 1280, "moe_layer_offset": 0, "moe_every_n_layer": 1,
    "norm_expert_weight": True, "moe_router_activation": "sigmoid", "moe_router_scaling_factor": 3.0,
    "use_moe_router_bias": True, "need_fp32_gate": True, "sink": False, "zero_centered": True, "tie_word_embeddings": False,
    "swiglu_limits": [7.0 if layer in (43, 44) else 0.0 for layer in range(_STEP_LAYERS)],
    "swiglu_limits_shared": [16.0 if layer == 44 else 0.0 for layer in range(_STEP_LAYERS)],
}  # fmt: skip
"""stepfun-ai/Step-3.5-Flash. Its lists count the MTP layers as well (https://github.com/zml/zml has a copy)."""

MIMO_V2_FLASH_CONFIG: dict[str, Any] = {
    "architectures": ["MiMoV2FlashForCausalLM"], "model_type": "mimo_v2_flash", "torch_dtype": "bfloat16",
    "hidden_size": 4096, "intermediate_size": 16384, "moe_intermediate_size": 2048, "num_hidden_layers": 48,
    "vocab_size": 152576, "max_position_embeddings": 262144, "hidden_act": "silu", "layernorm_epsilon": 1e-05,
    "attention_bias": False, "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 192, "v_head_dim": 128,
    "swa_num_attention_heads": 64, "swa_num_key_value_heads": 8, "swa_head_dim": 192, "swa_v_head_dim": 128,
    "hybrid_layer_pattern": [0, *[1, 1, 1, 1, 0], *[1, 1, 1, 1, 1, 0] * 7], "sliding_window": 128, "sliding_window_size": 128,
    "attention_chunk_size": 128, "add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False,
    "attention_value_scale": 0.707, "partial_rotary_factor": 0.334, "rope_theta": 5000000, "swa_rope_theta": 10000,
    "moe_layer_freq": [0, *[1] * 47], "n_routed_experts": 256, "n_shared_experts": None, "num_experts_per_tok": 8,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
    "routed_scaling_factor": None, "tie_word_embeddings": False,
}  # fmt: skip
"""XiaomiMiMo/MiMo-V2-Flash (https://github.com/NVIDIA-NeMo/Megatron-Bridge has a copy); it does not count its MTP layers."""
MIMO_MTP_LAYERS = 3

NEMOTRON3_NANO_CONFIG: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "torch_dtype": "bfloat16", "attention_bias": False,
    "attention_dropout": 0.0, "bos_token_id": 1, "chunk_size": 128, "conv_kernel": 4, "eos_token_id": 2, "expand": 2,
    "head_dim": 128, "hidden_dropout": 0.0, "hidden_size": 2688,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "initializer_range": 0.02,
    "intermediate_size": 1856, "layer_norm_epsilon": 1e-05, "mamba_head_dim": 64, "mamba_hidden_act": "silu",
    "mamba_num_heads": 64, "mamba_proj_bias": False, "mamba_ssm_cache_dtype": "float32", "max_position_embeddings": 262144,
    "mlp_bias": False, "mlp_hidden_act": "relu2", "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712,
    "n_group": 1, "n_groups": 8, "n_routed_experts": 128, "n_shared_experts": 1, "norm_eps": 1e-05, "norm_topk_prob": True,
    "num_attention_heads": 32, "num_experts_per_tok": 6, "num_hidden_layers": 52, "num_key_value_heads": 2,
    "num_logits_to_keep": 1, "pad_token_id": 0, "partial_rotary_factor": 1.0, "rescale_prenorm_residual": True,
    "residual_in_fp32": False, "rope_theta": 10000, "routed_scaling_factor": 2.5, "sliding_window": None,
    "ssm_state_size": 128, "tie_word_embeddings": False, "time_step_floor": 0.0001, "time_step_max": 0.1,
    "time_step_min": 0.001, "topk_group": 1, "use_bias": False, "use_cache": True, "use_conv_bias": True,
    "use_mamba_kernels": True, "vocab_size": 131072,
}  # fmt: skip
"""nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16 (https://github.com/jax-ml/jax-llm-examples has a copy)."""
NEMOTRON3_SUPER_CONFIG: dict[str, Any] = NEMOTRON3_NANO_CONFIG | {
    "hidden_size": 4096, "intermediate_size": 2688, "mamba_num_heads": 128, "moe_intermediate_size": 2688,
    "hybrid_override_pattern": "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME",
    "moe_latent_size": 1024, "moe_shared_expert_intermediate_size": 5376, "moe_shared_expert_overlap": False,
    "mtp_hybrid_override_pattern": "*E", "n_routed_experts": 512, "num_experts_per_tok": 22, "num_hidden_layers": 88,
    "num_nextn_predict_layers": 1, "routed_scaling_factor": 5.0,
}  # fmt: skip
"""nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16: its widths and pattern as tests of Megatron-Bridge and scripts of Megatron-LM
have them; its MTP block has 1,040 tensors (https://github.com/ml-explore/mlx-lm/pull/1161)."""


def _matrices(prefix: str, **shapes: tuple[int, int]) -> Shapes:
    for name, shape in shapes.items():
        yield f"{prefix}.{name}.weight", shape


def _mlp(prefix: str, hidden: int, width: int) -> Shapes:
    return _matrices(prefix, gate_proj=(width, hidden), up_proj=(width, hidden), down_proj=(hidden, width))


def _attention(prefix: str, hidden: int, heads: int, kv_heads: int, key: int, value: int) -> Shapes:
    yield from _matrices(
        prefix, q_proj=(heads * key, hidden), k_proj=(kv_heads * key, hidden), v_proj=(kv_heads * value, hidden),
        o_proj=(hidden, heads * value),
    )  # fmt: skip


def _vectors(prefix: str, hidden: int, *names: str) -> Shapes:
    for name in names:
        yield f"{prefix}.{name}.weight", (hidden,)


# ------------------------------------------------------------------------------------------------ Step-3.5-Flash
def step35_shapes(config: dict[str, Any]) -> Shapes:
    """Full and sliding attention with a gate for each head, dense MTP layers inlined; `stacked` is the published form."""
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    with_experts = {int(layer) for layer in config["moe_layers_enum"].split(",")}
    for layer in range(layers + config["num_nextn_predict_layers"]):
        prefix = f"model.layers.{layer}"
        sliding = config["layer_types"][layer] == "sliding_attention"
        heads = (config["attention_other_setting"] if sliding else config)["num_attention_heads"]
        key = config["head_dim"]
        yield from _vectors(prefix, hidden, "input_layernorm", "post_attention_layernorm")
        yield from _attention(f"{prefix}.self_attn", hidden, heads, config["num_attention_groups"], key, key)
        yield f"{prefix}.self_attn.g_proj.weight", (heads, hidden)
        yield from _vectors(f"{prefix}.self_attn", key, "q_norm", "k_norm")
        if layer in with_experts and layer < layers:
            yield from _step35_experts(prefix, config)
        else:
            yield from _mlp(f"{prefix}.mlp", hidden, config["intermediate_size"])
        if layer >= layers:
            yield f"{prefix}.eh_proj.weight", (hidden, 2 * hidden)
            yield from _vectors(prefix, hidden, "enorm", "hnorm", "transformer.shared_head.norm")
            yield f"{prefix}.transformer.shared_head.output.weight", (config["vocab_size"], hidden)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (config["vocab_size"], hidden)


def _step35_experts(prefix: str, config: dict[str, Any]) -> Shapes:
    hidden, experts, width = config["hidden_size"], config["moe_num_experts"], config["moe_intermediate_size"]
    yield f"{prefix}.moe.gate.weight", (experts, hidden)
    yield f"{prefix}.moe.router_bias", (experts,)
    for expert in range(experts):
        yield from _mlp(f"{prefix}.moe.experts.{expert}", hidden, width)
    yield from _mlp(f"{prefix}.share_expert", hidden, config["share_expert_dim"])


def stacked(shapes: Shapes) -> Shapes:
    """The experts of a layer in three 3-D tensors, where the first of them stood."""
    every = list(shapes)
    experts = Counter(re.sub(r"\.experts\.\d+\.", ".", name) for name, _ in every if ".experts." in name)
    for name, shape in every:
        if ".experts." not in name:
            yield name, shape
        elif ".experts.0." in name:
            name = name.replace(".experts.0.", ".")
            yield name, (experts[name], *shape)


# ------------------------------------------------------------------------------------------------ MiMo-V2-Flash
def mimo_v2_flash_shapes(config: dict[str, Any]) -> Shapes:
    """Full and sliding attention with other numbers of key-value heads, values narrower than keys; MTP beside the layers."""
    hidden = config["hidden_size"]
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        yield from _vectors(prefix, hidden, "input_layernorm", "post_attention_layernorm")
        yield from _mimo_attention(f"{prefix}.self_attn", config, sliding=config["hybrid_layer_pattern"][layer] == 1)
        if not config["moe_layer_freq"][layer]:
            yield from _mlp(f"{prefix}.mlp", hidden, config["intermediate_size"])
            continue
        yield f"{prefix}.mlp.gate.weight", (config["n_routed_experts"], hidden)
        yield f"{prefix}.mlp.gate.e_score_correction_bias", (config["n_routed_experts"],)
        for expert in range(config["n_routed_experts"]):
            yield from _mlp(f"{prefix}.mlp.experts.{expert}", hidden, config["moe_intermediate_size"])
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (config["vocab_size"], hidden)
    for layer in range(MIMO_MTP_LAYERS):
        prefix = f"model.mtp.layers.{layer}"
        yield f"{prefix}.eh_proj.weight", (hidden, 2 * hidden)
        yield from _vectors(prefix, hidden, "enorm", "hnorm", "input_layernorm", "pre_mlp_layernorm", "final_layernorm")
        yield from _mimo_attention(f"{prefix}.self_attn", config, sliding=True)
        yield from _mlp(f"{prefix}.mlp", hidden, config["intermediate_size"])


def _mimo_attention(prefix: str, config: dict[str, Any], *, sliding: bool) -> Shapes:
    keys = ("num_attention_heads", "num_key_value_heads", "head_dim", "v_head_dim")
    heads, kv_heads, key, value = (config[f"swa_{name}" if sliding else name] for name in keys)
    yield from _attention(prefix, config["hidden_size"], heads, kv_heads, key, value)
    if sliding:
        yield f"{prefix}.attention_sink_bias", (heads,)


# ------------------------------------------------------------------------------------------------ Nemotron 3
def nemotron3_shapes(config: dict[str, Any]) -> Shapes:
    """Each layer one mixer: Mamba, experts without a gate projection, or attention; an MTP step has several such layers."""
    hidden = config["hidden_size"]
    yield "backbone.embeddings.weight", (config["vocab_size"], hidden)
    kinds = {"M": _mamba, "E": _nemotron_experts, "*": _nemotron_attention}
    for layer, kind in enumerate(config["hybrid_override_pattern"]):
        yield f"backbone.layers.{layer}.norm.weight", (hidden,)
        yield from kinds[kind](f"backbone.layers.{layer}.mixer", config)
    yield "backbone.norm_f.weight", (hidden,)
    yield "lm_head.weight", (config["vocab_size"], hidden)
    step = config.get("mtp_hybrid_override_pattern", "") if config.get("num_nextn_predict_layers") else ""
    for layer, kind in enumerate(step):
        prefix = f"mtp.layers.{layer}"
        if layer == 0:
            yield f"{prefix}.eh_proj.weight", (hidden, 2 * hidden)
            yield from _vectors(prefix, hidden, "enorm", "hnorm")
        yield f"{prefix}.norm.weight", (hidden,)
        yield from kinds[kind](f"{prefix}.mixer", config)
        if layer == len(step) - 1:
            yield f"{prefix}.final_layernorm.weight", (hidden,)


def _mamba(prefix: str, config: dict[str, Any]) -> Shapes:
    hidden, heads = config["hidden_size"], config["mamba_num_heads"]
    width, states = heads * config["mamba_head_dim"], 2 * config["n_groups"] * config["ssm_state_size"]
    yield from _matrices(prefix, in_proj=(2 * width + states + heads, hidden), out_proj=(hidden, width))
    yield f"{prefix}.conv1d.weight", (width + states, 1, config["conv_kernel"])
    yield f"{prefix}.conv1d.bias", (width + states,)
    for name in ("A_log", "D", "dt_bias"):
        yield f"{prefix}.{name}", (heads,)
    yield f"{prefix}.norm.weight", (width,)


def _nemotron_attention(prefix: str, config: dict[str, Any]) -> Shapes:
    heads, kv_heads, width = (config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    return _attention(prefix, config["hidden_size"], heads, kv_heads, width, width)


def _nemotron_experts(prefix: str, config: dict[str, Any]) -> Shapes:
    hidden, experts, width = (config[key] for key in ("hidden_size", "n_routed_experts", "moe_intermediate_size"))
    shared = config["moe_shared_expert_intermediate_size"]
    yield f"{prefix}.gate.weight", (experts, hidden)
    yield f"{prefix}.gate.e_score_correction_bias", (experts,)
    yield from _matrices(f"{prefix}.shared_experts", up_proj=(shared, hidden), down_proj=(hidden, shared))
    latent = config.get("moe_latent_size") or hidden
    if latent != hidden:
        yield from _matrices(prefix, fc1_latent_proj=(latent, hidden), fc2_latent_proj=(hidden, latent))
    for expert in range(experts):
        yield from _matrices(f"{prefix}.experts.{expert}", up_proj=(width, latent), down_proj=(latent, width))


MODELS: dict[str, tuple[dict[str, Any], Any]] = {
    "step-3.5-flash": (STEP35_FLASH_CONFIG, step35_shapes),
    "mimo-v2-flash": (MIMO_V2_FLASH_CONFIG, mimo_v2_flash_shapes),
    "nemotron-3-nano": (NEMOTRON3_NANO_CONFIG, nemotron3_shapes),
    "nemotron-3-super": (NEMOTRON3_SUPER_CONFIG, nemotron3_shapes),
}
"""Model -> (config, names and shapes)."""


def cut_to(config: dict[str, Any], layers: int) -> dict[str, Any]:
    """`config` with so few decoder layers that each kind is still among them, and all lists of the right length."""
    if "moe_layers_enum" in config:
        lists = {key: value for key, value in config.items() if isinstance(value, list) and len(value) == _STEP_LAYERS}
        own = {key: value[:layers] + value[config["num_hidden_layers"] :] for key, value in lists.items()}
        return {**config, **own, "num_hidden_layers": layers, "moe_layers_enum": ",".join(map(str, range(1, layers)))}
    if "hybrid_layer_pattern" in config:
        own = {key: config[key][:layers] for key in ("moe_layer_freq", "hybrid_layer_pattern")}
        return {**config, **own, "num_hidden_layers": layers}
    if "hybrid_override_pattern" in config:
        return {**config, "num_hidden_layers": layers, "hybrid_override_pattern": "M*E" + "M" * (layers - 3)}
    if "compress_ratios" in config:
        return hollow_deepseek_v4.cut_to(config, layers)
    return config
