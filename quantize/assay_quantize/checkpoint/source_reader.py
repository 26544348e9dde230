"""The weights of a source, by rows: whatever form they are stored in, a reader gets plain numbers of 16 or 32 bits.

A weight stored with scales (FP8, FP4, INT4) is a *logical* BF16 weight here (`dequantize.py` says how it is computed); the
weight of one expert inside a fused 3-D tensor is a byte range of its shard, or lies there with gaps (`strided.py`). Files are
read with `preadv` into the caller's buffer; no page of them is ever mapped into memory: it would count as this process's, and a
file that is truncated would end it.
"""

from __future__ import annotations

import math
import os
import threading
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from assay.errors import CheckpointError, QuantizeError
from assay.records.plan import TensorPlan
from assay_quantize.checkpoint.checkpoint import Checkpoint
from assay_quantize.checkpoint.declaration import declared_block
from assay_quantize.checkpoint.headers import TensorHeader
from assay_quantize.checkpoint.shard_files import OpenShards
from assay_quantize.checkpoint.source_format import FP4, INT4, block_of
from assay_quantize.checkpoint.strided import read_strided
from assay_quantize.formats.casting import float_rows
from assay_quantize.formats.schemes import DTYPE_BYTES
from assay_quantize.storage.past_cache import Loans, ReadAhead, is_aligned

Buffer = npt.NDArray[np.uint8]
"""Flat, writable, C-contiguous memory of the caller."""

STORAGE: dict[str, Any] = {
    "BOOL": np.uint8, "U8": np.uint8, "I8": np.int8, "F8_E4M3": np.uint8, "F8_E5M2": np.uint8, "F8_E8M0": np.uint8,
    "U16": np.uint16, "I16": np.int16, "F16": np.float16, "BF16": np.uint16,
    "U32": np.uint32, "I32": np.int32, "F32": np.float32, "U64": np.uint64, "I64": np.int64, "F64": np.float64,
}  # fmt: skip
"""safetensors dtype -> numpy dtype it is held in; BF16 and FP8 as bit patterns."""


