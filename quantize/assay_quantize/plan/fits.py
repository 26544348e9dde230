"""Does a checkpoint fit on a machine, and how many tokens of KV cache does the rest hold? Memory of one rank, in bytes.

Arithmetic over what is stored and the GPU profiles in `recipes/profiles/`: weights as tensor parallelism splits them, the KV
cache by the kind of attention, and an allowance for everything else. An estimate to decide by, not a promise.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from assay.errors import PlanError
from assay.recipes.families import form_of, text_of
from assay.recipes.load import load_recipe, recipe_names
from assay.recipes.model import Serving
from assay.recipes.profile import ProfileRecipe, context_tokens
from assay_quantize.plan.parallel import Ranks, check_parallel, head_dim, misfits, ranks_of
from assay_quantize.plan.stored import StoredModel, StoredWeight

KV_TOKENS = 131_072
"""Length of the one sequence that a machine must hold to count as fitting, where nobody says how long."""

KV_BYTES = {"auto": 2, "bfloat16": 2, "float16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
"""vLLM's `kv-cache-dtype` -> bytes per value."""

WORKSPACE_BYTES = 8 * 2**30
"""Allowed on each GPU for what is neither weights nor KV cache. vLLM measures it at start and takes it from
`gpu-memory-utilization`: the CUDA context and NCCL (1 to 3 GiB), activations of 16,384 tokens, vLLM's default step on these
GPUs (0.2 GiB a tensor at 6,144 columns), logits of 1,024 prompt tokens and CUDA graphs (1 to 2 GiB each), BF16 copies of
`kv_b_proj` (MLA). Not measured: no GPU was at hand."""


@dataclass(frozen=True)
class Fit:
    """One checkpoint on one profile; all sizes in bytes, of one GPU. The fullest rank: parts are rounded up."""

    profile: str
    num_gpus: int
    utilization: float
    kv_dtype: str
    usable_bytes: int
    weight_bytes: int
    kv_bytes_per_token: int
    splits: bool
    """Whether every rank has whole heads, groups and blocks (`parallel.py`)."""

    @property
    def free_bytes(self) -> int:
        """What weights and workspace leave for the KV cache; negative if they do not fit."""
        return self.usable_bytes - self.weight_bytes - WORKSPACE_BYTES

    @property
    def kv_tokens(self) -> int:
        """Tokens of KV cache that fit beside the weights, all sequences together."""
        return max(0, self.free_bytes) // self.kv_bytes_per_token

    def holds(self, max_model_len: int = KV_TOKENS) -> bool:
        """Weights, workspace and the KV cache of one sequence: less, and vLLM refuses to start."""
        return self.free_bytes >= max_model_len * self.kv_bytes_per_token


def fits(model: StoredModel) -> list[Fit]:
    """One row per GPU profile, smallest machine first."""
    profiles = [load_recipe(ProfileRecipe, name) for name in recipe_names("profiles")]
    split = functools.cache(lambda ranks: _split(model, ranks))  # many profiles have as many ranks
    rows = [_fit(model, profile, split(ranks_of(profile))) for profile in profiles if profile.hardware.memory_bytes_each]
    return sorted(rows, key=lambda row: (row.usable_bytes * row.num_gpus, row.profile))


def fit_on(model: StoredModel, profile: ProfileRecipe) -> Fit:
    """A profile must say how much memory a GPU has."""
    return _fit(model, profile, _split(model, ranks_of(profile)))


def _split(model: StoredModel, ranks: Ranks) -> tuple[int, bool]:
    """(bytes of weights on one rank, whether it has whole heads, groups and blocks)."""
    return rank_bytes(model, ranks), not misfits(model, ranks)


def _fit(model: StoredModel, profile: ProfileRecipe, split: tuple[int, bool]) -> Fit:
    assert profile.hardware.memory_bytes_each is not None, profile.name
    utilization = float(profile.flags.get("gpu-memory-utilization", 0.9))
    kv_dtype = str(profile.flags.get("kv-cache-dtype", model.kv_cache))
    return Fit(
        profile=profile.name,
        num_gpus=profile.hardware.num_gpus,
        utilization=utilization,
        kv_dtype=kv_dtype,
        usable_bytes=int(profile.hardware.memory_bytes_each * utilization),
        weight_bytes=split[0],
        kv_bytes_per_token=kv_bytes_per_token(model, KV_BYTES.get(kv_dtype, 2), ranks_of(profile).tensor_parallel),
        splits=split[1],
    )


def rank_bytes(model: StoredModel, ranks: Ranks) -> int:
    """Bytes of weights on one rank: its part of what is split, and all of the rest."""
    return sum(_rank_bytes(model, weight, ranks) for weight in model.weights)


