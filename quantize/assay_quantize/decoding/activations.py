"""Inputs of a weight as vLLM's kernels round them, back in the dtype they came in.

It is compressed-tensors' arithmetic (`quantization/lifecycle/forward.py`, which the tests compare with) but for groups of 32
with scales that are powers of two, whose kernel rounds the scale up (`mxfp4_quantize`, `mxfp8_quantize` of FlashInfer).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from assay_quantize.decoding.stored_weight import ActivationRule

FP8_MAX, FP4_MAX = 448.0, 6.0
MX_GROUP = 32
"""Columns that share a scale which is a power of two."""


class InputRounding(NamedTuple):
    """rule: how inputs are rounded. factor: of a static rule the step, stored; of FP4 in groups of 16 what their scales are
    multiplied with before they are rounded to FP8 (`input_global_scale` of compressed-tensors). None: none is stored."""

    rule: ActivationRule
    factor: float | None = None


def round_activations(x: Tensor, rounding: InputRounding) -> Tensor:
    """Inputs [..., I] rounded by a rule, in the dtype of `x`; `x` itself where they stay in 16 bits.

    ValueError: no kernel rounds inputs by such a rule.
    """
    rule, factor = rounding
    if rule.kind == "none" or not x.numel():
        return x
    values = x.float()
    if rule.granularity == "group":
        assert rule.group_size is not None, "groups have a size"
        values = values.reshape(*x.shape[:-1], -1, rule.group_size)
    if rule.kind == "static":
        if factor is None or rule.granularity != "tensor":
            raise ValueError(f"static activations with a scale for each {rule.granularity}")
        amax = torch.full((), factor) * _LARGEST[str(rule.number)]
    else:
        amax = values.abs().amax(-1 if rule.granularity != "tensor" else tuple(range(values.dim())), keepdim=True)
    return _NUMBERS[str(rule.number)](values, amax, rounding).reshape(x.shape).to(x.dtype)


def _fp4_groups(values: Tensor, amax: Tensor, rounding: InputRounding) -> Tensor:
    if rounding.rule.group_size == MX_GROUP:
        return _powers_of_two(values, amax, FP4_MAX, nearest_fp4)
    factor = rounding.factor or 1.0
    step = nearest_fp8(amax / FP4_MAX * factor) / factor
    return torch.where(step == 0, 0.0, nearest_fp4(values / torch.where(step == 0, 1.0, step)) * step)


def _fp8(values: Tensor, amax: Tensor, rounding: InputRounding) -> Tensor:
    if rounding.rule.group_size == MX_GROUP:
        return _powers_of_two(values, amax, FP8_MAX, nearest_fp8)
    step = torch.where(amax == 0, 1.0, amax / FP8_MAX)
    return nearest_fp8(values / step) * step


def _int8(values: Tensor, amax: Tensor, rounding: InputRounding) -> Tensor:
    if rounding.rule.symmetric:
        step = torch.where(amax == 0, 1.0, amax / 127.0)
        return (values / step).round().clamp(-128, 127) * step
    low, high = values.amin(-1, keepdim=True).clamp_max(0), values.amax(-1, keepdim=True).clamp_min(0)
    step = torch.where(high == low, 1.0, (high - low) / 255.0)
    zero = (-128 - low / step).round().clamp(-128, 127)
    return ((values / step + zero).round().clamp(-128, 127) - zero) * step


def _powers_of_two(values: Tensor, amax: Tensor, largest: float, nearest: Any) -> Tensor:
    tiny = torch.finfo(torch.float32).tiny
    step = torch.exp2(torch.ceil(torch.log2(amax.clamp_min(tiny) / largest)).clamp(-127, 127))
    return nearest(values / step) * step  # type: ignore[no-any-return]


_NUMBERS = {"fp4_e2m1": _fp4_groups, "fp8_e4m3": _fp8, "int8": _int8}
_LARGEST = {"fp8_e4m3": FP8_MAX, "int8": 127.0}


def nearest_fp8(x: Tensor) -> Tensor:
    """Nearest E4M3, saturating."""
    return x.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).float()


def nearest_fp4(x: Tensor) -> Tensor:
    """Nearest of 0, .5, 1, 1.5, 2, 3, 4, 6, ties to the even code, saturating."""
    x = x.clamp(-FP4_MAX, FP4_MAX)
    size = x.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return (x / step).round() * step


class RoundedInputs(TorchFunctionMode):
    """While it is entered, inputs of every `linear` whose weight begins at one of the addresses are rounded."""

    def __init__(self, roundings: Mapping[int, InputRounding]) -> None:
        super().__init__()
        self._roundings = roundings

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.linear and (rounding := self._roundings.get(args[1].data_ptr())) is not None:
            args = (round_activations(args[0], rounding), *args[1:])
        return func(*args, **(kwargs or {}))
