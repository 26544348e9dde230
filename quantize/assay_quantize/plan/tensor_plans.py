"""What happens to one tensor of a source: its action, and what it becomes. Arithmetic on headers only.

`keep`: the same bytes. `cast`: another float dtype. `dequantize`: FP8, FP4 or INT4 to 16 or 32 bits. `quantize`. `consume`:
scales that go into their weight. `drop`: an MTP block that is not wanted. A weight that the recipe wants in the very form that
it has (FP8, FP4, INT4) is kept together with its scales: rounding it a second time could only lose.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from assay.errors import PlanError
from assay.recipes.family_names import Classified, names_of
from assay.recipes.precision import PrecisionRecipe
from assay.records.plan import Action, OutputTensor, TensorPlan
from assay_quantize.checkpoint.checkpoint import Checkpoint
from assay_quantize.checkpoint.declaration import declared_block
from assay_quantize.checkpoint.headers import TensorHeader
from assay_quantize.checkpoint.source_format import E8M0, FP4, FP8, INT4, Companions, block_of
from assay_quantize.checkpoint.stored import SHAPE_LEAF
from assay_quantize.formats.schemes import CODES_PER_ELEMENT, DTYPE_BYTES, KV_LEAVES, SCHEMES, Scheme, module_of, output_tensors

FLOATS = ("BF16", "F16", "F32")
KEEP_DTYPES = {"bf16": "BF16", "fp32": "F32"}


class Treatment(NamedTuple):
    """dtype: of the output; with `quantize`, that of the weight which is rounded."""

    action: Action
    dtype: str
    scheme: str | None


def carried_weights(
    checkpoint: Checkpoint, classified: Mapping[str, Classified], companions: Companions, recipe: PrecisionRecipe
) -> set[str]:
    """FP8, FP4 and INT4 weights that are stored in the scheme that the recipe wants already: in the same blocks or groups.

    All members of a fused group, or none of them.
    """
    block = declared_block(checkpoint.location, checkpoint.config)
    schemes = {name: scheme for name, what in classified.items() if (scheme := scheme_of(what, recipe)) is not None}
    fits = set()
    for name in schemes.keys() & companions.scale_of.keys():
        row, weight = SCHEMES[schemes[name]], checkpoint.tensors[name]
        if not _is_stored_as(row, weight.dtype) or (weight.dtype == INT4 and name not in companions.shape_of):
            continue
        columns = weight.shape[1] if row.group_size is None else row.group_size
        scale = checkpoint.tensors[companions.scale_of[name]]
        if block_of(weight.dtype, weight.shape, scale.shape, block) == (row.block_rows, columns):
            fits.add(name)
    mixed = {classified[name].fused_group for name in schemes.keys() - fits} - {None}
    return {name for name in fits if classified[name].fused_group not in mixed}


def carried_tables(family: str, companions: Companions) -> set[str]:
    """Weights with scales in modules that stay as they are inside the layers: vLLM reads such tables as they are released."""
    return {name for name in companions.scale_of if names_of(family).is_table(name)}


def _is_stored_as(row: Scheme, dtype: str) -> bool:
    """Whether the codes of a scheme are those of a source's weight: FP8, FP4 with scales that are exponents, symmetric INT4."""
    if dtype == INT4:
        return row.layout == "int4" and row.symmetric
    if dtype == FP4:
        return row.layout == "mxfp4"
    return dtype == FP8 and row.layout == "plain" and row.weight_dtype == FP8


def _rule(classified: Classified, recipe: PrecisionRecipe) -> tuple[str, int | None]:
    """(the role whose rule in the recipe holds, the number that its `layers` knows the layer by; the MTP block has none).

    Inside a kept MTP block everything goes by role `mtp`, but norms, router_bias and `other` by their own roles, so that the
    block loses nothing that the layers keep. Inside a quantized one everything goes by its own role, but `mtp_projection`.
    """
    by_block = classified.role == "mtp" and (recipe.mtp == "keep" or classified.part == "mtp_projection")
    role = "mtp" if by_block and classified.part not in ("norm", "router_bias", "other") else classified.part
    return role, None if classified.role == "mtp" else classified.layer


def scheme_of(classified: Classified, recipe: PrecisionRecipe) -> str | None:
    """The scheme that the recipe wants for a weight; None: it is kept, dropped or no quantizable matrix."""
    if not classified.linear or (classified.role == "mtp" and recipe.mtp == "drop"):
        return None
    return recipe.scheme_of(*_rule(classified, recipe))


def action_of(
    header: TensorHeader, classified: Classified, recipe: PrecisionRecipe, scale: str | None, carried: bool
) -> Treatment:
    """What the recipe asks for.

    carried: the weight is kept with its scales: it is stored in the scheme that is wanted, or is a table (`carried_tables`).
    Of a quantized role, what is no quantizable matrix (biases, convolutions) keeps the dtype of the source; a weight with
    scales that is not quantized again becomes BF16 there.
    """
    if classified.role == "mtp" and recipe.mtp == "drop":
        return Treatment("drop", header.dtype, None)
    plain = header.dtype if scale is None else "BF16"
    if (scheme := scheme_of(classified, recipe)) is not None:
        return Treatment("keep", header.dtype, scheme) if carried else Treatment("quantize", plain, scheme)
    if carried:  # a table
        return Treatment("keep", header.dtype, None)
    rule, layer = _rule(classified, recipe)
    kept = recipe.kept_dtype(rule, layer)
    dtype = plain if kept is None or kept == "source" else KEEP_DTYPES[kept]
    if classified.part == "router" and header.dtype == "F32":
        dtype = "F32"  # published in FP32 (MiniMax-M2, ERNIE-4.5), it is loaded so: rounded, it chooses other experts
    if scale is not None:
        return Treatment("dequantize", dtype, None)
    if dtype == header.dtype:
        return Treatment("keep", header.dtype, None)
    if header.dtype not in FLOATS:
        raise PlanError(f"{header.name}: dtype {header.dtype} cannot be cast to {dtype}; keep role {rule} as `source`")
    return Treatment("cast", dtype, None)


