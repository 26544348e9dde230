"""Which data files have: what a checkpoint was made from, and whether files are still those that were read.

Two fine-tunes of one model have the same headers, config and often the same folder name, so headers identify nothing but the
shape. A file on the hub is identified by the hash the hub states (`sha256:...`, or git's, `blob:...`); a small file in a folder
by its SHA-256; a shard there by its stamp (size, times of modification and of change, inode), because hashing 1.5 TB takes
ten minutes. A stamp errs on one side only: an unchanged file that was copied or restored counts as another.
"""

from __future__ import annotations

import datetime
import hashlib
import io
from collections.abc import Iterable, Mapping
from pathlib import Path

from assay.errors import CheckpointError
from assay.safe_files import open_inside


def data_of_files(folder: Path, files: Iterable[str]) -> dict[str, str]:
    """File -> `stamp:BYTES:MTIME_NS:CTIME_NS:INODE`, links followed. CheckpointError when one is gone."""
    data = {}
    for name in files:
        try:
            status = (folder / name).stat()
        except OSError as error:
            raise CheckpointError(f"{folder / name}: cannot be read: {error.strerror}") from None
        data[name] = f"stamp:{status.st_size}:{status.st_mtime_ns}:{status.st_ctime_ns}:{status.st_ino}"
    return data


def hashes_of_files(folder: Path, files: Iterable[str]) -> dict[str, str]:
    """File -> `sha256:HEX`, for small files. CheckpointError when one cannot be read, or is a link out of the folder."""
    hashes = {}
    for name in files:
        try:
            with open_inside(folder, name) as file:
                hashes[name] = f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
        except OSError as error:
            raise CheckpointError(f"{folder / name}: cannot be read: {error.strerror}") from None
    return hashes


def content_differs(data: str, num_bytes: int, file: io.BufferedIOBase) -> str:
    """Which hash of a file is not the one in `data` (`sha256:...`, `blob:...`): `SHA-256` or `git hash`; empty: it is."""
    kind, _, expected = data.partition(":")
    assert kind in ("sha256", "blob"), data
    if kind == "blob":
        git_hash = hashlib.sha1(b"blob %d\0" % num_bytes, usedforsecurity=False)
        digest, what = hashlib.file_digest(file, lambda: git_hash), "git hash"
    else:
        digest, what = hashlib.file_digest(file, "sha256"), "SHA-256"
    return "" if digest.hexdigest() == expected else what


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
