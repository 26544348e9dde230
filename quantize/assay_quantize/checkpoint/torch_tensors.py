"""Tensors of a checkpoint in torch, for those who compute with them: benchmarks and tests."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import closing

import numpy as np
import torch
from torch import Tensor

from assay.errors import CheckpointError
from assay_quantize.checkpoint.checkpoint import Checkpoint
from assay_quantize.checkpoint.headers import TensorHeader
from assay_quantize.checkpoint.shard_files import OpenShards
from assay_quantize.checkpoint.strided import read_strided
from assay_quantize.formats.schemes import DTYPE_BYTES

TORCH_DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
}  # fmt: skip
"""safetensors dtype name -> torch dtype."""


def read_tensor(source: Checkpoint, name: str) -> Tensor:
    """A tensor of a checkpoint, in memory of its own.

    Raises CheckpointError: the weights are on the hub, the file cannot be read or is shorter than its header says.
    """
    if source.folder is None:
        raise CheckpointError(f"{source.location}: its weights are on the hub; download it first and give the folder")
    header = source.tensors[name]
    with closing(OpenShards(source.folder)) as shards:
        return read_rows(shards.read_into, header, 0, header.shape[0] if header.shape else 1).reshape(header.shape)


def read_rows(read_into: Callable[[memoryview, str, int, str], object], header: TensorHeader, begin: int, end: int) -> Tensor:
    """Rows [begin, end) of a tensor along its first dimension, in memory of their own.

    read_into: (where to, shard, offset, what is said of a file that is too short).
    """

    def read(view: memoryview, offset: int) -> None:
        read_into(view, header.shard, offset, f"truncated: ends inside {header.name}; download it again")

    size = DTYPE_BYTES[header.dtype]
    if header.strides is None:
        row_bytes = math.prod(header.shape[1:]) * size
        flat = np.empty((end - begin) * row_bytes, np.uint8)
        read(flat.data, header.begin + begin * row_bytes)
    else:
        dtype = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[size]
        flat = read_strided(read, header.begin, header.strides, header.shape, dtype, begin, end).reshape(-1).view(np.uint8)
    return torch.from_numpy(flat).view(TORCH_DTYPES[header.dtype]).reshape(end - begin, *header.shape[1:])
