"""Fused kernels of the small-group formats: NVFP4, MXFP4 and MXFP8.

One pass over the rows, `CHUNK` columns at a time, which stay in the first cache: the groups' largest magnitudes by integers,
their scales, then quotient, rounding, error and packing. Each of these is a loop of its own without branches, so that it
vectorizes. Rounding is that of compressed-tensors on a CPU:

    NVFP4         group scale: amax / 6 rounded to the weight's dtype, times the global scale in FP32, to E4M3, 0 becomes 1/8;
                  quotient w / (group scale / global scale) in FP32; dequantized in FP32, then BF16
    MXFP4, MXFP8  group scale: amax to the nearest power of two (up from 1.75), over 4 or 256, as an exponent of at least -127;
                  quotient in the weight's dtype (FP16: in FP32), exact unless it underflows; dequantized in BF16
    E2M1          ties to even; a negative quotient keeps its sign when it rounds to 0, a negative zero does not

Source: compressed-tensors 0.19 `quantization/utils/{helpers,mxfp_utils,fp4_utils}.py`, `compressors/{nvfp4,mxfp4,mxfp8}`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from assay_quantize.formats.schemes import Scheme
from assay_quantize.kernels.bits import (  # fmt: skip
    bits_of,
    e4m3_to_f32,
    f32_to_e4m3,
    from_bits,
    kernel,
    kernel_view,
    largest,
    load,
    nearest_e4m3,
    round_as,
    round_bf16,
)
from assay_quantize.kernels.rows import STORAGE, Array, ChosenScales, QuantizedRows, RowErrors, large_part
from assay_quantize.kernels.sums import are_ordinary, difference, move, squared, sums, total

CHUNK = 512
"""Columns worked on at a time; a multiple of every group size here."""
LANES = 32
"""Sums kept side by side (a single sum would not vectorize); divides CHUNK and is a multiple of every group size."""
SMALLEST_NORMAL = {"BF16": 2.0**-126, "F16": 2.0**-14, "F32": 2.0**-126}


def quantize_rows(
    w_OI: Array,
    row: Scheme,
    chosen: ChosenScales | None = None,
    memory: Array | None = None,
    *,
    amax: float | None = None,
    amax_dtype: str = "F32",
) -> QuantizedRows:
    """`kernels.quantize_rows` for layouts nvfp4, mxfp4 and mxfp8, with the scales that were found, or min-max scales."""
    num_rows, columns = w_OI.shape
    assert row.group_size is not None
    w, given = kernel_view(w_OI), chosen is not None
    scale_OG = np.empty((num_rows, columns // row.group_size), np.uint8) if chosen is None else chosen.scale
    if row.layout == "mxfp8":
        q_OI = large_part(memory, (num_rows, columns), np.uint8)
        sums = _quantize_mxfp8(w, q_OI, scale_OG, given)
        return QuantizedRows({"weight": q_OI, "weight_scale": scale_OG}, *sums)
    packed_OB = large_part(memory, (num_rows, columns // 2), np.uint8)
    parts: dict[str, Array] = {"weight_packed": packed_OB, "weight_scale": scale_OG}
    if row.layout == "mxfp4":
        # the quotient is rounded to BF16 where that is the dtype: what underflows is then no longer negative
        underflow = np.float32(-(2.0**-134)) if w_OI.dtype == np.uint16 else np.float32(0)
        sums = _quantize_mxfp4(w, packed_OB, scale_OG, underflow, given)
        return QuantizedRows(parts, *sums)
    assert row.layout == "nvfp4" and amax is not None
    global_scale = nvfp4_global_scale(amax, amax_dtype)
    sums = _quantize_nvfp4(w, packed_OB, scale_OG, global_scale, given)
    return QuantizedRows(parts | {"weight_global_scale": np.array([global_scale], np.float32)}, *sums)


def error_rows(parts: dict[str, Array], w_OI: Array, row: Scheme) -> RowErrors:
    """`kernels.error_rows` for layouts nvfp4, mxfp4 and mxfp8."""
    w, scale_OG = kernel_view(w_OI), parts["weight_scale"]
    if row.layout == "mxfp8":
        return RowErrors(*_error_mxfp8(parts["weight"], scale_OG, w))
    assert row.group_size is not None
    global_scale = parts["weight_global_scale"][0] if row.layout == "nvfp4" else np.float32(1)
    return RowErrors(*_error_fp4(parts["weight_packed"], scale_OG, global_scale, w, row.group_size))


def nvfp4_global_scale(amax: float, dtype: str) -> np.float32:
    """448 * 6 / amax as compressed-tensors' `generate_gparam` computes it for an amax of `dtype`; 1 where it overflows."""
    like = kernel_view(np.empty(1, STORAGE[dtype]))
    return np.float32(_global_scale(like, np.float32(amax), np.float32(SMALLEST_NORMAL[dtype])))


