"""Symmetric INT4: two codes a byte, a scale for `group` columns of a row: 128, or many."""

from __future__ import annotations

from typing import Any

import numpy as np

from assay_quantize.kernels.bits import bits_of, kernel
from assay_quantize.verify.codes.bf16 import PAIRS, first_of, largest_bits, look_at_scales, nearest, second_of, u32

RANGE = np.float32(7.5)
SHIFT = np.float32(1.5 * 2**23 + 8)
"""Added to a number from -8 to 7 it leaves the nearest integer, ties to even, plus 8 in the last four bits."""
SHIFTED = np.uint32(0x4B400000)
"""The bits above those four."""
SHIFTED_PAIR = np.uint32(0xFF400000)
"""SHIFTED + 16 * SHIFTED, of 32 bits."""


@kernel
def _shifted_code(quotient: Any) -> Any:
    """A code, and SHIFTED above it. No quotient is below -7.54: the scale is that of the largest magnitude."""
    return bits_of(min(nearest(quotient), np.float32(7)) + SHIFT)


@kernel
def _differing(pair: Any, packed: Any, inverse: Any) -> Any:
    """The bits in which a byte is not the codes of a pair."""
    made = u32(_shifted_code(first_of(pair) * inverse) + u32(_shifted_code(second_of(pair) * inverse) << u32(4)))
    return u32(u32(made ^ u32(packed)) ^ SHIFTED_PAIR)


@kernel
def _differing_in_piece(pairs_H: Any, packed_H: Any, inverse: Any) -> Any:
    difference = u32(0)
    for i in range(PAIRS):
        difference = u32(difference | _differing(pairs_H[i], packed_H[i], inverse))
    return difference


@kernel
def look(w_OI: Any, packed_OB: Any, scale_OG: Any, group: Any) -> Any:
    """0, or what of DIFFERS and UNDECIDED is true. Weights and scales: BF16 bits. A group is a number of whole pieces."""
    num_groups, pieces = scale_OG.shape[1], group // (2 * PAIRS)
    amax_G, inverse_G = np.empty(num_groups, np.uint16), np.empty(num_groups, np.float32)
    found, difference = u32(0), u32(0)
    for o in range(w_OI.shape[0]):
        w_I, packed_B = w_OI[o], packed_OB[o]
        pairs_H = w_I.view(np.uint32)
        for g in range(num_groups):
            amax_G[g] = largest_bits(w_I[g * group : (g + 1) * group])
        found = u32(found | look_at_scales(amax_G, scale_OG[o], inverse_G, RANGE))
        for g in range(num_groups):
            for left in range(g * pieces * PAIRS, (g + 1) * pieces * PAIRS, PAIRS):
                right = left + PAIRS
                difference = u32(difference | _differing_in_piece(pairs_H[left:right], packed_B[left:right], inverse_G[g]))
    return int(found | (u32(1) if difference != u32(0) else u32(0)))
