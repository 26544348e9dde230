"""kill -9 of client and server at random moments: it ends as if nothing had happened, and nothing answered is asked again.

Client and server are processes of their own; the server is one that was not started by the client. It logs every
request before it looks at it and every reply once the network has it. What the journal holds when a client dies is what was
answered: replies the network had but the client had not written down yet are asked again, and only those.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import socket
import sqlite3
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from fake_server import FakeServer, Scripted
from small_suite import SERVING, solve

from assay.recipes.profile import GivenServer, Hardware, ProfileRecipe
from assay.recipes.suite import SuiteRecipe
from assay.records.base import canonical_json
from assay.records.measurement import Measurement
from assay_evaluate.client.journal import unpacked
from assay_evaluate.run import asked_again
from assay_evaluate.run.candidate import Candidate
from assay_evaluate.run.evaluate import evaluate

pytestmark = pytest.mark.slow

KILLS = 10
CONCURRENCY = 3
SUITE = SuiteRecipe.model_validate(
    {
        "schema": 1,
        "name": "killed",
        "seed": "eval-killed",
        "tasks": [
            {"kind": "needle", "name": "short", "num_items": 4, "num_needles": 2, "max_tokens": 32, "lengths_tokens": [300]},
            {"kind": "needle", "name": "long", "num_items": 4, "num_needles": 3, "max_tokens": 32, "lengths_tokens": [600]},
        ],
        "divergence": {"num_documents": 4, "max_tokens": 40, "top_k": 20, "position_buckets": [0, 10]},
    }
)  # fmt: skip
VOLATILE = {"started", "seconds", "requests_in_flight_share", "mean_requests_in_flight"}
PROCESSES = multiprocessing.get_context("forkserver")  # imports once, then starts a process in milliseconds


class LoggingServer(FakeServer):
    def __init__(self, port: int, log: Path) -> None:
        super().__init__(self.slowly, port=port)
        self._log = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def slowly(self, body: dict[str, Any]) -> Scripted:
        time.sleep(random.Random(canonical_json(body)).uniform(0.005, 0.03))
        return Scripted("x") if isinstance(body.get("prompt"), list) else solve(body)

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]] | None:
        self._note("asked", path, body)
        return super().answer(path, body)

    def wrote(self, path: str, body: dict[str, Any]) -> None:
        self._note("replied", path, body)

    def _note(self, event: str, path: str, body: dict[str, Any]) -> None:
        if "logprobs" not in body and ("prompt_logprobs" in body or body.get("max_tokens", 1) > 1):  # the others ask who it is
            body = {name: value for name, value in body.items() if name != "model"}
            os.write(self._log, (json.dumps([event, canonical_json(body)]) + "\n").encode())


def run_server(port: int, log: Path) -> None:
    with LoggingServer(port, log):
        time.sleep(600)


def run_client(port: int, folder: Path, run_dir: Path) -> None:
    profile = ProfileRecipe(schema=1, name="running", hardware=Hardware(device="cpu"), concurrency=CONCURRENCY)
    endpoint = GivenServer(url=f"http://127.0.0.1:{port}/v1")
    candidate = Candidate("fp8", folder, is_reference=True, endpoint=endpoint)
    # Before it goes on a server that ran already is asked a few questions again (run/test_who_was_asked.py): here all that is
    # asked counts.
    with patch.object(asked_again, "MOST_QUESTIONS", 0):
        evaluate("tiny", [candidate], suite=SUITE, profile=profile, serving=SERVING, run_dir=run_dir)


@dataclass
class Scene:
    """One server, started as often as it is killed, and the clients that ask it in turn."""

    folder: Path
    run_dir: Path
    log: Path
    port: int = field(default_factory=lambda: free_port())
    server: BaseProcess | None = None

    def start_server(self) -> None:
        self.server = started(run_server, self.port, self.log)
        wait_until(lambda: is_open(self.port))

    def events(self, since: int = 0) -> list[tuple[str, str]]:
        """Lines that are written to their end; the server may be at work on the last one."""
        lines = self.log.read_text().split("\n")[:-1] if self.log.exists() else []
        return [tuple(json.loads(line)) for line in lines[since:]]

    def answered(self) -> Counter[str]:
        """Bodies the journal has replies to -> how many: both passes ask the same."""
        if not (self.run_dir / "journal.db").exists():
            return Counter()
        with sqlite3.connect(self.run_dir / "journal.db") as db:
            tables = {row[0] for row in db.execute("SELECT name FROM sqlite_master")}
            rows = db.execute("SELECT body FROM requests WHERE status = 'answered'").fetchall() if "requests" in tables else []
        return Counter(unpacked(row[0]) for row in rows)

    def finished(self) -> bytes:
        """Both measurements, but for what time it took."""
        found = [Measurement.load(self.run_dir / "measurements" / f"{label}.json") for label in ("fp8", "fp8-repeat")]
        return canonical_json([one.model_dump(mode="json", exclude=VOLATILE) for one in found]).encode()


def started(target: Callable[..., None], *arguments: Any) -> BaseProcess:
    process = PROCESSES.Process(target=target, args=arguments, daemon=True)
    process.start()
    return process


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def wait_until(condition: Callable[[], bool], limit_s: float = 60) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.002)


def replies(events: list[tuple[str, str]]) -> int:
    return sum(event == "replied" for event, _ in events)


def test_client_killed_ten_times_and_server_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [str(Path(__file__).resolve().parents[3]), *filter(None, sys.path)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))  # for what is imported once
    PROCESSES.set_forkserver_preload([__name__])
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"vocab_size": 128}))
    (folder / "model.safetensors").write_bytes(b"weights")
    calm = Scene(folder, tmp_path / "calm", tmp_path / "calm.log")
    calm.start_server()
    assert calm.server is not None
    run_client(calm.port, folder, calm.run_dir)
    calm.server.kill()
    passes = Counter(body for event, body in calm.events() if event == "asked")
    assert passes == calm.answered()
    assert sum(passes.values()) == 2 * 16 + 16 + 8 + 2 * 8  # needles, all of them asked twice, texts, their scores

    scene, rng, resent = Scene(folder, tmp_path / "run", tmp_path / "log"), random.Random(5), 0
    scene.start_server()
    assert scene.server is not None
    kinds = ["client"] * KILLS + ["server"] * 2
    rng.shuffle(kinds)
    for kind in [*kinds, None]:
        before, begun = scene.answered(), len(scene.events())
        client = started(run_client, scene.port, folder, scene.run_dir)
        if kind is not None:
            wanted = rng.randint(1, 5)
            wait_until(lambda begun=begun, wanted=wanted: replies(scene.events(begun)) >= wanted)  # type: ignore[misc]
            time.sleep(rng.uniform(0, 0.01))
            assert client.exitcode is None, "a client finished before it was to be killed: the suite is too small"
        if kind == "server":
            scene.server.kill()
            scene.server.join()
            scene.start_server()
            wait_until(lambda begun=begun, wanted=wanted: replies(scene.events(begun)) >= wanted + 2)  # type: ignore[misc]
        if kind is not None:
            client.kill()
        client.join()
        assert client.exitcode == (0 if kind is None else -9)
        time.sleep(0.1)  # replies on their way to the dead client
        again = Counter(body for event, body in scene.events(begun) if event == "replied")
        assert all(before[body] + number <= passes[body] for body, number in again.items()), "asked again though answered"
        resent += sum(again.values()) - sum((scene.answered() - before).values())
    scene.server.kill()
    assert resent <= (KILLS + 2) * CONCURRENCY  # what was in flight when somebody died
    assert scene.finished() == calm.finished()
