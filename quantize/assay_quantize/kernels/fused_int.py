"""Fused kernels of the integer schemes: INT4 packed (symmetric or not, by group or by row) and INT8 by row.

One pass over the rows, a group at a time: its range by integer comparisons, its scale, then for 128 columns at a time (they
and their codes stay in the first cache) quotient, rounding, error, packing. Every step is rounded to the weight's dtype where
compressed-tensors computes in it. On a little-endian machine eight INT4 codes in an int32 are four bytes of two codes, the
first in the low half, so packing is a loop over bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from assay_quantize.formats.schemes import Scheme
from assay_quantize.kernels.bits import epsilon, extent, kernel, kernel_view, largest, load, round_as, store
from assay_quantize.kernels.rows import Array, ChosenScales, QuantizedRows, RowErrors, large_part
from assay_quantize.kernels.sums import is_ordinary, move, quotient, reciprocal, squared, sums, total

CHUNK = 128
"""Columns worked on at a time, and the number of sums kept side by side (a single sum would not vectorize)."""


def quantize_rows(
    w_OI: Array, row: Scheme, chosen: ChosenScales | None = None, memory: Array | None = None, **_: Any
) -> QuantizedRows:
    """`kernels.quantize_rows` for the integer schemes, with the scales that were found, or min-max scales."""
    num_rows, columns = w_OI.shape
    group = columns if row.group_size is None else row.group_size
    w, given = kernel_view(w_OI), chosen is not None
    scale_OG = np.empty((num_rows, columns // group), w_OI.dtype) if chosen is None else chosen.scale
    scale = kernel_view(scale_OG)
    if row.weight_dtype == "I8":
        q_OI = large_part(memory, (num_rows, columns), np.int8)
        sums = _quantize_int8(w, q_OI, scale, given)
        return QuantizedRows({"weight": q_OI, "weight_scale": scale_OG}, *sums)
    packed_OP = large_part(memory, (num_rows, -(-columns // 8)), np.int32)
    parts: dict[str, Array] = {"weight_packed": packed_OP, "weight_scale": scale_OG}
    if row.symmetric:
        sums = _quantize_int4(w, packed_OP.view(np.uint8), scale, group, given)
    else:
        parts["weight_zero_point"] = np.zeros((-(-num_rows // 8), columns // group), np.int32)
        chosen_zero = np.zeros((0, 0), np.int16) if chosen is None else chosen.zero_point
        zero = parts["weight_zero_point"]
        sums = _quantize_int4_asymmetric(w, packed_OP.view(np.uint8), scale, zero, group, chosen_zero)
    return QuantizedRows(parts, *sums)


def error_rows(parts: dict[str, Array], w_OI: Array, row: Scheme) -> RowErrors:
    """`kernels.error_rows` for the integer schemes."""
    w, scale = kernel_view(w_OI), kernel_view(parts["weight_scale"])
    if row.weight_dtype == "I8":
        return RowErrors(*_error_int8(parts["weight"], scale, w))
    # symmetric codes are dequantized as if their zero point were 0: stored, that is the code 8
    zero = parts.get("weight_zero_point", np.full((1, 1), -0x77777778, np.int32))
    packed = parts["weight_packed"].view(np.uint8)
    return RowErrors(*_error_int4(packed, scale, zero, w, w_OI.shape[1] // scale.shape[1], row.symmetric))


# ------------------------------------------------------------------------------------------------ kernels
@kernel
def symmetric_scale(w_I: Any, half_range: Any) -> Any:
    """compressed-tensors' scale of a symmetric group: largest |w| / half of the code's range; never 0."""
    scale = round_as(w_I, largest(w_I) / half_range)
    return epsilon(w_I) if scale == np.float32(0) else scale


@kernel
def _pack(codes_I: Any, packed_B: Any) -> None:
    """A row of codes 0-15, one a byte, zeros behind the last -> two a byte. By the row: bytes just written are slow to read."""
    pairs = codes_I.view(np.uint16)
    for i in range(packed_B.size):
        packed_B[i] = np.uint8(pairs[i] | (pairs[i] >> np.uint16(4)))


@kernel
def _round_int4(w_I: Any, codes_I: Any, scale: Any, error_C: Any, norm_C: Any) -> None:
    """Codes 0-15 of weights that share a scale; their squared errors and squares are added to the sums."""
    inverse = reciprocal(scale)
    for begin in range(0, w_I.size, CHUNK):
        w_c, codes_c = w_I[begin : begin + CHUNK], codes_I[begin : begin + CHUNK]
        for i in range(w_c.size):
            w = load(w_c, i)
            q = round_as(w_c, quotient(w_c, error_C, w, scale, inverse))
            q = np.rint(min(max(q, np.float32(-8)), np.float32(7)))
            codes_c[i] = np.uint8(np.int32(q) + np.int32(8))
            error_C[i] += squared(error_C, round_as(w_c, q * scale) - w)
            norm_C[i] += squared(norm_C, w)


@kernel
def _quantize_int4(w_OI: Any, packed_OB: Any, scale_OG: Any, group: Any, given: Any) -> Any:
    error_C, norm_C, row_error_C, row_norm_C = sums(CHUNK)
    codes_I = np.zeros(packed_OB.shape[1] * 2, np.uint8)
    for o in range(w_OI.shape[0]):
        for g in range(scale_OG.shape[1]):
            w_g, codes_g = w_OI[o, g * group : (g + 1) * group], codes_I[g * group : (g + 1) * group]
            scale = load(scale_OG[o], g) if given else symmetric_scale(w_g, np.float32(7.5))
            store(scale_OG[o], g, scale)
            if is_ordinary(w_OI, scale):
                _round_int4(w_g, codes_g, scale, row_error_C, row_norm_C)
            else:
                _round_int4(w_g, codes_g, scale, error_C, norm_C)
        move(row_error_C, error_C)
        move(row_norm_C, norm_C)
        _pack(codes_I, packed_OB[o])
    return total(error_C), total(norm_C)


@kernel
def asymmetric_scale(w_I: Any, low: Any, high: Any) -> Any:
    """(scale, zero point) of asymmetric INT4 weights of w_I's dtype from low <= 0 to high >= 0, as compressed-tensors computes
    them; the zero point is in [-8, 7]."""
    scale = round_as(w_I, round_as(w_I, high - low) / np.float32(15))
    if scale == np.float32(0):
        # a range that underflows: -8 - low / 0; for 0/0 the definition says 0
        return epsilon(w_I), (np.float32(7) if low < np.float32(0) else np.float32(0))
    zero = round_as(w_I, np.float32(-8) - round_as(w_I, low / scale))
    return scale, np.rint(min(max(zero, np.float32(-8)), np.float32(7)))


@kernel
def _round_int4_asymmetric(w_I: Any, codes_I: Any, scale: Any, zero: Any, error_C: Any, norm_C: Any) -> None:
    """`_round_int4` with a zero point."""
    inverse = reciprocal(scale)
    for begin in range(0, w_I.size, CHUNK):
        w_c, codes_c = w_I[begin : begin + CHUNK], codes_I[begin : begin + CHUNK]
        for i in range(w_c.size):
            w = load(w_c, i)
            q = round_as(w_c, round_as(w_c, quotient(w_c, error_C, w, scale, inverse)) + zero)
            q = np.rint(min(max(q, np.float32(-8)), np.float32(7)))
            codes_c[i] = np.uint8(np.int32(q) + np.int32(8))
            error_C[i] += squared(error_C, round_as(w_c, (q - zero) * scale) - w)
            norm_C[i] += squared(norm_C, w)


@kernel
def _quantize_int4_asymmetric(w_OI: Any, packed_OB: Any, scale_OG: Any, zero_PG: Any, group: Any, chosen_OG: Any) -> Any:
    error_C, norm_C, row_error_C, row_norm_C = sums(CHUNK)
    codes_I = np.zeros(packed_OB.shape[1] * 2, np.uint8)
    for o in range(w_OI.shape[0]):
        for g in range(scale_OG.shape[1]):
            w_g, codes_g = w_OI[o, g * group : (g + 1) * group], codes_I[g * group : (g + 1) * group]
            if chosen_OG.size:
                scale, zero = load(scale_OG[o], g), np.float32(chosen_OG[o, g])
            else:
                low, high = extent(w_g)
                scale, zero = asymmetric_scale(w_g, low, high)
                store(scale_OG[o], g, scale)
            zero_PG[o // 8, g] |= np.int32(np.uint32(np.int32(zero) + 8) << np.uint32(o % 8 * 4))
            if is_ordinary(w_OI, scale):
                _round_int4_asymmetric(w_g, codes_g, scale, zero, row_error_C, row_norm_C)
            else:
                _round_int4_asymmetric(w_g, codes_g, scale, zero, error_C, norm_C)
        move(row_error_C, error_C)
        move(row_norm_C, norm_C)
        _pack(codes_I, packed_OB[o])
    return total(error_C), total(norm_C)


@kernel
def _round_int8(w_I: Any, q_I: Any, scale: Any, error_C: Any, norm_C: Any) -> None:
    """Codes of weights that share a scale; their squared errors and squares are added to the sums."""
    inverse = reciprocal(scale)
    for begin in range(0, w_I.size, CHUNK):
        w_c, q_c = w_I[begin : begin + CHUNK], q_I[begin : begin + CHUNK]
        for i in range(w_c.size):
            w = load(w_c, i)
            q = round_as(w_c, quotient(w_c, error_C, w, scale, inverse))
            q = np.rint(min(max(q, np.float32(-128)), np.float32(127)))
            q_c[i] = np.int8(np.int32(q))
            error_C[i] += squared(error_C, round_as(w_c, q * scale) - w)
            norm_C[i] += squared(norm_C, w)


@kernel
def _quantize_int8(w_OI: Any, q_OI: Any, scale_O1: Any, given: Any) -> Any:
    error_C, norm_C, row_error_C, row_norm_C = sums(CHUNK)
    for o in range(w_OI.shape[0]):
        scale = load(scale_O1[o], 0) if given else symmetric_scale(w_OI[o], np.float32(127.5))
        store(scale_O1[o], 0, scale)
        if is_ordinary(w_OI, scale):
            _round_int8(w_OI[o], q_OI[o], scale, row_error_C, row_norm_C)
            move(row_error_C, error_C)
            move(row_norm_C, norm_C)
        else:
            _round_int8(w_OI[o], q_OI[o], scale, error_C, norm_C)
    return total(error_C), total(norm_C)


@kernel
def _error_int4(packed_OB: Any, scale_OG: Any, zero_PG: Any, w_OI: Any, group: Any, symmetric: Any) -> Any:
    error_C, norm_C, bad_C = np.zeros(CHUNK), np.zeros(CHUNK), np.zeros(CHUNK, np.int32)
    codes_C = np.zeros(CHUNK, np.uint8)
    num_bad = 0
    for o in range(w_OI.shape[0]):
        bad_C[:] = 0
        for g in range(scale_OG.shape[1]):
            scale = load(scale_OG[o], g)
            word = zero_PG[0, 0] if symmetric else zero_PG[o // 8, g]
            zero = np.float32(np.int32(np.uint32(word) >> np.uint32(o % 8 * 4) & np.uint32(15)) - np.int32(8))
            for begin in range(g * group, (g + 1) * group, CHUNK):
                w_c = w_OI[o, begin : min(begin + CHUNK, (g + 1) * group)]
                packed_B = packed_OB[o, begin // 2 : (begin + w_c.size + 1) // 2]
                pairs = codes_C.view(np.uint16)
                for i in range(packed_B.size):
                    byte = np.uint16(packed_B[i])
                    pairs[i] = (byte | (byte << np.uint16(4))) & np.uint16(0x0F0F)
                for i in range(w_c.size):
                    w = load(w_c, i)
                    q = np.float32(np.int32(codes_C[i]) - np.int32(8))
                    made = round_as(w_c, (q - zero) * scale)
                    error = np.float64(made - w)
                    error_C[i] += error * error
                    norm_C[i] += np.float64(w) * np.float64(w)
                    bad_C[i] += np.int32(not abs(made) < np.float32(np.inf))
        num_bad += bad_C.sum()
    return total(error_C), total(norm_C), num_bad


@kernel
def _error_int8(q_OI: Any, scale_O1: Any, w_OI: Any) -> Any:
    error_C, norm_C, bad_C = np.zeros(CHUNK), np.zeros(CHUNK), np.zeros(CHUNK, np.int32)
    num_bad = 0
    for o in range(w_OI.shape[0]):
        bad_C[:] = 0
        scale = load(scale_O1[o], 0)
        for begin in range(0, w_OI.shape[1], CHUNK):
            w_c, q_c = w_OI[o, begin : begin + CHUNK], q_OI[o, begin : begin + CHUNK]
            for i in range(w_c.size):
                w = load(w_c, i)
                made = round_as(w_c, np.float32(q_c[i]) * scale)
                error = np.float64(made - w)
                error_C[i] += error * error
                norm_C[i] += np.float64(w) * np.float64(w)
                bad_C[i] += np.int32(not abs(made) < np.float32(np.inf))
        num_bad += bad_C.sum()
    return total(error_C), total(norm_C), num_bad
