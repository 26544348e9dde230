"""mini-swe-agent against a scripted model, in copies of the small repositories instead of containers; grading from logs.

What no container runtime is needed for: whose fault an end is, a server that dies in the middle, processes that are killed,
what a rerun asks again, and what the harness makes of the logs.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from scripted_model import CAREFUL, HASTY, Behaviour, ScriptedModel, load_scripts
from swe_suite import CANDIDATE, FAST, REFERENCE, local_task, rows_of, write_log

from assay.errors import MeasureError, ServeError
from assay.records.measurement import TaskResult
from assay_evaluate.client.client import NotMeasured
from assay_evaluate.statistics.swe_difference import difference, pair_instances
from assay_evaluate.tasks.swebench import grading
from assay_evaluate.tasks.swebench.agents import Finished, run_agents
from assay_evaluate.tasks.swebench.server_gate import GatedRetry, GaveUp, RequestFailed, ServerGate
from assay_evaluate.tasks.swebench.settings import settings_for
from assay_evaluate.tasks.swebench.task import prepare, run_swe

pytestmark = pytest.mark.slow

MANY: dict[str, Behaviour] = {**CAREFUL, "tiny__roman-2": "prose", "tiny__slug-8": "bad_calls", "tiny__csvline-4": "overflow"}
"""Every way to end that is the model's own, over eight instances."""
ENDS = {
    "tiny__wordwrap-3": "Submitted", "tiny__wordwrap-5": "Submitted", "tiny__ranges-7": "Submitted",
    "tiny__ranges-9": "Submitted", "tiny__roman-2": "RepeatedFormatError", "tiny__csvline-4": "ContextWindowExceededError",
    "tiny__lru-6": "LimitsExceeded", "tiny__slug-8": "Submitted",
}  # fmt: skip


@pytest.fixture(scope="module")
def logs(dataset: Path) -> Iterator[None]:
    """Where the harness would start a container, its eval script is run here; it grades what that leaves behind."""
    original = grading._run_grader

    def with_logs(spec: dict[str, Any], log: Path, rows: dict[str, Any], label: str) -> dict[str, grading.Grade]:
        for prediction in spec["predictions"]:
            instance = prediction["instance_id"]
            if not list(Path(spec["log_folder"]).glob(f"*/*/{instance}/test_output.txt")):
                write_log(rows[instance], prediction["model_patch"], Path(spec["log_folder"]), spec["model_name"])
        return original(spec, log, rows, label)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grading, "_run_grader", with_logs)
        patch.setenv("DOCKER_HOST", "unix:///nonexistent/docker.sock")
        yield


@dataclass(frozen=True)
class Undisturbed:
    """Eight trajectories nobody disturbed: what they came to, where they lie, and the requests they took."""

    result: TaskResult
    run_dir: Path
    folder: Path
    requests: list[dict[str, Any]]
    lines: list[str]

    @property
    def predictions(self) -> dict[str, dict[str, Any]]:
        result: dict[str, dict[str, Any]] = json.loads((self.folder / "repeat-0" / "preds.json").read_text())
        return {name: {**one, "model_name_or_path": "m"} for name, one in result.items()}


