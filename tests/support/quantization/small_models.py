"""Small checkpoints with random weights of the models of `hollow.py`: their names and configs, few and narrow layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hollow
import torch
from tiny_checkpoints import cut_into_shards, random_tensors, write_json, write_shards, write_tokenizer

NARROW = {"num_hidden_layers": 2, "hidden_size": 256, "vocab_size": 512, "max_position_embeddings": 4096}
MLA = {
    "first_k_dense_replace": 1, "intermediate_size": 256, "moe_intermediate_size": 128, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 128, "n_group": 1,
    "topk_group": 1,
}  # fmt: skip
"""Latent ranks and sizes of heads stay what they are: vLLM's kernels are made for them."""
TINY: dict[str, dict[str, Any]] = {
    "glm-4.7-flash": {**NARROW, **MLA},
    "deepseek-v3.2": {**NARROW, **MLA},
}
"""Model of `hollow.MODELS` -> what is small in it."""


def make_tiny_model(folder: Path, model: str, *, seed: int = 0) -> Path:
    """Write a random checkpoint of `model` in BF16, complete with tokenizer, in two shards. Same arguments, same bytes."""
    base, shapes_of = hollow.MODELS[model]
    config = {**base, **TINY[model]}
    folder.mkdir(parents=True)
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", {"eos_token_id": [0], "pad_token_id": 0})
    tensors = random_tensors(dict(shapes_of(config)), seed, torch.bfloat16)
    write_shards(folder, cut_into_shards(tensors, 2))
    write_tokenizer(folder, config["vocab_size"])
    return folder
