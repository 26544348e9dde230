"""A Python that has imported vLLM and forks for every process that is asked for: 19 of a start's 22 CPU seconds are imports.

    python warm_server.py FOLDER LISTENER_FD        (environment: that of the processes; ends with its standard input)

Every child is a fresh fork of a process that did nothing but import, so no server sees another. `warm_client.py` asks, and
stands for the child in the process tree: it passes on arguments, environment, folder and open files, and hands back the exit
status. A child that is forked for a child of ours (vLLM's engine and ranks are spawned) joins its process group.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import sys
import types
from pathlib import Path
from typing import Any

PRELOADED = (
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.glm4_moe_mtp",
    "assay_vllm.loader",
)
OUR_FILES = 600
"""Ours lie above, those of a child below: it gets them under their own numbers."""


def main() -> None:
    folder, listener = Path(sys.argv[1]), socket.socket(fileno=moved(int(sys.argv[2])))
    sys.executable = str(folder / "python")  # before vLLM and multiprocessing read it: what they start comes back to us
    for name in PRELOADED:
        importlib.import_module(name)
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"{len(threads)} threads: a fork would lack all but one"
    gc.collect()
    gc.freeze()
    request = serve_requests(listener)
    if request is not None:
        become(request)


def moved(fd: int) -> int:
    """The same open file under a number that no child needs."""
    high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, OUR_FILES)
    os.close(fd)
    return high


def serve_requests(listener: socket.socket) -> dict[str, Any] | None:
    """None: it is over. In a child: what it was asked to be."""
    children: dict[int, tuple[socket.socket, bool]] = {}  # process -> who asked for it, and whether it leads its group
    ended_r, ended_w = map(moved, os.pipe())
    os.set_blocking(ended_w, False)
    signal.set_wakeup_fd(ended_w)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        asked = {connection.fileno(): pid for pid, (connection, _) in children.items()}
        ready, _, _ = select.select([0, listener, ended_r, *asked], [], [])
        if 0 in ready:
            for pid, (_, leads) in children.items():
                kill(pid, leads)
            return None
        for fd in asked.keys() & set(ready):  # who asked is gone: as if the child itself had been killed
            connection, leads = children.pop(asked[fd])
            connection.close()
            kill(asked[fd], leads)
        if ended_r in ready:
            os.read(ended_r, 4096)
            tell_ended(children)
        if listener in ready:
            connection = socket.socket(fileno=moved(listener.accept()[0].detach()))
            request = receive(connection)
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for ours in (listener, connection, *(one for one, _ in children.values())):
                    ours.close()
                os.close(ended_r)
                os.close(ended_w)
                return request
            for fd in request["files"].values():
                os.close(fd)
            join_group(pid, request)
            children[pid] = (connection, request["group"] is None)
            connection.sendall(struct.pack("i", pid))


def receive(connection: socket.socket) -> dict[str, Any]:
    """The request; `files`: number in the child -> here, `group`: of who asked, if that is a descendant of ours."""
    head, fds, _, _ = socket.recv_fds(connection, 4, 250)
    length, body = struct.unpack("i", head)[0], b""
    while len(body) < length:
        body += connection.recv(length - len(body))
    request: dict[str, Any] = json.loads(body)
    request["files"] = dict(zip(request["files"], map(moved, fds), strict=True))
    client = struct.unpack("iii", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
    request["group"] = os.getpgid(client) if os.getsid(client) == os.getsid(0) else None
    return request


def tell_ended(children: dict[int, tuple[socket.socket, bool]]) -> None:
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            pid, status = ended
            if pid in children:
                connection, leads = children.pop(pid)
                with contextlib.suppress(OSError):
                    connection.sendall(struct.pack("i", status))
                connection.close()
                if leads:
                    kill(pid, leads)  # what it left behind


def kill(pid: int, leads: bool) -> None:
    with contextlib.suppress(ProcessLookupError):
        (os.killpg if leads else os.kill)(pid, signal.SIGKILL)


def join_group(pid: int, request: dict[str, Any]) -> None:
    """Parent and child both do it: neither may come too late."""
    with contextlib.suppress(OSError):
        os.setpgid(pid, request["group"] or 0)


def become(request: dict[str, Any]) -> None:
    """In the child: run what was asked for as `python ARGUMENTS` would; returns when that does."""
    gc.unfreeze = lambda: None  # vLLM does when it ends, and looks through all that was imported, five times, for garbage
    join_group(0, request)
    for number, fd in request["files"].items():
        os.dup2(fd, number)
        os.close(fd)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    arguments: list[str] = request["arguments"]
    while arguments[0] not in {"-m", "-c"} and not arguments[0].endswith(".py"):
        del arguments[0]  # flags of the interpreter
    if arguments[0].endswith(".py"):
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")
        return
    kind, what, *rest = arguments
    sys.argv = [kind, *rest]
    if kind == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        module = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(what, "<string>", "exec"), vars(module))


if __name__ == "__main__":
    main()
