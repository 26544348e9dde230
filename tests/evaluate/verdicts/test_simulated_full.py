"""Simulated runs (benchmarks/verdicts/simulated_full.py) decide as the run's own code does, and the shipped `full` decides."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest
from synthetic_run import make_measurement, task_of

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks" / "verdicts"))

import simulated_full
from full_decides import gpu_hours, shipped
from simulated_full import Design, Outcome, decided, designs_of, draw_replies, seen_of, simulate

from assay.recipes.gate import GateRecipe
from assay.recipes.suite import SuiteRecipe
from assay.records.measurement import ItemResult, Measurement, Round, TaskResult
from assay_evaluate.run.rounds import Rounds
from assay_evaluate.tasks.looks import Look, in_drawn_order
from assay_evaluate.verdicts.gates import judge

COMMON = {"max_tokens": 9, "temperature": 1.0}
SUITE = SuiteRecipe.model_validate(
    {"schema": 1, "name": "small", "seed": "eval-small", "acceptance": False, "tasks": [
        COMMON | {"kind": "arithmetic", "name": "aime", "num_items": 60, "num_samples": {"min": 1, "max": 5}},
        COMMON | {"kind": "ruler", "name": "ruler", "tasks": ["niah_single_1", "qa_1"], "lengths_tokens": [4096, 8192],
                  "num_items": 20, "num_samples": {"min": 1, "max": 3}},
        COMMON | {"kind": "lm_eval", "name": "gsm8k", "tasks": ["gsm8k_cot_zeroshot"], "limit": {"min": 50, "max": 200}},
    ]}
)  # fmt: skip
GATES = GateRecipe.model_validate(
    {"schema": 1, "name": "small", "whole": {}, "gates": [
        {"kind": "score", "task": "aime", "max_drop": 0.12}, {"kind": "score", "task": "ruler", "max_drop": 0.1},
        {"kind": "score", "task": "gsm8k", "max_drop": 0.05},
        {"kind": "effective_length", "tasks": ["ruler"], "max_drop": 0.2},
    ]}
)  # fmt: skip
Replies = dict[str, "tuple[np.ndarray, np.ndarray]"]
"""Of one run: [items, replies] of either side."""


# ------------------------------------------------------------------------------------------------ against the run's own code
def asked(one: Design, right: np.ndarray, look: Look, num_samples: int) -> TaskResult:
    """The records of a task on one side, asked up to a look."""
    documents = in_drawn_order(SUITE.seed, one.task.tasks[0], range(len(right))) if one.name == "gsm8k" else None  # type: ignore[attr-defined]
    num_items = one.items[one.looks.index(look)]
    items = []
    for number in range(num_items):
        name = f"gsm8k_cot_zeroshot/{documents[number]}" if documents is not None else f"{one.name} {number}"
        item = ItemResult(
            item=name, language="en", correct=True, truncated=False, wrong_script=False, finish_reason="stop",
            prompt_tokens=None, output_tokens=None, answer=None,
            cluster=None if one.cluster is None or one.cluster[number] >= 0 else f"question {one.cluster[number]}",
            length_tokens=None if one.length is None else one.task.lengths_tokens[one.length[number]],  # type: ignore[attr-defined]
        )  # fmt: skip
        items += [
            dataclasses.replace(item, sample=sample, correct=bool(right[number, sample])) for sample in range(num_samples)
        ]
    made = task_of(one.name, one.task.kind, items)  # type: ignore[attr-defined]
    return made.model_copy(update={"rounds": (Round(started="", num_samples=num_samples, limit=look.limit, why=""),)})


def measured(designs: list[Design], label: str, replies: Replies, looks: dict[str, Look]) -> Measurement:
    side = int(label != "fp8")
    tasks = [
        asked(one, replies[one.name][side], looks[one.name], looks[one.name][side]) for one in designs
    ]  # fmt: skip
    update = {"tasks": tuple(tasks), "suite_recipe": SUITE.model_dump(mode="json", by_alias=True)}
    return make_measurement(label, SUITE).model_copy(update=update)


def really(designs: list[Design], replies: Replies) -> Outcome:
    """The same by `Rounds` and `judge`."""
    rounds, starts = Rounds(SUITE, GATES), 1
    at = [{one.name: one.looks[0] for one in designs} for _ in range(2)]

    def sides() -> tuple[Measurement, Measurement]:
        return measured(designs, "fp8", replies, at[0]), measured(designs, "w4a16", replies, at[1])

    while True:
        reference, candidate = sides()
        if now := rounds.due_now(candidate, reference):
            at[1] |= {name: look for name, (look, _) in now.items()}
        elif due := rounds.due_of_reference(reference, [candidate]):
            at[0] |= {name: look for name, (look, _) in due.items()}
            starts += 1
        else:
            break
    report = judge([reference, candidate], GATES, model="tiny-glm")
    said = {one.gate.removeprefix("score "): one.status for one in report.verdicts}
    places = [{one.name: one.looks.index(side[one.name]) for one in designs} for side in at]
    return Outcome(
        overall=report.overall["w4a16"], whole=said["whole"], effective_length=said["effective length ruler"],
        tasks={one.name: said[one.name] for one in designs},
        asked={one.name: (places[0][one.name], places[1][one.name]) for one in designs}, starts=(starts, starts),
    )  # fmt: skip


@pytest.mark.slow
def test_what_is_asked_and_decided_is_what_the_run_asks_and_decides() -> None:
    designs, rng = designs_of(SUITE, GATES), np.random.default_rng(3)
    drawn = {one.name: [] for one in designs}
    for loss in (0.0, 0.04, 0.08, 0.12, 0.2, 0.3):
        lost = {"aime": loss, "ruler": loss / 2, "gsm8k": loss / 4}
        for one in designs:
            drawn[one.name].append(draw_replies(rng, "even", one, lost[one.name], 1))
    seen = [seen_of(one, drawn[one.name]) for one in designs]
    found = decided(designs, GATES, seen, level_step=1e-6)
    runs: list[Replies] = [
        {one.name: (drawn[one.name][run][0][0], drawn[one.name][run][1][0]) for one in designs} for run in range(len(found))
    ]
    assert found == [really(designs, run) for run in runs]
    assert {one.overall for one in found} == {"PASS", "UNDERPOWERED", "FAIL"}
    assert max(one.starts[0] for one in found) > 2


# ------------------------------------------------------------------------------------------------ the shipped suite
def test_a_population_has_the_accuracy_and_discordance_that_are_assumed() -> None:
    suite, gates = shipped()
    rng = np.random.default_rng(1)
    for one in designs_of(suite, gates):
        for kind in simulated_full.KINDS:
            ours, theirs = simulated_full.draw_chances(rng, 200_000, kind, one, one.margin)
            assert ours.mean() == pytest.approx(one.accuracy, abs=0.004)
            assert (2 * ours * (1 - ours)).mean() == pytest.approx(one.discordance, abs=0.003)
            assert (ours - theirs).mean() == pytest.approx(one.margin, abs=0.005)


@pytest.mark.slow
def test_full_decides() -> None:
    """A small version of full_decides.py, with room for three standard errors."""
    suite, gates = shipped()
    designs = designs_of(suite, gates)
    lossless = simulate(designs, gates, {}, "even", 150, 1)
    assert sum(one.overall == "PASS" for one in lossless) / 150 >= 0.9
    assert sum(one.overall == "FAIL" for one in lossless) / 150 <= 0.01
    assert gpu_hours(suite, designs, lossless).share <= 1
    half = simulate(designs, gates, {one.name: one.margin / 2 for one in designs}, "even", 150, 1)
    assert sum(one.whole == "PASS" for one in half) / 150 <= 0.025 + 3 * 0.0127
    gpqa = simulate(designs, gates, {"gpqa-diamond": 0.10}, "even", 80, 1)
    assert sum(one.overall == "FAIL" for one in gpqa) / 80 >= 0.45
    aime = simulate(designs, gates, {"aime": 0.15}, "even", 80, 1)
    assert sum(one.overall == "PASS" for one in aime) / 80 <= 0.05
