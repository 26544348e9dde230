"""A checkpoint to measure with: GLM-4-MoE names, random BF16 weights, any size, written by slabs without being held in memory.

Weights are normal with standard deviation 0.02. They are cut at random places out of one pool of 16 million values, because
drawing billions of normal values would take longer than everything that is measured; no kernel or disk can tell.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

POOL_VALUES = 1 << 24
SLAB_VALUES = 1 << 23
STANDARD_DEVIATION = 0.02


@dataclass(frozen=True)
class Shape:
    """What is generated. num_bytes: about how much; shard_bytes: about how large a file gets.

    Experts are [moe_intermediate, hidden] and [hidden, moe_intermediate]; their number is what is left of `num_bytes`.
    """

    num_bytes: int
    shard_bytes: int
    hidden: int = 4096
    moe_intermediate: int = 1408
    head_dim: int = 128
    num_heads: int = 32
    num_kv_heads: int = 8
    vocab_size: int = 4096

    @property
    def expert_bytes(self) -> int:
        return 3 * 2 * self.hidden * self.moe_intermediate

    @property
    def attention_bytes(self) -> int:
        return 2 * 2 * self.hidden * self.head_dim * (self.num_heads + self.num_kv_heads)

    @property
    def num_moe_layers(self) -> int:
        return max(1, round(self.num_bytes / 1.5e9))

    @property
    def num_experts(self) -> int:
        """Routed experts of a layer; 2 at least."""
        layers = self.num_moe_layers
        fixed = 4 * self.vocab_size * self.hidden + (layers + 1) * (self.attention_bytes + self.expert_bytes)
        return max(2, round((self.num_bytes - fixed) / layers / self.expert_bytes))


TINY = Shape(0, 1 << 30, hidden=256, moe_intermediate=128, head_dim=64, num_heads=4, num_kv_heads=2, vocab_size=512)
"""A few MB: what every process runs over before the clock starts."""


def small(num_bytes: int, shard_bytes: int) -> Shape:
    """The same with matrices of at most 1 MiB, so that a checkpoint of some MB has experts."""
    return Shape(
        num_bytes, shard_bytes, hidden=1024, moe_intermediate=512, head_dim=64, num_heads=8, num_kv_heads=2, vocab_size=1024
    )


def make_checkpoint(folder: Path, shape: Shape, *, seed: int = 0) -> Path:
    """Write config, index and shards into `folder`, which must not exist, and return it. Same arguments, same bytes."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config_of(shape), indent=1) + "\n", encoding="utf-8")
    shards = list(cut_into_shards(tensors_of(shape), shape.shard_bytes))
    generator = np.random.default_rng(seed)
    pool = to_bf16(generator.standard_normal(POOL_VALUES, dtype=np.float32) * np.float32(STANDARD_DEVIATION))
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        weight_map |= dict.fromkeys(tensors, name)
        write_shard(folder / name, tensors, pool, generator)
    total = sum(num_bytes_of(name, shape) for tensors in shards for name, shape in tensors.items())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    return folder


def weight_bytes(folder: Path) -> int:
    """Bytes of all safetensors files of a folder."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


# ------------------------------------------------------------------------------------------------ names
def config_of(shape: Shape) -> dict[str, Any]:
    return {
        "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "dtype": "bfloat16",
        "num_hidden_layers": shape.num_moe_layers + 1, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0,
        "hidden_size": shape.hidden, "intermediate_size": shape.moe_intermediate,
        "moe_intermediate_size": shape.moe_intermediate, "vocab_size": shape.vocab_size,
        "n_routed_experts": shape.num_experts, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
        "num_attention_heads": shape.num_heads, "num_key_value_heads": shape.num_kv_heads, "head_dim": shape.head_dim,
        "attention_bias": False, "use_qk_norm": False, "tie_word_embeddings": False, "hidden_act": "silu",
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 4096,
    }  # fmt: skip


def tensors_of(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes in the order in which real checkpoints store them."""
    hidden, heads = shape.hidden, shape.num_heads * shape.head_dim
    kv_heads = shape.num_kv_heads * shape.head_dim
    yield "lm_head.weight", (shape.vocab_size, hidden)
    yield "model.embed_tokens.weight", (shape.vocab_size, hidden)
    for layer in range(shape.num_moe_layers + 1):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        if layer == 0:
            yield from mlp(f"{prefix}.mlp", shape)
        else:
            for expert in range(shape.num_experts):
                yield from mlp(f"{prefix}.mlp.experts.{expert}", shape)
            yield f"{prefix}.mlp.gate.e_score_correction_bias", (shape.num_experts,)
            yield f"{prefix}.mlp.gate.weight", (shape.num_experts, hidden)
            yield from mlp(f"{prefix}.mlp.shared_experts", shape)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        yield f"{prefix}.self_attn.k_proj.weight", (kv_heads, hidden)
        yield f"{prefix}.self_attn.o_proj.weight", (hidden, heads)
        yield f"{prefix}.self_attn.q_proj.weight", (heads, hidden)
        yield f"{prefix}.self_attn.v_proj.weight", (kv_heads, hidden)
    yield "model.norm.weight", (hidden,)


def mlp(prefix: str, shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{prefix}.down_proj.weight", (shape.hidden, shape.moe_intermediate)
    yield f"{prefix}.gate_proj.weight", (shape.moe_intermediate, shape.hidden)
    yield f"{prefix}.up_proj.weight", (shape.moe_intermediate, shape.hidden)


def num_bytes_of(name: str, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * (4 if name.endswith("e_score_correction_bias") else 2)


def cut_into_shards(
    tensors: Iterator[tuple[str, tuple[int, ...]]], shard_bytes: int
) -> Iterator[dict[str, tuple[int, ...]]]:  # fmt: skip
    """Consecutive tensors of about `shard_bytes`; a rest of less than half a shard goes to the one before."""
    everything = list(tensors)
    left = sum(num_bytes_of(name, shape) for name, shape in everything)
    current: dict[str, tuple[int, ...]] = {}
    filled = 0
    for name, shape in everything:
        current[name] = shape
        filled += num_bytes_of(name, shape)
        left -= num_bytes_of(name, shape)
        if filled >= shard_bytes and left > shard_bytes / 2:
            yield current
            current, filled = {}, 0
    yield current


# ------------------------------------------------------------------------------------------------ bytes
def to_bf16(values: np.ndarray) -> np.ndarray:
    """float32 -> BF16 bit patterns (uint16), rounded to the nearest, ties to even. Finite values only."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def write_shard(
    path: Path, tensors: dict[str, tuple[int, ...]], pool: np.ndarray, generator: np.random.Generator
) -> None:  # fmt: skip
    """One safetensors file, a slab at a time."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in tensors.items():
        begin, end = end, end + num_bytes_of(name, shape)
        dtype = "F32" if name.endswith("e_score_correction_bias") else "BF16"
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in tensors.items():
            count = math.prod(shape)
            if name.endswith("e_score_correction_bias"):
                file.write((7 + generator.standard_normal(count, dtype=np.float32) / 20).tobytes())
                continue
            for begin in range(0, count, SLAB_VALUES):
                size = min(SLAB_VALUES, count - begin)
                start = int(generator.integers(0, POOL_VALUES - size + 1))
                file.write(pool[start : start + size].data)
