"""All trajectories of one task on one server: which are missing, a worker process that makes them, what became of them.

The worker (`agent_worker.py`) holds mini-swe-agent; here are the queue, the watch over the server, and the resume. Killed at
any moment, the next call finds finished trajectories on disk and begins the others again.
"""

from __future__ import annotations

import contextlib
import json
import queue
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from assay.errors import MeasureError, UnreachableError
from assay.recipes.suite import SweTask
from assay_evaluate.client.client import Endpoint
from assay_evaluate.tasks.swebench.container_runtime import LABEL, ContainerRuntime
from assay_evaluate.tasks.swebench.dataset import DatasetRow
from assay_evaluate.tasks.swebench.settings import Settings
from assay_evaluate.tasks.swebench.trajectories import settle, trajectory_path
from assay_evaluate.tasks.swebench.worker_process import last_line, worker

PROGRESS_EVERY_S = 10.0
CHECK_SERVER_EVERY_S = 5.0


@dataclass(frozen=True)
class Pacing:
    """Waiting times, in seconds: doubled with every attempt, up to a minute (requests) or five (trajectories)."""

    request_backoff_s: float = 2.0
    num_request_attempts: int = 8
    """Of one request, while the server says it is well."""
    attempt_backoff_s: float = 15.0
    probe_every_s: float = 5.0
    """How often a server that is gone is looked for."""


@dataclass
class Finished:
    """What is known of the trajectories of one repeat."""

    predictions: dict[str, dict[str, Any]]
    """Only what the model ended itself."""
    failures: dict[str, str] = field(default_factory=dict)
    """Instance -> why the machinery could not finish it."""


# ------------------------------------------------------------------------------------------------ all of them
def run_agents(
    task: SweTask,
    rows: Sequence[DatasetRow],
    folders: Sequence[Path],
    server: Endpoint,
    *,
    settings: Settings,
    runtime: ContainerRuntime | None,
    run: str,
    model_name: str,
    num_agents: int,
    on_progress: Callable[[str], None],
    pacing: Pacing = Pacing(),
) -> list[Finished]:
    """Make every missing trajectory; one `Finished` per repeat, in the order of `folders`.

    run: marks the containers; what an earlier process left behind under this name is removed first and last. Raises
    ServeError when the server is gone for good, MeasureError when it stayed away; both leave everything to be resumed.
    """
    if runtime is not None:
        runtime.remove_leftovers(run)
    finished = []
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
        finished.append(Finished(settle(folder, model_name)))
    jobs = [
        _job(number, row, folder, task, server.base_urls)
        for number, (folder, row) in enumerate((folder, row) for folder in folders for row in rows)
        if not trajectory_path(folder, row["instance_id"]).exists()
    ]
    total = len(rows) * len(folders)
    if jobs:
        before = f", {total - len(jobs)} of them done before" if len(jobs) < total else ""
        on_progress(f"{task.name}: {total} trajectories{before}, {min(num_agents, len(jobs))} at once")
        spec = _spec(task, settings, server, jobs, runtime, run, num_agents, pacing)
        log = folders[0].parent / "agents.log"
        try:
            failures = _Worker(spec, log, server, f"{task.name}:", total, on_progress).watch()
        finally:
            if runtime is not None and (left := runtime.remove_leftovers(run)):
                on_progress(f"{task.name}: {left} containers of the agents removed")
        for folder, repeat in zip(folders, finished, strict=True):
            of_repeat = {job["job"]: job["instance"] for job in jobs if job["folder"] == str(folder)}
            repeat.failures = {of_repeat[number]: reason for number, reason in failures.items() if number in of_repeat}
            repeat.predictions = settle(folder, model_name)
    instances = {row["instance_id"] for row in rows}
    for repeat in finished:
        repeat.predictions = {name: prediction for name, prediction in repeat.predictions.items() if name in instances}
    return finished


def _job(number: int, row: DatasetRow, folder: Path, task: SweTask, urls: Sequence[str]) -> dict[str, Any]:
    job = {
        "base_url": urls[number % len(urls)],
        "job": number,
        "instance": row["instance_id"],
        "image": row["image"],
        "task": row["problem_statement"],
        "folder": str(folder),
    }
    if task.environment == "local":
        repository = Path(str(task.local_repositories)) / row["instance_id"]
        if not repository.is_dir():
            raise MeasureError(f"{repository}: no repository for {row['instance_id']} there (local_repositories)")
        job["repository"] = str(repository.resolve())
    return job


