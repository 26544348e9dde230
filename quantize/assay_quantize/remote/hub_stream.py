"""Quantize from the hub without ever holding the source: download a shard, quantize what it feeds, delete it.

The staging folder looks like the checkpoint: config, index, tokenizer, and every shard with its true header and size, but
without data (sparse files that take no room). A shard's data is filled in before its turn and taken out after it; while one
shard is quantized the next one is downloaded. Where a fused group (NVFP4 shares one scale in it) or the scales of an FP8
weight lie in another shard, only their bytes of it are fetched. A staged file is replaced by rename, never changed in place,
and its modification time stands for its content on the hub: for whoever reads it, the source does not change.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Self

from assay.atomic_files import naming
from assay.callbacks import Progress
from assay.errors import CheckpointError, QuantizeError
from assay.file_data import other_data
from assay.records.base import write_text_atomically
from assay.records.manifest import ShardRecord
from assay.records.plan import Plan
from assay.safetensors_index import INDEX_NAME
from assay_quantize.checkpoint.checkpoint import Checkpoint, open_checkpoint
from assay_quantize.checkpoint.headers import TensorHeader
from assay_quantize.checkpoint.hub import HubFile, check_hashes_stated
from assay_quantize.checkpoint.shard_files import planned_shards
from assay_quantize.checkpoint.source_reader import SourceReader
from assay_quantize.engine.shards import ShardOptions, quantize_shard
from assay_quantize.plan.slabs import amax_members
from assay_quantize.remote.hub_download import DOWNLOADS, HubFiles

SPARE_BYTES = 256 << 20
"""Free disk asked for beyond outputs and staged shards."""

CLOSE_WITHIN_S = 3.0
"""How long a transfer that is called off may take to end: it ends with the next bytes, which may never come."""

_COMMIT = ".commit"
_COPY_BYTES = 4 << 20


@dataclass(frozen=True)
class Need:
    """What one output shard reads. whole: the files it is made of; ranges: of other files, the [begin, end) that it takes.

    Ranges have no hash. They are weights of which only the magnitude counts, for the scale that fused weights share: the shard
    that such a weight is in takes it from the whole file, and verification finds members with other scales.
    """

    whole: tuple[str, ...]
    ranges: Mapping[str, tuple[tuple[int, int], ...]]


def needs_of(plan: Plan, headers: Mapping[str, TensorHeader]) -> dict[str, Need]:
    """Output shard -> what it reads of the source, in the plan's order."""
    needs = {}
    for shard, tensors in planned_shards(plan).items():
        scales = {headers[tensor.scale].shard for tensor in tensors if tensor.scale is not None}
        whole = tuple(dict.fromkeys([*(tensor.shard_in for tensor in tensors), *sorted(scales)]))
        read = {tensor.name: tensor for tensor in tensors}
        for members in amax_members(plan, tensors).values():
            read |= {member.name: member for member in members}
        stored = [headers[tensor.name] for tensor in read.values()]
        stored += [headers[tensor.scale] for tensor in read.values() if tensor.scale is not None]
        elsewhere: dict[str, list[tuple[int, int]]] = {}
        for header in stored:
            if header.shard not in whole:
                elsewhere.setdefault(header.shard, []).append((header.begin, header.end))
        needs[shard] = Need(whole, {file: merged(ranges) for file, ranges in sorted(elsewhere.items())})
    return needs


