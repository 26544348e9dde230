"""Files of a checkpoint that is verified: read by ranges, never mapped; and which rows of them belong together."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from assay.records.plan import OutputTensor
from assay.safe_files import read_fully
from assay_quantize.checkpoint.headers import TensorHeader
from assay_quantize.checkpoint.shard_files import OpenShards
from assay_quantize.checkpoint.source_reader import STORAGE
from assay_quantize.formats.schemes import SCHEMES
from assay_quantize.storage.buffers import Memory
from assay_quantize.storage.direct_file import BLOCK_BYTES
from assay_quantize.storage.past_cache import Loans, ReadAhead, is_aligned, open_direct

SHORTER = "became shorter while it was read"


class StoredReader:
    """Byte ranges of stored tensors; safe to use from many threads at once."""

    def __init__(self, folder: Path, headers: Mapping[str, TensorHeader], *, past_cache: bool = False) -> None:
        """past_cache: what is read ahead was written past the page cache, so nobody looks whether it lies there."""
        self._headers, self._past_cache = headers, past_cache
        # small ranges must not draw large ones into the cache that are to be read past it
        self._shards = OpenShards(folder, advice=os.POSIX_FADV_RANDOM)
        self._ahead = ReadAhead()

    def close(self) -> None:
        """Close all files. No read may be under way."""
        self._ahead.close()
        self._shards.close()

    def will_need(self, name: str, begin: int, end: int) -> None:
        """Have bytes [begin, end) of a tensor read ahead, past the page cache unless they lie there; returns at once.

        The same range is to be read soon after.
        """
        header = self._headers[name]
        file, size = self._shards.open(header.shard), end - begin
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
        view = buffer[: end - begin]
        descriptor = self._shards.open(header.shard).descriptor
        if loans is not None and is_aligned(header.begin + begin):
            lent = self._ahead.lend(descriptor, header.begin + begin, view.nbytes, loans)
            if lent is not None:
                return lent
        if not self._ahead.take(descriptor, header.begin + begin, view.data):
            self._shards.read_into(view.data, header.shard, header.begin + begin, SHORTER)
        return view

    def read_rows(self, name: str, begin: int, end: int) -> NDArray[Any]:
        """Rows [begin, end) of a tensor, along its first dimension, in storage form and new memory."""
        header = self._headers[name]
        per_row = header.num_bytes // header.shape[0]
        raw = self.read(name, begin * per_row, end * per_row, np.empty((end - begin) * per_row, np.uint8))
        rows: NDArray[Any] = raw.view(STORAGE[header.dtype]).reshape(end - begin, *header.shape[1:])
        return rows

    def header(self, name: str) -> TensorHeader:
        """Where a tensor lies."""
        return self._headers[name]

    def read_range(self, shard: str, begin: int, end: int, buffer: Memory) -> NDArray[np.uint8]:
        """Bytes [begin, end) of a shard, past the page cache where the file system can; a view of `buffer`.

        buffer: aligned to blocks, with room for two more of them. CheckpointError when they cannot be read.
        """
        descriptor = self._shards.open(shard).descriptor
        first = begin // BLOCK_BYTES * BLOCK_BYTES
        num_bytes = -(-(end - first) // BLOCK_BYTES) * BLOCK_BYTES
        view = buffer[begin - first : end - first]
        if (direct := open_direct(descriptor)) is not None:
            try:
                with contextlib.suppress(OSError):  # then through the cache, which says what is wrong
                    if first + read_fully(direct, buffer[:num_bytes].data, first, block_bytes=BLOCK_BYTES) >= end:
                        return view
            finally:
                os.close(direct)
        self._shards.read_into(view.data, shard, begin, SHORTER)
        return view


def has_rows(output: OutputTensor) -> bool:
    """Whether a stored part has rows that belong to rows of the weight; a scale of the whole weight has none."""
    return len(output.shape) == 2


def rows_of_part(scheme: str, part: str, begin: int, end: int) -> tuple[int, int]:
    """The rows of a part, by its local name, that belong to rows [begin, end) of the weight."""
    per_part = 8 if part == "weight_zero_point" else SCHEMES[scheme].block_rows if part == "weight_scale" else 1
    return begin // per_part, -(-end // per_part)
