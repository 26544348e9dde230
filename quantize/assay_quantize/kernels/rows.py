"""What goes into the kernels and comes out of them, without torch and numba: arrays of rows.

A weight w_OI is a C-contiguous array in the storage form of its dtype: uint16 bit patterns for BF16, float16, float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Kernels = Literal["fused", "reference"]

STORAGE: dict[str, type[np.generic]] = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32}
"""safetensors dtype of a weight -> the numpy type its rows are held in."""


@dataclass(frozen=True)
class QuantizedRows:
    """The stored parts of a range of rows, and how far they are from the weight."""

    parts: dict[str, Array]
    """Local name (`weight_packed`, `weight_scale`, ...; see schemes.py) -> these rows of it, in storage form: uint8 for FP8, U8
    and packed FP4, int32 for packed INT4, int8, uint16 bits for BF16, float16, float32. `weight_shape` is not among them: it
    is known to the writer. A part without rows (`weight_global_scale`) is there every time."""
    squared_error: float
    """Sum of (dequantized - w)^2 in FP64; not finite when a scale overflowed."""
    squared_norm: float
    """Sum of w^2 in FP64; NaN or infinite when a weight is not finite (then the parts mean nothing)."""


@dataclass(frozen=True)
class ChosenScales:
    """What a scale search chose for a range of rows."""

    scale: Array
    """As `weight_scale` is stored."""
    zero_point: Array
    """Zero points of asymmetric INT4, int16, one for each scale; zeros elsewhere."""


@dataclass(frozen=True)
class RowErrors:
    """How far stored rows are from the weight they were made from."""

    squared_error: float
    """Sum of (dequantized - w)^2 in FP64."""
    squared_norm: float
    """Sum of w^2 in FP64."""
    num_non_finite: int
    """Dequantized weights that are NaN or infinite."""


def large_part(memory: Array | None, shape: tuple[int, int], dtype: type[np.generic]) -> Array:
    """An array for the part that is almost all of the result: in the beginning of `memory` (flat, uint8) if given, else new."""
    if memory is None:
        return np.empty(shape, dtype)
    made: Array = memory[: shape[0] * shape[1] * np.dtype(dtype).itemsize].view(dtype).reshape(shape)
    return made


def check_rows(w_OI: Array, dtype: str) -> None:
    """Assert the storage form; the kernels index without bounds."""
    assert dtype in STORAGE and w_OI.dtype == STORAGE[dtype], f"{dtype} rows as {w_OI.dtype}"
    assert w_OI.ndim == 2 and w_OI.flags.c_contiguous, "rows must be a C-contiguous matrix"
