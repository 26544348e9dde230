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
def asked(entry: Design, right: np.ndarray, look: Look, num_samples: int) -> TaskResult:
    """The records of a task on one side, asked up to a look."""
    documents = in_drawn_order(SUITE.seed, entry.task.tasks[0], range(len(right))) if entry.name == "gsm8k" else None  # type: ignore[attr-defined]
    num_items = entry.items[entry.looks.index(look)]
    items = []
    for number in range(num_items):
        name = f"gsm8k_cot_zeroshot/{documents[number]}" if documents is not None else f"{entry.name} {number}"
        item = ItemResult(
            item=name, language="en", correct=True, truncated=False, wrong_script=False, finish_reason="stop",
            prompt_tokens=None, output_tokens=None, answer=None,
            cluster=None if entry.cluster is None or entry.cluster[number] >= 0 else f"question {entry.cluster[number]}",
            length_tokens=None if entry.length is None else entry.task.lengths_tokens[entry.length[number]],  # type: ignore[attr-defined]
        )  # fmt: skip
        items += [
            dataclasses.replace(item, sample=sample, correct=bool(right[number, sample])) for sample in range(num_samples)
        ]
    made = task_of(entry.name, entry.task.kind, items)  # type: ignore[attr-defined]
    return made.model_copy(update={"rounds": (Round(started="", num_samples=num_samples, limit=look.limit, why=""),)})


def measured(designs: list[Design], label: str, replies: Replies, looks: dict[str, Look]) -> Measurement:
    side = int(label != "fp8")
    tasks = [
        asked(design, replies[design.name][side], looks[design.name], looks[design.name][side]) for design in designs
    ]  # fmt: skip
    update = {"tasks": tuple(tasks), "suite_recipe": SUITE.model_dump(mode="json", by_alias=True)}
    return make_measurement(label, SUITE).model_copy(update=update)


def really(designs: list[Design], replies: Replies) -> Outcome:
    """The same by `Rounds` and `judge`."""
    rounds, starts = Rounds(SUITE, GATES), 1
    at = [{design.name: design.looks[0] for design in designs} for _ in range(2)]

    def sides() -> tuple[Measurement, Measurement]:
        return measured(designs, "fp8", replies, at[0]), measured(designs, "w4a16", replies, at[1])

    while True:
        reference, candidate = sides()
        if now := rounds.due_now(candidate, reference):
            at[1] |= {name: look for name, (look, _) in now.items()}
        elif requested := rounds.due_of_reference(reference, [candidate]):
            at[0] |= {name: look for name, (look, _) in requested.items()}
            starts += 1
        else:
            break
    report = judge([reference, candidate], GATES, model="tiny-glm")
    text = {verdict.gate.removeprefix("score "): verdict.status for verdict in report.verdicts}
    places = [{design.name: design.looks.index(side[design.name]) for design in designs} for side in at]
    return Outcome(
        overall=report.overall["w4a16"], whole=text["whole"], effective_length=text["effective length ruler"],
        tasks={design.name: text[design.name] for design in designs},
        asked={design.name: (places[0][design.name], places[1][design.name]) for design in designs}, starts=(starts, starts),
    )  # fmt: skip


@pytest.mark.slow
def test_what_is_asked_and_decided_is_what_the_run_asks_and_decides() -> None:
    designs, rng = designs_of(SUITE, GATES), np.random.default_rng(3)
    drawn = {design.name: [] for design in designs}
    for loss in (0.0, 0.04, 0.08, 0.12, 0.2, 0.3):
        lost = {"aime": loss, "ruler": loss / 2, "gsm8k": loss / 4}
        for design in designs:
            drawn[design.name].append(draw_replies(rng, "even", design, lost[design.name], 1))
    observed = [seen_of(design, drawn[design.name]) for design in designs]
    statuses = decided(designs, GATES, observed, level_step=1e-6)
    runs: list[Replies] = [
        {design.name: (drawn[design.name][run][0][0], drawn[design.name][run][1][0]) for design in designs}
        for run in range(len(statuses))
    ]
    assert statuses == [really(designs, run) for run in runs]
    assert {entry.overall for entry in statuses} == {"PASS", "UNDERPOWERED", "FAIL"}
    assert max(entry.starts[0] for entry in statuses) > 2


# ------------------------------------------------------------------------------------------------ the shipped suite
def test_a_population_has_the_accuracy_and_discordance_that_are_assumed() -> None:
    suite, gates = shipped()
    rng = np.random.default_rng(1)
    for entry in designs_of(suite, gates):
        for kind in simulated_full.KINDS:
            reference, candidate = simulated_full.draw_chances(rng, 200_000, kind, entry, entry.margin)
            assert reference.mean() == pytest.approx(entry.accuracy, abs=0.004)
            assert (2 * reference * (1 - reference)).mean() == pytest.approx(entry.discordance, abs=0.003)
            assert (reference - candidate).mean() == pytest.approx(entry.margin, abs=0.005)


@pytest.mark.slow
def test_full_decides() -> None:
    """A small version of full_decides.py, with room for three standard errors."""
    suite, gates = shipped()
    designs = designs_of(suite, gates)
    lossless = simulate(designs, gates, {}, "even", 150, 1)
    assert sum(entry.overall == "PASS" for entry in lossless) / 150 >= 0.9
    assert sum(entry.overall == "FAIL" for entry in lossless) / 150 <= 0.01
    assert gpu_hours(suite, designs, lossless).share <= 1
    half = simulate(designs, gates, {design.name: design.margin / 2 for design in designs}, "even", 150, 1)
    assert sum(entry.whole == "PASS" for entry in half) / 150 <= 0.025 + 3 * 0.0127
    gpqa = simulate(designs, gates, {"gpqa-diamond": 0.10}, "even", 80, 1)
    assert sum(entry.overall == "FAIL" for entry in gpqa) / 80 >= 0.45
    aime = simulate(designs, gates, {"aime": 0.15}, "even", 80, 1)
    assert sum(entry.overall == "PASS" for entry in aime) / 80 <= 0.05