# ------------------------------------------------------------------------------------------------ scales
@kernel
def count(counts_L: Any) -> Any:
    """Their sum."""
    made = 0
    for i in range(counts_L.size):
        made += counts_L[i]
    return made


@kernel
def _global_scale(like: Any, amax: Any, smallest: Any) -> Any:
    # PyTorch divides a number by a tensor as reciprocal times number, each rounded
    scale = round_as(like, np.float32(2688) * round_as(like, np.float32(1) / max(amax, smallest)))
    return scale if scale < np.float32(np.inf) else np.float32(1)


@kernel
def _largest_of_groups(w_C: Any, group: Any, amax_G: Any) -> None:
    for g in range(w_C.size // group):
        amax_G[g] = largest(w_C[g * group : (g + 1) * group])


@kernel
def nvfp4_scale(w_I: Any, amax: Any, global_scale: Any) -> Any:
    """E4M3 bits of the scale of a group (of the dtype of w_I) with this largest magnitude."""
    scale = min(global_scale * round_as(w_I, amax / np.float32(6)), np.float32(448))
    bits = f32_to_e4m3(scale)
    return np.uint8(0x20) if bits == np.uint8(0) else bits


@kernel
def mx_exponent(amax: Any) -> Any:
    """Biased exponent of the power of two nearest to amax, 0 to 255, int32: below 1.75 * 2^k it is 2^k."""
    return np.int32((bits_of(amax) + np.uint32(1 << 21)) >> np.uint32(23))


@kernel
def mx_scale(exponent: Any, offset: Any) -> Any:
    """Stored scale for `mx_exponent`, and 1 / scale in FP32.

    An amax that rounds to infinity has an infinite scale: all its weights become 0, and PyTorch stores the exponent as 0.
    """
    stored = max(exponent - offset, np.int32(0))
    inverse = from_bits(np.uint32(np.int32(254) - stored) << np.uint32(23))
    overflow = exponent == np.int32(255)
    return np.uint8(np.int32(127) if overflow else stored), (np.float32(0) if overflow else inverse)


@kernel
def mx_scale_and_inverse(amax: Any, offset: Any, chosen: Any, given: Any) -> Any:
    """`mx_scale` of a group with this largest magnitude, or the scale that was found for it."""
    stored, inverse = mx_scale(mx_exponent(amax), offset)
    if given and inverse != np.float32(0):
        stored, inverse = chosen, from_bits((np.uint32(254) - np.uint32(chosen)) << np.uint32(23))
    return stored, inverse


@kernel
def mx_to_f32(stored: Any) -> Any:
    """Stored scale -> FP32: 2^(stored - 127)."""
    bits = np.uint32(stored) << np.uint32(23)
    return from_bits(np.uint32(0x00400000) if bits == np.uint32(0) else bits)


# ------------------------------------------------------------------------------------------------ E2M1
@kernel
def round_e2m1(magnitude: Any) -> Any:
    """(code 0-7, value) of the E2M1 number nearest to a magnitude, ties to even, the largest being 6."""
    x = min(magnitude, np.float32(6))
    # adding 2^22, 2^23 or 2^24 rounds to steps of 1/2, 1 or 2; what is added to it makes the last bits the code
    shift = np.float32(2.0**23 + 2) if x < np.float32(4) else np.float32(2.0**24 + 8)
    shift = np.float32(2.0**22) if x < np.float32(2) else shift
    shifted = x + shift
    return np.uint8(bits_of(shifted) & np.uint32(7)), shifted - shift


@kernel
def e2m1_to_f32(code: Any) -> Any:
    """Code 0-15 -> value; code 8 is 0."""
    magnitude = np.uint32(code) & np.uint32(7)
    wide = from_bits((magnitude << np.uint32(22)) + np.uint32(126 << 23))
    value = np.float32(0.5) * np.float32(np.int32(magnitude)) if magnitude < np.uint32(2) else wide
    return from_bits(bits_of(value) | ((np.uint32(code) & np.uint32(8)) << np.uint32(28)))


@kernel
def _pack(codes_C: Any, out_B: Any) -> None:
    pairs = codes_C.view(np.uint16)
    for i in range(out_B.size):
        out_B[i] = np.uint8(pairs[i] | (pairs[i] >> np.uint16(4)))


@kernel
def _unpack(packed_B: Any, codes_C: Any) -> None:
    pairs = codes_C.view(np.uint16)
    for i in range(packed_B.size):
        byte = np.uint16(packed_B[i])
        pairs[i] = (byte | (byte << np.uint16(4))) & np.uint16(0x0F0F)


# ------------------------------------------------------------------------------------------------ quantize
@kernel
def _round_nvfp4(w_C: Any, scale_G: Any, codes_C: Any, error_L: Any, norm_L: Any) -> None:
    """Codes of groups of 16; their squared errors and squares are added to the sums."""
    for g in range(w_C.size // 16):
        scale = scale_G[g]
        for i in range(16):
            w = load(w_C, g * 16 + i)
            q = w / scale
            code, value = round_e2m1(abs(q))
            codes_C[g * 16 + i] = code | (np.uint8(8) if q < np.float32(0) else np.uint8(0))
            error_L[i] += squared(error_L, difference(error_L, round_bf16(value * scale), abs(w)))
            norm_L[i] += squared(norm_L, w)


@kernel
def _quantize_nvfp4(w_OI: Any, packed_OB: Any, scale_OG: Any, global_scale: Any, given: Any) -> Any:
    error_L, norm_L, piece_error_L, piece_norm_L = sums(LANES)
    codes_C, amax_G, scale_G = np.empty(CHUNK, np.uint8), np.empty(CHUNK // 16, np.float32), np.empty(CHUNK // 16, np.float32)
    for o in range(w_OI.shape[0]):
        for begin in range(0, w_OI.shape[1], CHUNK):
            w_C = w_OI[o, begin : begin + CHUNK]
            scale_C = scale_OG[o, begin // 16 : (begin + w_C.size) // 16]
            _largest_of_groups(w_C, 16, amax_G)
            for g in range(scale_C.size):
                scale_C[g] = scale_C[g] if given else nvfp4_scale(w_C, amax_G[g], global_scale)
                scale_G[g] = e4m3_to_f32(scale_C[g]) / global_scale
            if are_ordinary(amax_G[: scale_C.size]):
                _round_nvfp4(w_C, scale_G, codes_C, piece_error_L, piece_norm_L)
                move(piece_error_L, error_L)
                move(piece_norm_L, norm_L)
            else:
                _round_nvfp4(w_C, scale_G, codes_C, error_L, norm_L)
            _pack(codes_C, packed_OB[o, begin // 2 : (begin + w_C.size) // 2])
    return total(error_L), total(norm_L)


@kernel
def _round_mxfp4(w_C: Any, scale_C: Any, inverse_G: Any, underflow: Any, codes_C: Any, error_L: Any, norm_L: Any) -> None:
    """Codes of groups of 32; their squared errors and squares are added to the sums."""
    for g in range(scale_C.size):
        inverse, scale = inverse_G[g], mx_to_f32(scale_C[g])
        for i in range(32):
            w = load(w_C, g * 32 + i)
            q = w * inverse
            code, value = round_e2m1(abs(q))
            codes_C[g * 32 + i] = code | (np.uint8(8) if q < underflow else np.uint8(0))
            error_L[i] += squared(error_L, difference(error_L, value * scale, abs(w)))
            norm_L[i] += squared(norm_L, w)


@kernel
def _quantize_mxfp4(w_OI: Any, packed_OB: Any, scale_OG: Any, underflow: Any, given: Any) -> Any:
    error_L, norm_L, piece_error_L, piece_norm_L = sums(LANES)
    codes_C, amax_G, inverse_G = np.empty(CHUNK, np.uint8), np.empty(CHUNK // 32, np.float32), np.empty(CHUNK // 32, np.float32)
    for o in range(w_OI.shape[0]):
        for begin in range(0, w_OI.shape[1], CHUNK):
            w_C = w_OI[o, begin : begin + CHUNK]
            scale_C = scale_OG[o, begin // 32 : (begin + w_C.size) // 32]
            _largest_of_groups(w_C, 32, amax_G)
            for g in range(scale_C.size):
                scale_C[g], inverse_G[g] = mx_scale_and_inverse(amax_G[g], np.int32(2), scale_C[g], given)
            if are_ordinary(amax_G[: scale_C.size]):
                _round_mxfp4(w_C, scale_C, inverse_G, underflow, codes_C, piece_error_L, piece_norm_L)
                move(piece_error_L, error_L)
                move(piece_norm_L, norm_L)
            else:
                _round_mxfp4(w_C, scale_C, inverse_G, underflow, codes_C, error_L, norm_L)
            _pack(codes_C, packed_OB[o, begin // 2 : (begin + w_C.size) // 2])
    return total(error_L), total(norm_L)


@kernel
def _round_mxfp8(w_C: Any, q_C: Any, scale_C: Any, inverse_G: Any, error_L: Any, norm_L: Any) -> None:
    """Codes of groups of 32; their squared errors and squares are added to the sums."""
    for g in range(scale_C.size):
        inverse, scale = inverse_G[g], mx_to_f32(scale_C[g])
        for i in range(32):
            w = load(w_C, g * 32 + i)
            q_C[g * 32 + i], value = nearest_e4m3(min(max(w * inverse, np.float32(-448)), np.float32(448)))
            error_L[i] += squared(error_L, difference(error_L, round_bf16(value * scale), w))
            norm_L[i] += squared(norm_L, w)


@kernel
def _quantize_mxfp8(w_OI: Any, q_OI: Any, scale_OG: Any, given: Any) -> Any:
    error_L, norm_L, piece_error_L, piece_norm_L = sums(LANES)
    amax_G, inverse_G = np.empty(CHUNK // 32, np.float32), np.empty(CHUNK // 32, np.float32)
    for o in range(w_OI.shape[0]):
        for begin in range(0, w_OI.shape[1], CHUNK):
            w_C, q_C = w_OI[o, begin : begin + CHUNK], q_OI[o, begin : begin + CHUNK]
            scale_C = scale_OG[o, begin // 32 : (begin + w_C.size) // 32]
            _largest_of_groups(w_C, 32, amax_G)
            for g in range(scale_C.size):
                scale_C[g], inverse_G[g] = mx_scale_and_inverse(amax_G[g], np.int32(8), scale_C[g], given)
            if are_ordinary(amax_G[: scale_C.size]):
                _round_mxfp8(w_C, q_C, scale_C, inverse_G, piece_error_L, piece_norm_L)
                move(piece_error_L, error_L)
                move(piece_norm_L, norm_L)
            else:
                _round_mxfp8(w_C, q_C, scale_C, inverse_G, error_L, norm_L)
    return total(error_L), total(norm_L)


# ------------------------------------------------------------------------------------------------ error of what is stored
@kernel
def _error_fp4(packed_OB: Any, scale_OG: Any, global_scale: Any, w_OI: Any, group: Any) -> Any:
    error_L, norm_L, bad_L = np.zeros(LANES), np.zeros(LANES), np.zeros(LANES, np.int32)
    codes_C, scale_H = np.empty(CHUNK, np.uint8), np.empty(CHUNK // 16, np.float32)
    num_bad = 0
    for o in range(w_OI.shape[0]):
        bad_L[:] = 0
        for begin in range(0, w_OI.shape[1], CHUNK):
            w_C = w_OI[o, begin : begin + CHUNK]
            _unpack(packed_OB[o, begin // 2 : (begin + w_C.size) // 2], codes_C)
            scale_C = scale_OG[o, begin // group : (begin + w_C.size) // group]
            for g in range(scale_C.size):
                if group == 16:
                    scale_H[g] = e4m3_to_f32(scale_C[g]) / global_scale
                else:
                    scale_H[2 * g] = scale_H[2 * g + 1] = mx_to_f32(scale_C[g])
            for h in range(w_C.size // 16):
                for i in range(16):
                    w, made = load(w_C, h * 16 + i), round_bf16(e2m1_to_f32(codes_C[h * 16 + i]) * scale_H[h])
                    error = np.float64(made) - np.float64(w)
                    error_L[i] += error * error
                    norm_L[i] += np.float64(w) * np.float64(w)
                    bad_L[i] += np.int32(not abs(made) < np.float32(np.inf))
        num_bad += count(bad_L)
    return total(error_L), total(norm_L), num_bad


@kernel
def _error_mxfp8(q_OI: Any, scale_OG: Any, w_OI: Any) -> Any:
    error_L, norm_L, bad_L = np.zeros(LANES), np.zeros(LANES), np.zeros(LANES, np.int32)
    num_bad = 0
    for o in range(w_OI.shape[0]):
        bad_L[:] = 0
        for g in range(scale_OG.shape[1]):
            scale = mx_to_f32(scale_OG[o, g])
            w_g, q_g = w_OI[o, g * 32 : (g + 1) * 32], q_OI[o, g * 32 : (g + 1) * 32]
            for i in range(32):
                w, made = load(w_g, i), round_bf16(e4m3_to_f32(q_g[i]) * scale)
                error = np.float64(made) - np.float64(w)
                error_L[i] += error * error
                norm_L[i] += np.float64(w) * np.float64(w)
                bad_L[i] += np.int32(not abs(made) < np.float32(np.inf))
        num_bad += count(bad_L)
    return total(error_L), total(norm_L), num_bad
