"""Does a checkpoint fit on a machine, and how many tokens of KV cache does the rest hold? Memory of one rank, in bytes.

Arithmetic over what is stored and the GPU profiles in `recipes/profiles/`: weights as tensor parallelism splits them, the KV
cache by the kind of attention, and an allowance for everything else. An estimate to decide by, not a promise.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from assay.errors import PlanError
from assay.recipes.families import form_of, size_of, split_layer, text_of
from assay.recipes.load import load_recipe, recipe_names
from assay.recipes.model import Serving
from assay.recipes.profile import ProfileRecipe, context_tokens
from assay_quantize.checkpoint.fused_experts import is_fused
from assay_quantize.plan.parallel import Ranks, check_parallel, head_dim, misfits, ranks_of
from assay_quantize.plan.stored import StoredModel, StoredWeight, drafts, is_draft

KV_TOKENS = 131_072
"""Length of the one sequence that a machine must hold to count as fitting, where nobody says how long."""

_STEP_TOKENS = ((160 * 2**30, 16_384), (70 * 2**30, 8_192), (0, 2_048))
"""Memory of a GPU from which on -> tokens of one step, where no flag says so (`get_batch_defaults` of vLLM's arg_utils.py)."""
_STEPS = 2
"""Steps that vLLM schedules before the first of them is settled and frees its blocks (`max_in_flight_tokens`)."""
_ALWAYS_FP8_SPARSE, _UNPACKED_FP8_SPARSE = "RTX PRO 6000", "B200"
"""GPUs on whose kernels the cache of sparse attention depends (vllm/model_executor/layers/attention/mla_attention.py):
FLASHINFER_MLA_SPARSE_SM120 reads `fp8_ds_mla` alone, also where the dtype is `auto`; FLASHINFER_MLA_SPARSE plain FP8."""

KV_BYTES = {"auto": 2, "bfloat16": 2, "float16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
"""vLLM's `kv-cache-dtype` -> bytes per value."""

WORKSPACE_BYTES = 8 * 2**30
"""Allowed on each GPU for what is neither weights nor KV cache. vLLM measures it at start and takes it from
`gpu-memory-utilization`: the CUDA context and NCCL (1 to 3 GiB), activations of 8,192 or 16,384 tokens, vLLM's default step on
these GPUs (0.2 GiB a tensor at 6,144 columns), the buffer into which sparse attention gathers a prompt's cache (5,760 bytes for
each token of `max-model-len`: 1.1 GiB at 202,752, 5.6 at 1,048,576; `get_prefill_workspace_size`), logits of 1,024 prompt
tokens and CUDA graphs (1 to 2 GiB each), BF16 copies of `kv_b_proj` (MLA). Not measured: no GPU was at hand."""


class Window(NamedTuple):
    """Layers that keep only the last tokens of a sequence, and those of the steps in flight: how many, and bytes for each."""

    tokens: int
    bytes_per_token: int


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
    """Of layers that keep every token of a sequence."""
    windows: tuple[Window, ...]
    splits: bool
    """Whether every rank has whole heads, groups and blocks (`parallel.py`)."""

    @property
    def free_bytes(self) -> int:
        """What weights and workspace leave for the KV cache; negative if they do not fit."""
        return self.usable_bytes - self.weight_bytes - WORKSPACE_BYTES

    @property
    def kv_tokens(self) -> int:
        """Tokens of one sequence whose KV cache fits beside the weights; where every layer keeps all, of any number of them."""
        return self.tokens_in(self.free_bytes)

    def tokens_in(self, num_bytes: int) -> int:
        """Tokens of one sequence whose KV cache is no larger; windows count as full."""
        full = sum(one.tokens * one.bytes_per_token for one in self.windows)
        return max(0, num_bytes - full) // max(1, self.kv_bytes_per_token)

    def kv_bytes(self, tokens: int) -> int:
        """KV cache of one sequence."""
        return tokens * self.kv_bytes_per_token + sum(min(tokens, one.tokens) * one.bytes_per_token for one in self.windows)

    def holds(self, max_model_len: int = KV_TOKENS) -> bool:
        """Weights, workspace and the KV cache of one sequence: less, and vLLM refuses to start."""
        return self.free_bytes >= self.kv_bytes(max_model_len)


def fits(model: StoredModel) -> list[Fit]:
    """One row per GPU profile, smallest machine first."""
    profiles = [load_recipe(ProfileRecipe, name) for name in recipe_names("profiles")]
    split = functools.cache(lambda ranks: _split(model, ranks))  # many profiles have as many ranks
    rows = [_fit(model, profile, split(ranks_of(profile))) for profile in profiles if profile.hardware.memory_bytes_each]
    return sorted(rows, key=lambda row: (row.usable_bytes * row.num_gpus, row.profile))


def fit_on(model: StoredModel, profile: ProfileRecipe, serving: Serving) -> Fit:
    """A profile must say how much memory a GPU has. What is not served is not counted: an MTP block without speculation."""
    model = model.served(drafts(profile, serving))
    return _fit(model, profile, _split(model, ranks_of(profile)))


def _split(model: StoredModel, ranks: Ranks) -> tuple[int, bool]:
    """(bytes of weights on one rank, whether it has whole heads, groups and blocks)."""
    return rank_bytes(model, ranks), not misfits(model, ranks)


def _fit(model: StoredModel, profile: ProfileRecipe, split: tuple[int, bool]) -> Fit:
    usable = profile.usable_bytes
    assert usable is not None, profile.name
    kv_dtype, ranks = str(profile.flags.get("kv-cache-dtype", model.kv_cache)), ranks_of(profile).tensor_parallel
    value_bytes, gpu = KV_BYTES.get(kv_dtype, 2), profile.hardware.gpu or ""
    if _ALWAYS_FP8_SPARSE in gpu and _indexers(model):
        value_bytes = 1
    return Fit(
        profile=profile.name,
        num_gpus=profile.hardware.num_gpus,
        utilization=profile.gpu_memory_utilization,
        kv_dtype=kv_dtype,
        usable_bytes=usable,
        weight_bytes=split[0],
        kv_bytes_per_token=kv_bytes_per_token(model, value_bytes, ranks, packed=_UNPACKED_FP8_SPARSE not in gpu),
        windows=windows(model, value_bytes, ranks, step_tokens=_step_tokens(profile)),
        splits=split[1],
    )


def _step_tokens(profile: ProfileRecipe) -> int:
    asked, memory = profile.flags.get("max-num-batched-tokens"), profile.hardware.memory_bytes_each or 0
    return int(asked) if asked else next(tokens for least, tokens in _STEP_TOKENS if memory >= least)


def rank_bytes(model: StoredModel, ranks: Ranks) -> int:
    """Bytes of weights on one rank: its part of what is split, and all of the rest."""
    return sum(_rank_bytes(model, weight, ranks) for weight in model.weights)


def _rank_bytes(model: StoredModel, weight: StoredWeight, ranks: Ranks) -> int:
    if is_fused(weight.name):
        return math.ceil(weight.num_bytes / ranks.sharing("routed_expert"))
    form = form_of(model.family, weight.name, model.config)
    if form.split == "whole" or not weight.shape:
        return weight.num_bytes
    if form.split == "kv_rows":
        rows = max(weight.shape[0] / ranks.tensor_parallel, head_dim(model.config, weight.name))
        return math.ceil(weight.num_bytes * rows / weight.shape[0])
    return math.ceil(weight.num_bytes / ranks.sharing(form.part))  # experts too: whole ones, or a part of each


def kv_bytes_per_token(model: StoredModel, value_bytes: int, ranks: int, *, packed: bool = True) -> int:
    """Bytes of KV cache per token on one rank of `ranks`, an MTP block included, of layers that keep every token.

    Latent attention (MLA) keeps `kv_lora_rank + qk_rope_head_dim` values per layer on *every* rank; with an indexer and FP8
    it is vLLM's `fp8_ds_mla` where the GPU's kernel reads that (`packed`): FP8 latents, an F32 scale per 128 of them, BF16 rope
    (656 bytes at 512 + 64). The indexer keeps one FP8 key with its F32 scale (`DeepseekV32IndexerCache`: 132 bytes at 128).
    Grouped-query attention keeps what `k_proj` and `v_proj` make, heads split over the ranks and repeated once there are more
    ranks than heads. Linear attention and Mamba keep a state per sequence and nothing per token. Layers with a sliding window:
    `windows`.
    """
    config = text_of(model.config)
    if compressors := _compressors(model):
        return _compressed_bytes(config, compressors)
    indexers = _indexers(model)
    if config.get("kv_lora_rank") or any(one.name.endswith(".kv_a_proj_with_mqa.weight") for one in model.weights):
        attending = [one for one in model.weights if one.name.endswith(".self_attn.o_proj.weight")]
        latent, rope = size_of(config, "kv_lora_rank"), size_of(config, "qk_rope_head_dim")
        sparse_fp8 = packed and bool(indexers) and value_bytes == 1
        per_layer = latent + latent // 128 * 4 + 2 * rope if sparse_fp8 else (latent + rope) * value_bytes
        return len(attending) * per_layer + sum(one.shape[0] + 4 for one in indexers)
    keeping = [one for one in _of_heads(model) if not _slides(model, one)]
    return _head_bytes(config, keeping, ranks) * value_bytes


def windows(model: StoredModel, value_bytes: int, ranks: int, *, step_tokens: int) -> tuple[Window, ...]:
    """Layers that keep a window (vLLM's `SlidingWindowSpec`): beside it the tokens of all steps in flight, and a block of 64.

    DeepSeek-V4 keeps one in every layer, 584 bytes a token, and of what its compressors read the last rows in FP32, two numbers
    for every column of `ape` (`compressor_state`): 8 tokens where 4 are compressed, as these overlap, and 128 of 128.
    """
    config = text_of(model.config)
    size, more = size_of(config, "sliding_window", 0), _STEPS * step_tokens + 64
    if compressors := _compressors(model):
        layers = sum(one.name.endswith(".attn.wo_b.weight") for one in model.weights)
        found = [Window(size + more, layers * _compressed_width(config))]
        for one in compressors:
            width = size_of(config, "index_head_dim" if ".indexer." in one.name else "head_dim")
            found.append(Window(one.shape[0] * one.shape[1] // width + more, 2 * 4 * one.shape[1]))
        return tuple(found)
    sliding = [one for one in _of_heads(model) if _slides(model, one)]
    return (Window(size + more, _head_bytes(config, sliding, ranks) * value_bytes),) if sliding else ()


def kv_read_bytes(model: StoredModel, fit: Fit, tokens: int) -> int:
    """What one rank reads of the cache of one sequence to write a token behind `tokens` others; a lower bound.

    Sparse attention (an indexer) reads all of the indexer's keys and `index_topk` rows of the rest; a window its own length. Of
    DeepSeek-V4, which chooses among compressed rows, windows alone are counted. model: as it is served (`StoredModel.served`).
    """
    config = text_of(model.config)
    size = size_of(config, "sliding_window", 0)
    of_windows = sum(min(tokens, size) * one.bytes_per_token for one in fit.windows)
    if _compressors(model):
        return of_windows
    of_indexers = sum(one.shape[0] + 4 for one in _indexers(model))
    chosen = min(tokens, size_of(config, "index_topk", tokens)) if of_indexers else tokens
    return chosen * (fit.kv_bytes_per_token - of_indexers) + tokens * of_indexers + of_windows


def _of_heads(model: StoredModel) -> list[StoredWeight]:
    """Weights that make the keys and values of grouped-query attention."""
    if text_of(model.config).get("kv_lora_rank"):
        return []
    return [one for one in model.weights if one.name.endswith((".k_proj.weight", ".v_proj.weight"))]


def _head_bytes(config: Mapping[str, Any], of_heads: Sequence[StoredWeight], ranks: int) -> int:
    """Values per token on one rank."""
    heads = ((one.shape[0], head_dim(config, one.name)) for one in of_heads)
    return sum(math.ceil(rows / width / ranks) * width for rows, width in heads)


def _slides(model: StoredModel, weight: StoredWeight) -> bool:
    """Whether the layer of a weight has a sliding window: `layer_types`, or `hybrid_layer_pattern` (MiMo-V2, and its draft)."""
    config, at = text_of(model.config), split_layer(weight.name)
    if at is None or not config.get("sliding_window"):
        return False
    pattern = config.get("hybrid_layer_pattern")
    kinds: Any = pattern if isinstance(pattern, list) else config.get("layer_types")
    if not isinstance(kinds, list):
        return False
    if is_draft(model, weight.name) and kinds is pattern:
        return True
    return at.layer < len(kinds) and kinds[at.layer] in (1, "sliding_attention")


def _indexers(model: StoredModel) -> list[StoredWeight]:
    return [one for one in model.weights if one.name.endswith(".self_attn.indexer.wk.weight")]


def _compressors(model: StoredModel) -> list[StoredWeight]:
    return [one for one in model.weights if one.name.endswith(".compressor.ape")]


def _compressed_width(config: Mapping[str, Any]) -> int:
    """Bytes of one row of DeepSeek-V4's attention: 448 FP8, rope of 64 in BF16, 8 for scales, 584 in all."""
    width, rope = size_of(config, "head_dim"), size_of(config, "qk_rope_head_dim")
    return width - rope + 2 * rope + (width - rope) // 64 + 1


def _compressed_bytes(config: Mapping[str, Any], compressors: Sequence[StoredWeight]) -> int:
    """DeepSeek-V4 keeps a row for every 4 or 128 tokens, as many as `ape` has, whole on every rank and in FP8 alone.

    584 bytes (`DeepseekV4Attention.get_kv_cache_spec`). Of an indexer 132, as above.
    """
    of_attention, of_indexer = _compressed_width(config), size_of(config, "index_head_dim") + 4
    rows = ((of_indexer if ".indexer." in one.name else of_attention) / one.shape[0] for one in compressors)
    return math.ceil(sum(rows))


def check_served(model: StoredModel, profile: ProfileRecipe, serving: Serving) -> None:
    """PlanError: the GPUs of a profile cannot share or cannot hold this checkpoint. Other profiles are not judged."""
    if profile.hardware.device == "cuda" and not profile.endpoints:
        check_parallel(model.served(drafts(profile, serving)), profile)
        check_memory(model, profile, serving)


def check_memory(model: StoredModel, profile: ProfileRecipe, serving: Serving) -> None:
    """PlanError: vLLM would refuse to start, since not even one sequence of `max-model-len` fits beside the weights.

    The workspace is not counted: what is refused here cannot be served, and what is not may still be tight.
    """
    if profile.hardware.memory_bytes_each is None:
        return
    fit = fit_on(model, profile, serving)
    length = context_tokens(model.config, profile, serving) or 0
    kv_bytes = fit.kv_bytes(length)
    if fit.weight_bytes + kv_bytes <= fit.usable_bytes:
        return
    room = fit.tokens_in(fit.usable_bytes - fit.weight_bytes)
    way = f"set serving.max_model_len to less than {room:,}" if room > 0 else "take a profile with more memory"
    raise PlanError(
        f"{model.what} cannot be served on profile {profile.name}: each GPU would hold {fit.weight_bytes / 2**30:.1f} GiB of "
        f"weights and {kv_bytes / 2**30:.1f} GiB of KV cache for max-model-len {length:,}, and "
        f"{fit.usable_bytes / 2**30:.1f} GiB are usable; {way}"
    )
