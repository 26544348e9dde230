"""Files, headers and the index of a checkpoint, against the manifest, the source and the safetensors library.

Headers that `checkpoint/headers.py` parsed are compared with those of the library. Only headers: the library maps files into
memory, and a mapped file that is truncated ends the process. Bytes are read at the library's offsets with `preadv`
(`files.py`). Shared with the engine: which files of a source are copied (`copied_files.py`).
"""

from __future__ import annotations

import errno
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from assay.atomic_files import naming
from assay.errors import CheckpointError
from assay.records.manifest import Manifest
from assay.records.plan import OutputTensor, Plan
from assay.records.run import WRITTEN_ABOUT
from assay.safe_files import open_inside, read_json_object
from assay.safetensors_index import INDEX_NAME, name_of_part
from assay_quantize.checkpoint.checkpoint import Checkpoint
from assay_quantize.checkpoint.copied_files import TEMPLATES, copied_of, is_copied, is_template_beside
from assay_quantize.checkpoint.file_names import CONFIG, JOURNAL, WEIGHT_SUFFIXES
from assay_quantize.checkpoint.headers import TensorHeader, read_shard_header
from assay_quantize.storage.hash_files import hash_file
from assay_quantize.verify.findings import Findings

MADE_ANEW = frozenset({CONFIG, INDEX_NAME})
BYTES: Mapping[str, int] = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip
"""dtype -> bytes of an element."""


# ------------------------------------------------------------------------------------------------ files
def check_files(folder: Path, manifest: Manifest, hashes: bool, findings: Findings) -> None:
    """The folder holds what the manifest lists, and nothing that a loader could take beside it.

    Shards are hashed in `contents.py`. Hidden files are ignored: loaders read none, and clients of the hub leave some.
    """
    for shard in manifest.shards:
        findings.count("files")
        path = folder / shard.name
        if not path.is_file():
            findings.damage("files", shard.name, "is in the manifest, but not on disk")
        elif path.stat().st_size != shard.num_bytes:
            findings.damage("files", shard.name, f"has {path.stat().st_size} bytes; the manifest says {shard.num_bytes}")
    for name, sha256 in manifest.files.items():
        findings.count("files")
        if not (folder / name).is_file():
            findings.damage("files", name, "is in the manifest, but not on disk")
        elif hashes:
            findings.count("hashes")
            if (problem := hash_problem(folder, name, sha256)) is not None:
                findings.damage("hashes", name, problem)
    if not hashes:
        findings.not_checked.append("hashes: not asked for")
    known = {shard.name for shard in manifest.shards} | manifest.files.keys() | WRITTEN_ABOUT | {JOURNAL}
    has_templates = any(map(is_template_beside, manifest.files))
    for path in sorted([*folder.iterdir(), *((folder / TEMPLATES).iterdir() if (folder / TEMPLATES).is_dir() else ())]):
        name = path.relative_to(folder).as_posix()
        if name not in known and not path.name.startswith(".") and not (has_templates and name == TEMPLATES and path.is_dir()):
            what = "holds weights, but" if path.suffix in WEIGHT_SUFFIXES else "lies in the folder, but"
            findings.damage("files", name, f"{what} the manifest does not know it")
        elif name in manifest.files.keys() - MADE_ANEW and not is_copied(name, path.stat().st_size):
            findings.damage("files", name, "is in the manifest, but quantizing makes and copies no such file")


def check_copies(folder: Path, manifest: Manifest, source: Checkpoint, findings: Findings) -> None:
    """Every file beside the weights is the source's, byte for byte, or one that is made anew; and none is left out."""
    copied = copied_of(source.data)
    for name in copied:
        findings.count("copies")
        if name not in manifest.files:
            findings.damage("copies", name, f"is in {source.location}, but was not copied")
        elif (folder / name).is_file() and not findings.is_damaged(name):
            expected = source.data[name].removeprefix("sha256:")
            if (problem := hash_problem(folder, name, expected, f"that in {source.location} has")) is not None:
                findings.damage("copies", name, problem)
    for name in sorted(manifest.files.keys() - MADE_ANEW - set(copied)):
        if not findings.is_damaged(name):
            findings.damage("copies", name, f"is no file that is copied from {source.location}")


