"""The integer and FP8 schemes for a GPU: plain tensor operations, fused by torch.compile, trusted only after a comparison.

compressed-tensors' own functions do not trace, so their arithmetic is written again here. A compiler may keep what eager
PyTorch rounds (BF16 intermediates in FP32), divide approximately, flush denormals. The options below ask it not to, and before
the first use of a scheme and dtype on a device its bytes are compared with the reference's on weights of every kind. If they
differ, or nothing can be compiled, the reference does the work and the log says so: the bytes are the same either way.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from assay_quantize.formats.schemes import SCHEMES, Scheme
from assay_quantize.kernels import reference
from assay_quantize.kernels.rows import Array, QuantizedRows

LOG = logging.getLogger(__name__)
OPTIONS: dict[str, str | int | bool | Callable[..., Any]] = {
    "emulate_precision_casts": True,
    "eager_numerics.division_rounding": True,
    "eager_numerics.disable_ftz": True,
}  # fmt: skip
"""Of inductor: round where eager PyTorch rounds."""

_COMPILER = threading.Lock()
"""One thread at a time: a call may compile for a new shape, and torch.compile must not be called while a thread traces."""

Parts = dict[str, Tensor]
Compiled = Callable[[Tensor], tuple[Parts, Tensor, Tensor]]


def quantize_rows(
    w_OI: Array, dtype: str, scheme: str, *, amax: float | None = None, amax_dtype: str | None = None, device: str = "cuda"
) -> QuantizedRows:
    """`kernels.quantize_rows` with the min-max observer on `device`: compiled where that gives the reference's bytes."""
    with _COMPILER:
        trusted = agrees(scheme, dtype, device)
    if not trusted:
        return reference.quantize_rows(w_OI, dtype, scheme, amax=amax, amax_dtype=amax_dtype, device=device)
    w = reference.to_torch(w_OI, dtype).to(device)
    with _COMPILER, torch.no_grad():
        parts, error, norm = _compiled(scheme)(w)
    return QuantizedRows({name: reference.to_numpy(part) for name, part in parts.items()}, float(error), float(norm))


@functools.cache
def agrees(scheme: str, dtype: str, device: str) -> bool:
    """Whether the compiled operations give the reference's bytes here; found out once, by doing both."""
    if SCHEMES[scheme].layout not in ("int4", "plain"):
        return False
    w = _every_kind().to(reference.torch_dtype(dtype)).to(device)
    want = reference.quantize_weight(w, scheme)
    want.pop("weight_shape", None)
    try:
        with torch.no_grad():
            got, _, _ = _compiled(scheme)(w)
    except (ImportError, RuntimeError) as error:  # no Triton, no C++ compiler, a device it does not know
        LOG.warning("%s on %s: cannot be compiled (%s); the reference is used", scheme, device, str(error).partition("\n")[0])
        return False
    differ = [
        name for name, part in want.items() if reference.to_numpy(got[name]).tobytes() != reference.to_numpy(part).tobytes()
    ]
    if differ:
        LOG.warning("%s on %s: compiled code rounds %s differently; the reference is used", scheme, device, ", ".join(differ))
    return not differ


@functools.cache
def _compiled(scheme: str) -> Compiled:
    operations = functools.partial(_operations, row=SCHEMES[scheme])
    made: Compiled = torch.compile(operations, dynamic=True, options=OPTIONS)
    return made


def _every_kind() -> Tensor:
    """[264, 384] FP64: normal weights over all exponents of FP32 and FP16, a zero and a constant row, one sign, ties."""
    w = torch.randn(264, 384, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    w[:120] *= torch.logspace(-140, 120, 120, 2, dtype=torch.float64)[:, None]
    w[120:160] *= torch.logspace(-30, 14, 40, 2, dtype=torch.float64)[:, None]
    w[160], w[161], w[162:170] = 0, -0.37, w[162:170].abs()
    w[170:180] = torch.arange(-192, 192, dtype=torch.float64) / 64
    return w.clamp(-60000, 60000)


# ------------------------------------------------------------------------------------------------ operations
def _operations(w_OI: Tensor, *, row: Scheme) -> tuple[Parts, Tensor, Tensor]:
    """(parts, sum of squared errors, sum of squares), each step rounded to the dtype of w_OI as compressed-tensors does."""
    if row.layout == "int4":
        parts, dequantized = _int4(w_OI, row)
    else:
        parts, dequantized = _plain(w_OI, row)
    wide = w_OI.double()
    return parts, (dequantized.double() - wide).square().sum(), wide.square().sum()


def _nonzero(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, torch.finfo(scale.dtype).eps, scale)


def _int4(w_OI: Tensor, row: Scheme) -> tuple[Parts, Tensor]:
    num_rows, columns = w_OI.shape
    w = w_OI.reshape(num_rows, -1, columns if row.group_size is None else row.group_size)
    parts: Parts = {}
    if row.symmetric:
        scale = _nonzero(w.abs().amax(-1, keepdim=True) / 7.5)
        q = (w / scale).clamp(-8, 7).round()
        dequantized = q * scale
    else:
        low, high = w.amin(-1, keepdim=True).clamp_max(0), w.amax(-1, keepdim=True).clamp_min(0)
        raw = (high - low) / 15
        zero = (-8 - low / raw).clamp(-8, 7).round()
        zero = torch.where((low == 0) & (raw == 0), torch.zeros_like(zero), zero)
        scale = _nonzero(raw)
        q = (w / scale + zero).clamp(-8, 7).round()
        dequantized = (q - zero) * scale
        codes = torch.nn.functional.pad(zero.squeeze(-1).to(torch.int32) + 8, (0, 0, 0, -num_rows % 8))
        parts["weight_zero_point"] = _packed(codes.T.contiguous()).T.contiguous()
    parts["weight_packed"] = _packed(q.to(torch.int32).reshape(num_rows, columns) + 8)
    parts["weight_scale"] = scale.squeeze(-1)
    return parts, dequantized.reshape(num_rows, columns)


def _packed(codes: Tensor) -> Tensor:
    """Codes 0-15, int32, eight of a row -> one int32, the first lowest."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=codes.device)
    return (codes.reshape(codes.shape[0], -1, 8) << shifts).sum(-1, dtype=torch.int32)


def _plain(w_OI: Tensor, row: Scheme) -> tuple[Parts, Tensor]:
    num_rows, columns = w_OI.shape
    if row.block_rows > 1:
        assert row.group_size is not None
        height, width = row.block_rows, row.group_size
        padded = torch.nn.functional.pad(w_OI, (0, -columns % width, 0, -num_rows % height))
        blocks = padded.reshape(padded.shape[0] // height, height, padded.shape[1] // width, width)
        largest = blocks.abs().amax((1, 3))
    else:
        blocks = w_OI
        largest = w_OI.abs().amax(-1, keepdim=True)
    low, high = (-128, 127) if row.weight_dtype == "I8" else (-448, 448)
    scale = _nonzero(largest / ((high - low) / 2))
    spread = scale[:, None, :, None] if row.block_rows > 1 else scale
    q = (blocks / spread).clamp(low, high)
    q = q.round().to(torch.int8) if row.weight_dtype == "I8" else q.to(torch.float8_e4m3fn)
    dequantized = q.to(w_OI.dtype) * spread
    if row.block_rows > 1:
        q, dequantized = (x.reshape(padded.shape)[:num_rows, :columns] for x in (q, dequantized))
    return {"weight": q.contiguous(), "weight_scale": scale}, dequantized
