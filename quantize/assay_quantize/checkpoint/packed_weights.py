"""Packed INT4 weights of compressed-tensors (Kimi-K2-Thinking), under the names and shapes of the weights they stand for.

`weight_packed` I32 [O, I/8] holds the codes of eight columns in a word, the first in its lowest bits, 8 added to each;
`weight_scale` [O, I/group] their scales; `weight_shape` [2] is O and I. A plan sees `weight` [O, I] of dtype `INT4`, which no
file has: its bytes are those of `weight_packed`. `kernels/dequantize.py` says how it is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from assay_quantize.checkpoint.source_format import INT4, declares_int4

if TYPE_CHECKING:
    from assay_quantize.checkpoint.headers import TensorHeader

CODES_PER_WORD = 8


def name_packed(
    config: Mapping[str, Any], tensors: Mapping[str, TensorHeader]
) -> tuple[dict[str, TensorHeader], tuple[str, ...]]:
    """`tensors` with every packed INT4 weight under the name and shape of what it stands for, in the same order; and a note.

    Nothing changes unless config.json declares symmetric INT4: `find_companions` refuses packed weights of any other kind.
    """
    if not declares_int4(config):
        return dict(tensors), ()
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
