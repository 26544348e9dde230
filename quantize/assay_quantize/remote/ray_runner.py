"""The same planned shards as Ray tasks over a shared file system: one task is one `quantize_shard`, wherever there is room.

The driver alone journals and publishes, so a run can be begun with one runner and finished with the other, and the bytes are
the same. Every attempt writes into a hidden folder of its own and renames the finished shard out of it: what a lost worker
leaves is never touched by the next attempt, and a worker that was only thought lost does no harm: its bytes are the same.
"""

from __future__ import annotations

import functools
import os
import shutil
import uuid
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from assay.callbacks import Progress
from assay.errors import QuantizeError
from assay.hub_errors import hub_address
from assay.records.manifest import ShardRecord
from assay.records.plan import Plan
from assay.secret_text import without_secrets
from assay_quantize.checkpoint.shard_files import planned_shards
from assay_quantize.engine.budget import DEFAULT_MEMORY_BYTES
from assay_quantize.engine.shards import ShardOptions
from assay_quantize.remote.ray_cluster import TaskNeeds, Tasks, connected
from assay_quantize.remote.ray_worker import RayJob, attempt_folder, make_in_scratch, wait_for

if TYPE_CHECKING:
    from assay_quantize.engine.quantize import Runner
    from assay_quantize.remote.hub_stream import HubStream

CPUS_PER_TASK = 4
"""More threads than these would wait for the SHA-256 of their one shard; further CPUs take further shards."""

DOWNLOADS_AT_ONCE = 16
"""Shards under way at a time with `--stream-from hub`, over all nodes: what a hub bears, and room on the shared disk for so
many shards of the source."""

SPARE_BYTES = 256 << 20
"""Free disk asked for beyond outputs and downloads."""


def needs_of(options: ShardOptions) -> TaskNeeds:
    """What one shard takes: its threads (at most `CPUS_PER_TASK`) and the memory bound of its process."""
    memory_bytes = options.memory_bytes or DEFAULT_MEMORY_BYTES
    return TaskNeeds(min(options.workers, CPUS_PER_TASK), memory_bytes)


def run_ray(
    plan: Plan,
    shard_names: Sequence[str],
    source: Path,
    out_folder: Path,
    options: ShardOptions,
    on_progress: Progress | None = None,
    *,
    stream: HubStream | None = None,
) -> Generator[ShardRecord, None, None]:
    """Make `shard_names` as Ray tasks and yield the record of each as it is finished, in any order.

    source and out_folder must be the same folders on every node. on_progress: called once for each shard. stream: of
    `from_hub`.
    Closed early (Ctrl-C), or after an error, it cancels what runs and removes what is half-written.
    Raises QuantizeError: Ray is not installed or not reachable, no node is large enough, a node does not see the folders,
    a shard whose worker is lost `ATTEMPTS` times, and whatever `quantize_shard` raises.
    """
    if not shard_names:
        return
    needs = needs_of(options)
    source, out_folder = source.resolve(), out_folder.resolve()
    at_once = len(shard_names) if stream is None else downloads_at_once(plan, shard_names, out_folder, stream)
    scratch = out_folder / f".ray-{uuid.uuid4().hex[:12]}.partial"
    scratch.mkdir()
    try:
        with connected(needs) as cluster:
            own = replace(options, workers=needs.cpus)
            endpoint = None if stream is None else hub_address()
            job = RayJob(source, out_folder, scratch, own, endpoint)
            tasks: Tasks[str, ShardRecord] = Tasks(
                cluster.ray,
                _begin(cluster.ray, needs, plan, job, stream),
                on_lost=lambda name, attempt: shutil.rmtree(attempt_folder(scratch, name, attempt), ignore_errors=True),
                remedy="finished shards stay: look into Ray's log of that node, raise --memory if it was killed for memory, "
                "and run again",
            )
            try:
                for _, record in tasks.run(shard_names, at_once):
                    wait_for(out_folder / record.name, record.num_bytes)
                    if on_progress is not None:
                        on_progress(record.name, sum(t.num_bytes for t in planned_shards(plan)[record.name]))
                    yield record
            finally:
                tasks.cancel()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def from_hub(stream: HubStream) -> Runner:
    """The runner that makes every shard of `stream` in a task that downloads what it reads, and deletes it after.

    `DOWNLOADS_AT_ONCE` shards at a time, fewer where the disk has no room for so many. Nothing but what a task is at is staged:
    the folder of `stream` stays hollow. Every node logs in by itself (HF_TOKEN, or `hf auth login` there); an HF_ENDPOINT with
    a password is not handed to it either.
    """
    return functools.partial(run_ray, stream=stream)


def downloads_at_once(plan: Plan, shard_names: Sequence[str], out_folder: Path, stream: HubStream) -> int:
    """How many of the largest shards fit on the disk beside all outputs. QuantizeError when not even one does."""
    planned = planned_shards(plan)
    outputs = sum(o.num_bytes for name in shard_names for tensor in planned[name] for o in tensor.outputs)
    largest = max(stream.bytes_of(name) for name in shard_names)
    free = shutil.disk_usage(out_folder).free
    fits = (free - outputs - SPARE_BYTES) // largest
    if fits < 1:
        raise QuantizeError(
            f"{out_folder}: {(outputs + largest + SPARE_BYTES) / 1e9:.2f} GB are needed for one shard of the source and what "
            f"is still to be written, {free / 1e9:.2f} GB are free on its disk; free some space, or give a folder elsewhere"
        )
    return min(fits, DOWNLOADS_AT_ONCE)


def _begin(
    ray: ModuleType, needs: TaskNeeds, plan: Plan, job: RayJob, stream: HubStream | None
) -> Callable[[str, int], Any]:  # fmt: skip
    """What starts the task of a shard, given which attempt it is."""
    plan_ref = [ray.put(plan)]
    # Ray writes this down: in its records, its logs, and what its dashboard shows. An address with a password stays here, and
    # every node must have its own (`RayJob.endpoint`).
    environment = {name: os.environ[name] for name in ("HF_ENDPOINT", "NO_PROXY") if name in os.environ}
    kept = without_secrets(environment)
    remote = ray.remote(
        num_cpus=needs.cpus,
        memory=needs.memory_bytes,
        max_retries=0,  # a retry by Ray would not know that it is one
        scheduling_strategy="SPREAD",
        runtime_env={"env_vars": kept} if job.endpoint is not None and kept else None,
    )(make_in_scratch)
    return lambda name, attempt: remote.remote(plan_ref, name, attempt, job, None if stream is None else stream.needs[name])
