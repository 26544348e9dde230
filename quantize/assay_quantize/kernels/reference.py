"""The definition, in torch: round and pack one weight, and back. The arithmetic is compressed-tensors' own; here is only
which part is called when. The fused kernels must give the same bytes, and the tests hold them to it.

Min-max scales, as llm-compressor's data-free path computes them, bit for bit (a test runs both). The one intended
difference is the NVFP4 global scale: members of a fused group (gate and up, q/k/v, q_a/kv_a) share one, because vLLM
applies a single one to both; the caller passes the largest magnitude of the group.

Shapes: w_OI is a weight with O output features (rows) and I input features (columns).
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme, QuantizationStrategy
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam, maybe_pad_tensor_for_block_quant
from torch import Tensor

from assay_quantize.formats.schemes import SCHEMES, SHARES_GLOBAL_SCALE, compressed_tensors_scheme
from assay_quantize.kernels.rows import Array, QuantizedRows, RowErrors
from assay_quantize.kernels.search_reference import search_scales


@functools.cache
def _scheme(name: str) -> QuantizationScheme:
    return compressed_tensors_scheme(name)


def magnitude(w_OI: Tensor) -> Tensor:
    """Largest |w| (0-dimensional, dtype of w): what NVFP4's global scale is made from. NaN if there is one."""
    low, high = torch.aminmax(w_OI)
    return torch.maximum(-low, high)


@torch.no_grad()
def quantize_weight(
    w_OI: Tensor,
    scheme: str,
    *,
    global_scale_amax: Tensor | None = None,
    observer: str = "minmax",
    importance_I: Tensor | None = None,
) -> dict[str, Tensor]:
    """The packed parts of a weight, by local name (`weight_packed`, `weight_scale`, ...; see schemes.py).

    w_OI: BF16, FP16 or FP32, on a CPU, finite, of a shape that `check_shape` accepts.
    global_scale_amax: largest |w| of the fused group (`magnitude`) for NVFP4; default: of w_OI alone.
    observer: `minmax`, or `mse`: scales searched for the least error (search_reference.py), with importance_I of the columns.
    All-zero groups get a small non-zero scale. Deterministic.
    """
    args = _scheme(scheme).weights
    assert args is not None
    if SCHEMES[scheme].layout in ("mxfp4", "mxfp8") and w_OI.dtype == torch.float16:
        w_OI = w_OI.float()  # a power-of-two scale below 2^-24 does not exist in FP16
    global_scale = None
    if scheme in SHARES_GLOBAL_SCALE:
        amax = (magnitude(w_OI) if global_scale_amax is None else global_scale_amax).reshape(1)
        global_scale = generate_gparam(-amax, amax)
    low, high = torch.aminmax(_blocks(w_OI, args), dim=-1)
    from_range = functools.partial(_min_max, args=args, dtype=w_OI.dtype, global_scale=global_scale)
    stored = functools.partial(_stored, w_OI=w_OI, scheme=scheme, global_scale=global_scale)
    if observer == "mse":
        scale, zero_point = search_scales(w_OI, low, high, scheme, args, from_range, stored, importance_I)
    else:
        scale, zero_point = from_range(low, high)
    made = _compress(scale, zero_point, w_OI, scheme, global_scale)
    if (of_inputs := SCHEMES[scheme].input_global_scale) is not None:
        made["input_global_scale"] = torch.tensor([of_inputs])
    return made