def hash_problem(
    folder: Path,
    name: str,
    expected: str,
    authority: str = "the manifest says",
    *,
    on_piece: Callable[[int], None] | None = None,
    is_needed_again: bool = False,
) -> str | None:
    """What is wrong with the SHA-256 of a file. authority: who has `expected`. The others: as for `hash_file`."""
    try:
        sha256 = hash_file(folder, name, on_piece, is_needed_again=is_needed_again)
    except OSError as problem:
        return f"cannot be read: {problem.strerror}"
    except CheckpointError as problem:
        return str(problem).removeprefix(f"{folder / name}: ")
    return None if sha256 == expected else f"has SHA-256 {sha256[:12]}...; {authority} {expected[:12]}..."


def json_object(folder: Path, name: str, findings: Findings) -> dict[str, Any] | None:
    """A JSON file of the checkpoint; None, with a damage, when it is none."""
    findings.count("files")
    try:
        return read_json_object(folder, name, unique_names=True)
    except CheckpointError as problem:
        findings.damage("files", name, str(problem).removeprefix(f"{folder / name}: "))
        return None


# ------------------------------------------------------------------------------------------------ headers
def stored_tensors(folder: Path, findings: Findings) -> dict[str, TensorHeader]:
    """Every tensor on disk, by the shards' own headers."""
    stored: dict[str, TensorHeader] = {}
    for path in sorted(folder.glob("*.safetensors")):
        findings.count("headers")
        try:
            headers = read_shard_header(folder, path.name)
        except CheckpointError as problem:
            findings.damage("headers", path.name, str(problem).removeprefix(f"{path}: "))
            continue
        for name, header in headers.items():
            if name in stored:
                findings.damage("headers", name, f"is in two shards: {stored[name].shard} and {path.name}")
            stored[name] = header
    return stored


def check_index(folder: Path, stored: Mapping[str, TensorHeader], findings: Findings) -> None:
    index = json_object(folder, INDEX_NAME, findings)
    if index is None:
        return
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict):
        findings.damage("index", INDEX_NAME, "has no weight_map")
        return
    listed = {str(shard) for shard in weight_map.values()}
    on_disk = {path.name for path in folder.glob("*.safetensors")}
    findings.count("index", len(stored) + len(on_disk))
    for shard in sorted(on_disk - listed):
        findings.damage("index", shard, "is on disk, but the index puts no tensor in it: vLLM never reads it")
    for shard in sorted(listed - on_disk):
        findings.damage("index", shard, "is in the index, but not on disk")
    weight_map = {name_of_part(name): shard for name, shard in weight_map.items()}
    for name, shard in weight_map.items():
        header = stored.get(name)
        if header is not None and header.shard != shard:
            findings.damage("index", name, f"is in {header.shard}, the index says {shard}")
        elif header is None and shard in on_disk:
            findings.damage("index", name, f"is in the index, but {shard} does not hold it")
    for name, header in stored.items():
        if name not in weight_map and header.shard in listed:
            findings.damage("index", name, f"is in {header.shard}, but not in the index: vLLM loads it all the same")
    num_bytes = sum(header.num_bytes for header in stored.values())
    metadata = index.get("metadata")
    total_size = metadata.get("total_size") if isinstance(metadata, dict) else None
    if total_size != num_bytes:
        findings.damage("index", INDEX_NAME, f"says total_size {total_size}, the shards hold {num_bytes} bytes")


def is_stored_as(output: OutputTensor, header: TensorHeader | None) -> bool:
    """Whether a planned output has the planned dtype and shape on disk."""
    return header is not None and (header.dtype, header.shape) == (output.dtype, tuple(output.shape))


