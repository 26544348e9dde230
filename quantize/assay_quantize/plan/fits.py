"""Does a planned checkpoint fit on a machine, and how many tokens of KV cache does the rest hold?

Arithmetic over the plan and the GPU profiles in `recipes/profiles/`; an estimate to decide by, not a promise: weights count
as evenly split, activations and CUDA graphs live in what `gpu-memory-utilization` leaves out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from assay.recipes.load import load_recipe, recipe_names
from assay.recipes.profile import ProfileRecipe
from assay.records.plan import Plan

KV_TOKENS = 131_072
"""Length of the one sequence that a machine must hold to count as fitting with KV headroom."""

KV_BYTES = {"auto": 2, "bfloat16": 2, "float16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
"""vLLM's `kv-cache-dtype` -> bytes per value."""


@dataclass(frozen=True)
class Fit:
    """One profile. All sizes in bytes, over all GPUs together."""

    profile: str
    num_gpus: int
    memory_bytes_each: int
    utilization: float
    kv_dtype: str
    usable_bytes: int
    weight_bytes: int
    kv_bytes_per_token: int

    @property
    def free_bytes(self) -> int:
        """What the weights leave; negative if they do not fit."""
        return self.usable_bytes - self.weight_bytes

    @property
    def fits(self) -> bool:
        """Weights alone."""
        return self.free_bytes >= 0

    @property
    def fits_with_kv(self) -> bool:
        """Weights and the KV cache of one sequence of `KV_TOKENS`."""
        return self.free_bytes >= KV_TOKENS * self.kv_bytes_per_token

    @property
    def kv_tokens(self) -> int:
        """Tokens of KV cache that fit beside the weights, all sequences together."""
        return max(0, self.free_bytes) // self.kv_bytes_per_token


def fits(plan: Plan) -> list[Fit]:
    """One row per GPU profile, smallest machine first."""
    profiles = [load_recipe(ProfileRecipe, name) for name in recipe_names("profiles")]
    rows = [_fit(plan, profile) for profile in profiles if profile.hardware.memory_bytes_each]
    return sorted(rows, key=lambda row: (row.usable_bytes, row.profile))


def _fit(plan: Plan, profile: ProfileRecipe) -> Fit:
    hardware = profile.hardware
    assert hardware.memory_bytes_each is not None
    utilization = float(profile.vllm.get("gpu-memory-utilization", 0.9))
    kv_dtype = str(profile.vllm.get("kv-cache-dtype", "auto"))
    ranks = int(profile.vllm.get("tensor-parallel-size", hardware.num_gpus))
    return Fit(
        profile=profile.name,
        num_gpus=hardware.num_gpus,
        memory_bytes_each=hardware.memory_bytes_each,
        utilization=utilization,
        kv_dtype=kv_dtype,
        usable_bytes=int(hardware.num_gpus * hardware.memory_bytes_each * utilization),
        weight_bytes=plan.bytes_out,
        kv_bytes_per_token=kv_bytes_per_token(plan, KV_BYTES.get(kv_dtype, 2), ranks),
    )


def kv_bytes_per_token(plan: Plan, value_bytes: int, ranks: int) -> int:
    """Bytes of KV cache per token over all `ranks` of tensor parallelism, a kept MTP block included.

    Latent attention (MLA) keeps `kv_lora_rank + qk_rope_head_dim` values per layer on *every* rank; with an indexer and FP8
    it is vLLM's `fp8_ds_mla`: FP8 latents, an F32 scale per 128 of them, BF16 rope. The indexer keeps one FP8 key with
    its F32 scale; grouped-query attention keeps 2 x heads x head_dim, heads split over the ranks and
    repeated once there are more ranks than heads. Linear attention keeps nothing per token.
    """
    config = plan.config
    attending = [t for t in plan.tensors if t.action != "drop" and t.name.endswith(".self_attn.o_proj.weight")]
    indexers = [t for t in plan.tensors if t.action != "drop" and t.name.endswith(".self_attn.indexer.wk.weight")]
    if config.get("kv_lora_rank"):
        latent, rope = int(config["kv_lora_rank"]), int(config["qk_rope_head_dim"])
        sparse_fp8 = bool(indexers) and value_bytes == 1
        per_layer = latent + latent // 128 * 4 + 2 * rope if sparse_fp8 else (latent + rope) * value_bytes
        return ranks * (len(attending) * per_layer + sum(t.shape[0] + 4 for t in indexers))
    heads = int(config.get("num_key_value_heads") or config["num_attention_heads"])
    return len(attending) * 2 * max(heads, ranks) * _head_dim(config) * value_bytes


def _head_dim(config: Mapping[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
