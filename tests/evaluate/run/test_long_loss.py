"""A candidate that loses only at long range, from served questions to the verdict: the length where it begins is named."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from fake_server import Scripted
from scripted_world import World, make_folders, pair_of

from assay.recipes.gate import GateRecipe
from assay.recipes.suite import SuiteRecipe
from assay_evaluate.verdicts.gates import judge

SUITE = SuiteRecipe.model_validate(
    {
        "schema": 1, "name": "long", "seed": "eval-long", "acceptance": False,
        "tasks": [
            {"kind": "ruler", "name": "ruler", "tasks": ["niah_single_1", "needle_grid"], "lengths_tokens": [1024, 2048, 3072],
             "num_items": 15, "max_tokens": 64},
        ],
    }
)  # fmt: skip
GATES = GateRecipe.model_validate(
    {"schema": 1, "name": "g", "gates": [{"kind": "effective_length", "max_drop": 0.10}], "default_max_drop": 0.10}
)
SHORT = 2500
"""Tokens (characters, to the fake server) up to which the candidate finds every needle."""


def find(body: dict[str, Any]) -> Scripted:
    return Scripted(" ".join(re.findall(r"\b\d{7}\b", body["messages"][-1]["content"])))


def find_in_short_texts(body: dict[str, Any]) -> Scripted:
    return find(body) if len(body["messages"][-1]["content"]) < SHORT else Scripted("I do not know.")


@pytest.mark.slow
def test_a_loss_at_long_range_only(tmp_path: Path) -> None:
    world, folders = World(), make_folders(tmp_path)
    world.reply = {"reference": find, "candidate": find_in_short_texts}
    measurements = world.measure(tmp_path / "run", pair_of(folders), SUITE, on_progress=lambda line: None)
    places = {(item.subtask, item.length_tokens, item.depth) for item in measurements[0].tasks[0].items}
    assert {place for place in places if place[0] == "needle_grid"} == {
        ("needle_grid", length, depth) for length in (1024, 2048, 3072) for depth in (0, 0.25, 0.5, 0.75, 1)
    }
    report = judge(measurements, GATES, model="tiny")
    verdicts = {(verdict.candidate, verdict.gate): verdict for verdict in report.verdicts}
    lost = verdicts["w4a16", "effective length"]
    assert (lost.status, lost.detail) == (
        "FAIL",
        "Within 10 points of fp8 up to 2K tokens; at 3K it loses 100.0 points (95 % interval: 92.0 to 100.0 lost).",
    )
    cells = [cell for one in report.long_context if one.candidate == "w4a16" for cell in one.by_depth]
    assert {(cell.length_tokens, cell.drop.value) for cell in cells} == {(1024, 0.0), (2048, 0.0), (3072, 1.0)}
    assert report.overall["w4a16"] == "FAIL"
    repeats = [verdict.status for (name, gate), verdict in verdicts.items() if name == "fp8-repeat" and gate == lost.gate]
    assert set(repeats) <= {"PASS"}
