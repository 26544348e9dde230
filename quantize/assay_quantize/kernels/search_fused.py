"""Scale search, fused: the scales that search_reference.py defines, bit for bit, without torch and at a usable speed.

All candidates of many scales are tried side by side on a tile x_JL in FP32 that stays in the cache. The loops run over L, so
that every step is one vector instruction for 16 elements, the sum's tree included, which runs over J:

    groups        a tile is LANES groups, transposed: L counts groups, J the columns of the group
    units         rows, blocks and whole weights, in pieces of up to 128 chunks: L counts the columns of the chunk, J the
                  chunks. A piece of 128 is a subtree, so that the sums of pieces are put together by the same tree
"""

from __future__ import annotations

from typing import Any

import numpy as np

from assay_quantize.kernels.bits import (
    e4m3_to_f32,
    epsilon,
    extent,
    kernel,
    kernel_view,
    largest,
    load,
    round_as,
    round_bf16,
    round_e4m3,
)  # fmt: skip
from assay_quantize.kernels.fused_fp4 import (
    mx_exponent,
    mx_scale,
    mx_to_f32,
    nvfp4_global_scale,
    nvfp4_scale,
    round_e2m1,
)
from assay_quantize.kernels.fused_int import asymmetric_scale
from assay_quantize.kernels.rows import Array, FoundScales
from assay_quantize.kernels.search_grids import CHUNK, FP8_FACTORS, INT_FACTORS, MX_OFFSETS, NVFP4_OFFSETS
from assay_quantize.schemes import Scheme

LANES = 64
"""Groups worked on at a time."""
MX_OFFSET = {"mxfp4": 2, "mxfp8": 8}
"""Layout -> floor(log2(largest element)): what the exponent of the amax is lowered by."""

INT, INT_ASYMMETRIC, E4M3, NVFP4, MXFP4, MXFP8 = range(6)
"""How a weight is rounded and read back."""


