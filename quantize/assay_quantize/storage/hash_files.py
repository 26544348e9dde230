"""SHA-256 of files at the speed of the disk: a thread of its own reads pieces ahead while others are hashed.

What lies in the page cache is taken from there. What does not is read past it (`O_DIRECT`) into huge pages, which the disk
fills without the processor; that also leaves the cache to others. Where a file system cannot do that, files are read through
the cache, with the kernel's read-ahead.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

from assay.atomic_files import naming
from assay.errors import CheckpointError
from assay.safe_files import open_inside, read_fully
from assay_quantize.storage.buffers import HUGE_PAGE_BYTES, new_memory
from assay_quantize.storage.past_cache import Residency, open_direct

PIECE_BYTES = HUGE_PAGE_BYTES
PIECES_AHEAD = 3
"""Pieces that are read, or waiting to be hashed, beside the one that is hashed."""

MOST_AT_ONCE = 8
"""Files worth hashing at once: 12 GB/s of SHA-256 or more, in 64 MiB of memory."""


def hash_file(
    folder: Path, name: str, on_piece: Callable[[int], None] | None = None, *, is_needed_again: bool = False
) -> str:  # fmt: skip
    """SHA-256 (hex) of the file `name` in `folder`, read once. on_piece: told the bytes of every piece that was hashed.

    is_needed_again: soon, by a reader that shall find it in the page cache.
    Holds (PIECES_AHEAD + 1) * PIECE_BYTES of memory. Raises OSError, with its path, or CheckpointError (a link out of the
    folder), when the file cannot be read or became shorter meanwhile.
    """
    digest = hashlib.sha256()
    with (
        naming(folder / name),
        open_inside(folder, name) as file,
        _Reader(file.fileno(), folder / name, past_cache=not is_needed_again) as reader,
        contextlib.closing(reader.pieces()) as pieces,
    ):
        for piece in pieces:
            digest.update(piece)
            if on_piece is not None:
                on_piece(len(piece))
    return digest.hexdigest()


class _Reader:
    """One open file, read once from front to back. A context manager."""

    def __init__(self, descriptor: int, path: Path, *, past_cache: bool) -> None:
        self._path, self._cached = path, descriptor
        self._num_bytes = os.fstat(descriptor).st_size
        self._direct = open_direct(descriptor) if past_cache else None
        self._residency = Residency(descriptor, self._num_bytes)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._residency.close()
        if self._direct is not None:
            os.close(self._direct)

    def pieces(self) -> Generator[memoryview]:
        """The pieces of the file, read ahead; each is valid until the next is asked for."""
        begins = iter(range(0, self._num_bytes, PIECE_BYTES))
        memory = memoryview(new_memory((PIECES_AHEAD + 1) * PIECE_BYTES))
        free = deque(memory[begin : begin + PIECE_BYTES] for begin in range(0, len(memory), PIECE_BYTES))
        reading: deque[tuple[memoryview, int, Future[None]]] = deque()

        def submit() -> None:
            begin = next(begins, None)
            if begin is not None:
                buffer, size = free.popleft(), min(PIECE_BYTES, self._num_bytes - begin)
                reading.append((buffer, size, thread.submit(self._read, buffer, begin, size)))

        with ThreadPoolExecutor(1, thread_name_prefix="assay-read") as thread:
            try:
                for _ in range(PIECES_AHEAD):
                    submit()
                while reading:
                    submit()
                    buffer, size, future = reading[0]
                    future.result()
                    yield buffer[:size]
                    reading.popleft()
                    free.append(buffer)
            finally:
                thread.shutdown(cancel_futures=True)

    def _read(self, buffer: memoryview, begin: int, size: int) -> None:
        """`size` bytes from `begin`, a multiple of PIECE_BYTES, on into the beginning of `buffer`."""
        if self._read_direct(buffer, begin, size):
            return
        if read_fully(self._cached, buffer[:size], begin) < size:
            raise CheckpointError(f"{self._path}: became shorter while it was read")

    def _read_direct(self, buffer: memoryview, begin: int, size: int) -> bool:
        """The same past the page cache; False: it lies there, or the file system wants it read in the usual way."""
        if self._direct is None or self._residency.is_cached(begin, size):
            return False
        try:
            return os.preadv(self._direct, [buffer], begin) >= size
        except OSError as problem:
            if problem.errno != errno.EINVAL:
                raise
            return False