def tensor_plan(
    header: TensorHeader, classified: Classified, treatment: Treatment, shard_out: str | None, scale: str | None
) -> TensorPlan:  # fmt: skip
    """The plan of a weight, or of anything else but scales."""
    outputs: tuple[OutputTensor, ...] = ()
    if treatment.action == "quantize":
        assert treatment.scheme is not None
        outputs = output_tensors(treatment.scheme, header.name, header.shape, treatment.dtype)
    elif treatment.action == "keep" and header.dtype in (INT4, FP4):
        dtype = "I32" if header.dtype == INT4 else "U8"
        shape = (header.shape[0], header.shape[1] // CODES_PER_ELEMENT[dtype])
        outputs = (OutputTensor(f"{classified.module}.weight_packed", dtype, shape, header.num_bytes),)
    elif treatment.action != "drop":
        num_bytes = math.prod(header.shape) * DTYPE_BYTES[treatment.dtype]
        outputs = (OutputTensor(header.name, treatment.dtype, header.shape, num_bytes),)
    return _plan(header, classified, treatment.action, outputs, shard_out)._replace(
        scheme=treatment.scheme, fused_group=classified.fused_group, scale=scale
    )


def scale_plan(
    header: TensorHeader, weight: Classified, weights: Treatment, shard_out: str | None, *, of_activations: bool
) -> TensorPlan:
    """The plan of scales and shapes, which follow their weight: kept with it, under compressed-tensors' names, or consumed.
    Those of tables keep their names.

    weights: the treatment of the weight. of_activations: scales that no precision takes over.
    """
    if weights.action == "drop":
        return _plan(header, weight, "drop", (), None)
    if of_activations or weights.action != "keep":
        return _plan(header, weight, "consume", (), None)
    if weights.scheme is None or header.name.endswith(f".{SHAPE_LEAF}"):
        output = OutputTensor(header.name, header.dtype, header.shape, header.num_bytes)
        return _plan(header, weight, "keep", (output,), shard_out)
    shape, dtype, num_bytes = header.shape, header.dtype, header.num_bytes
    action: Action = "keep"
    if len(shape) == 1:
        shape = (*shape, 1)
    if dtype == E8M0 and SCHEMES[weights.scheme].layout == "mxfp4":
        dtype = "U8"
    elif dtype == E8M0:  # compressed-tensors has scales of FP8 blocks as floats; powers of two are the same in BF16
        dtype, num_bytes, action = "BF16", num_bytes * DTYPE_BYTES["BF16"], "cast"
    output = OutputTensor(f"{weight.module}.weight_scale", dtype, shape, num_bytes)
    return _plan(header, weight, action, (output,), shard_out)


def _plan(
    header: TensorHeader, classified: Classified, action: Action, outputs: tuple[OutputTensor, ...], shard_out: str | None
) -> TensorPlan:
    return TensorPlan(
        name=header.name,
        role=classified.role,
        part=classified.part,
        module=classified.module,
        action=action,
        scheme=None,
        fused_group=None,
        dtype=header.dtype,
        shape=header.shape,
        num_bytes=header.num_bytes,
        shard_in=header.shard,
        shard_out=shard_out if outputs else None,
        outputs=outputs,
    )


def cache_scales(recipe: PrecisionRecipe, plans: Mapping[str, TensorPlan], where: str) -> list[TensorPlan]:
    """What is added for a calibrated KV cache: `k_scale` and `v_scale` of every attention with heads, in the shard of its keys.

    plans: of the source's tensors, by name. vLLM loads them as `SELF_ATTN.attn.k_scale` (`get_cache_scale_mapper` of its
    quantization configs); latent attention (MLA) has none to load: its class gets no KV-cache method from
    `CompressedTensorsConfig.get_quant_method`, and its scale stays 1. Raises PlanError: the model has no other attention.
    """
    if recipe.kv_cache != "fp8_calibrated":
        return []
    added = []
    for name, keys in plans.items():
        if not name.endswith(".k_proj.weight") or keys.part != "attention" or keys.role == "mtp":
            continue
        module = module_of(keys.module)
        for leaf in KV_LEAVES:
            output = OutputTensor(f"{module}.{leaf}", "F32", (1,), 4)
            shards = (keys.shard_in, keys.shard_out)
            plan = TensorPlan(output.name, keys.role, keys.part, module, "add", None, None, "F32", (1,), 0, *shards, (output,))
            added.append(plan)
    if not added:
        raise PlanError(
            f"precision {recipe.name}: kv_cache fp8_calibrated: {where} has no attention with keys of its own (`k_proj`); of "
            "latent attention (MLA) vLLM loads no scales of the cache and takes 1: say `kv_cache: fp8`"
        )
    return added
