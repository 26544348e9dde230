"""Run a plan: shard by shard, journaled, resumable; then publish.

What lies in the folder, and when:

    assay_journal.jsonl     from the start: one line about the plan, then one `ShardRecord` for every finished shard
    *.safetensors           each appears by rename when it is whole
    tokenizer, index, ...   after the last shard; config.json as the last of them, so that no loader opens less than all
    assay_manifest.json     at the very end; then the journal goes

Killed at any point, the same call goes on with the first shard that is not in the journal and ends with the same bytes.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from pydantic import ValidationError

from assay.errors import AssayError, QuantizeError
from assay.records import Manifest, Plan, ShardRecord, sha256_of, sha256_of_file
from assay_quantize.checkpoint import open_checkpoint
from assay_quantize.publish import MANIFEST, files_to_copy, publish
from assay_quantize.shard_files import fsync_folder, header_bytes, planned_shards

if TYPE_CHECKING:
    from assay_quantize.shards import Progress

JOURNAL = "assay_journal.jsonl"
SPARE_BYTES = 64 << 20
"""Free disk asked for beyond the planned bytes: index, config, manifest, the file system's own needs."""

log = logging.getLogger(__name__)


def plan_sha256(plan: Plan) -> str:
    """Identity of what a plan does: everything but the names given to model, precision and source folder."""
    fields = ("family", "source_sha256", "precision_recipe", "config", "mtp_layers", "ignore", "tensors")
    return sha256_of({field: getattr(plan, field) for field in fields})


def is_complete(plan: Plan, folder: Path, digest: str | None = None) -> bool:
    """Whether `folder` holds the finished checkpoint of this very plan: its manifest, every file, in its size.

    digest: `plan_sha256(plan)`, if it is known already.
    """
    path = folder / MANIFEST
    if not path.is_file():
        return False
    try:
        manifest = Manifest.load(path)
    except AssayError:
        return False
    if manifest.plan_sha256 != (digest or plan_sha256(plan)):
        return False
    shards = all(_size(folder / shard.name) == shard.num_bytes for shard in manifest.shards)
    return shards and all((folder / name).is_file() for name in manifest.files)


def quantize(
    plan: Plan, source: Path, out_folder: Path, *, device: str = "auto", on_progress: Progress | None = None
) -> Manifest:
    """Make the checkpoint `plan` describes from the folder `source`, in `out_folder`; go on where a killed run stopped.

    device: `cpu`, `cuda`, or `auto` (CUDA if there is one). on_progress: called with (tensor name, bytes read) per tensor.
    A finished checkpoint of the same plan is returned at once.
    Raises QuantizeError: no room on the disk, a folder with something else in it, a resume with another recipe or source,
    another process at work in the same folder.
    """
    digest = plan_sha256(plan)
    if is_complete(plan, out_folder, digest):
        (out_folder / JOURNAL).unlink(missing_ok=True)  # killed between manifest and clean-up
        return Manifest.load(out_folder / MANIFEST)
    # only now: torch takes seconds to import, and a finished checkpoint is told from its manifest without it
    from assay_quantize.shards import quantize_shard

    started = time.monotonic()
    device = _resolve_device(device)
    checkpoint = open_checkpoint(source)
    shards = planned_shards(plan)
    _check_folder(plan, digest, out_folder)
    is_new = not out_folder.exists()
    out_folder.mkdir(parents=True, exist_ok=True)
    with _locked_journal(out_folder) as journal:
        done = _resume(plan, digest, out_folder, journal)
        try:
            _check_disk(plan, source, out_folder, done)
        except QuantizeError:
            if not done:  # nothing begun: leave the folder as it was, free for another precision
                (out_folder / JOURNAL).unlink()
                if is_new:
                    out_folder.rmdir()
            raise
        for name, tensors in shards.items():
            if name in done:
                if on_progress is not None:
                    on_progress(f"{name} (done before)", sum(tensor.num_bytes for tensor in tensors))
                continue
            record = quantize_shard(plan, name, checkpoint, out_folder, device, on_progress)
            _append(journal, record.model_dump(mode="json"))
            done[name] = record
        manifest = publish(
            plan,
            source,
            out_folder,
            shards=tuple(done[name] for name in shards),
            plan_sha256=digest,
            seconds=sum(record.seconds for record in done.values()) or time.monotonic() - started,
        )
        (out_folder / JOURNAL).unlink()
        fsync_folder(out_folder)
    return manifest


def _resolve_device(device: str) -> str:
    import torch

    has_cuda = torch.cuda.is_available()
    if device == "auto":
        return "cuda" if has_cuda else "cpu"
    if device == "cuda" and not has_cuda:
        raise QuantizeError("--device cuda: PyTorch sees no CUDA device here; say --device cpu, or auto")
    if device not in ("cpu", "cuda"):
        raise QuantizeError(f"--device {device}: say cpu, cuda or auto")
    return device


