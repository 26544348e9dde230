"""Fused kernels against the definition, byte for byte: INT4, INT8, FP8 with float scales (FP4 and MX: in another file)."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import numpy as np
import pytest
from kernel_cases import DTYPES, KINDS, assert_same_parts, close, weight

from assay_quantize.formats.schemes import INPUT_LEAVES, SCHEMES, output_tensors
from assay_quantize.kernels import amax_rows, error_rows, needs_amax, quantize_rows, reference, row_multiple

SCHEMES_HERE = [name for name, row in SCHEMES.items() if row.layout in ("int4", "plain")]
NUMPY = {"BF16": "uint16", "F16": "float16", "F32": "float32", "I32": "int32", "I8": "int8", "F8_E4M3": "uint8"}


def shapes(scheme: str) -> tuple[tuple[int, int], ...]:
    """One shape that everything divides, and one that blocks and packs of rows (or columns, where they may be) do not."""
    row = SCHEMES[scheme]
    if row.block_rows > 1:
        return (256, 256), (200, 300)
    return (64, 256), (13, 104) if row.group_size is None else (13, 3 * row.group_size)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", SCHEMES_HERE)
def test_fused_is_the_reference_bit_for_bit(scheme: str, dtype: str) -> None:
    """Every byte of every part; the sums of errors while quantizing, and again from what is stored."""
    for shape in shapes(scheme):
        for kind in KINDS:
            w, what = weight(kind, shape, dtype), f"{shape} {kind}"
            amax = amax_rows(w, dtype) if needs_amax(scheme) else None
            want = quantize_rows(w, dtype, scheme, amax=amax, kernels="reference")
            got = quantize_rows(w, dtype, scheme, amax=amax)
            assert_same_parts(got, want, what)
            assert close(got.squared_error, want.squared_error) and close(got.squared_norm, want.squared_norm), what
            again, definition = (error_rows(want.parts, w, dtype, scheme, kernels=e) for e in ("fused", "reference"))
            assert close(again.squared_error, want.squared_error) and close(again.squared_norm, want.squared_norm), what
            assert again.num_non_finite == definition.num_non_finite, what
            assert (again.num_non_finite == 0) == math.isfinite(want.squared_error), what


@pytest.mark.parametrize("scheme", SCHEMES_HERE)
def test_slabs_are_the_whole(scheme: str) -> None:
    """Cut at any multiple of `row_multiple`, the parts put together are those of the whole weight, and as the planner says."""
    shape = (456, 384)
    w = weight("normal", shape, "BF16")
    amax = amax_rows(w, "BF16") if needs_amax(scheme) else None
    whole = quantize_rows(w, "BF16", scheme, amax=amax)
    planned = {o.name.removeprefix("m."): o for o in output_tensors(scheme, "m.weight", shape, "BF16")}
    for leaf in ("weight_shape", *INPUT_LEAVES):
        planned.pop(leaf, None)
    assert {n: (p.shape, p.dtype.name, p.nbytes) for n, p in whole.parts.items()} == {
        n: (o.shape, NUMPY[o.dtype], o.num_bytes) for n, o in planned.items()
    }
    step = row_multiple(scheme) * (1 if row_multiple(scheme) > 1 else 7)
    slabs = [quantize_rows(w[begin : begin + step], "BF16", scheme, amax=amax) for begin in range(0, shape[0], step)]
    for name, part in whole.parts.items():
        assert np.array_equal(np.concatenate([slab.parts[name] for slab in slabs]), part), name
    assert math.isclose(sum(slab.squared_error for slab in slabs), whole.squared_error, rel_tol=1e-12)
    assert math.isclose(sum(slab.squared_norm for slab in slabs), whole.squared_norm, rel_tol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_amax_and_weights_that_are_not_finite(dtype: str) -> None:
    w = weight("normal", (40, 256), dtype)
    assert amax_rows(w, dtype) == float(reference.to_torch(w, dtype).abs().max())
    for value in (math.nan, math.inf, -math.inf):
        bad = w.copy()
        reference.to_torch(bad, dtype)[39, 255] = value
        assert math.isnan(amax_rows(bad, dtype))
        for scheme in ("w4a16", "w4a16_asym", "w8a8", "fp8_channel", "fp8_block"):
            assert not math.isfinite(quantize_rows(bad, dtype, scheme).squared_norm)


def test_what_a_scheme_needs() -> None:
    assert {s: row_multiple(s) for s in SCHEMES if row_multiple(s) != 1} == {"fp8_block": 128, "w4a16_asym": 8}
    assert {s for s in SCHEMES if needs_amax(s)} == {"nvfp4", "nvfp4a16"}


def test_a_damaged_code_shows_in_the_error() -> None:
    w = weight("normal", (64, 256), "BF16")
    made = quantize_rows(w, "BF16", "fp8_channel")
    made.parts["weight"][7, 7] = 0x7F
    assert error_rows(made.parts, w, "BF16", "fp8_channel").num_non_finite == 1
    packed = quantize_rows(w, "BF16", "w4a16")
    packed.parts["weight_packed"][7, 7] ^= 0x70000000
    assert error_rows(packed.parts, w, "BF16", "w4a16").squared_error > packed.squared_error


@pytest.mark.slow
def test_fused_kernels_need_no_torch() -> None:
    script = """
import sys, numpy as np
from assay_quantize.kernels import amax_rows, error_rows, quantize_rows
w = np.full((128, 128), 0x3F80, np.uint16)
for scheme in ("w4a16", "fp8_block"):
    made = quantize_rows(w, "BF16", scheme)
    assert error_rows(made.parts, w, "BF16", scheme).squared_norm == 128 * 128
assert amax_rows(w, "BF16") == 1 and "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True, env={**os.environ, "PYTHONSAFEPATH": "1"}, timeout=300)
