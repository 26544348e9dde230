"""SHA-256 of files at the speed of the disk: pieces are read ahead by threads of their own while others are hashed.

What lies in the page cache is taken from there (`RWF_NOWAIT`). What does not is read past it (`O_DIRECT`): that leaves the
cache to others, and the processor, which a copy out of the cache would keep a third as busy as the hash itself, to the hash.
Where a file system knows neither, files are read through the cache, with read-ahead.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import mmap
import os
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

from assay.errors import CheckpointError
from assay.safe_files import open_inside

PIECE_BYTES = 2 << 20
PIECES_AHEAD = 4
"""Pieces of one file that are read, or waiting to be hashed, beside the one that is hashed."""

MOST_LANES = 8
"""Files hashed at once: 12 GB/s of SHA-256 or more, in 80 MiB of memory."""

_NO_NOWAIT = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})


class FileHasher:
    """Hashes files; `sha256` may be called from as many threads as `lanes`. A context manager; its readers end with it.

    It holds lanes * (PIECES_AHEAD + 1) * PIECE_BYTES of memory.
    """

    def __init__(self, lanes: int) -> None:
        """lanes: how many files are hashed at once."""
        self._readers = ThreadPoolExecutor(2 * lanes, thread_name_prefix="assay-read")
        self._buffers: deque[mmap.mmap] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._readers.shutdown(cancel_futures=True)
        for buffer in self._buffers:
            buffer.close()

    def sha256(self, folder: Path, name: str, on_piece: Callable[[int], None] | None = None) -> str:
        """SHA-256 (hex) of the file `name` in `folder`, read once. on_piece: told the bytes of every piece that was hashed.

        Raises OSError, or CheckpointError (a link out of the folder), when it cannot be read or became shorter meanwhile.
        """
        digest = hashlib.sha256()
        with _Pieces(folder, name) as pieces, contextlib.closing(self._in_order(pieces)) as in_order:
            for piece in in_order:
                digest.update(piece)
                if on_piece is not None:
                    on_piece(len(piece))
        return digest.hexdigest()

    def _in_order(self, pieces: _Pieces) -> Generator[memoryview]:
        """The pieces of a file, read ahead; each is valid until the next is asked for."""
        begins = iter(range(0, pieces.num_bytes, PIECE_BYTES))
        reading: deque[tuple[mmap.mmap, int, Future[None]]] = deque()

        def submit() -> None:
            begin = next(begins, None)
            if begin is not None:
                buffer, end = self._take(), min(begin + PIECE_BYTES, pieces.num_bytes)
                reading.append((buffer, end - begin, self._readers.submit(pieces.read, buffer, begin, end)))

        try:
            for _ in range(PIECES_AHEAD):
                submit()
            while reading:
                submit()
                buffer, num_bytes, future = reading[0]
                future.result()
                with memoryview(buffer) as whole, whole[:num_bytes] as view:
                    yield view
                reading.popleft()
                self._buffers.append(buffer)
        finally:
            for buffer, _, future in reading:
                future.cancel() or future.exception()
                self._buffers.append(buffer)

    def _take(self) -> mmap.mmap:
        try:
            return self._buffers.pop()
        except IndexError:
            return mmap.mmap(-1, PIECE_BYTES)  # O_DIRECT wants memory that begins with a page


class _Pieces:
    """One open file, read at any place by any thread."""

    def __init__(self, folder: Path, name: str) -> None:
        self._path = folder / name
        with open_inside(folder, name) as file:
            self._cached = os.dup(file.fileno())
        self.num_bytes = os.fstat(self._cached).st_size
        self._direct = _open_direct(self._cached)
        if self._direct is None:
            os.posix_fadvise(self._cached, 0, 0, os.POSIX_FADV_SEQUENTIAL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self._cached)
        if self._direct is not None:
            os.close(self._direct)

    def read(self, buffer: mmap.mmap, begin: int, end: int) -> None:
        """Bytes [begin, end) into the beginning of `buffer`; begin is a multiple of PIECE_BYTES."""
        if self._direct is not None and self._read_direct(buffer, begin, end):
            return
        with memoryview(buffer) as whole:
            done = 0
            while done < end - begin:
                with whole[done : end - begin] as rest:
                    got = os.preadv(self._cached, [rest], begin + done)
                if got == 0:
                    raise CheckpointError(f"{self._path}: became shorter while it was read")
                done += got

    def _read_direct(self, buffer: mmap.mmap, begin: int, end: int) -> bool:
        """The same from the page cache as far as it lies there, else past it; False: it must be read in the usual way."""
        assert self._direct is not None
        try:
            if os.preadv(self._cached, [buffer], begin, os.RWF_NOWAIT) >= end - begin:
                return True
        except BlockingIOError:
            pass
        except OSError as problem:
            if problem.errno not in _NO_NOWAIT:
                raise
        try:
            return os.preadv(self._direct, [buffer], begin) >= end - begin
        except OSError as problem:
            if problem.errno != errno.EINVAL:
                raise
            return False


def _open_direct(descriptor: int) -> int | None:
    """The same file for reading past the page cache; None where that is not known."""
    with contextlib.suppress(OSError, AttributeError):
        return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    return None
