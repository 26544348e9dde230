"""Tensors of a checkpoint in torch, for those who compute with them: benchmarks and tests."""

from __future__ import annotations

from contextlib import closing

import torch
from torch import Tensor

from assay.errors import CheckpointError
from assay_quantize.checkpoint.checkpoint import Checkpoint
from assay_quantize.checkpoint.shard_files import OpenShards

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
    data = bytearray(header.end - header.begin)
    with closing(OpenShards(source.folder)) as shards:
        shards.read_into(memoryview(data), header.shard, header.begin, f"truncated: ends inside {name}; download it again")
    stored = torch.frombuffer(data, dtype=TORCH_DTYPES[header.dtype])
    if header.strides is None:
        return stored.reshape(header.shape)
    return stored.as_strided(header.shape, header.strides[: len(header.shape)]).contiguous()
