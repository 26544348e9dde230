"""A module of this package as a process that is told what to do on stdin and says what happens on stdout, line by line."""

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
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from assay.secret_text import without_secrets


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
                [sys.executable, "-m", f"assay_evaluate.tasks.swebench.{self.module}"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, errors="replace",
                env=_environment(self.log.parent), start_new_session=True,
            )  # fmt: skip
        assert self.process.stdin is not None and self.process.stdout is not None
        lines: queue.Queue[str | None] = queue.Queue()

        def read(stream: Iterable[str]) -> None:
            for line in stream:
                if line.startswith("{"):
                    lines.put(line)
            lines.put(None)

        threading.Thread(target=read, args=(self.process.stdout,), daemon=True).start()
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


def _environment(folder: Path) -> dict[str, str]:
    """The worker's: nothing is fetched or reported on import, agents find no secret, local servers need no proxy."""
    kept = {
        name: value
        for name, value in without_secrets(os.environ).items()
        if not name.startswith(("OPENAI_", "MSWEA_", "LITELLM_"))
    }
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


# ------------------------------------------------------------------------------------------------ in the worker
_print_lock = threading.Lock()


def begin() -> dict[str, Any]:
    """The spec, from the first line of stdin. From now on only `tell` writes to stdout; the process ends with its parent."""
    spec: dict[str, Any] = json.loads(sys.stdin.readline())

    def end_with_parent() -> None:
        """The parent holds our stdin open; when it is killed, nobody must go on writing trajectories."""
        sys.stdin.read()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    sys.stdout = sys.stderr  # whatever libraries print must not get between our lines
    return spec


def tell(event: str, **more: Any) -> None:
    """One line for the parent."""
    with _print_lock:
        sys.__stdout__.write(json.dumps({"event": event, **more}) + "\n")  # type: ignore[union-attr]
        sys.__stdout__.flush()  # type: ignore[union-attr]
