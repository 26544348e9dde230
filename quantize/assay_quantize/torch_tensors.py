"""Tensors of a checkpoint in torch, for those who compute with them: benchmarks and tests."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from assay_quantize.checkpoint import Checkpoint

TORCH_DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F16": torch.float16, "BF16": torch.bfloat16,
    "F32": torch.float32, "F64": torch.float64,
}  # fmt: skip
"""safetensors dtype name -> torch dtype."""

Buffer = bytes | memoryview


def read_tensor(source: Checkpoint, name: str, device: str = "cpu") -> Tensor:
    """A tensor of a checkpoint on `device`; on the CPU it is a view of the mapped file: do not write to it."""
    header = source.tensors[name]
    data = source.read(name)
    dtype = TORCH_DTYPES[header.dtype]
    if not data:
        return torch.empty(header.shape, dtype=dtype, device=device)
    flat = bytes_tensor(data)
    if flat.data_ptr() % dtype.itemsize:
        flat = flat.clone()  # a hand-made file may place a tensor at an odd offset
    return flat.view(dtype).reshape(header.shape).to(device)


def bytes_tensor(data: Buffer) -> Tensor:
    """`data` as U8, without a copy: do not write to it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(data, dtype=torch.uint8)
