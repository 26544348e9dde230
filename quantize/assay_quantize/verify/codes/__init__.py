"""Whether stored codes and scales are what a scheme makes of rows of the source: a comparison in registers that writes nothing.

These kernels are not the rounding kernels, and share none of their functions but bit casts and the rounding to an E4M3 scale
(`kernels/bits.py`): quotients are rounded by adding half a unit, FP8 codes by integers, two at a time; E2M1 codes come from the
same added constants. They cover BF16 weights in the schemes of the default precisions, with min-max scales of ordinary size;
`None` is said of everything else, and the rounding kernels decide. They take three tenths (INT4) to half (FP8, NVFP4) of the
time of rounding, which also sums up errors.

In: rows of the source, the stored parts that belong to them. Out: equal, not equal, or not decided here. Imports formats and
kernels.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from assay_quantize.formats.schemes import SCHEMES
from assay_quantize.kernels.rows import Array, check_rows
from assay_quantize.verify.codes import fp8, int4, nvfp4

INT4_PIECE = 128
"""Columns looked at at once: groups of fewer would not be faster than rounding."""
DIFFERS, UNDECIDED = 1, 2
"""What a kernel returns; 0: all bytes are equal."""


def is_what_rounding_gives(
    parts: Mapping[str, Array],
    w_OI: Array,
    dtype: str,
    scheme: str,
    *,
    global_scale: float | None = None,
    most_1: NDArray[np.uint16] | None = None,
) -> bool | None:
    """Whether every byte of `parts` is what min-max scales and rounding give for the rows `w_OI`; None: not decided here.

    parts: local name -> these rows of it, in storage form (`QuantizedRows.parts`). global_scale: of NVFP4: what must be stored.
    most_1: of NVFP4: where the largest magnitude is put, as BF16 bits, if it is larger than what is there.
    """
    check_rows(w_OI, dtype)
    row, columns = SCHEMES[scheme], w_OI.shape[1]
    if dtype != "BF16" or columns % 2 or not all(part.flags.aligned for part in (w_OI, *parts.values())):
        return None
    width = columns if row.group_size is None else row.group_size
    if row.layout == "int4" and row.symmetric and width % INT4_PIECE == 0:
        found = int4.look(w_OI, parts["weight_packed"].view(np.uint8), parts["weight_scale"], width)
    elif row.layout == "plain" and row.weight_dtype == "F8_E4M3":
        found = fp8.look(w_OI, parts["weight"].view(np.uint16), parts["weight_scale"], row.block_rows, width)
    elif row.layout == "nvfp4" and global_scale is not None:
        if parts["weight_global_scale"].tolist() != [global_scale]:
            return False
        most_1 = np.zeros(1, np.uint16) if most_1 is None else most_1
        found = nvfp4.look(w_OI, parts["weight_packed"], parts["weight_scale"], np.float32(global_scale), most_1)
    else:
        return None
    return None if found & UNDECIDED else not found
