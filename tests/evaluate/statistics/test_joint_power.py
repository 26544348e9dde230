"""Chances of verdicts by simulation: against exact powers, the statistics of the verdicts themselves, and the verdicts."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from synthetic_run import make_measurement, task_of

from assay.recipes.gate import GateRecipe, ScoreGate
from assay.recipes.load import load_recipe
from assay.recipes.suite import SuiteRecipe
from assay.records.measurement import ItemResult, Measurement
from assay_evaluate.statistics import (
    clustered_mean,
    decide,
    graded_evidence,
    holm,
    noninferiority_power,
    paired_evidence,
    widen,
)
from assay_evaluate.statistics.item_pairs import Pairs
from assay_evaluate.statistics.joint_power import ScoreDesign, _holm, chances
from assay_evaluate.verdicts.scores import judge_scores

GPQA = ScoreDesign("gpqa", 198, 0.05, 0.12)
FOUR_SIGMA = 4 * 0.5 / np.sqrt(20_000)


@pytest.mark.parametrize(
    ("num_items", "margin", "discordance", "loss"),
    [(198, 0.05, 0.12, 0.0), (1319, 0.01, 0.03, 0.0), (60, 0.15, 0.15, 0.05), (500, 0.03, 0.04, 0.03), (400, 0.03, 0.0, 0.0)],
)
def test_one_gate_has_the_exact_power(num_items: int, margin: float, discordance: float, loss: float) -> None:
    found = chances([ScoreDesign("t", num_items, margin, discordance)], [loss])
    exact = noninferiority_power(margin, max(discordance, loss), num_items, loss=loss)
    assert found.passes_alone == (found.passes,)
    assert found.passes == pytest.approx(exact, abs=FOUR_SIGMA)


def test_a_candidate_that_loses_every_margin_hardly_passes_and_hardly_fails() -> None:
    found = chances([GPQA, ScoreDesign("math", 500, 0.03, 0.04)], [0.05, 0.03])
    assert found.passes < 0.005
    assert all(share < 0.03 for share in found.passes_alone)
    assert found.fails < 0.05


def test_together_is_the_product_for_a_lossless_candidate_and_the_seed_decides() -> None:
    designs = [GPQA, ScoreDesign("gsm8k", 1319, 0.01, 0.03), ScoreDesign("ruler", 1300, 0.02, 0.05)]
    found = chances(designs, [0.0] * 3)
    assert found.passes == pytest.approx(float(np.prod(found.passes_alone)), abs=FOUR_SIGMA)
    assert found == chances(designs, [0.0] * 3)
    assert found != chances(designs, [0.0] * 3, seed=2)


def test_fewer_items_than_the_least_never_pass() -> None:
    assert chances([ScoreDesign("few", 29, 0.5, 0.0)], [0.0], min_items=30).passes == 0
    assert chances([ScoreDesign("few", 30, 0.5, 0.0)], [0.0], min_items=30).passes == 1


def test_an_equivalence_claim_passes_less_often_and_fails_on_a_gain() -> None:
    claim = dataclasses.replace(GPQA, claim="equivalent", num_items=400)
    assert chances([claim], [0.0]).passes < chances([dataclasses.replace(claim, claim="non_inferior")], [0.0]).passes
    assert chances([claim], [-0.2]).fails > 0.99


@pytest.mark.parametrize(("losses", "designs"), [([0.0], []), ([1.0], [GPQA]), ([0.0, 0.0], [GPQA])])
def test_what_cannot_be_simulated_is_an_error(losses: list[float], designs: list[ScoreDesign]) -> None:
    with pytest.raises(ValueError, match=r"design|loss|zip"):
        chances(designs, losses)


def test_holm_of_every_draw_is_that_of_the_verdicts() -> None:
    p_TD = np.random.default_rng(3).uniform(0, 0.1, (5, 40))
    adjusted = _holm(p_TD)
    np.testing.assert_allclose(adjusted.T, [holm(draw.tolist()) for draw in p_TD.T])


@pytest.mark.slow
def test_several_replies_pass_as_often_as_the_bootstrap_lets_them() -> None:
    """The normal limit against the test that the verdicts use, on replies drawn one by one."""
    design = ScoreDesign("t", 100, 0.10, 0.2, num_samples=3)
    rng, passed, num_draws = np.random.default_rng(4), 0, 300
    for _ in range(num_draws):
        moves = rng.choice([1, -1, 0], p=[0.1, 0.1, 0.8], size=(100, 3))
        ours = (moves > 0).astype(float) + (moves == 0) * 0.5  # the shares of both sides move apart by the pairs that differ
        theirs = (moves < 0).astype(float) + (moves == 0) * 0.5
        evidence = graded_evidence(ours.mean(axis=1), theirs.mean(axis=1), 0.10)
        passed += decide(evidence, min_items=30) == "PASS"
    assert chances([design], [0.0]).passes == pytest.approx(passed / num_draws, abs=4 * 0.5 / np.sqrt(num_draws))


@pytest.mark.slow
def test_repositories_pass_as_often_as_the_wider_interval_lets_them() -> None:
    sizes = (60, 40, 30, 20, 15, 10, 5)
    design = ScoreDesign("swe", 180, 0.10, 0.17, cluster_sizes=sizes)
    rng, passed, num_draws = np.random.default_rng(5), 0, 1000
    for _ in range(num_draws):
        moves = rng.choice([1, -1, 0], p=[0.085, 0.085, 0.83], size=180)
        clustered = clustered_mean(moves, np.repeat(np.arange(7), sizes))
        evidence = widen(paired_evidence(int((moves > 0).sum()), int((moves < 0).sum()), 180, 0.10), clustered)
        passed += decide(evidence, min_items=30) == "PASS"
    assert chances([design], [0.0]).passes == pytest.approx(passed / num_draws, abs=4 * 0.5 / np.sqrt(num_draws))


# ------------------------------------------------------------------------------------------------ the verdicts themselves
DESIGNS = (
    ScoreDesign("arithmetic", 120, 0.05, 0.03),
    ScoreDesign("needle", 80, 0.10, 0.08),
    ScoreDesign("ruler", 60, 0.08, 0.02),
)


def side(label: str, right: dict[str, Any]) -> Measurement:
    tasks = tuple(
        task_of(
            task,
            "arithmetic",
            [
                ItemResult(
                    item=f"i{at}", language="en", correct=bool(one), truncated=False, wrong_script=False, finish_reason="stop",
                    prompt_tokens=None, output_tokens=None, answer=None,
                )
                for at, one in enumerate(rights)
            ],
        )
        for task, rights in right.items()
    )  # fmt: skip
    return make_measurement(label, load_recipe(SuiteRecipe, "quick")).model_copy(update={"tasks": tasks})


def drawn(rng: np.random.Generator, factor: float) -> tuple[Measurement, Measurement]:
    """Replies of reference and candidate to the tasks of `DESIGNS`, the candidate losing so many times each margin."""
    ours, theirs = {}, {}
    for design in DESIGNS:
        loss = factor * design.margin
        rate = max(design.discordance, loss)
        moves = rng.choice([1, -1, 0], p=[(rate + loss) / 2, (rate - loss) / 2, 1 - rate], size=design.num_items)
        ours[design.task], theirs[design.task] = moves >= 0, moves <= 0
    return side("fp8", ours), side("w4a16", theirs)


@pytest.mark.slow
@pytest.mark.parametrize("factor", [0.0, 1.5])
def test_the_verdicts_come_out_as_often_as_the_chances_say(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small suite of three tasks, judged by the verdicts' own code on replies that were drawn."""
    for beside in ("detectable", "needed"):  # nine tenths of the time; no status depends on them
        monkeypatch.setattr(Pairs, beside, lambda *args: 1)
    gates = tuple(ScoreGate(kind="score", task=one.task, max_drop=one.margin) for one in DESIGNS)
    recipe = GateRecipe.model_validate({"schema": 1, "name": "t", "gates": [gate.model_dump() for gate in gates]})
    rng, num_draws, seen = np.random.default_rng(6), 150, []
    for _ in range(num_draws):
        verdicts = judge_scores(gates, *drawn(rng, factor), recipe)
        seen.append([verdicts[one.task].status for one in DESIGNS])
    expected = chances(DESIGNS, [factor * one.margin for one in DESIGNS])
    four_sigma = 4 * 0.5 / np.sqrt(num_draws)
    assert np.mean([set(one) == {"PASS"} for one in seen]) == pytest.approx(expected.passes, abs=four_sigma)
    assert np.mean(["FAIL" in one for one in seen]) == pytest.approx(expected.fails, abs=four_sigma)
    alone = [np.mean([one[at] == "PASS" for one in seen]) for at in range(len(DESIGNS))]
    assert alone == pytest.approx(list(expected.passes_alone), abs=four_sigma)
