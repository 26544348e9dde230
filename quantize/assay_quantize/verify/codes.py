"""Whether stored codes and scales are what a scheme makes of rows of the source: a comparison in registers that writes nothing.

These kernels are not the rounding kernels, and share none of their functions but bit casts and the rounding to an E4M3 scale
(`kernels/bits.py`): quotients are rounded by adding half a unit, FP8 codes by integers, two at a time; E2M1 codes come from the
same added constants. They cover BF16 weights in the schemes of the default precisions, with min-max scales of ordinary size;
for everything else the answer is None, and the rounding kernels decide. They take three tenths (INT4) to half (FP8, NVFP4) of
the time of rounding, which also sums up errors.

BF16 weights are read two at a time: a uint32 holds a pair, the first in the low half, and each half is half an FP32 number.
Quotients are rounded to BF16 by adding half of what the last of 8 bits is worth and cutting the rest off. Ties go away from
zero, not to even, but the product of a BF16 number with the reciprocal of another is never near a tie (`kernels/sums.py` has
the proof).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from assay_quantize.formats.schemes import SCHEMES
from assay_quantize.kernels.bits import bits_of, e4m3_to_f32, f32_to_e4m3, from_bits, kernel
from assay_quantize.kernels.rows import Array, check_rows

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
        flags = _look_at_int4(w_OI, parts["weight_packed"].view(np.uint8), parts["weight_scale"], width)
    elif row.layout == "plain" and row.weight_dtype == "F8_E4M3":
        flags = _look_at_fp8(w_OI, parts["weight"].view(np.uint16), parts["weight_scale"], row.block_rows, width)
    elif row.layout == "nvfp4" and global_scale is not None:
        if parts["weight_global_scale"].tolist() != [global_scale]:
            return False
        most_1 = np.zeros(1, np.uint16) if most_1 is None else most_1
        flags = _look_at_nvfp4(w_OI, parts["weight_packed"], parts["weight_scale"], np.float32(global_scale), most_1)
    else:
        return None
    return None if flags & UNDECIDED else not flags


u32 = np.uint32
PAIRS = 64
"""Pairs looked at at once. As a constant it makes loops without remainders, a third faster."""
LEAST, MOST = np.float32(2.0**-30), np.float32(2.0**30)
"""Scales with which nothing overflows and no quotient that matters is denormal."""
NOT_FINITE = np.uint16(0x7F80)
"""Least magnitude that is no number."""
EPSILON = np.uint32(0x3C00)
"""Bits of 2^-7, which compressed-tensors stores for a scale of 0."""


@kernel
def largest_bits(w_I: Any) -> Any:
    """The largest magnitude, as BF16 bits."""
    most = np.uint16(0)
    for i in range(w_I.size):
        most = max(most, np.uint16(w_I[i] & np.uint16(0x7FFF)))
    return most


@kernel
def first_of(pair: Any) -> Any:
    return from_bits(u32(u32(pair) << u32(16)))


@kernel
def second_of(pair: Any) -> Any:
    return from_bits(u32(u32(pair) & u32(0xFFFF0000)))


@kernel
def nearest(x: Any) -> Any:
    """FP32 -> nearest BF16 number as FP32; ties away from zero. Not for what is not finite."""
    return from_bits(u32(u32(bits_of(x) + u32(0x8000)) & u32(0xFFFF0000)))


@kernel
def rounded_bits(x: Any) -> Any:
    """FP32 of any size -> bits of the nearest BF16 number, ties to even. Not for NaN."""
    bits = bits_of(x)
    return u32(u32(bits + u32(u32(0x7FFF) + u32(u32(bits >> u32(16)) & u32(1)))) >> u32(16))


@kernel
def scale_bits(amax: Any, range_of_codes: Any) -> Any:
    """BF16 bits of the scale for this largest magnitude (BF16 bits): amax / range; never 0."""
    bits = rounded_bits(first_of(amax) / range_of_codes)
    return EPSILON if bits == u32(0) else bits


@kernel
def look_at_scales(amax_G: Any, scale_G: Any, inverse_G: Any, range_of_codes: Any) -> Any:
    """DIFFERS, where the stored scales are not those of the largest magnitudes, and UNDECIDED, or 0; 1 / scale is put into
    `inverse_G`."""
    difference, odd = u32(0), u32(0)
    for g in range(amax_G.size):
        bits = scale_bits(amax_G[g], range_of_codes)
        difference = u32(difference | u32(bits ^ u32(scale_G[g])))
        scale = first_of(bits)
        is_ordinary = amax_G[g] < NOT_FINITE and scale >= LEAST and scale <= MOST
        odd = u32(odd | (u32(0) if is_ordinary else u32(2)))
        inverse_G[g] = np.float32(1) / scale
    return u32(odd | (u32(1) if difference != u32(0) else u32(0)))


FP8_RANGE = np.float32(448)
SHRINK = np.float32(2.0**-120)
"""An E4M3 number times this has, as FP32, the bits of its code from the 20th on, denormals included. A quotient of 8 bits loses
some of them only where all of it rounds to 0."""
SHRUNK_448 = np.uint32(0x7E << 20)
"""Bits of 448 * SHRINK."""
TOPS = np.uint32(0x80008000)
LEAST_NORMAL = np.uint32((121 << 7) * 0x10001)
"""2^-6, the least normal E4M3 number, as BF16, in both halves."""
TO_CODE = np.uint32(((1 << 7) + 7) * 0x10001)
"""Added to a BF16 number less 2^-6, and its fourth bit, this leaves the code of E4M3, ties to even, from the fourth bit on."""


@kernel
def _fp8_code(quotient: Any) -> Any:
    bits = bits_of(nearest(quotient) * SHRINK)
    magnitude = min(u32(bits & u32(0x7FFFFFFF)), SHRUNK_448)
    magnitude = u32(magnitude + u32(u32(0x7FFFF) + u32(u32(magnitude >> u32(20)) & u32(1))))
    return u32(u32(magnitude >> u32(20)) | u32(u32(bits >> u32(24)) & u32(0x80)))


@kernel
def _fp8_differing(pair: Any, codes: Any, inverse: Any) -> Any:
    """The bits in which two bytes are not the codes of a pair."""
    made = u32(_fp8_code(first_of(pair) * inverse) | u32(_fp8_code(second_of(pair) * inverse) << u32(8)))
    return u32(made ^ u32(codes))


@kernel
def _fp8_differing_if_normal(pairs_H: Any, codes_H: Any, inverse: Any) -> Any:
    """(the bits in which bytes are not the codes, whether that is so: no code is a denormal E4M3 number or 0).

    Two quotients at a time, as BF16 numbers in the halves of an integer; neither half's arithmetic reaches the other. None is
    above 449.75, since the scale is that of the largest magnitude, so none rounds beyond 448.
    """
    difference, normal = u32(0), TOPS
    for i in range(PAIRS):
        first = u32(bits_of(first_of(pairs_H[i]) * inverse) + u32(0x8000))
        second = u32(bits_of(second_of(pairs_H[i]) * inverse) + u32(0x8000))
        quotients = u32(u32(first >> u32(16)) | u32(second & u32(0xFFFF0000)))
        magnitudes = u32(quotients & u32(0x7FFF7FFF))
        above = u32(u32(magnitudes | TOPS) - LEAST_NORMAL)
        normal = u32(normal & above)
        rounded = u32(u32(above + TO_CODE) + u32(u32(magnitudes >> u32(4)) & u32(0x00010001)))
        made = u32(u32(u32(rounded >> u32(4)) & u32(0x007F007F)) | u32(u32(quotients >> u32(8)) & u32(0x00800080)))
        difference = u32(difference | u32(u32(made | u32(made >> u32(8))) ^ u32(codes_H[i])))
    return u32(difference & u32(0xFFFF)), u32(normal & TOPS) == TOPS


@kernel
def _fp8_differing_in_piece(pairs_H: Any, codes_H: Any, inverse: Any) -> Any:
    difference = u32(0)
    for i in range(PAIRS):
        difference = u32(difference | _fp8_differing(pairs_H[i], codes_H[i], inverse))
    return difference


@kernel
def _fp8_differing_in_block(pairs_H: Any, codes_H: Any, inverse: Any) -> Any:
    difference, whole = u32(0), pairs_H.size // PAIRS * PAIRS
    for left in range(0, whole, PAIRS):
        right = left + PAIRS
        in_piece, is_normal = _fp8_differing_if_normal(pairs_H[left:right], codes_H[left:right], inverse)
        if not is_normal:
            in_piece = _fp8_differing_in_piece(pairs_H[left:right], codes_H[left:right], inverse)
        difference = u32(difference | in_piece)
    for i in range(whole, pairs_H.size):
        difference = u32(difference | _fp8_differing(pairs_H[i], codes_H[i], inverse))
    return difference


@kernel
def _look_at_fp8(w_OI: Any, codes_OH: Any, scale_RC: Any, height: Any, width: Any) -> Any:
    """0, or what of DIFFERS and UNDECIDED is true. Weights and scales: BF16 bits; codes: two at a time."""
    (num_rows, columns), num_blocks = w_OI.shape, scale_RC.shape[1]
    amax_C, inverse_C = np.empty(num_blocks, np.uint16), np.empty(num_blocks, np.float32)
    flags, difference = u32(0), u32(0)
    for r in range(scale_RC.shape[0]):
        top, bottom = r * height, min((r + 1) * height, num_rows)
        amax_C[:] = 0
        for o in range(top, bottom):
            w_I = w_OI[o]
            for c in range(num_blocks):
                amax_C[c] = max(amax_C[c], largest_bits(w_I[c * width : min((c + 1) * width, columns)]))
        flags = u32(flags | look_at_scales(amax_C, scale_RC[r], inverse_C, FP8_RANGE))
        for o in range(top, bottom):
            pairs_H, codes_H = w_OI[o].view(np.uint32), codes_OH[o]
            for c in range(num_blocks):
                left, right = c * width // 2, min((c + 1) * width, columns) // 2
                difference = u32(difference | _fp8_differing_in_block(pairs_H[left:right], codes_H[left:right], inverse_C[c]))
    return int(flags | (u32(1) if difference != u32(0) else u32(0)))


INT4_RANGE = np.float32(7.5)
SHIFT = np.float32(1.5 * 2**23 + 8)
"""Added to a number from -8 to 7 it leaves the nearest integer, ties to even, plus 8 in the last four bits."""
SHIFTED_PAIR = np.uint32(0xFF400000)
"""The bits above those four, 0x4B400000, of two such numbers: once + 16 times, of 32 bits."""


@kernel
def _int4_code(quotient: Any) -> Any:
    """A code, and SHIFT above it. No quotient is below -7.54: the scale is that of the largest magnitude."""
    return bits_of(min(nearest(quotient), np.float32(7)) + SHIFT)


@kernel
def _int4_differing(pair: Any, packed: Any, inverse: Any) -> Any:
    """The bits in which a byte is not the codes of a pair."""
    made = u32(_int4_code(first_of(pair) * inverse) + u32(_int4_code(second_of(pair) * inverse) << u32(4)))
    return u32(u32(made ^ u32(packed)) ^ SHIFTED_PAIR)


@kernel
def _int4_differing_in_piece(pairs_H: Any, packed_H: Any, inverse: Any) -> Any:
    difference = u32(0)
    for i in range(PAIRS):
        difference = u32(difference | _int4_differing(pairs_H[i], packed_H[i], inverse))
    return difference


@kernel
def _look_at_int4(w_OI: Any, packed_OB: Any, scale_OG: Any, group: Any) -> Any:
    """0, or what of DIFFERS and UNDECIDED is true. Weights and scales: BF16 bits. A group is a number of whole pieces."""
    num_groups, pieces = scale_OG.shape[1], group // (2 * PAIRS)
    amax_G, inverse_G = np.empty(num_groups, np.uint16), np.empty(num_groups, np.float32)
    flags, difference = u32(0), u32(0)
    for o in range(w_OI.shape[0]):
        w_I, packed_B = w_OI[o], packed_OB[o]
        pairs_H = w_I.view(np.uint32)
        for g in range(num_groups):
            amax_G[g] = largest_bits(w_I[g * group : (g + 1) * group])
        flags = u32(flags | look_at_scales(amax_G, scale_OG[o], inverse_G, INT4_RANGE))
        for g in range(num_groups):
            for left in range(g * pieces * PAIRS, (g + 1) * pieces * PAIRS, PAIRS):
                right = left + PAIRS
                difference = u32(difference | _int4_differing_in_piece(pairs_H[left:right], packed_B[left:right], inverse_G[g]))
    return int(flags | (u32(1) if difference != u32(0) else u32(0)))


NVFP4_GROUP = 16
E4M3_EIGHTH = np.uint8(0x20)
"""E4M3 bits of 1/8, stored for a scale of 0."""


@kernel
def _largest_of_pairs(pairs_H: Any, most_H: Any) -> None:
    """The larger magnitude of every two numbers, the first of them in the low half."""
    for i in range(most_H.size):
        pair = pairs_H[i]
        most_H[i] = np.uint16(max(u32(pair & u32(0x7FFF)), u32(u32(pair >> u32(16)) & u32(0x7FFF))))


@kernel
def _largest_of_groups(w_I: Any, of_2: Any, of_4: Any, of_8: Any, amax_G: Any) -> None:
    """The largest magnitude of every 16, in four steps through `of_2`, `of_4` and `of_8`: each is one loop over the row, where
    groups one by one are too short for a loop of their own."""
    _largest_of_pairs(w_I.view(np.uint32), of_2)
    _largest_of_pairs(of_2.view(np.uint32), of_4)
    _largest_of_pairs(of_4.view(np.uint32), of_8)
    _largest_of_pairs(of_8.view(np.uint32), amax_G)


@kernel
def _fp4_code(quotient: Any) -> Any:
    """E2M1, ties to even. A negative quotient keeps its sign when it rounds to 0, a negative zero has none."""
    x = min(abs(quotient), np.float32(6))
    # a sum of which the last bits are worth 1/2, 1 or 2, less what makes the code of the least number of that range
    shift = np.float32(2.0**23 + 2) if x < np.float32(4) else np.float32(2.0**24 + 8)
    shift = np.float32(2.0**22) if x < np.float32(2) else shift
    sign = u32(bits_of(quotient + np.float32(0)) >> u32(28))  # -0 + 0 is 0; with a comparison the loop does not vectorize
    return np.uint8(u32(u32(bits_of(x + shift) & u32(7)) | u32(sign & u32(8))))


@kernel
def _fp4_codes_of_group(w_G: Any, scale: Any, codes_G: Any) -> None:
    for i in range(NVFP4_GROUP):
        codes_G[i] = _fp4_code(first_of(w_G[i]) / scale)


@kernel
def _fp4_differing(pairs_B: Any, packed_B: Any) -> Any:
    """The bits in which bytes are not these pairs of codes, packed."""
    difference = np.uint8(0)
    for i in range(packed_B.size):
        made = np.uint8(pairs_B[i] | np.uint16(pairs_B[i] >> np.uint16(4)))
        difference = np.uint8(difference | np.uint8(made ^ packed_B[i]))
    return difference


@kernel
def _look_at_nvfp4_scales(amax_G: Any, stored_G: Any, scale_G: Any, global_scale: Any, most_1: Any) -> Any:
    """DIFFERS and UNDECIDED, or 0; the scales, in FP32 and divided by the global one, are put into `scale_G`."""
    difference, most = np.uint8(0), np.uint16(0)
    for g in range(stored_G.size):
        most = max(most, amax_G[g])
        share = first_of(rounded_bits(first_of(amax_G[g]) / np.float32(6)))
        bits = f32_to_e4m3(min(share * global_scale, np.float32(448)))
        bits = E4M3_EIGHTH if bits == np.uint8(0) else bits
        difference = np.uint8(difference | np.uint8(bits ^ stored_G[g]))
        scale_G[g] = e4m3_to_f32(bits) / global_scale
    most_1[0] = max(most_1[0], most)
    return u32(u32(1) if difference != np.uint8(0) else u32(0)) | (u32(2) if most >= NOT_FINITE else u32(0))


@kernel
def _look_at_nvfp4(w_OI: Any, packed_OB: Any, scale_OG: Any, global_scale: Any, most_1: Any) -> Any:
    """0, or what of DIFFERS and UNDECIDED is true. Weights: BF16 bits; scales: E4M3 bits. The largest magnitude is put into
    `most_1` if it is larger than what is there."""
    num_groups = scale_OG.shape[1]
    codes_I = np.zeros(w_OI.shape[1], np.uint8)
    pairs_B = codes_I.view(np.uint16)
    amax_G, scale_G = np.zeros(num_groups, np.uint16), np.zeros(num_groups, np.float32)
    of_2, of_4 = np.empty(num_groups * 8, np.uint16), np.empty(num_groups * 4, np.uint16)
    of_8 = np.empty(num_groups * 2, np.uint16)
    flags, difference = u32(0), np.uint8(0)
    for o in range(w_OI.shape[0]):
        w_I = w_OI[o]
        _largest_of_groups(w_I, of_2, of_4, of_8, amax_G)
        flags = u32(flags | _look_at_nvfp4_scales(amax_G, scale_OG[o], scale_G, global_scale, most_1))
        for g in range(num_groups):
            left = g * NVFP4_GROUP
            _fp4_codes_of_group(w_I[left : left + NVFP4_GROUP], scale_G[g], codes_I[left : left + NVFP4_GROUP])
        difference = np.uint8(difference | _fp4_differing(pairs_B, packed_OB[o]))
    return int(flags | (u32(1) if difference != np.uint8(0) else u32(0)))
