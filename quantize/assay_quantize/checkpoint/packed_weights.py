"""Packed weights, under the names and shapes of the weights they stand for. `kernels/dequantize.py` says how they are read.

INT4 of compressed-tensors (Kimi-K2-Thinking):
`weight_packed` I32 [O, I/8] holds the codes of eight columns in a word, the first in its lowest bits, 8 added to each;
`weight_scale` [O, I/group] their scales; `weight_shape` [2] is O and I. A plan sees `weight` [O, I] of dtype `INT4`, which no
file has: its bytes are those of `weight_packed`.

FP4 of DeepSeek-V4: `weight` I8 [O, I/2] holds two E2M1 codes in a byte, the first in its low half; `scale` F8_E8M0 [O, I/32]
the exponents of their scales: OCP's MXFP4. A plan sees `weight` [O, I] of dtype `FP4`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from assay_quantize.checkpoint.source_format import BARE_SCALE, E8M0, FP4, INT4, declares_int4

if TYPE_CHECKING:
    from assay_quantize.checkpoint.headers import TensorHeader

CODES_PER_WORD = 8
CODES_PER_BYTE = 2


def name_packed(
    config: Mapping[str, Any], tensors: Mapping[str, TensorHeader]
) -> tuple[dict[str, TensorHeader], tuple[str, ...]]:
    """`tensors` with every packed weight under the name and shape of what it stands for, in the same order; and a note.

    INT4 only where config.json declares it: `find_companions` refuses packed weights of any other kind.
    """
    if not declares_int4(config):
        return _name_fp4(tensors)
    made: dict[str, TensorHeader] = {}
    count = 0
    for name, header in tensors.items():
        module, _, leaf = name.rpartition(".")
        if leaf == "weight_packed" and header.dtype == "I32" and len(header.shape) == 2:
            rows, words = header.shape
            header = header._replace(name=f"{module}.weight", dtype=INT4, shape=(rows, words * CODES_PER_WORD))
            count += 1
        made[header.name] = header
    return made, (f"{count:,} weights are packed INT4; they are read as BF16",) if count else ()


def _name_fp4(tensors: Mapping[str, TensorHeader]) -> tuple[dict[str, TensorHeader], tuple[str, ...]]:
    """What is stored as I8 beside scales that are exponents is FP4; I8 beside any other scales is refused as before."""
    made = dict(tensors)
    for name, header in tensors.items():
        scale = tensors.get(f"{name.removesuffix('.weight')}.{BARE_SCALE}")
        if name.endswith(".weight") and header.dtype == "I8" and len(header.shape) == 2 and scale and scale.dtype == E8M0:
            rows, num_bytes = header.shape
            made[name] = header._replace(dtype=FP4, shape=(rows, num_bytes * CODES_PER_BYTE))
    count = sum(header.dtype == FP4 for header in made.values())
    return made, (f"{count:,} weights are FP4; they are read as BF16",) if count else ()
