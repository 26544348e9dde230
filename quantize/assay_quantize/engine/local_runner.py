"""Shards on this machine: a few in flight at once, each on worker threads of its own."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from assay.callbacks import Progress
from assay.records.manifest import ShardRecord
from assay.records.plan import Plan
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.checkpoint.source_reader import SourceReader
from assay_quantize.engine.budget import lanes_of
from assay_quantize.engine.shards import ShardOptions, Written, discard, finish_shard, write_shard
from assay_quantize.storage.buffers import new_pools


def run_local(
    plan: Plan,
    shard_names: Sequence[str],
    source: Path,
    out_folder: Path,
    options: ShardOptions,
    on_progress: Progress | None = None,
) -> Generator[ShardRecord, None, None]:
    """Make `shard_names` and yield the record of each as it is finished, in any order.

    options.workers threads in all, shared by `lanes` shards in flight. While a shard waits for the disk (fsync), the next one
    is worked on. Closed early, or after an error, it stops the workers and removes what is half-written.
    """
    lanes = min(lanes_of(options.workers), len(shard_names))
    if not lanes:
        return
    shares = [options.workers // lanes + (lane < options.workers % lanes) for lane in range(lanes)]
    stop = threading.Event()
    names: queue.SimpleQueue[str] = queue.SimpleQueue()
    for name in shard_names:
        names.put(name)
    done: queue.SimpleQueue[ShardRecord | BaseException] = queue.SimpleQueue()
    may_finish = threading.Semaphore(lanes)
    pools = new_pools(options.slab_bytes)

    def finish(written: Written) -> None:
        try:
            if stop.is_set():
                discard(written)
                return
            done.put(finish_shard(written))
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits
            done.put(error)
        finally:
            may_finish.release()

    with SourceReader(open_checkpoint(source)) as reader, ThreadPoolExecutor(lanes) as finisher:

        def lane(workers: int) -> None:
            try:
                while not stop.is_set():
                    try:
                        name = names.get_nowait()
                    except queue.Empty:
                        return
                    own = replace(options, workers=workers)
                    written = write_shard(
                        plan, name, source, out_folder, own, on_progress, reader=reader, stop=stop, pools=pools
                    )
                    may_finish.acquire()
                    finisher.submit(finish, written)
            except BaseException as error:  # noqa: BLE001 - handed to the thread that waits
                done.put(error)

        threads = [threading.Thread(target=lane, args=(share,), name=f"assay-lane-{n}") for n, share in enumerate(shares)]
        try:
            for thread in threads:  # inside: a Ctrl-C may come as soon as the first one runs
                thread.start()
            for _ in shard_names:
                result = done.get()
                if isinstance(result, BaseException):
                    raise result
                yield result
        finally:
            stop.set()
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
