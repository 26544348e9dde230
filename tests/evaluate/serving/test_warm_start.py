"""Servers of the tests are forks of a Python that has imported vLLM: they end, and fail, as those of a user do."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from assay.errors import ServeError
from assay.recipes.load import load_recipe
from assay.recipes.model import Serving
from assay.recipes.profile import ProfileRecipe
from assay_evaluate.serving.process import group_members
from assay_evaluate.serving.server import ServerSpec, serve

pytestmark = pytest.mark.serve


@pytest.fixture
def profile(monkeypatch: pytest.MonkeyPatch) -> ProfileRecipe:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # also where tests do not share the machine: with more, starts are cold
    return load_recipe(ProfileRecipe, "cpu-emulated")


def processes_in(log_path: Path) -> list[int]:
    """API server and engine."""
    found = re.findall(r"^\((?:APIServer|EngineCore) pid=(\d+)\)", log_path.read_text(), re.MULTILINE)
    return sorted({int(pid) for pid in found})


def alive(pids: list[int], patience_s: float = 10) -> list[int]:
    deadline = time.monotonic() + patience_s
    while (left := [pid for pid in pids if os.path.exists(f"/proc/{pid}")]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def test_both_processes_are_forks_and_end_with_the_server(tiny_glm: Path, profile: ProfileRecipe, tmp_path: Path) -> None:
    log_path = tmp_path / "vllm.log"
    with serve(ServerSpec(tiny_glm, profile, Serving(), speculate=False, log_path=log_path)) as server:
        api, engine = processes_in(log_path)
        commands = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in (api, engine)]
        assert all(b"warm_server.py" in command for command in commands)
        assert {api, engine} < set(group_members(api))
    assert alive([api, engine], 0) == []
    assert server.pid is not None and group_members(server.pid) == []


def test_a_server_that_is_killed_takes_its_engine_along(tiny_glm: Path, profile: ProfileRecipe, tmp_path: Path) -> None:
    log_path = tmp_path / "vllm.log"
    with serve(ServerSpec(tiny_glm, profile, Serving(), speculate=False, log_path=log_path)) as server:
        assert server.pid is not None
        processes = processes_in(log_path)
        os.killpg(server.pid, signal.SIGKILL)
        assert alive(processes) == []
        with pytest.raises(ServeError, match=r"vLLM stopped while serving \(exit status 137\)"):
            server.check_alive()


def test_a_refused_start_has_its_status_and_cause(tiny_glm: Path, profile: ProfileRecipe, tmp_path: Path) -> None:
    wrong = profile.model_copy(update={"vllm": {**profile.vllm, "nope": 1}})
    spec = ServerSpec(tiny_glm, wrong, Serving(), speculate=False, log_path=tmp_path / "vllm.log")
    with pytest.raises(ServeError, match=r"exit status 2\): api_server.py: error: unrecognized arguments: --nope"), serve(spec):
        pass
