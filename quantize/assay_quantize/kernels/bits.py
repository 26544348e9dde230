"""Roundings and bit casts for the fused kernels, each exactly what PyTorch does on a CPU.

Arithmetic is done in FP32 and its result is rounded to the weight's dtype at once, as PyTorch does for BF16 and FP16. All
functions are branch-free, so that loops around them vectorize; nothing is contracted or reassociated (no fastmath).

The dtype of a weight is told by the type of its array, so that each dtype is a compilation of its own without a branch inside:
    uint16 BF16 bits · int16 FP16 bits (`kernel_view` makes them from float16) · float32
    load(w_I, i) -> float32 · round_as(w_I, x) -> x rounded to that dtype · store(w_I, i, x), x rounded already
    largest(w_I), extent(w_I): of a whole range · epsilon(w_I): what stands for a scale of 0
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
from numba import njit, types
from numba.extending import overload

from assay.records.base import sha256_of_file
from assay_quantize.kernels.rows import Array

F = TypeVar("F", bound=Callable[..., Any])


def kernel(function: F) -> F:
    """Compile on first call, keep on disk, release the GIL; division by zero is infinity, not an exception and a branch."""
    return _compiled(function, frozenset())


def statistic(function: F) -> F:
    """The same for sums of which the last bits do not matter: terms may be added in any order, so that loops vectorize."""
    return _compiled(function, frozenset({"reassoc", "contract"}))


def _compiled(function: F, fastmath: frozenset[str]) -> F:
    compiled: Any = njit(nogil=True, cache=True, error_model="numpy", fastmath=set(fastmath))(function)
    # numba compiles anew when the function's own file has changed, but inlined functions of other files count as much
    files = {f.py_func.__code__.co_filename for f in function.__globals__.values() if hasattr(f, "py_func")}
    stamp = tuple(_sha256(path) for path in sorted({*files, function.__code__.co_filename}))
    compiled._cache._cache_file._source_stamp = stamp  # no public way in numba 0.68, which is pinned
    return cast(F, compiled)


@functools.cache
def _sha256(path: str) -> str:
    return sha256_of_file(Path(path))


def kernel_view(rows: Array) -> Array:
    """The array a kernel is given: float16 as int16 bits, everything else as it is."""
    return rows.view(np.int16) if rows.dtype == np.float16 else rows


u32 = np.uint32
"""Around every integer operation below: numba widens uint32 + uint32 to 64 bits, and a vector then holds half as many."""


# ------------------------------------------------------------------------------------------------ casts
@kernel
def bits_of(x: Any) -> Any:
    """FP32 -> its bits, uint32."""
    return np.float32(x).view(np.uint32)


@kernel
def from_bits(bits: Any) -> Any:
    """uint32 -> the FP32 of these bits."""
    return u32(bits).view(np.float32)


@kernel
def bf16_to_f32(bits: Any) -> Any:
    """BF16 bits -> FP32."""
    return from_bits(u32(u32(bits) << u32(16)))


@kernel
def round_bf16(x: Any) -> Any:
    """FP32 -> nearest BF16, ties to even, as FP32. Beyond the largest: infinity. Not for NaN."""
    bits = bits_of(x)
    bits = u32(bits + u32(u32(0x7FFF) + u32(u32(bits >> u32(16)) & u32(1))))
    return from_bits(u32(bits & u32(0xFFFF0000)))


@kernel
def f32_to_bf16(x: Any) -> Any:
    """FP32 that is a BF16 number -> its BF16 bits, uint16."""
    return np.uint16(u32(bits_of(x) >> u32(16)))


@kernel
def f16_to_f32(bits: Any) -> Any:
    """FP16 bits -> FP32, exactly; denormals, infinity and NaN included."""
    magnitude = u32(u32(bits) & u32(0x7FFF))
    shifted = u32(magnitude << u32(13))
    # the exponent is still biased by 15: multiplying by 2^112 is exact and turns denormals into normal numbers
    value = from_bits(shifted) * np.float32(2.0**112)
    value = from_bits(u32(shifted | u32(0x7F800000))) if magnitude >= u32(0x7C00) else value
    return from_bits(u32(bits_of(value) | u32(u32(u32(bits) & u32(0x8000)) << u32(16))))


@kernel
def round_f16(x: Any) -> Any:
    """FP32 -> nearest FP16, ties to even, as FP32. Beyond the largest: infinity. Not for NaN."""
    bits = bits_of(x)
    sign = u32(bits & u32(0x80000000))
    magnitude = u32(bits ^ sign)
    normal = u32(magnitude + u32(u32(0xFFF) + u32(u32(magnitude >> u32(13)) & u32(1))))
    normal = u32(normal & u32(0xFFFFE000))
    normal = u32(0x7F800000) if normal > u32(0x477FE000) else normal  # 65504
    # below 2^-14 FP16 is a grid of 2^-24, which is the unit in the last place of 0.5
    denormal = bits_of((from_bits(magnitude) + np.float32(0.5)) - np.float32(0.5))
    return from_bits(u32(sign | (denormal if magnitude < u32(0x38800000) else normal)))


@kernel
def f32_to_f16(x: Any) -> Any:
    """FP32 that is an FP16 number -> its FP16 bits, uint16."""
    bits = bits_of(x)
    magnitude = u32(bits & u32(0x7FFFFFFF))
    normal = u32(u32(magnitude - u32(112 << 23)) >> u32(13))
    normal = u32(0x7C00) if magnitude >= u32(0x47800000) else normal
    denormal = u32(from_bits(magnitude) * np.float32(2.0**24))
    sign = u32(u32(bits >> u32(16)) & u32(0x8000))
    return np.uint16(u32(sign | (denormal if magnitude < u32(0x38800000) else normal)))


# ------------------------------------------------------------------------------------------------ E4M3
@kernel
def f32_to_e4m3(x: Any) -> Any:
    """FP32 in [-448, 448] -> bits of the nearest E4M3 number, ties to even, uint8. The sign of zero is kept. Not for NaN."""
    bits = bits_of(x)
    magnitude = u32(bits & u32(0x7FFFFFFF))
    normal = u32(magnitude + u32(u32(0x7FFFF) + u32(u32(magnitude >> u32(20)) & u32(1))))
    normal = u32(u32(normal - u32(120 << 23)) >> u32(20))
    # below 2^-6 E4M3 is a grid of 2^-9, which is the unit in the last place of 2^14
    denormal = u32(bits_of(from_bits(magnitude) + np.float32(2.0**14)) - u32((127 + 14) << 23))
    sign = u32(u32(bits >> u32(24)) & u32(0x80))
    return np.uint8(u32(sign | (denormal if magnitude < u32(0x3C800000) else normal)))


@kernel
def e4m3_to_f32(bits: Any) -> Any:
    """Bits of an E4M3 number -> FP32, exactly; 0x7F and 0xFF are NaN."""
    magnitude = u32(u32(bits) & u32(0x7F))
    value = from_bits(u32(magnitude << u32(20))) * np.float32(2.0**120)
    value = from_bits(u32(0x7FC00000)) if magnitude == u32(0x7F) else value
    return from_bits(u32(bits_of(value) | u32(u32(u32(bits) & u32(0x80)) << u32(24))))


@kernel
def nearest_e4m3(x: Any) -> Any:
    """FP32 in [-448, 448] -> (bits, value as FP32) of the nearest E4M3 number; cheaper than one from the other. Not for NaN."""
    bits = bits_of(x)
    sign = u32(bits & u32(0x80000000))
    magnitude = u32(bits ^ sign)
    # 2^20 times the power of two at or below |x|, at least 2^-6: its unit in the last place is the step of E4M3 there
    exponent = max(u32(magnitude & u32(0x7F800000)), u32(121 << 23))
    shift = u32(exponent + u32(20 << 23))
    shifted = from_bits(magnitude) + from_bits(shift)
    steps = u32(bits_of(shifted) - shift)
    code = u32(u32(u32(exponent >> u32(20)) - u32(121 << 3)) + steps)
    value = bits_of(shifted - from_bits(shift))
    return np.uint8(u32(code | u32(sign >> u32(24)))), from_bits(u32(value | sign))


@kernel
def round_e4m3(x: Any) -> Any:
    """FP32 in [-448, 448] -> nearest E4M3 number as FP32."""
    return nearest_e4m3(x)[1]


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
