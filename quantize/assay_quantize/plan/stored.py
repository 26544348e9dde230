"""What a server loads: every weight of a planned or of a finished checkpoint, as it is stored.

One view of a plan and of the headers of a folder or hub id, made here or published (FP8 releases included), so that both are
judged by the same rules (`fits.py`): what tensor parallelism can split, and memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from assay.recipes.family_names import classify, form_of, names_of, split_layer
from assay.recipes.model import Serving
from assay.recipes.profile import ProfileRecipe
from assay.records.plan import Plan, TensorPlan
from assay_quantize.checkpoint.checkpoint import Checkpoint
from assay_quantize.checkpoint.declaration import declared_block, declared_quantization
from assay_quantize.checkpoint.fused_experts import is_fused
from assay_quantize.checkpoint.headers import TensorHeader
from assay_quantize.checkpoint.joined_attention import split_attention
from assay_quantize.checkpoint.stored import BARE_SCALE, WEIGHT_SCALE_LEAVES
from assay_quantize.formats.schemes import CODES_PER_ELEMENT, PART_LEAVES, SCHEMES, module_of

_CODES = {"weight", "weight_packed"}
_PARTS = PART_LEAVES | {"weight", *WEIGHT_SCALE_LEAVES}


class StoredWeight(NamedTuple):
    """One weight, or anything else that is loaded by itself.

    shape: (O, I) of the weight, not of its packed form. num_bytes: scales and zero points included. group: columns that share
    a scale; None: not quantized, or one scale for all columns. block_rows: rows that share a scale. word_rows: rows whose
    zero points share an int32 (8); 1: none do.
    """

    name: str
    shape: tuple[int, ...]
    num_bytes: int
    group: int | None = None
    block_rows: int = 1
    word_rows: int = 1


@dataclass(frozen=True)
class StoredModel:
    """All weights of one checkpoint.

    what: its name in a sentence. native_fp8: vLLM loads it with its own FP8 method and not with that of compressed-tensors.
    kv_cache: dtype of the KV cache where the profile says none: `fp8` if the checkpoint asks for it.
    """

    what: str
    family: str
    config: dict[str, Any]
    weights: tuple[StoredWeight, ...]
    native_fp8: bool = False
    kv_cache: str = "auto"

    def served(self, drafting: bool) -> StoredModel:
        """What a server keeps of it. Without speculation vLLM passes over the MTP block, its layer's KV cache included. A
        draft's embedding and head give way to the model's own once they are loaded, unless the family needs them."""
        needed = names_of(self.family).mtp_required

        def is_kept(name: str) -> bool:
            if not is_draft(self, name):
                return True
            place = split_layer(name)
            is_needed = name in needed or (place is not None and place.rest in needed)
            is_shared = form_of(self.family, name, self.config).part in ("embedding", "lm_head") and not is_needed
            return drafting and not is_shared

        return replace(self, weights=tuple(weight for weight in self.weights if is_kept(weight.name)))


def is_draft(model: StoredModel, name: str) -> bool:
    """Whether a weight is of the MTP block."""
    return not is_fused(name, model.family) and classify(model.family, name, model.config).role == "mtp"


def is_speculative(profile: ProfileRecipe, serving: Serving) -> bool:
    """Whether a server is asked to speculate."""
    return serving.num_speculative_tokens is not None or any(
        flag.removeprefix("--").replace("_", "-") == "speculative-config" for flag in (*profile.flags, *serving.vllm)
    )


def stored_by(plan: Plan) -> StoredModel:
    """What the checkpoint of a plan will hold."""
    kv_cache = "fp8" if plan.precision_recipe.get("kv_cache") else "auto"
    return StoredModel(f"precision {plan.precision}", plan.family, plan.config, stored_weights(plan.tensors), kv_cache=kv_cache)


def stored_weights(tensors: Iterable[TensorPlan]) -> tuple[StoredWeight, ...]:
    """What the tensors of a plan become, scales with their weight."""
    scales: dict[str, int] = defaultdict(int)
    weights: dict[str, StoredWeight] = {}
    tensors = list(tensors)
    names = {tensor.name for tensor in tensors}
    for tensor in tensors:
        num_bytes = sum(output.num_bytes for output in tensor.outputs)
        if tensor.name.rpartition(".")[2] in WEIGHT_SCALE_LEAVES and f"{tensor.module}.weight" in names:
            scales[f"{tensor.module}.weight"] += num_bytes
        elif tensor.scheme is not None:
            row = SCHEMES[tensor.scheme]
            word_rows = 1 if row.symmetric else 8
            weights[tensor.name] = StoredWeight(tensor.name, tensor.shape, num_bytes, row.group_size, row.block_rows, word_rows)
        elif tensor.outputs:
            weights[tensor.name] = StoredWeight(tensor.name, tensor.shape, num_bytes)
    return tuple(weight._replace(num_bytes=weight.num_bytes + scales.get(name, 0)) for name, weight in weights.items())


def stored_in(checkpoint: Checkpoint, family: str, what: str) -> StoredModel:
    """What the headers of a checkpoint say; `open_checkpoint(..., allow_quantized=True)` reads those of a quantized one."""
    block_rows, _ = declared_block(checkpoint.location, checkpoint.config)
    modules: dict[str, dict[str, TensorHeader]] = defaultdict(dict)
    weights: list[StoredWeight] = []
    tensors, _ = split_attention(checkpoint.location, checkpoint.config, checkpoint.tensors)
    for name, header in tensors.items():
        leaf = name.rpartition(".")[2]
        if leaf in _PARTS:
            modules[module_of(name)][leaf] = header
        else:
            weights.append(StoredWeight(name, header.shape, header.num_bytes))
    for module, parts in modules.items():
        if parts.keys() & _CODES:
            weights.append(_put_together(f"{module}.weight", parts, block_rows))
        else:  # Gemma 4's `router.scale` is multiplied with, and belongs to no weight
            weights += [StoredWeight(header.name, header.shape, header.num_bytes) for header in parts.values()]
    declared = declared_quantization(checkpoint.config) or {}
    native_fp8 = declared.get("quant_method") == "fp8"
    kv_cache = "fp8" if declared.get("kv_cache_scheme") else "auto"
    return StoredModel(what, family, checkpoint.config, tuple(weights), native_fp8, kv_cache)


def _is_mxfp4(stored: TensorHeader, parts: Mapping[str, TensorHeader]) -> bool:
    """Experts of DeepSeek-V4, and of MiMo-V2.6, under the name of the weight."""
    if stored.dtype == "I8":
        return BARE_SCALE in parts
    return stored.dtype == "U8" and "weight_scale" in parts and parts["weight_scale"].dtype == "U8"


def _put_together(name: str, parts: Mapping[str, TensorHeader], block_rows: int) -> StoredWeight:
    """The weight of one module; what shares a scale follows from the shapes: [O, I/group], [O/block, I/block] or [O, 1]."""
    num_bytes = sum(part.num_bytes for part in parts.values())
    packed = parts.get("weight_packed")
    stored = packed or parts.get("weight")
    shape = () if stored is None else stored.shape
    is_fp4 = packed is None and stored is not None and _is_mxfp4(stored, parts)
    if stored is not None and (packed is not None or is_fp4):
        shape = (*shape[:-1], shape[-1] * (2 if is_fp4 else CODES_PER_ELEMENT.get(stored.dtype, 1)))
    word_rows = 8 if "weight_zero_point" in parts else 1
    scale = next((parts[leaf].shape for leaf in WEIGHT_SCALE_LEAVES if leaf in parts), ())
    if len(shape) != 2 or len(scale) != 2 or scale in ((shape[0], 1), (1, 1)):
        return StoredWeight(name, shape, num_bytes, word_rows=word_rows)
    if scale[0] == shape[0]:
        return StoredWeight(name, shape, num_bytes, shape[1] // scale[1], 1, word_rows)
    return StoredWeight(name, shape, num_bytes, block_rows, block_rows, word_rows)
