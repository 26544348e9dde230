"""The same planned shards as Ray tasks over a shared file system: one task is one `quantize_shard`, wherever there is room.

The driver alone journals and publishes, so a run can be begun with one runner and finished with the other, and the bytes are
the same. Every attempt writes into a hidden folder of its own and renames the finished shard out of it: what a lost worker
leaves is never touched by the next attempt, and a worker that was only thought lost does no harm: its bytes are the same.

Which cluster: the one `RAY_ADDRESS` names (`auto`: the one this machine belongs to); else one that runs on this machine; else
one of its own, on the loopback interface only, which ends with the run. `RAY_ADDRESS=local` insists on the last.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import logging
import os
import re
import shutil
import socket
import sys
import uuid
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from assay.callbacks import Progress
from assay.errors import AssayError, QuantizeError
from assay.hub_errors import hub_address
from assay.installation import install_command
from assay.records.manifest import ShardRecord
from assay.records.plan import Plan
from assay.secret_text import without_secrets
from assay_quantize.checkpoint.shard_files import planned_shards
from assay_quantize.engine.budget import DEFAULT_MEMORY_BYTES
from assay_quantize.engine.shards import ShardOptions
from assay_quantize.kernels.devices import default_workers
from assay_quantize.remote.ray_worker import RayJob, attempt_folder, make_in_scratch, wait_for

if TYPE_CHECKING:
    from assay_quantize.engine.quantize import Runner
    from assay_quantize.remote.hub_stream import HubStream

CPUS_PER_TASK = 4
"""More threads than these would wait for the SHA-256 of their one shard; further CPUs take further shards."""

ATTEMPTS = 4
"""How often a shard is begun before the run gives up: workers are lost to reclaimed nodes, seldom to the shard."""

DOWNLOADS_AT_ONCE = 16
"""Shards under way at a time with `--stream-from hub`, over all nodes: what a hub bears, and room on the shared disk for so
many shards of the source."""

CANCEL_WITHIN_S = 20.0
CONNECT_WITHIN_S = 10.0
POLL_S = 1.0
SPARE_BYTES = 256 << 20
"""Free disk asked for beyond outputs and downloads."""

_OBJECT_STORE_BYTES = 256 << 20
"""Of a cluster of our own: it holds the plan and nothing else."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TaskNeeds:
    """Resources declared for every task."""

    cpus: int
    memory_bytes: int


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
        with _cluster(needs) as ray:
            own = replace(options, workers=needs.cpus)
            endpoint = None if stream is None else hub_address()
            tasks = _Tasks(ray, needs, plan, RayJob(source, out_folder, scratch, own, endpoint), stream)
            try:
                for record in tasks.run(shard_names, at_once):
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


class _Tasks:
    """Tasks that are in flight, and how often each shard was begun."""

    def __init__(self, ray: ModuleType, needs: TaskNeeds, plan: Plan, job: RayJob, stream: HubStream | None) -> None:
        self._ray, self._job, self._stream = ray, job, stream
        self._plan = [ray.put(plan)]
        # Ray writes this down: in its records, its logs, and what its dashboard shows. An address with a password stays here,
        # and every node must have its own (`RayJob.endpoint`).
        environment = {name: os.environ[name] for name in ("HF_ENDPOINT", "NO_PROXY") if name in os.environ}
        kept = without_secrets(environment)
        self._remote = ray.remote(
            num_cpus=needs.cpus,
            memory=needs.memory_bytes,
            max_retries=0,  # a retry by Ray would not know that it is one
            scheduling_strategy="SPREAD",
            runtime_env={"env_vars": kept} if job.endpoint is not None and kept else None,
        )(make_in_scratch)
        self._shard_of: dict[Any, tuple[str, int]] = {}

    def run(self, shard_names: Sequence[str], at_once: int) -> Generator[ShardRecord, None, None]:
        left = iter(shard_names)
        while True:
            for name in itertools.islice(left, at_once - len(self._shard_of)):
                self._begin(name, 1)
            if not self._shard_of:
                return
            # with a timeout, so that Ctrl-C is heard
            finished, _ = self._ray.wait(list(self._shard_of), num_returns=1, timeout=POLL_S)
            for task in finished:
                name, attempt = self._shard_of.pop(task)
                record = self._result(task, name, attempt)
                if record is not None:
                    yield record

    def _begin(self, name: str, attempt: int) -> None:
        need = None if self._stream is None else self._stream.needs[name]
        self._shard_of[self._remote.remote(self._plan, name, attempt, self._job, need)] = (name, attempt)

    def _result(self, task: Any, name: str, attempt: int) -> ShardRecord | None:
        """What a finished task made; None when its worker was lost and the shard was begun again."""
        errors = self._ray.exceptions
        lost = (
            errors.WorkerCrashedError, errors.NodeDiedError, errors.OutOfMemoryError, errors.LocalRayletDiedError,
            errors.ObjectLostError,
        )  # fmt: skip
        try:
            record: ShardRecord = self._ray.get(task)
        except lost as error:
            reason = str(error).strip().splitlines()[0]
            shutil.rmtree(attempt_folder(self._job.scratch, name, attempt), ignore_errors=True)
            if attempt == ATTEMPTS:
                raise QuantizeError(
                    f"{name}: its worker was lost {ATTEMPTS} times, last: {reason}; finished shards stay: look into Ray's log "
                    "of that node, raise --memory if it was killed for memory, and run again"
                ) from None
            log.warning("%s: its worker was lost (%s); it is begun again", name, reason)
            self._begin(name, attempt + 1)
            return None
        except errors.RayTaskError as error:  # what the task raised, as the local runner would raise it
            cause = getattr(error, "cause", None)
            if isinstance(cause, AssayError):
                raise type(cause)(str(cause)) from None
            raise (cause if isinstance(cause, BaseException) else error) from None
        return record

    def cancel(self) -> None:
        """End what still runs, and wait until it has, so that nothing writes into the folder any more."""
        tasks = list(self._shard_of)
        for task in tasks:
            self._ray.cancel(task, force=True)
        if tasks:
            self._ray.wait(tasks, num_returns=len(tasks), timeout=CANCEL_WITHIN_S)
        self._shard_of.clear()


