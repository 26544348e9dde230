"""gpt-oss: the experts of a layer in MXFP4, all in one tensor.

    experts.gate_up_proj_blocks U8 [E, 2I, H/32, 16], experts.gate_up_proj_scales U8 [E, 2I, H/32]
    experts.down_proj_blocks    U8 [E, H, I/32, 16],  experts.down_proj_scales    U8 [E, H, I/32]

Blocks are in the orientation of a weight, (out, in), though the BF16 parameter that transformers makes of them is transposed.
Rows of gate and up alternate: gate is rows 0, 2, 4, ...
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from assay_quantize.checkpoint.headers import TensorHeader
from assay_quantize.decoding.parts import needed
from assay_quantize.decoding.stored_weight import (
    ActivationRule,
    Declared,
    KvRule,
    Method,
    Module,
    NotRead,
    Part,
    StoredWeight,
)

_TENSOR = re.compile(r"(?P<experts>.+\.experts)\.(?P<leaf>gate_up_proj|down_proj)_(?P<part>blocks|scales)")


def method(location: str, declared: Declared) -> Method:
    """`quant_method: mxfp4`. What activations are rounded to is the server's choice (none, or MXFP8 on Blackwell)."""
    del location, declared
    return Method(_stored_weight, KvRule(), "MXFP4 (gpt-oss)")


def _stored_weight(module: str, tensors: Module) -> StoredWeight:
    blocks, scales = needed(tensors, "blocks", ("U8",), 3), needed(tensors, "scales", ("U8", "F8_E8M0"), 2)
    if blocks.shape != (*scales.shape, 16):
        raise NotRead(
            f"has blocks of shape {list(blocks.shape)} and scales of shape {list(scales.shape)}; [O, G, 16], [O, G] are read"
        )
    rows, groups = scales.shape
    parts = {"weight": Part(blocks), "weight_scale": Part(scales)}
    return StoredWeight(
        f"{module}.weight",
        "MXFP4 experts",
        "fp4_e2m1",
        (rows, 32 * groups),
        "mxfp4",
        parts,
        {},
        (1, 32),
        True,
        ActivationRule(),
    )


def split_experts(tensors: Mapping[str, TensorHeader]) -> dict[str, TensorHeader]:
    """`tensors` with every tensor of all experts replaced by those of single ones: `experts.3.down_proj.blocks`."""
    made: dict[str, TensorHeader] = {}
    for name, header in tensors.items():
        match = _TENSOR.fullmatch(name)
        if match is None:
            made[name] = header
            continue
        for expert, piece in enumerate(slices(header)):
            made[f"{match['experts']}.{expert}.{match['leaf']}.{match['part']}"] = piece
    return made


def slices(header: TensorHeader) -> Iterator[TensorHeader]:
    """What a tensor holds of each index of its first dimension, under the tensor's own name."""
    each = header.num_bytes // header.shape[0]
    for index in range(header.shape[0]):
        begin = header.begin + index * each
        yield header._replace(shape=header.shape[1:], begin=begin, end=begin + each)
