"""The compiled kernels (for GPUs) on a CPU: the same bytes as the reference, and the self-check that insists on it."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Iterator

import pytest
import torch
from kernel_cases import KINDS, assert_same_parts, close, weight

from assay_quantize.kernels import compiled, quantize_rows

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on a CPU needs g++")]


@pytest.fixture(autouse=True)
def nothing_compiled_yet() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    compiled.agrees.cache_clear()
    compiled._compiled.cache_clear()
    torch._dynamo.reset()


def test_compiled_is_the_reference_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    scheme, dtype, shape = "w4a16", "BF16", (61, 256)
    assert compiled.agrees(scheme, dtype, "cpu")
    wants = {kind: quantize_rows(weight(kind, shape, dtype), dtype, scheme, kernels="reference") for kind in KINDS}
    monkeypatch.setattr(compiled.reference, "quantize_weight", None)  # what follows is not the reference's work
    for kind, want in wants.items():
        got = compiled.quantize_rows(weight(kind, shape, dtype), dtype, scheme, device="cpu")
        assert_same_parts(got, want, kind)
        assert close(got.squared_error, want.squared_error) and close(got.squared_norm, want.squared_norm), kind


def test_operations_are_those_of_the_reference_for_every_scheme() -> None:
    """Not compiled: that the plain operations say the same as compressed-tensors."""
    schemes = [name for name, row in compiled.SCHEMES.items() if row.layout in ("int4", "plain")]
    for scheme in schemes:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            w = compiled._every_kind().to(dtype)
            want = compiled.reference.quantize_weight(w, scheme)
            parts, _, _ = compiled._operations(w, row=compiled.SCHEMES[scheme])
            for name, part in parts.items():
                assert part.dtype == want[name].dtype and part.shape == want[name].shape, (scheme, dtype, name)
                left, right = (compiled.reference.to_numpy(tensor).tobytes() for tensor in (part, want[name]))
                assert left == right, (scheme, dtype, name)


def test_a_compiler_that_rounds_differently_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without `emulate_precision_casts` inductor keeps BF16 quotients in FP32; the bytes must be the reference's even so."""
    monkeypatch.setitem(compiled.OPTIONS, "emulate_precision_casts", False)
    w = weight("normal", (64, 256), "BF16")
    with caplog.at_level(logging.WARNING, logger=compiled.__name__):
        got = compiled.quantize_rows(w, "BF16", "w4a16", device="cpu")
    assert re.search(r"w4a16 on cpu: compiled code rounds .*weight_packed.* differently; the reference is used", caplog.text)
    assert_same_parts(got, quantize_rows(w, "BF16", "w4a16", kernels="reference"), "normal")


def test_nothing_compiles(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def broken(_scheme: str) -> compiled.Compiled:
        raise RuntimeError("no compiler\nmore lines")

    monkeypatch.setattr(compiled, "_compiled", broken)
    monkeypatch.setattr(broken, "cache_clear", lambda: None, raising=False)
    w = weight("normal", (64, 256), "BF16")
    with caplog.at_level(logging.WARNING, logger=compiled.__name__):
        got = compiled.quantize_rows(w, "BF16", "w4a16", device="cpu")
    assert "w4a16 on cpu: cannot be compiled (no compiler); the reference is used" in caplog.text
    assert_same_parts(got, quantize_rows(w, "BF16", "w4a16", kernels="reference"), "normal")
