"""Which data a source has, file by file, and whether its files are still those that a run began with.

Two fine-tunes of one model have the same headers, config and often the same folder name, so headers identify nothing but the
shape. A file on the hub is identified by the hash the hub states; a file in a folder by its stamp (size, times of
modification and of change, inode), because hashing 1.5 TB takes ten minutes. A stamp errs on one side only: an unchanged
file that was copied or restored counts as another.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping
from pathlib import Path

from assay.errors import CheckpointError, QuantizeError

FileStamp = tuple[int, int]
"""Size in bytes, and time of the last change in ns."""


def data_of_files(folder: Path, files: Iterable[str]) -> dict[str, str]:
    """File -> `stamp:BYTES:MTIME_NS:CTIME_NS:INODE`, links followed. CheckpointError when one is gone."""
    found = {}
    for name in files:
        try:
            status = (folder / name).stat()
        except OSError as error:
            raise CheckpointError(f"{folder / name}: cannot be read: {error.strerror}") from None
        found[name] = f"stamp:{status.st_size}:{status.st_mtime_ns}:{status.st_ctime_ns}:{status.st_ino}"
    return found


def other_data(before: Mapping[str, str], now: Mapping[str, str]) -> str | None:
    """How two sources differ in their data, by one file; None: they do not.

    before, now: `Plan.source_files` of what was made and of what is there.
    """
    for name in sorted({*before, *now}):
        old, new = before.get(name), now.get(name)
        if old == new:
            continue
        if old is None or new is None:
            return f"{name} is {'new' if old is None else 'gone'}"
        was, is_ = _shown(old), _shown(new)
        return f"{name} was {was}, is {is_ if is_ != was else 'another file of the same size and time'}"
    return None


def _shown(data: str) -> str:
    """What a person can tell data by: size and time of writing, or the first digits of its hash."""
    kind, _, rest = data.partition(":")
    if kind != "stamp":
        return f"{kind} {rest[:12]}"
    try:
        num_bytes, written_ns = (int(number) for number in rest.split(":")[:2])
        return f"{num_bytes} bytes of {datetime.datetime.fromtimestamp(written_ns / 1e9):%Y-%m-%d %H:%M:%S}"
    except (ValueError, OverflowError, OSError):  # no stamp of ours, or of a year that no calendar has
        return data[:80]


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
