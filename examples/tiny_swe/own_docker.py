"""A Docker daemon for as long as it is needed: the one that answers, or a `dockerd` of our own in a folder of its own.

    with docker_daemon(Path("runs/docker")) as host: ...        # DOCKER_HOST is set meanwhile

Debian: apt-get install docker.io. Root only; containers get no network (--bridge=none), so that no firewall is touched.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

START_S = 60


class NoDocker(RuntimeError):
    """No Docker daemon answers and none can be started; the message says why."""


def answers(host: str | None) -> bool:
    """Whether a daemon answers at `host` (None: where DOCKER_HOST or the default says)."""
    if shutil.which("docker") is None:
        return False
    environment = os.environ if host is None else {**os.environ, "DOCKER_HOST": host}
    command = ["docker", "version", "--format", "{{.Server.Version}}"]
    return subprocess.run(command, env=environment, capture_output=True, timeout=60, check=False).returncode == 0


@contextmanager
def docker_daemon(folder: Path) -> Iterator[str | None]:
    """Yield the address of a daemon that answers (None: the default one). NoDocker if there is none and none can run."""
    if answers(None):
        yield os.environ.get("DOCKER_HOST")
        return
    if shutil.which("docker") is None or shutil.which("dockerd") is None:
        raise NoDocker("no Docker here (Debian: apt-get install docker.io)")
    if os.geteuid() != 0:
        raise NoDocker("no Docker daemon answers, and only root may start one; start dockerd, or set DOCKER_HOST")
    with _own_docker(folder.resolve()) as host:
        before = os.environ.get("DOCKER_HOST")
        os.environ["DOCKER_HOST"] = host
        try:
            yield host
        finally:
            os.environ.pop("DOCKER_HOST") if before is None else os.environ.update(DOCKER_HOST=before)


@contextmanager
def _own_docker(folder: Path) -> Iterator[str]:
    folder.mkdir(parents=True, exist_ok=True)
    host, log = f"unix://{folder}/s", folder / "dockerd.log"
    if len(host) > 100:
        raise NoDocker(f"{folder}: too long a path for a socket; choose a shorter one")
    command = ["dockerd", "--iptables=false", "--ip6tables=false", "--bridge=none", "-H", host]
    command += ["--data-root", f"{folder}/data", "--exec-root", f"{folder}/exec", "--pidfile", f"{folder}/pid"]
    with log.open("w", encoding="utf-8") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
    try:
        began = time.monotonic()
        while not answers(host):
            if process.poll() is not None or time.monotonic() - began > START_S:
                lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
                raise NoDocker(f"dockerd does not run here: {lines[-1][:300] if lines else 'it said nothing'}")
            time.sleep(0.2)
        yield host
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
