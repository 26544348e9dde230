"""Memory that is used again and again. Asked for anew, it would be mapped, zeroed page by page and unmapped for every slab, and
what the allocator keeps of it in between would make memory grow with the number of slabs. Standard library and numpy only.
"""

from __future__ import annotations

import mmap
import threading
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Memory = NDArray[np.uint8]
HUGE_PAGE_BYTES = 2 << 20


def new_memory(num_bytes: int) -> mmap.mmap:
    """Zeros, aligned to pages; given back to the system when nothing refers to it any more."""
    memory = mmap.mmap(-1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory has no huge pages
    if num_bytes >= HUGE_PAGE_BYTES:
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def raw_bytes(values: NDArray[Any]) -> Memory:
    """The bytes of `values`, without a copy where they lie one behind the other."""
    raw: Memory = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    return raw


class BufferPool:
    """Buffers of one size, as many as are in use at once; thread-safe."""

    def __init__(self, buffer_bytes: int) -> None:
        """buffer_bytes: the most that is usually requested."""
        self._buffer_bytes = buffer_bytes
        self._free: list[Memory] = []
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> Memory:
        """A buffer of at least `num_bytes`, with anything in it."""
        with self._lock:
            for number in reversed(range(len(self._free))):
                if self._free[number].nbytes >= num_bytes:
                    return self._free.pop(number)
            if self._free:  # too small ones make room
                self._free.pop()
        return np.frombuffer(new_memory(max(num_bytes, self._buffer_bytes)), np.uint8)

    def give(self, buffer: Memory) -> None:
        """Hand a buffer back."""
        with self._lock:
            self._free.append(buffer)


class Pools(NamedTuple):
    """Memory for slabs: rows of the source, and the codes that are made of them. For one shard after the other."""

    rows: BufferPool
    codes: BufferPool


def new_pools(slab_bytes: int) -> Pools:
    """Pools for slabs of so many bytes of source, whose codes are at most half as large (larger ones get what they need)."""
    return Pools(BufferPool(slab_bytes), BufferPool(slab_bytes // 2))
