"""NVFP4: two codes a byte, an E4M3 scale for 16 columns of a row, and one FP32 scale for the weight or the group it is fused
in. Quotients are divisions in FP32, as in the definition, so scales of every size are covered."""

from __future__ import annotations

from typing import Any

import numpy as np

from assay_quantize.kernels.bits import bits_of, e4m3_to_f32, f32_to_e4m3, kernel
from assay_quantize.verify.codes.bf16 import NOT_FINITE, first_of, rounded_bits, u32

GROUP = 16
SMALLEST = np.uint8(0x20)
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
def _code(quotient: Any) -> Any:
    """E2M1, ties to even. A negative quotient keeps its sign when it rounds to 0, a negative zero has none."""
    x = min(abs(quotient), np.float32(6))
    # a sum of which the last bits are worth 1/2, 1 or 2, less what makes the code of the least number of that range
    shift = np.float32(2.0**23 + 2) if x < np.float32(4) else np.float32(2.0**24 + 8)
    shift = np.float32(2.0**22) if x < np.float32(2) else shift
    sign = u32(bits_of(quotient + np.float32(0)) >> u32(28))  # -0 + 0 is 0; with a comparison the loop does not vectorize
    return np.uint8(u32(u32(bits_of(x + shift) & u32(7)) | u32(sign & u32(8))))


@kernel
def _codes_of_group(w_G: Any, scale: Any, codes_G: Any) -> None:
    for i in range(GROUP):
        codes_G[i] = _code(first_of(w_G[i]) / scale)


@kernel
def _differing(pairs_B: Any, packed_B: Any) -> Any:
    """The bits in which bytes are not these pairs of codes, packed."""
    difference = np.uint8(0)
    for i in range(packed_B.size):
        made = np.uint8(pairs_B[i] | np.uint16(pairs_B[i] >> np.uint16(4)))
        difference = np.uint8(difference | np.uint8(made ^ packed_B[i]))
    return difference


@kernel
def _look_at_scales(amax_G: Any, stored_G: Any, scale_G: Any, global_scale: Any, most_1: Any) -> Any:
    """DIFFERS and UNDECIDED, or 0; the scales, in FP32 and divided by the global one, are put into `scale_G`."""
    difference, most = np.uint8(0), np.uint16(0)
    for g in range(stored_G.size):
        most = max(most, amax_G[g])
        share = first_of(rounded_bits(first_of(amax_G[g]) / np.float32(6)))
        bits = f32_to_e4m3(min(share * global_scale, np.float32(448)))
        bits = SMALLEST if bits == np.uint8(0) else bits
        difference = np.uint8(difference | np.uint8(bits ^ stored_G[g]))
        scale_G[g] = e4m3_to_f32(bits) / global_scale
    most_1[0] = max(most_1[0], most)
    return u32(u32(1) if difference != np.uint8(0) else u32(0)) | (u32(2) if most >= NOT_FINITE else u32(0))


@kernel
def look(w_OI: Any, packed_OB: Any, scale_OG: Any, global_scale: Any, most_1: Any) -> Any:
    """0, or what of DIFFERS and UNDECIDED is true. Weights: BF16 bits; scales: E4M3 bits. The largest magnitude is put into
    `most_1` if it is larger than what is there."""
    num_groups = scale_OG.shape[1]
    codes_I = np.zeros(w_OI.shape[1], np.uint8)
    pairs_B = codes_I.view(np.uint16)
    amax_G, scale_G = np.zeros(num_groups, np.uint16), np.zeros(num_groups, np.float32)
    of_2, of_4 = np.empty(num_groups * 8, np.uint16), np.empty(num_groups * 4, np.uint16)
    of_8 = np.empty(num_groups * 2, np.uint16)
    found, difference = u32(0), np.uint8(0)
    for o in range(w_OI.shape[0]):
        w_I = w_OI[o]
        _largest_of_groups(w_I, of_2, of_4, of_8, amax_G)
        found = u32(found | _look_at_scales(amax_G, scale_OG[o], scale_G, global_scale, most_1))
        for g in range(num_groups):
            left = g * GROUP
            _codes_of_group(w_I[left : left + GROUP], scale_G[g], codes_I[left : left + GROUP])
        difference = np.uint8(difference | _differing(pairs_B, packed_OB[o]))
    return int(found | (u32(1) if difference != np.uint8(0) else u32(0)))
