"""Round and pack one weight, and back. The arithmetic is compressed-tensors' own; here is only which part is called when.

Min-max scales, as llm-compressor's data-free path computes them, bit for bit (a test runs both). The one intended
difference is the NVFP4 global scale: members of a fused group (gate and up, q/k/v, q_a/kv_a) share one, because vLLM
applies a single one to both; the caller passes the largest magnitude of the group.

Shapes: w_OI is a weight with O output features (rows) and I input features (columns).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme, QuantizationStrategy
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam, maybe_pad_tensor_for_block_quant
from compressed_tensors.utils import impl_backend
from torch import Tensor

from assay_quantize.schemes import SCHEMES, SHARES_GLOBAL_SCALE, compressed_tensors_scheme


@functools.cache
def _scheme(name: str) -> QuantizationScheme:
    return compressed_tensors_scheme(name)


@contextmanager
def _eager_only(tensor: Tensor) -> Iterator[None]:
    """Keep compressed-tensors from its Triton kernels: they divide in FP32 where PyTorch rounds the quotient to the weight's
    dtype, so a GPU would write other bytes than a CPU, and a resumed run on another machine a mixture of both."""
    if not tensor.is_cuda:
        yield
        return
    before = impl_backend.ENFORCE_EAGER
    impl_backend.ENFORCE_EAGER = True
    try:
        yield
    finally:
        impl_backend.ENFORCE_EAGER = before


def magnitude(w_OI: Tensor) -> Tensor:
    """Largest |w| (0-dimensional, dtype of w): what NVFP4's global scale is made from. NaN if there is one."""
    low, high = torch.aminmax(w_OI)
    return torch.maximum(-low, high)


@torch.no_grad()
def quantize_weight(w_OI: Tensor, scheme: str, *, global_scale_amax: Tensor | None = None) -> dict[str, Tensor]:
    """The packed parts of a weight, by local name (`weight_packed`, `weight_scale`, ...; see schemes.py), on its device.

    w_OI: BF16, FP16 or FP32, finite, of a shape that `check_shape` accepts.
    global_scale_amax: largest |w| of the fused group (`magnitude`), for NVFP4; default: of this weight alone.
    All-zero groups get a small non-zero scale. Deterministic: the same bytes on every device.
    """
    args = _scheme(scheme).weights
    assert args is not None
    if SCHEMES[scheme].layout in ("mxfp4", "mxfp8") and w_OI.dtype == torch.float16:
        w_OI = w_OI.float()  # a power-of-two scale below 2^-24 does not exist in FP16
    with _eager_only(w_OI):
        global_scale = None
        if scheme in SHARES_GLOBAL_SCALE:
            amax = (magnitude(w_OI) if global_scale_amax is None else global_scale_amax.to(w_OI.device)).reshape(1)
            global_scale = generate_gparam(-amax, amax)
        blocks = _blocks(w_OI, args)
        low, high = torch.aminmax(blocks, dim=-1)
        scale, zero_point = calculate_qparams(low, high, args, global_scale=global_scale)
        parts: dict[str, Tensor] = {"weight": w_OI, "weight_scale": scale.to(w_OI.dtype)}
        if not args.symmetric:
            # 0/0 above: an all-zero group's zero point would be NaN cast to an integer, which is undefined
            parts["weight_zero_point"] = torch.where((low == 0) & (high == 0), torch.zeros_like(zero_point), zero_point)
        if global_scale is not None:
            parts["weight_global_scale"] = global_scale
        return {name: part.contiguous() for name, part in _compressor(scheme).compress(parts, _scheme(scheme)).items()}


@torch.no_grad()
def dequantize_weight(parts: dict[str, Tensor], scheme: str, dtype: torch.dtype) -> Tensor:
    """The dense weight w_OI that the packed parts stand for, in `dtype`.

    Computed like compressed-tensors' own `decompress`, so in the dtype of the scales (NVFP4, MXFP4: BF16).
    """
    with _eager_only(parts["weight_scale"]):
        weight: Tensor = _compressor(scheme).decompress(parts, _scheme(scheme))["weight"]
        return weight.to(dtype)


def relative_error(dequantized_OI: Tensor, w_OI: Tensor) -> float:
    """||dequantized - w|| / ||w|| (Frobenius, FP32); 0 when both are zero, infinity when only w is."""
    difference = float(torch.linalg.vector_norm(dequantized_OI.float() - w_OI.float()))
    norm = float(torch.linalg.vector_norm(w_OI.float()))
    if norm == 0:
        return 0.0 if difference == 0 else float("inf")
    return difference / norm


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
