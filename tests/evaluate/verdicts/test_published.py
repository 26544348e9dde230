"""The reference beside its published score: what misses it makes verdicts NOT MEASURED, other protocols are not compared."""

from __future__ import annotations

from typing import Any

import pytest
from blank_records import item_result
from synthetic_run import make_measurement, task_of

from assay.recipes.gate import GateRecipe
from assay.recipes.load import load_recipe, recipe_names
from assay.recipes.model import ModelRecipe, PublishedScore
from assay.recipes.suite import SuiteRecipe
from assay.records.measurement import Measurement
from assay.records.verdict import GateReport
from assay_evaluate.statistics.proportions import independent_difference
from assay_evaluate.verdicts.gates import judge

SUITE = SuiteRecipe.model_validate(
    {
        "schema": 1, "name": "test", "seed": "eval-test",
        "tasks": [
            {"kind": "lm_eval", "name": "gpqa", "title": "GPQA Diamond", "tasks": ["gpqa"], "max_tokens": 4096,
             "temperature": 1.0, "top_p": 0.95},
        ],
    }
)  # fmt: skip
PUBLISHED = {"value": 0.857, "num_items": 198, "temperature": 1.0, "top_p": 0.95, "source": "https://example.org/card"}
GATES = GateRecipe.model_validate(
    {"schema": 1, "name": "test", "gates": [{"kind": "score", "task": "gpqa", "max_drop": 0.1, "required": False}]}
)


def measured(label: str, num_right: int) -> Measurement:
    items = [item_result(str(i), i < num_right, prompt_tokens=200, output_tokens=900, answer="A") for i in range(198)]
    task = task_of("gpqa", "lm_eval", items, max_tokens=4096).model_copy(update={"title": "GPQA Diamond"})
    recipe = {"suite_recipe": SUITE.model_dump(mode="json", by_alias=True), "suite_sha256": SUITE.sha256}
    return make_measurement(label, SUITE).model_copy(update={"tasks": (task,), **recipe})


def judged(num_right: int, **changes: Any) -> GateReport:
    sides = [measured("fp8", num_right), measured("w4a16", num_right)]
    return judge(sides, GATES, model="tiny-glm", published={"gpqa": PublishedScore.model_validate(PUBLISHED | changes)})


def test_a_reference_that_misses_its_published_score_makes_the_harness_suspect() -> None:
    """Both sides answer alike, so every paired comparison would PASS."""
    report = judged(120)
    [result], [verdict] = report.published, report.verdicts
    expected = independent_difference(170, 198, 120, 198)
    assert result.outcome == "missed" and result.difference is not None
    assert result.difference.low == pytest.approx(expected.low, abs=0.003)
    assert (
        verdict.detail
        == result.detail
        == (
            "fp8 scores 60.6 % on GPQA Diamond; published: 85.7 % (https://example.org/card). It misses by 25.1 points (95 % "
            "interval of published minus measured: 16.6 to 33.3 points), more than chance explains: the harness is suspect, so "
            "no verdict of this task is believed. Check the budget (4,096 tokens), the chat template and the parsers."
        )
    )
    assert (verdict.status, verdict.has_say, report.overall) == ("NOT MEASURED", True, {"w4a16": "NOT MEASURED"})
    assert report.reasons["w4a16"] == f"{result.detail.removesuffix('.')}; 1 gate not measured"
    assert judge([measured("fp8", 120), measured("w4a16", 120)], GATES, model="tiny-glm").overall == {"w4a16": "PASS"}


@pytest.mark.parametrize(
    ("num_right", "changes", "outcome", "detail"),
    [
        (165, {}, "agrees",
         "fp8 scores 83.3 % on GPQA Diamond; published: 85.7 % (https://example.org/card). The difference is within the "
         "interval (95 % interval of published minus measured: -4.7 to 9.6 points)."),
        (196, {}, "above",
         "fp8 scores 99.0 % on GPQA Diamond; published: 85.7 % (https://example.org/card). It is above by 13.3 points; this is "
         "not judged."),
        (120, {"temperature": 0.6, "top_k": 20}, "not comparable",
         "The published 85.7 % on GPQA Diamond is by another protocol: temperature 0.6, here 1; top_k 20, here -1."),
        (120, {"temperature": None}, "not comparable",
         "The published 85.7 % on GPQA Diamond is by another protocol: its sampling is not stated."),
        (120, {"tools": True}, "not comparable",
         "The published 85.7 % on GPQA Diamond is by another protocol: it was measured with tools."),
    ],
)  # fmt: skip
def test_what_does_not_miss_is_said_and_not_judged(num_right: int, changes: dict[str, Any], outcome: str, detail: str) -> None:
    report = judged(num_right, **changes)
    assert [(entry.outcome, entry.detail) for entry in report.published] == [(outcome, detail)]
    assert report.overall == {"w4a16": "PASS"}


def test_a_smaller_budget_is_what_the_comparison_is_to_find() -> None:
    assert judged(120, max_tokens=131072).published[0].outcome == "missed"


def test_a_task_that_was_not_asked_is_not_compared() -> None:
    score = PublishedScore.model_validate(PUBLISHED)
    sides = [measured("fp8", 170), measured("w4a16", 170)]
    assert judge(sides, GATES, model="tiny-glm", published={"aime": score}).published == ()


def test_published_scores_of_shipped_recipes_are_of_tasks_that_a_suite_asks_under_the_same_sampling() -> None:
    asked = {task.name for name in recipe_names("suites") for task in load_recipe(SuiteRecipe, name).tasks}
    models = {name: load_recipe(ModelRecipe, name) for name in recipe_names("models")}
    assert {name: sorted(model.published) for name, model in models.items() if model.published} == {
        "glm-4.7": ["gpqa-diamond", "mmlu-pro"], "glm-5": ["gpqa-diamond"],
    }  # fmt: skip
    for model in models.values():
        for task, score in model.published.items():
            assert task in asked and model.sampling is not None
            assert (score.temperature, score.top_p, score.top_k) == (
                model.sampling.temperature,
                model.sampling.top_p,
                model.sampling.top_k,
            )