def merged(ranges: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Sorted, and without overlap or contact."""
    out: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        if out and begin <= out[-1][1]:
            out[-1] = (out[-1][0], max(end, out[-1][1]))
        else:
            out.append((begin, end))
    return tuple(out)


def stage_shard(plan: Plan, checkpoint: Checkpoint, need: Need, folder: Path) -> None:
    """Download what one output shard reads into `folder`, which is empty: for a task of its own, on whatever node.

    checkpoint: headers from a staging folder (`HubStream.folder`); each file gets the time that it has there, so that it counts
    as the same file. Raises CheckpointError: the hub does not answer, or has something else by now.
    """
    assert checkpoint.folder is not None and plan.source_revision is not None
    hub = HubFiles(plan.source, plan.source_revision)
    check_listed(plan, hub.files)
    for file in (*need.whole, *need.ranges):
        path = folder / file
        with naming(path):
            if file in need.whole:
                hub.download(file, path)
            else:
                write_hollow(path, header_of(checkpoint.folder / file), checkpoint.shards[file])
                hub.download_ranges(file, need.ranges[file], path)
        _set_time(path, hub.files[file].content)


def check_listed(plan: Plan, files: Mapping[str, HubFile]) -> None:
    """CheckpointError: the hub states no hash of some file, or lists other data than the plan was made from."""
    check_hashes_stated(plan.source, plan.source_files)
    listed = {name: files[name].content for name in plan.source_files if name in files}
    if (how := other_data(plan.source_files, listed)) is not None:
        raise CheckpointError(f"{plan.source}: has other data on the hub than the plan was made from ({how}); make a new plan")


def content_time_ns(content: str) -> int:
    """A modification time, before 2007, that stands for what names a file's content on the hub."""
    return int(hashlib.sha256(content.encode()).hexdigest()[:15], 16)


def _set_time(path: Path, content: str) -> None:
    os.utime(path, ns=(content_time_ns(content),) * 2)


class HubStream:
    """A checkpoint on the hub, in a staging folder that is filled as shards are made. A context manager.

    folder: the staging folder; it looks like the checkpoint, and each shard's size and time identify its content.
    """

    def __init__(self, plan: Plan, staging: Path, *, report: Callable[[str], None] | None = None) -> None:
        """plan: made from the hub; its `source` is the id, its `source_revision` the commit that is downloaded.

        report: told in a line what is downloaded. Raises QuantizeError: the plan was made from a folder; CheckpointError: the
        hub does not answer, or no longer has what the plan was made from.
        """
        if plan.source_revision is None:
            raise QuantizeError(f"{plan.source}: --stream-from hub needs a model on the hub; give an id such as zai-org/GLM-5")
        self.plan = plan
        self.folder = staging
        self._report = report or (lambda line: None)
        self._hub = HubFiles(plan.source, plan.source_revision)
        check_listed(plan, self._hub.files)
        self._ahead: threading.Thread | None = None
        self._lock = threading.Lock()
        self._holders: dict[str, set[str]] = {}
        shutil.rmtree(staging / DOWNLOADS, ignore_errors=True)  # what a killed run had of a file
        self._checkpoint = self._make_hollow()
        self.needs: Mapping[str, Need] = needs_of(plan, self._checkpoint.tensors)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the transfer that is under way. What is staged stays for the next run."""
        self._hub.stop()
        if self._ahead is not None:
            self._ahead.join(CLOSE_WITHIN_S)

    def remove(self) -> None:
        """Delete the staging folder, after the last shard."""
        self.close()
        shutil.rmtree(self.folder)

    def run(
        self,
        plan: Plan,
        shard_names: Sequence[str],
        source: Path,
        out_folder: Path,
        options: ShardOptions,
        on_progress: Progress | None = None,
    ) -> Generator[ShardRecord, None, None]:
        """The runner for `engine.quantize`: shard by shard, the next one downloaded meanwhile, the last one deleted.

        Raises QuantizeError when the staged shards and what is still to be written do not fit on the disk.
        """
        assert plan.tensors == self.plan.tensors and source == self.folder
        self._check_disk(shard_names, out_folder)
        needed = {file for shard in shard_names for file in self.needs[shard].whole}
        for file in self._checkpoint.shards.keys() - needed:  # what a killed run had staged for shards that are finished
            if _mark_path(self.folder / file).exists():
                self._shrink(file)
        left = iter(shard_names)
        staged = self._stage_ahead(next(left, None))
        while staged is not None:
            name, future = staged
            future.result()
            staged = self._stage_ahead(next(left, None))
            # a reader of its own: one that stays open would go on reading files that were replaced
            with SourceReader(self._checkpoint) as reader:
                record = quantize_shard(plan, name, source, out_folder, options, on_progress, reader=reader)
            with self._lock:
                for file in (*self.needs[name].whole, *self.needs[name].ranges):
                    self._holders[file].discard(name)
                    self._shrink(file)
            yield record

    # -------------------------------------------------------------------------------------------- disk
    def _check_disk(self, shards: Sequence[str], out_folder: Path) -> None:
        """Refuse before the first download what does not fit: the staged shards, and on the same disk the outputs."""
        each = [self.bytes_of(shard) for shard in shards]  # at a time one is staged, and the next one
        needed = max((now + after for now, after in pairwise([*each, 0])), default=0)
        needed -= sum(path.stat().st_blocks * 512 for path in self.folder.iterdir())
        if self.folder.stat().st_dev == out_folder.stat().st_dev:
            planned = planned_shards(self.plan)
            needed += sum(o.num_bytes for shard in shards for tensor in planned[shard] for o in tensor.outputs)
        free = shutil.disk_usage(self.folder).free
        if needed + SPARE_BYTES > free:
            raise QuantizeError(
                f"{self.folder}: {(needed + SPARE_BYTES) / 1e9:.2f} GB are needed for two shards of the source and what is "
                f"still to be written, {free / 1e9:.2f} GB are free on its disk; free some space, or give a folder elsewhere"
            )

    def bytes_of(self, shard: str) -> int:
        """Bytes of the source that the output shard `shard` reads."""
        need, sizes = self.needs[shard], self._checkpoint.shards
        parts = sum(end - begin for ranges in need.ranges.values() for begin, end in ranges)
        return parts + sum(sizes[file] for file in need.whole)

    # -------------------------------------------------------------------------------------------- staging
    def _stage_ahead(self, shard: str | None) -> tuple[str, Future[None]] | None:
        if shard is None:
            return None
        future: Future[None] = Future()

        def settle() -> None:
            try:
                self._stage(shard)
                future.set_result(None)
            except BaseException as error:  # noqa: BLE001 - raised by future.result()
                future.set_exception(error)

        # a daemon: a process that is interrupted must not wait for a hub that does not answer
        self._ahead = threading.Thread(target=settle, name="stage", daemon=True)
        self._ahead.start()
        return shard, future

    def _stage(self, shard: str) -> None:
        """Have everything on disk that the output shard `shard` reads."""
        need = self.needs[shard]
        with self._lock:
            for file in (*need.whole, *need.ranges):
                self._holders.setdefault(file, set()).add(shard)
        for file in (*need.whole, *need.ranges):
            if _is_whole(self.folder / file, self._hub.files[file].content):
                continue
            with naming(self.folder / file):
                if file in need.whole:
                    arriving = self.folder / f".{file}.whole"
                    self._report(f"downloading {file} ({self._checkpoint.shards[file] / 1e9:.2f} GB)")
                    self._hub.download(file, arriving)
                    self._put(arriving, file)
                    write_text_atomically(_mark_path(self.folder / file), self._hub.files[file].content)
                else:  # a version of the file with all ranges that its holders need
                    arriving = self.folder / f".{file}.ranges"
                    write_hollow(arriving, header_of(self.folder / file), self._checkpoint.shards[file])
                    with self._lock:
                        ranges = self._held_ranges(file)
                    self._hub.download_ranges(file, ranges, arriving)
                    self._put(arriving, file)

    def _shrink(self, file: str) -> None:
        """Reduce a file to what its holders need. The lock is held; one that a download may be replacing is left alone."""
        holders, path = self._holders.get(file, set()), self.folder / file
        was_whole = _mark_path(path).exists()
        if any(file in self.needs[shard].whole for shard in holders) or (holders and not was_whole):
            return
        _mark_path(path).unlink(missing_ok=True)
        arriving = self.folder / f".{file}.smaller"
        write_hollow(arriving, header_of(path), self._checkpoint.shards[file])
        with naming(path), path.open("rb") as old, arriving.open("r+b") as new:
            for begin, end in self._held_ranges(file):
                old.seek(begin)
                new.seek(begin)
                for at in range(begin, end, _COPY_BYTES):
                    new.write(old.read(min(_COPY_BYTES, end - at)))
        self._put(arriving, file)

    def _held_ranges(self, file: str) -> tuple[tuple[int, int], ...]:
        return merged([r for shard in self._holders.get(file, ()) for r in self.needs[shard].ranges.get(file, ())])

    def _put(self, arriving: Path, file: str) -> None:
        """Rename into place, with the time that stands for the file's content."""
        _set_time(arriving, self._hub.files[file].content)
        os.replace(arriving, self.folder / file)

    # -------------------------------------------------------------------------------------------- the hollow checkpoint
    def _make_hollow(self) -> Checkpoint:
        """Everything but weights into the staging folder; refuses what is not what the plan was made from."""
        self.folder.mkdir(parents=True, exist_ok=True)
        commit_path, commit = self.folder / _COMMIT, self._hub.revision
        is_same_commit = commit_path.is_file() and commit_path.read_text(encoding="utf-8") == commit
        missing = []
        for name, file in self._hub.files.items():
            path = self.folder / name
            is_there = path.exists() and is_same_commit
            if name.endswith(".safetensors"):
                if not is_there and not _is_whole(path, file.content):
                    _mark_path(path).unlink(missing_ok=True)
                    missing.append(name)
            elif name in {INDEX_NAME, *self.plan.source_files} and (not is_there or self._hub.difference(name, path)):
                with naming(path):
                    self._hub.download(name, path)
        for name, (header, num_bytes) in zip(missing, self._hub.read_headers(missing), strict=True):
            arriving = self.folder / f".{name}.ranges"
            write_hollow(arriving, header, num_bytes)
            self._put(arriving, name)
        write_text_atomically(commit_path, commit)
        checkpoint = open_checkpoint(self.folder)
        if checkpoint.sha256 != self.plan.source_sha256:
            raise CheckpointError(
                f"{self.plan.source}: commit {commit[:12]} is not what the plan was made from; make a new plan"
            )
        return checkpoint


# ------------------------------------------------------------------------------------------------ files
def _mark_path(path: Path) -> Path:
    """Says that `path` has all its data, and of which content."""
    return path.with_name(f".{path.name}.mark")


def _is_whole(path: Path, content: str) -> bool:
    try:
        return path.is_file() and _mark_path(path).read_text(encoding="utf-8") == content
    except FileNotFoundError:  # it never was, or another thread is just giving back what nobody needs of it
        return False


def header_of(path: Path) -> bytes:
    """The header of a safetensors file as it is stored, its length in front."""
    with path.open("rb") as file:
        length = file.read(8)
        return length + file.read(int.from_bytes(length, "little"))


def write_hollow(path: Path, header: bytes, num_bytes: int) -> None:
    with naming(path), path.open("wb") as file:
        file.write(header)
        file.truncate(num_bytes)
