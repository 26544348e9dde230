"""FP8 (E4M3) with float scales: by block of `height` x `width`, ragged at both edges, or by row."""

from __future__ import annotations

from typing import Any

import numpy as np

from assay_quantize.kernels.bits import bits_of, kernel
from assay_quantize.verify.codes.bf16 import PAIRS, first_of, largest_bits, look_at_scales, nearest, second_of, u32

RANGE = np.float32(448)
SHRINK = np.float32(2.0**-120)
"""An E4M3 number times this has, as FP32, the bits of its code from the 20th on, denormals included. A quotient of 8 bits loses
some of them only where all of it rounds to 0."""
MOST = np.uint32(0x7E << 20)
"""Bits of 448 * SHRINK."""
TOPS = np.uint32(0x80008000)
LEAST_NORMAL = np.uint32((121 << 7) * 0x10001)
"""2^-6, the least normal E4M3 number, as BF16, in both halves."""
TO_CODE = np.uint32(((1 << 7) + 7) * 0x10001)
"""Added to a BF16 number less 2^-6, and its fourth bit, this leaves the code of E4M3, ties to even, from the fourth bit on."""


@kernel
def _code(quotient: Any) -> Any:
    bits = bits_of(nearest(quotient) * SHRINK)
    magnitude = min(u32(bits & u32(0x7FFFFFFF)), MOST)
    magnitude = u32(magnitude + u32(u32(0x7FFFF) + u32(u32(magnitude >> u32(20)) & u32(1))))
    return u32(u32(magnitude >> u32(20)) | u32(u32(bits >> u32(24)) & u32(0x80)))


@kernel
def _differing(pair: Any, codes: Any, inverse: Any) -> Any:
    """The bits in which two bytes are not the codes of a pair."""
    made = u32(_code(first_of(pair) * inverse) | u32(_code(second_of(pair) * inverse) << u32(8)))
    return u32(made ^ u32(codes))


@kernel
def _differing_if_normal(pairs_H: Any, codes_H: Any, inverse: Any) -> Any:
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
def _differing_in_piece(pairs_H: Any, codes_H: Any, inverse: Any) -> Any:
    difference = u32(0)
    for i in range(PAIRS):
        difference = u32(difference | _differing(pairs_H[i], codes_H[i], inverse))
    return difference


@kernel
def _differing_in_block(pairs_H: Any, codes_H: Any, inverse: Any) -> Any:
    difference, whole = u32(0), pairs_H.size // PAIRS * PAIRS
    for left in range(0, whole, PAIRS):
        right = left + PAIRS
        found, is_so = _differing_if_normal(pairs_H[left:right], codes_H[left:right], inverse)
        if not is_so:
            found = _differing_in_piece(pairs_H[left:right], codes_H[left:right], inverse)
        difference = u32(difference | found)
    for i in range(whole, pairs_H.size):
        difference = u32(difference | _differing(pairs_H[i], codes_H[i], inverse))
    return difference


@kernel
def look(w_OI: Any, codes_OH: Any, scale_RC: Any, height: Any, width: Any) -> Any:
    """0, or what of DIFFERS and UNDECIDED is true. Weights and scales: BF16 bits; codes: two at a time."""
    (num_rows, columns), num_blocks = w_OI.shape, scale_RC.shape[1]
    amax_C, inverse_C = np.empty(num_blocks, np.uint16), np.empty(num_blocks, np.float32)
    found, difference = u32(0), u32(0)
    for r in range(scale_RC.shape[0]):
        top, bottom = r * height, min((r + 1) * height, num_rows)
        amax_C[:] = 0
        for o in range(top, bottom):
            w_I = w_OI[o]
            for c in range(num_blocks):
                amax_C[c] = max(amax_C[c], largest_bits(w_I[c * width : min((c + 1) * width, columns)]))
        found = u32(found | look_at_scales(amax_C, scale_RC[r], inverse_C, RANGE))
        for o in range(top, bottom):
            pairs_H, codes_H = w_OI[o].view(np.uint32), codes_OH[o]
            for c in range(num_blocks):
                left, right = c * width // 2, min((c + 1) * width, columns) // 2
                difference = u32(difference | _differing_in_block(pairs_H[left:right], codes_H[left:right], inverse_C[c]))
    return int(found | (u32(1) if difference != u32(0) else u32(0)))