@pytest.fixture(scope="module")
def undisturbed(dataset: Path, logs: None, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    run_dir, lines = tmp_path_factory.mktemp("undisturbed"), list[str]()
    with ScriptedModel(load_scripts(MANY)) as server:
        result = measure_side(dataset, REFERENCE, server, run_dir, lines)
    (folder,) = run_dir.glob("swe/*/aaaa*")
    return Undisturbed(result, run_dir, folder, server.requests, lines)


def measure_side(dataset: Path, who: Any, server: ScriptedModel, run_dir: Path, lines: list[str], **more: Any) -> TaskResult:
    prepared = prepare(local_task(dataset, **more))
    return run_swe(prepared, server, who, run_dir, on_progress=lines.append, pacing=FAST)


def ask(dataset: Path, server: Any, folder: Path, lines: list[str] | None = None, **more: Any) -> list[Finished]:
    task = local_task(dataset, **more)
    return run_agents(
        task, rows_of(dataset), [folder / "repeat-0"], server, settings=settings_for(task), runtime=None, run="r",
        model_name="m", num_agents=task.num_agents, on_progress=(lines if lines is not None else []).append, pacing=FAST,
    )  # fmt: skip


def commands(folder: Path) -> dict[str, list[str]]:
    """Instance -> every command it ran, and what came of it."""
    result = {}
    for path in sorted((folder / "repeat-0").glob("*/*.traj.json")):
        if ".failed-" in path.name:
            continue
        messages = json.loads(path.read_text())["messages"]
        result[path.parent.name] = [
            str(m.get("extra", {}).get("actions", "")) + str(m.get("extra", {}).get("raw_output", ""))
            for m in messages
            if m["role"] in {"assistant", "tool"}
        ]
    return result


# ------------------------------------------------------------------------------------------------ what is asked
def test_every_way_to_end_is_told_apart(undisturbed: Undisturbed) -> None:
    figures = undisturbed.result.swe
    assert figures is not None
    assert {trajectory.instance: trajectory.exit_status for trajectory in figures.trajectories} == ENDS
    assert {trajectory.fault for trajectory in figures.trajectories} == {"model"}
    assert {k for k, v in undisturbed.predictions.items() if v["model_patch"]} == {
        k for k, v in ENDS.items() if v == "Submitted"
    }
    assert sorted(undisturbed.predictions) == sorted(ENDS)


def test_requests_are_pinned_and_thinking_is_sent_back(undisturbed: Undisturbed) -> None:
    keys = {"model": "scripted", "temperature": 0.0, "top_p": 1.0, "max_tokens": 512, "top_k": -1, "min_p": 0.0}
    keys |= {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "parallel_tool_calls": True}
    assert all({key: body[key] for key in keys} == keys for body in undisturbed.requests)
    assert {key for body in undisturbed.requests for key in body} == {*keys, "messages", "tools"}
    replies = [message for body in undisturbed.requests for message in body["messages"] if message["role"] == "assistant"]
    assert replies and all(message["reasoning"] == message["reasoning_content"] != "" for message in replies)
    assert {key for message in replies for key in message} == {
        "role",
        "content",
        "tool_calls",
        "reasoning",
        "reasoning_content",
    }


# ------------------------------------------------------------------------------------------------ a server that dies
def test_a_server_killed_in_the_middle_changes_nothing(dataset: Path, tmp_path: Path, undisturbed: Undisturbed) -> None:
    server, lines = ScriptedModel(load_scripts(MANY), delay_s=0.02), list[str]()

    def die_twice(number: int) -> None:
        if number in {9, 22}:
            server.die()
            threading.Timer(1.0, server.live).start()

    server.before_reply = die_twice
    with server:
        (result,) = ask(dataset, server, tmp_path, lines)
    assert result.predictions == undisturbed.predictions
    assert commands(tmp_path) == commands(undisturbed.folder)
    assert result.failures == {}
    assert not list(tmp_path.glob("**/*.failed-*"))
    assert sum("agents wait for it" in line for line in lines) == 2 == sum("the server is back" in line for line in lines)


def test_whatever_happens_reruns_end_where_an_undisturbed_run_does(
    dataset: Path, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    """The server stays away; the agents' process is killed; the server breaks on one instance; then all is well."""
    server = ScriptedModel(load_scripts(MANY))
    server.before_reply = lambda number: server.die() if number == 14 else None
    with server, pytest.raises(MeasureError, match=r"did not come back within 1 s .* finished trajectories are kept"):
        ask(dataset, server, tmp_path, server_patience_s=1, num_agents=2)
    first = finished_in(tmp_path)
    assert 0 < len(first) < 8

    server, lines = ScriptedModel(load_scripts(MANY)), list[str]()
    server.before_reply = lambda number: kill_agents() if number == 12 else None
    with server, pytest.raises(MeasureError, match=r"the agents' process ended with status -9"):
        ask(dataset, server, tmp_path, lines, num_agents=2)
    assert lines[0] == f"swe: 8 trajectories, {len(first)} of them done before, 2 at once"
    second = finished_in(tmp_path)
    assert first < second < ENDS.keys()
    assert not first & asked_about(dataset, server)

    left = sorted(ENDS.keys() - second)[0]
    with ScriptedModel(load_scripts({**MANY, left: "broken"})) as server:
        (result,) = ask(dataset, server, tmp_path, num_attempts=2)
    assert list(result.failures) == [left] and result.failures[left].startswith("RequestFailed: HTTP 500: ")
    assert sorted(result.predictions) == sorted(ENDS.keys() - {left})
    assert json.loads((tmp_path / "repeat-0" / "preds.json").read_text()) == result.predictions
    assert len(list(tmp_path.glob(f"repeat-0/{left}/*.failed-*"))) == 2

    with ScriptedModel(load_scripts(MANY)) as server:
        (result,) = ask(dataset, server, tmp_path)
    assert asked_about(dataset, server) == {left}
    assert result.predictions == undisturbed.predictions
    assert commands(tmp_path) == commands(undisturbed.folder)
    with ScriptedModel([]) as server:
        assert ask(dataset, server, tmp_path)[0].predictions == result.predictions
    assert server.requests == []


def finished_in(folder: Path) -> set[str]:
    return {path.parent.name for path in folder.glob("repeat-0/*/*.traj.json") if ".failed-" not in path.name}


def agents_processes() -> list[psutil.Process]:
    """Only ours: this process may have others' children, as multiprocessing's resource tracker of an earlier module."""
    result = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if any("swebench.agent_worker" in word for word in child.cmdline()):
                result.append(child)
    return result


def kill_agents() -> None:
    for process in agents_processes():
        process.kill()


def asked_about(dataset: Path, server: ScriptedModel) -> set[str]:
    texts = {str(body["messages"][1]["content"]) for body in server.requests}
    return {row["instance_id"] for row in rows_of(dataset) if any(row["problem_statement"] in text for text in texts)}


def test_a_server_that_is_gone_for_good_stops_the_run(dataset: Path, tmp_path: Path) -> None:
    class Dead(ScriptedModel):
        def check_alive(self) -> None:
            raise ServeError("vLLM stopped while serving (exit status -9)")

    with (
        Dead(load_scripts(dict.fromkeys(CAREFUL, "loop")), delay_s=2.0) as server,
        pytest.raises(ServeError, match="status -9"),
    ):
        ask(dataset, server, tmp_path)
    assert not agents_processes()


def test_the_key_reaches_the_server_and_no_file(dataset: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    headers = {"Authorization": "Bearer hunter2"}
    with ScriptedModel(load_scripts(CAREFUL), headers=headers) as server:
        [done] = ask(dataset, server, tmp_path, lines)
        assert ServerGate(server.base_url, 1, 0.02, headers=headers).is_up()
        assert not ServerGate(server.base_url, 1, 0.02).is_up()
    assert len(done.predictions) == 8 and not done.failures
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and b"hunter2" in path.read_bytes()]
    assert "hunter2" not in "".join(lines)


def test_a_request_is_no_attempt_while_the_server_is_away() -> None:
    reported: list[str] = []
    server = ScriptedModel([])
    server.live()
    gate = ServerGate(server.base_url, 30, 0.02, lambda event, **more: reported.append(event))
    tried = 0
    for attempt in GatedRetry(gate, 2, 0.01):
        with attempt:
            tried += 1
            if tried <= 3:  # more often than attempts are allowed
                server.die()
                threading.Timer(0.2, server.live).start()
                raise RequestFailed("Connection refused")
    assert (tried, reported) == (4, ["paused", "resumed"] * 3)
    with pytest.raises(RequestFailed):  # while it lives, two are
        for attempt in GatedRetry(gate, 2, 0.01):
            with attempt:
                tried += 1
                raise RequestFailed("HTTP 500")
    assert tried == 6
    with pytest.raises(ValueError, match="ours"):  # what is not the server's fault is not repeated
        for attempt in GatedRetry(gate, 2, 0.01):
            with attempt:
                raise ValueError("ours")
    server.die()
    gate.patience_s = 0
    with pytest.raises(GaveUp, match=r"did not come back within 0 s"):
        for attempt in GatedRetry(gate, 2, 0.01):
            with attempt:
                raise RequestFailed("Connection refused")


def test_another_server_in_the_old_ones_place_is_noticed() -> None:
    gate = ServerGate("http://127.0.0.1:1", 0, 0.01)
    for fingerprint in ("vllm-1", None, "vllm-1"):
        gate.check_same(fingerprint)
    with pytest.raises(RequestFailed, match=r"the reply is of another server \(vllm-2, before vllm-1\)"):
        gate.check_same("vllm-2")  # a gateway may have asked the wrong one
    with pytest.raises(GaveUp, match=r"came back as another server \(vllm-2, before vllm-1\); .* start the old one again"):
        gate.check_same("vllm-2")


# ------------------------------------------------------------------------------------------------ the whole task, from logs
def test_two_sides_graded_by_the_harness_from_logs(dataset: Path, undisturbed: Undisturbed) -> None:
    reference = undisturbed.result
    with ScriptedModel(load_scripts(HASTY)) as server:
        candidate = measure_side(dataset, CANDIDATE, server, undisturbed.run_dir, undisturbed.lines)
    right = {"tiny__wordwrap-3", "tiny__wordwrap-5", "tiny__ranges-7", "tiny__slug-8"}
    assert {item.item for item in reference.items if item.correct} == right
    right = {"tiny__wordwrap-3", "tiny__ranges-7", "tiny__roman-2", "tiny__slug-8"}
    assert {item.item for item in candidate.items if item.correct} == right
    figures = candidate.swe
    assert figures is not None
    assert figures.exit_statuses == {
        "ContextWindowExceededError": 1, "LimitsExceeded": 1, "RepeatedFormatError": 1, "Submitted": 5,
    }  # fmt: skip
    assert figures.outcomes == {"empty_patch": 3, "resolved": 4, "unresolved": 1}
    assert (figures.num_instances, figures.num_resolved, figures.num_infrastructure, figures.gold_failed) == (8, 4, 0, ())
    assert figures.num_format_errors == 5  # three replies without a call, two misshapen calls
    assert [trajectory.instance for trajectory in figures.trajectories if trajectory.looped] == [
        "tiny__lru-6",
        "tiny__ranges-9",
    ]
    calls = {
        trajectory.instance: (trajectory.num_valid_tool_calls, trajectory.num_tool_calls) for trajectory in figures.trajectories
    }
    assert calls == {
        "tiny__csvline-4": (2, 2), "tiny__lru-6": (8, 8), "tiny__ranges-7": (5, 5), "tiny__ranges-9": (2, 2),
        "tiny__roman-2": (5, 5), "tiny__slug-8": (5, 7), "tiny__wordwrap-3": (5, 5), "tiny__wordwrap-5": (5, 5),
    }  # fmt: skip
    assert undisturbed.lines.count("swe: 8 of 8 gold patches pass (8 graded from logs)") == 2
    found = difference(pair_instances(reference, candidate))
    assert (found.reference_only, found.candidate_only, found.num_instances, found.num_repositories) == (1, 1, 8, 6)
    assert found.drop.low < 0 < found.drop.high  # two of eight came out differently: that decides nothing
    assert reference.model_validate_json(reference.model_dump_json()) == reference


def test_repeats_and_instances_whose_gold_patch_fails_here(dataset: Path, tmp_path: Path, logs: None) -> None:
    rows = rows_of(dataset)
    broken = next(row for row in rows if row["instance_id"] == "tiny__roman-2")
    broken["FAIL_TO_PASS"] = [*broken["FAIL_TO_PASS"], "tests/test_roman.py::test_that_needs_a_network"]
    changed = tmp_path / "test.jsonl"
    changed.write_text("".join(json.dumps(row) + "\n" for row in rows))
    more = {"local_repositories": str(dataset.parent / "repositories")}
    with ScriptedModel(load_scripts(CAREFUL)) as server:
        result = measure_side(changed, REFERENCE, server, tmp_path, [], num_repeats=2, filter="tiny__(roman|slug|lru)", **more)
        assert result.swe is not None and result.swe.gold_failed == ("tiny__roman-2",)
        assert [(item.item, item.sample, item.correct, item.cluster) for item in result.items] == [
            ("tiny__lru-6", 0, False, "tiny/lru"), ("tiny__slug-8", 0, True, "tiny/slug"),
            ("tiny__lru-6", 1, False, "tiny/lru"), ("tiny__slug-8", 1, True, "tiny/slug"),
        ]  # fmt: skip
        assert (result.num_samples, result.pass_at_k and result.pass_at_k.value) == (2, 0.5)
        with pytest.raises(NotMeasured, match=r"no gold patch passes on this host \(tiny__roman-2: unresolved"):
            measure_side(changed, REFERENCE, server, tmp_path, [], filter="tiny__roman", **more)


def test_a_log_of_another_patch_or_cut_short_is_not_graded(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a Docker API the harness cannot make another one: one line, what to do, and nothing is believed."""
    monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent/docker.sock")
    rows = [row for row in rows_of(dataset) if row["instance_id"] in {"tiny__slug-8", "tiny__lru-6"}]
    lru, slug = rows
    task = local_task(dataset)
    log = write_log(lru, lru["patch"], tmp_path, "m")
    write_log(slug, slug["patch"], tmp_path, "m")

    def graded(**patches: str) -> dict[str, grading.Grade]:
        named = {f"tiny__{name.replace('_', '-')}": patch for name, patch in patches.items()}
        return grading.grade(task, rows, named, tmp_path, "m", runtime=None, on_progress=lambda line: None)

    passed = grading.Grade("resolved", from_log=True)
    assert graded(lru_6=lru["patch"], slug_8=slug["patch"]) == {"tiny__lru-6": passed, "tiny__slug-8": passed}
    assert graded(lru_6="") == {"tiny__lru-6": grading.Grade("empty_patch")}
    no_api = r"swe: the swebench harness finds no Docker API .*; start dockerd, or for Podman .* trajectories are kept"
    log.write_text(log.read_text().split("End Test Output")[0])
    for patches in ({"lru_6": lru["patch"]}, {"slug_8": slug["patch"] + "\n"}):
        with pytest.raises(MeasureError, match=no_api):
            graded(**patches)


def test_every_bug_fails_before_its_fix(dataset: Path, tmp_path: Path) -> None:
    """The suite itself, by its own eval scripts: FAIL_TO_PASS fails, PASS_TO_PASS passes at the base commit."""
    for row in rows_of(dataset)[::2]:
        text = write_log(row, "", tmp_path, "none").read_text()
        assert all(f"FAILED {name}" in text for name in row["FAIL_TO_PASS"]), row["instance_id"]
        assert all(f"PASSED {name}" in text for name in row["PASS_TO_PASS"]), row["instance_id"]


# ------------------------------------------------------------------------------------------------ no container runtime
def test_no_container_runtime_is_one_line(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent/docker.sock")
    task = local_task(dataset, environment="docker")
    with pytest.raises(MeasureError, match=r"no docker on this machine|docker is installed, but does not answer .*DOCKER_HOST"):
        prepare(task)
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(MeasureError, match=r"no docker on this machine, .*: install it .*, or leave the task out"):
        prepare(task)
    with pytest.raises(MeasureError, match="no singularity or apptainer"):
        prepare(local_task(dataset, environment="singularity"))