def check_planned(plan: Plan, stored: Mapping[str, TensorHeader], findings: Findings, *, shards: bool) -> None:
    """Every planned output is stored, as planned, and nothing else is. shards: also in the planned file."""
    planned = set()
    for tensor in plan.tensors:
        check = "router_bias" if tensor.part == "router_bias" else "tensors"
        for output in tensor.outputs:
            planned.add(output.name)
            findings.count(check)
            header = stored.get(output.name)
            expected = f"{output.dtype} {list(output.shape)}"
            if header is None:
                findings.damage(check, output.name, f"is in no shard; planned: {expected} in {tensor.shard_out}")
            elif not is_stored_as(output, header):
                findings.damage(check, output.name, f"is {header.dtype} {list(header.shape)}; planned: {expected}")
            elif shards and header.shard != tensor.shard_out:
                findings.damage(check, output.name, f"is in {header.shard}; planned: {tensor.shard_out}")
    for name in stored:
        if name not in planned:
            findings.damage("tensors", name, f"is in {stored[name].shard}, but nothing in the plan makes it")


# ------------------------------------------------------------------------------------------------ the safetensors library
def library_headers(folder: Path, shard: str) -> dict[str, TensorHeader]:
    """Headers of one file, in the order of their data. CheckpointError where the library refuses it; OSError, with its path.

    The library checks that the data of all tensors, in order, is all there is behind the header; so offsets are sums of sizes.
    """
    path = folder / shard
    with naming(path), open_inside(folder, shard) as file:
        begin = 8 + int.from_bytes(file.read(8), "little")
    headers = {}
    try:
        with safe_open(path, framework="numpy") as opened:
            for stored_name in opened.offset_keys():
                part, name = opened.get_slice(stored_name), name_of_part(stored_name)
                shape, dtype = tuple(part.get_shape()), part.get_dtype()
                end = begin + math.prod(shape) * BYTES[dtype]
                headers[name] = TensorHeader(name, dtype, shape, shard, begin, end)
                begin = end
    except SafetensorError as problem:
        raise CheckpointError(f"{path}: refused by the safetensors library: {problem}") from None
    except OSError as problem:  # the library calls all of them FileNotFoundError, some without a number
        raise OSError(problem.errno or errno.EIO, "the safetensors library cannot read it", str(path)) from None
    return headers


def check_metadata(folder: Path, shards: Iterable[str], findings: Findings) -> None:
    """Shards of a checkpoint say `{"format": "pt"}` beside their tensors, and nothing else."""
    for shard in shards:
        try:
            with safe_open(folder / shard, framework="numpy") as opened:
                metadata = opened.metadata()
        except (SafetensorError, OSError):
            continue  # `check_headers` says so
        if metadata != {"format": "pt"}:
            findings.damage("library", shard, f"has the metadata {str(metadata)[:200]}; expected {{'format': 'pt'}}")


def check_headers(
    folder: Path, parsed: Mapping[str, TensorHeader], shards: Collection[str], findings: Findings
) -> dict[str, TensorHeader]:
    """The library's headers of `shards`; every tensor that it sees otherwise than `parsed` has it is a damage.

    parsed: of all these shards, and maybe of others. CheckpointError when one of them cannot be read (any more).
    """
    by_library: dict[str, TensorHeader] = {}
    for shard in shards:
        findings.count("library")
        try:
            by_library |= library_headers(folder, shard)
        except CheckpointError as problem:
            findings.damage("library", shard, str(problem).removeprefix(f"{folder / shard}: "))
        except OSError as problem:
            raise CheckpointError(f"{folder / shard}: cannot be read: {problem.strerror}") from None
    for name in sorted(parsed.keys() | by_library.keys()):
        header, other = parsed.get(name), by_library.get(name)
        if header != other and (other is not None or (header is not None and header.shard in shards)):
            what = f"is {_shown(header)} by its parsed header, {_shown(other)} by the safetensors library"
            findings.damage("library", name, what)
    return by_library


def source_headers(source: Checkpoint, findings: Findings) -> dict[str, TensorHeader]:
    """The library's headers of a source; where the parser reads them otherwise is a damage."""
    assert source.folder is not None, "opened as a folder"
    parsed = {name: header for shard in source.shards for name, header in read_shard_header(source.folder, shard).items()}
    return check_headers(source.folder, parsed, source.shards, findings)


def _shown(header: TensorHeader | None) -> str:
    if header is None:
        return "not there"
    return f"{header.dtype} {list(header.shape)} at {header.begin} of {header.shard}"
