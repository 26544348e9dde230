"""`estimand: these_items | such_items`: which interval a verdict has, what it says, and what the report says of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from blank_records import item_result
from synthetic_run import make_measurement, task_of

from assay.recipes.gate import GateRecipe
from assay.recipes.load import load_recipe
from assay.recipes.suite import SuiteRecipe
from assay.records.measurement import Measurement, Round
from assay.records.verdict import GateReport, Verdict
from assay_evaluate.statistics.fixed_items import fixed_items
from assay_evaluate.statistics.graded import graded_difference
from assay_evaluate.statistics.paired import paired_difference
from assay_evaluate.verdicts.gates import judge

SUITE = load_recipe(SuiteRecipe, "quick")
N = 60
RNG = np.random.default_rng(4)
OURS = RNG.random((N, 5)) < 0.97
THEIRS = OURS & (np.arange(N) >= 6)[:, None]  # six items are lost wholly, the others not at all
LOOKS = {"num_samples": {"min": 1, "max": 5}}
FIXED = "The interval is for these items: for other replies to them, not for other questions."
SUCH = "The interval is the wider one, for such items: one reply to each, or items drawn in rounds, do not give one for these."


def gates(estimand: str | None, max_drop: float = 0.04) -> GateRecipe:
    more = {} if estimand is None else {"estimand": estimand}
    score = {"kind": "score", "task": "t", "max_drop": max_drop}
    return GateRecipe.model_validate({"schema": 1, "name": "g", "gates": [score]} | more)


def side(label: str, right: np.ndarray, *, task: dict[str, Any] | None = None, limit: int | None = None) -> Measurement:
    """right: [items, replies]. task: as the suite has it, with a range; None: asked once, as often as it says."""
    items = [
        item_result(f"p/{i}", bool(right[i, sample]), sample=sample, cluster=f"c{i // 2}")
        for i in range(len(right))
        for sample in range(right.shape[1])
    ]
    made, update = task_of("t", "lm_eval", items), {}
    if task is not None:
        made = made.model_copy(update={"rounds": (Round(started="", num_samples=right.shape[1], limit=limit, why=""),)})
        whole = {"kind": "lm_eval", "name": "t", "tasks": ["p"], "max_tokens": 9, "temperature": 1.0} | task
        update = {"suite_recipe": {"schema": 1, "name": "s", "seed": "eval", "tasks": [whole]}}
    return make_measurement(label, SUITE).model_copy(update={"tasks": (made,)} | update)


def report(recipe: GateRecipe, reference: np.ndarray, candidate: np.ndarray, **asked: Any) -> GateReport:
    return judge([side("fp8", reference, **asked), side("w4a16", candidate, **asked)], recipe, model="tiny-glm")


def verdict(recipe: GateRecipe, reference: np.ndarray, candidate: np.ndarray, **asked: Any) -> Verdict:
    return report(recipe, reference, candidate, **asked).verdicts[0]


def test_several_replies_to_each_item_give_the_interval_of_these_items() -> None:
    result = verdict(gates("these_items"), OURS, THEIRS)
    expected = fixed_items(OURS.mean(axis=1), THEIRS.mean(axis=1), [5] * N, [5] * N)
    assert expected is not None
    assert result.observed == expected.interval(0.95)
    assert (result.p_pass, result.p_fail) == (expected.p_at_least(0.04), expected.p_at_most(0.04))
    assert (result.status, result.estimand, result.items_needed) == ("FAIL", "these_items", None)
    assert result.detail.endswith(FIXED)


def test_such_items_are_the_default_and_widen_by_what_items_lose() -> None:
    """Six of sixty lost: sure of these items, not of such ones; items in pairs are clusters."""
    for recipe in (gates(None), gates("such_items")):
        result = verdict(recipe, OURS, THEIRS)
        assert (result.status, result.estimand) == ("UNDERPOWERED", "such_items")
        assert result.observed is not None
        by_item = graded_difference(OURS.mean(axis=1), THEIRS.mean(axis=1))
        assert result.observed.low <= by_item.low and result.observed.high >= by_item.high
        assert "60 items share 30 questions or texts" in result.detail
        assert FIXED not in result.detail and SUCH not in result.detail


def test_one_reply_to_each_item_keeps_the_interval_of_such_items_and_says_so() -> None:
    reference, candidate = OURS[:, :1], THEIRS[:, :1]
    result = verdict(gates("these_items"), reference, candidate)
    assert result.observed == verdict(gates("such_items"), reference, candidate).observed
    assert result.observed is not None
    assert result.observed.high >= paired_difference(int((reference & ~candidate).sum()), 0, N).high
    assert (result.estimand, result.detail.endswith(SUCH)) == ("such_items", True)


def test_over_looks_the_first_with_one_reply_is_that_of_such_items() -> None:
    result = verdict(gates("these_items"), OURS, THEIRS, task=LOOKS)
    assert result.estimand == "these_items"
    information = [look.information for look in result.looks]
    expected = [
        fixed_items(OURS[:, :r].mean(axis=1), THEIRS[:, :c].mean(axis=1), [r] * N, [c] * N) for r, c in ((2, 2), (3, 3), (5, 5))
    ]
    assert information[1:] == pytest.approx([1 / entry.standard_error**2 for entry in expected if entry is not None])
    assert verdict(gates("such_items"), OURS, THEIRS, task=LOOKS).looks[0].information == information[0]


def test_items_that_are_drawn_in_rounds_stay_such_items() -> None:
    drawn = {"limit": {"min": 30, "max": 60}}
    result = verdict(gates("these_items"), OURS[:, :2], THEIRS[:, :2], task=drawn, limit=60)
    assert (result.estimand, result.detail.endswith(SUCH)) == ("such_items", True)


def test_an_open_question_names_replies_and_not_items() -> None:
    candidate = OURS & (np.arange(N) >= 1)[:, None]
    result = verdict(gates("these_items"), OURS[:, :2], candidate[:, :2])
    assert (result.status, result.items_needed_at_loss) == ("UNDERPOWERED", None)
    assert "replies of each side to every item give a PASS 4 times in 5 if the loss seen is the true one" in result.detail
    assert "items would decide" not in result.detail


def test_the_choice_belongs_to_the_registered_limits() -> None:
    assert gates("these_items").sha256 != gates("such_items").sha256 == gates(None).sha256
    assert report(gates("these_items"), OURS, THEIRS).gate_recipe["estimand"] == "these_items"
