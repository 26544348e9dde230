"""Roundings and bit casts for the fused kernels, each exactly what PyTorch does on a CPU.

Arithmetic is done in FP32 and its result is rounded to the weight's dtype at once, as PyTorch does for BF16 and FP16. All
functions are branch-free, so that loops around them vectorize; nothing is contracted or reassociated (no fastmath).

The dtype of a weight is told by the type of its array, so that each dtype is a compilation of its own without a branch inside:
    uint16 BF16 bits · int16 FP16 bits (`kernel_view` makes them from float16) · float32
    load(w_I, i) -> float32 · round_as(w_I, x) -> x rounded to that dtype · store(w_I, i, x), x rounded already
    largest(w_I), extent(w_I): of a whole range · epsilon(w_I): what stands for a scale of 0
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
from numba import njit, types
from numba.extending import overload

from assay_quantize.kernels.rows import Array

F = TypeVar("F", bound=Callable[..., Any])


def kernel(function: F) -> F:
    """Compile on first call, keep on disk, release the GIL; division by zero is infinity, not an exception and a branch."""
    return cast(F, njit(nogil=True, cache=True, error_model="numpy")(function))


def kernel_view(rows: Array) -> Array:
    """The array a kernel is given: float16 as int16 bits, everything else as it is."""
    return rows.view(np.int16) if rows.dtype == np.float16 else rows


# ------------------------------------------------------------------------------------------------ casts
@kernel
def bits_of(x: Any) -> Any:
    """FP32 -> its bits, uint32."""
    return np.float32(x).view(np.uint32)


@kernel
def from_bits(bits: Any) -> Any:
    """uint32 -> the FP32 of these bits."""
    return np.uint32(bits).view(np.float32)


@kernel
def bf16_to_f32(bits: Any) -> Any:
    """BF16 bits -> FP32."""
    return from_bits(np.uint32(bits) << np.uint32(16))


@kernel
def round_bf16(x: Any) -> Any:
    """FP32 -> nearest BF16, ties to even, as FP32. Beyond the largest: infinity. Not for NaN."""
    bits = bits_of(x)
    bits += np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return from_bits(bits & np.uint32(0xFFFF0000))


@kernel
def f32_to_bf16(x: Any) -> Any:
    """FP32 that is a BF16 number -> its BF16 bits, uint16."""
    return np.uint16(bits_of(x) >> np.uint32(16))


@kernel
def f16_to_f32(bits: Any) -> Any:
    """FP16 bits -> FP32, exactly; denormals, infinity and NaN included."""
    magnitude = np.uint32(bits) & np.uint32(0x7FFF)
    # the exponent is still biased by 15: multiplying by 2^112 is exact and turns denormals into normal numbers
    value = from_bits(magnitude << np.uint32(13)) * np.float32(2.0**112)
    special = from_bits((magnitude << np.uint32(13)) | np.uint32(0x7F800000))
    value = special if magnitude >= np.uint32(0x7C00) else value
    return from_bits(bits_of(value) | ((np.uint32(bits) & np.uint32(0x8000)) << np.uint32(16)))


@kernel
def round_f16(x: Any) -> Any:
    """FP32 -> nearest FP16, ties to even, as FP32. Beyond the largest: infinity. Not for NaN."""
    bits = bits_of(x)
    sign = bits & np.uint32(0x80000000)
    magnitude = bits ^ sign
    normal = (magnitude + np.uint32(0xFFF) + ((magnitude >> np.uint32(13)) & np.uint32(1))) & np.uint32(0xFFFFE000)
    normal = np.uint32(0x7F800000) if normal > np.uint32(0x477FE000) else normal  # 65504
    # below 2^-14 FP16 is a grid of 2^-24, which is the unit in the last place of 0.5
    denormal = bits_of((from_bits(magnitude) + np.float32(0.5)) - np.float32(0.5))
    return from_bits(sign | (denormal if magnitude < np.uint32(0x38800000) else normal))


@kernel
def f32_to_f16(x: Any) -> Any:
    """FP32 that is an FP16 number -> its FP16 bits, uint16."""
    bits = bits_of(x)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    normal = (magnitude - np.uint32(112 << 23)) >> np.uint32(13)
    normal = np.uint32(0x7C00) if magnitude >= np.uint32(0x47800000) else normal
    denormal = np.uint32(from_bits(magnitude) * np.float32(2.0**24))
    return np.uint16(
        ((bits >> np.uint32(16)) & np.uint32(0x8000)) | (denormal if magnitude < np.uint32(0x38800000) else normal)
    )


# ------------------------------------------------------------------------------------------------ E4M3
@kernel
def f32_to_e4m3(x: Any) -> Any:
    """FP32 in [-448, 448] -> bits of the nearest E4M3 number, ties to even, uint8. The sign of zero is kept. Not for NaN."""
    bits = bits_of(x)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    normal = (
        magnitude + np.uint32(0x7FFFF) + ((magnitude >> np.uint32(20)) & np.uint32(1)) - np.uint32(120 << 23)
    ) >> np.uint32(20)
    # below 2^-6 E4M3 is a grid of 2^-9, which is the unit in the last place of 2^14
    denormal = bits_of(from_bits(magnitude) + np.float32(2.0**14)) - np.uint32((127 + 14) << 23)
    return np.uint8((denormal if magnitude < np.uint32(0x3C800000) else normal) | ((bits >> np.uint32(24)) & np.uint32(0x80)))


@kernel
def e4m3_to_f32(bits: Any) -> Any:
    """Bits of an E4M3 number -> FP32, exactly; 0x7F and 0xFF are NaN."""
    magnitude = np.uint32(bits) & np.uint32(0x7F)
    value = from_bits(magnitude << np.uint32(20)) * np.float32(2.0**120)
    value = from_bits(np.uint32(0x7FC00000)) if magnitude == np.uint32(0x7F) else value
    return from_bits(bits_of(value) | ((np.uint32(bits) & np.uint32(0x80)) << np.uint32(24)))


@kernel
def round_e4m3(x: Any) -> Any:
    """FP32 in [-448, 448] -> nearest E4M3 number as FP32."""
    return e4m3_to_f32(f32_to_e4m3(x))


# ------------------------------------------------------------------------------------------------ by the array's type
def load(w_I: Any, i: Any) -> Any:
    """w_I[i] as FP32."""
    raise NotImplementedError("only inside kernels")


def round_as(w_I: Any, x: Any) -> Any:
    """FP32 x rounded to the dtype of w_I, as FP32."""
    raise NotImplementedError("only inside kernels")


def store(w_I: Any, i: Any, x: Any) -> None:
    """w_I[i] = x, an FP32 that is a number of w_I's dtype."""
    raise NotImplementedError("only inside kernels")


