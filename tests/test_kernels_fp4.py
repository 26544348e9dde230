"""Fused NVFP4, MXFP4 and MXFP8 kernels against the definition in torch, llm-compressor and compressed-tensors, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme
from llmcompressor.entrypoints.model_free.converter import ModelFreePtqConverter

from assay_quantize.kernels import amax_rows, error_rows, needs_amax, quantize_rows, reference
from assay_quantize.kernels.rows import STORAGE, Array, QuantizedRows
from assay_quantize.schemes import SCHEMES

NUMPY_OF = {"BF16": np.float32, "F16": np.float16, "F32": np.float32}
SMALLEST_LARGEST = {"BF16": (2.0**-133, 3.3895e38), "F16": (2.0**-24, 65504.0), "F32": (2.0**-149, 3.4028e38)}
KINDS = ("normal", "constant", "zero", "holes", "outlier", "denormal", "huge", "wide", "ties", "negative zero")
SHAPES = {"nvfp4a16": (37, 1040), "nvfp4": (5, 528), "mxfp4": (37, 1120), "mxfp8": (37, 1120)}
"""Columns that the kernels' chunk does not divide."""


def rows_of(kind: str, shape: tuple[int, int], dtype: str) -> Array:
    """A weight in storage form."""
    rng = np.random.default_rng(KINDS.index(kind))
    small, large = SMALLEST_LARGEST[dtype]
    w = rng.standard_normal(shape)
    if kind == "constant":
        w = np.full(shape, -0.37)
    elif kind == "zero":
        w = np.zeros(shape)
    elif kind == "holes":
        w[3], w[:, : shape[1] // 2] = 0, 0
    elif kind == "outlier":
        w[5 % shape[0], 5] = 3000
    elif kind == "denormal":
        w *= small * 100
    elif kind == "huge":
        w = np.clip(w * large / 3, -large, large)
        w[:, ::7] *= 1e-3
    elif kind == "wide":  # every exponent, also within a group
        w = rng.choice([-1, 1], shape) * np.exp2(rng.uniform(np.log2(small), np.log2(large), shape))
        w[: shape[0] // 2] *= np.exp2(-rng.uniform(0, 20, (shape[0] // 2, 1)))
    elif kind == "ties":  # groups of one scale, whose quotients are the midpoints of E2M1, and what is beside them
        points = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
        near = np.array([p * f for p in points for f in (1 - 2**-8, 1, 1 + 2**-7)] + [6.0] * 11) / 64
        w = rng.choice(near, shape) * rng.choice([-1, 1], shape)
        w[:, ::16] = 6 / 64
    elif kind == "negative zero":
        w[:, 1::2], w[4 % shape[0]] = -0.0, -0.0
    with np.errstate(over="ignore"):
        tensor = torch.from_numpy(w).to({"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}[dtype])
    assert bool(torch.isfinite(tensor).all())
    return reference.to_numpy(tensor).astype(STORAGE[dtype], copy=False)


def both(w: Array, dtype: str, scheme: str, **given: Any) -> tuple[QuantizedRows, QuantizedRows]:
    if needs_amax(scheme):
        given.setdefault("amax", amax_rows(w, dtype))
    return quantize_rows(w, dtype, scheme, **given), quantize_rows(w, dtype, scheme, engine="reference", **given)


def assert_same(got: dict[str, Array], want: dict[str, Array], what: str) -> None:
    assert {n: (p.dtype, p.shape) for n, p in got.items()} == {n: (p.dtype, p.shape) for n, p in want.items()}
    for name, part in want.items():
        wrong = np.flatnonzero(got[name].view(np.uint8) != part.view(np.uint8))
        assert wrong.size == 0, f"{what}: {wrong.size} bytes of {name}, first at {wrong[:5]}"


def llm_compressor(w: Array, dtype: str, scheme: str) -> dict[str, Array]:
    config = QuantizationConfig(config_groups={"group_0": preset_name_to_scheme(SCHEMES[scheme].preset, ["Linear"])})
    made = ModelFreePtqConverter(config).process({"m.proj.weight": reference.to_torch(w, dtype).clone()})
    return {name.removeprefix("m.proj."): reference.to_numpy(value) for name, value in made.items()}


# ------------------------------------------------------------------------------------------------ whole kernels
@pytest.mark.parametrize("dtype", STORAGE)
@pytest.mark.parametrize("scheme", SHAPES)
def test_parts_and_errors_are_those_of_the_definition(scheme: str, dtype: str) -> None:
    for kind in KINDS:
        w = rows_of(kind, SHAPES[scheme], dtype)
        got, want = both(w, dtype, scheme)
        assert_same(got.parts, want.parts, kind)
        assert got.squared_error == pytest.approx(want.squared_error, rel=1e-12, abs=0), kind
        assert got.squared_norm == pytest.approx(want.squared_norm, rel=1e-12, abs=0), kind
        stored = error_rows(got.parts, w, dtype, scheme)
        defined = error_rows(got.parts, w, dtype, scheme, engine="reference")
        assert stored.num_non_finite == defined.num_non_finite, kind
        assert stored.squared_error == pytest.approx(defined.squared_error, rel=1e-12, abs=0), kind
        assert stored.squared_norm == pytest.approx(want.squared_norm, rel=1e-12, abs=0), kind
