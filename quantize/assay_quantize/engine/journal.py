"""What was finished, so that a killed run goes on: one line about the run, then one `ShardRecord` for every finished shard.

The first line says what the run makes from what: hashes of plan, recipe and source headers, and what identifies the data of
every source shard. Lines are appended and fsynced; a torn last line (killed while appending) counts as not written.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from assay.atomic_files import naming
from assay.errors import AssayError, QuantizeError
from assay.file_data import other_data
from assay.records.manifest import ShardRecord
from assay.records.plan import Plan
from assay.safe_files import open_own_file
from assay_quantize.checkpoint.file_names import JOURNAL
from assay_quantize.checkpoint.shard_files import fsync_folder, planned_shards
from assay_quantize.storage.hash_files import MOST_AT_ONCE, hash_file

log = logging.getLogger(__name__)


@contextmanager
def locked_journal(folder: Path) -> Iterator[FileIO]:
    """The journal, open for reading and appending, locked against a second process."""
    path = folder / JOURNAL
    # without a buffer: what a full disk has refused must not be written once more when the file is closed
    with open(path, "a+b", buffering=0, opener=_open) as journal:
        try:
            fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise QuantizeError(f"{folder}: another process is quantizing into it; wait for it, or end it") from None
        if not path.exists() or not os.path.samestat(os.fstat(journal.fileno()), path.stat()):
            raise QuantizeError(f"{folder}: another process has just finished there; run the same command again")
        yield journal


def _open(path: str, flags: int) -> int:
    try:
        return open_own_file(path, flags, "journal")
    except AssayError as problem:
        raise QuantizeError(str(problem)) from None


def append(journal: FileIO, entry: Mapping[str, Any]) -> None:
    """One line, on the disk when this returns. Raises QuantizeError when it cannot be written."""
    with writing(journal.name):
        _write(journal, json.dumps(entry, ensure_ascii=False) + "\n")
        os.fsync(journal.fileno())


def _write(journal: FileIO, text: str) -> None:
    rest = memoryview(text.encode(errors="backslashreplace"))
    while rest:
        rest = rest[journal.write(rest) :]


@contextmanager
def writing(path: Path | str) -> Iterator[None]:
    """OSError while writing `path` as one line for the user."""
    try:
        yield
    except OSError as problem:
        raise QuantizeError(f"{path}: cannot be written: {problem.strerror}; finished shards stay, run again") from None


def resume(
    plan: Plan,
    digest: str,
    folder: Path,
    journal: FileIO,
    *,
    workers: int,
    on_progress: Callable[[str, int], None] | None = None,
) -> dict[str, ShardRecord]:
    """Shards finished by an earlier run of the same plan from the same files; begins the journal if new.

    Every finished shard's size and hash are read again, `workers` files at once. on_progress: (`SHARD (done before)`, its bytes
    of the source). Removes half-written files of the killed run, and nothing else. Raises QuantizeError: another plan, or a
    source shard that changed since.
    """
    for leftover in folder.glob(".*.partial"):
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)  # of Ray's attempts; a dying worker may still be writing there
        else:
            leftover.unlink()
    journal.seek(0)
    with naming(folder / JOURNAL):
        text = journal.readall().decode(errors="backslashreplace")  # a torn line may end inside a character
    entries = _entries(text)
    if not entries:
        with writing(journal.name):
            journal.truncate(0)
        append(journal, _begin_entry(plan, digest))
        fsync_folder(folder)
        return {}
    if not text.endswith("\n"):
        with writing(journal.name):
            _write(journal, "\n")  # killed while appending: the torn line must not swallow the next one
    entry = _begin_entry(plan, digest)
    _check_same_run(entries[0], entry, folder)
    if (how := other_data(entries[0].get("source_data") or {}, entry["source_data"])) is not None:
        raise QuantizeError(
            f"{folder}: begun with other data ({entries[0].get('source')}: {how}); give another folder, or delete this one"
        )
    planned = planned_shards(plan)
    claimed: dict[str, ShardRecord] = {}
    for entry in entries[1:]:
        try:
            record = ShardRecord.model_validate(entry)
        except ValidationError:
            continue
        if record.name in planned:
            claimed[record.name] = record  # made again, the later record holds
    lock = threading.Lock()

    def is_as_written(record: ShardRecord) -> bool:
        path = folder / record.name
        is_same = size_of(path) == record.num_bytes and hash_file(folder, record.name) == record.sha256
        if not is_same:
            log.warning("%s: not as it was written; it is made again", path)
        elif on_progress is not None:
            with lock:
                on_progress(f"{record.name} (done before)", sum(tensor.num_bytes for tensor in planned[record.name]))
        return is_same

    with ThreadPoolExecutor(min(workers, MOST_AT_ONCE)) as pool:
        kept = list(pool.map(is_as_written, claimed.values()))
    return {record.name: record for record, keep in zip(claimed.values(), kept, strict=True) if keep}


def num_finished(folder: Path) -> int:
    """Shards that the journal of an unfinished checkpoint lists; 0 if there is none."""
    if not (folder / JOURNAL).is_file():
        return 0
    entries = _entries((folder / JOURNAL).read_text(encoding="utf-8", errors="backslashreplace"))
    return len({entry.get("name") for entry in entries[1:]})


def size_of(path: Path) -> int | None:
    """Bytes of a file; None: there is none."""
    return path.stat().st_size if path.is_file() else None


def _begin_entry(plan: Plan, digest: str) -> dict[str, Any]:
    shards = {tensor.shard_in for tensor in plan.tensors}
    return {
        "begin": 1,
        "precision": plan.precision,
        "recipe_sha256": plan.recipe_sha256,
        "source": plan.source,
        "source_sha256": plan.source_sha256,
        "importance_sha256": plan.importance_sha256,
        "plan_sha256": digest,
        # of the shards: what else is copied comes after them, from the source as it is then
        "source_data": {name: data for name, data in plan.source_files.items() if name in shards},
    }


def _entries(text: str) -> list[dict[str, Any]]:
    """Whole lines of a journal; a torn one (killed while appending) is dropped."""
    entries = []
    for line in text.split("\n"):  # a path may hold what `splitlines` takes for the end of a line
        try:
            entry = json.loads(line)
        except (json.JSONDecodeError, RecursionError):
            continue
        if isinstance(entry, dict):
            entries.append(entry)
    return entries


def _check_same_run(begun: Mapping[str, Any], entry: Mapping[str, Any], folder: Path) -> None:
    """begun: the first line of the journal; entry: what it would be now."""
    if begun.get("plan_sha256") == entry["plan_sha256"]:
        return
    labels = {
        "recipe_sha256": "precision",
        "source_sha256": "source",
        "importance_sha256": "precision",
        "plan_sha256": "precision",
    }
    key = next(key for key in labels if begun.get(key) != entry[key])
    what, label = key.removesuffix("_sha256"), labels[key]
    raise QuantizeError(
        f"{folder}: begun with {what} {begun.get(label)} {str(begun.get(key))[:12]}, now asked for {entry[label]} "
        f"{str(entry[key])[:12]}; go on with the first, give another folder, or delete this one"
    )
