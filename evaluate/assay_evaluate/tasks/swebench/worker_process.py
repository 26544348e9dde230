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
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from assay.secret_text import without_secrets


@contextmanager
def worker(module: str, spec: Mapping[str, Any], log: Path) -> Iterator[tuple[subprocess.Popen[str], queue.Queue[str | None]]]:
    """`with worker("agent_worker", spec, log) as (process, lines)`: a module of this package as a process.

    lines: what it writes to stdout, line by line, then None. Its stderr goes to `log`. It reads the spec from the first line of
    its stdin and ends when that is closed; whatever ends the block kills it with everything it has started.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", f"assay_evaluate.tasks.swebench.{module}"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, text=True, errors="replace",
            env=_environment(log.parent), start_new_session=True,
        )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    lines: queue.Queue[str | None] = queue.Queue()

    def read(stream: Iterable[str]) -> None:
        for line in stream:
            if line.startswith("{"):
                lines.put(line)
        lines.put(None)

    threading.Thread(target=read, args=(process.stdout,), daemon=True).start()
    try:
        with contextlib.suppress(BrokenPipeError):  # it ended at once; its status and log say why
            process.stdin.write(json.dumps(spec) + "\n")
            process.stdin.flush()
        yield process, lines
    finally:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()


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
