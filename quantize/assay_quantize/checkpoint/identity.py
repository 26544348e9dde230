"""What a checkpoint is known by: its shards while a run reads them, and the hash of its weights.

Of a folder the whole stamp of a shard counts (`assay/file_data.py`). A staged file of a checkpoint on the hub is replaced by
others of the same content, for which its time stands (`remote/hub_stream.py`): of it size and time count.

Two fine-tunes of one model differ in nothing but the data, and a file has another stamp after a copy. So the hash is SHA-256
over the name, dtype and shape of every tensor and PIECE_BYTES of each, at a place drawn by its name. Reading that of 59,585
tensors takes seconds. It does not help against somebody who wants two models to be taken for one another, nor against a change
of a few values.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from assay.errors import CheckpointError, QuantizeError
from assay.file_data import data_of_files, hashes_of_files, other_data
from assay.records.plan import Plan
from assay.safe_files import open_inside
from assay_quantize.checkpoint.checkpoint import Checkpoint
from assay_quantize.checkpoint.headers import TensorHeader

FileStamp = tuple[int, ...]
"""Size in bytes, time of the last write in ns; of a file in a folder also that of the last change, and its inode."""


def stamps_of(plan: Plan, source: Path, shards: Iterable[str]) -> dict[str, FileStamp]:
    """Shard -> its stamp now. CheckpointError when one is gone."""
    stamps: dict[str, FileStamp] = {}
    for shard in shards:
        try:
            status = (source / shard).stat()
        except OSError as error:
            raise CheckpointError(f"{source / shard}: cannot be read: {error.strerror}") from None
        stamp = (status.st_size, status.st_mtime_ns)
        stamps[shard] = stamp if plan.source_revision is not None else (*stamp, status.st_ctime_ns, status.st_ino)
    return stamps


def check_source(plan: Plan, source: Path) -> None:
    """Refuse a folder whose data is not what the plan was made of. Of a source on the hub, the download checks the hashes."""
    if plan.source_revision is not None:
        return
    stamped = {name for name, data in plan.source_files.items() if data.startswith("stamp:")}
    now = data_of_files(source, stamped) | hashes_of_files(source, plan.source_files.keys() - stamped)
    if (how := other_data(plan.source_files, now)) is not None:
        raise QuantizeError(f"{source}: its data is not what the plan was made of: {how}; make the plan anew")


def check_stamps(
    source: Path, expected: Mapping[str, FileStamp] | None, now: Mapping[str, FileStamp], out_folder: Path
) -> None:
    """Refuse a shard that is not what it was. expected: None, or without a shard: nothing is known about it."""
    for shard, stamp in now.items():
        before = None if expected is None else expected.get(shard)
        if before is None or before == stamp:
            continue
        how = f"{before[0]} bytes before, {stamp[0]} now" if before[0] != stamp[0] else "same size, written to since"
        raise QuantizeError(
            f"{source / shard}: changed since this run began ({how}); put the file back as it was, or delete {out_folder} and "
            "start again"
        )


PIECE_BYTES = 1024


def weights_sha256(checkpoint: Checkpoint) -> str | None:
    """None: its weights, or some of them, are not in its folder. CheckpointError when a file cannot be read."""
    folder = checkpoint.folder
    if folder is None or not all((folder / shard).is_file() for shard in checkpoint.shards):
        return None
    by_shard: defaultdict[str, list[TensorHeader]] = defaultdict(list)
    for header in checkpoint.tensors.values():
        by_shard[header.shard].append(header)
    pieces: dict[str, bytes] = {}
    for shard, headers in by_shard.items():
        try:
            with open_inside(folder, shard) as file:
                for header in headers:
                    place = zlib.crc32(header.name.encode()) % (max(0, header.num_bytes - PIECE_BYTES) + 1)
                    pieces[header.name] = os.pread(file.fileno(), PIECE_BYTES, header.begin + place)
        except OSError as error:
            raise CheckpointError(f"{folder / shard}: cannot be read: {error.strerror}") from None
    digest = hashlib.sha256()
    for name, header in sorted(checkpoint.tensors.items()):
        digest.update(f"{name} {header.dtype} {'x'.join(map(str, header.shape))}\n".encode())
        digest.update(pieces[name])
    return digest.hexdigest()
