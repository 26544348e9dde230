"""One planned shard in, one shard out: a pure function of plan and source, so that a rerun writes the same bytes.

The output's header follows from the plan alone, so the file is written from front to back in slabs of a few MiB: worker
threads read, round and pack (reading and rounding release the GIL), the one whose slab is due writes. Memory is a few slabs
per worker, whatever the size of tensors and shard. Under its own name a shard is always whole: it is written under a hidden
one, hashed meanwhile, fsynced and renamed.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from assay.callbacks import Progress
from assay.recipes.family_names import names_of
from assay.records.manifest import ShardRecord
from assay.records.plan import Plan, TensorPlan
from assay_quantize.checkpoint.calibrated_layers import CalibratedFiles
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.checkpoint.identity import FileStamp, check_stamps, stamps_of
from assay_quantize.checkpoint.shard_files import fsync_folder, header_bytes, layout, partial_path, planned_shards
from assay_quantize.checkpoint.source_reader import SourceReader
from assay_quantize.engine.budget import window_of
from assay_quantize.engine.journal import writing
from assay_quantize.engine.ordered_writer import OrderedWriter, WritingStopped
from assay_quantize.engine.slab_work import OnSlab, ShardWork
from assay_quantize.kernels.rows import Kernels
from assay_quantize.plan.calibrated import needs_calibration, scales_inputs, static_scales
from assay_quantize.plan.slabs import SLAB_BYTES, Slab, amax_members, observer_of, slabs_of
from assay_quantize.storage.buffers import Pools, new_pools


@dataclass(frozen=True)
class ShardOptions:
    """How a shard is made; the bytes of the result do not depend on it.

    workers: threads. slab_bytes: source bytes of a slab (`plan_budget`). memory_bytes: what the whole
    process may use; for schedulers of shards; the slabs were chosen by it already. kernels: `fused` or `reference`.
    importance: file of channel weights for the scale search. source_files: stamp of every source shard when the run
    began; a shard that differs is refused. None: only compared before and after.
    allow_not_finite: copy NaN and infinity.
    on_slab: told of every quantized slab; only where shards are made in this process. calibrated: folder of calibrated layers.
    """

    workers: int = 1
    slab_bytes: int = SLAB_BYTES
    memory_bytes: int | None = None
    kernels: Kernels = "fused"
    importance: Path | None = None
    source_files: Mapping[str, FileStamp] | None = None
    allow_not_finite: bool = False
    on_slab: OnSlab | None = None
    calibrated: Path | None = None


class Written(NamedTuple):
    """A shard whose bytes are all handed to the kernel, under its hidden name: `finish_shard` makes it safe and visible."""

    name: str
    path: Path
    writer: OrderedWriter
    relative_error: dict[str, float]
    not_finite: dict[str, int]
    started: float
    check_source: Callable[[], None]


def quantize_shard(
    plan: Plan,
    shard_name: str,
    source: Path,
    out_folder: Path,
    options: ShardOptions | None = None,
    on_progress: Progress | None = None,
    *,
    reader: SourceReader | None = None,
) -> ShardRecord:
    """Make the shard `shard_name` of `plan` in `out_folder` from the checkpoint in `source`, replacing one of that name.

    reader: opened on `source`, to spare reading its headers again.
    Raises QuantizeError: a weight that is not finite, a source that differs from the plan or changed, a disk that is full;
    CheckpointError: a source that cannot be read.
    """
    with SourceReader(open_checkpoint(source)) if reader is None else nullcontext(reader) as opened:
        return finish_shard(write_shard(plan, shard_name, source, out_folder, options, on_progress, reader=opened))


def write_shard(
    plan: Plan,
    shard_name: str,
    source: Path,
    out_folder: Path,
    options: ShardOptions | None = None,
    on_progress: Progress | None = None,
    *,
    reader: SourceReader,
    stop: threading.Event | None = None,
    pools: Pools | None = None,
) -> Written:
    """The first part of `quantize_shard`: everything but fsync and rename, which need the disk and no core.

    pools: memory that is handed from one shard to the next.
    """
    started = time.monotonic()
    options = options or ShardOptions()
    tensors = planned_shards(plan)[shard_name]
    members = amax_members(plan, tensors)
    used = _source_shards(plan, tensors, members)
    before = stamps_of(plan, source, used)
    check_stamps(source, options.source_files, before, out_folder)
    order, outputs = layout(tensors)
    path = out_folder / shard_name
    importance = calibrated = None
    scales: Mapping[str, float] = {}
    if options.importance is not None:
        from assay_quantize.checkpoint.importance import load_importance

        importance = load_importance(options.importance)
        if needs_calibration(plan):
            scales = static_scales(plan, importance)
    if plan.calibrated is not None:
        assert options.calibrated is not None, "`quantize` checks it"
        calibrated = CalibratedFiles(options.calibrated, plan.calibrated.layers, is_smoothed=scales_inputs(plan))
    header, _ = header_bytes(tensors, packed_as_vllm=names_of(plan.family).packed_as_vllm)
    with writing(path):
        writer = OrderedWriter(partial_path(path), header, outputs, window=window_of(options.workers))
    try:
        work = ShardWork(
            reader, writer, options.kernels, members,
            pools=pools or new_pools(options.slab_bytes), observer=observer_of(plan), importance=importance, scales=scales,
            allow_not_finite=options.allow_not_finite, on_progress=on_progress, on_slab=options.on_slab, calibrated=calibrated,
        )  # fmt: skip
        slabs = list(slabs_of(order, members, options.slab_bytes))
        with _torch_on_one_thread(options.kernels), writing(path):
            _run(work, slabs, options.workers, stop)
    except BaseException:
        writer.close()
        partial_path(path).unlink(missing_ok=True)
        raise
    finally:
        if calibrated is not None:
            calibrated.close()

    def check_source() -> None:
        check_stamps(source, before, stamps_of(plan, source, used), out_folder)

    return Written(shard_name, path, writer, work.relative_errors(), dict(+work.not_finite), started, check_source)


def finish_shard(written: Written) -> ShardRecord:
    """fsync, rename, and what goes into the journal."""
    try:
        with writing(written.path):
            digest, num_bytes = written.writer.finish()
            written.check_source()
            os.replace(partial_path(written.path), written.path)
            fsync_folder(written.path.parent)
    except BaseException:
        discard(written)
        raise
    return ShardRecord(
        name=written.name,
        num_bytes=num_bytes,
        sha256=digest,
        relative_error=written.relative_error,
        not_finite=written.not_finite,
        seconds=time.monotonic() - written.started,
    )


def discard(written: Written) -> None:
    """Remove what was written of a shard that will not be finished."""
    written.writer.close()
    partial_path(written.path).unlink(missing_ok=True)


@contextmanager
def _torch_on_one_thread(kernels: Kernels) -> Iterator[None]:
    """While worker threads compute: where torch does it, each operation on one thread."""
    if kernels == "fused":
        yield
        return
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _source_shards(plan: Plan, tensors: Sequence[TensorPlan], members: Mapping[str, Sequence[TensorPlan]]) -> list[str]:
    """Source shards that are read to make `tensors`, sorted."""
    used = [*tensors, *(member for group in members.values() for member in group)]
    scales = {tensor.scale for tensor in used if tensor.scale is not None}
    shards = {tensor.shard_in for tensor in used}
    if scales:
        shards |= {tensor.shard_in for tensor in plan.tensors if tensor.name in scales}
    return sorted(shards)


def _run(work: ShardWork, slabs: Sequence[Slab], workers: int, stop: threading.Event | None) -> None:
    """Do all slabs on `workers` threads; raises what the first failing one raised."""
    queue = iter(enumerate(slabs))
    lock = threading.Lock()
    window = window_of(workers)
    for slab in slabs[:window]:
        work.will_need(slab)

    def loop() -> None:
        try:
            while True:
                if stop is not None and stop.is_set():
                    raise KeyboardInterrupt
                with lock:
                    index, slab = next(queue, (-1, None))
                if slab is None:
                    return
                ahead = index + window
                work.do(index, slab, ahead=slabs[ahead] if ahead < len(slabs) else None)
        except WritingStopped:
            return
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits
            work.writer.fail(error)

    if workers == 1:
        loop()
    else:
        threads = [threading.Thread(target=loop, name=f"assay-worker-{number}", daemon=True) for number in range(workers)]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except BaseException as error:
            work.writer.fail(error)
            for thread in threads:
                thread.join()
            raise
    if work.writer.error is not None:
        raise work.writer.error
