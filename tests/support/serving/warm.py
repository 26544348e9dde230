"""Servers of vLLM that start in three seconds: `WarmVllm.process` in place of `SupervisedProcess`.

Tests of how a server is started, watched and stopped start theirs cold (tests/evaluate/serving/test_serve.py).
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from warm_client import same_at_import

from assay.recipes.load import load_recipe
from assay.recipes.profile import ProfileRecipe
from assay_evaluate.serving.process import SupervisedProcess
from assay_evaluate.serving.server import find_interpreter
from assay_evaluate.serving.vllm_command import server_environment

HERE = Path(__file__).parent
TEMPORARY = tempfile.gettempdir()
"""Whatever a test makes of it: the path of a socket must be short."""
MOST = 2
"""Warm Pythons that are kept, of 0.6 GiB each."""


class WarmVllm:
    """A warm Python for each environment, since much of it is read while vLLM is imported."""

    def __init__(self) -> None:
        self._warm: dict[str, WarmPython] = {}  # least recently used first
        self._one_at_a_time = threading.Lock()  # tests start servers in threads

    def process(self, command: Sequence[str], environment: Mapping[str, str], log_path: Path) -> SupervisedProcess:
        """Cold: another Python than that of the serving environment, or one that would compute with several threads."""
        interpreter, *arguments = command
        if not is_serving_interpreter(interpreter) or environment.get("OMP_NUM_THREADS") != "1":
            return SupervisedProcess(command, environment, log_path)
        with self._one_at_a_time:
            warm = self._find(interpreter, environment)
            process = SupervisedProcess((str(warm.executable), *arguments), environment, log_path)
            warm.started.append(process)
        return process

    def link(self, folder: Path) -> None:
        """The command `assay`, run in `folder`, finds a serving environment there that is warm for profile cpu-emulated."""
        interpreter, environment = find_interpreter(None), server_environment(load_recipe(ProfileRecipe, "cpu-emulated"))
        assert interpreter is not None, "no .venv-serve here: run `make setup`"
        if environment.get("OMP_NUM_THREADS") == "1":
            python = folder / ".venv-serve" / "bin" / "python"
            with self._one_at_a_time:
                warm = self._find(str(interpreter), environment)
                warm.is_linked = True
            python.parent.mkdir(parents=True)
            python.symlink_to(warm.executable)

    def close(self) -> None:
        for warm in self._warm.values():
            warm.close()
        self._warm.clear()

    def _find(self, interpreter: str, environment: Mapping[str, str]) -> WarmPython:
        key = json.dumps(same_at_import(environment), sort_keys=True)
        warm = self._warm.pop(key, None) or WarmPython(interpreter, environment)
        idle = [name for name, other in self._warm.items() if not other.is_needed()]
        for name in idle[: len(self._warm) + 1 - MOST]:
            self._warm.pop(name).close()
        self._warm[key] = warm
        return warm


class WarmPython:
    """`executable` takes the arguments of `interpreter`. What it has started ends with `close` at the latest."""

    def __init__(self, interpreter: str, environment: Mapping[str, str]) -> None:
        self.started: list[SupervisedProcess] = []
        self.is_linked = False
        self._folder = Path(tempfile.mkdtemp(prefix="warm-", dir=TEMPORARY))
        self.executable = self._folder / "python"
        self.executable.write_text(
            f"#!/bin/sh\nexec '{interpreter}' -IS '{HERE / 'warm_client.py'}' '{interpreter}' '{self._folder}' \"$@\"\n"
        )
        self.executable.chmod(0o755)
        (self._folder / "environment.json").write_text(json.dumps(dict(environment)))
        with socket.socket(socket.AF_UNIX) as listener, (self._folder / "log").open("wb") as log:
            listener.bind(str(self._folder / "socket"))
            listener.listen(64)
            command = [interpreter, str(HERE / "warm_server.py"), str(self._folder), str(listener.fileno())]
            self._process = subprocess.Popen(
                command, env=dict(environment), stdin=subprocess.PIPE, stdout=log, stderr=log,
                pass_fds=[listener.fileno()], start_new_session=True,
            )  # fmt: skip

    def is_needed(self) -> bool:
        """Its servers would end with it."""
        return self.is_linked or any(process.exit_status() is None for process in self.started)

    def close(self) -> None:
        self._process.communicate(timeout=60)  # the end of its input is its end
        shutil.rmtree(self._folder)


def is_serving_interpreter(interpreter: str) -> bool:
    ours = find_interpreter(None)
    return ours is not None and Path(interpreter).parent.resolve() == ours.parent.resolve()
