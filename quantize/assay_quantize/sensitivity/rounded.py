"""A part's weights as a scheme stores them, and activations as its kernels round them; both back in FP32.

Weights go through the quantizer's own kernels (`kernels.quantize_rows`), with the largest magnitude of the fused group where a
scheme needs one: they are what `assay quantize` would write. Activations are rounded as vLLM's kernels do it, which is
compressed-tensors' rule (the tests compare) but for MXFP4, whose kernel rounds the scale up.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from assay.errors import QuantizeError
from assay.records.plan import TensorPlan
from assay_quantize.checkpoint.source_reader import SourceReader
from assay_quantize.formats.schemes import SCHEMES, compressed_tensors_scheme
from assay_quantize.kernels import amax_rows, quantize_rows
from assay_quantize.kernels import reference as definition
from assay_quantize.plan.slabs import amax_key, amax_members
from assay_quantize.sensitivity.calibrated import CalibratedWeights
from assay_quantize.sensitivity.parts import Key, Layout

FP8_MAX, FP4_MAX = 448.0, 6.0


class Rounder:
    """Weights of a checkpoint, plain and rounded. Close `reader` yourself."""

    def __init__(self, layout: Layout, reader: SourceReader, calibrated: CalibratedWeights | None = None) -> None:
        """calibrated: weights that are not rounded here, but taken from a calibration."""
        self._layout, self._reader = layout, reader
        self._calibrated = calibrated or CalibratedWeights()
        self._tensors = {scheme: {one.name: one for one in plan.tensors} for scheme, plan in layout.plans.items()}

    @property
    def calibration_sha256(self) -> str | None:
        """Identity of the calibrated weights. None: there are none."""
        return self._calibrated.sha256

    def weights(self, key: Key, scheme: str) -> Iterator[tuple[str, Tensor, Tensor]]:
        """(name, w_OI as it is, w_OI as `scheme` gives it back), FP32, of every weight of the part.

        A weight that the source stores in this scheme already comes back as it is. QuantizeError: a weight is not finite.
        """
        plan = self._layout.plans[scheme]
        mine = [self._tensors[scheme][name] for name in self._layout.weights[key]]
        mine = [one for one in mine if one.scheme is not None]
        largest = {group: self._amax(members) for group, members in amax_members(plan, mine).items()}
        for one in mine:
            rows = self._reader.read_rows(one, 0, one.shape[0])
            plain = definition.to_torch(rows, one.logical_dtype).float()
            if one.action != "quantize":
                yield one.name, plain, plain
                continue
            if (by_text := self._calibrated.of(scheme, one.name)) is not None:
                parts = self._calibrated.files[scheme].rows(by_text, 0, one.shape[0])
                yield one.name, plain, definition.dequantize_rows(parts, rows, one.logical_dtype, scheme)
                continue
            amax, dtype = largest.get(amax_key(one) or "", (None, None))
            made = quantize_rows(rows, one.logical_dtype, scheme, amax=amax, amax_dtype=dtype, observer=self._layout.observer)
            if not math.isfinite(made.squared_norm):
                raise QuantizeError(f"{one.name}: holds NaN or infinity; it cannot be quantized, nor its part be measured")
            yield one.name, plain, _back(made.parts, rows, one.logical_dtype, scheme)

    def _amax(self, members: list[TensorPlan]) -> tuple[float, str]:
        dtypes = {one.logical_dtype for one in members}
        found = 0.0
        for one in members:
            amax = amax_rows(self._reader.read_rows(one, 0, one.shape[0]), one.logical_dtype)
            if not math.isfinite(amax):
                raise QuantizeError(f"{one.name}: holds NaN or infinity; it cannot be quantized, nor its part be measured")
            found = max(found, amax)
        return found, min(dtypes) if len(dtypes) == 1 else "F32"


def _back(parts: dict[str, Any], rows: Any, dtype: str, scheme: str) -> Tensor:
    """Kernels with quantized activations apply plain scales to FP32 sums, so that value * scale is not rounded to BF16."""
    row = SCHEMES[scheme]
    if row.layout != "plain":
        return definition.dequantize_rows(parts, rows, dtype, scheme)
    stored = torch.from_numpy(parts["weight"])
    values = stored.view(torch.float8_e4m3fn) if row.weight_dtype == "F8_E4M3" else stored
    return scaled(values, definition.to_torch(parts["weight_scale"], dtype), scheme)


def scaled(values_OI: Tensor, scale: Tensor, scheme: str) -> Tensor:
    """Codes of layout `plain` times their scales, in FP32."""
    row, (rows, columns) = SCHEMES[scheme], values_OI.shape
    wide = scale.float().repeat_interleave(row.block_rows, 0)[:rows].repeat_interleave(row.group_size or columns, 1)
    return values_OI.float() * wide[:, :columns]


# ------------------------------------------------------------------------------------------------ activations
@functools.cache
def input_args(scheme: str) -> Any:
    """compressed-tensors' arguments for the inputs of a weight; None: they stay in 16 bits."""
    return compressed_tensors_scheme(scheme).input_activations


