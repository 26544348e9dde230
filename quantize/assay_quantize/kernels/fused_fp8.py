"""Fused kernels of FP8 (E4M3) with float scales: by block of 128 x 128 (ragged at both edges), or by row.

A row of blocks at a time: its scales from the largest |w|, then row after row in pieces of 128 columns, which with their sums
stay in the first cache. Every step is rounded to the weight's dtype where compressed-tensors computes in it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from assay_quantize.formats.schemes import Scheme
from assay_quantize.kernels.bits import (  # fmt: skip
    e4m3_to_f32,
    epsilon,
    kernel,
    kernel_view,
    largest,
    load,
    nearest_e4m3,
    round_as,
    store,
)
from assay_quantize.kernels.fused_int import CHUNK
from assay_quantize.kernels.rows import Array, ChosenScales, QuantizedRows, RowErrors, large_part
from assay_quantize.kernels.sums import is_ordinary, move, quotient, reciprocal, squared, sums, total


def quantize_rows(
    w_OI: Array, row: Scheme, chosen: ChosenScales | None = None, memory: Array | None = None, **_: Any
) -> QuantizedRows:
    """`kernels.quantize_rows` for the FP8 schemes, with the scales that were found, or min-max scales."""
    num_rows, columns = w_OI.shape
    height, width = _block(row, columns)
    shape = (-(-num_rows // height), -(-columns // width))
    scale = np.empty(shape, w_OI.dtype) if chosen is None else chosen.scale.reshape(shape)
    q_OI = large_part(memory, (num_rows, columns), np.uint8)
    sums = _quantize_fp8(kernel_view(w_OI), q_OI, kernel_view(scale), height, width, chosen is not None)
    return QuantizedRows({"weight": q_OI, "weight_scale": scale}, *sums)


def error_rows(parts: dict[str, Array], w_OI: Array, row: Scheme) -> RowErrors:
    """`kernels.error_rows` for the FP8 schemes."""
    height, width = _block(row, w_OI.shape[1])
    return RowErrors(*_error_fp8(parts["weight"], kernel_view(parts["weight_scale"]), kernel_view(w_OI), height, width))


def _block(row: Scheme, columns: int) -> tuple[int, int]:
    """Rows and columns that share a scale."""
    return row.block_rows, columns if row.group_size is None else row.group_size


# ------------------------------------------------------------------------------------------------ kernels
@kernel
def largest_magnitude(w_OI: Any) -> Any:
    return largest(w_OI.reshape(-1))


@kernel
def _scales_fp8(w_OI: Any, scale_RC: Any, r: Any, height: Any, width: Any) -> None:
    """The scales of row r of the blocks, found by whole rows: that is the order in which memory is read ahead."""
    num_rows, columns = w_OI.shape
    amax_C = np.zeros(scale_RC.shape[1], np.float32)
    for o in range(r * height, min((r + 1) * height, num_rows)):
        for c in range(amax_C.size):
            amax_C[c] = max(amax_C[c], largest(w_OI[o, c * width : min((c + 1) * width, columns)]))
    for c in range(amax_C.size):
        scale = round_as(w_OI, amax_C[c] / np.float32(448))
        store(scale_RC[r], c, epsilon(w_OI) if scale == np.float32(0) else scale)


@kernel
def _round_fp8(w_I: Any, q_I: Any, scale_C: Any, inverse_C: Any, width: Any, error_L: Any, norm_L: Any) -> None:
    """Codes of a row of weights; their squared errors and squares are added to the sums."""
    for c in range(scale_C.size):
        scale, inverse = scale_C[c], inverse_C[c]
        right = min((c + 1) * width, w_I.size)
        for begin in range(c * width, right, CHUNK):
            w_c, q_c = w_I[begin : min(begin + CHUNK, right)], q_I[begin : min(begin + CHUNK, right)]
            for i in range(w_c.size):
                w = load(w_c, i)
                q = round_as(w_c, quotient(w_c, error_L, w, scale, inverse))
                q_c[i], value = nearest_e4m3(min(max(q, np.float32(-448)), np.float32(448)))
                error_L[i] += squared(error_L, round_as(w_c, value * scale) - w)
                norm_L[i] += squared(norm_L, w)


@kernel
def _quantize_fp8(w_OI: Any, q_OI: Any, scale_RC: Any, height: Any, width: Any, given: Any) -> Any:
    error_L, norm_L, row_error_L, row_norm_L = sums(CHUNK)
    scale_C, inverse_C = np.empty(scale_RC.shape[1], np.float32), np.empty(scale_RC.shape[1], np.float32)
    for r in range(scale_RC.shape[0]):
        if not given:
            _scales_fp8(w_OI, scale_RC, r, height, width)
        ordinary = True
        for c in range(scale_C.size):
            scale_C[c] = load(scale_RC[r], c)
            inverse_C[c] = reciprocal(scale_C[c])
            ordinary = ordinary and is_ordinary(w_OI, scale_C[c])
        for o in range(r * height, min((r + 1) * height, w_OI.shape[0])):
            if ordinary:
                _round_fp8(w_OI[o], q_OI[o], scale_C, inverse_C, width, row_error_L, row_norm_L)
                move(row_error_L, error_L)
                move(row_norm_L, norm_L)
            else:
                _round_fp8(w_OI[o], q_OI[o], scale_C, inverse_C, width, error_L, norm_L)
    return total(error_L), total(norm_L)


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
