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
    kernel,
    kernel_view,
    largest,
    load,
    nearest_e4m3,
    round_as,
    store,
)  # fmt: skip
from assay_quantize.kernels.fused_int import CHUNK
from assay_quantize.kernels.rows import Array, FoundScales, QuantizedRows, RowErrors
from assay_quantize.kernels.sums import is_ordinary, move, quotient, reciprocal, squared, sums, total
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
def _round_fp8(w_OI: Any, q_OI: Any, rows: Any, columns: Any, scale: Any, error_C: Any, norm_C: Any) -> None:
    """Codes of the weights [rows, columns], from and to; their squared errors and squares are added to the sums."""
    inverse = reciprocal(scale)
    for o in range(rows[0], rows[1]):
        for begin in range(columns[0], columns[1], CHUNK):
            end = min(begin + CHUNK, columns[1])
            w_c, q_c = w_OI[o, begin:end], q_OI[o, begin:end]
            for i in range(w_c.size):
                w = load(w_c, i)
                q = round_as(w_c, quotient(w_c, error_C, w, scale, inverse))
                q_c[i], value = nearest_e4m3(min(max(q, np.float32(-448)), np.float32(448)))
                error_C[i] += squared(error_C, round_as(w_c, value * scale) - w)
                norm_C[i] += squared(norm_C, w)


@kernel
def _quantize_fp8(w_OI: Any, q_OI: Any, scale_RC: Any, height: Any, width: Any, given_amax: Any, given: Any) -> Any:
    error_C, norm_C, piece_error_C, piece_norm_C = sums(CHUNK)
    num_rows, columns = w_OI.shape
    # added up in FP32: a row, or the block of rows that a scale belongs to; never what depends on where slabs begin
    step = 1 if scale_RC.shape[1] == 1 else height
    for top in range(0, num_rows, step):
        r, bottom = top // height, min(top + step, num_rows)
        for c in range(scale_RC.shape[1]):
            left, right = c * width, min((c + 1) * width, columns)
            if top % height == 0 and not given:
                amax = given_amax
                if given_amax < np.float32(0):
                    for o in range(top, min(top + height, num_rows)):
                        amax = max(amax, largest(w_OI[o, left:right]))
                scale = round_as(w_OI, amax / np.float32(448))
                store(scale_RC[r], c, epsilon(w_OI) if scale == np.float32(0) else scale)
            scale = load(scale_RC[r], c)
            if is_ordinary(w_OI, scale):
                _round_fp8(w_OI, q_OI, (top, bottom), (left, right), scale, piece_error_C, piece_norm_C)
                move(piece_error_C, error_C)
                move(piece_norm_C, norm_C)
            else:
                _round_fp8(w_OI, q_OI, (top, bottom), (left, right), scale, error_C, norm_C)
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
