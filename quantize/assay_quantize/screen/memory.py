"""What a pass may hold in memory, and which experts of a layer it therefore holds at once."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor

from assay_quantize.storage.resident import available_bytes

FOR_WEIGHTS = 0.8
"""Share of the memory that weights may take; the rest is for what flows through them."""


class Budget(NamedTuple):
    """Memory of a device. limit_bytes: for weights and what flows; None: what is free."""

    device: str
    limit_bytes: int | None = None

    def left_bytes(self, held_bytes: int) -> int:
        """For weights, beside the `held_bytes` of them that are held."""
        left = int(FOR_WEIGHTS * _free_bytes(self.device))
        return left if self.limit_bytes is None else min(left, int(FOR_WEIGHTS * self.limit_bytes) - held_bytes)


def _free_bytes(device: str) -> int:
    if device == "cpu":
        return available_bytes()
    kept = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()  # by torch, of tensors that are gone
    return torch.cuda.mem_get_info()[0] + kept


_HUGE_PAGE_BYTES = 2 << 20


def empty_tensor(shape: Sequence[int], dtype: torch.dtype, device: str) -> Tensor:
    """As `torch.empty`; a large one on a CPU lies in huge pages where the kernel has them.

    The first touch of every page of 4 KiB takes several times as long as copying a weight there (madvise(2), MADV_HUGEPAGE).
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if device != "cpu" or num_bytes < _HUGE_PAGE_BYTES:
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(tuple(shape))


class Parts(NamedTuple):
    """A layer's weights by size. rest_bytes: of what is no expert. expert_bytes: of one; 0: there is none that could be left
    out."""

    rest_bytes: int
    expert_bytes: int = 0
    num_experts: int = 0

    @property
    def whole_bytes(self) -> int:
        return self.rest_bytes + self.num_experts * self.expert_bytes

    @property
    def least_bytes(self) -> int:
        """Without which the layer cannot run."""
        return self.rest_bytes + self.expert_bytes


class Groups(NamedTuple):
    """Experts that are held at once, beside what is no expert; none: the layer is held whole. is_read_ahead: two groups fit."""

    experts: tuple[range, ...] = ()
    is_read_ahead: bool = False


def groups_of(parts: Parts, left_bytes: int) -> Groups | None:
    """The fewest groups of which two fit, or one. None: not even one expert does."""
    if parts.whole_bytes < left_bytes:
        return Groups()
    if not parts.expert_bytes:
        return None
    num_fitting = (left_bytes - parts.rest_bytes) // parts.expert_bytes
    if num_fitting < 1:
        return None
    at_once = max(1, num_fitting // 2)
    firsts = range(0, parts.num_experts, at_once)
    experts = tuple(range(first, min(first + at_once, parts.num_experts)) for first in firsts)
    return Groups(experts, is_read_ahead=num_fitting >= 2)
