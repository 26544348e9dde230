"""Names, shapes and dtypes of DeepSeek-V4, as the headers of its release have them.

deepseek-ai/DeepSeek-V4-Flash on Hugging Face: 69,187 tensors, 159,609,485,896 bytes. A layer attends to a window alone, or also
to what a compressor makes of every 4 or 128 tokens, those of 4 chosen by an indexer; the first layers choose experts by a table
of tokens.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

Shapes = Iterator[tuple[str, tuple[int, ...]]]

DEEPSEEK_V4_FLASH_CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 0,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0], "compress_rope_theta": 160000, "eos_token_id": 1, "expert_dtype": "fp4",
    "hc_eps": 1e-06, "hc_mult": 4, "hc_sinkhorn_iters": 20, "head_dim": 512, "hidden_act": "silu", "hidden_size": 4096,
    "index_head_dim": 128, "index_n_heads": 64, "index_topk": 512, "initializer_range": 0.02,
    "max_position_embeddings": 1048576, "model_type": "deepseek_v4", "moe_intermediate_size": 2048, "n_routed_experts": 256,
    "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 64, "num_experts_per_tok": 6, "num_hash_layers": 3,
    "num_hidden_layers": 43, "num_key_value_heads": 1, "num_nextn_predict_layers": 1, "o_groups": 8, "o_lora_rank": 1024,
    "q_lora_rank": 1024, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 16, "original_max_position_embeddings": 65536, "type": "yarn",
    },
    "rope_theta": 10000, "routed_scaling_factor": 1.5, "scoring_func": "sqrtsoftplus", "sliding_window": 128,
    "swiglu_limit": 10.0, "tie_word_embeddings": False, "topk_method": "noaux_tc", "torch_dtype": "bfloat16",
    "use_cache": True, "vocab_size": 129280,
}  # fmt: skip
DEEPSEEK_V4_PRO_CONFIG: dict[str, Any] = {
    **DEEPSEEK_V4_FLASH_CONFIG, "compress_ratios": [128, 128, *[4, 128] * 29, 4, 0], "hidden_size": 7168, "index_topk": 1024,
    "moe_intermediate_size": 3072, "n_routed_experts": 384, "num_attention_heads": 128, "num_hidden_layers": 61, "o_groups": 16,
    "q_lora_rank": 1536, "routed_scaling_factor": 2.5,
}  # fmt: skip
"""deepseek-ai/DeepSeek-V4-Pro: 145,116 tensors."""
QUANTIZATION = {
    "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [128, 128],
}  # fmt: skip
IN_FP8 = re.compile(r".*\.(attn\.(w[qo]_[ab]|wkv)|indexer\.wq_b|shared_experts\.w[123]|[eh]_proj)\.weight")
IN_FP4 = re.compile(r".*\.experts\.\d+\.w[123]\.weight")
IN_FP32 = re.compile(r"(.*\.)?(hc_\w+|ape|attn_sink|gate\.bias)")


def deepseek_v4_shapes(config: dict[str, Any]) -> Shapes:
    """Weights as they would be without scales, in the order of layers."""
    hidden = config["hidden_size"]
    yield "embed.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        yield from _layer(f"layers.{layer}", config, config["compress_ratios"][layer], hashed=layer < config["num_hash_layers"])
    yield from _head("", config)
    yield "head.weight", (config["vocab_size"], hidden)
    for number in range(config["num_nextn_predict_layers"]):
        prefix = f"mtp.{number}"
        yield from _layer(prefix, config, 0, hashed=False)
        for name in ("e_proj", "h_proj"):
            yield f"{prefix}.{name}.weight", (hidden, hidden)
        for name in ("enorm", "hnorm"):
            yield f"{prefix}.{name}.weight", (hidden,)
        yield from _head(f"{prefix}.", config)


def _head(prefix: str, config: dict[str, Any]) -> Shapes:
    streams, hidden = config["hc_mult"], config["hidden_size"]
    yield f"{prefix}hc_head_base", (streams,)
    yield f"{prefix}hc_head_fn", (streams, streams * hidden)
    yield f"{prefix}hc_head_scale", (1,)
    yield f"{prefix}norm.weight", (hidden,)


def _layer(prefix: str, config: dict[str, Any], ratio: int, *, hashed: bool) -> Shapes:
    hidden, streams = config["hidden_size"], config["hc_mult"]
    yield from attention_shapes(f"{prefix}.attn", config, ratio)
    yield from _experts(f"{prefix}.ffn", config, hashed=hashed)
    mixes = streams * (2 + streams)
    for part in ("attn", "ffn"):
        yield f"{prefix}.{part}_norm.weight", (hidden,)
        yield f"{prefix}.hc_{part}_base", (mixes,)
        yield f"{prefix}.hc_{part}_fn", (mixes, streams * hidden)
        yield f"{prefix}.hc_{part}_scale", (3,)


def attention_shapes(prefix: str, config: dict[str, Any], ratio: int) -> Shapes:
    hidden, heads, width, q_rank = (config[k] for k in ("hidden_size", "num_attention_heads", "head_dim", "q_lora_rank"))
    groups, o_rank = config["o_groups"], config["o_lora_rank"]
    yield f"{prefix}.attn_sink", (heads,)
    yield f"{prefix}.kv_norm.weight", (width,)
    yield f"{prefix}.q_norm.weight", (q_rank,)
    yield f"{prefix}.wkv.weight", (width, hidden)
    yield f"{prefix}.wo_a.weight", (groups * o_rank, heads * width // groups)
    yield f"{prefix}.wo_b.weight", (hidden, groups * o_rank)
    yield f"{prefix}.wq_a.weight", (q_rank, hidden)
    yield f"{prefix}.wq_b.weight", (heads * width, q_rank)
    if ratio:
        yield from _compressor(f"{prefix}.compressor", hidden, width, ratio)
    if ratio == 4:
        index_heads, index_width = config["index_n_heads"], config["index_head_dim"]
        yield f"{prefix}.indexer.wq_b.weight", (index_heads * index_width, q_rank)
        yield f"{prefix}.indexer.weights_proj.weight", (index_heads, hidden)
        yield from _compressor(f"{prefix}.indexer.compressor", hidden, index_width, ratio)


def _compressor(prefix: str, hidden: int, width: int, ratio: int) -> Shapes:
    rows = 2 * width if ratio == 4 else width  # windows of 4 overlap
    yield f"{prefix}.ape", (ratio, rows)
    yield f"{prefix}.norm.weight", (width,)
    yield f"{prefix}.wgate.weight", (rows, hidden)
    yield f"{prefix}.wkv.weight", (rows, hidden)


def _experts(prefix: str, config: dict[str, Any], *, hashed: bool) -> Shapes:
    hidden, width, experts = config["hidden_size"], config["moe_intermediate_size"], config["n_routed_experts"]
    yield f"{prefix}.gate.weight", (experts, hidden)
    if hashed:
        yield f"{prefix}.gate.tid2eid", (config["vocab_size"], config["num_experts_per_tok"])
    else:
        yield f"{prefix}.gate.bias", (experts,)
    for module in ("shared_experts", *(f"experts.{expert}" for expert in range(experts))):
        yield f"{prefix}.{module}.w1.weight", (width, hidden)
        yield f"{prefix}.{module}.w2.weight", (hidden, width)
        yield f"{prefix}.{module}.w3.weight", (width, hidden)


def as_published(shapes: Shapes) -> tuple[Shapes, dict[str, str]]:
    """Names and shapes, and dtypes of what is not BF16: FP8 in blocks, FP4 in groups of 32, scales that are exponents."""
    made: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, str] = {}
    for name, shape in shapes:
        made[name] = shape
        scale = name.removesuffix("weight") + "scale"
        if IN_FP4.fullmatch(name):
            made |= {name: (shape[0], shape[1] // 2), scale: (shape[0], shape[1] // 32)}
            dtypes |= {name: "I8", scale: "F8_E8M0"}
        elif IN_FP8.fullmatch(name):
            made[scale] = (math.ceil(shape[0] / 128), math.ceil(shape[1] / 128))
            dtypes |= {name: "F8_E4M3", scale: "F8_E8M0"}
        elif name.endswith(".tid2eid"):
            dtypes[name] = "I64"
        elif IN_FP32.fullmatch(name):
            dtypes[name] = "F32"
    return iter(made.items()), dtypes


def cut_to(config: dict[str, Any], layers: int) -> dict[str, Any]:
    """`config` with so few layers that each kind is still among the first three."""
    ratios = [0, 4, 128, *[4, 128] * layers][:layers]
    return {**config, "num_hidden_layers": layers, "num_hash_layers": 1, "compress_ratios": [*ratios, 0]}
