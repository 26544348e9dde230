"""A checkpoint as its headers describe it: names, dtypes, shapes, places. No weight is read until `Checkpoint.read`.

safetensors headers are parsed here (8 bytes of length, then JSON), because a checkpoint of 1.5 TB is planned from 300 of them
and because everything in them is checked: a truncated shard, tensors that overlap, an index that disagrees with the
files. Imports neither torch nor safetensors.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from assay.errors import CheckpointError
from assay.records import sha256_of
from assay.safe_files import open_inside, parse_json_object, read_json_object
from assay_quantize.fused_experts import split_experts
from assay_quantize.schemes import DTYPE_BYTES
from assay_quantize.source_files import data_of_files
from assay_quantize.source_format import check_config_readable, find_companions, list_notes

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000
"""What safetensors itself accepts."""

MAX_DIMENSIONS = 8
"""No weight of a known model has more than 4."""


class TensorHeader(NamedTuple):
    """One tensor. `begin` and `end` are offsets from the start of the file `shard`, so the data is `file[begin:end]`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: str
    begin: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class Checkpoint:
    """Headers of a whole checkpoint.

    location: the folder, or the hub id. folder: None when it is on the hub. tensors: in the order of shards, and in
    a shard in the order of its data. shards: file name -> bytes. files: every other file (config, tokenizer, ...), sorted.
    notes: what was odd but not wrong. revision: the commit on the hub; None for a folder. data: every used shard -> what
    identifies its data (`Plan.source_files`).
    """

    location: str
    folder: Path | None
    config: dict[str, Any]
    tensors: dict[str, TensorHeader]
    shards: dict[str, int]
    files: tuple[str, ...]
    notes: tuple[str, ...] = ()
    revision: str | None = None
    data: Mapping[str, str] = field(default_factory=dict)

    @property
    def sha256(self) -> str:
        """Identity of the headers: names, dtypes, shapes and shards of all tensors; not of the data."""
        return sha256_of([[t.name, t.dtype, list(t.shape), t.shard] for _, t in sorted(self.tensors.items())])

    def read(self, name: str) -> bytearray:
        """The bytes of one tensor, all of them in memory: for tests and small tools, the engine reads slabs (`sources.py`).

        Raises CheckpointError: the weights are on the hub, the file cannot be read or is shorter than its header says.
        """
        if self.folder is None:
            raise CheckpointError(f"{self.location}: its weights are on the hub; download it first and give the folder")
        header = self.tensors[name]
        data, path, done = bytearray(header.num_bytes), self.folder / header.shard, 0
        try:
            with open_inside(self.folder, header.shard) as file:
                while done < len(data) and (got := os.preadv(file.fileno(), [memoryview(data)[done:]], header.begin + done)):
                    done += got
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
        if done != len(data):
            raise CheckpointError(f"{path}: truncated: ends inside {name}; download it again")
        return data


# ------------------------------------------------------------------------------------------------ opening a folder
def open_checkpoint(folder: Path) -> Checkpoint:
    """The checkpoint in `folder`, from its headers.

    Raises CheckpointError: no such folder, no config, no safetensors, index and files that disagree, a damaged header, a
    source in a form that cannot be read.
    """
    if not folder.exists():
        raise CheckpointError(f"{folder}: no such folder; give a folder with config.json and *.safetensors, or a hub id")
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: is a file; give the checkpoint's folder (with config.json and *.safetensors)")
    config = read_json_object(folder, "config.json")
    check_config_readable(str(folder), config)
    entries = sorted(path.name for path in folder.iterdir())
    files = [name for name in entries if name.endswith(".safetensors") or (folder / name).is_file()]
    if not any(name.endswith(".safetensors") for name in files):
        raise CheckpointError(_no_safetensors(folder))
    index = read_json_object(folder, INDEX_NAME, unique_names=True) if INDEX_NAME in entries else None
    made = assemble(
        str(folder), folder, config, index, files, lambda shards: [read_shard_header(folder, shard) for shard in shards]
    )
    return as_source(replace(made, data=data_of_files(folder, made.shards)))


def as_source(checkpoint: Checkpoint) -> Checkpoint:
    """The tensors that a plan is made for: fused experts one by one, scales checked against their weights.

    Raises CheckpointError for tensors that cannot be read (`source_format.py`, `fused_experts.py`).
    """
    where, config = checkpoint.location, checkpoint.config
    tensors, split = split_experts(where, config, checkpoint.tensors)
    unused = find_companions(where, config, tensors).of_activations
    notes = [*checkpoint.notes, *split, *list_notes(config, tensors)]
    if unused:
        notes.append(f"{len(unused):,} scales of activations ({min(unused)}, ...) are left out")
    return replace(checkpoint, tensors=tensors, notes=tuple(notes))


