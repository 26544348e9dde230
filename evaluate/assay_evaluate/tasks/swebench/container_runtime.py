"""The container runtime: is it there, has it room, are the images there, what did we leave behind. By its own command line."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from assay.errors import MeasureError
from assay.recipes.swe import SweOptions

LABEL = "io.assay.run"
"""On every container that is started here; its value is the run."""


@dataclass(frozen=True)
class ContainerRuntime:
    """`executable`: docker or podman, spoken to as the environment says (DOCKER_HOST)."""

    executable: str
    version: str
    storage: Path | None
    """Where images and containers lie; None if it is on another machine."""

    def call(self, *arguments: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
        """Run the runtime's command; the caller looks at the exit status. MeasureError if it hangs."""
        command = [self.executable, *arguments]
        try:
            return subprocess.run(
                command, capture_output=True, text=True, timeout=timeout_s, check=False, errors="replace"
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise MeasureError(
                f"`{' '.join(command[:3])}` did not end within {timeout_s:g} s; is it healthy? The same command goes on"
            ) from None

    def has_image(self, image: str) -> bool:
        return self.call("image", "inspect", image).returncode == 0

    def pull(self, image: str, timeout_s: float) -> str | None:
        """Why its registry does not give an image; None: it is here now."""
        pulled = self.call("pull", "-q", image, timeout_s=timeout_s)
        lines = pulled.stderr.strip().splitlines() or ["no reason given"]
        return None if pulled.returncode == 0 else " ".join(lines[-1].split())[:200]

    def remove_leftovers(self, run: str) -> int:
        """Remove every container of `run`, running or not; how many there were."""
        listed = self.call("ps", "-aq", "--filter", f"label={LABEL}={run}").stdout.split()
        if listed:
            self.call("rm", "-f", *listed)
        return len(listed)


def find_runtime(executable: str) -> ContainerRuntime:
    """What is behind `docker` or `podman`. MeasureError, one line: not installed, or not answering, and what to do."""
    if shutil.which(executable) is None:
        raise MeasureError(
            f"no {executable} on this machine, and a SWE-bench task runs in containers: install it (Debian: apt-get install "
            "docker.io), name another `environment` in the suite, or leave the task out"
        )
    try:
        info = subprocess.run(
            [executable, "info", "--format", "{{json .}}"], capture_output=True, text=True, timeout=60, check=False
        )  # fmt: skip
        data = json.loads(info.stdout) if info.stdout.strip() else {}
    except (subprocess.TimeoutExpired, json.JSONDecodeError) as error:
        raise MeasureError(
            f"{executable} info: no usable answer ({type(error).__name__}); is the container runtime healthy?"
        ) from None
    version = data.get("ServerVersion") or (data.get("version") or {}).get("Version")
    if not version:
        reason = " ".join((info.stderr or "; ".join(data.get("ServerErrors") or ["no answer"])).split())[:200]
        raise MeasureError(
            f"{executable} is installed, but does not answer ({reason}); start it (as root: dockerd &), or set "
            "DOCKER_HOST to the one that runs; nothing was lost, the same command goes on"
        )
    root = data.get("DockerRootDir") or (data.get("store") or {}).get("graphRoot")
    storage = Path(root) if root and Path(root).is_dir() else None
    return ContainerRuntime(executable, f"{executable} {version}", storage)


def check_room(runtime: ContainerRuntime, min_free_gb: float) -> None:
    """MeasureError if the container runtime's storage has less than that left; nothing if it is on another machine."""
    if runtime.storage is None:
        return
    free_gb = shutil.disk_usage(runtime.storage).free / 1e9
    if free_gb < min_free_gb:
        raise MeasureError(
            f"{runtime.storage}: {free_gb:.1f} GB free, the suite wants {min_free_gb:g} for images and containers "
            f"(min_free_disk_gb); remove unused ones (`{runtime.executable} system prune -a`), or move its storage"
        )


def runtime_for(options: SweOptions) -> ContainerRuntime | None:
    """The container runtime that the agents run in: checked. None: they run without one, or in Singularity."""
    if options.environment in {"docker", "podman"}:
        return find_runtime(options.environment)
    if options.environment == "singularity" and not (shutil.which("singularity") or shutil.which("apptainer")):
        raise MeasureError(
            "no singularity or apptainer on this machine; install one, or name another `environment` in the suite"
        )
    return None
