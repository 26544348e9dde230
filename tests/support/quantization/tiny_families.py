"""Tiny random checkpoints of every family that vLLM serves on a CPU, in any shape, with the tokenizer of tiny-glm.

    folder = make_tiny(tmp_path / "odd", glm4_moe(hidden_size=576, num_attention_heads=9))
    release = make_tiny_deepseek_v3(tmp_path / "release")

Names and shapes are those of `hollow.py`, weights are random: same arguments, same bytes.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import hollow
import torch
import torch.nn.functional as F
from tiny_checkpoints import cut_into_shards, store_as_fp8, write_shards

TOKENIZER = Path(__file__).resolve().parents[3] / "examples" / "tiny_glm" / "checkpoint"
VOCABULARY = 896
"""Tokens of that tokenizer."""
RING, HEAD = 9.0, 3.0
"""Lengths of the rows of embedding and head; what the layers add to an embedding is about 16 long. See `_say_a_ring`."""
SMALL: dict[str, Any] = {
    "num_hidden_layers": 3, "first_k_dense_replace": 1, "hidden_size": 256, "intermediate_size": 256,
    "moe_intermediate_size": 128, "vocab_size": VOCABULARY, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 4096,
    "rope_theta": 10000.0, "rms_norm_eps": 1e-5, "hidden_act": "silu", "routed_scaling_factor": 1.0, "eos_token_id": [0, 4, 6],
    "bos_token_id": None, "pad_token_id": 0,
}  # fmt: skip


def glm4_moe(**changes: Any) -> dict[str, Any]:
    """A config of GLM-4.5's family: three layers, the first dense, and an MTP block."""
    own = {"norm_topk_prob": True, "n_group": 1, "topk_group": 1, "partial_rotary_factor": 0.5, "use_qk_norm": True}
    return {**hollow.GLM45_AIR_CONFIG, **SMALL, **own, **changes}


def qwen3_moe(**changes: Any) -> dict[str, Any]:
    """A config of Qwen3's family: every layer with experts, no MTP block."""
    own = {"num_experts": SMALL["n_routed_experts"], "norm_topk_prob": True, "decoder_sparse_step": 1, "attention_bias": False}
    small = {key: value for key, value in SMALL.items() if key not in ("n_routed_experts", "first_k_dense_replace")}
    return {**hollow.QWEN3_30B_CONFIG, **small, **own, **changes}


def deepseek_v3(**changes: Any) -> dict[str, Any]:
    """A config of DeepSeek-V3's family: latent attention (MLA), eight experts in four groups, and an MTP block.

    vLLM 0.32's kernel of MLA on a CPU takes latents of 512 values with 64 of rotary embedding and nothing else
    (vllm/v1/attention/backends/mla/cpu_mla.py), as the model has.
    """
    own = {
        "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "num_key_value_heads": 4,
        "q_lora_rank": 128, "kv_lora_rank": 512, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64,
        "attention_bias": False, "moe_layer_freq": 1,
    }  # fmt: skip
    small = {key: value for key, value in SMALL.items() if key != "head_dim"}
    return {**hollow.DEEPSEEK_V3_CONFIG, **small, **own, **changes}


def glm_moe_dsa() -> dict[str, Any]:
    """A config of GLM-5's family: latent attention, every layer with an indexer of its own, and an MTP block."""
    small = deepseek_v3(qk_rope_head_dim=32)
    own = {key: value for key, value in hollow.GLM5_CONFIG.items() if key not in small}
    names = {key: hollow.GLM5_CONFIG[key] for key in ("architectures", "model_type", "n_group", "topk_group")}
    return {**small, **own, **names, "index_n_heads": 4, "index_head_dim": 64, "index_topk": 16}


