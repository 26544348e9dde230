"""Contents of a checkpoint and hashes of its shards, checked side by side on worker threads.

The hash of a shard comes first and its tensors right after it, so that a file is read from the disk once: the second reading
comes from the page cache. Where only hashes are asked for, files are read past the cache (`hash_files.py`).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import NamedTuple, TypeVar

from assay.callbacks import Progress
from assay.errors import CheckpointError
from assay.records.manifest import Manifest
from assay.records.plan import Plan, TensorPlan
from assay_quantize.checkpoint.checkpoint import Checkpoint
from assay_quantize.checkpoint.headers import TensorHeader
from assay_quantize.checkpoint.source_reader import SourceReader
from assay_quantize.plan.slabs import SLAB_BYTES, cut
from assay_quantize.storage.hash_files import MOST_AT_ONCE, hash_file
from assay_quantize.verify.files import StoredReader
from assay_quantize.verify.findings import Findings
from assay_quantize.verify.judge import judge
from assay_quantize.verify.slabs import SlabChecks, SlabFindings

AHEAD = 1024
"""Jobs that may be finished ahead of the first unfinished one: a shard is hashed in one piece while others go on."""


class HashFound(NamedTuple):
    """SHA-256 (hex) of a file, or why it could not be read."""

    sha256: str | None
    problem: str | None


CheckJob = Callable[[], HashFound | SlabFindings]
What = TypeVar("What")
Found = TypeVar("Found")


def contents_by_shard(plan: Plan, stored: Mapping[str, TensorHeader]) -> dict[str, list[TensorPlan]]:
    """Stored shard -> tensors whose contents can be checked: those stored as planned (`check_planned` names the others)."""
    found: dict[str, list[TensorPlan]] = {}
    for tensor in plan.tensors:
        headers = [stored.get(output.name) for output in tensor.outputs]
        fits = all(
            h is not None and (h.dtype, h.shape) == (o.dtype, tuple(o.shape))
            for h, o in zip(headers, tensor.outputs, strict=True)
        )
        if tensor.outputs and fits and headers[0] is not None:
            found.setdefault(headers[0].shard, []).append(tensor)
    return found


def check_files_and_contents(
    folder: Path,
    manifest: Manifest | None,
    tensors: Mapping[str, list[TensorPlan]],
    stored: Mapping[str, TensorHeader],
    source: Checkpoint | None,
    findings: Findings,
    *,
    hashes: bool,
    workers: int,
    on_progress: Progress | None = None,
) -> None:
    """Hash the shards that the manifest lists and check the contents of `tensors`, on `workers` threads.

    tensors: shard -> what is in it (`contents_by_shard`); empty: hashes only. source: None: only what can be seen without it.
    Raises CheckpointError when a file cannot be read.
    """
    listed = {shard.name: shard for shard in manifest.shards} if manifest is not None and hashes else {}
    expected = {name: shard.sha256 for name, shard in listed.items() if _size(folder / name) == shard.num_bytes}
    if not tensors:
        for name, found in _hashes(folder, sorted(expected), workers, _Teller(on_progress)):
            _judge_hash(name, expected[name], found, findings)
        return
    reader = None if source is None else SourceReader(source)
    made = StoredReader(folder, stored)
    jobs = _jobs(folder, expected, tensors, SlabChecks(made, reader), _Teller(on_progress))
    try:
        for what, results in groupby(in_order(jobs, workers), key=lambda pair: pair[0]):
            if isinstance(what, str):
                _judge_hash(what, expected[what], next(results)[1], findings)
            else:
                slabs = [found for _, found in results if isinstance(found, SlabFindings)]
                judge(what, slabs, findings, has_source=source is not None)
    finally:
        made.close()
        if reader is not None:
            reader.close()


def _jobs(
    folder: Path, hashed: Iterable[str], tensors: Mapping[str, list[TensorPlan]], checks: SlabChecks, tell: _Teller
) -> Iterator[tuple[str | TensorPlan, CheckJob]]:
    """(shard, its hash), then (tensor, one of its slabs) for all tensors in it, shard by shard."""
    for shard in sorted({*hashed, *tensors}):
        if shard in hashed:
            yield shard, partial(_hash, folder, shard, is_needed_again=True)
        for tensor in tensors.get(shard, ()):
            num_bytes = sum(output.num_bytes for output in tensor.outputs)
            slabs = list(cut(tensor, SLAB_BYTES))
            size = slabs[-1][1] or 1
            for begin, end in slabs:
                share = num_bytes * end // size - num_bytes * begin // size
                yield tensor, partial(_look, checks, tensor, begin, end, share, tell)


def _hashes(folder: Path, names: list[str], workers: int, tell: _Teller) -> Iterator[tuple[str, HashFound]]:
    """The hash of each file, in that order, and nothing else."""
    jobs = ((name, partial(_hash, folder, name, partial(tell, name))) for name in names)
    # one more than there are cores for: it hashes while another waits for the disk, or is the last one left
    yield from in_order(jobs, min(workers + 1, MOST_AT_ONCE))


def _hash(
    folder: Path, name: str, on_piece: Callable[[int], None] | None = None, *, is_needed_again: bool = False
) -> HashFound:  # fmt: skip
    try:
        found = HashFound(hash_file(folder, name, on_piece, is_needed_again=is_needed_again), None)
    except OSError as problem:
        found = HashFound(None, f"cannot be read: {problem.strerror}")
    except CheckpointError as problem:
        found = HashFound(None, str(problem).removeprefix(f"{folder / name}: "))
    return found


def _look(checks: SlabChecks, tensor: TensorPlan, begin: int, end: int, share: int, tell: _Teller) -> SlabFindings:
    found = checks.look(tensor, begin, end)
    tell(tensor.name, share)
    return found


def _judge_hash(name: str, expected: str, found: HashFound | SlabFindings, findings: Findings) -> None:
    assert isinstance(found, HashFound)
    findings.look("hashes")
    if found.problem is not None:
        findings.damage("hashes", name, found.problem)
    elif found.sha256 != expected:
        findings.damage("hashes", name, f"has SHA-256 {str(found.sha256)[:12]}...; the manifest says {expected[:12]}...")


def in_order(jobs: Iterable[tuple[What, Callable[[], Found]]], workers: int) -> Iterator[tuple[What, Found]]:
    """Run jobs on threads; (what, result) of each, in the order of `jobs`. The first exception ends it."""
    pending: deque[tuple[What, Future[Found]]] = deque()
    pool = ThreadPoolExecutor(workers, thread_name_prefix="assay-verify")
    try:
        for what, job in jobs:
            pending.append((what, pool.submit(job)))
            while pending and (len(pending) > AHEAD or pending[0][1].done()):
                done, future = pending.popleft()
                yield done, future.result()
        while pending:
            done, future = pending.popleft()
            yield done, future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


class _Teller:
    """Progress from many threads, one at a time."""

    def __init__(self, on_progress: Progress | None) -> None:
        self._on_progress, self._lock = on_progress, threading.Lock()

    def __call__(self, what: str, num_bytes: int) -> None:
        if self._on_progress is not None:
            with self._lock:
                self._on_progress(what, num_bytes)
