"""All trajectories of one task on one server: which are missing, a worker process that makes them, what became of them.

The worker (`agent_worker.py`) holds mini-swe-agent; here are the queue, the watch over the server, and the resume. Killed at
any moment, the next call finds finished trajectories on disk and begins the others again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import yaml

from assay.errors import MeasureError, ServeError, UnreachableError
from assay.recipes import SweTask
from assay.records import sha256_of
from assay_evaluate.dialect import sampling
from assay_evaluate.swebench.dataset import Row
from assay_evaluate.swebench.engine import LABEL, Engine
from assay_evaluate.swebench.predictions import settle, trajectory_path

PROGRESS_EVERY_S = 10.0
CHECK_SERVER_EVERY_S = 5.0


class Endpoint(Protocol):
    """What agents need of a server (assay_evaluate.serve.Server is one)."""

    @property
    def base_url(self) -> str: ...
    @property
    def model(self) -> str: ...
    def check_alive(self) -> None:
        """Raise ServeError if the server is gone for good; UnreachableError if it may come back."""


@dataclass(frozen=True)
class Pacing:
    """Waiting times, in seconds: doubled with every attempt, up to a minute (requests) or five (trajectories)."""

    request_backoff_s: float = 2.0
    num_request_attempts: int = 8
    """Of one request, while the server says it is well."""
    attempt_backoff_s: float = 15.0
    probe_every_s: float = 5.0
    """How often a server that is gone is looked for."""


@dataclass(frozen=True)
class Settings:
    """Everything a worker is told that is the same for all trajectories; `sha256` is that of what could change one."""

    agent: dict[str, Any]
    model: dict[str, Any]
    model_class: str
    environment: dict[str, Any]
    sha256: str


@dataclass
class Finished:
    """What is known of the trajectories of one repeat."""

    predictions: dict[str, dict[str, Any]]
    """Only what the model ended itself."""
    failures: dict[str, str] = field(default_factory=dict)
    """Instance -> why the machinery could not finish it."""
    purged: list[str] = field(default_factory=list)
    """Empty patches of the machinery that were found in preds.json and taken out."""


# ------------------------------------------------------------------------------------------------ what the agent is told
def settings_for(task: SweTask, chat_template_kwargs: Mapping[str, Any] = {}) -> Settings:
    """mini-swe-agent's own prompts (or the suite's file) under the suite's limits and sampling; the endpoint is added later."""
    config = _agent_config(task)
    native = task.tool_calls == "native"
    agent = {key: config["agent"][key] for key in ("system_template", "instance_template")} | {
        "step_limit": task.step_limit,
        "cost_limit": 0.0,
        "wall_time_limit_seconds": task.wall_time_limit_s or 0,
        "max_consecutive_format_errors": task.max_format_errors,
    }
    pinned = sampling(task.temperature, None) | {"top_p": task.top_p, "top_k": task.top_k}
    beyond_openai: dict[str, Any] = {key: pinned.pop(key) for key in ("top_k", "min_p", "repetition_penalty")}
    if task.thinking_tokens is not None:
        beyond_openai["thinking_token_budget"] = task.thinking_tokens
    if chat_template_kwargs:
        beyond_openai["chat_template_kwargs"] = dict(chat_template_kwargs)
    kwargs = {**pinned, "max_tokens": task.max_tokens, "extra_body": beyond_openai, "drop_params": False, "max_retries": 0}
    if native:
        kwargs["parallel_tool_calls"] = True
    model = {
        "cost_tracking": "ignore_errors",
        "model_kwargs": kwargs,
        **{key: config["model"][key] for key in ("observation_template", "format_error_template")},
    }
    environment = {"timeout": task.command_timeout_s, "env": config["environment"].get("env", {})}
    if task.environment != "local":
        environment |= {"cwd": "/testbed"}
    model_class = "litellm" if native else "litellm_textbased"
    told = {"agent": agent, "model": model, "model_class": model_class, "environment": environment, "in": task.environment}
    return Settings(agent, model, model_class, environment, sha256_of(told))


