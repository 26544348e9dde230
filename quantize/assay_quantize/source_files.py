"""Whether the files of a source are still those a run began with: their size and time of change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from assay.errors import CheckpointError, QuantizeError

FileStamp = tuple[int, int]
"""Size in bytes, and time of the last change in ns."""


def stamps_of(source: Path, shards: Iterable[str]) -> dict[str, FileStamp]:
    """Shard -> its stamp now. CheckpointError when one is gone."""
    found = {}
    for shard in shards:
        try:
            status = (source / shard).stat()
        except OSError as error:
            raise CheckpointError(f"{source / shard}: cannot be read: {error.strerror}") from None
        found[shard] = (status.st_size, status.st_mtime_ns)
    return found


def check_stamps(
    source: Path, expected: Mapping[str, FileStamp] | None, now: Mapping[str, FileStamp], out_folder: Path
) -> None:
    """Refuse a shard that is not what it was. expected: None, or without a shard: nothing is known about it."""
    for shard, stamp in now.items():
        before = None if expected is None else expected.get(shard)
        if before is None or tuple(before) == stamp:
            continue
        how = f"{before[0]} bytes before, {stamp[0]} now" if before[0] != stamp[0] else "same size, written to since"
        raise QuantizeError(
            f"{source / shard}: changed since this run began ({how}); put the file back as it was, with its time, or delete "
            f"{out_folder} and start again"
        )
