"""A file written once, from front to back, past the page cache, by threads of its own.

Through the page cache every byte is copied by the processor into a page that must first be found, and later copied out of it:
about as long as rounding the weight took. With `O_DIRECT` the disk takes it from our memory, at a twentieth of the processor's
time, and what else lies in the cache stays there. A file system that refuses it (an old tmpfs, some network ones) is written
through the cache, as is the last piece of every file, which need not be whole blocks.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from assay_quantize.storage.buffers import new_memory

STAGE_BYTES = 2 << 20
"""The most bytes handed to the disk at once; a multiple of `BLOCK_BYTES`."""

STAGES = 4
"""Buffers of a file: one that is filled, the others written or waiting for it."""

THREADS = 2
"""Writes under way at once: a disk behind a network needs more than one to be busy."""

BLOCK_BYTES = 4096
"""What places, sizes and memory of direct writes are multiples of; no disk asks for more."""

DROP_BEHIND_BYTES = 32 << 20
"""Written through the cache, what lies further back than this need not stay there: the few pages of a file being written are
used again and again, and the fsync at the end finds little left."""

BytesLike = bytes | bytearray | memoryview


class DirectFile:
    """A new file, or one made empty. `append` from one thread at a time; nothing is safe before `sync` returns.

    It holds at most STAGES * STAGE_BYTES of memory until `sync` or `close`.
    """

    def __init__(self, path: Path, expected_bytes: int) -> None:
        """expected_bytes: about how many will come: a small file needs small buffers. Raises OSError when it cannot be made."""
        blocks = -(-expected_bytes // (2 * STAGES * BLOCK_BYTES))
        self._stage_bytes = min(STAGE_BYTES, max(1, blocks) * BLOCK_BYTES)
        self._descriptor = _open(path)
        self._is_closed = False
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="assay-write")
        self._writing: deque[tuple[mmap.mmap, Future[None]]] = deque()
        self._stage: mmap.mmap | None = None
        self._filled_bytes = 0
        self._stage_begin = 0

    def append(self, data: BytesLike) -> None:
        """Add bytes; they are copied. Waits when the disk is behind; raises OSError when an earlier write has failed."""
        source, done = np.frombuffer(data, np.uint8), 0
        while done < source.size:
            if self._stage is None:
                self._stage = self._take()
            size = min(source.size - done, len(self._stage) - self._filled_bytes)
            # numpy lets other threads run while it copies, a memoryview does not
            np.frombuffer(self._stage, np.uint8)[self._filled_bytes : self._filled_bytes + size] = source[done : done + size]
            self._filled_bytes += size
            done += size
            if self._filled_bytes == len(self._stage):
                self._submit()

    def sync(self) -> None:
        """Write the rest, wait until all of it is on the disk, and close. Raises OSError."""
        if self._filled_bytes:
            self._submit()
        while self._writing:
            self._writing.popleft()[1].result()
        os.fsync(self._descriptor)
        self.close()

    def close(self) -> None:
        """Close it as it is: without `sync`, a file that misses something."""
        if not self._is_closed:
            self._is_closed = True
            self._threads.shutdown(cancel_futures=True)
            os.close(self._descriptor)
            self._stage = None
            self._writing.clear()

    def _take(self) -> mmap.mmap:
        """A buffer, aligned to pages: a new one, or when there are enough, the one that was given away first."""
        if len(self._writing) < STAGES - 1:
            return new_memory(self._stage_bytes)
        stage, future = self._writing.popleft()
        future.result()
        return stage

    def _submit(self) -> None:
        assert self._stage is not None
        size, begin = self._filled_bytes, self._stage_begin
        self._writing.append((self._stage, self._threads.submit(self._write, self._stage, size, begin)))
        self._stage, self._filled_bytes, self._stage_begin = None, 0, begin + size

    def _write(self, stage: mmap.mmap, size: int, begin: int) -> None:
        with memoryview(stage) as whole:
            done = 0
            while done < size:
                if (size - done) % BLOCK_BYTES:
                    self._use_cache()
                with whole[done:size] as rest:
                    try:
                        done += os.pwrite(self._descriptor, rest, begin + done)
                    except OSError as error:
                        if error.errno != errno.EINVAL or not self._is_direct():
                            raise
                        self._use_cache()
        if not self._is_direct():
            # of dirty pages this advice starts the writing and drops none; those that were written since it drops
            os.posix_fadvise(self._descriptor, begin, size, os.POSIX_FADV_DONTNEED)
            if begin >= DROP_BEHIND_BYTES:
                os.posix_fadvise(self._descriptor, begin - DROP_BEHIND_BYTES, size, os.POSIX_FADV_DONTNEED)

    def _is_direct(self) -> bool:
        return bool(fcntl.fcntl(self._descriptor, fcntl.F_GETFL) & os.O_DIRECT)

    def _use_cache(self) -> None:
        """From now on through the page cache."""
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, fcntl.fcntl(self._descriptor, fcntl.F_GETFL) & ~os.O_DIRECT)


def _open(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_DIRECT, 0o666)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return os.open(path, flags, 0o666)
