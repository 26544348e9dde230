"""Can GPUs share a checkpoint, does it fit into their memory, and how many tokens of KV cache does the rest hold?

Arithmetic over names, shapes and the GPU profiles in `recipes/profiles/`, before the first byte: weights as tensor parallelism
splits them, the KV cache by the kind of attention, and an allowance for everything else. Memory of one rank, in bytes: an
estimate to decide by, not a promise.

Every rank needs whole heads, and groups and blocks that share a scale must end where a rank's part ends. vLLM 0.32 raises
otherwise, of heads at start (`ModelConfig.verify_with_parallel_config`; key-value heads: the attention classes), of groups and
blocks rank by rank and after the weights were moved: `verify_group_size_divides_partition` and `validate_fp8_block_shape`
(linears), `CompressedTensorsWNA16MoEMethod.create_weights` and `validate_fp8_block_shape_moe` (experts). What a rank holds of
each weight stands in the family's table (`Form.split`). Kernels have rules of their own, which are not known here.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from assay.errors import PlanError
from assay.recipes.family import Form
from assay.recipes.family_names import form_of, split_layer
from assay.recipes.load import load_recipe, recipe_names
from assay.recipes.model import Serving
from assay.recipes.profile import ProfileRecipe, context_tokens
from assay.recipes.text_config import count_of, size_of, text_of
from assay_quantize.checkpoint.fused_experts import is_fused
from assay_quantize.plan.stored import StoredModel, StoredWeight, is_draft, is_speculative

GROUPS = {128: "w4a16", 64: "w4a16-g64", 32: "w4a16-g32", 16: "nvfp4a16"}
"""Group size -> the shipped precision that has it."""
_HEADS = {
    "num_attention_heads": ("attention heads", False),
    "num_key_value_heads": ("key-value heads", True),
    "linear_num_key_heads": ("key heads of linear attention", False),
    "linear_num_value_heads": ("value heads of linear attention", False),
}
"""Key of config.json -> what it counts, and whether vLLM repeats these heads once there are more ranks."""
_MAX_NAMED = 3
REFINED = 32
"""The smallest block to which vLLM refines the FP8 blocks of experts (`refine_fp8_moe_block_shape`)."""


class Ranks(NamedTuple):
    """Over how many GPUs a model is split. expert_parallel: every expert whole, on one of them. data_parallel: replicas, which
    share the experts all the same (`FusedMoEParallelConfig.make` in vllm/model_executor/layers/fused_moe/config.py)."""

    tensor_parallel: int = 1
    expert_parallel: bool = False
    data_parallel: int = 1

    def sharing(self, role: str) -> int:
        """GPUs that share a weight which is split."""
        return self.tensor_parallel * (self.data_parallel if role == "routed_expert" else 1)


class Misfit(NamedTuple):
    """Weights of one role and projection that the ranks cannot share.

    first: one of the num_weights weights. width: rows or columns of one rank. unit: what it must be a multiple of. blocks: rows
    and columns share a scale (FP8), and not columns alone. works_at: the largest smaller tensor parallelism at which they fit;
    None: none does.
    """

    role: str
    projection: str
    first: str
    num_weights: int
    side: str
    width: float
    unit: int
    blocks: bool
    ranks: int
    works_at: int | None

    @property
    def short(self) -> str:
        return f"{self.role} {self.projection}"

    @property
    def sentence(self) -> str:
        more = f" and {self.num_weights - 1:,} more" if self.num_weights > 1 else ""
        return (
            f"{self.short}: {self.width:g} {self.side} on each of {self.ranks} ranks are not a multiple of "
            f"{self.unit}, the {'block' if self.blocks else 'group'} that shares a scale ({self.first}{more})"
        )


class UnevenHeads(NamedTuple):
    """Heads that the ranks cannot share. short: of which kind. key: of config.json. works_at: as in `Misfit`."""

    short: str
    key: str
    num_heads: int
    ranks: int
    works_at: int | None

    @property
    def sentence(self) -> str:
        return f"{self.num_heads} {self.short} ({self.key}) cannot be shared by {self.ranks} ranks"


def ranks_of(profile: ProfileRecipe) -> Ranks:
    """As a profile's flags say."""
    tensor, data = (int(profile.flags.get(f"{kind}-parallel-size") or 1) for kind in ("tensor", "data"))
    return Ranks(tensor, bool(profile.flags.get("enable-expert-parallel")), data)


