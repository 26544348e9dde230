"""What verdicts of scores say, whole: direction, task, what is allowed, what is open, and how many gates said what."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from blank_records import item_result
from synthetic_run import make_measurement, task_of

from assay.recipes.gate import GateRecipe
from assay.recipes.load import load_recipe
from assay.recipes.suite import SuiteRecipe
from assay.records.base import Interval
from assay.records.measurement import ItemResult, Measurement
from assay.records.verdict import GateReport
from assay_evaluate.asking.session import task_result
from assay_evaluate.statistics.decisions import paired_evidence
from assay_evaluate.statistics.power import items_needed
from assay_evaluate.statistics.proportions import wilson
from assay_evaluate.verdicts.gates import judge
from assay_evaluate.verdicts.score_sentences import change, interval_of

SUITE = load_recipe(SuiteRecipe, "quick")


def answers(n: int, wrong: range) -> list[ItemResult]:
    return [
        item_result(f"codes-zh/{i}", i not in wrong, language="zh", prompt_tokens=600, output_tokens=30, answer=str(i))
        for i in range(n)
    ]


def measured(label: str, wrong: range, n: int = 100) -> Measurement:
    task = task_of("codes-zh", "needle", answers(n, wrong)).model_copy(update={"title": "Chinese code lookup"})
    return make_measurement(label, SUITE).model_copy(update={"tasks": (task,)})


def judged(reference: range, candidate: range, *others: dict[str, Any], n: int = 100, **gate: Any) -> GateReport:
    score = {"kind": "score", "task": "codes-zh", "max_drop": 0.10} | gate
    recipe = GateRecipe.model_validate({"schema": 1, "name": "test", "gates": [score, *others]})
    return judge([measured("fp8", reference, n), measured("w4a16", candidate, n)], recipe, model="tiny-glm")


@pytest.mark.parametrize(
    ("ours", "theirs", "gate", "headline", "detail"),
    [
        (range(0), range(25), {}, "loses 25.0 points on Chinese code lookup; 10 allowed; 1 gate failed",
         "Loses 25.0 points on Chinese code lookup (95 % interval: 16.9 to 34.3 lost); 10 allowed."),
        (range(17), range(0), {},
         "a loss of the margin is excluded on the task that counts (at 97.5 %); closest is Chinese code lookup, at least 10.2 "
         "gained (95 % interval); a loss of 10 is allowed; gains 17.0 points on Chinese code lookup, a change of behaviour as "
         "large as a failure's; 1 gate passed",
         "Gains 17.0 points on Chinese code lookup (95 % interval: 10.2 to 25.5 gained); a loss of 10 is allowed. A gain of "
         "more than the margin is a change of behaviour as well: this task may not measure the quality of this model, or the "
         "reference may not have been served well."),
        (range(1), range(1, 11), {},
         "loses 9.0 points on Chinese code lookup; 10 allowed: there is a real loss, but the data cannot tell whether it "
         "exceeds 10 points; 1 gate underpowered",
         "Loses 9.0 points on Chinese code lookup (interval of at least 95 %: 2.8 to 16.6 lost); 10 allowed. There is a real "
         "loss, but the data cannot tell whether it exceeds 10 points; about 8,331 items give a PASS 4 times in 5 if 9 points "
         "are the truth, which may be 2.8 to 16.6 lost."),
        (range(0), range(12), {},
         "loses 12.0 points on Chinese code lookup; 10 allowed: there is a real loss, but the data cannot tell whether it "
         "exceeds 10 points; 1 gate underpowered",
         "Loses 12.0 points on Chinese code lookup (interval of at least 95 %: 6.4 to 19.8 lost); 10 allowed. "
         "There is a real loss, but the data cannot tell whether "
         "it exceeds 10 points; more items would not pass it if the loss seen is the true one."),
        (range(13), range(13, 26), {},
         "shows no change on Chinese code lookup; 10 allowed: anything from no loss to more than 10 points is compatible with "
         "the data; 1 gate underpowered",
         "Shows no change on Chinese code lookup (95 % interval: 10.3 gained to 10.3 lost); 10 allowed. Anything from no loss "
         "to more than 10 points is compatible with the data; about 209 items give a PASS 4 times in 5 if nothing is lost."),
        (range(25), range(0), {"claim": "equivalent"},
         "gains 25.0 points on Chinese code lookup; 10 allowed either way; 1 gate failed",
         "Gains 25.0 points on Chinese code lookup (95 % interval: 16.9 to 34.3 gained); 10 allowed either way."),
    ],
)  # fmt: skip
def test_a_score_says_direction_task_and_what_is_open(
    ours: range, theirs: range, gate: dict[str, Any], headline: str, detail: str
) -> None:
    report = judged(ours, theirs, **gate)
    assert (report.reasons["w4a16"], report.verdicts[0].detail) == (headline, detail)


def test_a_certain_loss_is_not_answered_with_the_items_of_no_loss() -> None:
    """10 lost, 1 won of 100 at margin 10: 105 items decide if nothing is lost, 8,331 if the 9 points seen are."""
    [verdict] = judged(range(1), range(1, 11)).verdicts
    assert (verdict.items_needed, verdict.items_needed_at_loss) == (105, items_needed(0.10, 0.11, loss=0.09))
    assert verdict.items_needed_at_loss == 8331
    assert "if nothing is lost" not in verdict.detail and "105" not in verdict.detail
    assert judged(range(0), range(10)).verdicts[0].items_needed_at_loss is None, "the loss is the margin: no number decides"
    nearly = judged(range(0), range(999), n=10_000).verdicts[0]
    assert (nearly.status, nearly.items_needed_at_loss) == ("UNDERPOWERED", None), "more than a million"


def test_the_p_values_that_decide_are_recorded() -> None:
    """PASS and FAIL are these p against (1 - level) / 2; McNemar's tests any difference and decides nothing."""
    for reference, candidate, status in (
        (range(0), range(25), "FAIL"),
        (range(17), range(0), "PASS"),
        (range(1), range(1, 11), "UNDERPOWERED"),
    ):
        [verdict] = judged(reference, candidate).verdicts
        assert verdict.p_pass is not None and verdict.p_fail is not None and verdict.p_fail_holm is not None
        decided = "FAIL" if verdict.p_fail_holm < 0.025 else "PASS" if verdict.p_pass < 0.025 else "UNDERPOWERED"
        assert (verdict.status, decided) == (status, status)
        assert verdict.discordant is not None and verdict.observed is not None
        alone = paired_evidence(*verdict.discordant, verdict.observed.n, 0.10)
        assert (verdict.p_pass, verdict.p_fail) == (alone.p_pass, alone.p_fail)