def _min_max(
    low: Tensor, high: Tensor, *, args: QuantizationArgs, dtype: torch.dtype, global_scale: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Scale (in the weight's dtype) and, if asymmetric, zero point of weights between `low` and `high`."""
    scale, zero_point = calculate_qparams(low, high, args, global_scale=global_scale)
    if args.symmetric:
        return scale.to(dtype), None
    # 0/0 above: the zero point of a group whose range underflows would be NaN cast to an integer, which is undefined
    undefined = (low >= 0) & (high.clamp_min(0) / 15 == 0)
    return scale.to(dtype), torch.where(undefined, torch.zeros_like(zero_point), zero_point)


def _compress(
    scale: Tensor, zero_point: Tensor | None, w_OI: Tensor, scheme: str, global_scale: Tensor | None
) -> dict[str, Tensor]:
    parts: dict[str, Tensor] = {"weight": w_OI, "weight_scale": scale}
    if zero_point is not None:
        parts["weight_zero_point"] = zero_point
    if global_scale is not None:
        parts["weight_global_scale"] = global_scale
    return {name: part.contiguous() for name, part in _compressor(scheme).compress(parts, _scheme(scheme)).items()}


def _stored(scale: Tensor, zero_point: Tensor | None, *, w_OI: Tensor, scheme: str, global_scale: Tensor | None) -> Tensor:
    """The weight as it is read back when it is stored with these scales, in the dtype it is computed in."""
    made = _compress(scale, zero_point, w_OI, scheme, global_scale)
    weight: Tensor = _compressor(scheme).decompress(made, _scheme(scheme))["weight"]
    return weight


@torch.no_grad()
def dequantize_weight(parts: dict[str, Tensor], scheme: str, dtype: torch.dtype) -> Tensor:
    """The dense weight w_OI that the packed parts stand for, in `dtype`.

    Computed like compressed-tensors' own `decompress`, so in the dtype of the scales (NVFP4, MXFP4: BF16).
    """
    weight: Tensor = _compressor(scheme).decompress(parts, _scheme(scheme))["weight"]
    return weight.to(dtype)


def _compressor(scheme: str) -> Any:
    return BaseCompressor.get_value_from_registry(SCHEMES[scheme].format)


def _blocks(w_OI: Tensor, args: QuantizationArgs) -> Tensor:
    """The weight as [rows of scales, columns of scales, elements that share a scale]; ragged blocks padded with zeros."""
    if args.strategy == QuantizationStrategy.CHANNEL:
        return w_OI.unsqueeze(-2)
    if args.strategy == QuantizationStrategy.BLOCK:
        height, width = args.block_structure
        padded: Tensor = maybe_pad_tensor_for_block_quant(w_OI, (height, width))
        rows, columns = padded.shape[0] // height, padded.shape[1] // width
        return padded.reshape(rows, height, columns, width).transpose(1, 2).reshape(rows, columns, height * width)
    assert args.group_size is not None
    return w_OI.reshape(w_OI.shape[0], -1, args.group_size)


# ------------------------------------------------------------------------------------------------ rows in, rows out
_TORCH_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_FP8_PARTS = {"plain": ("weight",), "mxfp8": ("weight",), "nvfp4": ("weight_scale",)}
"""Layout -> parts that are E4M3 (when their storage form is uint8)."""


def quantize_rows(
    w_OI: Array,
    dtype: str,
    scheme: str,
    *,
    amax: float | None = None,
    amax_dtype: str | None = None,
    observer: str = "minmax",
    importance_I: Array | None = None,
) -> QuantizedRows:
    """`kernels.quantize_rows` by the definition."""
    w = to_torch(w_OI, dtype)
    shared = None if amax is None else torch.tensor(amax, dtype=_TORCH_DTYPES[amax_dtype or dtype])
    importance = None if importance_I is None else torch.tensor(importance_I)
    made = quantize_weight(w, scheme, global_scale_amax=shared, observer=observer, importance_I=importance)
    error = _row_errors(made, w, scheme)
    parts = {name: to_numpy(part) for name, part in made.items() if name not in ("weight_shape", "input_global_scale")}
    return QuantizedRows(parts, error.squared_error, error.squared_norm)


def error_rows(parts: dict[str, Array], w_OI: Array, dtype: str, scheme: str) -> RowErrors:
    """`kernels.error_rows` by the definition."""
    return _row_errors(_stored_parts(parts, w_OI, scheme), to_torch(w_OI, dtype), scheme)


def dequantize_rows(parts: dict[str, Array], w_OI: Array, dtype: str, scheme: str) -> Tensor:
    """`dequantize_weight` of parts in storage form, in FP32. w_OI: the rows they were made from (only their shape counts)."""
    return dequantize_weight(_stored_parts(parts, w_OI, scheme), scheme, torch.float32)


def _stored_parts(parts: dict[str, Array], w_OI: Array, scheme: str) -> dict[str, Tensor]:
    made = {name: _part_to_torch(name, part, scheme) for name, part in parts.items()}
    if SCHEMES[scheme].layout == "int4":
        made["weight_shape"] = torch.tensor(w_OI.shape)
    return made


def _row_errors(made: dict[str, Tensor], w: Tensor, scheme: str) -> RowErrors:
    with torch.no_grad():
        dequantized = _compressor(scheme).decompress(made, _scheme(scheme))["weight"].double()
    wide = w.double()
    return RowErrors(
        squared_error=float((dequantized - wide).square().sum()),
        squared_norm=float(wide.square().sum()),
        num_non_finite=int((~torch.isfinite(dequantized)).sum()),
    )


def to_torch(array: Array, dtype: str) -> Tensor:
    """Rows in storage form as a tensor of the weight's dtype, sharing memory: do not write to it."""
    if not array.flags.writeable:
        array = array.copy()
    return torch.from_numpy(array).view(_TORCH_DTYPES[dtype])


def to_numpy(part: Tensor) -> Array:
    """A part in storage form, sharing memory."""
    part = part.contiguous()
    storage = {torch.bfloat16: torch.uint16, torch.float8_e4m3fn: torch.uint8}.get(part.dtype, part.dtype)
    array: Array = part.view(storage).numpy()
    return array


def _part_to_torch(name: str, part: Array, scheme: str) -> Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(part))
    if part.dtype == np.uint16:
        return tensor.view(torch.bfloat16)
    if part.dtype == np.uint8 and name in _FP8_PARTS.get(SCHEMES[scheme].layout, ()):
        return tensor.view(torch.float8_e4m3fn)
    return tensor
