"""Stands for a process that `warm_server.py` forks: python -IS warm_client.py INTERPRETER FOLDER ARGUMENTS...

ARGUMENTS are Python's. INTERPRETER runs what is no process of vLLM, and vLLM in another environment, as usual.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import sys
from collections.abc import Mapping

PLACE = frozenset({"PATH", "PWD", "OLDPWD", "SHLVL", "_", "COLUMNS", "PYTEST_CURRENT_TEST", "VLLM_API_KEY"})
"""Variables that say where a process was started, or are its own; all others must be those of the warm Python."""


def main() -> None:
    interpreter, folder, *arguments = sys.argv[1:]
    if not is_vllm(arguments) or (is_first(arguments) and not is_alike(folder)):
        os.execv(interpreter, [interpreter, *arguments])
    files = [fd for fd in map(int, os.listdir("/proc/self/fd")) if is_open(fd)]
    request = {"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd(), "files": files}
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(f"{folder}/socket")
        body = json.dumps(request).encode()
        socket.send_fds(connection, [struct.pack("i", len(body))], files)
        connection.sendall(body)
        pid = answer(connection, folder)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _: pass_on(pid, number))
        for fd in files:
            os.close(fd)  # who waits for the end of a pipe waits for the child
        status = answer(connection, folder)
    if os.WIFSIGNALED(status):
        end_by(os.WTERMSIG(status))
    os._exit(os.WEXITSTATUS(status))


def is_vllm(arguments: list[str]) -> bool:
    """Else it is multiprocessing's resource tracker, or a question of assay's."""
    if is_benchmark(arguments):
        return True
    if "-m" in arguments:
        return arguments[arguments.index("-m") + 1].startswith("vllm.")
    return "-c" in arguments and "spawn_main" in arguments[arguments.index("-c") + 1]


def is_benchmark(arguments: list[str]) -> bool:
    """The process that runs `vllm bench serve`; it imports vLLM as well."""
    return len(arguments) > 1 and arguments[0] == "-I" and arguments[1].endswith("/assay_evaluate/speed/_driver.py")


def is_first(arguments: list[str]) -> bool:
    """Not started by vLLM, which changes the environment of what it starts."""
    return arguments[:2] == ["-m", "vllm.entrypoints.openai.api_server"]


def is_alike(folder: str) -> bool:
    with open(f"{folder}/environment.json", encoding="utf-8") as file:
        return same_at_import(json.load(file)) == same_at_import(os.environ)


def same_at_import(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables in which two processes must agree to have imported alike."""
    return {name: value for name, value in environment.items() if name not in PLACE}


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False  # that of the listing
    return True


def answer(connection: socket.socket, folder: str) -> int:
    received = connection.recv(4)
    if len(received) != 4:
        raise SystemExit(f"{folder}/log: the warm Python is gone")
    return int(struct.unpack("i", received)[0])


def pass_on(pid: int, number: int) -> None:
    """To the child, and to what it started if it leads a group."""
    with contextlib.suppress(ProcessLookupError):  # else its status is on the way
        (os.killpg if os.getpgid(pid) == pid else os.kill)(pid, number)


def end_by(number: int) -> None:
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


if __name__ == "__main__":
    main()
