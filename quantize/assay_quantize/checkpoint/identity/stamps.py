"""Whether the shards of a source are still those that a run began with, while it reads them.

Of a folder the whole stamp counts (`assay/file_data.py`). A staged file of a checkpoint on the hub is replaced by others of the
same content, for which its time stands (`remote/hub_stream.py`): of it size and time count.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from assay.errors import CheckpointError, QuantizeError
from assay.records.plan import Plan

FileStamp = tuple[int, ...]
"""Size in bytes, time of the last write in ns; of a file in a folder also that of the last change, and its inode."""


def stamps_of(plan: Plan, source: Path, shards: Iterable[str]) -> dict[str, FileStamp]:
    """Shard -> its stamp now. CheckpointError when one is gone."""
    found: dict[str, FileStamp] = {}
    for shard in shards:
        try:
            status = (source / shard).stat()
        except OSError as error:
            raise CheckpointError(f"{source / shard}: cannot be read: {error.strerror}") from None
        stamp = (status.st_size, status.st_mtime_ns)
        found[shard] = stamp if plan.source_revision is not None else (*stamp, status.st_ctime_ns, status.st_ino)
    return found


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