def test_gates_that_were_not_measured_are_counted_beside_those_that_passed() -> None:
    other = {"kind": "score", "task": "ruler", "max_drop": 0.10, "required": False}
    report = judged(range(0), range(0), other)
    assert report.overall == {"w4a16": "PASS"}
    assert report.reasons["w4a16"] == (
        "a loss of the margin is excluded on the task that counts (at 97.5 %); closest is Chinese code lookup, at most 3.7 "
        "lost (interval of at least 95 %); 10 allowed; 1 gate passed, 1 not measured: ruler"
    )


@pytest.mark.parametrize(
    ("low", "value", "high", "words", "interval"),
    [
        (0.031, 0.09, 0.166, "loses 9.0 points", "95 % interval: 3.1 to 16.6 lost"),
        (-0.242, -0.133, -0.065, "gains 13.3 points", "95 % interval: 6.5 to 24.2 gained"),
        (-0.046, 0.033, 0.123, "loses 3.3 points", "95 % interval: 4.6 gained to 12.3 lost"),
        (-0.02, 0.0, 0.02, "shows no change", "95 % interval: 2.0 gained to 2.0 lost"),
        (-0.02, -0.0004, 0.02, "shows no change", "95 % interval: 2.0 gained to 2.0 lost"),
        (0.0, 0.0, 0.0, "shows no change", "95 % interval: 0.0 to 0.0 lost"),
    ],
)
def test_a_difference_has_a_direction_and_no_sign(low: float, value: float, high: float, words: str, interval: str) -> None:
    drop = Interval(value=value, low=low, high=high, n=100)
    assert (change(drop), interval_of(drop)) == (words, interval)