def _rank_bytes(model: StoredModel, weight: StoredWeight, ranks: Ranks) -> int:
    form = form_of(model.family, weight.name, model.config)
    if form.split == "whole" or not weight.shape:
        return weight.num_bytes
    if form.split == "kv_rows":
        rows = max(weight.shape[0] / ranks.tensor_parallel, head_dim(model.config, weight.name))
        return math.ceil(weight.num_bytes * rows / weight.shape[0])
    return math.ceil(weight.num_bytes / ranks.tensor_parallel)  # experts too: whole ones, or a part of each


def kv_bytes_per_token(model: StoredModel, value_bytes: int, ranks: int) -> int:
    """Bytes of KV cache per token on one rank of `ranks`, an MTP block included.

    Latent attention (MLA) keeps `kv_lora_rank + qk_rope_head_dim` values per layer on *every* rank; with an indexer and FP8
    it is vLLM's `fp8_ds_mla`: FP8 latents, an F32 scale per 128 of them, BF16 rope (656 bytes at 512 + 64). The indexer keeps
    one FP8 key with its F32 scale (`DeepseekV32IndexerCache`: 132 bytes at 128). Grouped-query attention keeps what `k_proj`
    and `v_proj` make, heads split over the ranks and repeated once there are more ranks than heads; layers with a sliding
    window are counted like the others. Linear attention and Mamba keep a state per sequence and nothing per token, and so do
    windows beside compressed attention (`_compressed_bytes`).
    """
    config = text_of(model.config)
    if compressors := [one for one in model.weights if one.name.endswith(".compressor.ape")]:
        return _compressed_bytes(config, compressors)
    indexers = [one for one in model.weights if one.name.endswith(".self_attn.indexer.wk.weight")]
    if config.get("kv_lora_rank"):
        attending = [one for one in model.weights if one.name.endswith(".self_attn.o_proj.weight")]
        latent, rope = int(config["kv_lora_rank"]), int(config["qk_rope_head_dim"])
        sparse_fp8 = bool(indexers) and value_bytes == 1
        per_layer = latent + latent // 128 * 4 + 2 * rope if sparse_fp8 else (latent + rope) * value_bytes
        return len(attending) * per_layer + sum(one.shape[0] + 4 for one in indexers)
    of_heads = [one for one in model.weights if one.name.endswith((".k_proj.weight", ".v_proj.weight"))]
    heads = ((one.shape[0], head_dim(config, one.name)) for one in of_heads)
    return sum(math.ceil(rows / width / ranks) * width for rows, width in heads) * value_bytes


def _compressed_bytes(config: Mapping[str, Any], compressors: Sequence[StoredWeight]) -> int:
    """DeepSeek-V4 keeps a row for every 4 or 128 tokens, as many as `ape` has, whole on every rank and in FP8 alone.

    584 bytes (`DeepseekV4Attention.get_kv_cache_spec`): 448 FP8, rope of 64 in BF16, 8 for scales. Of an indexer 132, as above.
    """
    width, rope = int(config["head_dim"]), int(config["qk_rope_head_dim"])
    of_attention, of_indexer = width - rope + 2 * rope + (width - rope) // 64 + 1, int(config["index_head_dim"]) + 4
    rows = ((of_indexer if ".indexer." in one.name else of_attention) / one.shape[0] for one in compressors)
    return math.ceil(sum(rows))


def check_served(model: StoredModel, profile: ProfileRecipe, serving: Serving) -> None:
    """PlanError: the GPUs of a profile cannot share or cannot hold this checkpoint. Other profiles are not judged."""
    if profile.hardware.device == "cuda" and not profile.endpoints:
        check_parallel(model, profile)
        check_memory(model, profile, serving)


def check_memory(model: StoredModel, profile: ProfileRecipe, serving: Serving) -> None:
    """PlanError: vLLM would refuse to start, since not even one sequence of `max-model-len` fits beside the weights.

    The workspace is not counted: what is refused here cannot be served, and what is not may still be tight.
    """
    if profile.hardware.memory_bytes_each is None:
        return
    fit = fit_on(model, profile)
    length = context_tokens(model.config, profile, serving) or 0
    kv_bytes = length * fit.kv_bytes_per_token
    if fit.weight_bytes + kv_bytes <= fit.usable_bytes:
        return
    room = (fit.usable_bytes - fit.weight_bytes) // fit.kv_bytes_per_token
    way = f"set serving.max_model_len to less than {room:,}" if room > 0 else "take a profile with more memory"
    raise PlanError(
        f"{model.what} cannot be served on profile {profile.name}: each GPU would hold {fit.weight_bytes / 2**30:.1f} GiB of "
        f"weights and {kv_bytes / 2**30:.1f} GiB of KV cache for max-model-len {length:,}, and "
        f"{fit.usable_bytes / 2**30:.1f} GiB are usable; {way}"
    )
