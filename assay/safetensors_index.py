"""Which tensors a checkpoint folder holds, by name: its index, or the headers of its files. No weight is read, no torch needed.

Both come from outside: names, sizes and JSON are checked, and every CheckpointError is one line that names the file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from assay.errors import CheckpointError
from assay.safe_files import open_inside, parse_json_object, read_json_object

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000
"""What safetensors itself accepts."""


_PACKED_AS_VLLM = {"w13_weight_packed": "gate_up_proj.weight_packed", "w2_weight_packed": "down_proj.weight_packed"}
"""Codes of a single expert of gpt-oss, as vLLM's loader wants them called -> as all other parts of the expert are called."""
_PACKED_EXPERT = re.compile(rf"(.+\.experts\.(?:0|[1-9]\d*)\.)({'|'.join(_PACKED_AS_VLLM)})")


def name_of_part(stored: str) -> str:
    """What a tensor of a file is called everywhere else: as the other parts of its weight."""
    match = _PACKED_EXPERT.fullmatch(stored)
    return stored if match is None else match[1] + _PACKED_AS_VLLM[match[2]]


def name_in_file(name: str, *, packed_as_vllm: bool) -> str:
    """What a tensor is called in the files of a checkpoint. packed_as_vllm: as `FamilyRecipe` has it."""
    for stored, own in _PACKED_AS_VLLM.items() if packed_as_vllm and ".experts." in name else ():
        if name.endswith(f".{own}"):
            return name.removesuffix(own) + stored
    return name


def _by_name_of_part(where: str, by_stored_name: Mapping[str, Any]) -> dict[str, Any]:
    """The same entries by `name_of_part`. CheckpointError: two names of one tensor."""
    made = {name_of_part(stored): entry for stored, entry in by_stored_name.items()}
    if len(made) < len(by_stored_name):
        twice = next(name for name in by_stored_name if name_of_part(name) != name and name_of_part(name) in by_stored_name)
        raise CheckpointError(f"{where}: {twice} and {name_of_part(twice)} are one tensor; write it again with one of them")
    return made


def tensor_names(folder: Path) -> frozenset[str] | None:
    """Names of the tensors that a loader finds in `folder`: those of the index, without one those of all *.safetensors.

    A file that the index does not name is not loaded by vLLM, so it does not count. None: no index and no safetensors file.
    Raises CheckpointError: an index or a header that cannot be read.
    """
    if (folder / INDEX_NAME).exists():
        return frozenset(weight_map(f"{folder}: {INDEX_NAME}", read_json_object(folder, INDEX_NAME, unique_names=True)))
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    return frozenset(name for shard in shards for name in _names_in(folder, shard)) if shards else None


def weight_map(where: str, index: Mapping[str, Any]) -> dict[str, str]:
    """Tensor name -> file name from an index; names that would leave the folder are refused."""
    file_by_tensor = index.get("weight_map")
    if (
        not isinstance(file_by_tensor, dict)
        or not file_by_tensor
        or not all(isinstance(file, str) for file in file_by_tensor.values())
    ):
        raise CheckpointError(f"{where}: key weight_map must map tensor names to file names; download the index again")
    if odd := next((name for name in file_by_tensor if not name.isprintable()), None):
        raise CheckpointError(f"{where}: {ascii(odd)[:200]} is no tensor's name; download the index again")
    for file in set(file_by_tensor.values()):
        path = PurePosixPath(file)
        if path.name != file or "\\" in file or not file.isprintable() or not file.endswith(".safetensors"):
            raise CheckpointError(f"{where}: {file!r} is not the name of a safetensors file in the same folder")
    return _by_name_of_part(where, file_by_tensor)


def header_entries(where: str, file_bytes: int, read: Callable[[int, int], bytes]) -> tuple[dict[str, Any], int]:
    """(entries of a safetensors header by tensor name, not checked; where the data begins) of a file of `file_bytes`.

    read(begin, end) -> bytes of the file. Raises CheckpointError: no safetensors file, or one that ends inside its header.
    """
    if file_bytes < 8:
        raise CheckpointError(f"{where}: {file_bytes} bytes are no safetensors file; download it again")
    header_bytes = int.from_bytes(read(0, 8), "little")
    if header_bytes > MAX_HEADER_BYTES or header_bytes < 2:
        raise CheckpointError(
            f"{where}: not a safetensors file: its header would be {header_bytes} bytes (allowed: 2 to {MAX_HEADER_BYTES})"
        )
    data_begin = 8 + header_bytes
    if data_begin > file_bytes:
        raise CheckpointError(f"{where}: truncated inside the header ({file_bytes} bytes); download it again")
    entries = parse_json_object(f"{where}: header", read(8, data_begin), unique_names=True)
    entries.pop("__metadata__", None)
    return _by_name_of_part(where, entries), data_begin


def _names_in(folder: Path, shard: str) -> list[str]:
    path = folder / shard
    try:
        with open_inside(folder, shard) as file:
            size = os.fstat(file.fileno()).st_size
            entries, _ = header_entries(str(path), size, lambda begin, end: (file.seek(begin), file.read(end - begin))[1])
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    return list(entries)