def test_every_task_of_a_shipped_suite_has_a_name_for_sentences() -> None:
    """A title, or a name that is an English word; titles belong to no hash."""
    quick = load_recipe(SuiteRecipe, "quick")
    assert {task.name: task.title for task in quick.tasks} == {
        "arithmetic": None, "needle": "needle retrieval", "codes-en": "English code lookup", "codes-zh": "Chinese code lookup",
        "ruler": "RULER", "needle-grid": "needle retrieval by depth", "tools": "tool calls",
    }  # fmt: skip
    untitled = quick.model_copy(update={"tasks": tuple(task.model_copy(update={"title": None}) for task in quick.tasks)})
    assert untitled.sha256 == quick.sha256


def test_a_sampled_loss_has_its_items_too() -> None:
    """Four replies to each of 60 items: items needed at the loss seen follow the spread over items."""
    entry = [replace(item, sample=k) for item in answers(60, range(0)) for k in range(4)]
    two = [replace(item, correct=not (item.sample == 0 and i // 4 < 18)) for i, item in enumerate(entry)]
    sides = [
        make_measurement(label, SUITE).model_copy(update={"tasks": (task_of("codes-zh", "needle", items),)})
        for label, items in (("fp8", entry), ("w4a16", two))
    ]
    gate = {"kind": "score", "task": "codes-zh", "max_drop": 0.10}
    recipe = GateRecipe.model_validate({"schema": 1, "name": "test", "gates": [gate]})
    [verdict] = judge(sides, recipe, model="tiny-glm").verdicts
    assert (verdict.status, verdict.observed and verdict.observed.value) == ("UNDERPOWERED", pytest.approx(0.075))
    spread = (0.25**2 * 0.3 * 0.7 * 60 / 59) ** 0.5
    assert verdict.items_needed_at_loss == pytest.approx(((1.95996 + 0.84162) * spread / 0.025) ** 2, abs=1)


def test_cut_replies_of_tasks_that_are_left_out_are_named() -> None:
    """12 of 52 replies to RULER are cut off, which the reference cannot do: no bare `at most 0 %`."""
    sides = []
    for label in ("fp8", "w4a16"):
        items = [replace(item, truncated=i < 12) for i, item in enumerate(answers(52, range(52)))]
        ruler = task_of("ruler", "ruler", items).model_copy(update={"title": "RULER"})
        entry = measured(label, range(0))
        sides.append(entry.model_copy(update={"tasks": (*entry.tasks, ruler)}))
    gates = [
        {"kind": "score", "task": "codes-zh", "max_drop": 0.10},
        {"kind": "score", "task": "ruler", "max_drop": 0.10, "required": False},
        {"kind": "truncation", "max_share": 0.05},
    ]
    report = judge(sides, GateRecipe.model_validate({"schema": 1, "name": "test", "gates": gates}), model="tiny-glm")
    assert (report.verdicts[2].status, report.verdicts[2].detail) == (
        "PASS",
        "Is cut off in none of its 100 replies to Chinese code lookup, fp8 in none (interval of at least 95 %: 3.7 points "
        "fewer to 3.7 more); 2 % more allowed. Not counted, for the reference cannot do the task: 12 of 52 on RULER (fp8), 12 "
        "of 52 on RULER (w4a16).",
    )


def test_a_mean_score_of_nothing_has_an_interval() -> None:
    """52 items without any credit: between 0 and 6.9 %, not a point."""
    items = [replace(item, score=0.0) for item in answers(52, range(52))]
    mean = task_result("ruler", "ruler", items, 512).mean_score
    assert mean is not None and (mean.value, mean.low) == (0, 0)
    assert mean.high == pytest.approx(wilson(0, 52).high)
