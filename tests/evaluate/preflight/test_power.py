"""Whether a suite can decide: what is assumed of its tasks, what is said, and what would raise it."""

from __future__ import annotations

from typing import Any

import pytest

from assay.cli.gate_choice import gates_of_suite, load_gates
from assay.recipes.gate import GateRecipe
from assay.recipes.load import load_recipe
from assay.recipes.model import ModelRecipe
from assay.recipes.suite import SuiteRecipe
from assay.recipes.suite_files import as_model_asks
from assay_evaluate.preflight.power import SuitePower, check_power, score_designs, suite_power
from assay_evaluate.statistics.joint_power import ScoreDesign


def full() -> tuple[SuiteRecipe, GateRecipe]:
    suite = as_model_asks(load_recipe(SuiteRecipe, "full"), load_recipe(ModelRecipe, "glm-5").sampling)
    return suite, load_gates(gates_of_suite(suite), suite)


def full_asked_once() -> tuple[SuiteRecipe, GateRecipe]:
    """`full` as it would be without ranges."""
    suite, gates = full()
    changes: dict[str, dict[str, int]] = {"mmlu-pro": {"limit": 100}}
    once = [task.model_copy(update={"num_samples": 1} | changes.get(task.name, {})) for task in suite.tasks]
    return suite.model_copy(update={"tasks": tuple(once)}), gates


def small(*tasks: dict[str, Any], gates: list[dict[str, Any]]) -> tuple[SuiteRecipe, GateRecipe]:
    suite = SuiteRecipe.model_validate({"schema": 1, "name": "small", "seed": "eval-1", "tasks": tasks})
    return suite, GateRecipe.model_validate({"schema": 1, "name": "small", "gates": gates})


ARITHMETIC = {"kind": "arithmetic", "name": "sums", "languages": ["en"], "num_items": 100, "max_tokens": 64}
MINE = {"kind": "lm_eval", "name": "mine", "tasks": ["my-task"], "max_tokens": 64}


def test_items_and_discordances_of_full() -> None:
    designs, unknown = score_designs(*full())
    assert unknown == []
    assert designs == (
        ScoreDesign("arithmetic", 400, 0.03, 0.005, num_samples=2),
        ScoreDesign("needle", 300, 0.03, 0.005, num_samples=2),
        ScoreDesign("gsm8k", 1319, 0.01, 0.03, num_samples=5),
        ScoreDesign("math500", 500, 0.03, 0.04, num_samples=5),
        ScoreDesign("aime", 60, 0.15, 0.15, num_samples=5),
        ScoreDesign("gpqa-diamond", 198, 0.05, 0.12, num_samples=5),
        ScoreDesign("mmlu-pro", 14 * 200, 0.02, 0.08),
        ScoreDesign("ifeval", 541, 0.03, 0.07, num_samples=5),
        ScoreDesign("ruler", 1300, 0.02, 0.05, num_samples=3),
        ScoreDesign("tools", 480, 0.04, 0.05, num_samples=3),
    )


@pytest.mark.slow
def test_a_suite_that_seldom_passes_a_lossless_candidate_says_so_and_what_would_help() -> None:
    assert check_power(*full()).outcome == "PASS"  # with its ranges
    check = check_power(*full_asked_once())
    assert (check.check, check.subject, check.outcome) == ("power", "full", "UNKNOWN")
    assert check.detail.startswith("a lossless candidate passes with 8.4 %, 1.4 % to 27.4 % if replies are less or more steady")
    assert "gpqa-diamond 50 %, gsm8k 52 %, ifeval 72 %" in check.detail
    assert check.remedy is not None
    assert "4 replies to each item of gpqa-diamond" in check.remedy
    assert "2 times the items of tools" in check.remedy
    assert check.remedy.endswith("it would pass with 93.2 %")


def test_a_suite_that_can_decide_passes() -> None:
    check = check_power(*small(ARITHMETIC, gates=[{"kind": "score", "task": "sums", "max_drop": 0.1}]))
    assert (check.outcome, check.remedy) == ("PASS", None)
    assert check.detail.startswith("a lossless candidate passes with 100 %, 100 % to 100 %")


def test_gates_that_are_not_required_are_counted_apart() -> None:
    needle = {"kind": "needle", "name": "few", "languages": ["en"], "num_items": 29, "max_tokens": 64}
    gates = [
        {"kind": "score", "task": "sums", "max_drop": 0.1},
        {"kind": "score", "task": "few", "max_drop": 0.1, "required": False},
    ]
    suite, limits = small(ARITHMETIC, needle, gates=gates)
    found = suite_power(suite, limits)
    assert isinstance(found, SuitePower)
    assert (found.lossless.passes, found.required_passes) == (0.0, 1.0)  # 29 items never pass
    check = check_power(suite, limits)
    assert "0 % (100 % if the reference cannot do the tasks whose gates are not required)" in check.detail
    assert check.remedy == "2 times the items of few: it would pass with 99 %"


def test_a_task_of_unknown_length_is_named() -> None:
    check = check_power(*small(ARITHMETIC, MINE, gates=[{"kind": "score", "task": "mine", "max_drop": 0.1}]))
    assert check.outcome == "UNKNOWN"
    assert check.detail.startswith("the chance that a lossless candidate passes cannot be told: mine: how many items it has")


def test_without_a_limit_on_a_score_nothing_can_pass() -> None:
    check = check_power(*small(ARITHMETIC, gates=[{"kind": "truncation", "max_share": 0.05}]))
    assert (check.outcome, check.remedy) == ("UNKNOWN", "write a score gate")


@pytest.mark.parametrize(
    ("name", "num_items", "num_clusters"), [("swe-verified", 500, 12), ("swe-lite", 300, 12), ("swe-multilingual", 300, 42)]
)
def test_repositories_of_swe_bench_are_clusters(name: str, num_items: int, num_clusters: int) -> None:
    suite = load_recipe(SuiteRecipe, name)
    ((design,), _) = score_designs(suite, load_gates(gates_of_suite(suite), suite))
    assert (design.num_items, sum(design.cluster_sizes), len(design.cluster_sizes)) == (num_items, num_items, num_clusters)