def _spec(
    task: SweTask,
    settings: Settings,
    server: Endpoint,
    jobs: list[dict[str, Any]],
    runtime: ContainerRuntime | None,
    run: str,
    num_agents: int,
    pacing: Pacing,
) -> dict[str, Any]:
    environment = dict(settings.environment)
    if runtime is not None:
        environment |= {
            "executable": runtime.executable,
            "interpreter": ["bash", "-c"],
            "container_timeout": task.container_timeout,
            "pull_timeout": task.pull_timeout_s,
            "run_args": ["--rm", "--network", task.network, "--label", f"{LABEL}={run}"],
        }
    if task.environment == "singularity":
        environment["executable"] = "singularity" if shutil.which("singularity") else "apptainer"
        if task.network == "none":
            environment["exec_args"] = ["--contain", "--cleanenv", "--fakeroot", "--net", "--network", "none"]
    return {
        "model": {**settings.model, "model_name": server.model},
        "request_timeout_s": task.request_timeout_s,
        "model_class": settings.model_class,
        "agent": settings.agent,
        "environment_class": task.environment if runtime is None else "docker",
        "environment": environment,
        "headers": dict(server.headers),
        "num_agents": num_agents,
        "num_attempts": task.num_attempts,
        "server_patience_s": task.server_patience_s,
        "num_request_attempts": pacing.num_request_attempts,
        "request_backoff_s": pacing.request_backoff_s,
        "attempt_backoff_s": pacing.attempt_backoff_s,
        "probe_every_s": pacing.probe_every_s,
        "jobs": jobs,
    }


# ------------------------------------------------------------------------------------------------ the worker process
class _Worker:
    """The process, its lines, and the watch over the server while it runs."""

    def __init__(
        self, spec: dict[str, Any], log: Path, server: Endpoint, label: str, total: int, on_progress: Callable[[str], None]
    ) -> None:
        self.spec, self.log, self.server, self.label = spec, log, server, label
        self.num_done, self.total, self.on_progress = total - len(spec["jobs"]), total, on_progress
        self.failures: dict[int, str] = {}
        self.steps: dict[int, int] = {}
        self.num_steps = 0
        self._reported_at = time.monotonic()

    def watch(self) -> dict[int, str]:
        """Job -> reason, for those the machinery could not finish."""
        with worker("agent_worker", self.spec, self.log) as (process, lines):
            checked = time.monotonic()
            while True:
                try:
                    line = lines.get(timeout=1.0)
                except queue.Empty:
                    line = ""
                if line is None:
                    break
                if line:
                    self._handle(json.loads(line))
                if time.monotonic() - checked > CHECK_SERVER_EVERY_S:
                    checked = time.monotonic()
                    with contextlib.suppress(UnreachableError):  # the worker waits for it
                        self.server.check_alive()
            if (status := process.wait()) != 0:
                raise MeasureError(
                    f"{self.label} the agents' process ended with status {status}: {last_line(self.log)} (log: {self.log})"
                )
        return self.failures

    def _handle(self, event: dict[str, Any]) -> None:
        match event["event"]:
            case "step":
                self.num_steps += 1
                self.steps[event["job"]] = event["steps"]
                self._report(is_due=False)
            case "end":
                self.steps.pop(event["job"], None)
                self.num_done += 1
                if event["fault"] != "model":
                    self.failures[event["job"]] = f"{event['status']}: {event['detail']}"
                self._report(is_due=self.num_done == self.total)
            case "paused":
                self.on_progress(f"{self.label} the server does not answer ({event['why']}); agents wait for it")
            case "resumed":
                self.on_progress(f"{self.label} the server is back after {event['seconds']:.0f} s; agents go on")
            case "gave up":
                raise MeasureError(f"{self.label} {event['why']}; finished trajectories are kept, the same command goes on")

    def _report(self, *, is_due: bool) -> None:
        if not is_due and time.monotonic() - self._reported_at <= PROGRESS_EVERY_S:
            return
        self._reported_at = time.monotonic()
        failed = f", {len(self.failures)} failed through no fault of the model" if self.failures else ""
        self.on_progress(
            f"{self.label} {self.num_done} of {self.total} trajectories, {len(self.steps)} under way, "
            f"{self.num_steps} steps{failed}"
        )  # fmt: skip
