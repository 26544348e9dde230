"""A process of its own that drives mini-swe-agent: python -m assay_evaluate.tasks.swebench.agent_worker < spec.json

Reads one JSON object (`agents.py` writes it), runs its jobs in threads, and writes one JSON object per line to stdout:

    {"event": "start", "job": 3, "attempt": 1}                      {"event": "step", "job": 3, "steps": 12}
    {"event": "end", "job": 3, "status": ..., "fault": ..., "detail": ..., "attempts": 1}
    {"event": "paused", "why": ...}  {"event": "resumed", "seconds": 12.0}  {"event": "gave up", "why": ...}

A request that the server does not answer is held until it is back and then sent again: the history is on this side, so a
trajectory does not notice. Only a server that stays away ends the process, before anything was written for the open jobs.
"""

from __future__ import annotations

import concurrent.futures
import json
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import minisweagent.models.litellm_model as litellm_model
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.docker import DockerEnvironment
from minisweagent.environments.local import LocalEnvironment
from minisweagent.environments.singularity import SingularityEnvironment

from assay.records.base import write_text_atomically
from assay_evaluate.client.sending import Sender
from assay_evaluate.tasks.swebench.agent_model import make_model
from assay_evaluate.tasks.swebench.server_gate import GatedRetry, GaveUp, ServerGate
from assay_evaluate.tasks.swebench.trajectories import Exit, classify, failed_path, trajectory_path
from assay_evaluate.tasks.swebench.worker_process import begin, tell

DAEMON_WORDS = (
    "Error response from daemon",
    "Error: No such container",
    "Cannot connect to the Docker daemon",
    "can only create exec",
)
_here = threading.local()
"""`gate`: of the server that this thread's trajectory talks to. `sender`: puts requests to it."""


class ContainerGone(Exception):
    """The container ended under the agent: what it would see now are the container runtime's words, not its command's."""


# ------------------------------------------------------------------------------------------------ one trajectory
class Agent(DefaultAgent):
    """mini-swe-agent's own, telling how far it is."""

    job = -1

    def step(self) -> list[dict[str, Any]]:
        result = super().step()
        tell("step", job=self.job, steps=self.n_calls)
        return list(result)


def make_environment(spec: Mapping[str, Any], job: Mapping[str, Any], scratch: Path) -> Any:
    """A container, sandbox or copy of a repository for one trajectory; what goes wrong here is the machinery's."""
    kind, settings = spec["environment_class"], dict(spec["environment"])
    if kind == "local":
        settings["cwd"] = str(scratch / "testbed")
        shutil.copytree(job["repository"], settings["cwd"], symlinks=True)
        return LocalEnvironment(**settings)
    if kind == "singularity":
        return SingularityEnvironment(image=f"docker://{job['image']}", **settings)
    return Container(image=job["image"], **settings)


class Container(DockerEnvironment):
    """mini-swe-agent's own; notices when the container is gone, and takes it away at once when the agent is done."""

    def execute(self, action: dict[str, Any], cwd: str = "", *, timeout: int | None = None) -> dict[str, Any]:
        output: dict[str, Any] = super().execute(action, cwd, timeout=timeout)
        text = str(output.get("output", ""))
        if output["returncode"] not in (0, None) and any(words in text for words in DAEMON_WORDS) and not self._is_running():
            raise ContainerGone(text)
        return output

    def _is_running(self) -> bool:
        command = [self.config.executable, "inspect", "-f", "{{.State.Running}}", str(self.container_id)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout.strip() == "true"

    def cleanup(self) -> None:
        container_id, self.container_id = getattr(self, "container_id", None), None
        if container_id:
            command = [self.config.executable, "rm", "-f", container_id]
            subprocess.run(command, capture_output=True, timeout=120, check=False)


def run_attempt(spec: Mapping[str, Any], job: Mapping[str, Any], gate: ServerGate) -> Exit:
    """One trajectory from the start; its file is written before this returns. GaveUp: nothing is."""
    agent = environment = None
    error: Exception | None = None
    with tempfile.TemporaryDirectory(prefix="assay-swe-", ignore_cleanup_errors=True) as scratch:
        try:
            environment = make_environment(spec, job, Path(scratch))
            agent = Agent(make_model(spec, gate, _here.sender), environment, **spec["agent"])
            agent.job = job["job"]
            info = agent.run(job["task"])
            end = classify(info.get("exit_status"), "")
        except GaveUp:
            raise
        except Exception as caught:  # noqa: BLE001  whatever it is, it ended a trajectory, and its name says how
            error, detail = caught, str(caught)
            if isinstance(caught, subprocess.CalledProcessError):
                detail = f"{caught}: {caught.stderr or caught.stdout or ''}"
            end = classify(type(caught).__name__, detail)
        finally:
            if environment is not None and hasattr(environment, "cleanup"):
                environment.cleanup()
    _save(job, agent, end, error)
    return end


def _save(job: Mapping[str, Any], agent: Agent | None, end: Exit, error: Exception | None) -> None:
    """The trajectory, under the name that says whether it counts; by rename, for this process may be killed."""
    folder = Path(job["folder"])
    path = (trajectory_path if end.fault == "model" else failed_path)(folder, job["instance"])
    info: dict[str, Any] = {"exit_status": end.status}
    if error is not None:
        info |= {"submission": "", "exception_str": end.detail, "exception_type": type(error).__name__}
    extra = {"info": info, "instance_id": job["instance"]}
    data = (
        agent.save(None, extra) if agent is not None else {**extra, "messages": [], "trajectory_format": "mini-swe-agent-1.1"}
    )
    write_text_atomically(path, json.dumps(data, indent=1, default=str))


# ------------------------------------------------------------------------------------------------ all of them
def run_job(spec: Mapping[str, Any], job: Mapping[str, Any], gate: ServerGate, sender: Sender) -> None:
    """Attempts until the model ends one itself, or there are no more."""
    _here.gate, _here.sender = gate, sender
    for attempt in range(1, spec["num_attempts"] + 1):
        if gate.gave_up is not None:
            return
        tell("start", job=job["job"], attempt=attempt)
        try:
            end = run_attempt(spec, job, gate)
        except GaveUp:
            return
        if end.fault == "model" or attempt == spec["num_attempts"]:
            tell("end", job=job["job"], status=end.status, fault=end.fault, detail=end.detail, attempts=attempt)
            return
        tell("retry", job=job["job"], status=end.status, detail=end.detail)
        time.sleep(min(300.0, spec["attempt_backoff_s"] * 2 ** (attempt - 1)))


def main() -> None:
    spec = begin()
    gates = {
        url: ServerGate(url, spec["server_patience_s"], spec["probe_every_s"], tell, spec["headers"])
        for url in sorted({job["base_url"] for job in spec["jobs"]})
    }
    sender = Sender(spec["model"]["model_name"], spec["request_timeout_s"], spec["headers"])

    def retry(*, logger: object, abort_exceptions: list[type[BaseException]]) -> GatedRetry:
        return GatedRetry(_here.gate, spec["num_request_attempts"], spec["request_backoff_s"])

    vars(litellm_model)["retry"] = retry
    with concurrent.futures.ThreadPoolExecutor(spec["num_agents"]) as pool:
        for running in [pool.submit(run_job, spec, job, gates[job["base_url"]], sender) for job in spec["jobs"]]:
            running.result()
    reason = next((gate.gave_up for gate in gates.values() if gate.gave_up is not None), None)
    if reason is not None:
        tell("gave up", why=reason)


if __name__ == "__main__":
    main()