class SourceReader:
    """Reads weights of one checkpoint; safe to use from many threads at once. A context manager, or call `close`."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """checkpoint: its `folder` must be set; files are opened when first read.

        Raises CheckpointError for a checkpoint whose weights are on the hub.
        """
        if checkpoint.folder is None:
            raise CheckpointError(f"{checkpoint.location}: its weights are on the hub; download it first and give the folder")
        self.checkpoint = checkpoint
        self._block = declared_block(checkpoint.location, checkpoint.config)
        self._shards = OpenShards(checkpoint.folder, sizes=checkpoint.shards)
        self._ahead: ReadAhead | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close all files. No read may be under way."""
        if self._ahead is not None:
            self._ahead.close()
        self._shards.close()

    # -------------------------------------------------------------------------------------------- reading
    def read_rows(
        self, tensor: TensorPlan, begin: int, end: int, buffer: Buffer | None = None, loans: Loans | None = None
    ) -> npt.NDArray[Any]:  # fmt: skip
        """Rows [begin, end) of the logical weight, in `tensor.logical_dtype`: uint16 bit patterns for BF16, float16, float32.

        Rows are counted along the first dimension; shape [end - begin, *tensor.shape[1:]]. buffer: where they are put, at
        least `rows_bytes(tensor, end - begin)` long; the array returned is a view of it. None: new memory. loans: where plain
        rows that were read ahead may be lent instead of copied.
        Raises CheckpointError: a file that cannot be read or is shorter than its header says; QuantizeError: not the
        source the plan was made from, scales that are not finite.
        """
        header = self._header(tensor)
        if header.strides is not None and tensor.scale is None:
            return self._read_strided(header, begin, end, buffer)
        count, per_row = end - begin, header.num_bytes // header.shape[0] if header.shape[0] else 0
        if loans is not None and tensor.scale is None and self._ahead is not None:
            position = header.begin + begin * per_row
            if is_aligned(position):
                lent = self._ahead.lend(self._shards.open(header.shard).descriptor, position, count * per_row, loans)
                if lent is not None:
                    plain: npt.NDArray[Any] = lent.view(STORAGE[tensor.logical_dtype]).reshape(count, *header.shape[1:])
                    return plain
        flat = self._memory(rows_bytes(tensor, count), buffer)
        # what has fewer bytes as it is stored lies at the end: it is spread out over the memory from its beginning
        stored = flat[flat.nbytes - count * per_row :]
        if header.strides is None:
            self._read_into(stored.data, header, begin * per_row)
        else:
            self._read_strided(header, begin, end, stored)
        if tensor.scale is not None:
            self._dequantize(tensor, stored, begin, end, flat)
        rows: npt.NDArray[Any] = flat.view(STORAGE[tensor.logical_dtype]).reshape(count, *header.shape[1:])
        return rows

    def read_bytes(self, tensor: TensorPlan, begin: int, end: int, buffer: Buffer | None = None) -> memoryview:
        """Bytes [begin, end) of a tensor of any rank, as they are stored; in `buffer` if given. Raises like `read_rows`."""
        header = self._header(tensor)
        view: memoryview = self._memory(end - begin, buffer).data
        if header.strides is None:
            self._read_into(view, header, begin)
            return view
        per_row = header.num_bytes // header.shape[0]
        first = begin // per_row
        rows = self._read_strided(header, first, math.ceil(end / per_row), None)
        view[:] = rows.reshape(-1).view(np.uint8)[begin - first * per_row :][: end - begin].data
        return view

    def will_need(
        self, tensor: TensorPlan, begin: int, end: int, *, through_cache: bool = False, past_cache: bool = False
    ) -> None:  # fmt: skip
        """Have bytes [begin, end) of the stored tensor read ahead; returns at once. The same range is to be read soon after.

        What lies in the page cache is left there, anything else is read past it. through_cache: into it, for it is read twice.
        past_cache: read it from the disk wherever it lies, as long as the disk keeps up: that costs the processor nothing.
        """
        header = self._header(tensor)
        file, position, size = self._shards.open(header.shard), header.begin + begin, end - begin
        if size == 0 or header.strides is not None:
            return
        is_spared = past_cache and file.has_direct and (self._ahead is None or self._ahead.keeps_up())
        if not is_spared and file.residency.is_known and file.residency.seems_cached(position, size):
            return
        if through_cache or not file.has_direct or not file.residency.is_known:
            os.posix_fadvise(file.descriptor, position, size, os.POSIX_FADV_WILLNEED)
            return
        with self._lock:
            if self._ahead is None:
                self._ahead = ReadAhead()
        self._ahead.begin(file.descriptor, position, size)

    def done_with(self, tensor: TensorPlan, begin: int, end: int) -> None:
        """Let the kernel drop bytes [begin, end) of the stored tensor from its page cache."""
        header = self._header(tensor)
        if header.strides is None:
            descriptor = self._shards.open(header.shard).descriptor
            os.posix_fadvise(descriptor, header.begin + begin, end - begin, os.POSIX_FADV_DONTNEED)

    def _dequantize(self, tensor: TensorPlan, stored: Buffer, begin: int, end: int, out: Buffer) -> None:
        # only now: numba takes a second to import, and most sources need none
        from assay_quantize.kernels.dequantize import E2M1_VALUES, INT4_VALUES, dequantize_codes, dequantize_rows

        shape = (end - begin, tensor.shape[1])
        scale_BG, (block_rows, block_columns) = self._scales(tensor, begin, end)
        if tensor.dtype in (INT4, FP4):
            values = INT4_VALUES if tensor.dtype == INT4 else E2M1_VALUES
            dequantize_codes(stored.reshape(end - begin, -1), scale_BG, values, out.view(np.uint16).reshape(shape))
        else:
            out_OI = out.view(np.uint16).reshape(shape)
            dequantize_rows(stored.reshape(shape), scale_BG, block_rows, block_columns, begin, out_OI)

    def _scales(self, tensor: TensorPlan, begin: int, end: int) -> tuple[npt.NDArray[np.float32], tuple[int, int]]:
        """FP32 scales of the blocks that rows [begin, end) lie in, and how many rows and columns share one."""
        header = self.checkpoint.tensors.get(str(tensor.scale))
        block = None if header is None else block_of(tensor.dtype, tensor.shape, header.shape, self._block)
        if header is None or block is None:
            raise QuantizeError(f"{tensor.scale}: the source is no longer what the plan was made from; make a new plan")
        first, last = begin // block[0], math.ceil(end / block[0])
        groups = math.ceil(tensor.shape[1] / block[1])
        row_bytes = groups * DTYPE_BYTES[header.dtype]
        flat = np.empty((last - first) * row_bytes, np.uint8)
        if header.strides is None:
            self._read_into(flat.data, header, first * row_bytes)
        else:
            self._read_strided(header, first, last, flat)
        scale_BG = float_rows(flat.view(STORAGE[header.dtype]), header.dtype).reshape(last - first, groups)
        if not np.isfinite(scale_BG).all():
            count = int((~np.isfinite(scale_BG)).sum())
            raise QuantizeError(f"{header.name}: {count} scales are NaN or infinite; the source is damaged")
        return scale_BG, block

    def _read_strided(self, header: TensorHeader, begin: int, end: int, buffer: Buffer | None) -> npt.NDArray[Any]:
        """As `read_rows`, of what lies in its file with gaps."""
        assert header.strides is not None

        def read(view: memoryview, position: int) -> None:
            self._shards.read_into(view, header.shard, position, f"truncated: ends inside {header.name}; download it again")

        rows = read_strided(read, header.begin, header.strides, header.shape, STORAGE[header.dtype], begin, end)
        if buffer is None:
            return rows
        given: npt.NDArray[Any] = buffer[: rows.nbytes].view(rows.dtype).reshape(rows.shape)
        given[...] = rows
        return given

    # -------------------------------------------------------------------------------------------- files
    def _header(self, tensor: TensorPlan) -> TensorHeader:
        header = self.checkpoint.tensors.get(tensor.name)
        if header is None or (header.dtype, tuple(header.shape)) != (tensor.dtype, tuple(tensor.shape)):
            raise QuantizeError(f"{tensor.name}: the source is no longer what the plan was made from; make a new plan")
        return header

    def _memory(self, num_bytes: int, buffer: Buffer | None) -> Buffer:
        if buffer is None:
            return np.empty(num_bytes, np.uint8)
        assert buffer.nbytes >= num_bytes, f"a buffer of {num_bytes} bytes is needed, got {buffer.nbytes}"
        return buffer[:num_bytes]

    def _read_into(self, view: memoryview, header: TensorHeader, begin: int) -> None:
        assert begin >= 0 and begin + len(view) <= header.num_bytes, f"{header.name}: {begin} + {len(view)} is beyond its end"
        position = header.begin + begin
        descriptor = self._shards.open(header.shard).descriptor
        if self._ahead is None or not self._ahead.take(descriptor, position, view):
            self._shards.read_into(view, header.shard, position, f"truncated: ends inside {header.name}; download it again")


def rows_bytes(tensor: TensorPlan, rows: int) -> int:
    """Bytes of `rows` rows of the logical weight, as `read_rows` returns them."""
    return rows * math.prod(tensor.shape[1:]) * int(np.dtype(STORAGE[tensor.logical_dtype]).itemsize)
