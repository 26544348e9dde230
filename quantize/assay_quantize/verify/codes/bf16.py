"""BF16 weights two at a time: a uint32 holds a pair, the first in the low half, and each half is half an FP32 number.

Quotients are rounded to BF16 by adding half of what the last of 8 bits is worth and cutting the rest off. Ties go away from
zero, not to even, but the product of a BF16 number with the reciprocal of another is never near one (`kernels/sums.py` has the
proof).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from assay_quantize.kernels.bits import bits_of, from_bits, kernel

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
