"""Reading past the page cache: what lies in it (mincore(2)), and ranges of files that are read ahead (`O_DIRECT`).

A disk fills huge pages without the processor. Through the cache every page must first be found, on a virtual machine often be
given by the host, and be copied; and other things that lie there are pushed out
(docs/decisions/storage.md, 077).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from assay.safe_files import read_fully
from assay_quantize.storage.buffers import HUGE_PAGE_BYTES, BufferPool, Memory
from assay_quantize.storage.direct_file import BLOCK_BYTES

MOST_READS = 8
"""Reads under way at once: a disk behind a network, or many disks, need more than one to be busy."""


LATE_S, PENALTY = 0.02, 8
"""A disk for which anyone waits longer than that for a slab is spared the next ones, if they lie in the cache."""


class Residency:
    """Which parts of a file lie in the page cache; no page of it is ever touched.

    is_known: the kernel tells. Of files that are not ours it says that all of it is there.
    """

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        self._address, self._num_bytes = None, num_bytes
        if os.fstat(descriptor).st_uid == os.geteuid() or os.access(f"/proc/self/fd/{descriptor}", os.W_OK):
            # not Python's own mmap: it keeps a second descriptor of every file
            address = _libc().mmap(None, num_bytes, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
            self._address = None if address == _MAP_FAILED else address
        self.is_known = self._address is not None and self._ask(0, 1) is not None

    def close(self) -> None:
        """Let the file go."""
        if self._address is not None:
            _libc().munmap(self._address, self._num_bytes)
            self._address, self.is_known = None, False

    def is_cached(self, begin: int, size: int) -> bool:
        """Whether all of the `size` bytes from `begin` on are there. True if it is not known."""
        return not self.is_known or self._ask(begin, size) is not False

    def seems_cached(self, begin: int, size: int) -> bool:
        """The same of its first and last byte: what is read in one go comes and goes together, mostly."""
        return self.is_cached(begin, 1) and self.is_cached(begin + size - 1, 1)

    def _ask(self, begin: int, size: int) -> bool | None:
        assert self._address is not None
        first = begin // mmap.PAGESIZE * mmap.PAGESIZE
        num_bytes = begin + size - first
        residency = np.zeros(-(-num_bytes // mmap.PAGESIZE), np.uint8)
        failed = _libc().mincore(self._address + first, num_bytes, residency.ctypes.data)
        return None if failed else bool((residency & 1).all())


_MAP_FAILED = ctypes.c_void_p(-1).value


@functools.cache
def _libc() -> ctypes.CDLL:
    library = ctypes.CDLL(None)
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    library.mmap.restype, library.mmap.argtypes = pointer, (pointer, size, number, number, number, ctypes.c_long)
    library.munmap.argtypes, library.mincore.argtypes = (pointer, size), (pointer, size, pointer)
    return library


def open_direct(descriptor: int) -> int | None:
    """The same file for reading past the page cache; None where that is not known."""
    with contextlib.suppress(OSError, AttributeError):
        return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    return None


def has_direct(descriptor: int) -> bool:
    """Whether a file can be opened for reading past the page cache."""
    direct = open_direct(descriptor)
    if direct is not None:
        os.close(direct)
    return direct is not None


class Loans(threading.local):
    """Buffers in which a thread looks at what was read ahead, instead of copying it."""

    def __init__(self) -> None:
        self._held: list[tuple[BufferPool, Memory]] = []

    def add(self, pool: BufferPool, buffer: Memory) -> None:
        self._held.append((pool, buffer))

    def give_back(self) -> None:
        """Nothing that this thread was lent is looked at any more."""
        while self._held:
            pool, buffer = self._held.pop()
            pool.give(buffer)


class ReadAhead:
    """Ranges of files that will be asked for soon. Each that was begun is to be taken; safe to use from many threads."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(MOST_READS, thread_name_prefix="assay-read")
        self._buffers = BufferPool(0)
        self._reading: dict[tuple[int, int, int], Future[Memory | None]] = {}
        self._penalty = 0

    def close(self) -> None:
        """Wait for what is being read, and forget it."""
        self._threads.shutdown(cancel_futures=True)
        self._reading.clear()

    def begin(self, descriptor: int, begin: int, size: int) -> None:
        """Read `size` bytes from `begin` on of an open file; returns at once."""
        key = (descriptor, begin, size)
        if key not in self._reading:
            self._reading[key] = self._threads.submit(self._read, descriptor, begin, size)

    def take(self, descriptor: int, begin: int, out: memoryview) -> bool:
        """Copy the range that was begun at `begin`, as long as `out`, to `out`. False: not begun, or it cannot be read so."""
        buffer = self._claim(descriptor, begin, len(out))
        if buffer is None:
            return False
        shift = begin % BLOCK_BYTES
        np.frombuffer(out, np.uint8)[:] = buffer[shift : shift + len(out)]  # numpy lets other threads run meanwhile
        self._buffers.give(buffer)
        return True

    def lend(self, descriptor: int, begin: int, size: int, loans: Loans) -> Memory | None:
        """The range that was begun, where it lies, until `loans` are given back. None: not begun, or it cannot be read so."""
        buffer = self._claim(descriptor, begin, size)
        if buffer is None:
            return None
        loans.add(self._buffers, buffer)
        shift = begin % BLOCK_BYTES
        return buffer[shift : shift + size]

    def keeps_up(self) -> bool:
        """Whether what was begun was there, almost, when it was taken; no, for some calls after it was not."""
        self._penalty = max(0, self._penalty - 1)
        return not self._penalty

    def _claim(self, descriptor: int, begin: int, size: int) -> Memory | None:
        future = self._reading.pop((descriptor, begin, size), None)
        if future is None:
            return None
        if not future.done():
            started = time.monotonic()
            buffer = future.result()
            if time.monotonic() - started > LATE_S:
                self._penalty = PENALTY
            return buffer
        return future.result()

    def _read(self, descriptor: int, begin: int, size: int) -> Memory | None:
        """A buffer with the blocks that the range lies in; None: the caller reads it, and sees what is wrong."""
        direct = open_direct(descriptor)  # for every range: kept open, it would double the descriptors of hundreds of shards
        if direct is None:
            return None
        first, end = begin // BLOCK_BYTES * BLOCK_BYTES, begin + size
        num_bytes = -(-(end - first) // BLOCK_BYTES) * BLOCK_BYTES
        buffer, done = self._buffers.take(buffer_bytes(size)), 0
        try:
            with contextlib.suppress(OSError):
                done = read_fully(direct, buffer[:num_bytes].data, first, block_bytes=BLOCK_BYTES)
        finally:
            os.close(direct)
        if first + done >= end:
            return buffer
        self._buffers.give(buffer)
        return None


def is_aligned(begin: int) -> bool:
    """Whether numbers of 32 bits that begin there in a file are aligned where they are lent."""
    return begin % 4 == 0


def buffer_bytes(range_bytes: int) -> int:
    """Memory for a range of so many bytes: whole huge pages, wherever its first block begins."""
    return -(-(range_bytes + 2 * BLOCK_BYTES) // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
