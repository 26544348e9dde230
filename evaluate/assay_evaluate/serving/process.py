"""One child in its own session, its output in a file, and nothing left of it afterwards."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

_SUPERVISOR = Path(__file__).with_name("_supervisor.py")
PATIENCE_S = 10.0
"""With a process group that was told to end."""


class SupervisedProcess:
    """A command started in a new session (and process group), its output in `log_path`; dies with us, even on `kill -9`."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], log_path: Path, folder: Path | None = None
    ) -> None:
        """folder: where the command runs. None: where this process does."""
        log_path.parent.mkdir(parents=True, exist_ok=True)
        self.log_path = log_path
        supervised = [sys.executable, "-I", str(_SUPERVISOR), str(os.getpid()), *command]
        with log_path.open("wb") as log:
            # A file, never a pipe: nobody reads while the server works, and a full pipe would stop it.
            self._popen = subprocess.Popen(
                supervised,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                cwd=folder,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Of the supervisor: also the id of the process group."""
        return self._popen.pid

    def exit_status(self) -> int | None:
        """None while the command runs; 128 + n if signal n ended it."""
        status = self._popen.poll()
        return 128 - status if status is not None and status < 0 else status

    def log_lines(self) -> list[str]:
        """The log so far."""
        return self.log_path.read_text(encoding="utf-8", errors="replace").splitlines()

    def stop(self) -> None:
        """SIGTERM to the whole group, SIGKILL to what is left after ten seconds. Returns when no member lives."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            deadline = time.monotonic() + PATIENCE_S
            with contextlib.suppress(ProcessLookupError):
                if group_members(self.pid):
                    os.killpg(self.pid, number)
            while (members := group_members(self.pid)) and time.monotonic() < deadline:
                self._popen.poll()  # reaps the supervisor as soon as it ends
                time.sleep(0.05)
            if not members:
                break
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(timeout=5)


def group_members(group: int) -> list[int]:
    """Living processes of a process group (zombies are not living; in a container nobody may reap them)."""
    members = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue  # gone meanwhile
        state, _, process_group = stat.rpartition(")")[2].split()[:3]
        if int(process_group) == group and state not in {"Z", "X"}:
            members.append(int(entry.name))
    return members


def activated_environment(environment: Mapping[str, str], interpreter: Path) -> dict[str, str]:
    """`environment` with the interpreter's folder first in PATH, as in an activated environment; where PATH has it, as it is.

    FlashInfer builds kernels with the `ninja` that is installed beside it, and vLLM does without FlashInfer if PATH has none
    (vllm/utils/flashinfer.py: has_flashinfer).
    """
    folder = str(interpreter.absolute().parent)
    folders = [entry for entry in environment.get("PATH", "").split(os.pathsep) if entry]
    return {**environment, "PATH": os.pathsep.join(folders if folder in folders else [folder, *folders])}
