"""What the fused scale search must know of each format: its candidates, and how far one weight is from what would be stored.

Each format is a type, its parameters the fields; `overload` makes of every function here one without branches for each format
and each dtype of weights, and only those that are used are compiled. All of it is scalar, so that the loops around vectorize.

    range_of(kind, w_I)                  -> (low, high): 0 and the largest |w|, or the range of the weights
    first_of(kind, w_I, low, high)       -> three FP32 that stand for the min-max scale
    candidate(kind, w_I, first, step)    -> (scale, code): the scale in FP32 as it is multiplied with; the code is the stored
                                            scale of NVFP4 and MX, the zero point of asymmetric INT4, else 0
    error(kind, w_I, x, u, scale, code)  -> (dequantized - x)^2 * u

w_I only tells the dtype, as everywhere in bits.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba.extending import overload

from assay_quantize.kernels.bits import (  # fmt: skip
    e4m3_to_f32,
    epsilon,
    extent,
    kernel,
    largest,
    round_as,
    round_bf16,
    round_e4m3,
)
from assay_quantize.kernels.fused_fp4 import mx_exponent, mx_scale, mx_to_f32, nvfp4_scale, round_e2m1
from assay_quantize.kernels.fused_int import asymmetric_scale


class Int(NamedTuple):
    """Symmetric integers; `half_range` is 7.5 or 127.5."""

    half_range: np.float32


class IntAsymmetric(NamedTuple):
    """INT4 with zero points."""

    steps: np.float32


class E4m3(NamedTuple):
    """FP8 with float scales."""

    largest: np.float32


class Nvfp4(NamedTuple):
    global_scale: np.float32


class Mxfp4(NamedTuple):
    """`offset`: floor(log2(largest element)), 2."""

    offset: np.float32


class Mxfp8(NamedTuple):
    """`offset`: floor(log2(largest element)), 8."""

    offset: np.float32


SearchKind = Int | IntAsymmetric | E4m3 | Nvfp4 | Mxfp4 | Mxfp8


def range_of(kind: Any, w_I: Any) -> Any:
    raise NotImplementedError("only inside kernels")


def first_of(kind: Any, w_I: Any, low: Any, high: Any) -> Any:
    raise NotImplementedError("only inside kernels")


def candidate(kind: Any, w_I: Any, first: Any, step: Any) -> Any:
    raise NotImplementedError("only inside kernels")


def error(kind: Any, w_I: Any, x: Any, u: Any, scale: Any, code: Any) -> Any:
    raise NotImplementedError("only inside kernels")


@overload(range_of)
def _range_of(kind: Any, w_I: Any) -> Any:
    def symmetric(kind: Any, w_I: Any) -> Any:
        return np.float32(0), largest(w_I)

    def asymmetric(kind: Any, w_I: Any) -> Any:
        return extent(w_I)

    return asymmetric if kind.instance_class is IntAsymmetric else symmetric


@overload(first_of)
def _first_of(kind: Any, w_I: Any, low: Any, high: Any) -> Any:
    def integer(kind: Any, w_I: Any, low: Any, high: Any) -> Any:
        return _min_max_scale(w_I, high, kind.half_range), np.float32(0), np.float32(0)

    def e4m3(kind: Any, w_I: Any, low: Any, high: Any) -> Any:
        return _min_max_scale(w_I, high, kind.largest), np.float32(0), np.float32(0)

    def asymmetric(kind: Any, w_I: Any, low: Any, high: Any) -> Any:
        scale, _ = asymmetric_scale(w_I, low, high)
        return low, high, np.float32(scale < np.float32(np.inf))

    def nvfp4(kind: Any, w_I: Any, low: Any, high: Any) -> Any:
        return np.float32(nvfp4_scale(w_I, high, kind.global_scale)), np.float32(0), np.float32(0)

    def mx(kind: Any, w_I: Any, low: Any, high: Any) -> Any:
        exponent = mx_exponent(high)
        code, _ = mx_scale(exponent, np.int32(kind.offset))
        return np.float32(code), np.float32(exponent == np.int32(255)), np.float32(0)

    return _by_kind(kind, Int=integer, IntAsymmetric=asymmetric, E4m3=e4m3, Nvfp4=nvfp4, Mxfp4=mx, Mxfp8=mx)


@overload(candidate)
def _candidate(kind: Any, w_I: Any, first: Any, step: Any) -> Any:
    def floating(kind: Any, w_I: Any, first: Any, step: Any) -> Any:
        scale = round_as(w_I, first[0] * step)
        usable = scale > np.float32(0) and scale < np.float32(np.inf)
        return scale if usable else first[0], np.int16(0)

    def asymmetric(kind: Any, w_I: Any, first: Any, step: Any) -> Any:
        used = step if first[2] > np.float32(0) else np.float32(1)
        scale, zero = asymmetric_scale(w_I, round_as(w_I, first[0] * used), round_as(w_I, first[1] * used))
        return scale, np.int16(zero)

    def nvfp4(kind: Any, w_I: Any, first: Any, step: Any) -> Any:
        code = np.int16(min(max(first[0] + step, np.float32(1)), np.float32(126)))
        return e4m3_to_f32(np.uint8(code)) / kind.global_scale, code

    def mx(kind: Any, w_I: Any, first: Any, step: Any) -> Any:
        overflow = first[1] > np.float32(0)
        code = np.int16(first[0] if overflow else min(max(first[0] + step, np.float32(0)), np.float32(254)))
        return np.float32(np.inf) if overflow else mx_to_f32(np.uint8(code)), code

    return _by_kind(kind, Int=floating, IntAsymmetric=asymmetric, E4m3=floating, Nvfp4=nvfp4, Mxfp4=mx, Mxfp8=mx)


@overload(error)
def _error(kind: Any, w_I: Any, x: Any, u: Any, scale: Any, code: Any) -> Any:
    def integer(kind: Any, w_I: Any, x: Any, u: Any, scale: Any, code: Any) -> Any:
        high = np.floor(kind.half_range)
        q = np.rint(min(max(round_as(w_I, x / scale), -high - np.float32(1)), high))
        difference = round_as(w_I, q * scale) - x
        return difference * difference * u

    def asymmetric(kind: Any, w_I: Any, x: Any, u: Any, scale: Any, code: Any) -> Any:
        zero = np.float32(code)
        q = round_as(w_I, round_as(w_I, x / scale) + zero)
        q = np.rint(min(max(q, np.float32(-8)), np.float32(7)))
        difference = round_as(w_I, (q - zero) * scale) - x
        return difference * difference * u

    def e4m3(kind: Any, w_I: Any, x: Any, u: Any, scale: Any, code: Any) -> Any:
        q = min(max(round_as(w_I, x / scale), np.float32(-448)), np.float32(448))
        difference = round_as(w_I, round_e4m3(q) * scale) - x
        return difference * difference * u

    def nvfp4(kind: Any, w_I: Any, x: Any, u: Any, scale: Any, code: Any) -> Any:
        _, value = round_e2m1(abs(x) / scale)
        difference = round_bf16(value * scale) - abs(x)
        return difference * difference * u

    def mxfp4(kind: Any, w_I: Any, x: Any, u: Any, scale: Any, code: Any) -> Any:
        _, value = round_e2m1(round_as(w_I, abs(x) / scale))
        difference = round_bf16(value * scale) - abs(x)
        return difference * difference * u

    def mxfp8(kind: Any, w_I: Any, x: Any, u: Any, scale: Any, code: Any) -> Any:
        q = min(max(round_as(w_I, x / scale), np.float32(-448)), np.float32(448))
        difference = round_bf16(round_e4m3(q) * scale) - x
        return difference * difference * u

    return _by_kind(kind, Int=integer, IntAsymmetric=asymmetric, E4m3=e4m3, Nvfp4=nvfp4, Mxfp4=mxfp4, Mxfp8=mxfp8)


@kernel
def _min_max_scale(w_I: Any, amax: Any, largest_code: Any) -> Any:
    scale = round_as(w_I, amax / largest_code)
    return epsilon(w_I) if scale == np.float32(0) else scale


def _by_kind(kind: Any, **functions: Any) -> Any:
    return functions[kind.instance_class.__name__]