def assemble(
    location: str,
    folder: Path | None,
    config: dict[str, Any],
    index: dict[str, Any] | None,
    files: list[str],
    read_headers: Callable[[list[str]], list[dict[str, TensorHeader]]],
) -> Checkpoint:
    """Headers and index into a checkpoint, whatever they were read from.

    files: names of everything that is there. read_headers(shards): the headers of each, in that order.
    """
    present = [name for name in files if name.endswith(".safetensors")]
    shard_of: dict[str, str] | None = None
    if index is not None:
        shard_of = weight_map(f"{location}: {INDEX_NAME}", index)
        check_index(location, shard_of, present)
    elif present != [SINGLE_NAME]:
        raise CheckpointError(
            f"{location}: {len(present)} safetensors file(s) but no {INDEX_NAME}; only a single {SINGLE_NAME} needs no index; "
            "download the index as well"
        )
    listed = sorted(set(shard_of.values())) if shard_of is not None else [SINGLE_NAME]
    extra = [name for name in present if name not in set(listed)]
    headers = dict(zip([*listed, *extra], read_headers([*listed, *extra]), strict=True))
    tensors: dict[str, TensorHeader] = {}
    for shard in listed:
        for name, header in headers[shard].items():
            if name in tensors:
                raise CheckpointError(f"{location}: {name} is in {tensors[name].shard} and in {shard}; download them again")
            tensors[name] = header
    if shard_of is not None:
        check_placement(location, shard_of, tensors)
    notes = tuple(_add_extra(tensors, shard, headers[shard]) for shard in extra)
    used = {header.shard for header in tensors.values()}
    sizes = {shard: max(header.end for header in headers[shard].values()) for shard in sorted(used)}
    others = tuple(name for name in files if name not in {*listed, *extra, INDEX_NAME})
    return Checkpoint(location, folder, config, tensors, sizes, others, notes)


def _add_extra(tensors: dict[str, TensorHeader], shard: str, found: dict[str, TensorHeader]) -> str:
    """Take in tensors of a file that the index does not name (GLM-4.7 keeps MTP in mtp.safetensors); returns the note."""
    new = {name: header for name, header in found.items() if name not in tensors}
    tensors |= new
    if not new:
        return f"{shard} is not in {INDEX_NAME} and holds nothing new: left out"
    if twice := len(found) - len(new):
        return f"{shard} is not in {INDEX_NAME}: its {len(new)} new tensors are taken in, {twice} it repeats are left out"
    return f"{shard} is not in {INDEX_NAME}: its {len(new)} tensors are taken in"


def _no_safetensors(folder: Path) -> str:
    old = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for path in folder.glob(pattern))
    if old:
        return (
            f"{folder}: no *.safetensors, only {old[0]}"
            f"{f' and {len(old) - 1} more' if len(old) > 1 else ''}; convert it first (transformers: "
            "AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)), or download the safetensors release"
        )
    return f"{folder}: no *.safetensors; download the weights into this folder"


# ------------------------------------------------------------------------------------------------ index
def weight_map(where: str, index: Mapping[str, Any]) -> dict[str, str]:
    """Tensor name -> file name from an index; names that would leave the folder are refused."""
    found = index.get("weight_map")
    if not isinstance(found, dict) or not found or not all(isinstance(file, str) for file in found.values()):
        raise CheckpointError(f"{where}: key weight_map must map tensor names to file names; download the index again")
    if odd := next((name for name in found if not name.isprintable()), None):
        raise CheckpointError(f"{where}: {ascii(odd)[:200]} is no tensor's name; download the index again")
    for file in set(found.values()):
        path = PurePosixPath(file)
        if path.name != file or "\\" in file or not file.isprintable() or not file.endswith(".safetensors"):
            raise CheckpointError(f"{where}: {file!r} is not the name of a safetensors file in the same folder")
    return found


def check_index(where: str, shard_of: Mapping[str, str], present: list[str]) -> None:
    """Every shard of the index must be there."""
    missing = sorted(set(shard_of.values()) - set(present))
    if missing:
        raise CheckpointError(
            f"{where}: {INDEX_NAME} names {missing[0]}"
            f"{f' and {len(missing) - 1} more shards' if len(missing) > 1 else ''}, not there; complete the download"
        )


def check_placement(where: str, shard_of: Mapping[str, str], tensors: Mapping[str, TensorHeader]) -> None:
    """The index and the headers of its shards must hold the same tensors, in the same files."""
    for name, shard in shard_of.items():
        header = tensors.get(name)
        if header is None or header.shard != shard:
            really = "no shard has it" if header is None else f"it is in {header.shard}"
            raise CheckpointError(
                f"{where}: {INDEX_NAME} puts {name} in {shard}, but {really}; download index and shards again"
            )
    unlisted = next((header for name, header in tensors.items() if name not in shard_of), None)
    if unlisted is not None:
        raise CheckpointError(
            f"{where}: {unlisted.shard} holds {unlisted.name}, which {INDEX_NAME} does not list; vLLM would not load it; "
            "download index and shards again"
        )


# ------------------------------------------------------------------------------------------------ headers
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
