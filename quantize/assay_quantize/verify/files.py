"""Files of a checkpoint that is verified: read by ranges, never mapped."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from assay.errors import CheckpointError
from assay.safe_files import open_inside, read_fully
from assay_quantize.checkpoint.headers import TensorHeader


class StoredReader:
    """Byte ranges of stored tensors; safe to use from many threads at once."""

    def __init__(self, folder: Path, headers: Mapping[str, TensorHeader]) -> None:
        self._folder, self._headers = folder, headers
        self._descriptors: dict[str, int] = {}
        self._lock = threading.Lock()

    def close(self) -> None:
        """Close all files. No read may be under way."""
        with self._lock:
            for descriptor in self._descriptors.values():
                os.close(descriptor)
            self._descriptors.clear()

    def read(self, name: str, begin: int, end: int, buffer: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Bytes [begin, end) of a tensor, in the beginning of `buffer`. CheckpointError when they cannot be read."""
        header = self._headers[name]
        assert 0 <= begin <= end <= header.num_bytes, f"{name}: [{begin}, {end}) of {header.num_bytes} bytes"
        wanted = buffer[: end - begin]
        path = self._folder / header.shard
        try:
            done = read_fully(self._descriptor(header.shard), wanted.data, header.begin + begin)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
        if done < wanted.nbytes:
            raise CheckpointError(f"{path}: became shorter while it was read")
        return wanted

    def _descriptor(self, shard: str) -> int:
        with self._lock:
            if shard not in self._descriptors:
                with open_inside(self._folder, shard) as file:
                    self._descriptors[shard] = os.dup(file.fileno())
            return self._descriptors[shard]
