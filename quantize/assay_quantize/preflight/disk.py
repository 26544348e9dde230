"""Is there room for everything that a run will write? One sum for each disk: downloads, checkpoints, staging, journal.

What is there already is not written again: shards of the hub's cache that are whole, finished checkpoints, finished shards of
an unfinished one. (huggingface_hub begins a file anew whose download was cut off.)
"""

from __future__ import annotations

import os
import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import constants
from huggingface_hub.file_download import repo_folder_name

from assay.quantities import size
from assay.records.plan import Plan
from assay.records.preflight.report import Check
from assay_quantize.checkpoint.checkpoint import Checkpoint
from assay_quantize.checkpoint.shard_files import planned_shards
from assay_quantize.engine.quantize import is_complete
from assay_quantize.remote.hub_stream import SPARE_BYTES


class Item(NamedTuple):
    """Something that is still to be written: what, where, and how many bytes of it are not there yet."""

    what: str
    folder: Path
    num_bytes: int


@dataclass(frozen=True)
class Writes:
    """What a run writes, apart from small files.

    source: as it is planned from. includes_source: it is served too, so it is needed whole. released: a reference that is not
    made here. folders: precision -> the plan and the folder of its checkpoint. run_dir: the run's. journal_bytes: allowed for
    journal, logs and report. streams: the source comes from the hub shard by shard (`--stream-from hub`).
    """

    source: Checkpoint
    includes_source: bool
    released: Checkpoint | None
    folders: Mapping[str, tuple[Plan, Path]]
    run_dir: Path
    journal_bytes: int
    streams: bool = False


def check_disk(writes: Writes) -> Iterator[Check]:
    """One line for each disk that is written to."""
    items = list(items_of(writes))
    streamed = None
    if not writes.streams and writes.source.folder is None and not writes.includes_source:
        streamed = list(items_of(replace(writes, streams=True)))
    if streamed is not None and any(map(_missing_bytes, _by_disk(streamed))):
        streamed = None  # it would not fit then either
    for disk in _by_disk(items):
        yield _check(disk, streamed, writes)


def items_of(writes: Writes) -> Iterator[Item]:
    """Everything that is still to be written, in the order in which it will be."""
    unfinished = {name: made for name, made in writes.folders.items() if not is_complete(*made)}
    if writes.includes_source or (unfinished and not writes.streams):
        yield from _download("source", writes.source)
    for name, (plan, folder) in unfinished.items():
        missing = (tensors for shard, tensors in planned_shards(plan).items() if not (folder / shard).is_file())
        left = sum(output.num_bytes for tensors in missing for tensor in tensors for output in tensor.outputs)
        yield Item(name, folder, left)
    if writes.streams and unfinished:
        staged = max(staged_bytes(plan, writes.source.shards) for plan, _ in unfinished.values())
        yield Item("two shards of the source at a time", writes.run_dir, staged)
    if writes.released is not None:
        yield from _download("reference", writes.released)
    yield Item("journal, logs and report (allowed)", writes.run_dir, writes.journal_bytes)


def _download(what: str, checkpoint: Checkpoint) -> Iterator[Item]:
    """Of a checkpoint on the hub the shards that its cache does not have."""
    if checkpoint.folder is not None:
        return
    cache = Path(constants.HF_HUB_CACHE)
    blobs = cache / repo_folder_name(repo_id=checkpoint.location, repo_type="model") / "blobs"
    left = sum(
        num_bytes
        for shard, num_bytes in checkpoint.shards.items()
        if not (blobs / checkpoint.data[shard].rpartition(":")[2]).is_file()
    )
    yield Item(f"{what} {checkpoint.location}", cache, left)


def staged_bytes(plan: Plan, shard_bytes: Mapping[str, int]) -> int:
    """The most of a streamed source that is on the disk at a time: the shards of one output, and those of the next.

    shard_bytes: size of every shard of the source. Small parts of other shards are not counted.
    """
    shard_of = {tensor.name: tensor.shard_in for tensor in plan.tensors}
    reads = [
        {shard_of[name] for tensor in tensors for name in (tensor.name, tensor.scale) if name is not None}
        for tensors in planned_shards(plan).values()
    ]
    each = [sum(shard_bytes[name] for name in names) for names in reads]
    return max((now + after for now, after in zip(each, [*each[1:], 0], strict=True)), default=0)


# ------------------------------------------------------------------------------------------------ disks
def _by_disk(items: Iterable[Item]) -> list[list[Item]]:
    disks: dict[int, list[Item]] = defaultdict(list)
    for item in items:
        disks[existing(item.folder).stat().st_dev].append(item)
    return list(disks.values())


def existing(folder: Path) -> Path:
    """The folder, or the nearest above it that is there."""
    absolute = Path(os.path.abspath(folder))
    return next(path for path in (absolute, *absolute.parents) if path.exists())


def _missing_bytes(items: Sequence[Item]) -> int:
    """What one disk lacks; 0: it has room."""
    free = shutil.disk_usage(existing(items[0].folder)).free
    return max(0, sum(item.num_bytes for item in items) + SPARE_BYTES - free)


def _check(items: Sequence[Item], streamed: Sequence[Item] | None, writes: Writes) -> Check:
    free = shutil.disk_usage(existing(items[0].folder)).free
    parts = ", ".join(f"{item.what} {size(item.num_bytes)}" for item in items if item.num_bytes)
    present = [item.what for item in items if not item.num_bytes]
    detail = f"{size(sum(item.num_bytes for item in items))} still to be written ({parts}), {size(free)} free"
    if present:
        detail += f"; there already: {', '.join(present)}"
    cache = Path(constants.HF_HUB_CACHE)
    folders = list(dict.fromkeys(str(cache if item.folder == cache else writes.run_dir) for item in items))
    subject = " and ".join(folders)
    if not (missing := _missing_bytes(items)):
        return Check(check="disk", subject=subject, outcome="PASS", detail=detail)
    ways = [f"free {size(missing)}"]
    if str(writes.run_dir) in folders:
        ways.append("put the runs on another disk (--runs DIR; make: RUNS=DIR)")
    if str(cache) in folders:
        ways.append("put the hub's cache on another disk (HF_HUB_CACHE=DIR)")
    if streamed is not None:
        all_of_it = size(sum(item.num_bytes for item in streamed))
        ways = [f"--stream-from hub (make: STREAM=hub) keeps no source on the disk and fits, with {all_of_it}", *ways]
    return Check(check="disk", subject=subject, outcome="FAIL", detail=detail, remedy=", or ".join(ways))
