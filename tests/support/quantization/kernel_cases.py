"""Weights with every kind of difficulty, and what it means that two kernels agree on one."""

from __future__ import annotations

import math

import torch

from assay_quantize.kernels import reference
from assay_quantize.kernels.rows import Array, QuantizedRows

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}

KINDS = (
    "normal", "zero", "negative zero", "constant", "holes", "outlier", "positive", "negative", "denormal", "underflow",
    "denormal positive", "huge", "every exponent",
)  # fmt: skip


def weight(kind: str, shape: tuple[int, int], dtype: str) -> Array:
    """A weight in storage form, always the same."""
    w = torch.randn(shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    limits = torch.finfo(DTYPES[dtype])
    made = {
        "zero": lambda: 0 * w.abs(),
        "negative zero": lambda: torch.full_like(w, -0.0),
        "constant": lambda: torch.full_like(w, -0.37),
        "holes": lambda: w.masked_fill(torch.arange(shape[1]) < shape[1] // 2, 0).index_fill(0, torch.tensor([3]), 0),
        "outlier": lambda: w.index_put((torch.tensor([5]), torch.tensor([5])), torch.tensor(3000.0, dtype=torch.float64)),
        "positive": lambda: w.abs(),
        "negative": lambda: -w.abs(),
        "denormal": lambda: w * limits.tiny / 20,
        "underflow": lambda: w * limits.tiny * 20,
        "denormal positive": lambda: w.abs() * limits.tiny / 100,
        "huge": lambda: w / w.abs().max() * limits.max,
        "every exponent": lambda: w * torch.logspace(math.log2(limits.tiny) - 8, math.log2(limits.max), shape[0], 2)[:, None],
    }.get(kind, lambda: w)()
    return reference.to_numpy(made.clamp(limits.min, limits.max).to(DTYPES[dtype]))


def assert_same_parts(got: QuantizedRows, want: QuantizedRows, what: str) -> None:
    assert sorted(got.parts) == sorted(want.parts)
    for name, part in want.parts.items():
        assert (got.parts[name].dtype, got.parts[name].shape) == (part.dtype, part.shape), (what, name)
        assert got.parts[name].tobytes() == part.tobytes(), (what, name)


def close(left: float, right: float) -> bool:
    """Alike but for the order of summation; NaN and infinity both mean: not finite."""
    return math.isclose(left, right, rel_tol=1e-6) if math.isfinite(right) else not math.isfinite(left)


def relative_error(dequantized_OI: torch.Tensor, w_OI: torch.Tensor) -> float:
    """||dequantized - w|| / ||w|| (Frobenius, FP32)."""
    return float(torch.linalg.vector_norm(dequantized_OI.float() - w_OI.float()) / torch.linalg.vector_norm(w_OI.float()))
