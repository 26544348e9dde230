"""Contents of a checkpoint and hashes of its shards, checked side by side on worker threads.

The hash of a shard comes first and its tensors right after it, so that a file is read from the disk once: the second reading
comes from the page cache. Where only hashes are asked for, files are read past the cache (`hash_files.py`).
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain, groupby
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch

from assay.callbacks import Progress
from assay.records.manifest import Manifest
from assay.records.plan import Plan, TensorPlan
from assay_quantize.checkpoint.headers import TensorHeader
from assay_quantize.plan.calibrated import signed_weights
from assay_quantize.plan.slabs import SLAB_BYTES, slab_ranges
from assay_quantize.storage.hash_files import MOST_AT_ONCE
from assay_quantize.verify.config import Groups
from assay_quantize.verify.definition import Definition
from assay_quantize.verify.files import StoredReader
from assay_quantize.verify.findings import Findings, SlabFindings, judge
from assay_quantize.verify.headers import hash_problem, is_stored_as
from assay_quantize.verify.judged import JudgedWeight, ReadBack, batches
from assay_quantize.verify.original import Original
from assay_quantize.verify.slabs import SlabChecks

SLABS_AHEAD = 4
"""Slabs that are read ahead."""

AHEAD = 1024
"""Jobs that may be finished ahead of the first unfinished one: a shard is hashed in one piece while others go on."""

_DRAW = random.SystemRandom()
"""Whoever damaged a checkpoint must not know where it is looked at."""


class Checks(NamedTuple):
    """The checks of slabs, of tiles where the source's weights can be rounded again, and of what was judged as it was made."""

    slabs: SlabChecks
    definition: Definition | None
    read_back: ReadBack | None

    def with_tile(self, tensor: TensorPlan, slab: SlabFindings) -> SlabFindings:
        """The findings of the last slab of a tensor with those of its tile, where it has one."""
        if tensor.action != "quantize" or self.definition is None or not self.definition.has_tile(tensor):
            return slab
        return replace(slab, is_tiled=True, tile_problem=self.definition.problem(tensor))


class Batch(NamedTuple):
    """Weights that were judged as they were made, and are read back together."""

    weights: list[JudgedWeight]


Result = str | SlabFindings | list[SlabFindings] | None
"""Of a shard: what is wrong with its hash; of a slab; of each weight of a batch."""
Job = tuple[str | TensorPlan | Batch, Callable[[], Result]]
Subject = TypeVar("Subject")
Outcome = TypeVar("Outcome")


def contents_by_shard(
    tensors: Iterable[TensorPlan], stored: Mapping[str, TensorHeader]
) -> dict[str, list[TensorPlan]]:  # fmt: skip
    """Stored shard -> those of the tensors whose contents can be checked: they are stored as planned (`check_planned` names the
    others)."""
    shards: dict[str, list[TensorPlan]] = {}
    for tensor in tensors:
        if tensor.outputs and all(is_stored_as(output, stored.get(output.name)) for output in tensor.outputs):
            shards.setdefault(stored[tensor.outputs[0].name].shard, []).append(tensor)
    return shards


@contextmanager
def opened_checks(
    folder: Path,
    headers: Mapping[str, TensorHeader],
    groups: Groups | None,
    original: Original | None,
    plan: Plan,
    scales: Mapping[str, float] | None,
    *,
    is_quick: bool = False,
) -> Iterator[Checks]:
    """headers: of the checkpoint, by the safetensors library. groups: of its config.json; None: they are damaged. scales,
    is_quick: as for `SlabChecks`."""
    with ExitStack() as opened:
        stored = StoredReader(folder, headers, past_cache=is_quick)
        opened.callback(stored.close)
        definition = read_back = None
        if original is not None:
            opened.enter_context(original)
            read_back = ReadBack(stored, original, scales)
            if original.recomputes and groups is not None:
                definition = Definition(stored, headers, original, groups)
        slabs = SlabChecks(stored, original, is_quick=is_quick, scales=scales, signed=signed_weights(plan))
        yield Checks(slabs, definition, read_back)


def expected_hashes(folder: Path, manifest: Manifest | None) -> dict[str, str]:
    """Shard -> its SHA-256 by the manifest, where the file exists and is as long as it should be (`files` names the others)."""
    shards = () if manifest is None else manifest.shards
    paths = ((shard, folder / shard.name) for shard in shards)
    return {shard.name: shard.sha256 for shard, path in paths if path.is_file() and path.stat().st_size == shard.num_bytes}


