"""Calibrated integer weights in steps: how far each code is from its weight, in units of the scale; kernels in numba.

Rows of a weight are `w_RI` (FP32, as they were before rounding) and `q_RI` (int8: stored codes less their zero point), with a
scale for every `group` columns: `inverse_RG` is its reciprocal, `lows_RG` and `highs_RG` are the least and largest q that its
codes can say. A weight in steps is x = w * inverse, and the distance of its code is d = q - x. Where a code is the last one on
its side and the weight lies beyond it, the distance is explained by that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from assay_quantize.kernels.bits import bits_of, from_bits, kernel, kernel_view, load, statistic
from assay_quantize.kernels.rows import Array

F32 = NDArray[np.float32]
I8 = NDArray[np.int8]
u32 = np.uint32

NEAREST = np.float32(0.5 + 1e-4)
"""Steps that the nearest code may be away from its weight, with what FP32 leaves of the last bits."""


class Factor(NamedTuple):
    """What columns (or rows) were multiplied with. middle: NaN where it is not known, and nothing depends on it. half: as far,
    relative to that, it may be off."""

    middle: NDArray[np.float64]
    half: NDArray[np.float64]


class StepRows(NamedTuple):
    """Rows of a weight. zero_RG: what was taken from the codes; 0 where the scheme is symmetric. least, most: codes that there
    are. low_RG, high_RG: least and largest weight of every group, and 0 where all have the other sign."""

    w_RI: F32
    q_RI: I8
    scale_RG: F32
    zero_RG: NDArray[np.int32]
    least: int
    most: int
    low_RG: F32
    high_RG: F32

    @property
    def group(self) -> int:
        return int(self.w_RI.shape[1] // self.scale_RG.shape[1])


def step_rows(parts: Mapping[str, Array], rows: Array, is_symmetric: bool, columns_I: F32 | None) -> StepRows:
    """parts: of these rows, by local name, in storage form. rows: of the source. columns_I: what their columns were multiplied
    with; None: with nothing."""
    num_rows, num_columns = rows.shape
    scale_RG = as_f32(parts["weight_scale"])
    zero_RG = np.zeros(scale_RG.shape, np.int32)
    q_RI = np.empty((num_rows, num_columns), np.int8)
    least, most = -8, 7
    if "weight" in parts:
        q_RI, least, most = np.ascontiguousarray(parts["weight"]), -128, 127
    else:
        if not is_symmetric:
            words = np.repeat(parts["weight_zero_point"].view(np.uint32), 8, axis=0)[:num_rows]
            places = (np.arange(num_rows, dtype=np.uint32) % 8 * 4)[:, None]
            zero_RG = (words >> places & np.uint32(15)).astype(np.int32) - 8
        _unpack(np.ascontiguousarray(parts["weight_packed"]).view(np.uint8), zero_RG, q_RI)
    w_RI, low_RG, high_RG = np.empty(rows.shape, np.float32), np.empty_like(scale_RG), np.empty_like(scale_RG)
    if columns_I is None:
        _loaded(kernel_view(rows), w_RI, low_RG, high_RG)
    else:
        _multiplied(kernel_view(rows), columns_I, w_RI, low_RG, high_RG)
    return StepRows(w_RI, q_RI, scale_RG, zero_RG, least, most, low_RG, high_RG)


def as_f32(values: Array) -> F32:
    """Storage form (BF16 as bits) -> FP32, exactly."""
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values.astype(np.float32)


def inverses(scale_RG: F32) -> F32:
    """0 for what is no scale: those are damages of their own."""
    is_one = np.isfinite(scale_RG) & (scale_RG != 0)
    return np.where(is_one, 1 / np.where(is_one, scale_RG, np.float32(1)), np.float32(0)).astype(np.float32)


def inverse_of(rows: StepRows, divisor: Factor | None) -> F32:
    """1 over what a step of each row and group is worth. divisor: of the rows."""
    inverse = inverses(rows.scale_RG)
    return inverse if divisor is None else (inverse / np.nan_to_num(divisor.middle, nan=1.0)[:, None]).astype(np.float32)


def ends_of(rows: StepRows) -> tuple[F32, F32]:
    """The least and the largest q that the codes can say."""
    return (rows.least - rows.zero_RG).astype(np.float32), (rows.most - rows.zero_RG).astype(np.float32)


# ------------------------------------------------------------------------------------------------ kernels
@kernel
def _unpack(packed_RB: Any, zero_RG: Any, q_RI: Any) -> None:
    """Two codes a byte, the first in the low half; 8 is the code of 0."""
    group = q_RI.shape[1] // zero_RG.shape[1]
    for r in range(q_RI.shape[0]):
        pairs_B, packed_B = q_RI[r].view(np.uint16), packed_RB[r]
        for b in range(packed_B.size):
            byte = np.uint16(packed_B[b])
            pairs_B[b] = np.uint16((byte | np.uint16(byte << np.uint16(4))) & np.uint16(0x0F0F))
        for g in range(zero_RG.shape[1]):
            less, q_g = np.int8(np.int32(8) + zero_RG[r, g]), q_RI[r, g * group : (g + 1) * group]
            for i in range(q_g.size):
                q_g[i] = np.int8(q_g[i] - less)


@kernel
def _loaded(w_OI: Any, made_RI: Any, low_RG: Any, high_RG: Any) -> None:
    """As FP32, with the extent of every group; of NaN nothing is said."""
    group = w_OI.shape[1] // low_RG.shape[1]
    for r in range(w_OI.shape[0]):
        for g in range(low_RG.shape[1]):
            positive, negative = u32(0), u32(0)
            row, made = w_OI[r, g * group : (g + 1) * group], made_RI[r, g * group : (g + 1) * group]
            for i in range(row.size):
                w = load(row, i)
                made[i] = w
                # magnitudes of one sign are in order of their bits
                bits = bits_of(w)
                magnitude = u32(bits & u32(0x7FFFFFFF))
                positive = max(positive, magnitude if bits == magnitude else u32(0))
                negative = max(negative, magnitude if bits != magnitude else u32(0))
            low_RG[r, g], high_RG[r, g] = -from_bits(negative), from_bits(positive)


@kernel
def _multiplied(w_OI: Any, columns_I: Any, made_RI: Any, low_RG: Any, high_RG: Any) -> None:
    """The same, times columns_I."""
    group = w_OI.shape[1] // low_RG.shape[1]
    for r in range(w_OI.shape[0]):
        for g in range(low_RG.shape[1]):
            positive, negative = u32(0), u32(0)
            row, made = w_OI[r, g * group : (g + 1) * group], made_RI[r, g * group : (g + 1) * group]
            columns = columns_I[g * group : (g + 1) * group]
            for i in range(row.size):
                w = load(row, i) * columns[i]
                made[i] = w
                bits = bits_of(w)
                magnitude = u32(bits & u32(0x7FFFFFFF))
                positive = max(positive, magnitude if bits == magnitude else u32(0))
                negative = max(negative, magnitude if bits != magnitude else u32(0))
            low_RG[r, g], high_RG[r, g] = -from_bits(negative), from_bits(positive)


@statistic
def add_spread(w_RI: Any, q_RI: Any, inverse_RG: Any, share_RG: Any, own_2I: Any, shared_2I: Any) -> None:
    """Add |d| and d * d of every column to `own_2I`, and of |d| times the share of its row and group to `shared_2I`."""
    group = w_RI.shape[1] // inverse_RG.shape[1]
    for r in range(w_RI.shape[0]):
        for g in range(inverse_RG.shape[1]):
            inverse, share = inverse_RG[r, g], share_RG[r, g]
            begin, end = g * group, (g + 1) * group
            w_g, q_g = w_RI[r, begin:end], q_RI[r, begin:end]
            own_g, own_squares_g = own_2I[0, begin:end], own_2I[1, begin:end]
            shared_g, shared_squares_g = shared_2I[0, begin:end], shared_2I[1, begin:end]
            for i in range(w_g.size):
                d = abs(np.float32(q_g[i]) - w_g[i] * inverse)
                own_g[i] += d
                own_squares_g[i] += d * d
                shared_g[i] += d * share
                shared_squares_g[i] += d * share * d * share


@statistic
def count_far(
    w_RI: Any, q_RI: Any, inverse_RG: Any, low_RG: Any, high_RG: Any, base: Any, slack_I: Any, slack_R: Any,
    far_R: Any, error_RG: Any, norm_RG: Any, moved_R: Any, towards_R: Any, size_R: Any,
) -> None:  # fmt: skip
    """far_R: codes of each row that are further from their weights than `base` and, for every step of the weight, the slack of
    their column and row. error_RG, norm_RG: sums of d * d and x * x. moved_R: codes that are not the nearest; towards_R: those
    of them that are nearer to zero, less those that are further from it; size_R: sums of |x|."""
    group = w_RI.shape[1] // inverse_RG.shape[1]
    for r in range(w_RI.shape[0]):
        far, moved, towards, size = np.int32(0), np.int32(0), np.int32(0), np.float32(0)
        for g in range(inverse_RG.shape[1]):
            inverse, low, high, slack = inverse_RG[r, g], low_RG[r, g], high_RG[r, g], slack_R[r]
            begin, end = g * group, (g + 1) * group
            w_g, q_g, slack_g = w_RI[r, begin:end], q_RI[r, begin:end], slack_I[begin:end]
            error, norm = np.float32(0), np.float32(0)
            for i in range(w_g.size):
                x, q = w_g[i] * inverse, np.float32(q_g[i])
                d = q - x
                error += d * d
                norm += x * x
                size += abs(x)
                allowed = base + abs(x) * (slack_g[i] + slack)
                above, below = q > low, -q > -high
                far += np.int32(1) if (d > allowed and above) or (-d > allowed and below) else np.int32(0)
                is_more, is_less = d > NEAREST and above, -d > NEAREST and below
                moved += np.int32(1) if is_more or is_less else np.int32(0)
                inwards = is_less if x > np.float32(0) else is_more
                outwards = is_more if x > np.float32(0) else is_less
                towards += np.int32(inwards) - np.int32(outwards)
            error_RG[r, g], norm_RG[r, g] = error, norm
        far_R[r], moved_R[r], towards_R[r], size_R[r] = far, moved, towards, size


@statistic
def compare(
    w_RI: Any, q_RI: Any, inverse_RG: Any, low_RG: Any, high_RG: Any, share_RG: Any, slack_I: Any,
    over_I: Any, over_shared_I: Any, block: Any,
    quotient: Any, far_I: Any, far_R: Any, inner_R: Any, uu_R: Any, xx_I: Any, xq_I: Any, qq_I: Any,
    error_RG: Any, norm_RG: Any, xx_RB: Any, xq_RB: Any, xr_RB: Any, most_RB: Any,
) -> None:  # fmt: skip
    """Sums by row and by column. over_I: 1 / spread of each column; over_shared_I: of |d| times the share of its row and group.

    By column, added to what is there: codes that are not the nearest, and sums of x * x, x * q and q * q. far_R: by row, codes
    that are not the nearest even if their quotient was rounded, by `quotient` at the most. inner_R: codes that are neither 0
    nor the first or last. uu_R: the mean of u * u; u is |d| over the spread of its column, by the one or the other, whichever
    is less. By row and group: sums of d * d and x * x. By row and block of columns: sums of x * x, x * q and x * r over the
    square of the spread that u has, r being the nearest code; the largest u.
    """
    group = w_RI.shape[1] // inverse_RG.shape[1]
    for r in range(w_RI.shape[0]):
        far, inner, uu = np.int32(0), np.int32(0), np.float32(0)
        for g in range(inverse_RG.shape[1]):
            inverse, low, high, share = inverse_RG[r, g], low_RG[r, g], high_RG[r, g], share_RG[r, g]
            group_error, group_norm = np.float32(0), np.float32(0)
            for begin in range(g * group, (g + 1) * group, block):
                end = min(begin + block, (g + 1) * group)
                w_b, q_b, slack_b, over_b = w_RI[r, begin:end], q_RI[r, begin:end], slack_I[begin:end], over_I[begin:end]
                over_shared_b, far_b = over_shared_I[begin:end], far_I[begin:end]
                xx_b, xq_b, qq_b = xx_I[begin:end], xq_I[begin:end], qq_I[begin:end]
                error, norm, most = np.float32(0), np.float32(0), u32(0)
                xx, xq, xr = np.float32(0), np.float32(0), np.float32(0)
                for i in range(w_b.size):
                    x, q = w_b[i] * inverse, np.float32(q_b[i])
                    d = q - x
                    error += d * d
                    norm += x * x
                    xx_b[i] += x * x
                    xq_b[i] += x * q
                    qq_b[i] += q * q
                    over = min(over_b[i], share * over_shared_b[i])
                    scaled = x * over * over
                    xx += x * scaled
                    xq += q * scaled
                    xr += min(max(np.rint(x), low), high) * scaled
                    u = abs(d) * over
                    uu += u * u
                    most = max(most, bits_of(u))  # numbers above 0 are in order of their bits
                    allowed = NEAREST + abs(x) * slack_b[i]
                    above, below = q > low, -q > -high
                    inner += np.int32(1) if above and below and q != np.float32(0) else np.int32(0)
                    far_b[i] += np.int32(1) if (d > allowed and above) or (-d > allowed and below) else np.int32(0)
                    allowed += abs(x) * quotient
                    far += np.int32(1) if (d > allowed and above) or (-d > allowed and below) else np.int32(0)
                group_error += error
                group_norm += norm
                at = begin // block
                xx_RB[r, at], xq_RB[r, at], xr_RB[r, at], most_RB[r, at] = xx, xq, xr, from_bits(most)
            error_RG[r, g], norm_RG[r, g] = group_error, group_norm
        far_R[r], inner_R[r], uu_R[r] = far, inner, uu / np.float32(w_RI.shape[1])
