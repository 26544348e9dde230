"""A small chaos of the whole way (`make chaos` has twenty kills): it ends as the undisturbed run does."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from warm import WarmVllm

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "trust"))

from chaos import Accident, Scene, accidents, disturb, undisturbed
from chaos_attempt import answers
from chaos_machine import DAY_S, JOURNAL, RUNS, Machine, machine
from chaos_result import compare

from assay_evaluate.client.journal import Identity, Journal, Reply, Request

pytestmark = pytest.mark.slow

RECIPES = Path(__file__).resolve().parents[2] / "benchmarks" / "trust"
PLANNED = [
    Accident("kill", "quantize", signal.SIGKILL),
    Accident("disk full", "quantize"),
    Accident("kill", "measure", signal.SIGKILL),
    Accident("vLLM killed", "measure"),
    Accident("clock jumped", "measure"),
    Accident("kill", "judge", signal.SIGINT),
]


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """The benchmark's model with a tenth of its questions."""
    for name in ("chaos_model", "chaos_suite", "chaos_gates"):
        data = yaml.safe_load((RECIPES / f"{name}.yaml").read_text())
        if name == "chaos_suite":
            data["tasks"] = [{**task, "num_items": 12} for task in data["tasks"]]
            data["divergence"] |= {"max_tokens": 16}
        if name == "chaos_model":
            data["source"] = {"path": str((RECIPES / data["source"]["path"]).resolve())}
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(data))
    return tmp_path / "chaos_model.yaml"


@pytest.mark.serve
@pytest.mark.long
def test_a_disturbed_run_ends_as_another_does(
    tmp_path: Path, small: Path, warm_vllm: WarmVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    with machine(folder, small.stem, may_mount=False) as at:
        for name, value in {**at.environment, "OMP_NUM_THREADS": "1"}.items():  # a warm Python has the clock of its servers
            monkeypatch.setenv(name, value)
        warm_vllm.link(folder)
        calm, seconds, problems = undisturbed(folder, small)
        scene = Scene(at, small, folder, random.Random(3), seconds, len(answers(calm / "journal.db")), most_replies=4)
        caused = disturb(scene, PLANNED, 600)
        common, broken = compare(at.run_dir, calm)
    assert (problems, scene.broken, broken, scene.missed, caused) == ([], [], [], [], PLANNED)
    assert common[0].startswith("verdicts: those of the undisturbed run (")
    assert common[1].startswith("checkpoints: the same bytes, ")


def test_twenty_kills_in_all_stages() -> None:
    planned = list(accidents(random.Random(16)))
    kills = [one.stage for one in planned if one.what == "kill"]
    assert len(kills) == 20 and set(kills) == {"quantize", "verify", "start", "measure", "judge", "report"}
    assert {one.what for one in planned} == {"kill", "vLLM killed", "disk full", "journals disk full", "clock jumped"}


# ------------------------------------------------------------------------------------------------ the machine
PROGRAM = """
import datetime, sqlite3, sys, time
began = time.monotonic()
print(int(time.time()), int(datetime.datetime.now().timestamp()), int(time.monotonic() - began))
for path in sys.argv[1:]:
    try:
        with open(path, "ab") as file:
            print(file.write(bytes(20_000)))
    except OSError as error:
        print(error.strerror)
"""


def said(at: Machine) -> list[str]:
    paths = [at.runs / "other", at.run_dir / "journal.db"]
    command = [sys.executable, "-c", PROGRAM, *map(str, paths)]
    return subprocess.run(
        command, env={**os.environ, **at.environment}, capture_output=True, text=True, check=True
    ).stdout.splitlines()


@pytest.mark.parametrize("may_mount", [False, True])
def test_disks_are_full_and_clocks_jump_when_they_are_told_to(tmp_path: Path, may_mount: bool) -> None:
    """So that a chaos in which nothing happens is not taken for one that was survived."""
    with machine(tmp_path, "model", may_mount=may_mount) as at:
        now, again, passed = map(int, said(at)[0].split())
        at.set_clock(-DAY_S)
        jumped, jumped_too, passed_then = map(int, said(at)[0].split())
        assert abs(again - now) <= 1 and passed == passed_then == 0
        assert abs(now - DAY_S - jumped) < 600 and abs(jumped - jumped_too) <= 1
        at.set_clock(0)
        assert said(at)[1:] == ["20000", "20000"]
        at.fill(JOURNAL)
        assert said(at)[1:] == ["20000", "No space left on device"]
        at.empty(JOURNAL)
        at.fill(RUNS)
        assert said(at)[1] == "No space left on device"
        at.empty(RUNS)
        assert said(at)[1:] == ["20000", "20000"]


def test_a_reply_that_is_asked_for_again_is_seen(tmp_path: Path) -> None:
    who, request = Identity("checkpoint", "fingerprint"), Request("task", "1", 0, "/v1/completions", {"prompt": "x"})
    path, key = tmp_path / "journal.db", request.key(who)
    with Journal(path) as journal:
        journal.write_requests([(key, request)], who)
        assert answers(path) == {}
        journal.write_replies([(key, Reply("answered", "y"), 1)])
        before = answers(path)
        assert list(before) == [key] and answers(path) == before
        journal.write_replies([(key, Reply("answered", "y"), 1)])
        assert answers(path) != before
    shutil.rmtree(tmp_path)
