"""Scale search, fused: the scales that search_reference.py defines, bit for bit, without torch and at a usable speed.

Each candidate is tried on a tile x_JL in FP32 that stays in the cache. All loops run over L, so that every step is done for 16
weights by one vector instruction, also in the tree of the sum, which runs over J:

    groups        a tile is LANES groups, transposed: L counts groups, J the columns of the group
    units         rows and blocks, in pieces of up to 128 chunks: L counts the columns of the chunk, J the
                  chunks. A piece of 128 is a subtree, so that the sums of pieces are put together by the same tree

Each format is a type, its parameters the fields; `overload` makes of every function here one without branches for each format
and each dtype of weights, and only those that are used are compiled. All of it is scalar, so that the loops around vectorize.

    range_of(kind, w_I)                  -> (low, high): 0 and the largest |w|, or the range of the weights
    first_of(kind, w_I, low, high)       -> three FP32 that stand for the min-max scale
    candidate(kind, w_I, first, step)    -> (scale, code): the scale in FP32 as it is multiplied with; the code is the stored
                                            scale of NVFP4 and MX, the zero point of asymmetric INT4, else 0
    error(kind, w_I, x, u, scale, code)  -> (dequantized - x)^2 * u

w_I only tells the dtype, as everywhere in bits.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba.extending import overload

from assay_quantize.formats.schemes import Scheme
from assay_quantize.kernels.bits import (  # fmt: skip
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
)
from assay_quantize.kernels.fused_fp4 import mx_exponent, mx_scale, mx_to_f32, nvfp4_global_scale, nvfp4_scale, round_e2m1
from assay_quantize.kernels.fused_int import asymmetric_scale
from assay_quantize.kernels.rows import Array, ChosenScales
from assay_quantize.kernels.search_grids import CHUNK, FP8_FACTORS, INT_FACTORS, MX_OFFSETS, NVFP4_OFFSETS


class Int(NamedTuple):
    """Symmetric integers; `half_range` is 7.5 or 127.5."""

    half_range: np.float32


class IntAsymmetric(NamedTuple):
    """INT4 with zero points."""

    steps: np.float32


class E4m3(NamedTuple):
    """FP8 with float scales."""

    largest: np.float32


class Nvfp4(NamedTuple):
    global_scale: np.float32


class Mxfp4(NamedTuple):
    """`offset`: floor(log2(largest element)), 2."""

    offset: np.float32


class Mxfp8(NamedTuple):
    """`offset`: floor(log2(largest element)), 8."""

    offset: np.float32


SearchKind = Int | IntAsymmetric | E4m3 | Nvfp4 | Mxfp4 | Mxfp8


def range_of(kind: Any, w_I: Any) -> Any:
    raise NotImplementedError("only inside kernels")


def first_of(kind: Any, w_I: Any, low: Any, high: Any) -> Any:
    raise NotImplementedError("only inside kernels")


def candidate(kind: Any, w_I: Any, first: Any, step: Any) -> Any:
    raise NotImplementedError("only inside kernels")


def error(kind: Any, w_I: Any, x: Any, u: Any, scale: Any, code: Any) -> Any:
    raise NotImplementedError("only inside kernels")


@overload(range_of)
def _range_of(kind: Any, w_I: Any) -> Any:
    def symmetric(kind: Any, w_I: Any) -> Any:
        return np.float32(0), largest(w_I)

    def asymmetric(kind: Any, w_I: Any) -> Any:
        return extent(w_I)

    return asymmetric if kind.instance_class is IntAsymmetric else symmetric


@overload(first_of)
def _first_of(kind: Any, w_I: Any, low: Any, high: Any) -> Any:
    def integer(kind: Any, w_I: Any, low: Any, high: Any) -> Any:
        return _min_max_scale(w_I, high, kind.half_range), np.float32(0), np.float32(0)

    def e4m3(kind: Any, w_I: Any, low: Any, high: Any) -> Any:
        return _min_max_scale(w_I, high, kind.largest), np.float32(0), np.float32(0)

    def asymmetric(kind: Any, w_I: Any, low: Any, high: Any) -> Any:
        scale, _ = asymmetric_scale(w_I, low, high)
        return low, high, np.float32(scale < np.float32(np.inf))

    def nvfp4(kind: Any, w_I: Any, low: Any, high: Any) -> Any:
        return np.float32(nvfp4_scale(w_I, high, kind.global_scale)), np.float32(0), np.float32(0)

    def mx(kind: Any, w_I: Any, low: Any, high: Any) -> Any:
        exponent = mx_exponent(high)
        code, _ = mx_scale(exponent, np.int32(kind.offset))
        return np.float32(code), np.float32(exponent == np.int32(255)), np.float32(0)

    return _by_kind(kind, Int=integer, IntAsymmetric=asymmetric, E4m3=e4m3, Nvfp4=nvfp4, Mxfp4=mx, Mxfp8=mx)


@overload(candidate)
def _candidate(kind: Any, w_I: Any, first: Any, step: Any) -> Any:
    def floating(kind: Any, w_I: Any, first: Any, step: Any) -> Any:
        scale = round_as(w_I, first[0] * step)
        usable = scale > np.float32(0) and scale < np.float32(np.inf)
        return scale if usable else first[0], np.int16(0)

    def asymmetric(kind: Any, w_I: Any, first: Any, step: Any) -> Any:
        used = step if first[2] > np.float32(0) else np.float32(1)
        scale, zero = asymmetric_scale(w_I, round_as(w_I, first[0] * used), round_as(w_I, first[1] * used))
        return scale, np.int16(zero)

    def nvfp4(kind: Any, w_I: Any, first: Any, step: Any) -> Any:
        code = np.int16(min(max(first[0] + step, np.float32(1)), np.float32(126)))
        return e4m3_to_f32(np.uint8(code)) / kind.global_scale, code

    def mx(kind: Any, w_I: Any, first: Any, step: Any) -> Any:
        overflow = first[1] > np.float32(0)
        code = np.int16(first[0] if overflow else min(max(first[0] + step, np.float32(0)), np.float32(254)))
        return np.float32(np.inf) if overflow else mx_to_f32(np.uint8(code)), code

    return _by_kind(kind, Int=floating, IntAsymmetric=asymmetric, E4m3=floating, Nvfp4=nvfp4, Mxfp4=mx, Mxfp8=mx)


@overload(error)
def _error(kind: Any, w_I: Any, x: Any, u: Any, scale: Any, code: Any) -> Any:
    def integer(kind: Any, w_I: Any, x: Any, u: Any, scale: Any, code: Any) -> Any:
        high = np.floor(kind.half_range)
        q = np.rint(min(max(round_as(w_I, x / scale), -high - np.float32(1)), high))
        difference = round_as(w_I, q * scale) - x
        return difference * difference * u

    def asymmetric(kind: Any, w_I: Any, x: Any, u: Any, scale: Any, code: Any) -> Any:
        zero = np.float32(code)
        q = round_as(w_I, round_as(w_I, x / scale) + zero)
        q = np.rint(min(max(q, np.float32(-8)), np.float32(7)))
        difference = round_as(w_I, (q - zero) * scale) - x
        return difference * difference * u

    def e4m3(kind: Any, w_I: Any, x: Any, u: Any, scale: Any, code: Any) -> Any:
        q = min(max(round_as(w_I, x / scale), np.float32(-448)), np.float32(448))
        difference = round_as(w_I, round_e4m3(q) * scale) - x
        return difference * difference * u

    def nvfp4(kind: Any, w_I: Any, x: Any, u: Any, scale: Any, code: Any) -> Any:
        _, value = round_e2m1(abs(x) / scale)
        difference = round_bf16(value * scale) - abs(x)
        return difference * difference * u

    def mxfp4(kind: Any, w_I: Any, x: Any, u: Any, scale: Any, code: Any) -> Any:
        _, value = round_e2m1(round_as(w_I, abs(x) / scale))
        difference = round_bf16(value * scale) - abs(x)
        return difference * difference * u

    def mxfp8(kind: Any, w_I: Any, x: Any, u: Any, scale: Any, code: Any) -> Any:
        q = min(max(round_as(w_I, x / scale), np.float32(-448)), np.float32(448))
        difference = round_bf16(round_e4m3(q) * scale) - x
        return difference * difference * u

    return _by_kind(kind, Int=integer, IntAsymmetric=asymmetric, E4m3=e4m3, Nvfp4=nvfp4, Mxfp4=mxfp4, Mxfp8=mxfp8)


@kernel
def _min_max_scale(w_I: Any, amax: Any, largest_code: Any) -> Any:
    scale = round_as(w_I, amax / largest_code)
    return epsilon(w_I) if scale == np.float32(0) else scale


def _by_kind(kind: Any, **functions: Any) -> Any:
    return functions[kind.instance_class.__name__]


LANES = 64
"""Groups worked on at a time."""


def search_scales(
    w_OI: Array, row: Scheme, importance_I: Array | None, *, amax: float | None = None, amax_dtype: str = "F32"
) -> ChosenScales:
    """The best scales of the rows.

    amax, amax_dtype: as `kernels.quantize_rows` is given them. importance_I: FP32, one for each column.
    """
    dtype = w_OI.dtype
    if row.layout in ("mxfp4", "mxfp8") and dtype == np.float16:
        w_OI = w_OI.astype(np.float32)
    num_rows, columns = w_OI.shape
    importance = np.ones(columns, np.float32) if importance_I is None else np.ascontiguousarray(importance_I, np.float32)
    kind, steps = _kind_and_steps(row, amax, amax_dtype)
    weighted, squared = importance_I is not None, isinstance(kind, Int | IntAsymmetric)
    w = kernel_view(w_OI)
    if row.group_size is not None and row.block_rows == 1:
        shape = (num_rows, columns // row.group_size)
        scale, code = np.empty(shape, np.float32), np.empty(shape, np.int16)
        _search_groups(
            kind, w.reshape(-1), importance, weighted, squared, row.group_size, steps, scale.reshape(-1), code.reshape(-1)
        )
    else:
        height = row.block_rows
        width = columns if row.group_size is None else row.group_size
        shape = (-(-num_rows // height), -(-columns // width))
        scale, code = np.empty(shape, np.float32), np.empty(shape, np.int16)
        _search_units(kind, w, importance, weighted, squared, height, width, steps, scale, code)
    if isinstance(kind, Nvfp4 | Mxfp4 | Mxfp8):
        return ChosenScales(code.astype(np.uint8), np.zeros_like(code))
    stored = (scale.view(np.uint32) >> 16).astype(np.uint16) if dtype == np.uint16 else scale.astype(dtype)
    return ChosenScales(stored, code)


def _kind_and_steps(row: Scheme, amax: float | None, amax_dtype: str) -> tuple[SearchKind, Array]:
    """The format, and what makes the candidates: factors or offsets, the first of which leaves the min-max scale as it is."""
    kind: SearchKind
    steps: tuple[float, ...]
    if row.layout == "nvfp4":
        assert amax is not None
        kind, first, steps = Nvfp4(nvfp4_global_scale(amax, amax_dtype)), 0, NVFP4_OFFSETS
    elif row.layout == "mxfp4":
        kind, first, steps = Mxfp4(np.float32(2)), 0, MX_OFFSETS
    elif row.layout == "mxfp8":
        kind, first, steps = Mxfp8(np.float32(8)), 0, MX_OFFSETS
    elif row.weight_dtype == "F8_E4M3":
        kind, first, steps = E4m3(np.float32(448)), 1, FP8_FACTORS
    elif row.symmetric:
        kind, first, steps = Int(np.float32(7.5 if row.layout == "int4" else 127.5)), 1, INT_FACTORS
    else:
        kind, first, steps = IntAsymmetric(np.float32(15)), 1, INT_FACTORS
    return kind, np.array([first, *steps], np.float32)


# ------------------------------------------------------------------------------------------------ one candidate
@kernel
def _sum_errors(kind: Any, w: Any, x_JL: Any, u_JL: Any, scale_L: Any, code_L: Any, e_JL: Any, f_JL: Any) -> None:
    """Sums over J into e_JL[0]. x_JL has an even number of rows; e_JL and f_JL have half as many."""
    for j in range(e_JL.shape[0]):
        x_L, y_L, u_L, v_L, e_L = x_JL[2 * j], x_JL[2 * j + 1], u_JL[2 * j], u_JL[2 * j + 1], e_JL[j]
        for i in range(scale_L.size):
            left = error(kind, w, x_L[i], u_L[i], scale_L[i], code_L[i])
            e_L[i] = left + error(kind, w, y_L[i], v_L[i], scale_L[i], code_L[i])
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
def _add_squares(x_JL: Any, e_JL: Any, f_JL: Any) -> None:
    """Sums of x^2 over J into e_JL[0]."""
    for j in range(e_JL.shape[0]):
        x_L, y_L, e_L = x_JL[2 * j], x_JL[2 * j + 1], e_JL[j]
        for i in range(e_L.size):
            e_L[i] = x_L[i] * x_L[i] + y_L[i] * y_L[i]
    _fold(e_JL, f_JL)


@kernel
def _times_square(u_JL: Any, x_JL: Any, mean_L: Any) -> None:
    for j in range(x_JL.shape[0]):
        u_L, x_L = u_JL[j], x_JL[j]
        for i in range(x_L.size):
            u_L[i] *= x_L[i] * x_L[i] + mean_L[i]


# ------------------------------------------------------------------------------------------------ groups
@kernel
def _search_groups(
    kind: Any, w_N: Any, importance_I: Any, weighted: Any, squared: Any, group: Any, steps_K: Any, scale_T: Any, code_T: Any
) -> None:  # fmt: skip
    x_JL, u_JL = np.zeros((group, LANES), np.float32), np.ones((group, LANES), np.float32)
    e_JL, f_JL = np.empty((group // 2, LANES), np.float32), np.empty((group // 2, LANES), np.float32)
    row_LJ = np.zeros((LANES, group + 16), np.float32)  # the padding keeps its columns from meeting in one cache set
    a_L, b_L, c_L = np.ones(LANES, np.float32), np.ones(LANES, np.float32), np.ones(LANES, np.float32)
    scale_L, code_L, mean_L = np.empty(LANES, np.float32), np.empty(LANES, np.int16), np.zeros(LANES, np.float32)
    best_L, least_L = np.empty(LANES, np.float32), np.empty(LANES, np.float32)
    for begin in range(0, scale_T.size, LANES):
        lanes = min(LANES, scale_T.size - begin)
        for i in range(lanes):
            w_g = w_N[(begin + i) * group : (begin + i + 1) * group]
            low, high = range_of(kind, w_g)
            a_L[i], b_L[i], c_L[i] = first_of(kind, w_g, low, high)
            x_J = row_LJ[i]
            for j in range(group):
                x_J[j] = load(w_g, j)
        _transpose(row_LJ, x_JL)
        if weighted:
            for i in range(lanes):
                first = (begin + i) * group % importance_I.size
                row_LJ[i, :group] = importance_I[first : first + group]
            _transpose(row_LJ, u_JL)
        if squared:
            if weighted:
                _add_squares(x_JL, e_JL, f_JL)
                mean_L[:] = e_JL[0] / np.float32(group)
            else:
                u_JL[:] = np.float32(1)
            _times_square(u_JL, x_JL, mean_L)
        for k in range(steps_K.size):
            for i in range(LANES):
                scale_L[i], code_L[i] = candidate(kind, w_N, (a_L[i], b_L[i], c_L[i]), steps_K[k])
            _sum_errors(kind, w_N, x_JL, u_JL, scale_L, code_L, e_JL, f_JL)
            sum_L = e_JL[0]
            for i in range(LANES):
                better = k == 0 or sum_L[i] < least_L[i]
                least_L[i] = sum_L[i] if better else least_L[i]
                best_L[i] = steps_K[k] if better else best_L[i]
        for i in range(lanes):
            scale_T[begin + i], code_T[begin + i] = candidate(kind, w_N, (a_L[i], b_L[i], c_L[i]), best_L[i])


@kernel
def _transpose(row_LJ: Any, x_JL: Any) -> None:
    for j in range(x_JL.shape[0]):
        x_L = x_JL[j]
        for i in range(x_L.size):
            x_L[i] = row_LJ[i, j]


# ------------------------------------------------------------------------------------------------ rows, blocks
@kernel
def _search_units(
    kind: Any, w_OI: Any, importance_I: Any, weighted: Any, squared: Any, height: Any, width: Any, steps_K: Any,
    scale_RC: Any, code_RC: Any,
) -> None:  # fmt: skip
    num_rows, columns = w_OI.shape
    chunks_wide = (width + CHUNK - 1) // CHUNK
    num_pieces = (height * chunks_wide + CHUNK - 1) // CHUNK
    half = (min(height * chunks_wide, CHUNK) + 1) // 2
    x_JL, u_JL = np.empty((2 * half, CHUNK), np.float32), np.empty((2 * half, CHUNK), np.float32)
    e_JL, f_JL = np.empty((half, CHUNK), np.float32), np.empty((half, CHUNK), np.float32)
    sum_KPL, scratch_PL = np.empty((steps_K.size, num_pieces, CHUNK), np.float32), np.empty((num_pieces, CHUNK), np.float32)
    scale_L, code_L, mean_L = np.empty(CHUNK, np.float32), np.empty(CHUNK, np.int16), np.zeros(CHUNK, np.float32)
    for r in range(scale_RC.shape[0]):
        bottom = min((r + 1) * height, num_rows)
        for c in range(scale_RC.shape[1]):
            left, right = c * width, min((c + 1) * width, columns)
            low, high = np.float32(0), np.float32(0)
            for o in range(r * height, bottom):
                lower, higher = range_of(kind, w_OI[o, left:right])
                low, high = min(low, lower), max(high, higher)
            first = first_of(kind, w_OI, low, high)
            if weighted and squared:
                for p in range(num_pieces):
                    _load_piece(w_OI, importance_I, r * height, bottom, left, right, p * CHUNK, chunks_wide, x_JL, u_JL)
                    _add_squares(x_JL, e_JL, f_JL)
                    sum_KPL[0, p] = e_JL[0]
                mean_L[:] = _total(sum_KPL[0], scratch_PL) / np.float32(right - left)
            for p in range(num_pieces):
                _load_piece(w_OI, importance_I, r * height, bottom, left, right, p * CHUNK, chunks_wide, x_JL, u_JL)
                if squared:
                    _times_square(u_JL, x_JL, mean_L)
                for k in range(steps_K.size):
                    scale, code = candidate(kind, w_OI, first, steps_K[k])
                    scale_L[:], code_L[:] = scale, code
                    _sum_errors(kind, w_OI, x_JL, u_JL, scale_L, code_L, e_JL, f_JL)
                    sum_KPL[k, p] = e_JL[0]
            best = _least(sum_KPL, scratch_PL)
            scale_RC[r, c], code_RC[r, c] = candidate(kind, w_OI, first, steps_K[best])


@kernel
def _load_piece(
    w_OI: Any, importance_I: Any, top: Any, bottom: Any, left: Any, right: Any, first: Any, chunks_wide: Any,
    x_JL: Any, u_JL: Any,
) -> None:  # fmt: skip
    """Chunks from number `first` on of w_OI[top:bottom, left:right] and their channel weights; zeros behind the last."""
    for j in range(x_JL.shape[0]):
        o, begin = top + (first + j) // chunks_wide, left + (first + j) % chunks_wide * CHUNK
        size = max(0, min(CHUNK, right - begin)) if o < bottom else 0
        w_I, x_L, u_L = w_OI[min(o, bottom - 1)], x_JL[j], u_JL[j]
        for i in range(size):
            x_L[i] = load(w_I, begin + i)
            u_L[i] = importance_I[begin + i]
        x_L[size:], u_L[size:] = np.float32(0), np.float32(0)


@kernel
def _total(sum_PL: Any, scratch_PL: Any) -> Any:
    """The sum over pieces, then columns."""
    _fold(sum_PL, scratch_PL)
    sum_L1 = sum_PL[0].copy().reshape(CHUNK, 1)
    _fold(sum_L1, np.empty((CHUNK, 1), np.float32))
    return sum_L1[0, 0]


@kernel
def _least(sum_KPL: Any, scratch_PL: Any) -> Any:
    """The first k with the smallest sum."""
    best, least = 0, np.float32(0)
    for k in range(sum_KPL.shape[0]):
        error = _total(sum_KPL[k], scratch_PL)
        if k == 0 or error < least:
            best, least = k, error
    return best
