"""Small checkpoints with random weights of the models of `hollow.py`: their names and configs, few and narrow layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hollow
import hollow_deepseek_v4
import hollow_hybrids
import hollow_mimo
import torch
from deepseek_v4_checkpoints import store_as_deepseek_v4
from mimo_checkpoints import store_as_mimo
from tiny_checkpoints import (
    cut_into_shards,
    random_tensors,
    store_as_fp8,
    store_as_int4,
    write_json,
    write_shards,
    write_tokenizer,
)

NARROW = {"num_hidden_layers": 2, "hidden_size": 256, "vocab_size": 512, "max_position_embeddings": 4096}
MLA = {
    "first_k_dense_replace": 1, "intermediate_size": 256, "moe_intermediate_size": 128, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 128, "n_group": 1,
    "topk_group": 1,
}  # fmt: skip
"""Latent ranks and sizes of heads stay what they are: vLLM's kernels are made for them."""
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
_NEMOTRON = {
    **NARROW, **_HEADS, "num_hidden_layers": 3, "intermediate_size": 128, "moe_intermediate_size": 128,
    "moe_shared_expert_intermediate_size": 256, "n_routed_experts": 4, "num_experts_per_tok": 2, "head_dim": 64,
    "mamba_num_heads": 8, "n_groups": 2, "ssm_state_size": 64,
}  # fmt: skip
TINY: dict[str, dict[str, Any]] = {
    "glm-4.7-flash": {**NARROW, **MLA},
    "deepseek-v3.2": {**NARROW, **MLA},
    "minimax-m2": {
        **NARROW, "attn_type_list": [1, 1], "intermediate_size": 128, "num_attention_heads": 2, "num_experts_per_tok": 2,
        "num_key_value_heads": 2, "num_local_experts": 4,
    },
    "qwen3.5-35b-a3b": {
        **NARROW, "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "moe_intermediate_size": 128,
        "num_attention_heads": 2, "num_experts": 4, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 128,
    },
    "kimi-k2.5": {**NARROW, **MLA},
    "ernie-4.5-21b": {
        **NARROW, "intermediate_size": 256, "moe_intermediate_size": 128, "moe_k": 2, "moe_layer_end_index": 1,
        "moe_num_experts": 4, "num_attention_heads": 2, "num_key_value_heads": 2,
    },
    "step-3.5-flash": {
        **hollow_hybrids.cut_to(hollow_hybrids.STEP35_FLASH_CONFIG, 3), **NARROW, "num_hidden_layers": 3,
        "intermediate_size": 256, "moe_intermediate_size": 128, "share_expert_dim": 128, "moe_num_experts": 4, "moe_top_k": 2,
        "num_attention_heads": 4, "num_attention_groups": 2, "head_dim": 64,
        "attention_other_setting": {
            "attention_type": "sliding_attention", "num_attention_heads": 8, "num_attention_groups": 2, "head_dim": 64,
        },
    },
    "mimo-v2-flash": {
        **hollow_hybrids.cut_to(hollow_hybrids.MIMO_V2_FLASH_CONFIG, 3), **NARROW, "num_hidden_layers": 3,
        "intermediate_size": 256, "moe_intermediate_size": 128, "n_routed_experts": 4, "num_experts_per_tok": 2, **_HEADS,
        "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4,
    },
    "mimo-v2.5": {
        **hollow_hybrids.cut_to(hollow_mimo.MIMO_V25_CONFIG, 3), **NARROW, "num_hidden_layers": 3, "intermediate_size": 256,
        "moe_intermediate_size": 128, "n_routed_experts": 4, "num_experts_per_tok": 2, **_HEADS, "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "audio_config": {
            **hollow_mimo.MIMO_V25_CONFIG["audio_config"], "audio_channels": 2, "group_size": 1, "input_local_attn_heads": 2,
            "input_local_dim": 64, "input_local_head_dim": 32, "input_local_intermediate_size": 96, "input_local_layers": 1,
            "out_hidden_size": 256, "speech_vocab_size": "32",
        },
    },
    "nemotron-3-nano": {**hollow_hybrids.cut_to(hollow_hybrids.NEMOTRON3_NANO_CONFIG, 3), **_NEMOTRON},
    "nemotron-3-super": {
        **hollow_hybrids.cut_to(hollow_hybrids.NEMOTRON3_SUPER_CONFIG, 3), **_NEMOTRON, "moe_latent_size": 128,
    },
    "deepseek-v4-flash": {
        **hollow_deepseek_v4.cut_to(hollow_deepseek_v4.DEEPSEEK_V4_FLASH_CONFIG, 3), **NARROW, "num_hidden_layers": 3,
        "moe_intermediate_size": 128, "n_routed_experts": 4, "num_attention_heads": 2, "num_experts_per_tok": 2, "o_groups": 2,
        "o_lora_rank": 128, "q_lora_rank": 128,
    },
}  # fmt: skip
"""Model of `hollow.MODELS` -> what is small in it."""
ONE_SHARD = ("minimax-m2", "nemotron-3-nano", "nemotron-3-super", "deepseek-v4-flash")
"""Models without pairs of `gate_proj` and `up_proj`, between which shards are cut."""
LISTED = list(hollow.MINIMAX_FP8["modules_to_not_convert"])
VISION = {
    "qwen3.5-35b-a3b": {
        "depth": 1, "hidden_size": 64, "intermediate_size": 96, "num_heads": 2, "num_position_embeddings": 16,
        "out_hidden_size": 256,
    },
    "mimo-v2.5": {
        "depth": 2, "hidden_size": 64, "intermediate_size": 96, "num_heads": 2, "num_key_value_heads": 1,
        "out_hidden_size": 256,
    },
    "kimi-k2.5": {
        "init_pos_emb_height": 4, "init_pos_emb_width": 4, "mm_hidden_size": 64, "text_hidden_size": 256, "vt_hidden_size": 64,
        "vt_intermediate_size": 96, "vt_num_attention_heads": 2, "vt_num_hidden_layers": 1,
    },
}  # fmt: skip
"""The same of its vision tower."""


