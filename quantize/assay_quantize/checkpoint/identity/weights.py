"""Which weights a checkpoint has, whatever its files are called and wherever they lie.

Two fine-tunes of one model differ in nothing but the data, and a file has another stamp after a copy. So: SHA-256 over the
name, dtype and shape of every tensor and PIECE_BYTES of each, at a place drawn by its name. Reading that of 59,585 tensors
takes seconds. It does not help against somebody who wants two models to be taken for one another, nor against a change of a
few values.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections import defaultdict
from pathlib import Path

from assay.errors import CheckpointError
from assay.safe_files import open_inside
from assay_quantize.checkpoint.checkpoint import Checkpoint
from assay_quantize.checkpoint.headers import TensorHeader

PIECE_BYTES = 1024


def weights_sha256(checkpoint: Checkpoint) -> str | None:
    """None: its weights, or some of them, are not in its folder. CheckpointError when a file cannot be read."""
    folder = checkpoint.folder
    if folder is None or not all((folder / shard).is_file() for shard in checkpoint.shards):
        return None
    by_shard: defaultdict[str, list[TensorHeader]] = defaultdict(list)
    for header in checkpoint.tensors.values():
        by_shard[header.shard].append(header)
    pieces = {name: piece for shard, headers in by_shard.items() for name, piece in _pieces(folder, shard, headers)}
    digest = hashlib.sha256()
    for name, header in sorted(checkpoint.tensors.items()):
        digest.update(f"{name} {header.dtype} {'x'.join(map(str, header.shape))}\n".encode())
        digest.update(pieces[name])
    return digest.hexdigest()


def _pieces(folder: Path, shard: str, headers: list[TensorHeader]) -> list[tuple[str, bytes]]:
    try:
        with open_inside(folder, shard) as file:
            return [(header.name, os.pread(file.fileno(), PIECE_BYTES, _place(header))) for header in headers]
    except OSError as error:
        raise CheckpointError(f"{folder / shard}: cannot be read: {error.strerror}") from None


def _place(header: TensorHeader) -> int:
    return header.begin + zlib.crc32(header.name.encode()) % (max(0, header.num_bytes - PIECE_BYTES) + 1)