def check_hashes_and_contents(
    folder: Path,
    expected: Mapping[str, str],
    tensors: Mapping[str, list[TensorPlan]],
    checks: Checks | None,
    findings: Findings,
    *,
    workers: int,
    sample: float | None = None,
    on_progress: Progress | None = None,
) -> None:
    """Hash the shards `expected` (`expected_hashes`) and check the contents of `tensors`, on `workers` threads.

    tensors: shard -> what is in it (`contents_by_shard`). checks: None: hashes only. sample: the share of slabs that is looked
    at; None: all. Raises CheckpointError when a file cannot be read.
    """
    lock = threading.Lock()

    def report(what: str, num_bytes: int) -> None:
        if on_progress is not None:
            with lock:
                on_progress(what, num_bytes)

    jobs: Iterator[Job]
    if checks is None:
        jobs = (
            (name, partial(hash_problem, folder, name, expected[name], on_piece=partial(report, name)))
            for name in sorted(expected)
        )
        # one more than there are cores for: it hashes while another waits for the disk, or is the last one left
        judge_jobs(jobs, None, findings, min(workers + 1, MOST_AT_ONCE))
        return
    jobs = chain.from_iterable(
        jobs_of_shard(folder, shard, tensors.get(shard, ()), checks, expected.get(shard), sample, report)
        for shard in sorted({*expected, *tensors})
    )
    judge_jobs(jobs, checks, findings, workers)


def judge_jobs(
    jobs: Iterable[Job],
    checks: Checks | None,
    findings: Findings,
    workers: int,
    *,
    known_errors: Mapping[str, float] | None = None,
) -> None:
    """Do them on `workers` threads. known_errors: weight -> its relative error, where slabs sum up none."""
    known_errors = known_errors or {}
    has_source = checks is not None and checks.read_back is not None
    with one_torch_thread():
        for subject, results in groupby(in_order(jobs, workers), key=lambda pair: pair[0]):
            if isinstance(subject, TensorPlan):
                slabs = [result for _, result in results if isinstance(result, SlabFindings)]
                judge(subject, slabs, findings, has_source=has_source, known_error=known_errors.get(subject.name))
                continue
            result = next(results)[1]
            if isinstance(subject, Batch):
                assert isinstance(result, list)
                for (tensor, _), slab in zip(subject.weights, result, strict=True):
                    judge(tensor, [slab], findings, has_source=True, known_error=known_errors.get(tensor.name))
                continue
            findings.count("hashes")
            if isinstance(result, str):
                findings.damage("hashes", subject, result)


def jobs_of_shard(
    folder: Path,
    shard: str,
    tensors: Iterable[TensorPlan],
    checks: Checks,
    sha256: str | None = None,
    sample: float | None = None,
    report: Progress | None = None,
) -> Iterator[Job]:
    """(shard, its hash), then (tensor, one of its slabs) for all `tensors` in it. sha256: None: it is not hashed."""
    if sha256 is not None:
        yield shard, partial(hash_problem, folder, shard, sha256, is_needed_again=True)
    slabs: list[tuple[TensorPlan, int, int, int]] = []
    for tensor in tensors:
        num_bytes, ranges = sum(output.num_bytes for output in tensor.outputs), list(slab_ranges(tensor, SLAB_BYTES))
        size = ranges[-1][1] or 1
        for begin, end in ranges:
            share = num_bytes * end // size - num_bytes * begin // size
            if begin == 0 or sample is None or _DRAW.random() < sample:
                slabs.append((tensor, begin, end, share))
            elif report is not None:
                report(tensor.name, share)

    def look(number: int) -> SlabFindings:
        tensor, begin, end, num_bytes = slabs[number]
        if number + SLABS_AHEAD < len(slabs):
            checks.slabs.will_need(*slabs[number + SLABS_AHEAD][:3])
        result = checks.slabs.look(tensor, begin, end)
        if report is not None:
            report(tensor.name, num_bytes)
        is_last = number + 1 == len(slabs) or slabs[number + 1][0] is not tensor
        return checks.with_tile(tensor, result) if is_last else result

    for number, slab in enumerate(slabs):
        yield slab[0], partial(look, number)


def jobs_of_judged(weights: Iterable[JudgedWeight], checks: Checks) -> Iterator[Job]:
    """The same for weights that were found to be right before they were written."""
    assert checks.read_back is not None
    reader = checks.read_back

    def look(batch: list[JudgedWeight]) -> list[SlabFindings]:
        return [checks.with_tile(weight.tensor, slab) for weight, slab in zip(batch, reader.look(batch), strict=True)]

    for batch in batches(weights):
        yield Batch(batch), partial(look, batch)


def in_order(jobs: Iterable[tuple[Subject, Callable[[], Outcome]]], workers: int) -> Iterator[tuple[Subject, Outcome]]:
    """Run jobs on threads; (subject, result) of each, in the order of `jobs`. The first exception ends it."""
    pending: deque[tuple[Subject, Future[Outcome]]] = deque()
    pool = ThreadPoolExecutor(workers, thread_name_prefix="assay-verify")
    try:
        for subject, job in jobs:
            pending.append((subject, pool.submit(job)))
            while pending and (len(pending) > AHEAD or pending[0][1].done()):
                done, future = pending.popleft()
                yield done, future.result()
        while pending:
            done, future = pending.popleft()
            yield done, future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """While worker threads compute: each operation of torch on one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
