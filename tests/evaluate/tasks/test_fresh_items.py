"""Generated tasks with a range of items: what a look adds, and that what was asked before stays the same text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fake_server import FakeServer, Scripted
from pydantic import TypeAdapter
from tool_server import ToolServer

from assay.recipes.gate import Stopping
from assay.recipes.suite import SuiteRecipe, TaskBase
from assay.records.measurement import TaskResult
from assay_evaluate.asking.dialect import Dialect
from assay_evaluate.asking.session import Session
from assay_evaluate.client.client import Client
from assay_evaluate.client.journal import Identity, Journal
from assay_evaluate.run.suite import _run_task
from assay_evaluate.tasks.looks import items_at, planned_looks, task_at_look

SEED, REFERENCE = "eval-fresh", Identity("reference", "f")
KINDS: dict[str, dict[str, Any]] = {
    "arithmetic": {},
    "needle": {"languages": ["en", "zh"], "lengths_tokens": [400, 600], "num_needles": 3},
    "ruler": {"tasks": ["niah_single_1", "qa_1", "needle_grid"], "depths": [0.0, 1.0], "lengths_tokens": [1500]},
    "tools": {"num_tools": [1, 8], "prompt_tokens": [0, 8000]},
}


def suite_of(kind: str, num_items: Any) -> SuiteRecipe:
    task = {"kind": kind, "name": "t", "max_tokens": 64, "num_items": num_items, **KINDS[kind]}
    return TypeAdapter(SuiteRecipe).validate_python({"schema": 1, "name": "s", "seed": SEED, "tasks": [task]})


@contextmanager
def asked_by(folder: Path) -> Iterator[tuple[Session, FakeServer]]:
    """A session with a server that knows tools."""
    folder.mkdir(exist_ok=True)
    with (
        ToolServer(lambda body: Scripted("#### 1"), max_model_len=16_000) as server,
        Journal(folder / "journal.db") as journal,
        Client(server, journal, REFERENCE, max_attempts=1) as client,
    ):
        yield Session(client, Dialect(True, True, {}), SEED, 0, has_reasoning_parser=False), server


def ask(session: Session, suite: SuiteRecipe, task: TaskBase) -> TaskResult:
    return _run_task(session, suite, task, REFERENCE, None)


def bodies(server: FakeServer) -> list[str]:
    """What was asked, without what a task asks to learn about the server."""
    return sorted(str(body) for path, body in server.requests if body.get("max_tokens") == 64)


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_look_asks_new_items_and_the_others_stay(tmp_path: Path, kind: str) -> None:
    """4, then 9 of each part, one journal; and the last look asked at once, by a journal that knows nothing."""
    suite = suite_of(kind, {"min": 4, "max": 9})
    (task,) = suite.tasks
    looks = planned_looks(task, Stopping())
    assert [look.limit for look in looks] == [4, 9]
    result, new = [], []
    with asked_by(tmp_path / "rounds") as (session, server):
        for look in looks:
            before = len(bodies(server))
            result.append(ask(session, suite, task_at_look(task, 1, look.limit)))
            new.append(len(bodies(server)) - before)
        in_rounds = bodies(server)
    num_parts = result[0].num_items // 4
    assert [one.num_items for one in result] == [4 * num_parts, 9 * num_parts]
    assert new == [4 * num_parts, 5 * num_parts]  # what was answered is not asked again
    assert items_at(task, result[1].items, 1, 4, SEED) == tuple(
        one for one in result[1].items if one.item in {other.item for other in result[0].items}
    )
    with asked_by(tmp_path / "at once") as (session, server):
        at_once = ask(session, suite, task)
        assert (bodies(server), at_once.items) == (in_rounds, result[1].items)


@pytest.mark.parametrize("kind", list(KINDS))
def test_the_first_look_is_the_task_with_as_many_items(tmp_path: Path, kind: str) -> None:
    """So that figures stay comparable when a suite's number becomes a range."""
    asked = []
    for name, num_items in (("range", {"min": 4, "max": 9}), ("number", 4)):
        suite = suite_of(kind, num_items)
        with asked_by(tmp_path / name) as (session, server):
            ask(session, suite, task_at_look(suite.tasks[0], 1, 4))
            asked.append(bodies(server))
    assert asked[0] == asked[1]


def test_depths_of_new_items_cover_the_text_again(tmp_path: Path) -> None:
    suite = suite_of("needle", {"min": 3, "max": 7})
    with asked_by(tmp_path) as (session, _):
        result = ask(session, suite, suite.tasks[0])
    depths = [item.depth for item in result.items if item.language == "zh" and item.length_tokens == 400]
    assert depths == pytest.approx([0, 0.5, 1, 0, 1 / 3, 2 / 3, 1])