def require_ray() -> None:
    """QuantizeError: Ray is not installed. Asked before the first file is written."""
    try:
        is_installed = importlib.util.find_spec("ray") is not None
    except (ModuleNotFoundError, ValueError):  # it is hidden
        is_installed = False
    if not is_installed:
        raise QuantizeError(
            f"--runner ray: Ray is not installed; take --runner local, or install it with: {install_command('ray')}"
        )


# ------------------------------------------------------------------------------------------------ cluster
@contextlib.contextmanager
def _cluster(needs: TaskNeeds) -> Iterator[ModuleType]:
    """A connection to Ray: left open if there was one, else closed at the end, with the cluster if it was started here."""
    address = os.environ.get("RAY_ADDRESS", "").strip()
    # `ray start` leaves the address of the cluster it made in this file
    is_running = Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray", "ray_current_cluster").is_file()
    if address in ("", "auto") and not is_running:
        if address == "auto":
            raise QuantizeError(
                "RAY_ADDRESS=auto: no Ray cluster runs on this machine; start it (`ray start`), or unset RAY_ADDRESS"
            )
        address = "local"
    if address == "local" and "ray" not in sys.modules:
        # read by Ray when it is imported: 0 keeps a cluster of one machine on 127.0.0.1, on any system
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    require_ray()
    import ray

    # stdout belongs to the record; Ray prints what happens to workers there
    with contextlib.redirect_stdout(sys.stderr):
        was_connected = ray.is_initialized()
        if not was_connected:
            _connect(ray, address or "auto", needs)
        try:
            _check_fits(ray, needs, is_ours=address == "local" and not was_connected)
            yield ray
        finally:
            if not was_connected:
                ray.shutdown()


def _connect(ray: ModuleType, address: str, needs: TaskNeeds) -> None:
    """Connect to `address`, or start a cluster for `local`, as large as what this process may use."""
    own: dict[str, Any] = {}
    if address == "local":
        own = {
            "num_cpus": max(default_workers(), needs.cpus),
            "include_dashboard": False,
            "_node_ip_address": "127.0.0.1",
            "object_store_memory": _OBJECT_STORE_BYTES,
        }
    try:
        if host_port := re.fullmatch(r"([\w.-]+):(\d+)", address):
            # Ray itself would try for minutes
            socket.create_connection((host_port[1], int(host_port[2])), CONNECT_WITHIN_S).close()
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **own)
    except (ConnectionError, RuntimeError, ValueError, OSError, ray.exceptions.RayError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        what = "a Ray of its own cannot be started" if own else f"no Ray cluster at {address}"
        raise QuantizeError(
            f"--runner ray: {what}: {reason}; set RAY_ADDRESS to the cluster's, or take --runner local"
        ) from None


def _check_fits(ray: ModuleType, needs: TaskNeeds, *, is_ours: bool) -> None:
    """Refuse what Ray would wait for in silence; on a cluster that may still grow, say it and wait."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if any(node.get("CPU", 0) >= needs.cpus and node.get("memory", 0) >= needs.memory_bytes for node in nodes):
        return
    line = (
        f"no node of the Ray cluster has {needs.cpus} CPUs and "
        f"{needs.memory_bytes / (1 << 30):.2f} GiB of memory, which one shard takes"
    )
    if is_ours:
        raise QuantizeError(f"{line}; lower --workers or --memory")
    log.warning("%s; waiting for one to join (Ctrl-C ends; --workers and --memory say how much a shard takes)", line)
