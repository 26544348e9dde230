"""FP8 (E4M3) with float scales: by block of `height` x `width`, ragged at both edges, or by row."""

from __future__ import annotations

from typing import Any

import numpy as np

from assay_quantize.kernels.bits import bits_of, kernel
from assay_quantize.verify.codes.bf16 import PAIRS, first_of, largest_bits, look_at_scales, second_of, split, u32

RANGE = np.float32(448)
SHRINK = np.float32(2.0**-120)
"""An E4M3 number times this has, as FP32, the bits of its code from the 20th on, denormals included. A quotient of 8 bits loses
some of them only where all of it rounds to 0."""
MOST = np.uint32(0x7E << 20)
"""Bits of 448 * SHRINK."""


@kernel
def _code(quotient: Any) -> Any:
    bits = bits_of(split(quotient) * SHRINK)
    magnitude = min(u32(bits & u32(0x7FFFFFFF)), MOST)
    magnitude = u32(magnitude + u32(u32(0x7FFFF) + u32(u32(magnitude >> u32(20)) & u32(1))))
    return u32(u32(magnitude >> u32(20)) | u32(u32(bits >> u32(24)) & u32(0x80)))


@kernel
def _differing(pair: Any, codes: Any, inverse: Any) -> Any:
    """The bits in which two bytes are not the codes of a pair."""
    made = u32(_code(first_of(pair) * inverse) | u32(_code(second_of(pair) * inverse) << u32(8)))
    return u32(made ^ u32(codes))


@kernel
def _differing_in_piece(pairs_H: Any, codes_H: Any, inverse: Any) -> Any:
    difference = u32(0)
    for i in range(PAIRS):
        difference = u32(difference | _differing(pairs_H[i], codes_H[i], inverse))
    return difference


@kernel
def _differing_in_block(pairs_H: Any, codes_H: Any, inverse: Any) -> Any:
    difference, whole = u32(0), pairs_H.size // PAIRS * PAIRS
    for begin in range(0, whole, PAIRS):
        found = _differing_in_piece(pairs_H[begin : begin + PAIRS], codes_H[begin : begin + PAIRS], inverse)
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
