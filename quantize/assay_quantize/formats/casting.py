"""One float dtype into another, on arrays in storage form (uint16 bit patterns for BF16), rounded to nearest, ties to even."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from assay.errors import QuantizeError

Array = NDArray[Any]


def cast_rows(values: Array, dtype: str, output_dtype: str, name: str) -> Array:
    """`values`, of safetensors dtype `dtype` (BF16, F16, F32, F8_E8M0), as `output_dtype` (BF16, F32). NaN stays NaN.

    name: the tensor, for the error. Raises QuantizeError where a finite number would become infinite.
    """
    if dtype == output_dtype:
        return values
    wide = float_rows(values, dtype)
    if output_dtype == "F32":
        return wide
    assert output_dtype == "BF16", f"{name}: nothing is cast to {output_dtype}"
    bits = wide.view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    rounded[np.isnan(wide)] = 0x7FC0
    if bool((((rounded & 0x7FFF) == 0x7F80) & np.isfinite(wide)).any()):
        raise QuantizeError(f"{name}: some values do not fit {output_dtype}; keep its role in `source` dtype")
    return rounded


def float_rows(values: Array, dtype: str) -> Array:
    """`values` in FP32; of F8_E8M0, exponents with bias 127, the powers of two, 255 is NaN."""
    if dtype == "BF16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    if dtype == "F8_E8M0":
        powers = (values.astype(np.uint32) << 23).view(np.float32)
        powers[values == 0] = 2.0**-127  # denormal in FP32
        powers[values == 255] = np.nan
        return powers
    return np.ascontiguousarray(values, np.float32)


# ------------------------------------------------------------------------------------------------ NaN and infinity
_LEAST_NOT_FINITE = {
    "F64": (np.int64, 0x7FF0_0000_0000_0000),
    "F32": (np.int32, 0x7F80_0000),
    "F16": (np.int16, 0x7C00),
    "BF16": (np.int16, 0x7F80),
    "F8_E5M2": (np.int8, 0x7C),
    "F8_E4M3": (np.int8, 0x7F),
    "F8_E8M0": (np.int8, 0x7F),
}
"""dtype -> (integers of its size, bits of the least positive value that is no number). F8_E8M0 has no sign: with that bit."""

_SCANNED_BYTES = 256 << 10
"""Looked at at a time: the second look finds them in the second cache."""


def count_not_finite(values: Array, dtype: str) -> int:
    """How many of `values`, in storage form or as bytes, are NaN or infinite; 0 of a dtype that has neither."""
    if dtype not in _LEAST_NOT_FINITE:
        return 0
    kind, least = _LEAST_NOT_FINITE[dtype]
    signed = values.reshape(-1).view(kind)
    step = _SCANNED_BYTES // signed.itemsize
    sign, count = 1 << (8 * signed.itemsize - 1), 0
    for begin in range(0, signed.size, step):
        # the largest values first, which takes no memory: mostly there is nothing to count. As unsigned numbers the negative
        # ones are the largest
        piece = signed[begin : begin + step]
        unsigned = piece.view(f"u{signed.itemsize}")
        if unsigned.max() >= sign | least:
            count += int((unsigned >= sign | least).sum())
        if dtype != "F8_E8M0" and piece.max() >= least:
            count += int((piece >= least).sum())
    return count
