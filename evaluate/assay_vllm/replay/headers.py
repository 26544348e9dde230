"""Names, shapes and dtypes of a checkpoint: planned, or from the headers of its shards. No weight is read."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from assay_vllm.replay.findings import Finding

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip
"""safetensors' names of dtypes."""
_INDEX = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000
"""safetensors' own limit."""
_LAYER = re.compile(r"(?P<layer>(?:.*\.)?layers\.\d+)\.(?P<rest>.+)")


class Header(NamedTuple):
    dtype: str
    shape: tuple[int, ...]


Shards = dict[str, dict[str, Header]]
"""Shard -> tensor -> header, in the order in which vLLM reads them."""


def layer_of(name: str) -> tuple[str, str] | None:
    """`model.layers.3.mlp.gate.weight` -> (`model.layers.3`, `mlp.gate.weight`); None: in no layer."""
    match = _LAYER.fullmatch(name)
    return None if match is None else (match["layer"], match["rest"])


def in_layers(name: str, layers: Collection[str]) -> bool:
    """Whether a tensor or parameter is in one of `layers`, or in none at all."""
    return (place := layer_of(name)) is None or place[0] in layers


def restrict_to_layers(shards: Shards, layers: Collection[str]) -> Shards:
    """Only `layers` and what is in no layer."""
    kept = {file: {n: header for n, header in tensors.items() if in_layers(n, layers)} for file, tensors in shards.items()}
    return {file: tensors for file, tensors in kept.items() if tensors}


def planned_shards(path: Path) -> Shards:
    """Shards of a file that maps shard -> tensor -> [dtype, shape]."""
    planned = json.loads(path.read_text(encoding="utf-8"))
    return {
        shard: {name: Header(dtype, tuple(shape)) for name, (dtype, shape) in tensors.items()}
        for shard, tensors in sorted(planned.items())
    }


def stored_shards(folder: Path) -> tuple[Shards, list[Finding]]:
    """Headers of the shards in `folder`, and what is wrong with the files: damaged, cut short, not as the index says."""
    index_file = folder / _INDEX
    index: dict[str, str] = json.loads(index_file.read_text(encoding="utf-8"))["weight_map"] if index_file.exists() else {}
    files = sorted({*index.values()} if index else {path.name for path in folder.glob("*.safetensors")})
    shards: Shards = {}
    findings = []
    for file in files:
        try:
            if Path(file).name != file:
                raise ValueError(f"{_INDEX} names it: it leads out of the folder")
            shards[file] = _read_header(folder / file)
        except (OSError, ValueError, KeyError, TypeError) as error:
            what = error.strerror if isinstance(error, OSError) else str(error)
            findings.append(Finding("shard", f"{file}: {what}", where=file, remedy="make or download this file again"))
    stored = {name: file for file, tensors in shards.items() for name in tensors}
    if not files:
        findings.append(Finding("shard", "the folder holds no *.safetensors", where=str(folder.name), remedy=None))
    for name, file in sorted(index.items()):
        if file in shards and stored.get(name) != file:
            message = f"{_INDEX} says that {name} is in {file}; it is not"
            findings.append(Finding("shard", message, where=name, remedy="make the checkpoint again, or mend its index"))
    return shards, findings


def _read_header(path: Path) -> dict[str, Header]:
    """ValueError: the file is not a whole safetensors file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= min(size - 8, _MAX_HEADER_BYTES):
            raise ValueError("is not a safetensors file: it ends within its header")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    tensors = {name: Header(entry["dtype"], tuple(entry["shape"])) for name, entry in header.items()}
    end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if size != 8 + length + end:
        raise ValueError(f"holds {size:,} bytes, its header describes {8 + length + end:,}: it was cut short or is damaged")
    for name, entry in header.items():
        begin, stop = entry["data_offsets"]
        if stop - begin != math.prod(entry["shape"]) * DTYPES[entry["dtype"]].itemsize:
            raise ValueError(f"{name}: its shape does not fit its bytes")
    return tensors
