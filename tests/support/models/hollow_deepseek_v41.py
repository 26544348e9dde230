"""Names, shapes and dtypes of DeepSeek-V4.1-Flash and DeepSeek-V4-Flash-Vision-Exp, as the headers of the releases have them.

Of V4.1, layers are of seven kinds: with a window alone, without and with a table of n-grams; layers that compress keys two to
one or one to one for those behind them, layers that choose keys for them, and layers that use both. Lists of layers are cut to
one of each. vLLM's class and the public converters of llama.cpp and mlx-lm have the same names.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import hollow
import hollow_deepseek_v4
from hollow_parts import Config, Model, Shapes, linears

from assay.recipes.text_config import text_of

VISION = {
    "model_type": "deepseek_v41_vision", "num_hidden_layers": 1, "hidden_size": 1024, "num_attention_heads": 16,
    "intermediate_size": 2816, "patch_size": 14, "rope_theta": 10000, "downsample_ratio": 3, "max_image_tokens": 1024,
    "min_pixels": 295936, "max_wh_ratio": None,
}  # fmt: skip
DEEPSEEK_V41_FLASH: Config = {
    "architectures": ["DeepseekV41ForCausalLM"], "model_type": "deepseek_v41", "dtype": "bfloat16", "bos_token_id": 0,
    "eos_token_id": 1, "pad_token_id": 2, "image_token_id": 129264,
    "text_config": {
        "model_type": "deepseek_v41_text", "vocab_size": 129280, "hidden_size": 5120, "moe_intermediate_size": 2304,
        "num_hidden_layers": 40, "num_attention_heads": 64, "num_key_value_heads": 1, "head_dim": 512, "qk_rope_head_dim": 64,
        "q_lora_rank": 1280, "o_lora_rank": 1024, "o_groups": 8, "hidden_act": "silu", "swiglu_limit": 10.0,
        "rms_norm_eps": 1e-20, "attention_bias": False, "max_position_embeddings": 1048576, "rope_theta": 10000,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 65536,
        },
        "n_routed_experts": 384, "n_shared_experts": 1, "num_experts_per_tok": 6, "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc", "norm_topk_prob": True, "routed_scaling_factor": 1.5, "sliding_window": 128,
        "compress_ratios": [0, 0, 2, 2, 1, 1, 1], "compress_rope_theta": 160000, "kv_source_layer_ids": [2, 4],
        "index_source_layer_ids": [2, 4, 5], "index_n_heads": 32, "index_head_dim": 128, "index_topk": 512,
        "candidate_source_layer_id": 4, "candidate_topk_blocks": 2048, "candidate_block_size": 8, "hc_mult": 4,
        "hc_sinkhorn_iters": 20, "hc_eps": 1e-06, "engram_layer_ids": [1], "engram_num_embeddings": [32768],
        "engram_max_ngram_size": 4, "engram_vocab_size": 1000, "engram_n_heads": 8, "engram_head_dim": 256,
        "engram_pad_token_id": 2, "engram_compressed_vocab_size": 99092, "num_nextn_predict_layers": 0,
        "dspark_block_size": 5, "dspark_noise_token_id": 128799, "dspark_target_layer_ids": [4, 5, 6],
        "dspark_markov_rank": 256, "dspark_n_routed_experts": 128, "dspark_num_experts_per_tok": 3,
    },
    "vision_config": VISION,
}  # fmt: skip
"""deepseek-ai/DeepSeek-V4.1-Flash, with small tables (there are two, of 384,006,168 and 384,016,682 rows) and without its draft
(three layers, with 128 experts each)."""
V41_QUANTIZATION = {
    "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32], "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
}  # fmt: skip
TABLE = "engram.embed.weight"
IN_FP8 = re.compile(
    r".*\.(attn\.(w[qo]_[ab]|wkv)|indexer\.wq_b|shared_experts\.w[123]|engram\.wkv|main_proj)\.weight"
)  # fmt: skip
IN_FP32 = re.compile(r"(.*\.)?(hc_\w+|ape|attn_sink|gate\.bias|gate\.bias_vl)")


def deepseek_v41_shapes(config: Config) -> Shapes:
    """Weights as they would be without scales; a draft if the config declares one."""
    text = text_of(config)
    hidden, vocab, rank = text["hidden_size"], text["vocab_size"], text["dspark_markov_rank"]
    yield "embed.weight", (vocab, hidden)
    for layer in range(text["num_hidden_layers"]):
        prefix = f"layers.{layer}"
        yield from _layer(prefix, text, text["n_routed_experts"])
        if layer in text["kv_source_layer_ids"]:
            yield from _compressor(f"{prefix}.attn", text, text["compress_ratios"][layer])
        if layer in text["index_source_layer_ids"]:
            yield f"{prefix}.attn.indexer.wq_b.weight", (text["index_n_heads"] * text["index_head_dim"], text["q_lora_rank"])
            yield f"{prefix}.attn.indexer.weights_proj.weight", (text["index_n_heads"], hidden)
        if layer in text["engram_layer_ids"]:
            yield from _engram(f"{prefix}.engram", text, text["engram_layer_ids"].index(layer))
    yield "norm.weight", (hidden,)
    yield "head.weight", (vocab, hidden)
    vision = config["vision_config"]
    yield from tower_of(
        hidden, vision["num_hidden_layers"], vision["hidden_size"], vision["intermediate_size"], vision["patch_size"],
        vision["downsample_ratio"],
    )  # fmt: skip
    for name in ("image_start", "image_newline", "image_end"):
        yield name, (hidden,)
    last = text["num_nextn_predict_layers"] - 1
    for number in range(last + 1):
        yield from _layer(f"mtp.{number}", text, text["dspark_n_routed_experts"])
    if last >= 0:
        yield "mtp.0.main_proj.weight", (hidden, len(text["dspark_target_layer_ids"]) * hidden)
        yield "mtp.0.main_norm.weight", (hidden,)
        yield f"mtp.{last}.norm.weight", (hidden,)
        yield f"mtp.{last}.markov_head.embed.weight", (vocab, rank)
        yield f"mtp.{last}.markov_head.head.weight", (vocab, rank)
        yield f"mtp.{last}.confidence_head.proj.weight", (1, hidden + rank)


def _layer(prefix: str, text: Config, experts: int) -> Shapes:
    hidden, streams, width = text["hidden_size"], text["hc_mult"], text["moe_intermediate_size"]
    yield from hollow_deepseek_v4.attention_shapes(f"{prefix}.attn", text, 0)
    yield f"{prefix}.ffn.gate.weight", (experts, hidden)
    yield f"{prefix}.ffn.gate.bias", (experts,)
    yield f"{prefix}.ffn.gate.bias_vl", (experts,)
    for module in ("shared_experts", *(f"experts.{expert}" for expert in range(experts))):
        yield from linears(f"{prefix}.ffn.{module}", w1=(width, hidden), w2=(hidden, width), w3=(width, hidden))
    mixes = streams * (2 + streams)
    for part in ("attn", "ffn"):
        yield f"{prefix}.{part}_norm.weight", (hidden,)
        yield f"{prefix}.hc_{part}_base", (mixes,)
        yield f"{prefix}.hc_{part}_fn", (mixes, streams * hidden)
        yield f"{prefix}.hc_{part}_scale", (3,)


def _compressor(prefix: str, text: Config, ratio: int) -> Shapes:
    """What a layer makes of its keys for those behind it, and of these what is chosen by."""
    hidden, width = text["hidden_size"], text["head_dim"]
    yield from linears(f"{prefix}.compressor", norm=(width,), wkv=(width, hidden))
    if ratio > 1:
        yield from linears(f"{prefix}.compressor", wgate=(width, hidden))
    yield from linears(f"{prefix}.indexer", wk=(text["index_head_dim"], width), k_norm=(text["index_head_dim"],))


def _engram(prefix: str, text: Config, number: int) -> Shapes:
    hidden, streams, width = text["hidden_size"], text["hc_mult"], text["engram_head_dim"]
    columns = (text["engram_max_ngram_size"] - 1) * text["engram_n_heads"]
    yield f"{prefix}.embed.weight", (text["engram_num_embeddings"][number], width)
    yield f"{prefix}.k_weight", (streams, hidden)
    yield f"{prefix}.q_weight", (streams, hidden)
    yield f"{prefix}.wkv.weight", ((streams + 1) * hidden, columns * width)


def tower_of(hidden: int, layers: int, width: int, wide: int, patch: int, downsample: int) -> Shapes:
    yield from linears("vision.patch_embed", bias=True, proj=(width, 3 * patch**2))
    for number in range(layers):
        block = f"vision.blocks.{number}"
        yield from linears(block, norm1=(width,), norm2=(width,))
        yield from linears(f"{block}.attn", bias=True, wqkv=(3 * width, width), wo=(width, width))
        yield from linears(f"{block}.mlp", w1=(2 * wide, width), w2=(width, wide))
    yield from linears("vision", norm=(width,))
    yield from linears("aligner", bias=True, w1=(hidden, width * downsample**2), w2=(hidden, hidden))


def is_in_fp4(name: str) -> bool:
    return hollow_deepseek_v4.IN_FP4.fullmatch(name) is not None


def scale_of(name: str, shape: tuple[int, ...], block: int) -> tuple[int, ...] | None:
    """Shape of the scales that lie beside a weight of the release; None: it is stored plain."""
    if name.endswith(TABLE) or is_in_fp4(name):
        return shape[0], shape[1] // 32
    return (math.ceil(shape[0] / block), math.ceil(shape[1] / block)) if IN_FP8.fullmatch(name) else None


def as_published(shapes: Shapes, block: int) -> tuple[Shapes, dict[str, str]]:
    """Names and shapes, and dtypes of what is not BF16. block: rows, and columns, that share a scale in FP8."""
    made: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, str] = {}
    for name, shape in shapes:
        made[name] = shape
        if (of_scale := scale_of(name, shape, block)) is not None:
            scale = name.removesuffix("weight") + "scale"
            made |= {name: (shape[0], shape[1] // 2) if is_in_fp4(name) else shape, scale: of_scale}
            dtypes |= {name: "I8" if is_in_fp4(name) else "F8_E4M3", scale: "F8_E8M0"}
        elif name.endswith(".tid2eid"):
            dtypes[name] = "I64"
        elif IN_FP32.fullmatch(name):
            dtypes[name] = "F32"
    return iter(made.items()), dtypes


def deepseek_v41_published(config: Config, shapes: Shapes) -> tuple[Config, Shapes, dict[str, str]]:
    return {**config, "quantization_config": V41_QUANTIZATION}, *as_published(shapes, 32)


MODELS: dict[str, Model] = {
    "deepseek_v41": Model(
        "DeepSeek-V4.1-Flash", DEEPSEEK_V41_FLASH, deepseek_v41_shapes,
        {
            "num_hidden_layers": 7, "hidden_size": 256, "vocab_size": 512, "max_position_embeddings": 4096,
            "moe_intermediate_size": 128, "n_routed_experts": 4, "num_attention_heads": 2, "num_experts_per_tok": 2,
            "o_groups": 2, "o_lora_rank": 128, "q_lora_rank": 128, "engram_vocab_size": 100, "engram_num_embeddings": [4096],
            "engram_head_dim": 64, "dspark_n_routed_experts": 3, "dspark_markov_rank": 32,
        },
        layers=7, in_fp32=rf"^{IN_FP32.pattern}$", published=deepseek_v41_published,
    ),
}  # fmt: skip
"""Family -> a model of it."""

V4_VISION: Config = {
    **hollow_deepseek_v4.DEEPSEEK_V4_FLASH_CONFIG, "num_nextn_predict_layers": 0, "vision_n_layers": 32, "vision_dim": 1024,
    "vision_n_heads": 16, "vision_inter_dim": 2816, "vision_patch_size": 14, "vision_rope_theta": 10000.0,
    "vision_downsample_ratio": 3, "vision_max_n_token": 384, "vision_min_pixels": 147456, "vision_max_wh_ratio": 8,
}  # fmt: skip
"""deepseek-ai/DeepSeek-V4-Flash-Vision-Exp, without its draft (three stages of DSpark)."""


def v4_vision_shapes(config: Config) -> Shapes:
    """DeepSeek-V4 with a tower, and in every layer two biases, also where a table chooses experts."""
    experts, hidden = config["n_routed_experts"], config["hidden_size"]
    for name, shape in hollow_deepseek_v4.deepseek_v4_shapes(config):
        yield name, shape
        if name.endswith(".ffn.gate.weight"):
            yield name.replace(".weight", ".bias_vl"), (experts,)
        elif name.endswith(".tid2eid"):
            yield name.replace(".tid2eid", ".bias"), (experts,)
    keys = ("n_layers", "dim", "inter_dim", "patch_size", "downsample_ratio")
    yield from tower_of(hidden, *(config[f"vision_{key}"] for key in keys))
    for name in ("image_start", "image_newline", "image_end", "image_pad"):
        yield name, (hidden,)


def v4_vision_published(config: Config, shapes: Shapes) -> tuple[Config, Shapes, dict[str, Any]]:
    return {**config, "quantization_config": hollow_deepseek_v4.QUANTIZATION}, *as_published(shapes, 128)


def write_v4_vision(folder: Path, *, layers: int, experts: int) -> Path:
    """A hollow checkpoint of one file, with a tower of one layer."""
    config = hollow_deepseek_v4.cut_to(V4_VISION, layers) | {"n_routed_experts": experts, "vision_n_layers": 1}
    config, shapes, dtypes = v4_vision_published(config, v4_vision_shapes(config))
    return hollow.write_hollow(folder, config, shapes, shards=1, dtypes=dtypes)