def misfits(model: StoredModel, ranks: Ranks) -> list[Misfit | UnevenHeads]:
    """What vLLM would refuse: heads, then one entry per role, projection and width; empty: it can be split."""
    refused: dict[tuple[str, str, str, float, int], list[StoredWeight]] = defaultdict(list)
    for weight in model.weights:
        if len(weight.shape) != 2 or not weight.name.endswith(".weight"):
            continue
        form = form_of(model.family, weight.name, model.config)
        for side, width, unit in _refused_sides(model, weight, form, ranks):
            refused[form.part, weight.name.split(".")[-2], side, width, unit].append(weight)
    return [
        *uneven_heads(model.config, ranks),
        *(
            Misfit(
                role, projection, weights[0].name, len(weights), side, width, unit, weights[0].block_rows > 1,
                ranks.sharing(role), _works_at(model, weights[0], ranks),
            )
            for (role, projection, side, width, unit), weights in refused.items()
        ),
    ]  # fmt: skip


def uneven_heads(config: Mapping[str, Any], ranks: Ranks) -> list[UnevenHeads]:
    """Attention heads must be divided by the ranks; key-value heads must be, or divide them, and are repeated then.

    Latent attention (MLA) keeps no heads in its cache, and ignores their number.
    """
    text, uneven = text_of(config), []
    for key, (kind, may_repeat) in _HEADS.items():
        heads = 0 if may_repeat and text.get("kv_lora_rank") else count_of(key, text.get(key))
        fitting = [n for n in range(ranks.tensor_parallel, 0, -1) if heads % n == 0 or (may_repeat and n % heads == 0)]
        if ranks.tensor_parallel not in fitting:
            works_at = next((n for n in fitting if ranks.tensor_parallel % n == 0), None)
            uneven.append(UnevenHeads(kind, key, heads, ranks.tensor_parallel, works_at))
    return uneven


def check_parallel(model: StoredModel, profile: ProfileRecipe) -> None:
    """PlanError: what cannot be split on a profile, why, and what would fit."""
    if refused := misfits(model, ranks_of(profile)):
        raise PlanError(f"{model.what} cannot be served on profile {profile.name}: {sentence(refused)}; {remedy(refused)}")


def sentence(misfits: Sequence[Misfit | UnevenHeads]) -> str:
    """The first in full, and what else, of which some are named."""
    others = [misfit.short for misfit in misfits[1:]]
    more = f" and {len(others) - _MAX_NAMED} more" if len(others) > _MAX_NAMED else ""
    also = f"; not divisible either: {', '.join(others[:_MAX_NAMED])}{more}" if others else ""
    return f"{misfits[0].sentence}{also}"


def remedy(misfits: Sequence[Misfit | UnevenHeads]) -> str:
    """Which precision or tensor parallelism would fit all of them; no precision changes the number of heads."""
    of_weights = [misfit for misfit in misfits if isinstance(misfit, Misfit)]
    ways = []
    if len(of_weights) == len(misfits):
        # groups or blocks that would fit; none where a group would end in the middle of a column
        if any(misfit.blocks for misfit in of_weights):
            ways = ["one scale per row (fp8-channel)"]
        elif all(misfit.width == int(misfit.width) for misfit in of_weights):
            common = math.gcd(*(int(misfit.width) for misfit in of_weights))
            smaller = [f"{group} ({name})" for group, name in GROUPS.items() if common % group == 0]
            ways = [f"a group size of {' or '.join(smaller)}" if smaller else "one scale per row (w4a16-channel)"]
    if all(misfit.works_at is not None for misfit in misfits):
        ways.append(f"a profile with tensor-parallel-size {min(misfit.works_at or 1 for misfit in misfits)}")
    return f"what fits: {', or '.join(ways)}" if ways else "keep the role in 16 bits"


