"""The kernels that compare without rounding: against torch for every mantissa, and every bit of what is stored counts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from assay_quantize.formats.schemes import SCHEMES
from assay_quantize.kernels import amax_rows, needs_amax, quantize_rows
from assay_quantize.kernels.fused_fp4 import nvfp4_global_scale
from assay_quantize.verify.codes import is_what_rounding_gives
from assay_quantize.verify.original import Amax, bf16_value

COVERED = ("w4a16", "w4a16_channel", "fp8_block", "fp8_channel", "fp8_static", "nvfp4a16", "nvfp4")
Rows = NDArray[np.uint16]
Parts = dict[str, NDArray[np.generic]]


def to_bf16(values: NDArray[np.floating]) -> Rows:
    made: Rows = torch.tensor(values, dtype=torch.float32).to(torch.bfloat16).view(torch.uint16).numpy()
    return made


def made_of(w_OI: Rows, scheme: str, kernels: str = "fused") -> tuple[Parts, float | None]:
    """Parts, and the global scale."""
    amax = amax_rows(w_OI, "BF16") if needs_amax(scheme) else None
    made = quantize_rows(w_OI, "BF16", scheme, amax=amax, kernels="reference" if kernels == "reference" else "fused")
    return made.parts, None if amax is None else Amax(amax, "BF16").global_scale()


def looked(parts: Parts, w_OI: Rows, scheme: str, global_scale: float | None) -> bool | None:
    return is_what_rounding_gives(parts, w_OI, "BF16", scheme, global_scale=global_scale)


def weights(kind: str) -> Rows:
    """130 rows of 512 columns: a ragged block of FP8."""
    generator = np.random.default_rng(3)
    w = generator.standard_normal((130, 512)) * 0.02
    if kind == "outliers":
        w *= np.exp2(generator.integers(-8, 8, w.shape))
    elif kind == "zeros":
        w[generator.random(w.shape) < 0.7] = 0
        w[5:30] = 0
        w[:, 256:384] = -0.0
    elif kind == "powers":  # quotients on ties
        w = np.exp2(generator.integers(-12, 3, w.shape)) * generator.choice([-1.75, -1.5, -1, 1, 1.25, 1.5], w.shape)
    elif kind == "one sign":
        w = -abs(w)
    return to_bf16(w)


@pytest.mark.parametrize("kind", ["normal", "outliers", "zeros", "powers", "one sign"])
@pytest.mark.parametrize("scheme", COVERED)
def test_what_the_definition_makes_is_right(scheme: str, kind: str) -> None:
    w_OI = weights(kind)
    parts, global_scale = made_of(w_OI, scheme, "reference")
    parts.pop("input_global_scale", None)
    assert looked(parts, w_OI, scheme, global_scale) is True


@pytest.mark.parametrize("size", [2.0**-133, 2.0**-126, 2.0**-100, 2.0**-31, 2.0**31, 2.0**112, 2.0**126])
@pytest.mark.parametrize("scheme", COVERED)
def test_sizes_at_the_edge(scheme: str, size: float) -> None:
    """Right, or not decided; NVFP4 decides them all, and the others those of ordinary size."""
    w_OI = to_bf16((np.random.default_rng(5).random((8, 256)) - 0.5) * 2 * size)
    for rows in (w_OI, np.where(np.arange(256) == 70, w_OI, 0).astype(np.uint16), np.full_like(w_OI, w_OI[0, 0])):
        parts, global_scale = made_of(rows, scheme, "reference")
        parts.pop("input_global_scale", None)
        found = looked(parts, rows, scheme, global_scale)
        assert found is True if scheme.startswith("nvfp4") else found is not False


@pytest.mark.parametrize("scheme", COVERED)
def test_every_bit_counts(scheme: str) -> None:
    """Any bit of any part: each byte of the first and the last rows, and a thousand others."""
    w_OI, generator = weights("normal"), np.random.default_rng(4)
    parts, global_scale = made_of(w_OI, scheme)
    for name, part in parts.items():
        raw = part.reshape(-1).view(np.uint8)
        drawn = generator.integers(0, raw.size, 1000)
        for place in {0, 1, 2, 3, raw.size - 1, *drawn[: raw.size].tolist()}:
            bit = np.uint8(1 << int(generator.integers(8)))
            raw[place] ^= bit
            assert looked(parts, w_OI, scheme, global_scale) is False, f"{name}: byte {place}, bit {bit}"
            raw[place] ^= bit
    assert looked(parts, w_OI, scheme, global_scale) is True


@pytest.mark.parametrize("scheme", ["w4a16_channel", "fp8_channel"])
def test_every_quotient_of_mantissas(scheme: str) -> None:
    """Each of 128 mantissas by each of 128, over 17 powers of two and both signs: as torch divides and rounds BF16."""
    mantissas = np.arange(128, dtype=np.uint16)
    code_range = 7.5 if scheme == "w4a16_channel" else 448
    below = np.concatenate([((127 - power << 7) | mantissas) for power in range(17)]).astype(np.uint16)
    row_values = np.concatenate([below, below | 0x8000])
    w_OI = np.tile(row_values, (128, 1))
    top = to_bf16(np.float32(2) * (1 + mantissas / 128)) + np.uint16(0)
    w_OI = np.ascontiguousarray(np.concatenate([np.repeat(top[:, None], 128, 1), w_OI], axis=1))
    parts, _ = made_of(w_OI, scheme, "reference")
    assert looked(parts, w_OI, scheme, None) is True
    w, scale = (torch.from_numpy(x).view(torch.bfloat16) for x in (w_OI, parts["weight_scale"].view(np.uint16)))
    assert torch.equal(scale, (w.abs().amax(1, keepdim=True) / code_range)) and len(torch.unique(scale)) >= 64
    if scheme == "fp8_channel":
        codes = (w / scale).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        assert np.array_equal(codes, parts["weight"])


@pytest.mark.parametrize("outlier", [1.0, 3.0, 20.0, 500.0])
@pytest.mark.parametrize("scheme", ["fp8_block", "fp8_channel"])
def test_normal_and_denormal_codes_side_by_side(scheme: str, outlier: float) -> None:
    """Codes of all magnitudes of E4M3, in pieces that are all normal and in others; each bit counts in both."""
    generator = np.random.default_rng(11)
    w = generator.standard_normal((128, 512)) * 0.02
    w[:, ::128] = 0.02 * outlier
    w[:64] = np.where(abs(w[:64]) < outlier / 1024, outlier / 1024, w[:64])  # the upper half has none that is denormal
    w_OI = to_bf16(w)
    parts, _ = made_of(w_OI, scheme, "reference")
    assert looked(parts, w_OI, scheme, None) is True
    for row in (3, 100):
        for column in generator.integers(0, 512, 40).tolist():
            bit = np.uint8(1 << int(generator.integers(8)))
            parts["weight"].view(np.uint8)[row, column] ^= bit
            assert looked(parts, w_OI, scheme, None) is False, f"row {row}, column {column}, bit {bit}"
            parts["weight"].view(np.uint8)[row, column] ^= bit


@pytest.mark.parametrize("scheme", COVERED)
def test_what_is_not_finite_is_not_decided(scheme: str) -> None:
    for value in (0x7F80, 0xFF80, 0x7FC0):
        w_OI = weights("normal")
        parts, global_scale = made_of(w_OI, scheme)
        w_OI[77, 300] = value
        assert looked(parts, w_OI, scheme, global_scale) is None


def test_what_is_not_covered_is_not_decided() -> None:
    small = weights("normal")
    for scheme in sorted(SCHEMES.keys() - set(COVERED)):
        assert looked(made_of(small, scheme)[0], small, scheme, None) is None
    tiny = to_bf16(np.full((2, 128), 2.0**-110))
    assert looked(made_of(tiny, "w4a16")[0], tiny, "w4a16", None) is None
    wide = np.full((2, 128), 0.5, np.float32)
    parts = quantize_rows(wide, "F32", "w4a16").parts
    assert is_what_rounding_gives(parts, wide, "F32", "w4a16") is None


def test_the_global_scale_is_that_of_the_kernels() -> None:
    for dtype in ("BF16", "F32"):
        for amax in (0.0, 2.0**-130, 0.0123291015625, 1.0, 3.0, 2.0**100):
            assert Amax(amax, dtype).global_scale() == float(nvfp4_global_scale(amax, dtype))


def test_the_largest_magnitude_comes_with_the_comparison() -> None:
    w_OI = weights("outliers")
    parts, global_scale = made_of(w_OI, "nvfp4a16")
    most_1 = np.zeros(1, np.uint16)
    assert is_what_rounding_gives(parts, w_OI, "BF16", "nvfp4a16", global_scale=global_scale, most_1=most_1)
    assert bf16_value(most_1[0]) == amax_rows(w_OI, "BF16") > 0
