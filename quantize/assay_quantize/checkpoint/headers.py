"""The headers of safetensors files: 8 bytes of length, then JSON; no weight is read.

They are parsed here, because a checkpoint of 1.5 TB is planned from 300 of them and because everything in them is checked: a
truncated shard, tensors that overlap, dtypes and shapes that do not fit the offsets. Imports neither torch nor safetensors.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from assay.errors import CheckpointError
from assay.safe_files import open_inside
from assay.safetensors_index import header_entries
from assay_quantize.checkpoint.strided import Pieces, Strides
from assay_quantize.formats.schemes import DTYPE_BYTES

MAX_DIMENSIONS = 8
"""No weight of a known model has more than 4."""


class TensorHeader(NamedTuple):
    """One tensor. `begin` and `end` are offsets from the start of the file `shard`, so the data is `file[begin:end]`.

    strides: where its values lie between them, if not one behind the other; of `Pieces` `begin` is that of the stored tensor.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: str
    begin: int
    end: int
    strides: Strides | Pieces | None = None

    @property
    def num_bytes(self) -> int:
        """Of its values."""
        if self.strides is None:
            return self.end - self.begin
        shared = self.strides.shared if isinstance(self.strides, Pieces) else 1
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype] // shared


def read_shard_header(folder: Path, shard: str) -> dict[str, TensorHeader]:
    """Headers of one file; CheckpointError when it cannot be read or is damaged."""
    path = folder / shard
    try:
        with open_inside(folder, shard) as file:
            size = os.fstat(file.fileno()).st_size
            return parse_header(str(path), shard, size, lambda begin, end: (file.seek(begin), file.read(end - begin))[1])
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None


def parse_header(
    where: str, shard: str, file_bytes: int, read: Callable[[int, int], bytes]
) -> dict[str, TensorHeader]:  # fmt: skip
    """Headers of one safetensors file of `file_bytes`, in the order of their data.

    read(begin, end) -> bytes of the file; it is called for the header only. Checks what safetensors checks: the length
    of the header, dtypes, offsets that fit dtype and shape, tile the data without gap or overlap, and end with the file.
    """
    entries, data_begin = header_entries(where, file_bytes, read)
    tensors = [_tensor_header(where, shard, name, entry, data_begin) for name, entry in entries.items()]
    tensors.sort(key=lambda tensor: (tensor.begin, tensor.end))
    position = data_begin
    for tensor in tensors:
        if tensor.begin != position:
            what = "overlaps the tensor before it" if tensor.begin < position else "leaves a gap before it"
            raise CheckpointError(f"{where}: {tensor.name} {what}; the file is damaged, download it again")
        position = tensor.end
    if position != file_bytes:
        what = "truncated" if position > file_bytes else "longer than its header says"
        raise CheckpointError(f"{where}: {what}: {position} bytes expected, {file_bytes} there; download it again")
    return {tensor.name: tensor for tensor in tensors}


def _tensor_header(where: str, shard: str, name: str, entry: Any, data_begin: int) -> TensorHeader:
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        numbers_fine = all(type(number) is int and number >= 0 for number in (*shape, begin, end))
    except (TypeError, KeyError, ValueError):
        numbers_fine, dtype = False, None
    if not numbers_fine or not isinstance(dtype, str) or len(shape) > MAX_DIMENSIONS or not name.isprintable():
        shown = name if name.isprintable() else ascii(name)
        raise CheckpointError(f"{where}: the header of {shown[:200]} is damaged: {str(entry)[:120]}; download it again")
    if dtype not in DTYPE_BYTES:
        raise CheckpointError(f"{where}: {name} has dtype {ascii(dtype)[1:-1][:40]}, known are {', '.join(DTYPE_BYTES)}")
    if 0 in shape:
        raise CheckpointError(f"{where}: {name} {dtype} {list(shape)} is empty; the file is damaged, download it again")
    if end - begin != math.prod(shape) * DTYPE_BYTES[dtype]:
        raise CheckpointError(
            f"{where}: {name} {dtype} {list(shape)} needs {math.prod(shape) * DTYPE_BYTES[dtype]} bytes, its header gives it "
            f"{end - begin}; the file is damaged, download it again"
        )
    return TensorHeader(name, dtype, shape, shard, data_begin + begin, data_begin + end)
