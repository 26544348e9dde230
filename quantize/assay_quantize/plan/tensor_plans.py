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
from assay.recipes.families import Classified
from assay.recipes.precision import PrecisionRecipe
from assay.records.plan import Action, OutputTensor, TensorPlan
from assay_quantize.checkpoint.checkpoint import Checkpoint
from assay_quantize.checkpoint.headers import TensorHeader
from assay_quantize.checkpoint.source_format import E8M0, FP4, FP8, INT4, SHAPE_LEAF, Companions, block_of, declared_block
from assay_quantize.formats.schemes import DTYPE_BYTES, SCHEMES, Scheme, output_tensors

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
    wanted = {name: scheme for name, what in classified.items() if (scheme := scheme_of(what, recipe)) is not None}
    fits = set()
    for name in wanted.keys() & companions.scale_of.keys():
        row, weight = SCHEMES[wanted[name]], checkpoint.tensors[name]
        if not _is_stored_as(row, weight.dtype) or (weight.dtype == INT4 and name not in companions.shape_of):
            continue
        columns = weight.shape[1] if row.group_size is None else row.group_size
        scale = checkpoint.tensors[companions.scale_of[name]]
        if block_of(weight.dtype, weight.shape, scale.shape, block) == (row.block_rows, columns):
            fits.add(name)
    mixed = {classified[name].fused_group for name in wanted.keys() - fits} - {None}
    return {name for name in fits if classified[name].fused_group not in mixed}


def _is_stored_as(row: Scheme, dtype: str) -> bool:
    """Whether the codes of a scheme are those of a source's weight: FP8, FP4 with scales that are exponents, symmetric INT4."""
    if dtype == INT4:
        return row.layout == "int4" and row.symmetric
    if dtype == FP4:
        return row.layout == "mxfp4"
    return dtype == FP8 and row.layout == "plain" and row.weight_dtype == FP8


def _rule(found: Classified, recipe: PrecisionRecipe) -> str:
    """The role whose rule in the recipe holds.

    Inside a kept MTP block everything goes by role `mtp`, but norms, router_bias and `other` by their own roles, so that the
    block loses nothing that the layers keep. Inside a quantized one everything goes by its own role, but `mtp_projection`.
    """
    by_block = found.role == "mtp" and (recipe.mtp == "keep" or found.part == "mtp_projection")
    return "mtp" if by_block and found.part not in ("norm", "router_bias", "other") else found.part


def scheme_of(found: Classified, recipe: PrecisionRecipe) -> str | None:
    """The scheme that the recipe wants for a weight; None: it is kept, dropped or no quantizable matrix."""
    if not found.linear or (found.role == "mtp" and recipe.mtp == "drop"):
        return None
    return recipe.scheme_of(_rule(found, recipe), _layer(found))


def _layer(found: Classified) -> int | None:
    """The number that the recipe's `layers` knows a layer by; the MTP block has none."""
    return None if found.role == "mtp" else found.layer


def action_of(header: TensorHeader, found: Classified, recipe: PrecisionRecipe, scale: str | None, carried: bool) -> Treatment:
    """What the recipe asks for.

    Of a quantized role, what is no quantizable matrix (biases, convolutions) keeps the dtype of the source; a weight with
    scales that is not quantized again becomes BF16 there.
    """
    if found.role == "mtp" and recipe.mtp == "drop":
        return Treatment("drop", header.dtype, None)
    rule, plain = _rule(found, recipe), header.dtype if scale is None else "BF16"
    if (scheme := scheme_of(found, recipe)) is not None:
        return Treatment("keep", header.dtype, scheme) if carried else Treatment("quantize", plain, scheme)
    wanted = recipe.kept_dtype(rule, _layer(found))
    dtype = plain if wanted is None or wanted == "source" else KEEP_DTYPES[wanted]
    if found.part == "router" and header.dtype == "F32":
        dtype = "F32"  # published in FP32 (MiniMax-M2, ERNIE-4.5), it is loaded so: rounded, it chooses other experts
    if scale is not None:
        return Treatment("dequantize", dtype, None)
    if dtype == header.dtype:
        return Treatment("keep", header.dtype, None)
    if header.dtype not in FLOATS:
        raise PlanError(f"{header.name}: dtype {header.dtype} cannot be cast to {dtype}; keep role {rule} as `source`")
    return Treatment("cast", dtype, None)


def tensor_plan(
    header: TensorHeader, found: Classified, done: Treatment, shard_out: str | None, scale: str | None
) -> TensorPlan:  # fmt: skip
    """The plan of a weight, or of anything else but scales."""
    outputs: tuple[OutputTensor, ...] = ()
    if done.action == "quantize":
        assert done.scheme is not None
        outputs = output_tensors(done.scheme, header.name, header.shape, done.dtype)
    elif done.action == "keep" and header.dtype == INT4:
        rows, columns = header.shape
        outputs = (OutputTensor(f"{found.module}.weight_packed", "I32", (rows, columns // 8), header.num_bytes),)
    elif done.action == "keep" and header.dtype == FP4:
        rows, columns = header.shape
        outputs = (OutputTensor(f"{found.module}.weight_packed", "U8", (rows, columns // 2), header.num_bytes),)
    elif done.action != "drop":
        num_bytes = math.prod(header.shape) * DTYPE_BYTES[done.dtype]
        outputs = (OutputTensor(header.name, done.dtype, header.shape, num_bytes),)
    return _plan(header, found, done.action, outputs, shard_out)._replace(
        scheme=done.scheme, fused_group=found.fused_group, scale=scale
    )


def scale_plan(
    header: TensorHeader, weight: Classified, weights: Treatment, shard_out: str | None, *, of_activations: bool
) -> TensorPlan:
    """The plan of scales and shapes, which follow their weight: kept with it, under compressed-tensors' names, or consumed.

    weights: the treatment of the weight. of_activations: scales that no precision takes over.
    """
    if weights.action == "drop":
        return _plan(header, weight, "drop", (), None)
    if of_activations or weights.action != "keep" or weights.scheme is None:
        return _plan(header, weight, "consume", (), None)
    if header.name.endswith(f".{SHAPE_LEAF}"):
        output = OutputTensor(header.name, header.dtype, header.shape, header.num_bytes)
        return _plan(header, weight, "keep", (output,), shard_out)
    name, shape = f"{weight.module}.weight_scale", (*header.shape, 1) if len(header.shape) == 1 else header.shape
    if header.dtype != E8M0:
        return _plan(header, weight, "keep", (OutputTensor(name, header.dtype, shape, header.num_bytes),), shard_out)
    if SCHEMES[weights.scheme].layout == "mxfp4":
        return _plan(header, weight, "keep", (OutputTensor(name, "U8", shape, header.num_bytes),), shard_out)
    # compressed-tensors has scales of FP8 blocks as floats; powers of two are the same in BF16
    output = OutputTensor(name, "BF16", shape, header.num_bytes * DTYPE_BYTES["BF16"])
    return _plan(header, weight, "cast", (output,), shard_out)


def _plan(
    header: TensorHeader, found: Classified, action: Action, outputs: tuple[OutputTensor, ...], shard_out: str | None
) -> TensorPlan:
    return TensorPlan(
        name=header.name,
        role=found.role,
        part=found.part,
        module=found.module,
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
