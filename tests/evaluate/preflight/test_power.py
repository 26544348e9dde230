"""Whether a suite can decide: what is assumed of its tasks, what is said, and what would raise it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy import stats
from statsmodels.stats.power import NormalIndPower

from assay.recipes.gate import GateRecipe, ScoreGate, WholeGate
from assay.recipes.load import load_recipe
from assay.recipes.model import ModelRecipe
from assay.recipes.suite import DivergenceSpec, SuiteRecipe
from assay.recipes.suite_files import as_model_asks
from assay.records.preflight.report import Check
from assay_evaluate.preflight.power import (
    SuitePower,
    advice,
    check_num_texts,
    check_power,
    cut_passes,
    lasting_passes,
    lossless_chances,
    suite_power,
)
from assay_evaluate.preflight.power_designs import Assumptions, gated_tasks, needed
from assay_evaluate.preflight.power_report import little_power
from assay_evaluate.statistics.joint.chances import Rules, chances_of
from assay_evaluate.statistics.joint.drawn import Assumption, LookDesign, ScoreDesign
from assay_evaluate.statistics.power import items_needed
from assay_pipeline.gate_choice import gates_of_suite, load_gates


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


def test_looks_items_and_discordances() -> None:
    """A task of each kind that is asked in another way: once, in rounds, with new items, in clusters."""
    asked = {"kind": "lm_eval", "temperature": 1.0, "max_tokens": 64}
    languages = ["mgsm_native_cot_de", "mgsm_native_cot_zh"]
    suite, gates = small(
        ARITHMETIC,
        asked | {"name": "gpqa", "tasks": ["gpqa_diamond_cot_zeroshot"], "num_samples": {"min": 1, "max": 3}},
        asked | {"name": "pro", "tasks": ["mmlu_pro"], "limit": {"min": 50, "max": 400}},
        asked | {"name": "mgsm", "tasks": languages, "translations": True},
        gates=[{"kind": "score", "task": task, "max_drop": 0.05} for task in ("sums", "gpqa", "pro", "mgsm")],
    )  # fmt: skip
    result, unknown = gated_tasks(suite, gates, Assumptions({"gpqa": 0.2, "pro": 0.1}, noise_of_others=0.5))
    assert unknown == []
    assert [one.design for one in result] == [
        ScoreDesign("sums", 0.05, Assumption(0.005, 0.5), (LookDesign(1, 1, 100),)),
        ScoreDesign(
            "gpqa", 0.05, Assumption(0.2, 0.5),
            (LookDesign(2, 1, 198, 4 / 9), LookDesign(2, 2, 198, 2 / 3), LookDesign(3, 3, 198, 1.0)),
        ),
        ScoreDesign(
            "pro", 0.05, Assumption(0.1, 0.5),
            tuple(LookDesign(2, 1, n, s) for n, s in ((700, 0.125), (1400, 0.25), (2800, 0.5), (5581, 1.0))),
        ),
        ScoreDesign("mgsm", 0.05, Assumption(0.05, 0.5), (LookDesign(1, 1, 500),), cluster_sizes=(2,) * 250),
    ]  # fmt: skip


@pytest.mark.slow
def test_a_suite_that_seldom_passes_a_lossless_candidate_says_so_and_what_would_help() -> None:
    assert check_power(*full()).outcome == "PASS"  # with its ranges
    suite, gates = full_asked_once()
    aime = {one.task: one for one in gates.gates if isinstance(one, ScoreGate)}["aime"]
    margins = tuple(one.model_copy(update={"max_drop": 0.15}) if one is aime else one for one in gates.gates)
    gates = gates.model_copy(update={"whole": None, "gates": margins})  # as before decisions 114, 124 and 152
    check = check_power(suite, gates)
    assert (check.check, check.subject, check.outcome) == ("power", "full", "UNKNOWN")
    assert check.remedy is not None
    assert "replies to each item of gpqa-diamond (num_samples)" in check.remedy
    result = suite_power(suite, gates)
    assert result is not None
    assert 0.05 < result.all_gates.lossless.passes < 0.15  # by an audit with other draws 8 %
    assert {one.gate.task for _, one in result.weak[:2]} == {"gpqa-diamond", "gsm8k"}


def test_a_suite_that_can_decide_passes() -> None:
    check = check_power(*small(ARITHMETIC, gates=[{"kind": "score", "task": "sums", "max_drop": 0.1}]))
    assert (check.outcome, check.remedy) == ("PASS", None)
    assert check.detail.startswith("an identical copy passes with 100 %, 100 % to 100 %")


@pytest.mark.parametrize(
    ("languages", "num_documents", "gate", "detail"),
    [
        (["en"], 8, {}, "divergence kl_mean: 8 texts are scored, and fewer than 20 are never judged: no candidate can pass"),
        (["en"], 20, {}, None),
        (["en", "zh"], 10, {}, None),
        (["en"], 8, {"decides": "fail"}, None),  # what it does not judge stands against nobody
        (["en"], 8, {"texts": "held_out"}, None),
    ],
)
def test_texts_too_few_to_be_judged(languages: list[str], num_documents: int, gate: dict[str, str], detail: str | None) -> None:
    divergence = {"kind": "divergence", "metric": "kl_mean", "max": 0.1} | gate
    suite, gates = small(ARITHMETIC, gates=[divergence])
    spec = DivergenceSpec(languages=tuple(languages), num_documents=num_documents, max_tokens=9)
    check = check_num_texts(suite.model_copy(update={"divergence": spec}), gates)
    assert check == (
        detail and Check(
            check="power", subject="small", outcome="UNKNOWN", detail=detail, remedy="set num_documents of divergence to 20"
        )
    )  # fmt: skip
    assert check_num_texts(suite, gates) is None


def test_what_the_headline_leaves_out() -> None:
    """Items that changed for good spread the difference whatever the number of replies; 1 % of cut replies shift it by a
    point."""
    task = {"kind": "arithmetic", "name": "sums", "languages": ["en"], "num_items": 400, "max_tokens": 9, "num_samples": 4,
            "temperature": 1.0}  # fmt: skip
    suite, gates = small(task, gates=[{"kind": "score", "task": "sums", "max_drop": 0.02}])
    result = suite_power(suite, gates, Assumptions({"sums": 0.06}))
    assert result is not None
    copy, lasting, cut = result.all_gates.lossless.passes, lasting_passes(result, gates), cut_passes(result, gates)

    def by_normal(noise: float, loss: float) -> float:
        spread = np.sqrt(0.06 * (1 - noise + noise / 4) / 400)
        return float(stats.norm.cdf((0.02 - loss) / spread - stats.norm.ppf(0.975)))

    assert copy == pytest.approx(by_normal(1.0, 0.0), abs=0.07)
    assert lasting == {"0.5": pytest.approx(by_normal(0.5, 0.0), abs=0.07), "0.75": pytest.approx(by_normal(0.25, 0), abs=0.07)}
    assert cut == pytest.approx(by_normal(1.0, 0.01), abs=0.1)
    assert copy > lasting["0.5"] > lasting["0.75"] and copy > cut


def test_gates_that_are_not_required_are_counted_apart() -> None:
    needle = {"kind": "needle", "name": "few", "languages": ["en"], "num_items": 29, "max_tokens": 64}
    gates = [
        {"kind": "score", "task": "sums", "max_drop": 0.1},
        {"kind": "score", "task": "few", "max_drop": 0.1, "required": False},
    ]
    suite, limits = small(ARITHMETIC, needle, gates=gates)
    result = suite_power(suite, limits)
    assert isinstance(result, SuitePower)
    assert result.required is not None
    assert (result.all_gates.lossless.passes, result.required.lossless.passes) == (0.0, 1.0)  # 29 items never pass
    check = check_power(suite, limits)
    assert "0 % (100 % if the reference cannot do the tasks whose gates are not required)" in check.detail
    assert check.remedy == "2 times the items of few: it would pass with 99 %"
    observed = lossless_chances(suite, limits)
    assert observed is not None and observed[1] is not None
    assert little_power(suite.name, observed[0].passes, observed[1].passes) == (
        "suite small passes a candidate that lost nothing with 0 % only (100 % if the reference cannot do the optional tasks), "
        "else it is UNDERPOWERED: `assay power` says what would raise it"
    )
    assert little_power(suite.name, 0.5, None) is None


def test_a_task_of_unknown_length_is_named() -> None:
    check = check_power(*small(ARITHMETIC, MINE, gates=[{"kind": "score", "task": "mine", "max_drop": 0.1}]))
    assert check.outcome == "UNKNOWN"
    assert check.detail.startswith("the chance that an identical copy passes cannot be told: mine: how many items it has")


def test_without_a_limit_on_a_score_nothing_can_pass() -> None:
    check = check_power(*small(ARITHMETIC, gates=[{"kind": "truncation", "max_share": 0.05}]))
    assert (check.outcome, check.remedy) == ("UNKNOWN", "write a score gate")


@pytest.mark.parametrize(
    ("name", "num_items", "num_clusters"), [("swe-verified", 500, 12), ("swe-lite", 300, 12), ("swe-multilingual", 300, 42)]
)
def test_repositories_of_swe_bench_are_clusters(name: str, num_items: int, num_clusters: int) -> None:
    suite = load_recipe(SuiteRecipe, name)
    gates = load_gates(gates_of_suite(suite), suite)
    such = gates.model_copy(update={"estimand": "such_items"})
    ((result,), _) = gated_tasks(suite, such, Assumptions())
    design = result.design
    assert (design.num_items, sum(design.cluster_sizes), len(design.cluster_sizes)) == (num_items, num_items, num_clusters)
    ((these,), _) = gated_tasks(suite, such.model_copy(update={"estimand": "these_clusters"}), Assumptions())
    assert (these.design.num_items, these.design.cluster_sizes) == (num_items, ())
    # A dozen repositories of which one has half of the instances allow no claim about others; 42 of seven do.
    assert gates.estimand == ("such_items" if num_clusters == 42 else "these_clusters")


# ------------------------------------------------------------------------------------------------ what would raise it
NEEDLE = {"kind": "needle", "name": "needles", "languages": ["en"], "num_items": 100, "max_tokens": 64}
BOTH = [{"kind": "score", "task": "sums", "max_drop": 0.04}, {"kind": "score", "task": "needles", "max_drop": 0.04}]
UNSTEADY = Assumptions({"sums": 0.06, "needles": 0.06})


@pytest.mark.slow
def test_the_claim_about_the_whole_counts_in_together() -> None:
    suite, gates = small(ARITHMETIC, NEEDLE, gates=BOTH)
    plain = suite_power(suite, gates, UNSTEADY)
    claimed = suite_power(suite, gates.model_copy(update={"whole": WholeGate(max_mean_use=0.9, max_task=3.0)}), UNSTEADY)
    assert plain is not None and claimed is not None
    assert claimed.all_gates.lossless.passes_alone == plain.all_gates.lossless.passes_alone
    assert plain.all_gates.lossless.whole_passes is None
    assert claimed.all_gates.lossless.whole_passes == claimed.all_gates.lossless.passes
    assert claimed.all_gates.lossless.passes > plain.all_gates.lossless.passes + 0.1


@pytest.mark.slow
@pytest.mark.parametrize("whole", [None, WholeGate()])
def test_what_is_advised_is_enough(whole: WholeGate | None) -> None:
    """The suite with the items that are advised passes a lossless candidate with 80 % or more, and with fewer it does not."""
    suite, gates = small(ARITHMETIC, gates=BOTH[:1])
    gates = gates.model_copy(update={"whole": whole})
    result = suite_power(suite, gates, UNSTEADY)
    assert result is not None and result.all_gates.lossless.passes < 0.8
    text = advice(result, gates, UNSTEADY)
    assert text is not None
    times = int(text.split(" times the items of sums", 1)[0])
    for factor, is_enough in ((times, True), (times // 2, False)):
        task = ARITHMETIC | {"num_items": 100 * factor}
        then = suite_power(small(task, gates=BOTH[:1])[0], gates, UNSTEADY)
        assert then is not None
        assert (then.all_gates.lossless.passes >= 0.8) == is_enough


# ------------------------------------------------------------------------------------------------ how many are needed
def asked(num_items: int, replies: int = 1, noise: float = 1.0) -> ScoreDesign:
    return ScoreDesign("t", 0.05, Assumption(0.12, noise), (LookDesign(replies, replies, num_items),))


@pytest.mark.parametrize("loss", [0.0, 0.02])
def test_items_needed_are_those_of_the_exact_power_and_of_the_normal_test(loss: float) -> None:
    rules = Rules()
    assert needed(asked(198), rules, 0.8, loss=loss).items == items_needed(0.05, 0.12, 0.8, loss=loss)
    result = needed(asked(198, 4, 0.5), rules, 0.8, loss=loss).items
    effect = (0.05 - loss) / (0.12 * (0.5 + 0.5 / 4)) ** 0.5
    exact = NormalIndPower(ddof=0).solve_power(effect, None, 0.025, 0.8, ratio=0, alternative="larger")
    assert result == math.ceil(exact)


def test_replies_needed_are_enough_and_not_one_too_many() -> None:
    """By drawing: with so many replies to each item the gate passes 4 times in 5, with one less it does not."""
    replies = needed(asked(198, noise=0.8), Rules(), 0.8).replies
    assert replies is not None and replies > 1
    passes = [chances_of([asked(198, k, 0.8)], [0.0], Rules()).passes for k in (replies, replies - 1)]
    assert passes[0] > 0.8 - 0.02 and passes[1] < 0.8


@pytest.mark.parametrize(
    ("design", "options", "expected"),
    [
        (asked(198, noise=0.0), {}, None),  # the sides differ for good: no number of replies is enough
        (asked(198), {"can_repeat": False}, None),
        (asked(20), {}, None),
        (asked(198), {"loss": 0.05}, None),
        (asked(100_000), {}, 1),
    ],
)
def test_replies_that_no_number_of_is_enough(design: ScoreDesign, options: dict[str, Any], expected: int | None) -> None:
    assert needed(design, Rules(), 0.8, **options).replies == expected


def test_no_number_of_items_shows_that_a_loss_is_less_than_itself() -> None:
    assert needed(asked(198), Rules(), 0.8, loss=0.0499).items is None
