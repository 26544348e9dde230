"""A Python that has imported what is slow to import, and forks for every job: a command costs what it does, not its imports.

with Forking(library, modules=["torch"], paths=[...]) as forking:
    ended = forking.run("module:function", arguments, under=folder, fault=Fault.KILL, at=7)

Run as a program (by `Forking`), this is the process that forks.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from faulty_calls import Call, Fault, Shim

LONGEST_S = 120


@dataclass(frozen=True)
class Ended:
    """How a job ended. status: exit code, or minus the signal; None: it was ended after LONGEST_S."""

    status: int | None
    err: str
    out: str
    hit: Call | None
    num_calls: int
    calls: tuple[Call, ...] = ()
    """Only of a job in which nothing was to go wrong."""


class Forking:
    """The process that forks. A context manager."""

    def __init__(self, library: Path, *, modules: Sequence[str], paths: Sequence[Path], folder: Path) -> None:
        """modules: imported before the forks; a job is a function of one of them. paths: where to find them, too.

        folder: for what jobs print; nothing under it is to be swept.
        """
        self._folder = folder
        search = os.pathsep.join(str(path) for path in (Path(__file__).parent, *paths))
        environment = {
            **os.environ,
            "LD_PRELOAD": str(library),
            "PYTHONSAFEPATH": "1",
            "PYTHONPATH": search,
            "OMP_NUM_THREADS": "1",
        }
        self._process = subprocess.Popen(
            [sys.executable, __file__, *modules], env=environment, cwd=folder, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

    def run(
        self, job: str, arguments: Sequence[Any], *, under: Path, cwd: Path, fault: Fault = Fault.COUNT, at: int = 0
    ) -> Ended:  # fmt: skip
        """`job` (`module:function`) called in a child, with these arguments; what it returns is its exit code (None: 0)."""
        assert self._process.stdin is not None and self._process.stdout is not None
        request = {
            "job": job, "arguments": list(arguments), "under": os.path.realpath(under), "cwd": str(cwd), "fault": fault,
            "at": at, "out": str(self._folder / "out"), "err": str(self._folder / "err"),
        }  # fmt: skip
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the process that forks has ended"
        answer = json.loads(line)
        return Ended(
            answer["status"], (self._folder / "err").read_text(errors="replace"),
            (self._folder / "out").read_text(errors="replace"), None if answer["hit"] is None else Call(*answer["hit"]),
            answer["num_calls"], tuple(Call(*call) for call in answer["calls"]),
        )  # fmt: skip


# ------------------------------------------------------------------------------------------------ the process that forks
def child(shim: Shim, request: dict[str, Any]) -> None:
    """Do the job, and end as a program of its own would."""
    for stream, number in (("out", 1), ("err", 2)):
        descriptor = os.open(request[stream], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(request["cwd"])
    module, _, name = request["job"].partition(":")
    job = getattr(importlib.import_module(module), name)
    shim.arm(request["under"], Fault(request["fault"]), request["at"])
    try:
        code = job(*request["arguments"]) or 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:  # noqa: BLE001 - as the interpreter would
        traceback.print_exc()
        code = 1
    threading._shutdown()  # waits for threads, as the end of a program does
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def wait_for(process: int) -> int | None:
    """Exit code, minus the signal that ended it, or None: it was ended here."""
    deadline = time.monotonic() + LONGEST_S
    while True:
        found, status = os.waitpid(process, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            return None
        time.sleep(0.002)


def main() -> None:
    for name in sys.argv[1:]:
        importlib.import_module(name)
    shim = Shim()
    assert threading.active_count() == 1, "a thread would not live on in a child"
    for line in sys.stdin:
        request = json.loads(line)
        sys.stdout.flush()
        if not (process := os.fork()):
            child(shim, request)
        status, seen = wait_for(process), shim.calls()
        calls = [] if request["at"] else seen
        print(json.dumps({"status": status, "hit": shim.hit(), "num_calls": len(seen), "calls": calls}), flush=True)


if __name__ == "__main__":
    main()