def _works_at(model: StoredModel, weight: StoredWeight, ranks: Ranks) -> int | None:
    form = form_of(model.family, weight.name, model.config)
    smaller = (n for n in range(ranks.tensor_parallel // 2, 0, -1) if ranks.tensor_parallel % n == 0)
    return next((n for n in smaller if not list(_refused_sides(model, weight, form, ranks._replace(tensor_parallel=n)))), None)


def _refused_sides(model: StoredModel, weight: StoredWeight, form: Form, ranks: Ranks) -> Iterator[tuple[str, float, int]]:
    """(side, width of a rank, what it must be a multiple of) of one weight; nothing if it can be split."""
    is_expert = form.part == "routed_expert"
    if form.kind != "linear" or weight.group is None or form.split == "whole":
        return
    parts = 1 if is_expert and ranks.expert_parallel else ranks.sharing(form.part)
    rows, columns = weight.shape
    if form.split == "columns":
        width = columns / parts
        if parts > 1 and width % weight.group and not (is_expert and _refines(model, width)):
            yield "inputs", width, weight.group
        return
    head = head_dim(model.config, weight.name) if form.split == "kv_rows" else 1
    width = max(rows / parts, head)
    # vLLM's own FP8 method refines the blocks of experts, and does not check merged linears (`linear.py`)
    is_accepted = _refines(model, width) if is_expert else model.native_fp8 and form.fused is not None
    for unit in (weight.block_rows, weight.word_rows):
        if width % unit and not is_accepted:
            yield "outputs", width, unit


def _refines(model: StoredModel, width: float) -> bool:
    """Whether vLLM's own FP8 method takes finer blocks for the experts."""
    if not model.native_fp8 or width != int(width):
        return False
    return math.gcd(128, int(width), size_of(text_of(model.config), "hidden_size", 0)) >= REFINED


def head_dim(config: Mapping[str, Any], name: str = "") -> int:
    """Values of one attention head. name: of a weight; heads of `v_proj` may be narrower (MiMo-V2-Flash)."""
    text = text_of(config)
    if name.endswith(".v_proj.weight") and text.get("v_head_dim"):
        return size_of(text, "v_head_dim")
    return size_of(text, "head_dim", 0) or size_of(text, "hidden_size") // size_of(text, "num_attention_heads")


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
    """Whether every rank has whole heads, groups and blocks (`misfits`)."""

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
        full = sum(window.tokens * window.bytes_per_token for window in self.windows)
        return max(0, num_bytes - full) // max(1, self.kv_bytes_per_token)

    def kv_bytes(self, tokens: int) -> int:
        """KV cache of one sequence."""
        return tokens * self.kv_bytes_per_token + sum(
            min(tokens, window.tokens) * window.bytes_per_token for window in self.windows
        )

    def holds(self, max_model_len: int = KV_TOKENS) -> bool:
        """Weights, workspace and the KV cache of one sequence: less, and vLLM refuses to start."""
        return self.free_bytes >= self.kv_bytes(max_model_len)


def fits(model: StoredModel) -> list[Fit]:
    """One row per GPU profile, smallest machine first."""
    profiles = [load_recipe(ProfileRecipe, name) for name in recipe_names("profiles")]

    @functools.cache  # many profiles have as many ranks
    def split(ranks: Ranks) -> tuple[int, bool]:
        return rank_bytes(model, ranks), not misfits(model, ranks)

    rows = [_fit(model, profile, *split(ranks_of(profile))) for profile in profiles if profile.hardware.memory_bytes_each]
    return sorted(rows, key=lambda row: (row.usable_bytes * row.num_gpus, row.profile))


def fit_on(model: StoredModel, profile: ProfileRecipe, serving: Serving) -> Fit:
    """A profile must say how much memory a GPU has. What is not served is not counted: an MTP block without speculation."""
    model, ranks = model.served(is_speculative(profile, serving)), ranks_of(profile)
    return _fit(model, profile, rank_bytes(model, ranks), not misfits(model, ranks))


def _fit(model: StoredModel, profile: ProfileRecipe, weight_bytes: int, splits: bool) -> Fit:
    usable = profile.usable_bytes
    assert usable is not None, profile.name
    kv_dtype, ranks = str(profile.flags.get("kv-cache-dtype", model.kv_cache)), ranks_of(profile).tensor_parallel
    value_bytes, gpu = KV_BYTES.get(kv_dtype, 2), profile.hardware.gpu or ""
    memory = profile.hardware.memory_bytes_each or 0
    requested = profile.flags.get("max-num-batched-tokens")
    step_tokens = int(requested) if requested else next(tokens for least, tokens in _STEP_TOKENS if memory >= least)
    if _ALWAYS_FP8_SPARSE in gpu and _named(model, ".self_attn.indexer.wk.weight"):
        value_bytes = 1
    return Fit(
        profile=profile.name,
        num_gpus=profile.hardware.num_gpus,
        utilization=profile.gpu_memory_utilization,
        kv_dtype=kv_dtype,
        usable_bytes=usable,
        weight_bytes=weight_bytes,
        kv_bytes_per_token=kv_bytes_per_token(model, value_bytes, ranks, packed=_UNPACKED_FP8_SPARSE not in gpu),
        windows=windows(model, value_bytes, ranks, step_tokens=step_tokens),
        splits=splits,
    )


def rank_bytes(model: StoredModel, ranks: Ranks) -> int:
    """Bytes of weights on one rank: its part of what is split, and all of the rest."""
    total = 0
    for weight in model.weights:
        form = None if is_fused(weight.name, model.family) else form_of(model.family, weight.name, model.config)
        if form is not None and (form.split == "whole" or not weight.shape):
            total += weight.num_bytes
        elif form is not None and form.split == "kv_rows":
            rows = max(weight.shape[0] / ranks.tensor_parallel, head_dim(model.config, weight.name))
            total += math.ceil(weight.num_bytes * rows / weight.shape[0])
        else:  # of experts whole ones, or a part of each
            total += math.ceil(weight.num_bytes / ranks.sharing("routed_expert" if form is None else form.part))
    return total


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
    if compressors := _named(model, ".compressor.ape"):
        # DeepSeek-V4 keeps a row for every 4 or 128 tokens, as many as `ape` has, whole on every rank and in FP8 alone: 584
        # bytes (`DeepseekV4Attention.get_kv_cache_spec`). Of an indexer 132, as above.
        of_attention, of_indexer = _compressed_width(config), size_of(config, "index_head_dim") + 4
        return math.ceil(sum((of_indexer if ".indexer." in c.name else of_attention) / c.shape[0] for c in compressors))
    indexers = _named(model, ".self_attn.indexer.wk.weight")
    if config.get("kv_lora_rank") or _named(model, ".kv_a_proj_with_mqa.weight"):
        attending = _named(model, ".self_attn.o_proj.weight")
        latent, rope = size_of(config, "kv_lora_rank"), size_of(config, "qk_rope_head_dim")
        sparse_fp8 = packed and bool(indexers) and value_bytes == 1
        per_layer = latent + latent // 128 * 4 + 2 * rope if sparse_fp8 else (latent + rope) * value_bytes
        return len(attending) * per_layer + sum(indexer.shape[0] + 4 for indexer in indexers)
    keeping = [weight for weight in _of_heads(model) if not _slides(model, weight)]
    return _head_bytes(config, keeping, ranks) * value_bytes


def windows(model: StoredModel, value_bytes: int, ranks: int, *, step_tokens: int) -> tuple[Window, ...]:
    """Layers that keep a window (vLLM's `SlidingWindowSpec`): beside it the tokens of all steps in flight, and a block of 64.

    DeepSeek-V4 keeps one in every layer, 584 bytes a token, and of what its compressors read the last rows in FP32, two numbers
    for every column of `ape` (`compressor_state`): 8 tokens where 4 are compressed, as these overlap, and 128 of 128.
    """
    config = text_of(model.config)
    size, more = size_of(config, "sliding_window", 0), _STEPS * step_tokens + 64
    if compressors := _named(model, ".compressor.ape"):
        windows = [Window(size + more, len(_named(model, ".attn.wo_b.weight")) * _compressed_width(config))]
        for compressor in compressors:
            rows, columns = compressor.shape
            width = size_of(config, "index_head_dim" if ".indexer." in compressor.name else "head_dim")
            windows.append(Window(rows * columns // width + more, 2 * 4 * columns))
        return tuple(windows)
    sliding = [weight for weight in _of_heads(model) if _slides(model, weight)]
    return (Window(size + more, _head_bytes(config, sliding, ranks) * value_bytes),) if sliding else ()


def kv_read_bytes(model: StoredModel, fit: Fit, tokens: int) -> int:
    """What one rank reads of the cache of one sequence to write a token behind `tokens` others; a lower bound.

    Sparse attention (an indexer) reads all of the indexer's keys and `index_topk` rows of the rest; a window its own length. Of
    DeepSeek-V4, which chooses among compressed rows, windows alone are counted. model: as it is served (`StoredModel.served`).
    """
    config = text_of(model.config)
    size = size_of(config, "sliding_window", 0)
    of_windows = sum(min(tokens, size) * window.bytes_per_token for window in fit.windows)
    if _named(model, ".compressor.ape"):
        return of_windows
    of_indexers = sum(indexer.shape[0] + 4 for indexer in _named(model, ".self_attn.indexer.wk.weight"))
    chosen = min(tokens, size_of(config, "index_topk", tokens)) if of_indexers else tokens
    return chosen * (fit.kv_bytes_per_token - of_indexers) + tokens * of_indexers + of_windows


def _of_heads(model: StoredModel) -> list[StoredWeight]:
    """Weights that make the keys and values of grouped-query attention."""
    if text_of(model.config).get("kv_lora_rank"):
        return []
    return _named(model, ".k_proj.weight", ".v_proj.weight")


def _head_bytes(config: Mapping[str, Any], of_heads: Sequence[StoredWeight], ranks: int) -> int:
    """Values per token on one rank."""
    heads = ((weight.shape[0], head_dim(config, weight.name)) for weight in of_heads)
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


def _named(model: StoredModel, *endings: str) -> list[StoredWeight]:
    return [weight for weight in model.weights if weight.name.endswith(endings)]


def _compressed_width(config: Mapping[str, Any]) -> int:
    """Bytes of one row of DeepSeek-V4's attention: 448 FP8, rope of 64 in BF16, 8 for scales, 584 in all."""
    width, rope = size_of(config, "head_dim"), size_of(config, "qk_rope_head_dim")
    return width - rope + 2 * rope + (width - rope) // 64 + 1


def check_served(model: StoredModel, profile: ProfileRecipe, serving: Serving) -> None:
    """PlanError: the GPUs of a profile cannot share or cannot hold this checkpoint. Other profiles are not judged.

    It cannot be held where vLLM would refuse to start, since not even one sequence of `max-model-len` fits beside the weights.
    The workspace is not counted: what is refused here cannot be served, and what is not may still be tight.
    """
    if profile.hardware.device != "cuda" or profile.endpoints:
        return
    check_parallel(model.served(is_speculative(profile, serving)), profile)
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
