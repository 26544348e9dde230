"""Headers of safetensors files by the safetensors library, to be held against those that `checkpoint/headers.py` parsed.

Only headers: the library maps files into memory, and a mapped file that somebody truncates ends the process. Bytes are read at
the library's offsets with `preadv` (`files.py`).
"""

from __future__ import annotations

import errno
import math
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open

from assay.atomic_files import naming
from assay.errors import CheckpointError
from assay.safe_files import open_inside
from assay_quantize.checkpoint.headers import TensorHeader
from assay_quantize.verify.findings import Findings

BYTES: Mapping[str, int] = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip
"""dtype -> bytes of an element."""


def library_headers(folder: Path, shard: str) -> dict[str, TensorHeader]:
    """Headers of one file, in the order of their data. CheckpointError where the library refuses it; OSError, with its path.

    The library checks that the data of all tensors, in order, is all there is behind the header; so offsets are sums of sizes.
    """
    path = folder / shard
    with naming(path), open_inside(folder, shard) as file:
        begin = 8 + int.from_bytes(file.read(8), "little")
    found = {}
    try:
        with safe_open(path, framework="numpy") as opened:
            for name in opened.offset_keys():
                part = opened.get_slice(name)
                shape, dtype = tuple(part.get_shape()), part.get_dtype()
                end = begin + math.prod(shape) * BYTES[dtype]
                found[name] = TensorHeader(name, dtype, shape, shard, begin, end)
                begin = end
    except SafetensorError as problem:
        raise CheckpointError(f"{path}: refused by the safetensors library: {problem}") from None
    except OSError as problem:  # the library calls all of them FileNotFoundError, some without a number
        raise OSError(problem.errno or errno.EIO, "the safetensors library cannot read it", str(path)) from None
    return found


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
    read: dict[str, TensorHeader] = {}
    for shard in shards:
        findings.look("library")
        try:
            read |= library_headers(folder, shard)
        except CheckpointError as problem:
            findings.damage("library", shard, str(problem).removeprefix(f"{folder / shard}: "))
        except OSError as problem:
            raise CheckpointError(f"{folder / shard}: cannot be read: {problem.strerror}") from None
    for name in sorted(parsed.keys() | read.keys()):
        ours, theirs = parsed.get(name), read.get(name)
        if ours != theirs and (theirs is not None or (ours is not None and ours.shard in shards)):
            what = f"is {_shown(ours)} by its parsed header, {_shown(theirs)} by the safetensors library"
            findings.damage("library", name, what)
    return read


def _shown(header: TensorHeader | None) -> str:
    if header is None:
        return "not there"
    return f"{header.dtype} {list(header.shape)} at {header.begin} of {header.shard}"