def _agent_config(task: SweTask) -> dict[str, Any]:
    if task.agent_config is not None:
        path = Path(task.agent_config)
    else:
        name = "swebench.yaml" if task.tool_calls == "native" else "swebench_backticks.yaml"
        path = package_folder("minisweagent", "mini-swe-agent") / "config" / "benchmarks" / name
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
        for section, key in (("agent", "system_template"), ("agent", "instance_template"), ("model", "observation_template")):
            data[section][key]
        data["model"].setdefault("format_error_template", "{{ error }}")
        data.setdefault("environment", {})
    except OSError as error:
        raise MeasureError(
            f"{path}: cannot be read ({error.strerror}); agent_config names a mini-swe-agent YAML file"
        ) from None
    except (yaml.YAMLError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())[:120]
        raise MeasureError(
            f"{path}: not a mini-swe-agent config ({reason}); it needs agent.system_template, agent.instance_template and "
            "model.observation_template"
        ) from None
    return dict(data)


def package_folder(module: str, distribution: str) -> Path:
    """Where a package lies, without importing it. MeasureError if it is not installed."""
    from importlib.util import find_spec

    found = find_spec(module)
    if found is None or not found.submodule_search_locations:
        raise MeasureError(
            f"{distribution} is not installed, and SWE-bench tasks need it; pip install 'assay[swe]', or `make setup`"
        )
    return Path(found.submodule_search_locations[0])


