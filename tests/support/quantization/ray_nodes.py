"""A Ray cluster of several nodes on this machine, and workers of it that are killed."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def simulated_nodes(count: int) -> Iterator[str]:
    """Nodes of one CPU each; the address of the cluster, which RAY_ADDRESS names meanwhile."""
    temporary = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # names of sockets are short
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", temporary)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        patch.setenv("RAY_worker_niceness", "0")  # 15 by default: beside other tests a worker would hardly start
        from ray.cluster_utils import Cluster  # type: ignore[import-untyped]

        node = {"num_cpus": 1, "node_ip_address": "127.0.0.1", "include_dashboard": False, "object_store_memory": 80 << 20}
        cluster = Cluster(initialize_head=True, head_node_args=node)
        try:
            for _ in range(count - 1):
                cluster.add_node(**node)
            patch.setenv("RAY_ADDRESS", cluster.address)
            yield cluster.address
        finally:
            cluster.shutdown()
            shutil.rmtree(temporary, ignore_errors=True)


def workers_at(task: str) -> list[int]:
    """Ids of the processes that run a task of this name."""
    pids = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has ended
            if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::" + task.encode()):
                pids.append(int(pid))
    return sorted(pids)


class WorkerKiller(threading.Thread):
    """Sends SIGKILL to a process of each of `victims`, when it first says so. victims: each gives the process, or None."""

    def __init__(self, *victims: Callable[[], int | None]) -> None:
        super().__init__(daemon=True)
        self.killed: list[int] = []
        self.stop = threading.Event()
        self._victims = list(victims)

    def run(self) -> None:
        while self._victims and not self.stop.wait(0.005):
            if (pid := self._victims[0]()) is not None:
                os.kill(pid, signal.SIGKILL)
                self.killed.append(pid)
                self._victims.pop(0)
