"""Sums of squared errors beside the rounding, and the quotients: fast for ordinary weights, safe for all.

A scale between 2^-30 and 2^30 is ordinary. Then the squares of weights, which are at most some hundred times as large as their
scale, are FP32 numbers, and a vector of them holds twice as many as in FP64. They are added up in FP32 over a piece of a row
(or of the rows of a block), and from piece to piece in FP64: the sums are off by some 1e-8, in the same way whatever the slabs.
With any other scale all of it is FP64.

And then a quotient of BF16 numbers is a product with the reciprocal: rounded to BF16 it is the same number. Its exact value
a/b of two 8-bit integers is at least 2^-16 (relative) away from where rounding to 8 bits changes, and never there: that would
be (2m + 1)/256 = a/b, but b has at most seven factors of two. Rounding 1/b and the product to FP32 moves it by 2^-23. A
quotient below 2^-126, where BF16 has fewer bits, rounds to the code for 0 in every scheme. FP16 and FP32 have too many bits.

The type of the sums says which of the two: float32 for ordinary scales, float64 for all.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from assay_quantize.kernels.bits import epsilon, kernel

LEAST, MOST = np.float32(2.0**-30), np.float32(2.0**30)
"""Ordinary scales."""


@kernel
def is_ordinary(w_I: Any, scale: Any) -> Any:
    """Whether FP32 sums and reciprocals will do; not for NaN. Epsilon stands for a scale of 0: weights far below any scale."""
    return scale >= LEAST and scale <= MOST and scale != epsilon(w_I)


@kernel
def are_ordinary(amax_G: Any) -> Any:
    """Whether FP32 sums will do for groups of these largest magnitudes, by the largest of them; not for NaN and infinity."""
    amax = np.float32(0)
    for g in range(amax_G.size):
        amax = max(amax, amax_G[g]) if amax_G[g] < MOST else np.float32(np.inf)
    return amax >= LEAST and amax <= MOST


@kernel
def reciprocal(scale: Any) -> Any:
    """1 / scale in FP32, for `quotient`."""
    return np.float32(1) / scale


def quotient(w_I: Any, sums_C: Any, w: Any, scale: Any, inverse: Any) -> Any:
    """w / scale, to be rounded to the dtype of w_I. inverse: `reciprocal(scale)`."""
    raise NotImplementedError("only inside kernels")


def squared(sums_C: Any, x: Any) -> Any:
    """x * x, in the precision of the sums."""
    raise NotImplementedError("only inside kernels")


def difference(sums_C: Any, x: Any, y: Any) -> Any:
    """x - y, in the precision of the sums."""
    raise NotImplementedError("only inside kernels")


@overload(difference)
def _difference(sums_C: Any, x: Any, y: Any) -> Any:
    def narrow(sums_C: Any, x: Any, y: Any) -> Any:
        return x - y

    def wide(sums_C: Any, x: Any, y: Any) -> Any:
        return np.float64(x) - np.float64(y)

    return narrow if sums_C.dtype == types.float32 else wide


@overload(quotient)
def _quotient(w_I: Any, sums_C: Any, w: Any, scale: Any, inverse: Any) -> Any:
    def product(w_I: Any, sums_C: Any, w: Any, scale: Any, inverse: Any) -> Any:
        return w * inverse

    def division(w_I: Any, sums_C: Any, w: Any, scale: Any, inverse: Any) -> Any:
        return w / scale

    return product if (w_I.dtype, sums_C.dtype) == (types.uint16, types.float32) else division


@overload(squared)
def _squared(sums_C: Any, x: Any) -> Any:
    def narrow(sums_C: Any, x: Any) -> Any:
        return x * x

    def wide(sums_C: Any, x: Any) -> Any:
        return np.float64(x) * np.float64(x)

    return narrow if sums_C.dtype == types.float32 else wide


@kernel
def sums(lanes: Any) -> Any:
    """Zeros: FP64 sums of squared errors and of squares, and the same in FP32 for one piece."""
    return np.zeros(lanes), np.zeros(lanes), np.zeros(lanes, np.float32), np.zeros(lanes, np.float32)


@kernel
def move(piece_C: Any, sums_C: Any) -> None:
    """Add the FP32 sums of a piece to the FP64 sums, and begin again."""
    for i in range(piece_C.size):
        sums_C[i] += np.float64(piece_C[i])
        piece_C[i] = np.float32(0)


@kernel
def total(sums_C: Any) -> Any:
    """Their sum, in order."""
    made = 0.0
    for i in range(sums_C.size):
        made += sums_C[i]
    return made
