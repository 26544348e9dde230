"""Roundings and casts of the fused kernels against PyTorch's, over every 16-bit pattern and every kind of FP32."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numba import njit, vectorize

from assay_quantize.kernels import bits, sums

ALL_16_BITS = np.arange(1 << 16, dtype=np.uint16)


def every_kind_of_f32() -> np.ndarray:
    """Random bits, and the neighbourhoods of every number that BF16, FP16 and E4M3 round at; no NaN, no infinity."""
    rng = np.random.default_rng(0)
    random = rng.integers(0, 1 << 32, 1 << 20, dtype=np.uint32)
    halves = (ALL_16_BITS.astype(np.uint32) << 16)[:, None] + np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    with np.errstate(all="ignore"):
        f16 = ALL_16_BITS.view(np.float16).astype(np.float32)
        between = ((f16.astype(np.float64) + np.roll(f16, 1)) / 2).astype(np.float32)
        near = [np.nextafter(x, np.float32(d)) for x in (f16, between) for d in (-np.inf, np.inf)]
    x = np.concatenate([random.view(np.float32), halves.ravel().view(np.float32), f16, between, *near])
    return x[np.isfinite(x)]


def over(function: Any, array: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        made: np.ndarray = vectorize(lambda x: function(x))(array)
    return made


def test_16_bit_numbers_are_pytorchs_both_ways() -> None:
    bf16 = over(bits.bf16_to_f32, ALL_16_BITS)
    want = torch.from_numpy(ALL_16_BITS).view(torch.bfloat16).float().numpy()
    assert np.array_equal(bf16.view(np.uint32), want.view(np.uint32))
    f16 = over(bits.f16_to_f32, ALL_16_BITS)
    want = torch.from_numpy(ALL_16_BITS).view(torch.float16).float().numpy()
    assert np.array_equal(f16, want, equal_nan=True) and np.array_equal(np.signbit(f16), np.signbit(want))
    assert np.array_equal(over(bits.f32_to_bf16, bf16), ALL_16_BITS)
    numbers = ~np.isnan(f16)
    assert np.array_equal(over(bits.f32_to_f16, f16[numbers]), ALL_16_BITS[numbers])


@pytest.mark.parametrize(("function", "dtype"), [(bits.round_bf16, torch.bfloat16), (bits.round_f16, torch.float16)])
def test_rounding_is_pytorchs(function: Any, dtype: torch.dtype) -> None:
    x = every_kind_of_f32()
    want = torch.from_numpy(x).to(dtype).float().numpy()
    assert np.isinf(want).any() and (want == 0).any()
    assert np.array_equal(over(function, x).view(np.uint32), want.view(np.uint32))


def test_e4m3_is_pytorchs_both_ways() -> None:
    x = np.clip(every_kind_of_f32(), -448, 448)
    want = torch.from_numpy(x).to(torch.float8_e4m3fn)
    assert np.array_equal(over(bits.f32_to_e4m3, x), want.view(torch.uint8).numpy())
    assert np.array_equal(over(bits.round_e4m3, x).view(np.uint32), want.float().numpy().view(np.uint32))
    assert np.array_equal(over(njit(lambda x: bits.nearest_e4m3(x)[0]), x), want.view(torch.uint8).numpy())
    codes = np.arange(256, dtype=np.uint8)
    floats = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
    got = over(bits.e4m3_to_f32, codes)
    assert np.array_equal(got, floats, equal_nan=True) and np.isnan(got).sum() == 2


@pytest.mark.slow
def test_a_product_with_the_reciprocal_rounds_to_the_quotient() -> None:
    """Of every two BF16 significands; and of every BF16 number and a few scales, as far as codes can tell."""

    @njit
    def both(w_I: Any, scale: Any, product_I: Any, quotient_I: Any) -> None:
        narrow, wide, inverse = np.zeros(1, np.float32), np.zeros(1), sums.reciprocal(scale)
        for i in range(w_I.size):
            w = bits.load(w_I, i)
            product_I[i] = bits.round_as(w_I, sums.quotient(w_I, narrow, w, scale, inverse))
            quotient_I[i] = bits.round_as(w_I, sums.quotient(w_I, wide, w, scale, inverse))

    significands = np.arange(0x3F80, 0x4000, dtype=np.uint16)
    numbers = ALL_16_BITS[(ALL_16_BITS & 0x7F80) != 0x7F80]
    product, quotient = np.empty((2, numbers.size), np.float32)
    for scale in (significands.astype(np.uint32) << 16).view(np.float32):
        both(significands, scale, product[:128], quotient[:128])
        assert np.array_equal(product[:128], quotient[:128])
    for scale in (sums.LEAST, np.float32(2.0**-9 * 1.4296875), np.float32(3), sums.MOST):
        both(numbers, scale, product, quotient)
        same = (product == quotient) & (np.signbit(product) == np.signbit(quotient))
        assert same.all() or (np.abs(quotient[~same]) < 2.0**-126).all()
    assert sums.is_ordinary(significands, np.float32(3)) and not sums.is_ordinary(significands, np.float32(np.nan))


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_the_array_type_tells_the_dtype(dtype: str) -> None:
    @njit
    def third(w_I: Any, out_I: Any) -> None:
        for i in range(w_I.size):
            bits.store(out_I, i, bits.round_as(w_I, bits.load(w_I, i) / np.float32(3)))

    torch_dtype = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}[dtype]
    w = torch.randn(4096, generator=torch.Generator().manual_seed(0)).to(torch_dtype)
    storage = w.view(torch.uint16).numpy() if dtype == "BF16" else w.numpy()
    out = np.empty_like(storage)
    third(bits.kernel_view(storage), bits.kernel_view(out))
    want = w / 3
    assert np.array_equal(out, want.view(torch.uint16).numpy() if dtype == "BF16" else want.numpy())


@pytest.mark.slow
def test_compiled_code_on_disk_is_not_used_when_an_inlined_function_has_changed(tmp_path: Path) -> None:
    """numba itself looks at the file of the outer function only."""
    (tmp_path / "inner.py").write_text("from assay_quantize.kernels.bits import kernel\n@kernel\ndef inner(): return 1\n")
    (tmp_path / "outer.py").write_text(
        "from assay_quantize.kernels.bits import kernel\nfrom inner import inner\n@kernel\ndef outer(): return inner()\n"
    )
    script = "from outer import outer; print(outer(), sum(outer.stats.cache_hits.values()))"
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONSAFEPATH", "NUMBA_CACHE_DIR")}

    def run() -> str:
        command = [sys.executable, "-c", script]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True).stdout

    assert [run(), run()] == ["1 0\n", "1 1\n"]
    (tmp_path / "inner.py").write_text((tmp_path / "inner.py").read_text().replace("return 1", "return 22"))
    assert run() == "22 0\n"
