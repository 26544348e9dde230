"""Files of a checkpoint that is verified: read by ranges, never mapped."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from assay.errors import CheckpointError
from assay.safe_files import open_inside, read_fully
from assay_quantize.checkpoint.headers import TensorHeader
from assay_quantize.storage.past_cache import ReadAhead, Residency


class _File(NamedTuple):
    """A shard that is open."""

    descriptor: int
    residency: Residency


class StoredReader:
    """Byte ranges of stored tensors; safe to use from many threads at once."""

    def __init__(self, folder: Path, headers: Mapping[str, TensorHeader]) -> None:
        self._folder, self._headers = folder, headers
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
        if size and file.residency.is_known and not file.residency.seems_cached(header.begin + begin, size):
            self._ahead.begin(file.descriptor, header.begin + begin, size)

    def read(self, name: str, begin: int, end: int, buffer: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Bytes [begin, end) of a tensor, in the beginning of `buffer`. CheckpointError when they cannot be read."""
        header = self._headers[name]
        assert 0 <= begin <= end <= header.num_bytes, f"{name}: [{begin}, {end}) of {header.num_bytes} bytes"
        wanted = buffer[: end - begin]
        path = self._folder / header.shard
        descriptor = self._file(header.shard).descriptor
        if self._ahead.take(descriptor, header.begin + begin, wanted.data):
            return wanted
        try:
            done = read_fully(descriptor, wanted.data, header.begin + begin)
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
                self._files[shard] = _File(descriptor, Residency(descriptor, os.fstat(descriptor).st_size))
            return self._files[shard]
