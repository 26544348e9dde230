"""Fused NVFP4, MXFP4 and MXFP8 kernels against the definition in torch, llm-compressor and compressed-tensors, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.mx_utils import compress_mx_scale, decompress_mx_scale
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8, unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from compressed_tensors.quantization.utils.fp4_utils import cast_to_fp4
from llmcompressor.entrypoints.model_free.converter import ModelFreePtqConverter
from numba import njit, vectorize

from assay_quantize.formats.schemes import SCHEMES, compressed_tensors_scheme
from assay_quantize.kernels import amax_rows, error_rows, fused_fp4, needs_amax, quantize_rows, reference
from assay_quantize.kernels.rows import STORAGE, Array, QuantizedRows

TORCH = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
SMALLEST_LARGEST = {"BF16": (2.0**-133, 3.3895e38), "F16": (2.0**-24, 65504.0), "F32": (2.0**-149, 3.4028e38)}
KINDS = ("normal", "constant", "zero", "holes", "outlier", "denormal", "huge", "wide", "ties", "negative zero")
SHAPES = {"nvfp4a16": (37, 1040), "mxfp4": (37, 1120), "mxfp8": (37, 1120)}
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
        tensor = torch.from_numpy(w).to(TORCH[dtype])
    assert bool(torch.isfinite(tensor).all())
    return reference.to_numpy(tensor).astype(STORAGE[dtype], copy=False)


def both(w: Array, dtype: str, scheme: str, **given: Any) -> tuple[QuantizedRows, QuantizedRows]:
    if needs_amax(scheme):
        given.setdefault("amax", amax_rows(w, dtype))
    return quantize_rows(w, dtype, scheme, **given), quantize_rows(w, dtype, scheme, kernels="reference", **given)


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
@pytest.mark.slow
@pytest.mark.parametrize("dtype", STORAGE)
@pytest.mark.parametrize("scheme", SHAPES)
def test_parts_and_errors_are_those_of_the_definition(scheme: str, dtype: str) -> None:
    for kind in KINDS:
        w = rows_of(kind, SHAPES[scheme], dtype)
        got, want = both(w, dtype, scheme)
        assert_same(got.parts, want.parts, kind)
        assert got.squared_error == pytest.approx(want.squared_error, rel=1e-6, abs=0), kind
        assert got.squared_norm == pytest.approx(want.squared_norm, rel=1e-6, abs=0), kind
        stored = error_rows(got.parts, w, dtype, scheme)
        defined = error_rows(got.parts, w, dtype, scheme, kernels="reference")
        assert stored.num_non_finite == defined.num_non_finite, kind
        assert stored.squared_error == pytest.approx(defined.squared_error, rel=1e-12, abs=0), kind
        assert stored.squared_norm == pytest.approx(want.squared_norm, rel=1e-12, abs=0), kind


@pytest.mark.slow
@pytest.mark.parametrize("dtype", STORAGE)
@pytest.mark.parametrize("scheme", ["nvfp4a16", "mxfp4", "mxfp8"])
def test_parts_are_those_of_llm_compressor(scheme: str, dtype: str) -> None:
    """Its data-free path. FP16 with a power-of-two scale is left out: there it rounds the scale to FP16 (see test_schemes)."""
    kinds = [k for k in KINDS if dtype != "F16" or scheme == "nvfp4a16" or k in ("normal", "constant", "outlier", "ties")]
    for kind in kinds:
        w = rows_of(kind, SHAPES[scheme], dtype)
        amax = amax_rows(w, dtype) if needs_amax(scheme) else None
        assert_same(quantize_rows(w, dtype, scheme, amax=amax).parts, llm_compressor(w, dtype, scheme), kind)


@pytest.mark.parametrize("scheme", ["nvfp4a16", "mxfp4", "mxfp8"])
def test_errors_are_those_of_decompressed_weights(scheme: str) -> None:
    w = rows_of("outlier", SHAPES[scheme], "BF16")
    made = quantize_rows(w, "BF16", scheme, amax=amax_rows(w, "BF16") if needs_amax(scheme) else None)
    parts = {name: torch.from_numpy(part) for name, part in made.parts.items()}
    fp8 = "weight_scale" if scheme == "nvfp4a16" else "weight"
    parts = {name: part.view(torch.float8_e4m3fn) if name == fp8 else part for name, part in parts.items()}
    compressor = BaseCompressor.get_value_from_registry(SCHEMES[scheme].format)
    dense = compressor.decompress(parts, compressed_tensors_scheme(scheme))["weight"]
    assert dense.dtype == torch.bfloat16
    source = reference.to_torch(w, "BF16").double()
    assert made.squared_error == pytest.approx(float((dense.double() - source).square().sum()), rel=1e-6)
    assert made.squared_norm == pytest.approx(float(source.square().sum()), rel=1e-6)


@pytest.mark.parametrize("scheme", ["nvfp4a16", "mxfp4", "mxfp8"])
def test_slabs_make_the_parts_of_the_whole(scheme: str) -> None:
    w = rows_of("wide", SHAPES[scheme], "BF16")
    amax = amax_rows(w, "BF16") if needs_amax(scheme) else None
    whole = quantize_rows(w, "BF16", scheme, amax=amax)
    slabs = [quantize_rows(w[a:b], "BF16", scheme, amax=amax) for a, b in ((0, 1), (1, 20), (20, 37))]
    for name, part in whole.parts.items():
        pieces = [slab.parts[name] for slab in slabs]
        assert np.array_equal(pieces[0] if name == "weight_global_scale" else np.concatenate(pieces), part)
    assert sum(slab.squared_error for slab in slabs) == pytest.approx(whole.squared_error, rel=1e-12)


def test_fused_group_shares_the_global_scale_and_llm_compressor_does_not() -> None:
    """The one intended difference: gate and up of an expert have the global scale of the larger one."""
    gate = rows_of("normal", (64, 256), "BF16")
    up = reference.to_numpy(3 * reference.to_torch(gate, "BF16").flip(1))
    amax = max(amax_rows(w, "BF16") for w in (gate, up))
    ours = [quantize_rows(w, "BF16", "nvfp4a16", amax=amax) for w in (gate, up)]
    theirs = [llm_compressor(w, "BF16", "nvfp4a16") for w in (gate, up)]
    shared = [float(made.parts["weight_global_scale"][0]) for made in ours]
    alone = [float(parts["weight_global_scale"][0]) for parts in theirs]
    assert shared == [alone[1], alone[1]] and alone[0] > alone[1]  # the larger magnitude has the smaller scale
    assert_same(ours[1].parts, theirs[1], "up is the larger: as if alone")
    assert not np.array_equal(ours[0].parts["weight_scale"], theirs[0]["weight_scale"])
    for w, made in zip((gate, up), ours, strict=True):
        assert_same(made.parts, quantize_rows(w, "BF16", "nvfp4a16", amax=amax, kernels="reference").parts, "shared")
        assert (made.squared_error / made.squared_norm) ** 0.5 < 0.1


@pytest.mark.slow
def test_members_of_different_dtypes_share_an_fp32_scale() -> None:
    amax, scales = 3.1, []
    for dtype in STORAGE:
        got, want = both(rows_of("normal", (8, 64), dtype), dtype, "nvfp4a16", amax=amax, amax_dtype="F32")
        assert_same(got.parts, want.parts, dtype)
        scales.append(float(got.parts["weight_global_scale"][0]))
    assert len(set(scales)) == 1


@pytest.mark.parametrize("bad", [0x7F80, 0xFF80, 0x7FC0])
def test_weights_that_are_not_finite_show_in_the_norm(bad: int) -> None:
    for scheme in ("nvfp4a16", "mxfp4", "mxfp8"):
        w = rows_of("normal", (4, 1056), "BF16")
        w[3, 1055] = bad
        made = quantize_rows(w, "BF16", scheme, amax=3.0 if needs_amax(scheme) else None)
        assert not np.isfinite(made.squared_norm), scheme


@pytest.mark.parametrize("scheme", ["nvfp4a16", "mxfp4", "mxfp8"])
def test_damaged_scales_are_counted_as_by_the_definition(scheme: str) -> None:
    """Every byte a scale can be, NaN and infinity among them."""
    w = rows_of("normal", (16, 512 if scheme != "nvfp4a16" else 256), "BF16")
    parts = dict(quantize_rows(w, "BF16", scheme, amax=amax_rows(w, "BF16") if needs_amax(scheme) else None).parts)
    parts["weight_scale"] = np.arange(256, dtype=np.uint8).reshape(16, 16)
    damaged = [parts, *(parts | {"weight_global_scale": np.array([g], np.float32)} for g in (0, np.inf, np.nan))]
    for made in damaged if scheme == "nvfp4a16" else damaged[:1]:
        got, want = error_rows(made, w, "BF16", scheme), error_rows(made, w, "BF16", scheme, kernels="reference")
        assert got.num_non_finite == want.num_non_finite > 0
        assert got.squared_error == pytest.approx(want.squared_error, rel=1e-12, nan_ok=True)


# ------------------------------------------------------------------------------------------------ single steps
def every_bf16() -> Array:
    """Every finite BF16 number as FP32."""
    x = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
    return x[np.isfinite(x)]


def over(function: Any, array: Array) -> Array:
    made: Array = vectorize(lambda x: function(x))(array)
    return made


def test_e2m1_codes_and_values_are_compressed_tensors() -> None:
    """Over every BF16 magnitude and the FP32 numbers beside it."""
    near = [np.nextafter(every_bf16(), np.float32(d)) for d in (-np.inf, np.inf)]
    x = np.abs(np.concatenate([every_bf16(), *near]))
    x = x[np.isfinite(x)]
    want = cast_to_fp4(torch.from_numpy(x).clone())
    assert np.array_equal(over(njit(lambda v: fused_fp4.round_e2m1(v)[1]), x), want.numpy())
    codes = over(njit(lambda v: fused_fp4.round_e2m1(v)[0]), x)
    pairs = np.stack([codes, np.zeros_like(codes)], axis=1)
    packed = pack_fp4_to_uint8(torch.stack([want, torch.zeros_like(want)], dim=1))
    assert np.array_equal(pairs[:, 0], packed.numpy()[:, 0])
    assert sorted(set(codes.tolist())) == list(range(8))


def test_e2m1_values_of_codes_are_compressed_tensors() -> None:
    want = unpack_fp4_from_uint8(torch.arange(16, dtype=torch.uint8).reshape(1, 16), 1, 32)[0, ::2].float().numpy()
    assert np.array_equal(over(fused_fp4.e2m1_to_f32, np.arange(16, dtype=np.uint8)).view(np.uint32), want.view(np.uint32))


def test_every_stored_exponent_is_the_scale_compressed_tensors_reads() -> None:
    stored = np.arange(256, dtype=np.uint8)
    want = decompress_mx_scale(torch.from_numpy(stored)).float().numpy()
    assert np.array_equal(over(fused_fp4.mx_to_f32, stored), want)


@pytest.mark.parametrize(("scheme", "offset"), [("mxfp4", 2), ("mxfp8", 8)])
def test_exponents_of_every_amax_are_compressed_tensors(scheme: str, offset: int) -> None:
    amax = every_bf16()
    amax = amax[~np.signbit(amax)]
    weights = compressed_tensors_scheme(scheme).weights
    assert weights is not None
    scale, _ = calculate_qparams(*(torch.from_numpy(s * amax).bfloat16() for s in (-1, 1)), weights)
    want = compress_mx_scale(scale, torch.uint8).numpy()
    exponents = over(fused_fp4.mx_exponent, amax)
    got = np.array([fused_fp4.mx_scale(np.int32(e), np.int32(offset)) for e in exponents.tolist()])
    assert np.array_equal(got[:, 0], want)
    assert np.array_equal(got[:, 1].astype(np.float32), (1 / scale.float()).numpy())
    assert got[-1, 1] == 0 and got[-1, 0] == 127 and got[0, 0] == 0  # an infinite scale; none


@pytest.mark.parametrize("dtype", STORAGE)
def test_global_scale_of_every_amax_is_compressed_tensors(dtype: str) -> None:
    amax = torch.from_numpy(every_bf16()).to(TORCH[dtype])
    amax = amax[torch.isfinite(amax) & (amax >= 0)].unique()[:: 1 if dtype == "F16" else 3]
    want = [float(generate_gparam(-x.reshape(1), x.reshape(1))) for x in amax]
    assert [float(fused_fp4.nvfp4_global_scale(float(x), dtype)) for x in amax] == want
    assert want[0] == 1  # no weight at all


# ------------------------------------------------------------------------------------------------ many
@pytest.mark.slow
@pytest.mark.parametrize("dtype", STORAGE)
@pytest.mark.parametrize("scheme", ["nvfp4a16", "mxfp4", "mxfp8"])
def test_thousands_of_groups_of_any_exponent(scheme: str, dtype: str) -> None:
    """Random bits: every exponent and mantissa; each row within its own range of exponents, and its own global scale."""
    rng = np.random.default_rng(7)
    bits = {"BF16": (7, 255), "F16": (10, 31), "F32": (23, 255)}[dtype]
    shape = (2000, 64)
    top = rng.integers(0, bits[1], (shape[0], 1))
    exponent = np.clip(top - rng.integers(0, 12, shape), 0, bits[1] - 1)
    mantissa = rng.integers(0, 1 << bits[0], shape)
    sign = rng.integers(0, 2, shape) << (31 if dtype == "F32" else 15)
    w = (sign | (exponent << bits[0]) | mantissa).astype(np.uint32 if dtype == "F32" else np.uint16).view(STORAGE[dtype])
    order = np.argsort(top[:, 0])
    for rows in np.array_split(order, 20):
        slab = np.ascontiguousarray(w[rows])
        got, want = both(slab, dtype, scheme)
        assert_same(got.parts, want.parts, f"exponents up to {top[rows].max()}")
        assert got.squared_error == pytest.approx(want.squared_error, rel=1e-6, nan_ok=True)
