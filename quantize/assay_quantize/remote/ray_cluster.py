"""A Ray cluster, and tasks on it that are begun again when their worker is lost.

Which cluster: the one `RAY_ADDRESS` names (`auto`: the one this machine belongs to); else one that runs on this machine; else
one of its own, on the loopback interface only, which ends with the run. `RAY_ADDRESS=local` insists on the last.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import logging
import os
import re
import socket
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

from assay.errors import AssayError, QuantizeError
from assay.installation import install_command
from assay_quantize.kernels.devices import default_workers

ATTEMPTS = 4
"""How often a task is begun before the run gives up: workers are lost to reclaimed nodes, seldom to what they make."""

CANCEL_WITHIN_S = 20.0
CONNECT_WITHIN_S = 10.0
POLL_S = 1.0

_OBJECT_STORE_BYTES = 256 << 20
"""Of a cluster of our own: it holds what all tasks share and nothing else."""

log = logging.getLogger(__name__)

Key = TypeVar("Key")
Made = TypeVar("Made")


@dataclass(frozen=True)
class TaskNeeds:
    """Resources declared for every task. maker: what takes them, in a message; lowered_by: the options that ask for less."""

    cpus: int
    memory_bytes: int
    gpus: int = 0
    maker: str = "one shard"
    lowered_by: str = "--workers or --memory"

    def fits(self, resources: dict[str, float]) -> int:
        """How many such tasks a node of these resources holds at once."""
        counts = [resources.get("CPU", 0) // self.cpus]
        counts += [resources.get("memory", 0) // self.memory_bytes] if self.memory_bytes else []
        counts += [resources.get("GPU", 0) // self.gpus] if self.gpus else []
        return int(min(counts))

    def __str__(self) -> str:
        gpus = f"{self.gpus} GPU{'s' if self.gpus > 1 else ''}, " if self.gpus else ""
        return f"{gpus}{self.cpus} CPUs and {self.memory_bytes / (1 << 30):.2f} GiB of memory"


@dataclass(frozen=True)
class Cluster:
    """What this process is connected to. is_ours: it was started for this run and does not grow."""

    ray: ModuleType
    is_ours: bool = False

    def num_tasks(self, needs: TaskNeeds) -> int:
        """How many tasks of these needs run at once on the nodes that are there."""
        return sum(needs.fits(node["Resources"]) for node in self.ray.nodes() if node["Alive"])

    def check_fits(self, needs: TaskNeeds) -> None:
        """Refuse what Ray would wait for in silence; on a cluster that may still grow, say it and wait."""
        if self.num_tasks(needs):
            return
        line = f"no node of the Ray cluster has {needs}, which {needs.maker} takes"
        if self.is_ours:
            raise QuantizeError(f"{line}; lower {needs.lowered_by}")
        log.warning("%s; waiting for one to join (Ctrl-C ends; lower %s to ask for less)", line, needs.lowered_by)


class Tasks(Generic[Key, Made]):
    """Tasks that are in flight, and how often each was begun.

    begin: starts the task of a key, given which attempt it is, and returns Ray's reference to it. on_lost: called with both
    before it is begun again. remedy: what to do about a task that loses every worker, behind the reason.
    """

    def __init__(
        self, ray: ModuleType, begin: Callable[[Key, int], Any], *, on_lost: Callable[[Key, int], None], remedy: str
    ) -> None:
        self._ray, self._begin, self._on_lost, self._remedy = ray, begin, on_lost, remedy
        self._key_of: dict[Any, tuple[Key, int]] = {}

    def run(
        self, keys: Iterable[Key], at_once: int, on_poll: Callable[[], None] = lambda: None
    ) -> Generator[tuple[Key, Made], None, None]:
        """Each key with what its task returned, as they finish. on_poll: called every `POLL_S`, at least.

        QuantizeError: a task lost its worker `ATTEMPTS` times. What a task raises is raised here, as itself.
        """
        left = iter(keys)
        while True:
            for key in itertools.islice(left, at_once - len(self._key_of)):
                self._key_of[self._begin(key, 1)] = (key, 1)
            if not self._key_of:
                return
            # with a timeout, so that Ctrl-C is heard
            finished, _ = self._ray.wait(list(self._key_of), num_returns=1, timeout=POLL_S)
            on_poll()
            for task in finished:
                key, attempt = self._key_of.pop(task)
                for made in self._result(task, key, attempt):
                    yield key, made

    def _result(self, task: Any, key: Key, attempt: int) -> list[Made]:
        """What a finished task made; nothing when its worker was lost and it was begun again."""
        errors = self._ray.exceptions
        lost = (
            errors.WorkerCrashedError, errors.NodeDiedError, errors.OutOfMemoryError, errors.LocalRayletDiedError,
            errors.ObjectLostError,
        )  # fmt: skip
        try:
            return [self._ray.get(task)]
        except lost as error:
            reason = str(error).strip().splitlines()[0]
            self._on_lost(key, attempt)
            if attempt == ATTEMPTS:
                raise QuantizeError(f"{key}: its worker was lost {ATTEMPTS} times, last: {reason}; {self._remedy}") from None
            log.warning("%s: its worker was lost (%s); it is begun again", key, reason)
            self._key_of[self._begin(key, attempt + 1)] = (key, attempt + 1)
            return []
        except errors.RayTaskError as error:  # what the task raised, as it would be raised here
            cause = getattr(error, "cause", None)
            if isinstance(cause, AssayError):
                raise type(cause)(str(cause)) from None
            raise (cause if isinstance(cause, BaseException) else error) from None

    def cancel(self) -> None:
        """End what still runs, and wait until it has, so that nothing writes into the folder any more."""
        tasks = list(self._key_of)
        for task in tasks:
            self._ray.cancel(task, force=True)
        if tasks:
            self._ray.wait(tasks, num_returns=len(tasks), timeout=CANCEL_WITHIN_S)
        self._key_of.clear()


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


@contextlib.contextmanager
def connected(needs: TaskNeeds) -> Iterator[Cluster]:
    """A connection to Ray: left open if there was one, else closed at the end, with the cluster if it was started here.

    QuantizeError: there is no such cluster, or one that is started here is too small for a task of these needs.
    """
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
            made = Cluster(ray, is_ours=address == "local" and not was_connected)
            made.check_fits(needs)
            yield made
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
