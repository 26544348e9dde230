"""Fused kernels of FP8 (E4M3) with float scales: by block of 128 x 128 (ragged at both edges), by row, by weight.

A row of blocks at a time: its scale from the largest |w|, then its rows in pieces of 128 columns, which with their sums stay in
the first cache. Every step is rounded to the weight's dtype where compressed-tensors computes in it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from assay_quantize.kernels.bits import (
    e4m3_to_f32,
    epsilon,
    f32_to_e4m3,
    kernel,
    kernel_view,
    largest,
    load,
    round_as,
    store,
)  # fmt: skip
from assay_quantize.kernels.fused_int import CHUNK, total
from assay_quantize.kernels.rows import Array, FoundScales, QuantizedRows, RowErrors
from assay_quantize.schemes import Scheme


def quantize_rows(w_OI: Array, row: Scheme, *, amax: float | None = None, found: FoundScales | None = None) -> QuantizedRows:
    """`kernels.quantize_rows` for the FP8 schemes, with the scales that were found, or min-max scales.

    amax: of the whole weight, for one scale.
    """
    num_rows, columns = w_OI.shape
    height, width = _block(row, num_rows, columns)
    shape = (1,) if row.per_tensor else (-(-num_rows // height), -(-columns // width))
    scale = np.empty(shape, w_OI.dtype) if found is None else found.scale.reshape(shape)
    q_OI = np.empty((num_rows, columns), np.uint8)
    given_amax = np.float32(-1 if amax is None else amax)
    scale_RC = kernel_view(scale.reshape(-1, shape[-1]))
    sums = _quantize_fp8(kernel_view(w_OI), q_OI, scale_RC, height, width, given_amax, found is not None)
    return QuantizedRows({"weight": q_OI, "weight_scale": scale}, *sums)


def error_rows(parts: dict[str, Array], w_OI: Array, row: Scheme) -> RowErrors:
    """`kernels.error_rows` for the FP8 schemes."""
    height, width = _block(row, *w_OI.shape)
    scale = parts["weight_scale"]
    scale_RC = kernel_view(scale.reshape(-1, scale.shape[-1]))
    return RowErrors(*_error_fp8(parts["weight"], scale_RC, kernel_view(w_OI), height, width))


def amax_rows(w_OI: Array) -> float:
    """`kernels.amax_rows`."""
    amax = float(_amax(kernel_view(w_OI)))
    return amax if math.isfinite(amax) else math.nan


def _block(row: Scheme, num_rows: int, columns: int) -> tuple[int, int]:
    """Rows and columns that share a scale."""
    if row.per_tensor:
        return num_rows, columns
    return row.block_rows, columns if row.group_size is None else row.group_size


# ------------------------------------------------------------------------------------------------ kernels
@kernel
def _amax(w_OI: Any) -> Any:
    return largest(w_OI.reshape(-1))


@kernel
def _quantize_fp8(w_OI: Any, q_OI: Any, scale_RC: Any, height: Any, width: Any, given_amax: Any, given: Any) -> Any:
    error_C, norm_C = np.zeros(CHUNK), np.zeros(CHUNK)
    num_rows, columns = w_OI.shape
    for r in range(scale_RC.shape[0]):
        rows = range(r * height, min((r + 1) * height, num_rows))
        for c in range(scale_RC.shape[1]):
            left, right = c * width, min((c + 1) * width, columns)
            amax = given_amax
            if given_amax < np.float32(0) and not given:
                for o in rows:
                    amax = max(amax, largest(w_OI[o, left:right]))
            scale = round_as(w_OI, amax / np.float32(448))
            scale = epsilon(w_OI) if scale == np.float32(0) else scale
            scale = load(scale_RC[r], c) if given else scale
            store(scale_RC[r], c, scale)
            for o in rows:
                for begin in range(left, right, CHUNK):
                    w_c, q_c = w_OI[o, begin : min(begin + CHUNK, right)], q_OI[o, begin : min(begin + CHUNK, right)]
                    for i in range(w_c.size):
                        w = load(w_c, i)
                        q = min(max(round_as(w_c, w / scale), np.float32(-448)), np.float32(448))
                        code = f32_to_e4m3(q)
                        q_c[i] = code
                        error = np.float64(round_as(w_c, e4m3_to_f32(code) * scale) - w)
                        error_C[i] += error * error
                        norm_C[i] += np.float64(w) * np.float64(w)
    return total(error_C), total(norm_C)


@kernel
def _error_fp8(q_OI: Any, scale_RC: Any, w_OI: Any, height: Any, width: Any) -> Any:
    error_C, norm_C, bad_C = np.zeros(CHUNK), np.zeros(CHUNK), np.zeros(CHUNK, np.int32)
    num_rows, columns = w_OI.shape
    num_bad = 0
    for o in range(num_rows):
        bad_C[:] = 0
        for c in range(scale_RC.shape[1]):
            left, right = c * width, min((c + 1) * width, columns)
            scale = load(scale_RC[o // height], c)
            for begin in range(left, right, CHUNK):
                w_c, q_c = w_OI[o, begin : min(begin + CHUNK, right)], q_OI[o, begin : min(begin + CHUNK, right)]
                for i in range(w_c.size):
                    w = load(w_c, i)
                    made = round_as(w_c, e4m3_to_f32(q_c[i]) * scale)
                    error = np.float64(made - w)
                    error_C[i] += error * error
                    norm_C[i] += np.float64(w) * np.float64(w)
                    bad_C[i] += np.int32(not abs(made) < np.float32(np.inf))
        num_bad += bad_C.sum()
    return total(error_C), total(norm_C), num_bad