def _check_folder(plan: Plan, digest: str, folder: Path) -> None:
    """Refuse a folder that holds anything but an unfinished run of ours."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise QuantizeError(f"{folder}: is a file; give a folder that is empty or does not exist")
    if (folder / MANIFEST).exists():
        manifest = Manifest.load(folder / MANIFEST)
        if manifest.plan_sha256 == digest:
            missing = [s.name for s in manifest.shards if _size(folder / s.name) != s.num_bytes]
            missing += [name for name in manifest.files if not (folder / name).is_file()]
            raise QuantizeError(f"{folder}: its manifest says finished, but {missing[0]} is missing or has another size; "
                                "delete the folder and run again")  # fmt: skip
        raise QuantizeError(f"{folder}: holds a finished checkpoint of another plan ({_differences(manifest, plan, digest)}); "
                            "give another folder, or delete this one")  # fmt: skip
    if (folder / JOURNAL).exists():
        return
    foreign = sorted(path.name for path in folder.iterdir())
    if foreign:
        raise QuantizeError(f"{folder}: not empty (it holds {foreign[0]}) and not begun by assay; give an empty folder")


def _differences(other: Manifest, plan: Plan, digest: str) -> str:
    if other.recipe_sha256 != plan.recipe_sha256:
        return f"recipe {other.precision} {other.recipe_sha256[:12]}, asked for {plan.precision} {plan.recipe_sha256[:12]}"
    if other.source_sha256 != plan.source_sha256:
        return f"source {other.source} {other.source_sha256[:12]}, asked for {plan.source} {plan.source_sha256[:12]}"
    return f"plan {other.plan_sha256[:12]}, asked for {digest[:12]}"


# ------------------------------------------------------------------------------------------------ journal
@contextmanager
def _locked_journal(folder: Path) -> Iterator[TextIO]:
    """The journal, open for reading and appending, locked against a second process."""
    with (folder / JOURNAL).open("a+", encoding="utf-8") as journal:
        try:
            fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise QuantizeError(f"{folder}: another process is quantizing into it; wait for it, or end it") from None
        yield journal


def _append(journal: TextIO, entry: dict[str, Any]) -> None:
    journal.write(json.dumps(entry, ensure_ascii=False) + "\n")
    journal.flush()
    os.fsync(journal.fileno())


def _begin_entry(plan: Plan, digest: str) -> dict[str, Any]:
    return {
        "begin": 1,
        "precision": plan.precision,
        "recipe_sha256": plan.recipe_sha256,
        "source": plan.source,
        "source_sha256": plan.source_sha256,
        "plan_sha256": digest,
    }


def _resume(plan: Plan, digest: str, folder: Path, journal: TextIO) -> dict[str, ShardRecord]:
    """Shards finished by an earlier run of the same plan, their size and hash read again; begins the journal if new.

    Removes half-written files of the killed run, and nothing else.
    """
    for leftover in folder.glob(".*.partial"):
        leftover.unlink()
    journal.seek(0)
    text = journal.read()
    entries = _entries(text)
    if not entries:
        journal.truncate(0)
        _append(journal, _begin_entry(plan, digest))
        fsync_folder(folder)
        return {}
    if not text.endswith("\n"):
        journal.write("\n")  # killed while appending: the torn line must not swallow the next one
    _check_same_run(entries[0], _begin_entry(plan, digest), folder)
    done = {}
    planned = planned_shards(plan)
    for entry in entries[1:]:
        try:
            record = ShardRecord.model_validate(entry)
        except ValidationError:
            continue
        path = folder / record.name
        if record.name not in planned or _size(path) != record.num_bytes or sha256_of_file(path) != record.sha256:
            log.warning("%s: not as it was written; it is made again", path)
            continue
        done[record.name] = record
    return done


def _entries(text: str) -> list[dict[str, Any]]:
    """Whole lines of a journal; a torn one (killed while appending) is dropped."""
    entries = []
    for line in text.splitlines():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(entry, dict):
            entries.append(entry)
    return entries


def _check_same_run(begin: dict[str, Any], ours: dict[str, Any], folder: Path) -> None:
    if begin.get("plan_sha256") == ours["plan_sha256"]:
        return
    hashes = {"recipe_sha256": "precision", "source_sha256": "source", "plan_sha256": "precision"}
    key = next(key for key in hashes if begin.get(key) != ours[key])
    what, label = key.removesuffix("_sha256"), hashes[key]
    raise QuantizeError(
        f"{folder}: begun with {what} {begin.get(label)} {str(begin.get(key))[:12]}, now asked for {ours[label]} "
        f"{str(ours[key])[:12]}; go on with the first, give another folder, or delete this one"
    )


# ------------------------------------------------------------------------------------------------ disk
def _check_disk(plan: Plan, source: Path, folder: Path, done: dict[str, ShardRecord]) -> None:
    """Refuse before the first byte when what is still to be written does not fit."""
    needed = sum(path.stat().st_size for path in files_to_copy(source))
    for name, tensors in planned_shards(plan).items():
        if name not in done:
            needed += len(header_bytes(tensors)[0]) + sum(o.num_bytes for t in tensors for o in t.outputs)
    free = shutil.disk_usage(folder).free
    if needed + SPARE_BYTES > free:
        raise QuantizeError(
            f"{folder}: {needed / 1e9:.2f} GB are still to be written and {free / 1e9:.2f} GB are free on its disk; "
            "free some space, or give a folder on another disk"
        )


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None
