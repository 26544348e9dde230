"""The claim about the whole: what it is, what it overrides, and what stands against it."""

from __future__ import annotations

from typing import Any

import pytest
from blank_records import item_result
from pydantic import ValidationError
from synthetic_run import make_measurement, task_of

from assay.recipes.gate import GateRecipe, ScoreGate
from assay.recipes.load import load_recipe
from assay.recipes.suite import SuiteRecipe
from assay.records.base import Interval
from assay.records.measurement import ItemResult, Measurement
from assay.records.verdict import GateReport, TaskUse, WholeClaim
from assay_evaluate.statistics.paired import paired_difference
from assay_evaluate.statistics.proportions import p_at_least, weighted_sum
from assay_evaluate.verdicts.gates import judge

SUITE = load_recipe(SuiteRecipe, "quick")
WHOLE = {"max_mean_use": 0.5, "max_task": 2.0}
TASKS = ("arithmetic", "needle", "ruler")


def gates(whole: dict[str, float] | None = WHOLE, *more: dict[str, Any], **changes: Any) -> GateRecipe:
    scores = [{"kind": "score", "task": task, "max_drop": 0.05} for task in TASKS]
    return GateRecipe.model_validate({"schema": 1, "name": "t", "gates": [*scores, *more], "whole": whole} | changes)


def items(n: int, wrong: range) -> list[ItemResult]:
    return [item_result(f"i{i}", i not in wrong) for i in range(n)]


def side(label: str, *wrong: range, n: int = 200) -> Measurement:
    tasks = tuple(task_of(task, "arithmetic", items(n, entry)) for task, entry in zip(TASKS, wrong, strict=False))
    return make_measurement(label, SUITE).model_copy(update={"tasks": tasks})


def judged(recipe: GateRecipe, *lost: tuple[int, int], n: int = 200) -> GateReport:
    """lost: of each task, how many items only the reference gets right, and how many only the candidate."""
    reference = side("fp8", *(range(100, 100 + c) for _, c in lost), n=n)
    candidate = side("w4a16", *(range(b) for b, _ in lost), n=n)
    return judge([reference, candidate], recipe, model="tiny-glm")


def statuses(report: GateReport) -> dict[str, tuple[str, bool]]:
    return {verdict.gate.removeprefix("score "): (verdict.status, verdict.has_say) for verdict in report.verdicts}


def test_what_is_undecided_alone_passes_as_a_whole() -> None:
    lost = ((9, 6), (5, 5), (3, 6))
    alone = judged(gates(whole=None), *lost)
    assert alone.overall == {"w4a16": "UNDERPOWERED"}
    assert alone.wholes == ()
    report = judged(gates(), *lost)
    assert report.overall == {"w4a16": "PASS"}
    assert statuses(report) == {
        "whole": ("PASS", True), "arithmetic": ("UNDERPOWERED", False), "needle": ("PASS", True), "ruler": ("PASS", True),
    }  # fmt: skip
    drops = [paired_difference(b, c, 200) for b, c in lost]
    uses = [Interval(value=d.value / 0.05, low=d.low / 0.05, high=d.high / 0.05, n=200) for d in drops]
    mean = weighted_sum(uses, [1 / 3] * 3)
    assert report.wholes == (
        WholeClaim(
            candidate="w4a16", status="PASS", mean_use=mean, max_mean_use=0.5, max_task=2.0, p_value=p_at_least(mean, 0.5),
            tasks=(
                TaskUse(task="arithmetic", use=uses[0], word="undecided alone", within_max=True),
                TaskUse(task="needle", use=uses[1], word="within its margin", within_max=True),
                TaskUse(task="ruler", use=uses[2], word="within its margin", within_max=True),
            ),
            left_out=(),
            detail="Loses 0 % of the margins of 3 tasks on average (95 % interval: 43 % gained to 43 % lost); less than 50 % "
            "allowed; no task lost 2 margins. Within its margin: needle, ruler; Undecided alone: arithmetic.",
            clause="loses 0 % of the margins of 3 tasks on average; less than 50 % allowed",
        ),
    )  # fmt: skip
    assert report.reasons["w4a16"] == (
        "loses 0 % of the margins of 3 tasks on average; less than 50 % allowed; 3 gates passed, 1 underpowered"
    )
    (verdict,) = (verdict for verdict in report.verdicts if verdict.gate == "whole")
    assert (verdict.observed, verdict.limit) == (mean, 0.5)