def qwen3_next() -> dict[str, Any]:
    """A config of Qwen3-Next's family, which says nothing of the MTP block that is stored."""
    own = {
        "num_hidden_layers": 4, "hidden_size": 128, "intermediate_size": 128, "shared_expert_intermediate_size": 128,
        "num_experts": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 64,
        "linear_value_head_dim": 64, "max_position_embeddings": 2048, "eos_token_id": 0, "bos_token_id": 0,
    }  # fmt: skip
    small = {key: value for key, value in SMALL.items() if key not in ("n_routed_experts", "first_k_dense_replace")}
    return {**hollow.QWEN3_NEXT_CONFIG, **small, **own}


def make_tiny(
    folder: Path, config: dict[str, Any], *, shards: int = 1, seed: int = 0, chat_template: bool = True, ring: bool = False
) -> Path:  # fmt: skip
    """A BF16 checkpoint of a config, complete enough for vLLM: one file without an index, or several with one.

    A head is stored unless the config ties it to the embedding. ring: `_say_a_ring`.
    """
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: _random(name, shape, generator) for name, shape in _shapes(config)}
    if ring:
        _say_a_ring(tensors, config)
    if config["tie_word_embeddings"]:
        del tensors["lm_head.weight"]
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    write_shards(folder, cut_into_shards(tensors, shards))
    for name in ("tokenizer.json", "tokenizer_config.json", *(("chat_template.jinja",) if chat_template else ())):
        shutil.copy(TOKENIZER / name, folder / name)
    return folder


def make_tiny_deepseek_v3(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """An FP8 release as DeepSeek publishes it: 128 x 128 blocks, `weight_scale_inv`, a `quantization_config` that lists no
    modules. Its MTP block has neither embedding nor head of its own; drafts are right more often than not."""
    dense = make_tiny(folder.with_name(f"{folder.name}-bf16"), deepseek_v3(**changes), shards=2, seed=seed, ring=True)
    release = store_as_fp8(dense, folder)
    config = json.loads((release / "config.json").read_text())
    (release / "config.json").write_text(json.dumps(config | {"quantization_config": hollow.FP8_BLOCKS}, indent=1))
    return release


def _say_a_ring(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    """Behind token t mostly comes t + 1: the head is the embedding, moved by one token. Layers say what comes otherwise.

    The draft gets the embedding of the token that the target chose, so it can follow the ring, and no deviation from it.
    """
    embedding = tensors["model.embed_tokens.weight"].float() * RING
    tensors["model.embed_tokens.weight"] = embedding.to(torch.bfloat16)
    tensors["lm_head.weight"] = (HEAD * F.normalize(embedding)).roll(1, 0).to(torch.bfloat16)
    hidden = config["hidden_size"]
    draft = f"model.layers.{config['num_hidden_layers']}.eh_proj.weight"
    of_embedding, of_state = tensors[draft].float().split(hidden, 1)
    tensors[draft] = torch.cat([torch.eye(hidden) + 0.1 * of_embedding, 0.3 * of_state], 1).to(torch.bfloat16)


def _shapes(config: dict[str, Any]) -> hollow.Shapes:
    shapes_of = {
        "deepseek_v3": hollow.glm5_shapes, "glm4_moe": hollow.glm4_shapes, "qwen3_moe": hollow.qwen3_moe_shapes,
        "qwen3_next": hollow.qwen3_next_shapes, "glm_moe_dsa": _with_indexers,
    }  # fmt: skip
    return shapes_of[config["model_type"]](config)


def _with_indexers(config: dict[str, Any]) -> hollow.Shapes:
    return hollow.glm5_shapes(config, set(range(config["num_hidden_layers"])))


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Norms near 1, biases small, matrices of unit gain; routers' biases differ enough to change who is chosen."""
    noise = torch.randn(shape, generator=generator)
    if name.endswith("e_score_correction_bias"):
        return 0.1 * noise
    if name.endswith("norm.weight"):
        return (1.0 + 0.1 * noise).to(torch.bfloat16)
    return (noise * (0.02 if name.endswith("bias") else shape[-1] ** -0.5)).to(torch.bfloat16)
