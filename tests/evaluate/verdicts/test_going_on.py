"""Which tasks are asked again: by the verdicts of the tasks, and by the claim about the whole."""

from __future__ import annotations

from typing import Any

import pytest
from blank_records import item_result
from synthetic_run import make_measurement, task_of

from assay.recipes.gate import GateRecipe, ScoreGate
from assay.recipes.load import load_recipe
from assay.recipes.suite import SuiteRecipe
from assay.records.base import Interval
from assay.records.measurement import ItemResult, Measurement, Round
from assay.records.verdict import Status, Verdict
from assay_evaluate.run.rounds import Rounds
from assay_evaluate.verdicts.gates import judge
from assay_evaluate.verdicts.whole import NOT_ASKED, tasks_to_ask_further

MARGIN = 0.05
TASKS = ("a", "b", "c", "d")


def gates(**changes: Any) -> GateRecipe:
    scores = [{"kind": "score", "task": task, "max_drop": MARGIN} for task in TASKS]
    recipe = {"schema": 1, "name": "t", "gates": scores, "whole": {"max_mean_use": 0.5, "max_task": 2.0}}
    return GateRecipe.model_validate(recipe | changes)


def verdict(task: str, status: Status, low: float, high: float) -> Verdict:
    """Interval in points."""
    drop = Interval(value=(low + high) / 200, low=low / 100, high=high / 100, n=100)
    return Verdict(gate=f"score {task}", candidate="x", status=status, observed=drop, limit=MARGIN, detail="")


def further(recipe: GateRecipe, *tasks: tuple[Status, float, float]) -> set[str]:
    named = {name: verdict(name, *task) for name, task in zip(TASKS, tasks, strict=False)}
    return tasks_to_ask_further(recipe, named, "x")


PASSED: tuple[Status, float, float] = ("PASS", -3, 3)
OPEN: tuple[Status, float, float] = ("UNDERPOWERED", -5, 6)
WORSE: tuple[Status, float, float] = ("UNDERPOWERED", 3.5, 7.5)
"""5.5 points are lost, of 5 allowed."""
FAILED: tuple[Status, float, float] = ("FAIL", 6, 14)


def test_once_the_whole_passes_only_what_may_fail_is_asked() -> None:
    assert further(gates(), PASSED, PASSED, PASSED, OPEN) == set()
    assert further(gates(), ("PASS", -4, 0), ("PASS", -4, 0), WORSE, OPEN) == {"c"}


def test_while_the_mean_is_open_every_task_goes_on() -> None:
    """Otherwise tasks that stopped because chance let them look good would bias it."""
    assert further(gates(), OPEN, WORSE, WORSE, PASSED) == {"a", "b", "c", "d"}


def test_two_margins_that_are_open_ask_the_task_alone() -> None:
    wide: tuple[Status, float, float] = ("UNDERPOWERED", -11, 10.5)
    steady: tuple[Status, float, float] = ("PASS", -3, 0)
    assert further(gates(), steady, steady, OPEN, wide) == {"d"}


def test_a_fail_is_final() -> None:
    assert further(gates(), PASSED, FAILED, OPEN, WORSE) == set()
    much: tuple[Status, float, float] = ("UNDERPOWERED", 4, 12)
    assert further(gates(), much, much, much, much) == set()  # the mean use is surely above one half


def test_without_the_whole_every_undecided_task_is_asked() -> None:
    for recipe in (gates(whole=None), gates(stopping={"until": "every_task"})):
        assert further(recipe, PASSED, FAILED, OPEN, WORSE) == {"c", "d"}
        assert further(recipe, PASSED, PASSED, PASSED, OPEN) == {"d"}
    assert further(gates(whole=None), OPEN, WORSE, WORSE, PASSED) == {"a", "b", "c"}
    assert further(gates(stopping={"until": "every_task"}), OPEN, WORSE, WORSE, PASSED) == {"a", "b", "c", "d"}


def test_an_equivalence_claim_keeps_being_asked() -> None:
    recipe = gates()
    both_ways = ScoreGate(kind="score", task="d", max_drop=MARGIN, claim="equivalent")
    recipe = recipe.model_copy(update={"gates": (*recipe.gates[:3], both_ways)})
    assert further(recipe, PASSED, PASSED, OPEN, OPEN) == {"d"}


def test_a_task_that_is_missing_leaves_undecided_ones_to_be_asked() -> None:
    missing = verdict("a", "NOT MEASURED", 0, 0).model_copy(update={"observed": None})
    scores = {"a": missing, "b": verdict("b", *OPEN), "c": verdict("c", *PASSED)}
    assert tasks_to_ask_further(gates(), scores, "x") == {"b"}


# ------------------------------------------------------------------------------------------------ as it is recorded
SUITE = load_recipe(SuiteRecipe, "quick").model_copy(update={"name": "asked in rounds"})


def replies(num_items: int, lost: range, num_samples: int) -> list[ItemResult]:
    return [item_result(f"i{i}", i not in lost, sample=sample) for i in range(num_items) for sample in range(num_samples)]


def asked(label: str, num_samples: int, *lost: range) -> Measurement:
    tasks = []
    for name, which in zip(TASKS, lost, strict=True):
        made = task_of(name, "arithmetic", replies(200, which, num_samples))
        tasks.append(made.model_copy(update={"rounds": (Round(started="", num_samples=num_samples, limit=None, why=""),)}))
    common = {"kind": "arithmetic", "num_items": 200, "max_tokens": 9, "temperature": 1.0}
    planned = [common | {"name": name, "num_samples": {"min": 1, "max": 5}} for name in TASKS]
    recipe = {"schema": 1, "name": "asked in rounds", "seed": "eval", "tasks": planned}
    return make_measurement(label, SUITE).model_copy(update={"tasks": tuple(tasks), "suite_recipe": recipe})


@pytest.mark.parametrize(("until", "is_said"), [("overall", True), ("every_task", False)])
def test_a_task_that_was_left_undecided_says_so(until: str, is_said: bool) -> None:
    recipe = gates(stopping={"until": until})
    nothing = range(0)
    reference = asked("fp8", 2, range(100, 112), nothing, nothing, nothing)
    candidate = asked("w4a16", 1, range(12), nothing, nothing, nothing)
    rounds = Rounds(SuiteRecipe.model_validate(reference.suite_recipe), recipe)
    assert set(rounds.due(candidate, reference)) == (set() if is_said else {"a"})
    report = judge([reference, candidate], recipe, model="tiny-glm")
    assert report.overall == {"w4a16": "PASS"}
    alone = next(entry for entry in report.verdicts if entry.gate == "score a")
    assert (alone.status, alone.has_say, alone.detail.endswith(NOT_ASKED)) == ("UNDERPOWERED", False, is_said)
    assert not any(NOT_ASKED in entry.detail for entry in report.verdicts if entry is not alone)