# ------------------------------------------------------------------------------------------------ all of them
def run_agents(
    task: SweTask,
    rows: Sequence[Row],
    folders: Sequence[Path],
    server: Endpoint,
    *,
    settings: Settings,
    engine: Engine | None,
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
    done = []
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
        done.append(Finished(*_settled(folder, model_name)))
    jobs = [
        _job(number, row, folder, task)
        for number, (folder, row) in enumerate((folder, row) for folder in folders for row in rows)
        if not trajectory_path(folder, row["instance_id"]).exists()
    ]
    total = len(rows) * len(folders)
    if jobs:
        before = f", {total - len(jobs)} of them done before" if len(jobs) < total else ""
        on_progress(f"{task.name}: {total} trajectories{before}, {min(num_agents, len(jobs))} at once")
        spec = _spec(task, settings, server, jobs, engine, run, num_agents, pacing)
        log = folders[0].parent / "agents.log"
        try:
            failures = _Worker(spec, log, server, f"{task.name}:", total, on_progress).watch()
        finally:
            if engine is not None and (left := engine.remove_leftovers(run)):
                on_progress(f"{task.name}: {left} containers of the agents removed")
        by_folder = {job["job"]: (job["folder"], job["instance"]) for job in jobs}
        for number, reason in failures.items():
            folder, instance = by_folder[number]
            done[[str(one) for one in folders].index(folder)].failures[instance] = reason
        for folder, one in zip(folders, done, strict=True):
            one.predictions = settle(folder, model_name)[0]
    wanted = {row["instance_id"] for row in rows}
    for one in done:
        one.predictions = {instance: kept for instance, kept in one.predictions.items() if instance in wanted}
    return done


def _settled(folder: Path, model_name: str) -> tuple[dict[str, dict[str, Any]], dict[str, str], list[str]]:
    predictions, purged = settle(folder, model_name)
    return predictions, {}, purged


def _job(number: int, row: Row, folder: Path, task: SweTask) -> dict[str, Any]:
    job = {
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
    engine: Engine | None,
    run: str,
    num_agents: int,
    pacing: Pacing,
) -> dict[str, Any]:
    kwargs = settings.model["model_kwargs"] | {
        "api_base": f"{server.base_url}/v1",
        "api_key": "none",
        "timeout": task.request_timeout_s,
    }
    environment = dict(settings.environment)
    if engine is not None:
        environment |= {
            "executable": engine.executable,
            "interpreter": ["bash", "-c"],
            "container_timeout": task.container_timeout,
            "pull_timeout": task.pull_timeout_s,
            "run_args": ["--rm", "--network", task.network, "--label", f"{LABEL}={run}"],
        }
    return {
        "base_url": server.base_url,
        "model": {**settings.model, "model_name": f"{task.provider}/{server.model}", "model_kwargs": kwargs},
        "model_class": settings.model_class,
        "agent": settings.agent,
        "environment_class": task.environment if engine is None else "docker",
        "environment": environment,
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
        self._told = time.monotonic()

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
                    self._hear(json.loads(line))
                if time.monotonic() - checked > CHECK_SERVER_EVERY_S:
                    checked = time.monotonic()
                    with contextlib.suppress(UnreachableError):  # the worker waits for it
                        self.server.check_alive()
            if (status := process.wait()) != 0:
                raise MeasureError(
                    f"{self.label} the agents' process ended with status {status}: {last_line(self.log)} (log: {self.log})"
                )
        return self.failures

    def _hear(self, said: dict[str, Any]) -> None:
        match said["event"]:
            case "step":
                self.num_steps += 1
                self.steps[said["job"]] = said["steps"]
                if time.monotonic() - self._told > PROGRESS_EVERY_S:
                    self._tell()
            case "end":
                self.steps.pop(said["job"], None)
                self.num_done += 1
                if said["fault"] != "model":
                    self.failures[said["job"]] = f"{said['status']}: {said['detail']}"
                if self.num_done == self.total or time.monotonic() - self._told > PROGRESS_EVERY_S:
                    self._tell()
            case "paused":
                self.on_progress(f"{self.label} the server does not answer ({said['why']}); agents wait for it")
            case "resumed":
                self.on_progress(f"{self.label} the server is back after {said['seconds']:.0f} s; agents go on")
            case "gave up":
                raise MeasureError(f"{self.label} {said['why']}; finished trajectories are kept, the same command goes on")

    def _tell(self) -> None:
        self._told = time.monotonic()
        failed = f", {len(self.failures)} failed through no fault of the model" if self.failures else ""
        self.on_progress(
            f"{self.label} {self.num_done} of {self.total} trajectories, {len(self.steps)} under way, "
            f"{self.num_steps} steps{failed}"
        )  # fmt: skip


class worker:
    """`with worker("agent_worker", spec, log) as (process, lines)`: a module of this package as a process.

    lines: what it writes to stdout, line by line, then None. Its stderr goes to `log`. It reads the spec from the first line of
    its stdin and ends when that is closed; whatever ends the block kills it with everything it has started.
    """

    def __init__(self, module: str, spec: Mapping[str, Any], log: Path) -> None:
        self.module, self.spec, self.log = module, spec, log

    def __enter__(self) -> tuple[subprocess.Popen[str], queue.Queue[str | None]]:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("a", encoding="utf-8") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", f"assay_evaluate.swebench.{self.module}"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, errors="replace",
                env=_environment(self.log.parent), start_new_session=True,
            )  # fmt: skip
        assert self.process.stdin is not None and self.process.stdout is not None
        lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=_read, args=(self.process.stdout, lines), daemon=True).start()
        try:
            self.process.stdin.write(json.dumps(self.spec) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it ended at once; its status and log say why
        return self.process, lines

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()


def _read(stream: Iterable[str], lines: queue.Queue[str | None]) -> None:
    for line in stream:
        if line.startswith("{"):
            lines.put(line)
    lines.put(None)


def _environment(folder: Path) -> dict[str, str]:
    """The worker's: nothing is fetched or reported on import, no other service's key is used, local servers need no proxy."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OPENAI_", "MSWEA_", "LITELLM_"))}
    no_proxy = ",".join(filter(None, [os.environ.get("NO_PROXY", os.environ.get("no_proxy", "")), "127.0.0.1", "localhost"]))
    return kept | {
        "MSWEA_SILENT_STARTUP": "1",
        "MSWEA_GLOBAL_CONFIG_DIR": str(folder / ".mini-swe-agent"),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_LOG": "ERROR",
        "NO_PROXY": no_proxy,
        "no_proxy": no_proxy,
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",
    }


def last_line(log: Path) -> str:
    """The last words of a process, on one line."""
    try:
        lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    except OSError:
        return "it left no log"
    return " ".join(lines[-1].split())[:300] if lines else "it said nothing"


def run_name(*parts: str) -> str:
    """A short name for containers, the same in every process that works on the same folder."""
    return "assay-" + hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


__all__ = ["Endpoint", "Finished", "Pacing", "ServeError", "Settings", "run_agents", "run_name", "settings_for", "worker"]
