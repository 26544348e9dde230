"""Contents of a checkpoint and hashes of its shards, checked side by side on worker threads.

The hash of a shard comes first and its tensors right after it, so that a file is read from the disk once: the second reading
comes from the page cache. Where only hashes are asked for, files are read past the cache (`hash_files.py`).
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain, groupby
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch

from assay.callbacks import Progress
from assay.errors import CheckpointError
from assay.records.manifest import Manifest
from assay.records.plan import TensorPlan
from assay_quantize.checkpoint.headers import TensorHeader
from assay_quantize.plan.slabs import SLAB_BYTES, cut
from assay_quantize.storage.hash_files import MOST_AT_ONCE, hash_file
from assay_quantize.verify.definition import Definition, TileFound
from assay_quantize.verify.files import StoredReader
from assay_quantize.verify.findings import Findings
from assay_quantize.verify.judge import judge
from assay_quantize.verify.meanwhile.read_back import JudgedWeight, ReadBack, batches
from assay_quantize.verify.original import Original
from assay_quantize.verify.presets import Groups
from assay_quantize.verify.slabs import SlabChecks, SlabFindings

SLABS_AHEAD = 4
"""Slabs that are read ahead."""

AHEAD = 1024
"""Jobs that may be finished ahead of the first unfinished one: a shard is hashed in one piece while others go on."""


class HashFound(NamedTuple):
    """SHA-256 (hex) of a file, or why it could not be read."""

    sha256: str | None
    problem: str | None


class Checks(NamedTuple):
    """Who looks at slabs, at tiles where the source's weights can be rounded again, and at what was judged as it was made."""

    slabs: SlabChecks
    definition: Definition | None
    read_back: ReadBack | None


class BatchFound(NamedTuple):
    """Of each weight of a batch, in order."""

    slabs: list[SlabFindings]
    tiles: list[TileFound | None]


class Batch(NamedTuple):
    """Weights that were judged as they were made, and are read back together."""

    weights: list[JudgedWeight]


CheckResult = HashFound | SlabFindings | TileFound | BatchFound
Job = tuple[str | TensorPlan | Batch, Callable[[], CheckResult]]
"""A shard, a tensor or a batch, and what looks at it."""
What = TypeVar("What")
Found = TypeVar("Found")


def contents_by_shard(
    tensors: Iterable[TensorPlan], stored: Mapping[str, TensorHeader]
) -> dict[str, list[TensorPlan]]:  # fmt: skip
    """Stored shard -> those of the tensors whose contents can be checked: they are stored as planned (`check_planned` names the
    others)."""
    found: dict[str, list[TensorPlan]] = {}
    for tensor in tensors:
        headers = [stored.get(output.name) for output in tensor.outputs]
        fits = all(
            h is not None and (h.dtype, h.shape) == (o.dtype, tuple(o.shape))
            for h, o in zip(headers, tensor.outputs, strict=True)
        )
        if tensor.outputs and fits and headers[0] is not None:
            found.setdefault(headers[0].shard, []).append(tensor)
    return found


@contextmanager
def opened_checks(
    folder: Path,
    headers: Mapping[str, TensorHeader],
    groups: Groups | None,
    original: Original | None,
    *,
    is_quick: bool = False,
    scales: Mapping[str, float] | None = None,
    signed: frozenset[str] = frozenset(),
) -> Iterator[Checks]:
    """headers: of the checkpoint, by the safetensors library. groups: of its config.json; None: they are damaged. is_quick,
    scales, signed: as for `SlabChecks`."""
    with ExitStack() as opened:
        stored = StoredReader(folder, headers, past_cache=is_quick)
        opened.callback(stored.close)
        definition = None
        if original is not None:
            opened.enter_context(original)
            if original.recomputes and groups is not None:
                definition = Definition(stored, headers, original, groups)
        read_back = None if original is None else ReadBack(stored, original, scales)
        yield Checks(SlabChecks(stored, original, is_quick=is_quick, scales=scales, signed=signed), definition, read_back)


def expected_hashes(folder: Path, manifest: Manifest | None) -> dict[str, str]:
    """Shard -> its SHA-256 by the manifest, where the file is there and as long as it should be (`files` names the others)."""
    shards = () if manifest is None else manifest.shards
    return {shard.name: shard.sha256 for shard in shards if _size(folder / shard.name) == shard.num_bytes}


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
    tell = Teller(on_progress)
    if checks is None:
        for name, found in _hashes(folder, sorted(expected), workers, tell):
            _judge_hash(name, expected[name], found, findings)
        return
    jobs = chain.from_iterable(
        jobs_of_shard(folder, shard, tensors.get(shard, ()), checks, is_hashed=shard in expected, sample=sample, tell=tell)
        for shard in sorted({*expected, *tensors})
    )
    judge_jobs(jobs, expected, checks, findings, workers)