def make_tiny_model(folder: Path, model: str, *, seed: int = 0) -> Path:
    """Write a random checkpoint of `model`, complete with tokenizer: BF16, and FP32 where the model has it. Same arguments,
    same bytes."""
    base, shapes_of = hollow.MODELS[model]
    config = hollow.changed(base, **TINY[model])
    if model in VISION:
        config["vision_config"] = {**base["vision_config"], **VISION[model]}
    folder.mkdir(parents=True)
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", {"eos_token_id": [0], "pad_token_id": 0})
    tensors = random_tensors(dict(shapes_of(config)), seed, torch.bfloat16)
    for name in hollow.in_fp32(model, list(shapes_of(config))):
        tensors[name] = tensors[name].float() * (1 + 2**-12)  # no BF16
    for name in tensors:
        if hollow.dtype_of(name) == "F32":
            tensors[name] = tensors[name].float()
    if model in hollow.STACKED_RELEASES:
        tensors = _stacked(tensors)
    write_shards(folder, cut_into_shards(tensors, 1 if model in ONE_SHARD else 2))
    write_tokenizer(folder, config.get("text_config", config)["vocab_size"])
    return folder


def as_published(source: Path, folder: Path, model: str) -> Path:
    """A checkpoint of `make_tiny_model`, in FP8 or with its experts in INT4 or FP4 where the model is published so."""
    if model in hollow.DEEPSEEK_V4:
        return store_as_deepseek_v4(source, folder)
    if model in hollow.JOINED_RELEASES:
        return store_as_mimo(source, folder)
    if model in hollow.INT4_RELEASES:
        return store_as_int4(source, folder)
    return store_as_fp8(source, folder, listed=LISTED) if model == "minimax-m2" else source


def _stacked(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The experts of a layer in three 3-D tensors, as the model is published."""
    shapes = hollow_hybrids.stacked((name, tuple(tensor.shape)) for name, tensor in tensors.items())
    experts = {name: shape[0] for name, shape in shapes if name not in tensors}
    made = {
        name: torch.stack([tensors[name.replace(".moe.", f".moe.experts.{expert}.")] for expert in range(count)])
        for name, count in experts.items()
    }
    return {name: tensor for name, tensor in tensors.items() if ".experts." not in name} | made
