"""Files of a checkpoint that is verified: read by ranges, never mapped; and which rows of them belong together."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from assay.errors import CheckpointError
from assay.records.plan import OutputTensor
from assay.safe_files import open_inside, read_fully
from assay_quantize.checkpoint.headers import TensorHeader
from assay_quantize.formats.schemes import SCHEMES
from assay_quantize.storage.buffers import Memory
from assay_quantize.storage.direct_file import BLOCK_BYTES
from assay_quantize.storage.past_cache import Loans, ReadAhead, Residency, is_aligned, open_direct


class _File(NamedTuple):
    """A shard that is open."""

    descriptor: int
    residency: Residency


class StoredReader:
    """Byte ranges of stored tensors; safe to use from many threads at once."""

    def __init__(self, folder: Path, headers: Mapping[str, TensorHeader], *, past_cache: bool = False) -> None:
        """past_cache: what is read ahead was written past the page cache, so nobody looks whether it lies there."""
        self._folder, self._headers, self._past_cache = folder, headers, past_cache
        self._files: dict[str, _File] = {}
        self._ahead = ReadAhead()
        self._lock = threading.Lock()

    def close(self) -> None:
        """Close all files. No read may be under way."""
        with self._lock:
            self._ahead.close()
            for file in self._files.values():
                file.residency.close()
                os.close(file.descriptor)
            self._files.clear()

    def will_need(self, name: str, begin: int, end: int) -> None:
        """Have bytes [begin, end) of a tensor read ahead, past the page cache unless they lie there; returns at once.

        The same range is to be read soon after.
        """
        header = self._headers[name]
        file, size = self._file(header.shard), end - begin
        residency = file.residency
        is_cached = not self._past_cache and (not residency.is_known or residency.seems_cached(header.begin + begin, size))
        if size and not is_cached:
            self._ahead.begin(file.descriptor, header.begin + begin, size)

    def read(
        self, name: str, begin: int, end: int, buffer: NDArray[np.uint8], loans: Loans | None = None
    ) -> NDArray[np.uint8]:  # fmt: skip
        """Bytes [begin, end) of a tensor, in the beginning of `buffer`, or where they were read ahead if that can be lent.

        CheckpointError when they cannot be read.
        """
        header = self._headers[name]
        assert 0 <= begin <= end <= header.num_bytes, f"{name}: [{begin}, {end}) of {header.num_bytes} bytes"
        wanted = buffer[: end - begin]
        path = self._folder / header.shard
        descriptor = self._file(header.shard).descriptor
        if loans is not None and is_aligned(header.begin + begin):
            lent = self._ahead.lend(descriptor, header.begin + begin, wanted.nbytes, loans)
            if lent is not None:
                return lent
        if self._ahead.take(descriptor, header.begin + begin, wanted.data):
            return wanted
        try:
            done = read_fully(descriptor, wanted.data, header.begin + begin)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
        if done < wanted.nbytes:
            raise CheckpointError(f"{path}: became shorter while it was read")
        return wanted

    def header(self, name: str) -> TensorHeader:
        """Where a tensor lies."""
        return self._headers[name]

    def read_range(self, shard: str, begin: int, end: int, buffer: Memory) -> NDArray[np.uint8]:
        """Bytes [begin, end) of a shard, past the page cache where the file system can; a view of `buffer`.

        buffer: aligned to blocks, with room for two more of them. CheckpointError when they cannot be read.
        """
        descriptor, path = self._file(shard).descriptor, self._folder / shard
        first = begin // BLOCK_BYTES * BLOCK_BYTES
        num_bytes = -(-(end - first) // BLOCK_BYTES) * BLOCK_BYTES
        wanted = buffer[begin - first : end - first]
        try:
            if (direct := open_direct(descriptor)) is not None:
                try:
                    with contextlib.suppress(OSError):  # then through the cache, which says what is wrong
                        if first + read_fully(direct, buffer[:num_bytes].data, first, block_bytes=BLOCK_BYTES) >= end:
                            return wanted
                finally:
                    os.close(direct)
            done = read_fully(descriptor, wanted.data, begin)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
        if done < wanted.nbytes:
            raise CheckpointError(f"{path}: became shorter while it was read")
        return wanted

    def _file(self, shard: str) -> _File:
        with self._lock:
            if shard not in self._files:
                with open_inside(self._folder, shard) as file:
                    descriptor = os.dup(file.fileno())
                # small ranges must not draw large ones into the cache that are to be read past it
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
                self._files[shard] = _File(descriptor, Residency(descriptor, os.fstat(descriptor).st_size))
            return self._files[shard]


def has_rows(output: OutputTensor) -> bool:
    """Whether a stored part has rows that belong to rows of the weight; a scale of the whole weight has none."""
    return len(output.shape) == 2


def rows_of_part(scheme: str, part: str, begin: int, end: int) -> tuple[int, int]:
    """The rows of a part, by its local name, that belong to rows [begin, end) of the weight."""
    per_part = 8 if part == "weight_zero_point" else SCHEMES[scheme].block_rows if part == "weight_scale" else 1
    return begin // per_part, -(-end // per_part)
