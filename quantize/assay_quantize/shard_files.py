"""Shards as files, without torch: their headers from the plan, temporary names, hashes, fsync."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Sequence
from pathlib import Path

from assay.records import Plan, TensorPlan
from assay_quantize.schemes import DTYPE_BYTES

HASH_PIECE_BYTES = 8 << 20


def partial_path(path: Path) -> Path:
    """Where a file is written before it is renamed to `path`: hidden, and no loader's pattern matches it."""
    return path.with_name(f".{path.name}.partial")


def planned_shards(plan: Plan) -> dict[str, list[TensorPlan]]:
    """Output shard -> the tensors that go into it, in the plan's order."""
    shards: dict[str, list[TensorPlan]] = {}
    for tensor in plan.tensors:
        if tensor.shard_out is not None and tensor.outputs:
            shards.setdefault(tensor.shard_out, []).append(tensor)
    return shards


def header_bytes(tensors: Sequence[TensorPlan]) -> tuple[bytes, dict[str, int]]:
    """The safetensors header of a planned shard, and for every output where its data starts (from the file's start).

    Wide dtypes first, then by name, as the safetensors library does it: every tensor is aligned to its element size.
    """
    outputs = sorted((o for t in tensors for o in t.outputs), key=lambda o: (-DTYPE_BYTES[o.dtype], o.dtype, o.name))
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begins, offset = {}, 0
    for output in outputs:
        end = offset + output.num_bytes
        entries[output.name] = {"dtype": output.dtype, "shape": list(output.shape), "data_offsets": [offset, end]}
        begins[output.name], offset = offset, end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    prefix = struct.pack("<Q", len(text)) + text
    return prefix, {name: len(prefix) + begin for name, begin in begins.items()}


def fsync_folder(folder: Path) -> None:
    """Make renames in `folder` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256_and_size(path: Path) -> tuple[str, int]:
    """SHA-256 (hex) and size in bytes of a file, in one reading."""
    digest, num_bytes = hashlib.sha256(), 0
    with path.open("rb") as file:
        while piece := file.read(HASH_PIECE_BYTES):
            digest.update(piece)
            num_bytes += len(piece)
    return digest.hexdigest(), num_bytes