def largest(w_I: Any) -> Any:
    """Largest |w| of a contiguous range as FP32; NaN or infinite when one of them is. By integers: they vectorize."""
    raise NotImplementedError("only inside kernels")


def extent(w_I: Any) -> Any:
    """(low, high) of a contiguous range and zero, as FP32."""
    raise NotImplementedError("only inside kernels")


def epsilon(w_I: Any) -> Any:
    """FP32: distance from 1 to the next number of w_I's dtype; compressed-tensors puts it where a scale came out as 0."""
    raise NotImplementedError("only inside kernels")


@overload(load)
def _load(w_I: Any, i: Any) -> Any:
    def bf16(w_I: Any, i: Any) -> Any:
        return bf16_to_f32(w_I[i])

    def f16(w_I: Any, i: Any) -> Any:
        return f16_to_f32(np.uint16(w_I[i]))

    def f32(w_I: Any, i: Any) -> Any:
        return w_I[i]

    return _by_dtype(w_I, bf16, f16, f32)


@overload(round_as)
def _round_as(w_I: Any, x: Any) -> Any:
    def bf16(w_I: Any, x: Any) -> Any:
        return round_bf16(x)

    def f16(w_I: Any, x: Any) -> Any:
        return round_f16(x)

    def f32(w_I: Any, x: Any) -> Any:
        return x

    return _by_dtype(w_I, bf16, f16, f32)


@overload(store)
def _store(w_I: Any, i: Any, x: Any) -> Any:
    def bf16(w_I: Any, i: Any, x: Any) -> None:
        w_I[i] = f32_to_bf16(x)

    def f16(w_I: Any, i: Any, x: Any) -> None:
        w_I[i] = np.int16(f32_to_f16(x))

    def f32(w_I: Any, i: Any, x: Any) -> None:
        w_I[i] = x

    return _by_dtype(w_I, bf16, f16, f32)


@overload(largest)
def _largest(w_I: Any) -> Any:
    def bf16(w_I: Any) -> Any:
        top = np.uint16(0)
        for i in range(w_I.size):
            top = max(top, np.uint16(w_I[i] & np.uint16(0x7FFF)))
        return bf16_to_f32(top)

    def f16(w_I: Any) -> Any:
        top = np.uint16(0)
        for i in range(w_I.size):
            top = max(top, np.uint16(np.uint16(w_I[i]) & np.uint16(0x7FFF)))
        return f16_to_f32(top)

    def f32(w_I: Any) -> Any:
        top = np.uint32(0)
        for i in range(w_I.size):
            top = max(top, np.uint32(bits_of(w_I[i]) & np.uint32(0x7FFFFFFF)))
        return from_bits(top)

    return _by_dtype(w_I, bf16, f16, f32)


@overload(extent)
def _extent(w_I: Any) -> Any:
    # as signed integers positive numbers are in order, as unsigned ones the negative numbers are, above all positive ones
    def bf16(w_I: Any) -> Any:
        high, low = np.int16(0), np.uint16(0x8000)
        for i in range(w_I.size):
            high = max(high, np.int16(w_I[i]))
            low = max(low, w_I[i])
        return bf16_to_f32(low), bf16_to_f32(np.uint16(high))

    def f16(w_I: Any) -> Any:
        high, low = np.int16(0), np.uint16(0x8000)
        for i in range(w_I.size):
            high = max(high, w_I[i])
            low = max(low, np.uint16(w_I[i]))
        return f16_to_f32(low), f16_to_f32(np.uint16(high))

    def f32(w_I: Any) -> Any:
        high, low = np.int32(0), np.uint32(0x80000000)
        for i in range(w_I.size):
            high = max(high, np.int32(bits_of(w_I[i])))
            low = max(low, np.uint32(bits_of(w_I[i])))
        return from_bits(low), from_bits(np.uint32(high))

    return _by_dtype(w_I, bf16, f16, f32)


@overload(epsilon)
def _epsilon(w_I: Any) -> Any:
    def bf16(w_I: Any) -> Any:
        return np.float32(2.0**-7)

    def f16(w_I: Any) -> Any:
        return np.float32(2.0**-10)

    def f32(w_I: Any) -> Any:
        return np.float32(2.0**-23)

    return _by_dtype(w_I, bf16, f16, f32)


def _by_dtype(array: Any, bf16: Any, f16: Any, f32: Any) -> Any:
    return {types.uint16: bf16, types.int16: f16, types.float32: f32}[array.dtype]
