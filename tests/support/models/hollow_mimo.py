"""MiMo-V2.5, for `hollow.py`: its published config, names and shapes, and the form of its FP8 release."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import hollow_hybrids
from hollow_parts import linears, mlp_of, norms_of

Shapes = Iterator[tuple[str, tuple[int, ...]]]

MIMO_V25_CONFIG: dict[str, Any] = {
    **hollow_hybrids.MIMO_V2_FLASH_CONFIG, "architectures": ["MiMoV2ForCausalLM"], "model_type": "mimo_v2",
    "attention_projection_layout": "fused_qkv", "max_position_embeddings": 1048576, "rope_theta": 10000000,
    "image_token_id": 151655, "video_token_id": 151656, "vision_end_token_id": 151653, "vision_start_token_id": 151652,
    "eos_token_id": 151645, "pad_token_id": 151643, "vision_model_type": "mimovl",
    "audio_config": {
        "add_post_norm": True, "audio_channels": 20, "audio_segment_size": 6000, "group_size": 4, "input_full_attention": True,
        "input_local_attn_heads": 16, "input_local_dim": 1024, "input_local_head_dim": 64, "input_local_hidden_dropout": 0.0,
        "input_local_intermediate_size": 4096, "input_local_layers": 6, "out_hidden_size": 4096, "partial_rotary_factor": 1.0,
        "projection_layers": 2, "rope_theta": 640000, "speech_vocab_size": "1280", "speech_zeroemb_idx": "1024",
    },
    "vision_config": {
        "depth": 28, "fullatt_block_indexes": [0, 9, 18, 27], "hidden_act": "silu", "hidden_size": 1280, "in_chans": 3,
        "intermediate_size": 4608, "num_heads": 32, "num_key_value_heads": 8, "num_query_groups": 4, "out_hidden_size": 4096,
        "patch_size": 16, "spatial_merge_size": 2, "spatial_patch_size": 16, "temporal_patch_size": 2, "tokens_per_second": 2,
        "use_sink": True, "visual_token_window_size": 64, "vit_window_attn_types": [-1, *([0] * 4 + [1] * 4 + [-1]) * 3],
        "window_size": 128,
    },
}  # fmt: skip
"""XiaomiMiMo/MiMo-V2.5, without what a processor is told."""
HEAD_OF_TOWER = 64
"""`qk_channels`, which the config leaves out."""


def mimo_v25_shapes(config: dict[str, Any]) -> Shapes:
    """MiMo-V2-Flash with queries, keys and values of a layer in one tensor, and towers of images and speech."""
    joined: dict[str, int] = {}
    for name, shape in hollow_hybrids.mimo_v2_flash_shapes(config):
        attention, _, part = name.rpartition(".self_attn.")
        if part in ("q_proj.weight", "k_proj.weight"):
            joined[attention] = joined.get(attention, 0) + shape[0]
        elif part == "v_proj.weight":
            yield f"{attention}.self_attn.qkv_proj.weight", (joined.pop(attention) + shape[0], shape[1])
        else:
            yield name, shape
    yield from _images(config["vision_config"])
    yield from _speech(config["audio_config"])


def _images(config: dict[str, Any]) -> Shapes:
    hidden, heads, patch = config["hidden_size"], config["num_heads"], config["patch_size"]
    wide, rows = heads * HEAD_OF_TOWER, (heads + 2 * config["num_key_value_heads"]) * HEAD_OF_TOWER
    yield "visual.patch_embed.proj.weight", (hidden, config["in_chans"], config["temporal_patch_size"], patch, patch)
    for number in range(config["depth"]):
        block = f"visual.blocks.{number}"
        yield from norms_of(block, hidden, "norm1", "norm2")
        yield from linears(f"{block}.attn", bias=True, qkv=(rows, hidden), proj=(hidden, wide))
        if number not in config["fullatt_block_indexes"]:
            yield f"{block}.attn.sinks", (heads,)
        for name, shape in mlp_of(f"{block}.mlp", hidden, config["intermediate_size"]):
            yield name, shape
            yield name.replace(".weight", ".bias"), shape[:1]
    merged = hidden * config["spatial_merge_size"] ** 2
    yield from norms_of("visual.merger", hidden, "ln_q")
    yield from linears("visual.merger.mlp", **{"0": (merged, merged), "2": (config["out_hidden_size"], merged)})


def _speech(config: dict[str, Any]) -> Shapes:
    width, transformer = config["input_local_dim"], "audio_encoder.input_local_transformer"
    for channel in range(config["audio_channels"]):
        yield f"speech_embeddings.{channel}.weight", (int(config["speech_vocab_size"]), width)
    for number in range(config["input_local_layers"]):
        layer = f"{transformer}.layers.{number}"
        yield from norms_of(layer, width, "input_layernorm", "post_attention_layernorm")
        yield from linears(f"{layer}.self_attn", bias=True, **dict.fromkeys(("q_proj", "k_proj", "v_proj"), (width, width)))
        yield from linears(f"{layer}.self_attn", o_proj=(width, width))
        yield from mlp_of(f"{layer}.mlp", width, config["input_local_intermediate_size"])
    yield from norms_of(transformer, width, "norm")
    wide = width * config["group_size"]
    yield from linears("audio_encoder.projection.mlp", **{"0": (4 * wide, wide), "2": (config["out_hidden_size"], 4 * wide)})


def as_published(config: dict[str, Any], shapes: Shapes, in_fp8: Any) -> tuple[Shapes, dict[str, str]]:
    """(names and shapes, dtypes) of the FP8 release: joined tensors with scales for each rank's share of them."""
    made: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, str] = {}
    for name, shape in shapes:
        made[name] = shape
        if name.startswith("model.") and ".o_proj." not in name and in_fp8.fullmatch(name):
            ranks = config["num_key_value_heads"] if ".qkv_proj." in name else 1
            scale = f"{name}_scale_inv"
            made[scale] = (ranks * math.ceil(shape[0] / ranks / 128), math.ceil(shape[1] / 128))
            dtypes |= {name: "F8_E4M3", scale: "F32"}
    return iter(made.items()), dtypes
