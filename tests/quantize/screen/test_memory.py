"""Memory that weights lie in."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch

from assay_quantize.screen.memory import empty_tensor


@pytest.mark.parametrize("shape", [(3, 5), (7, 400, 512), (2 << 20,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_a_tensor_like_any_other(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = empty_tensor(shape, dtype, "cpu")
    assert (tuple(tensor.shape), tensor.dtype, tensor.is_contiguous()) == (shape, dtype, True)
    values = torch.arange(tensor.numel()).remainder(251).to(dtype).view(shape)
    tensor.copy_(values)
    assert torch.equal(tensor, values) and torch.equal(torch.nn.Parameter(tensor, requires_grad=False), values)


def test_its_memory_goes_with_it() -> None:
    size = 256 << 20
    before = _resident_bytes()
    tensor = empty_tensor((size,), torch.uint8, "cpu")
    part = tensor[-1:].fill_(1)
    tensor.fill_(1)
    assert _resident_bytes() - before > 0.9 * size
    del tensor
    assert int(part) == 1 and _resident_bytes() - before > 0.9 * size
    del part
    assert _resident_bytes() - before < 0.1 * size


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