def test_a_task_that_fails_its_margin_fails_the_candidate() -> None:
    report = judged(gates(), (40, 2), (0, 5), (0, 5))
    assert statuses(report)["arithmetic"] == ("FAIL", True)
    assert report.overall == {"w4a16": "FAIL"}
    assert report.reasons["w4a16"].startswith("loses 19.0 points on arithmetic; 5 allowed")


def test_two_margins_that_are_not_excluded_leave_it_open() -> None:
    report = judged(gates(), (15, 3), (0, 12), (0, 12))
    whole = report.wholes[0]
    assert whole.mean_use is not None
    assert whole.mean_use.high < 0.5
    assert [task.within_max for task in whole.tasks] == [False, True, True]
    assert (whole.status, report.overall) == ("UNDERPOWERED", {"w4a16": "UNDERPOWERED"})
    assert "a loss of 2 margins is not excluded on arithmetic (up to 2.1 margins)" in whole.detail


def test_margins_used_up_on_average_fail_without_a_task_that_does() -> None:
    report = judged(gates(), (12, 0), (12, 0), (12, 0))
    assert [verdict.status for verdict in report.verdicts] == ["FAIL", "UNDERPOWERED", "UNDERPOWERED", "UNDERPOWERED"]
    assert report.overall == {"w4a16": "FAIL"}
    whole = report.wholes[0]
    assert whole.detail.startswith(
        "Loses 120 % of the margins of 3 tasks on average (95 % interval: 87 to 168 % lost); less than 50 % allowed; "
    )
    assert report.reasons["w4a16"] == (
        "loses 120 % of the margins of 3 tasks on average; less than 50 % allowed; 1 gate failed, 3 underpowered"
    )


def test_the_mean_is_open() -> None:
    report = judged(gates(), (6, 1), (6, 1), (6, 1))
    assert report.wholes[0].status == "UNDERPOWERED"
    assert "; less than 50 % allowed; whether it is less is open; " in report.wholes[0].detail
    assert report.reasons["w4a16"].startswith(
        "loses 50 % of the margins of 3 tasks on average; less than 50 % allowed: whether it is less is open; "
    )


def test_fewer_items_than_the_least_never_pass_as_a_whole() -> None:
    recipe = gates(min_items=201)
    assert judged(recipe, (0, 0), (0, 0), (0, 0)).wholes[0].status == "UNDERPOWERED"
    assert "fewer than 201 items on arithmetic, needle, ruler" in judged(recipe, (0, 0), (0, 0), (0, 0)).wholes[0].detail


def test_a_task_without_a_score_leaves_nothing_to_say_of_the_whole() -> None:
    report = judged(gates(), (0, 0), (0, 0))
    assert report.wholes[0].mean_use is None
    assert report.wholes[0].detail == "Nothing is said of the whole: ruler not measured."
    assert report.overall == {"w4a16": "NOT MEASURED"}


def test_an_optional_task_that_the_reference_cannot_do_is_left_out() -> None:
    recipe = gates()
    optional = recipe.gates[2].model_copy(update={"required": False})
    report = judged(recipe.model_copy(update={"gates": (*recipe.gates[:2], optional)}), (0, 0), (0, 0))
    assert (report.wholes[0].status, report.wholes[0].left_out) == ("PASS", ("ruler",))
    assert report.wholes[0].detail.endswith("Left out, for the reference cannot do it: ruler.")
    assert report.overall == {"w4a16": "PASS"}