def search_scales(
    w_OI: Array, row: Scheme, importance_I: Array | None, *, amax: float | None = None, amax_dtype: str = "F32"
) -> FoundScales:
    """The best scales of the rows.

    amax, amax_dtype: as `kernels.quantize_rows` is given them. importance_I: FP32, one for each column.
    """
    dtype = w_OI.dtype
    if row.layout in ("mxfp4", "mxfp8") and w_OI.dtype == np.float16:
        w_OI = w_OI.astype(np.float32)
    num_rows, columns = w_OI.shape
    importance = np.ones(columns, np.float32) if importance_I is None else importance_I
    kind = _kind(row)
    steps = _steps(kind)
    top = np.float32(7.5 if row.layout == "int4" else 127.5 if kind == INT else 448)
    if row.group_size is not None and row.block_rows == 1:
        shape = (num_rows, columns // row.group_size)
        scale_T, code_T = np.empty(shape[0] * shape[1], np.float32), np.empty(shape[0] * shape[1], np.int16)
        extra = np.float32(MX_OFFSET.get(row.layout, 0))
        if kind == NVFP4:
            assert amax is not None
            extra = nvfp4_global_scale(amax, amax_dtype)
        flat = kernel_view(w_OI).reshape(-1)
        weighted = importance_I is not None
        _search_groups(kind, flat, importance, weighted, row.group_size, top, extra, steps, scale_T, code_T)
        return _found(kind, scale_T.reshape(shape), code_T.reshape(shape), dtype)
    height = num_rows if row.per_tensor else row.block_rows
    width = columns if row.group_size is None else row.group_size
    shape = (-(-num_rows // height), -(-columns // width))
    scale_RC, code_RC = np.empty(shape, np.float32), np.empty(shape, np.int16)
    given = np.float32(-1 if amax is None else amax)
    _search_units(kind, kernel_view(w_OI), importance, height, width, top, given, steps, scale_RC, code_RC)
    return _found(kind, scale_RC, code_RC, dtype)


def _found(kind: int, scale: Array, code: Array, dtype: np.dtype[Any]) -> FoundScales:
    if kind in (NVFP4, MXFP4, MXFP8):
        return FoundScales(code.astype(np.uint8), np.zeros_like(code))
    if dtype == np.uint16:
        return FoundScales((scale.view(np.uint32) >> 16).astype(np.uint16), code)
    return FoundScales(scale.astype(dtype), code)


def _kind(row: Scheme) -> int:
    layouts = {"int4": INT if row.symmetric else INT_ASYMMETRIC, "nvfp4": NVFP4, "mxfp4": MXFP4, "mxfp8": MXFP8}
    return layouts.get(row.layout, E4M3 if row.weight_dtype == "F8_E4M3" else INT)


def _steps(kind: int) -> Array:
    """What makes the candidates: factors, or offsets of codes; the first is min-max itself."""
    if kind in (NVFP4, MXFP4, MXFP8):
        return np.array([0, *(NVFP4_OFFSETS if kind == NVFP4 else MX_OFFSETS)], np.float32)
    return np.array([1, *(FP8_FACTORS if kind == E4M3 else INT_FACTORS)], np.float32)


# ------------------------------------------------------------------------------------------------ candidates
@kernel
def _float_candidates(like: Any, first: Any, steps_K: Any, scale_K: Any) -> None:
    for k in range(steps_K.size):
        scale = round_as(like, first * steps_K[k])
        scale_K[k] = scale if scale > np.float32(0) and scale < np.float32(np.inf) else first
    scale_K[0] = first


@kernel
def _min_max_scale(like: Any, amax: Any, top: Any) -> Any:
    scale = round_as(like, amax / top)
    return epsilon(like) if scale == np.float32(0) else scale


@kernel
def _asymmetric_candidates(like: Any, low: Any, high: Any, steps_K: Any, scale_K: Any, code_K: Any) -> None:
    for k in range(steps_K.size):
        scale, zero = asymmetric_scale(like, round_as(like, low * steps_K[k]), round_as(like, high * steps_K[k]))
        usable = k == 0 or scale_K[0] < np.float32(np.inf)
        scale_K[k] = scale if usable else scale_K[0]
        code_K[k] = np.int16(zero) if usable else code_K[0]


@kernel
def _nvfp4_candidates(like: Any, amax: Any, global_scale: Any, steps_K: Any, scale_K: Any, code_K: Any) -> None:
    first = np.int32(nvfp4_scale(like, amax, global_scale))
    for k in range(steps_K.size):
        code = min(max(first + np.int32(steps_K[k]), np.int32(1)), np.int32(126)) if k > 0 else first
        scale_K[k], code_K[k] = e4m3_to_f32(np.uint8(code)) / global_scale, code


@kernel
def _mx_candidates(amax: Any, offset: Any, steps_K: Any, scale_K: Any, code_K: Any) -> None:
    exponent = mx_exponent(amax)
    first = np.int32(mx_scale(exponent, np.int32(offset))[0])
    overflow = exponent == np.int32(255)
    for k in range(steps_K.size):
        code = first if k == 0 or overflow else min(max(first + np.int32(steps_K[k]), np.int32(0)), np.int32(254))
        scale_K[k], code_K[k] = np.float32(np.inf) if overflow else mx_to_f32(np.uint8(code)), code


# ------------------------------------------------------------------------------------------------ errors of one candidate
@kernel
def _error_int(like: Any, x: Any, u: Any, scale: Any, low: Any, high: Any) -> Any:
    q = np.rint(min(max(round_as(like, x / scale), low), high))
    difference = round_as(like, q * scale) - x
    return difference * difference * u


@kernel
def _error_asymmetric(like: Any, x: Any, u: Any, scale: Any, zero: Any) -> Any:
    q = round_as(like, round_as(like, x / scale) + zero)
    q = np.rint(min(max(q, np.float32(-8)), np.float32(7)))
    difference = round_as(like, (q - zero) * scale) - x
    return difference * difference * u


@kernel
def _error_e4m3(like: Any, x: Any, u: Any, scale: Any) -> Any:
    q = min(max(round_as(like, x / scale), np.float32(-448)), np.float32(448))
    difference = round_as(like, round_e4m3(q) * scale) - x
    return difference * difference * u


@kernel
def _error_mxfp8(like: Any, x: Any, u: Any, scale: Any) -> Any:
    q = min(max(round_as(like, x / scale), np.float32(-448)), np.float32(448))
    difference = round_bf16(round_e4m3(q) * scale) - x
    return difference * difference * u


@kernel
def _error_nvfp4(x: Any, u: Any, scale: Any) -> Any:
    _, value = round_e2m1(abs(x) / scale)
    difference = round_bf16(value * scale) - abs(x)
    return difference * difference * u


@kernel
def _error_mxfp4(like: Any, x: Any, u: Any, scale: Any) -> Any:
    _, value = round_e2m1(round_as(like, abs(x) / scale))
    difference = round_bf16(value * scale) - abs(x)
    return difference * difference * u


@kernel
def _sums_int(like: Any, x_JL: Any, u_JL: Any, s_L: Any, low: Any, high: Any, e_JL: Any) -> None:
    for j in range(0, x_JL.shape[0], 2):
        x0_L, x1_L, u0_L, u1_L, e_L = x_JL[j], x_JL[j + 1], u_JL[j], u_JL[j + 1], e_JL[j // 2]
        for i in range(s_L.size):
            left = _error_int(like, x0_L[i], u0_L[i], s_L[i], low, high)
            e_L[i] = left + _error_int(like, x1_L[i], u1_L[i], s_L[i], low, high)


@kernel
def _sums_asymmetric(like: Any, x_JL: Any, u_JL: Any, s_L: Any, z_L: Any, e_JL: Any) -> None:
    for j in range(0, x_JL.shape[0], 2):
        x0_L, x1_L, u0_L, u1_L, e_L = x_JL[j], x_JL[j + 1], u_JL[j], u_JL[j + 1], e_JL[j // 2]
        for i in range(s_L.size):
            zero = np.float32(z_L[i])
            left = _error_asymmetric(like, x0_L[i], u0_L[i], s_L[i], zero)
            e_L[i] = left + _error_asymmetric(like, x1_L[i], u1_L[i], s_L[i], zero)


@kernel
def _sums_e4m3(like: Any, x_JL: Any, u_JL: Any, s_L: Any, e_JL: Any) -> None:
    for j in range(0, x_JL.shape[0], 2):
        x0_L, x1_L, u0_L, u1_L, e_L = x_JL[j], x_JL[j + 1], u_JL[j], u_JL[j + 1], e_JL[j // 2]
        for i in range(s_L.size):
            e_L[i] = _error_e4m3(like, x0_L[i], u0_L[i], s_L[i]) + _error_e4m3(like, x1_L[i], u1_L[i], s_L[i])


@kernel
def _sums_mxfp8(like: Any, x_JL: Any, u_JL: Any, s_L: Any, e_JL: Any) -> None:
    for j in range(0, x_JL.shape[0], 2):
        x0_L, x1_L, u0_L, u1_L, e_L = x_JL[j], x_JL[j + 1], u_JL[j], u_JL[j + 1], e_JL[j // 2]
        for i in range(s_L.size):
            e_L[i] = _error_mxfp8(like, x0_L[i], u0_L[i], s_L[i]) + _error_mxfp8(like, x1_L[i], u1_L[i], s_L[i])


@kernel
def _sums_nvfp4(x_JL: Any, u_JL: Any, s_L: Any, e_JL: Any) -> None:
    for j in range(0, x_JL.shape[0], 2):
        x0_L, x1_L, u0_L, u1_L, e_L = x_JL[j], x_JL[j + 1], u_JL[j], u_JL[j + 1], e_JL[j // 2]
        for i in range(s_L.size):
            e_L[i] = _error_nvfp4(x0_L[i], u0_L[i], s_L[i]) + _error_nvfp4(x1_L[i], u1_L[i], s_L[i])


@kernel
def _sums_mxfp4(like: Any, x_JL: Any, u_JL: Any, s_L: Any, e_JL: Any) -> None:
    for j in range(0, x_JL.shape[0], 2):
        x0_L, x1_L, u0_L, u1_L, e_L = x_JL[j], x_JL[j + 1], u_JL[j], u_JL[j + 1], e_JL[j // 2]
        for i in range(s_L.size):
            e_L[i] = _error_mxfp4(like, x0_L[i], u0_L[i], s_L[i]) + _error_mxfp4(like, x1_L[i], u1_L[i], s_L[i])


@kernel
def _sum_errors(
    kind: Any, like: Any, x_JL: Any, u_JL: Any, scale_L: Any, code_L: Any, top: Any, e_JL: Any, f_JL: Any
) -> None:  # fmt: skip
    """Sums over J into e_JL[0]. x_JL has an even number of rows; e_JL and f_JL have half as many."""
    if kind == INT:
        _sums_int(like, x_JL, u_JL, scale_L, -np.rint(top), np.floor(top), e_JL)
    elif kind == INT_ASYMMETRIC:
        _sums_asymmetric(like, x_JL, u_JL, scale_L, code_L, e_JL)
    elif kind == E4M3:
        _sums_e4m3(like, x_JL, u_JL, scale_L, e_JL)
    elif kind == NVFP4:
        _sums_nvfp4(x_JL, u_JL, scale_L, e_JL)
    elif kind == MXFP4:
        _sums_mxfp4(like, x_JL, u_JL, scale_L, e_JL)
    else:
        _sums_mxfp8(like, x_JL, u_JL, scale_L, e_JL)
    _fold(e_JL, f_JL)


@kernel
def _fold(e_JL: Any, f_JL: Any) -> None:
    """The sum over J into e_JL[0], as a tree of neighbours; f_JL is scratch of the same shape."""
    size, source_JL, made_JL, swapped = e_JL.shape[0], e_JL, f_JL, False
    while size > 1:
        half = size // 2
        for j in range(half):
            left_L, right_L, made_L = source_JL[2 * j], source_JL[2 * j + 1], made_JL[j]
            for i in range(made_L.size):
                made_L[i] = left_L[i] + right_L[i]
        if size % 2:
            made_JL[half] = source_JL[size - 1]
        size = half + size % 2
        source_JL, made_JL, swapped = made_JL, source_JL, not swapped
    if swapped:
        e_JL[0] = source_JL[0]


@kernel
def _times_square(u_JL: Any, x_JL: Any) -> None:
    for j in range(x_JL.shape[0]):
        u_L, x_L = u_JL[j], x_JL[j]
        for i in range(x_L.size):
            u_L[i] *= x_L[i] * x_L[i]


# ------------------------------------------------------------------------------------------------ groups
@kernel
def _search_groups(
    kind: Any, w_N: Any, importance_I: Any, weighted: Any, group: Any, top: Any, extra: Any, steps_K: Any,
    scale_T: Any, code_T: Any,
) -> None:  # fmt: skip
    x_JL, u_JL = np.zeros((group, LANES), np.float32), np.ones((group, LANES), np.float32)
    e_JL, f_JL = np.empty((group // 2, LANES), np.float32), np.empty((group // 2, LANES), np.float32)
    scale_KL, code_KL = np.ones((steps_K.size, LANES), np.float32), np.zeros((steps_K.size, LANES), np.int16)
    row_LJ = np.zeros((LANES, group + 16), np.float32)  # the padding keeps its columns from meeting in one cache set
    best_L, least_L = np.zeros(LANES, np.int32), np.zeros(LANES, np.float32)
    for begin in range(0, scale_T.size, LANES):
        lanes = min(LANES, scale_T.size - begin)
        for i in range(lanes):
            w_g = w_N[(begin + i) * group : (begin + i + 1) * group]
            _group_candidates(kind, w_g, top, extra, steps_K, scale_KL[:, i], code_KL[:, i])
            x_J = row_LJ[i]
            for j in range(group):
                x_J[j] = load(w_g, j)
        _transpose(row_LJ, x_JL)
        if weighted:
            for i in range(lanes):
                first = (begin + i) * group % importance_I.size
                row_LJ[i, :group] = importance_I[first : first + group]
            _transpose(row_LJ, u_JL)
        if kind in (INT, INT_ASYMMETRIC):
            if not weighted:
                u_JL[:] = np.float32(1)
            _times_square(u_JL, x_JL)
        for k in range(steps_K.size):
            _sum_errors(kind, w_N, x_JL, u_JL, scale_KL[k], code_KL[k], top, e_JL, f_JL)
            for i in range(LANES):
                better = k == 0 or e_JL[0, i] < least_L[i]
                least_L[i] = e_JL[0, i] if better else least_L[i]
                best_L[i] = np.int32(k) if better else best_L[i]
        for i in range(lanes):
            scale_T[begin + i], code_T[begin + i] = scale_KL[best_L[i], i], code_KL[best_L[i], i]


@kernel
def _transpose(row_LJ: Any, x_JL: Any) -> None:
    for j in range(x_JL.shape[0]):
        for i in range(x_JL.shape[1]):
            x_JL[j, i] = row_LJ[i, j]


@kernel
def _group_candidates(kind: Any, w_g: Any, top: Any, extra: Any, steps_K: Any, scale_K: Any, code_K: Any) -> None:
    if kind == INT:
        _float_candidates(w_g, _min_max_scale(w_g, largest(w_g), top), steps_K, scale_K)
    elif kind == INT_ASYMMETRIC:
        low, high = extent(w_g)
        _asymmetric_candidates(w_g, low, high, steps_K, scale_K, code_K)
    elif kind == NVFP4:
        _nvfp4_candidates(w_g, largest(w_g), extra, steps_K, scale_K, code_K)
    else:
        _mx_candidates(largest(w_g), extra, steps_K, scale_K, code_K)


# ------------------------------------------------------------------------------------------------ rows, blocks, whole weights
@kernel
def _search_units(
    kind: Any, w_OI: Any, importance_I: Any, height: Any, width: Any, top: Any, given_amax: Any, steps_K: Any,
    scale_RC: Any, code_RC: Any,
) -> None:  # fmt: skip
    num_rows, columns = w_OI.shape
    chunks_wide = (width + CHUNK - 1) // CHUNK
    num_pieces = (height * chunks_wide + CHUNK - 1) // CHUNK
    half = (min(height * chunks_wide, CHUNK) + 1) // 2
    x_JL, u_JL = np.empty((2 * half, CHUNK), np.float32), np.empty((2 * half, CHUNK), np.float32)
    e_JL, f_JL = np.empty((half, CHUNK), np.float32), np.empty((half, CHUNK), np.float32)
    sum_KPL, g_PL = np.empty((steps_K.size, num_pieces, CHUNK), np.float32), np.empty((num_pieces, CHUNK), np.float32)
    scale_K, code_K = np.ones(steps_K.size, np.float32), np.zeros(steps_K.size, np.int16)
    scale_L, code_L = np.empty(CHUNK, np.float32), np.empty(CHUNK, np.int16)
    for r in range(scale_RC.shape[0]):
        bottom = min((r + 1) * height, num_rows)
        for c in range(scale_RC.shape[1]):
            left, right = c * width, min((c + 1) * width, columns)
            if kind == INT_ASYMMETRIC:
                low, high = extent(w_OI[r, left:right])
                _asymmetric_candidates(w_OI, low, high, steps_K, scale_K, code_K)
            else:
                amax = given_amax
                if given_amax < np.float32(0):
                    for o in range(r * height, bottom):
                        amax = max(amax, largest(w_OI[o, left:right]))
                _float_candidates(w_OI, _min_max_scale(w_OI, amax, top), steps_K, scale_K)
            for p in range(num_pieces):
                for j in range(2 * half):
                    o = r * height + (p * CHUNK + j) // chunks_wide
                    begin = left + (p * CHUNK + j) % chunks_wide * CHUNK
                    size = max(0, min(CHUNK, right - begin)) if o < bottom else 0
                    _load_chunk(w_OI[min(o, num_rows - 1)], importance_I, begin, size, x_JL[j], u_JL[j])
                if kind != E4M3:
                    _times_square(u_JL, x_JL)
                for k in range(steps_K.size):
                    scale_L[:], code_L[:] = scale_K[k], code_K[k]
                    _sum_errors(kind, w_OI, x_JL, u_JL, scale_L, code_L, top, e_JL, f_JL)
                    sum_KPL[k, p] = e_JL[0]
            best = _least(sum_KPL, g_PL)
            scale_RC[r, c], code_RC[r, c] = scale_K[best], code_K[best]


@kernel
def _load_chunk(w_I: Any, importance_I: Any, begin: Any, size: Any, x_L: Any, u_L: Any) -> None:
    for i in range(size):
        x_L[i] = load(w_I, begin + i)
        u_L[i] = importance_I[begin + i]
    x_L[size:], u_L[size:] = np.float32(0), np.float32(0)


@kernel
def _least(sum_KPL: Any, scratch_PL: Any) -> Any:
    """The first k with the smallest sum over pieces and columns."""
    best, least = 0, np.float32(0)
    scratch_L1 = np.empty((CHUNK, 1), np.float32)
    for k in range(sum_KPL.shape[0]):
        _fold(sum_KPL[k], scratch_PL)
        sum_L1 = sum_KPL[k, 0].copy().reshape(CHUNK, 1)
        _fold(sum_L1, scratch_L1)
        if k == 0 or sum_L1[0, 0] < least:
            best, least = k, sum_L1[0, 0]
    return best