def round_inputs(x: Tensor, scheme: str, global_scale: float | None = None) -> Tensor:
    """Inputs [..., I] as the kernels of a scheme round them, in FP32; those of a weight-only scheme as they are.

    global_scale: what a calibration stored as `input_global_scale` of NVFP4; None: the scheme's constant.
    """
    args = input_args(scheme)
    if args is None or not x.numel():
        return x
    layout, values = SCHEMES[scheme].layout, x.float()
    if args.group_size:
        values = values.reshape(*x.shape[:-1], -1, args.group_size)
    amax = values.abs().amax(-1, keepdim=True)
    if layout == "nvfp4":
        factor = global_scale or float(SCHEMES[scheme].input_global_scale or 1.0)
        step = _fp8(amax / FP4_MAX * factor) / factor
        rounded = torch.where(step == 0, 0.0, _fp4(values / torch.where(step == 0, 1.0, step)) * step)
    elif layout in ("mxfp4", "mxfp8"):
        largest, nearest = (FP4_MAX, _fp4) if layout == "mxfp4" else (FP8_MAX, _fp8)
        tiny = torch.finfo(torch.float32).tiny
        step = torch.exp2(torch.ceil(torch.log2(amax.clamp_min(tiny) / largest)).clamp(-127, 127))
        rounded = nearest(values / step) * step
    elif SCHEMES[scheme].weight_dtype == "I8":
        step = torch.where(amax == 0, 1.0, amax / 127.0)
        rounded = (values / step).round().clamp(-128, 127) * step
    else:
        step = torch.where(amax == 0, 1.0, amax / FP8_MAX)
        rounded = _fp8(values / step) * step
    return rounded.reshape(x.shape).to(x.dtype)


def _fp8(x: Tensor) -> Tensor:
    return x.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).float()


def _fp4(x: Tensor) -> Tensor:
    """Nearest of 0, .5, 1, 1.5, 2, 3, 4, 6, ties to the even code, saturating."""
    x = x.clamp(-FP4_MAX, FP4_MAX)
    size = x.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return (x / step).round() * step


class RoundInputs(TorchFunctionMode):
    """While it is entered, inputs of every `linear` whose weight begins at one of the addresses are rounded."""

    def __init__(self, scheme_of: Mapping[int, str], global_scale_of: Mapping[int, float] | None = None) -> None:
        """Both by address; the latter as in `round_inputs`."""
        super().__init__()
        self._scheme_of, self._global_scale_of = scheme_of, global_scale_of or {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.linear and (scheme := self._scheme_of.get(args[1].data_ptr())) is not None:
            args = (round_inputs(args[0], scheme, self._global_scale_of.get(args[1].data_ptr())), *args[1:])
        return func(*args, **(kwargs or {}))