def test_an_equivalence_claim_keeps_its_say() -> None:
    recipe = gates()
    both_ways = recipe.gates[2].model_copy(update={"claim": "equivalent"})
    report = judged(recipe.model_copy(update={"gates": (*recipe.gates[:2], both_ways)}), (0, 0), (0, 0), (0, 8))
    assert report.wholes[0].status == "PASS"
    assert statuses(report)["ruler"] == ("UNDERPOWERED", True)
    assert report.overall == {"w4a16": "UNDERPOWERED"}


def test_another_gate_stands_against_it() -> None:
    report = judged(gates(WHOLE, {"kind": "probes", "required": ["argmax"]}), (0, 0), (0, 0), (0, 0))
    assert report.wholes[0].status == "PASS"
    assert report.overall == {"w4a16": "NOT MEASURED"}


def test_a_whole_of_nothing_is_a_mistake() -> None:
    with pytest.raises(ValidationError, match="whole is about score gates, and there is none"):
        GateRecipe.model_validate({"schema": 1, "name": "t", "gates": [], "whole": {}})


FULL = {
    "arithmetic": (400, 0.005), "needle": (300, 0.005), "gsm8k": (1319, 0.03), "math500": (500, 0.04), "aime": (60, 0.15),
    "gpqa-diamond": (198, 0.12), "mmlu-pro": (2800, 0.08), "ifeval": (541, 0.07), "ruler": (520, 0.05), "tools": (480, 0.05),
}  # fmt: skip
"""Items of each task, and the share on which two runs of one model are assumed to differ."""


@pytest.mark.slow
def test_suite_full_decides_on_a_copy_that_differs_as_much_as_two_runs_do() -> None:
    """Its shipped gates, one reply to each item, as many flips each way as are assumed: AIME and GPQA are undecided alone."""
    gates = load_recipe(GateRecipe, "full")
    scores = gates.model_copy(update={"gates": tuple(gate for gate in gates.gates if isinstance(gate, ScoreGate))})
    margins_of = {gate.task: gate.max_drop for gate in scores.gates if isinstance(gate, ScoreGate)}
    assert set(margins_of) == set(FULL)

    def sides(margins: float) -> list[Measurement]:
        """The candidate loses so many times each margin."""
        asked = [(task, n, D, margins * margins_of[task]) for task, (n, D) in FULL.items()]
        moved = [(task, n, round(n * (D + loss) / 2), round(n * max(D - loss, 0) / 2)) for task, n, D, loss in asked]
        wrong = {"fp8": [range(n - c, n) for _, n, _, c in moved], "w4a16": [range(b) for _, _, b, _ in moved]}
        return [
            make_measurement(label, SUITE).model_copy(
                update={
                    "tasks": tuple(
                        task_of(task, "arithmetic", items(n, which))
                        for (task, n, _, _), which in zip(moved, ranges, strict=True)
                    )
                }
            )
            for label, ranges in wrong.items()
        ]

    report = judge(sides(0.0), scores, model="tiny-glm")
    undecided = {verdict.gate.removeprefix("score ") for verdict in report.verdicts if verdict.status == "UNDERPOWERED"}
    assert report.overall == {"w4a16": "PASS"}
    assert undecided == {"aime", "gpqa-diamond"}
    assert judge(sides(0.0), scores.model_copy(update={"whole": None}), model="tiny-glm").overall == {"w4a16": "UNDERPOWERED"}
    assert judge(sides(0.5), scores, model="tiny-glm").overall == {"w4a16": "UNDERPOWERED"}
    assert judge(sides(1.0), scores, model="tiny-glm").overall == {"w4a16": "FAIL"}


def test_every_task_of_suite_full_may_be_asked_again() -> None:
    """What one reply to each item leaves open is decided by more of them."""
    tasks = load_recipe(SuiteRecipe, "full").model_dump(mode="json")["tasks"]
    assert {
        task["name"] for task in tasks if isinstance(task["num_samples"], dict) or isinstance(task.get("limit"), dict)
    } == set(FULL)