def judge_jobs(
    jobs: Iterable[Job],
    expected: Mapping[str, str],
    checks: Checks,
    findings: Findings,
    workers: int,
    *,
    known_errors: Mapping[str, float] | None = None,
) -> None:
    """Do them on `workers` threads. expected: shard -> its SHA-256. known_errors: weight -> its relative error, where slabs
    sum up none."""
    with one_torch_thread():
        for what, results in groupby(in_order(jobs, workers), key=lambda pair: pair[0]):
            if isinstance(what, str):
                _judge_hash(what, expected[what], next(results)[1], findings)
                continue
            if isinstance(what, Batch):
                found = next(results)[1]
                assert isinstance(found, BatchFound)
                for weight, slab, tile in zip(what.weights, found.slabs, found.tiles, strict=True):
                    known = None if known_errors is None else known_errors.get(weight.tensor.name)
                    judge(weight.tensor, [slab], tile, findings, has_source=True, known_error=known)
                continue
            of_tensor = [one for _, one in results]
            slabs = [one for one in of_tensor if isinstance(one, SlabFindings)]
            tile = next((one for one in of_tensor if isinstance(one, TileFound)), None)
            known = None if known_errors is None else known_errors.get(what.name)
            judge(what, slabs, tile, findings, has_source=checks.read_back is not None, known_error=known)


def jobs_of_shard(
    folder: Path,
    shard: str,
    tensors: Iterable[TensorPlan],
    checks: Checks,
    *,
    is_hashed: bool,
    sample: float | None = None,
    tell: Teller | None = None,
) -> Iterator[Job]:
    """(shard, its hash), then (tensor, one of its slabs, or its tile) for all `tensors` in it."""
    tell = tell or Teller(None)
    if is_hashed:
        yield shard, partial(_hash, folder, shard, is_needed_again=True)
    slabs = [slab for tensor in tensors for slab in _slabs_of(tensor, sample, tell)]
    for number, slab in enumerate(slabs):
        tensor, ahead = slab.tensor, slabs[number + SLABS_AHEAD] if number + SLABS_AHEAD < len(slabs) else None
        yield tensor, partial(_look, checks.slabs, slab, ahead, tell)
        is_last = number + 1 == len(slabs) or slabs[number + 1].tensor is not tensor
        if is_last and tensor.action == "quantize" and checks.definition is not None and checks.definition.has_tile(tensor):
            yield tensor, partial(checks.definition.look, tensor)


def jobs_of_judged(weights: Iterable[JudgedWeight], checks: Checks) -> Iterator[Job]:
    """The same for weights that were found to be right before they were written."""
    for weights_of_one in batches(weights):
        yield Batch(weights_of_one), partial(_read_back, checks, weights_of_one)


def _read_back(checks: Checks, weights: Sequence[JudgedWeight]) -> BatchFound:
    assert checks.read_back is not None
    found, definition = checks.read_back.look(weights), checks.definition
    tiled = [None if definition is None or not definition.has_tile(tensor) else tensor for tensor, _ in weights]
    tiles = [None if definition is None or tensor is None else definition.look(tensor) for tensor in tiled]
    return BatchFound(found, tiles)


class _Slab(NamedTuple):
    """[begin, end) of a tensor, as `cut` gives it. num_bytes: of the checkpoint."""

    tensor: TensorPlan
    begin: int
    end: int
    num_bytes: int


def _slabs_of(tensor: TensorPlan, sample: float | None, tell: Teller) -> Iterator[_Slab]:
    """The slabs of a tensor that are looked at; the others are told at once."""
    num_bytes = sum(output.num_bytes for output in tensor.outputs)
    slabs = list(cut(tensor, SLAB_BYTES))
    size = slabs[-1][1] or 1
    for begin, end in slabs:
        share = num_bytes * end // size - num_bytes * begin // size
        if begin == 0 or sample is None or _DRAW.random() < sample:
            yield _Slab(tensor, begin, end, share)
        else:
            tell(tensor.name, share)


_DRAW = random.SystemRandom()
"""Whoever damaged a checkpoint must not know where it is looked at."""


def _hashes(folder: Path, names: list[str], workers: int, tell: Teller) -> Iterator[tuple[str, HashFound]]:
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


def _look(checks: SlabChecks, slab: _Slab, ahead: _Slab | None, tell: Teller) -> SlabFindings:
    """ahead: a slab that will be looked at soon, to be read meanwhile."""
    if ahead is not None:
        checks.will_need(*ahead[:3])
    found = checks.look(*slab[:3])
    tell(slab.tensor.name, slab.num_bytes)
    return found


def _judge_hash(name: str, expected: str, found: CheckResult, findings: Findings) -> None:
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


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """While worker threads compute: each operation of torch on one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


class Teller:
    """Progress from many threads, one at a time."""

    def __init__(self, on_progress: Progress | None) -> None:
        self._on_progress, self._lock = on_progress, threading.Lock()

    def __call__(self, what: str, num_bytes: int) -> None:
        if self._on_progress is not None:
            with self._lock:
                self._on_progress(what, num_bytes)
