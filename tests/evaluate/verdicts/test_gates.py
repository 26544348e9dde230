"""The gate's truth table, verdict by verdict, and what it refuses to compare."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy import stats
from synthetic_run import make_divergence, make_measurement, make_measurements, task_of

from assay.errors import MeasureError
from assay.quantities import lost_or_gained
from assay.recipes.gate import GateRecipe
from assay.recipes.load import load_recipe
from assay.recipes.suite import SuiteRecipe
from assay.records.base import Interval, sha256_of
from assay.records.measurement import Acceptance, ItemResult, Measurement
from assay.records.verdict import GateReport, RegisteredGates, Status, Verdict
from assay_evaluate.asking.session import task_result
from assay_evaluate.statistics.clustered import cluster_bootstrap_mean
from assay_evaluate.statistics.decisions import inferiority_p, noninferiority_p
from assay_evaluate.statistics.drafts import paired_acceptance_difference
from assay_evaluate.statistics.graded import graded_difference
from assay_evaluate.statistics.paired import mcnemar_midp, paired_difference
from assay_evaluate.statistics.power import items_for_margin, items_needed, minimum_detectable_effect
from assay_evaluate.verdicts.acceptance import drafts_by_prompt
from assay_evaluate.verdicts.gates import judge
from assay_evaluate.verdicts.score_sentences import change, open_question

SUITE = load_recipe(SuiteRecipe, "quick")
Change = Callable[[Measurement], Measurement]


def recipe(*gates: dict[str, Any]) -> GateRecipe:
    return GateRecipe.model_validate({"schema": 1, "name": "test", "gates": list(gates)})


SCORE = {"kind": "score", "task": "arithmetic", "max_drop": 0.05}
TRUNCATION = {"kind": "truncation", "max_share": 0.05}


def answers(n: int, wrong: range = range(0), *, truncated: int = 0, failed: range = range(0)) -> tuple[ItemResult, ...]:
    """n items, right but for `wrong`; the first `truncated` cut off; `failed` without a reply."""
    return tuple(
        ItemResult(
            item=f"i{i}", language="en", correct=None if i in failed else i not in wrong, truncated=i < truncated,
            wrong_script=False, finish_reason="length" if i < truncated else "stop", prompt_tokens=20, output_tokens=30,
            answer="1", error="HTTP 500" if i in failed else None,
        )
        for i in range(n)
    )  # fmt: skip


def measured(label: str, items: tuple[ItemResult, ...] | None, **changes: Any) -> Measurement:
    """A measurement whose only task is `arithmetic` with these items; None: it has no task at all."""
    tasks = () if items is None else (task_of("arithmetic", "arithmetic", list(items)),)
    return make_measurement(label, SUITE).model_copy(update={"tasks": tasks, **changes})


def judged(reference: Measurement, candidate: Measurement, gates: GateRecipe) -> GateReport:
    return judge([reference, candidate], gates, model="tiny-glm")


@pytest.mark.parametrize(
    ("n", "only_reference", "only_candidate", "status"),
    [
        (10, 0, 0, "UNDERPOWERED"),  # ten clean items never pass
        (72, 0, 0, "UNDERPOWERED"),
        (73, 0, 0, "PASS"),
        (200, 2, 0, "PASS"),
        (200, 6, 0, "UNDERPOWERED"),
        (200, 14, 0, "UNDERPOWERED"),  # 7 points seen, significant, but 5 lies inside the interval
        (200, 40, 0, "FAIL"),
        (200, 40, 40, "UNDERPOWERED"),  # no loss, but too much disagreement for 200 items
        (200, 0, 40, "PASS"),  # better than the reference
    ],
)
def test_score_truth_table(n: int, only_reference: int, only_candidate: int, status: Status) -> None:
    reference = measured("fp8", answers(n, range(only_candidate)))
    candidate = measured("w4a16", answers(n, range(n - only_reference, n)))
    report = judged(reference, candidate, recipe(SCORE))
    drop = paired_difference(only_reference, only_candidate, n)
    verdict = report.verdicts[0]
    needed = max(30, items_for_margin(only_reference, only_candidate, n, 0.05))
    discordance = (only_reference + only_candidate) / n
    at_loss = items_needed(0.05, discordance, loss=drop.value) if 0 < drop.value < 0.05 else None
    assert verdict.model_dump(exclude={"detail"}) == {
        "gate": "score arithmetic",
        "candidate": "w4a16",
        "status": status,
        "observed": drop.model_dump(),
        "limit": 0.05,
        "minimum_detectable_effect": minimum_detectable_effect(only_reference, only_candidate, n),
        "discordant": (only_reference, only_candidate),
        "num_wrong_to_other_wrong": 0,
        "p_value": mcnemar_midp(only_reference, only_candidate),
        "p_value_holm": mcnemar_midp(only_reference, only_candidate),
        "p_pass": noninferiority_p(only_reference, only_candidate, n, 0.05),
        "p_fail": inferiority_p(only_reference, only_candidate, n, 0.05),
        "p_fail_holm": inferiority_p(only_reference, only_candidate, n, 0.05),
        "title": None,
        "clause": f"{change(drop)} on arithmetic; {'a loss of 5 is' if drop.value < 0 else '5'} allowed",
        "items_needed": needed,
        "items_needed_at_loss": at_loss,
        "mean_output_tokens": (30.0, 30.0),
        "extra_output_tokens": {"value": 0.0, "low": 0.0, "high": 0.0, "n": n, "level": 0.95},
        "looks": (),
        "worst_case": None,
        "estimand": "such_items",
        "faults": (),
        "has_say": True,
    }
    assert report.overall == {"w4a16": status}
    assert (drop.high < 0.05, drop.low > 0.05) == (status == "PASS", status == "FAIL")


def test_whole_verdict_of_a_score() -> None:
    theirs = tuple(
        replace(item, output_tokens=30 + 2 * (i % 2), answer="2" if i < 4 else "1")
        for i, item in enumerate(answers(200, range(6), failed=range(198, 200)))
    )
    report = judged(measured("fp8", answers(200, range(2))), measured("w4a16", theirs), recipe(SCORE))
    verdict = report.verdicts[0]
    extra = cluster_bootstrap_mean([2.0 * (i % 2) for i in range(200)], np.arange(200))
    assert verdict == Verdict(
        estimand="such_items",
        gate="score arithmetic",
        candidate="w4a16",
        status="UNDERPOWERED",
        observed=paired_difference(4, 0, 198),
        limit=0.05,
        detail=(
            "Loses 2.0 points on arithmetic (interval of at least 95 %: 0.1 to 5.1 lost); 5 allowed. There is a real loss, but "
            "the data cannot tell whether it exceeds 5 points; about 337 items give a PASS 4 times in 5 if 2 points are the "
            "truth, which may be 0.1 to 5.1 lost."
        ),
        clause="loses 2.0 points on arithmetic; 5 allowed",
        minimum_detectable_effect=minimum_detectable_effect(4, 0, 198),
        discordant=(4, 0),
        num_wrong_to_other_wrong=2,
        p_value=mcnemar_midp(4, 0),
        p_value_holm=mcnemar_midp(4, 0),
        p_pass=noninferiority_p(4, 0, 198, 0.05),
        p_fail=inferiority_p(4, 0, 198, 0.05),
        p_fail_holm=inferiority_p(4, 0, 198, 0.05),
        items_needed=items_for_margin(4, 0, 198, 0.05),
        items_needed_at_loss=items_needed(0.05, 4 / 198, loss=4 / 198),
        mean_output_tokens=(30.0, 31.0),
        extra_output_tokens=extra,
    )


QUOTA = "HTTP 200 with an error in it (429): Provider returned error: quota of 5 requests exceeded"


@pytest.mark.parametrize(
    ("failed", "max_excluded", "status"),
    [(2, 0.01, "PASS"), (3, 0.01, "NOT MEASURED"), (3, 0.02, "PASS"), (1, 0.0, "NOT MEASURED")],
)
@pytest.mark.parametrize("side", ["fp8", "w4a16"])
def test_too_many_excluded_items_are_not_measured(failed: int, max_excluded: float, status: Status, side: str) -> None:
    gates = recipe(SCORE, {"kind": "truncation", "max_share": 1.0}).model_copy(update={"max_excluded": max_excluded})
    items = {label: answers(200, failed=range(failed if label == side else 0)) for label in ("fp8", "w4a16")}
    items[side] = [
        item if item.correct is not None else replace(item, error="not asked: HTTP 200" if i == 0 < failed - 1 else QUOTA)
        for i, item in enumerate(items[side])
    ]
    sides = {label: measured(label, item) for label, item in items.items()}
    verdict = judged(sides["fp8"], sides["w4a16"], gates).verdicts[0]
    assert verdict.status == status
    if status == "NOT MEASURED":
        assert verdict.detail == (
            f"{failed} of 200 items of arithmetic have no reply on one side or both ({failed / 2:g} %, allowed "
            f"{100 * max_excluded:g} %): the others may not be a fair sample; {side} lacks {failed}, most often: {QUOTA}. "
            "Run the evaluation again; it asks only what is missing."
        )


@pytest.mark.parametrize(("max_drop", "n", "status"), [(0.5, 10, "UNDERPOWERED"), (0.5, 29, "UNDERPOWERED"), (0.5, 30, "PASS")])
def test_few_items_never_pass_whatever_the_margin(max_drop: float, n: int, status: Status) -> None:
    assert paired_difference(0, 0, n).high < max_drop  # by the interval alone it would
    report = judged(measured("fp8", answers(n)), measured("w4a16", answers(n)), recipe({**SCORE, "max_drop": max_drop}))
    assert report.verdicts[0].status == status
    assert ("Fewer than 30 items never pass" in report.verdicts[0].detail) == (status != "PASS")


@pytest.mark.parametrize("discordant", [0, 4, 12])
def test_the_proposed_number_of_items_passes_an_equal_candidate(discordant: int) -> None:
    """What an UNDERPOWERED verdict proposes, asked: the copy passes, at the same share of discordant pairs."""
    few = 60
    half = discordant // 2
    first = judged(
        measured("fp8", answers(few, range(half))), measured("w4a16", answers(few, range(half, 2 * half))), recipe(SCORE)
    )
    assert first.verdicts[0].status == "UNDERPOWERED"
    needed = first.verdicts[0].items_needed
    assert needed is not None
    assert f"about {needed} items give a PASS" in first.verdicts[0].detail
    more = round(needed * half / few)
    again = judged(
        measured("fp8", answers(needed, range(more))), measured("w4a16", answers(needed, range(more, 2 * more))), recipe(SCORE)
    )
    assert again.verdicts[0].status == "PASS"


@pytest.mark.parametrize(
    ("only_reference", "only_candidate", "status"),
    [(0, 0, "PASS"), (0, 40, "FAIL"), (40, 0, "FAIL"), (0, 8, "UNDERPOWERED"), (8, 0, "UNDERPOWERED")],
)
def test_equivalence_looks_both_ways(only_reference: int, only_candidate: int, status: Status) -> None:
    gates = recipe({**SCORE, "claim": "equivalent"})
    reference = measured("fp8", answers(200, range(only_candidate)))
    candidate = measured("w4a16", answers(200, range(200 - only_reference, 200)))
    verdict = judged(reference, candidate, gates).verdicts[0]
    assert verdict.status == status
    assert verdict.items_needed == items_for_margin(only_reference, only_candidate, 200, 0.05, power=0.9)


def several(label: str, wrong: dict[str, int]) -> Measurement:
    tasks = tuple(task_of(name, "arithmetic", list(answers(200, range(count)))) for name, count in wrong.items())
    return measured(label, ()).model_copy(update={"tasks": tasks})


def test_one_bad_task_among_many_may_be_chance() -> None:
    """18 of 200 lost: beyond five points at one-sided 2.5 % alone, not among ten tasks."""
    names = [f"t{i}" for i in range(10)]
    gates = recipe(*({"kind": "score", "task": name, "max_drop": 0.05} for name in names))
    wrong = {name: 18 if name == "t3" else 0 for name in names}
    reference, candidate = several("fp8", dict.fromkeys(names, 0)), several("w4a16", wrong)
    assert inferiority_p(18, 0, 200, 0.05) < 0.025 < 10 * inferiority_p(18, 0, 200, 0.05)
    report = judged(reference, candidate, gates)
    assert [v.status for v in report.verdicts] == ["PASS" if name != "t3" else "UNDERPOWERED" for name in names]
    assert report.verdicts[3].detail == (
        "Loses 9.0 points on t3 (95 % interval: 5.4 to 13.8 lost); 5 allowed. By itself this fails, but among 10 tasks such a "
        "loss may be chance (Holm)."
    )
    p = inferiority_p(18, 0, 200, 0.05)
    assert (report.verdicts[3].p_fail, report.verdicts[3].p_fail_holm) == (p, pytest.approx(10 * p))
    assert report.verdicts[3].p_value_holm == pytest.approx(10 * mcnemar_midp(18, 0))
    plain = judged(reference, candidate, gates.model_copy(update={"adjust": "none"}))
    assert plain.verdicts[3].status == "FAIL"
    worse = judged(reference, several("w4a16", {**wrong, "t3": 30}), gates)
    assert worse.verdicts[3].status == "FAIL"


def test_a_task_that_was_not_measured_costs_the_others_nothing() -> None:
    names = ["t0", "t1"]
    gates = recipe(*({"kind": "score", "task": name, "max_drop": 0.05} for name in names))
    report = judged(several("fp8", {"t0": 0}), several("w4a16", {"t0": 18}), gates)
    assert [v.status for v in report.verdicts] == ["FAIL", "NOT MEASURED"]


def test_the_gate_file_is_identified() -> None:
    gates = recipe(SCORE)
    sides = [measured(label, answers(200)) for label in ("fp8", "w4a16")]
    other = recipe({**SCORE, "max_drop": 0.06})
    copy = gates.model_dump(mode="json", by_alias=True)
    registered = RegisteredGates(named="my.yaml", recipe=copy, sha256=sha256_of(copy))
    judged_by = {
        which: judge(sides, entry, model="tiny-glm", registered=note)
        for which, entry, note in (("same", gates, registered), ("other", other, registered), ("unknown", gates, None))
    }
    assert {which: (r.gate_recipe_sha256, r.registered_sha256, r.chosen) for which, r in judged_by.items()} == {
        "same": (gates.sha256, gates.sha256, "before the run"),
        "other": (other.sha256, gates.sha256, "after the run"),
        "unknown": (gates.sha256, None, "not recorded"),
    }
    with pytest.raises(ValueError, match="two score gates for task arithmetic"):
        recipe(SCORE, SCORE)


@pytest.mark.parametrize(
    ("reference_items", "candidate_items", "detail"),
    [
        (answers(9), None, "arithmetic has no score for w4a16: budget spent."),
        (None, answers(9), "arithmetic has no score for fp8: budget spent."),
        (answers(9), answers(9, failed=range(9)), "arithmetic has no score for w4a16: budget spent."),
        (answers(9, failed=range(5)), answers(9, failed=range(5, 9)), "No item of arithmetic was answered by both sides."),
    ],
)
def test_a_missing_score_is_not_measured(
    reference_items: tuple[ItemResult, ...] | None, candidate_items: tuple[ItemResult, ...] | None, detail: str
) -> None:
    reason = {"not_measured": {"arithmetic": "budget spent"}}
    report = judged(measured("fp8", reference_items, **reason), measured("w4a16", candidate_items, **reason), recipe(SCORE))
    assert report.verdicts == (
        Verdict(gate="score arithmetic", candidate="w4a16", status="NOT MEASURED", observed=None, limit=0.05, detail=detail),
    )
    assert report.overall == {"w4a16": "NOT MEASURED"}


def interval(value: float, low: float, high: float) -> Interval:
    return Interval(value=value, low=low, high=high, n=100)


def kl(unbiased: Interval, *, bound: Interval | None = None) -> dict[str, Any]:
    """Of a divergence over a hundred texts, without drift."""
    return {"kl_mean": unbiased if bound is None else bound, "kl_corrected_mean": unbiased, "drift": ()}


@pytest.mark.parametrize(
    ("gate", "changes", "status", "detail"),
    [
        ({"metric": "kl_mean", "max": 0.1}, kl(interval(0.02, 0.01, 0.03)), "PASS",
         "KL, unbiased: 0.02 nats (95 % interval: 0.01 to 0.03); allowed at most 0.1 nats. Damage in fewer than 1 of 27 such "
         "texts may not be among these 100. A small divergence does not show that answers are as good."),
        ({"metric": "kl_mean", "max": 0.1}, kl(interval(0.2, 0.15, 0.3)), "FAIL",
         "KL, unbiased: 0.2 nats (95 % interval: 0.15 to 0.3); allowed at most 0.1 nats."),
        ({"metric": "kl_mean", "max": 0.1}, kl(interval(0.1, 0.08, 0.12)), "UNDERPOWERED",
         "KL, unbiased: 0.1 nats (95 % interval: 0.08 to 0.12); allowed at most 0.1 nats, which lies inside the interval."),
        ({"metric": "kl_mean", "max": 0.1, "decides": "fail"}, kl(interval(0.1, 0.08, 0.12)), "UNDERPOWERED",
         "KL, unbiased: 0.1 nats (95 % interval: 0.08 to 0.12); allowed at most 0.1 nats, which lies inside the interval. "
         "It does not stand against a PASS."),
        ({"metric": "kl_mean", "max": 0.1}, kl(interval(2.23, 2.06, 2.52), bound=interval(0.0215, 0.0201, 0.0236)), "FAIL",
         "KL, unbiased: 2.23 nats (95 % interval: 2.06 to 2.52); allowed at most 0.1 nats."),
        ({"metric": "kl_mean", "max": 0.1}, kl(interval(2.23, -1.5, 6.1), bound=interval(0.02, 0.01, 0.03)), "UNDERPOWERED",
         "KL, unbiased: 2.23 nats (95 % interval: -1.5 to 6.1); allowed at most 0.1 nats, which lies inside the interval."),
        ({"metric": "kl_mean", "max": 0.1}, kl(interval(0.3, -0.2, 0.8), bound=interval(0.2, 0.15, 0.3)), "FAIL",
         "KL, lower bound: 0.2 nats (95 % interval: 0.15 to 0.3); allowed at most 0.1 nats."),
        ({"metric": "kl_mean", "max": 0.1}, kl(interval(0.02, 0.01, 0.03)) | {"sampling_gap": interval(0.4, 0.3, 0.5)},
         "NOT MEASURED",
         "KL, lower bound: 0.02 nats (95 % interval: 0.01 to 0.03); allowed at most 0.1 nats; a lower bound can fail a "
         "candidate and not pass one: the texts' tokens are +0.4 nats (+0.3 to +0.5) more surprising to the reference than its "
         "own entropy, so they were not sampled from these log-probabilities at temperature 1: see to the reference's sampler, "
         "and that its server gives natural logarithms without a temperature."),
        ({"metric": "kl_mean", "max": 0.1}, kl(interval(0.02, 0.01, 0.03)) | {"sampling_gap": interval(0.06, 0.005, 0.115)},
         "PASS",
         "KL, unbiased: 0.02 nats (95 % interval: 0.01 to 0.03); allowed at most 0.1 nats. Damage in fewer than 1 of 27 such "
         "texts may not be among these 100. A small divergence does not show that answers are as good."),
        ({"metric": "kl_mean", "max": 0.1, "max_unseen": 0.02}, kl(interval(0.02, 0.01, 0.03)), "UNDERPOWERED",
         "KL, unbiased: 0.02 nats (95 % interval: 0.01 to 0.03); allowed at most 0.1 nats; but damage in 1 text of 50 "
         "(max_unseen 2 %) may be missing among 100: that takes 183."),
        ({"metric": "kl_p99", "max": 0.5}, {"kl_p99": 0.7}, "FAIL",
         "kl_p99, lower bound: 0.7 nats (no interval); allowed at most 0.5 nats."),
        ({"metric": "kl_p99", "max": 0.5}, {"kl_p99": 0.3}, "NOT MEASURED",
         "kl_p99, lower bound: 0.3 nats (no interval); allowed at most 0.5 nats; a lower bound can fail a candidate and not "
         "pass one: only the mean has an unbiased estimate; `divergence: {exact: true}` in the suite measures it, where the "
         "checkpoints are folders."),
        ({"metric": "top1_agreement", "min": 0.9}, {"top1_agreement": interval(0.8, 0.78, 0.82)}, "FAIL",
         "top1_agreement 0.8 (95 % interval: 0.78 to 0.82); allowed at least 0.9."),
        ({"metric": "top1_agreement", "min": 0.9}, {"top1_agreement": interval(0.95, 0.94, 0.96)}, "PASS",
         "top1_agreement 0.95 (95 % interval: 0.94 to 0.96); allowed at least 0.9. A small divergence does not show that "
         "answers are as good."),
        ({"metric": "kl_mean", "max": 0.1}, {"num_non_finite": 3}, "NOT MEASURED",
         "3 of 9216 positions had no finite log-probability: a mean over the others would hide them."),
    ],
)  # fmt: skip
def test_divergence_truth_table(gate: dict[str, Any], changes: dict[str, Any], status: Status, detail: str) -> None:
    divergence = make_divergence("w4a16").model_copy(update=changes)
    candidate = measured("w4a16", answers(200), divergence=divergence)
    report = judged(measured("fp8", answers(200)), candidate, recipe(SCORE, {"kind": "divergence", **gate}))
    assert (report.verdicts[1].status, report.verdicts[1].detail) == (status, detail)
    assert report.overall == {"w4a16": status if gate.get("decides") != "fail" else "PASS"}


def test_missing_divergence_is_not_measured() -> None:
    gate = {"kind": "divergence", "metric": "kl_mean", "max": 0.1}
    candidate = measured("w4a16", answers(200), divergence=None, not_measured={"divergence": "no prompt log-probabilities"})
    report = judged(measured("fp8", answers(200)), candidate, recipe(SCORE, gate))
    assert report.verdicts[1].detail == "No divergence for w4a16: no prompt log-probabilities."
    assert report.overall == {"w4a16": "NOT MEASURED"}


def test_divergence_alone_never_certifies() -> None:
    gates = recipe({"kind": "divergence", "metric": "kl_mean", "max": 0.1})
    report = judged(measured("fp8", answers(200)), measured("w4a16", answers(200)), gates)
    assert [v.status for v in report.verdicts] == ["PASS"]
    assert report.overall == {"w4a16": "NOT MEASURED"}


def acceptance(accepted: int, drafted: int = 10_000) -> Acceptance:
    return Acceptance(
        num_drafts=drafted, num_draft_tokens=drafted, num_accepted_tokens=accepted,
        rate=accepted / drafted if drafted else None, mean_length=1 + accepted / drafted if drafted else None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("theirs", "status"),
    [
        (acceptance(6900), "PASS"),
        (acceptance(100), "FAIL"),
        (acceptance(6000), "UNDERPOWERED"),
        (acceptance(0, 0), "NOT MEASURED"),
        (None, "NOT MEASURED"),
    ],
)
def test_acceptance_truth_table(theirs: Acceptance | None, status: Status) -> None:
    gates = recipe(SCORE, {"kind": "acceptance", "max_drop": 0.10})
    reference = measured("fp8", answers(200), acceptance=acceptance(7000))
    report = judged(reference, measured("w4a16", answers(200), acceptance=theirs), gates)
    assert report.verdicts[1].status == status
    assert report.overall == {"w4a16": status}


def test_an_interval_of_accepted_drafts_is_one_of_replies_or_says_that_it_is_not() -> None:
    gates = recipe(SCORE, {"kind": "acceptance", "max_drop": 0.10})
    sides = [acceptance(7000), acceptance(6500)]
    told = [
        side.model_copy(update={"num_replies": n, "rate_standard_error": 0.03}) for side, n in zip(sides, (60, 40), strict=True)
    ]
    details = {}
    for name, (reference, candidate) in {"by reply": told, "in total": sides, "half": (told[0], sides[1])}.items():
        report = judged(
            measured("fp8", answers(200), acceptance=reference), measured("w4a16", answers(200), acceptance=candidate), gates
        )
        details[name] = (report.verdicts[1].status, report.verdicts[1].detail)
    half = 100 * stats.t.ppf(0.975, 39) * np.hypot(0.03, 0.03)
    start = "70 % of drafted tokens accepted in fp8, 65 % in w4a16: loses 5.0 points "
    total = (
        "PASS",
        f"{start}(95 % interval: 3.7 to 6.3 lost if drafted tokens were independent; the server reports totals only, so how "
        "much replies differ is not known); 10 allowed.",
    )
    assert details == {
        "by reply": (
            "UNDERPOWERED",
            f"{start}(95 % interval: {half - 5:.1f} gained to {5 + half:.1f} lost, over 40 replies); 10 allowed: anything "
            "from no loss to more than 10 points is compatible with the data.",
        ),
        "in total": total,
        "half": total,
    }


def test_items_of_one_text_need_more_texts_and_not_fewer_items_than_were_asked() -> None:
    """`about 30 items give a PASS` was said of 100."""
    reference, candidate = (
        measured(label, tuple(replace(answer, cluster="text") for answer in answers(100, wrong)))
        for label, wrong in (("fp8", range(0)), ("w4a16", range(1)))
    )
    verdict = judged(reference, candidate, recipe(SCORE | {"max_drop": 0.3})).verdicts[0]
    assert (verdict.status, verdict.items_needed, verdict.items_needed_at_loss) == ("UNDERPOWERED", 1654, 1654)
    assert " 100 items share 1 question or text; 1 question or text counts as 1.0 of equal size" in verdict.detail


def test_one_reply_is_too_few_to_tell_whether_more_are_cut_off() -> None:
    verdict = judged(measured("fp8", answers(1)), measured("w4a16", answers(1)), recipe(SCORE, TRUNCATION)).verdicts[1]
    assert (verdict.status, verdict.detail) == ("NOT MEASURED", "No task has replies of both sides to two items or more.")


def drafted(rates: Iterable[float], *, second: int = 0) -> tuple[ItemResult, ...]:
    """One reply to each item, of whose hundred drafted tokens a share is accepted. second: so many more in a second one."""
    rates = list(rates)
    plain = answers(len(rates))
    first = [replace(i, drafted_tokens=100, accepted_tokens=round(100 * r)) for i, r in zip(plain, rates, strict=True)]
    more = [replace(i, sample=1, accepted_tokens=(i.accepted_tokens or 0) + second) for i in first] if second else []
    return (*first, *more)


def test_accepted_drafts_are_compared_prompt_by_prompt_where_replies_say_so() -> None:
    """Prompts differ by 50 points, the two sides by one: the interval is that of the differences."""
    gates = recipe(SCORE, {"kind": "acceptance", "max_drop": 0.02})
    rng = np.random.default_rng(2)
    before = rng.integers(45, 96, 200) / 100
    after = before - 0.01 + rng.integers(-3, 4, 200) / 100
    reference, candidate = (acceptance(round(100 * rates.sum()), 20_000) for rates in (before, after))
    told = [entry.model_copy(update={"num_replies": 200, "rate_standard_error": 0.0104}) for entry in (reference, candidate)]
    sides = [
        measured(label, drafted(rates), acceptance=entry)
        for label, rates, entry in zip(("fp8", "w4a16"), (before, after), told, strict=True)
    ]
    verdict = judged(*sides, gates).verdicts[1]
    t = stats.t.interval(0.95, 199, loc=(before - after).mean(), scale=stats.sem(before - after))
    assert verdict.observed is not None
    assert (verdict.status, verdict.observed.n) == ("PASS", 200)
    assert (verdict.observed.low, verdict.observed.high) == (
        pytest.approx(t[0]),
        pytest.approx(t[1], rel=0.002),
    )  # hardly skewed
    assert verdict.detail == (
        f"{100 * before.mean():.1f} % of drafted tokens accepted in fp8, {100 * after.mean():.1f} % in w4a16: loses "
        f"{100 * (before - after).mean():.1f} points (95 % interval: {100 * t[0]:.1f} to {100 * t[1]:.1f} lost, over 200 "
        "prompts that both answered); 2 allowed."
    )
    unpaired = [side.model_copy(update={"tasks": measured("w4a16", answers(200)).tasks}) for side in sides]
    assert judged(*unpaired, gates).verdicts[1].status == "UNDERPOWERED"


def test_drafts_of_a_few_long_replies_claim_nothing_of_other_prompts() -> None:
    gates = recipe(SCORE, {"kind": "acceptance", "max_drop": 0.10})
    items = [
        replace(entry, drafted_tokens=4000, accepted_tokens=2000) if number < 10 else entry
        for number, entry in enumerate(drafted([0.5] * 100))
    ]
    sides = [measured(label, tuple(items), acceptance=acceptance(24_500, 49_000)) for label in ("fp8", "w4a16")]
    verdict = judged(*sides, gates).verdicts[1]
    assert (verdict.status, verdict.detail) == (
        "UNDERPOWERED",
        "50 % of drafted tokens accepted in fp8, 50 % in w4a16: shows no change (95 % interval: 0.0 gained to 100.0 lost, over "
        "100 prompts that both answered); 10 allowed: anything from no loss to more than 10 points is compatible with the "
        "data; a few prompts have most of the drafted tokens, so that 100 count as 14.9 of equal length: a drop in one prompt "
        "of five is in none of them with a chance of 3.6 %.",
    )


def test_replies_to_one_prompt_are_one_prompt() -> None:
    reference = measured("fp8", drafted([0.5] * 40, second=20))
    candidate = measured("w4a16", drafted([0.4] * 40))
    assert drafts_by_prompt(reference, candidate) == [(200, 120, 100, 40)] * 40
    floor = candidate.tasks[0].model_copy(update={"is_second_replies": True})
    assert drafts_by_prompt(reference, candidate.model_copy(update={"tasks": (floor,)})) == [(100, 50, 100, 40)] * 40
    assert paired_acceptance_difference([(100, 50, 100, 50)] * 40, 0.95).high == pytest.approx(3 / 4000)
    with pytest.raises(ValueError, match="a side drafted nothing"):
        paired_acceptance_difference([(100, 50, 0, 0)] * 40, 0.95)


@pytest.mark.parametrize("theirs", [acceptance(0), acceptance(7000), acceptance(0, 0), None])
@pytest.mark.parametrize(("accepted", "share"), [(0, "0 %"), (1000, "10 %")])
def test_a_reference_whose_drafts_are_not_accepted_shows_nothing(accepted: int, share: str, theirs: Acceptance | None) -> None:
    gates = recipe(SCORE, {"kind": "acceptance", "max_drop": 0.10})
    reference = measured("fp8", answers(200), acceptance=acceptance(accepted))
    report = judged(reference, measured("w4a16", answers(200), acceptance=theirs), gates)
    assert (report.verdicts[1].status, report.verdicts[1].has_say, report.verdicts[1].detail) == (
        "NOT MEASURED",
        False,
        f"{share} of drafted tokens accepted in fp8 itself: it has less than 10 points to lose, so a damaged draft head would "
        "not show. This does not count in the overall verdict.",
    )
    assert report.overall == {"w4a16": "PASS"}
    assert report.reasons == {"w4a16": f"{WITHIN}; 1 gate passed, 1 not measured: acceptance"}
    failed = judged(reference, measured("w4a16", answers(200, range(40)), acceptance=theirs), gates)
    assert failed.overall == {"w4a16": "FAIL"}


def test_a_model_without_a_draft_head_is_not_held_up_by_acceptance() -> None:
    gates = recipe(SCORE, {"kind": "acceptance", "max_drop": 0.10})
    sides = [measured(label, answers(200), acceptance=None) for label in ("fp8", "w4a16")]
    plain = [m.model_copy(update={"fingerprint": m.fingerprint.model_copy(update={"speculation": None})}) for m in sides]
    report = judged(plain[0], plain[1], gates)
    assert [v.status for v in report.verdicts] == ["PASS", "NOT MEASURED"]
    assert (report.verdicts[1].has_say, report.verdicts[1].detail) == (
        False,
        "Neither fp8 nor w4a16 was served with speculative decoding, so nothing was drafted. This does not count in the "
        "overall verdict.",
    )
    assert report.overall == {"w4a16": "PASS"}
    assert report.reasons == {"w4a16": f"{WITHIN}; 1 gate passed, 1 not measured: acceptance"}


def test_drafts_of_given_servers_are_judged_by_what_their_replies_count() -> None:
    """They tell no settings, so the fingerprint names no speculation."""
    gates = recipe(SCORE, {"kind": "acceptance", "max_drop": 0.10})

    def given(label: str, accepted: Acceptance | None) -> Measurement:
        measurement = measured(label, answers(200), acceptance=accepted)
        return measurement.model_copy(update={"fingerprint": measurement.fingerprint.model_copy(update={"speculation": None})})

    passed, failed = (judged(given("fp8", acceptance(7000)), given("w4a16", acceptance(num)), gates) for num in (7000, 4000))
    assert passed.verdicts[1].detail == (
        "70 % of drafted tokens accepted in fp8, 70 % in w4a16: shows no change (95 % interval: 1.3 gained to 1.3 lost if "
        "drafted tokens were independent; the server reports totals only, so how much replies differ is not known); 10 allowed."
    )
    assert (passed.verdicts[1].status, failed.verdicts[1].status) == ("PASS", "FAIL")
    one_sided = judged(given("fp8", acceptance(7000)), given("w4a16", None), gates)
    assert (one_sided.verdicts[1].status, one_sided.verdicts[1].has_say, one_sided.verdicts[1].detail) == (
        "NOT MEASURED",
        False,
        "fp8 was served with speculative decoding; w4a16 reports no drafted tokens, so there is nothing to compare. This does "
        "not count in the overall verdict.",
    )


WITHIN = (
    "a loss of the margin is excluded on the task that counts (at 97.5 %); closest is arithmetic, at most 1.9 lost "
    "(interval of at least 95 %); 5 allowed"
)
WITHIN_BOTH = WITHIN.replace("the task that counts", "each of the 2 tasks that count")
NEEDLE = {"kind": "score", "task": "needle", "max_drop": 0.05}


@pytest.mark.parametrize(
    ("lost", "gates", "reason"),
    [
        ((0, 0), (SCORE, NEEDLE), f"{WITHIN_BOTH}; 2 gates passed"),
        ((40, 40), (SCORE, NEEDLE), "loses 20.0 points on arithmetic; 5 allowed; also failed: needle; 2 gates failed"),
        ((0, 7), (SCORE, NEEDLE),
         "loses 3.5 points on needle; 5 allowed: there is a real loss, but the data cannot tell whether it exceeds 5 points; 1 "
         "gate passed, 1 underpowered"),
        ((0, 40), (SCORE, NEEDLE, {**SCORE, "task": "aime"}),
         "loses 20.0 points on needle; 5 allowed; 1 gate passed, 1 failed, 1 not measured: aime"),
        ((0, 7), ({**SCORE, "task": "aime"}, {**SCORE, "task": "math"}, NEEDLE),
         "aime has no score for fp8: the suite did not ask it; also not measured: math; 1 gate underpowered, 2 not measured"),
        ((0, 0), ({**SCORE, "task": "aime"}, {**SCORE, "task": "math"}, {**SCORE, "task": "gpqa", "required": False}),
         "aime has no score for fp8: the suite did not ask it; also not measured: math; 3 gates not measured, gpqa among them"),
        ((0, 0), (SCORE, {**SCORE, "task": "aime", "required": False}), f"{WITHIN}; 1 gate passed, 1 not measured: aime"),
        ((0, 0), ({"kind": "divergence", "metric": "kl_mean", "max": 0.1},),
         "no score was judged, and a small divergence alone does not show that a candidate is as good; 1 gate passed"),
        ((0, 0), (SCORE, {"kind": "divergence", "metric": "kl_mean", "max": 0.001}),
         "KL, unbiased, as a mean over texts: 0.0231 nats; allowed at most 0.001 nats; 1 gate passed, 1 failed"),
    ],
)  # fmt: skip
def test_the_reason_names_what_decided_and_what_was_not_measured(
    lost: tuple[int, int], gates: tuple[dict[str, Any], ...], reason: str
) -> None:
    sides = [several(label, {"arithmetic": a, "needle": b}) for label, (a, b) in (("fp8", (0, 0)), ("w4a16", lost))]
    assert judged(*sides, recipe(*gates)).reasons == {"w4a16": reason}


@pytest.mark.parametrize(
    ("only_reference", "only_candidate", "words"),
    [
        (6, 0, "there is a real loss, but the data cannot tell whether it exceeds 5 points"),
        (8, 4, "anything from no loss to more than 5 points is compatible with the data"),
    ],
)
def test_underpowered_says_whether_there_is_a_loss(only_reference: int, only_candidate: int, words: str) -> None:
    reference = measured("fp8", answers(200, range(only_candidate)))
    candidate = measured("w4a16", answers(200, range(200 - only_reference, 200)))
    report = judged(reference, candidate, recipe(SCORE))
    [verdict] = report.verdicts
    assert verdict.status == "UNDERPOWERED" and verdict.observed is not None
    is_certain = verdict.observed.low > 0
    assert is_certain == ("a real loss" in words)
    lost = "loses 3.0 points" if is_certain else "loses 2.0 points"
    assert report.reasons["w4a16"] == f"{lost} on arithmetic; 5 allowed: {words}; 1 gate underpowered"
    size, drop = lost.split()[1].removesuffix(".0"), verdict.observed
    then = (
        f"about {verdict.items_needed_at_loss} items give a PASS 4 times in 5 if {size} points are the truth, which may be "
        f"{lost_or_gained(drop.low, drop.high)}."
    )
    zero = "" if is_certain else f"about {verdict.items_needed} items give a PASS 4 times in 5 if nothing is lost, "
    assert verdict.detail.endswith(f" {words[0].upper()}{words[1:]}; {zero}{then}")


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (0.06, 0.12, "by itself this fails, but among several tasks such a loss may be chance (Holm)"),
        (0.01, 0.08, "there is a real loss, but the data cannot tell whether it exceeds 5 points"),
        (0.01, 0.04, "the loss is less than 5 points, but too few items were asked to pass"),
        (-0.02, 0.08, "anything from no loss to more than 5 points is compatible with the data"),
        (-0.02, 0.04, "the difference is less than 5 points, but too few items were asked to pass"),
        (-0.08, 0.04, "anything from no difference to a gain of more than 5 points is compatible with the data"),
        (-0.08, -0.01, "there is a real gain, but the data cannot tell whether it exceeds 5 points"),
    ],
)
def test_what_an_interval_leaves_open(low: float, high: float, words: str) -> None:
    assert open_question(Interval(value=(low + high) / 2, low=low, high=high, n=200), 0.05) == words


def test_overall_is_the_worst_and_the_noise_floor_is_judged_too() -> None:
    report = judge(make_measurements(), load_recipe(GateRecipe, "quick"), model="tiny-glm")
    assert judge(make_measurements()[::-1], load_recipe(GateRecipe, "quick"), model="tiny-glm") == report
    assert list(report.overall) == ["fp8-repeat", "bf16", "nvfp4a16", "w4a16"]
    assert report.overall["fp8-repeat"] == "PASS"
    assert report.reference == "fp8"
    order = ["FAIL", "NOT MEASURED", "UNDERPOWERED", "PASS"]
    for label, status in report.overall.items():
        assert status == min((v.status for v in report.verdicts if v.candidate == label and v.has_say), key=order.index)
    assert {v.gate for v in report.verdicts if not v.has_say} == {  # optional, and not part of these measurements
        "score codes-en", "score codes-zh", "score ruler", "score needle-grid", "score tools", "verbosity",
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------ what the reference cannot do
@pytest.mark.parametrize(("num_right", "status"), [(0, "NOT MEASURED"), (10, "NOT MEASURED"), (11, "PASS")])
def test_a_reference_with_nothing_to_lose_shows_nothing(num_right: int, status: Status) -> None:
    """10 of 200 is the margin: whatever a candidate does, it cannot lose more."""
    pair = answers(200, range(num_right, 200))
    [verdict] = judged(measured("fp8", pair), measured("w4a16", pair), recipe(SCORE)).verdicts
    assert (verdict.status, verdict.has_say) == (status, True)
    if status == "NOT MEASURED":
        assert verdict.detail == (
            f"fp8 itself is right in {num_right} of 200 replies to arithmetic ({num_right // 2} %): it has less than 5 points "
            "to lose, so this task cannot show such a loss; ask something easier, or give it the context or budget it needs."
        )


RIGHT, NEVER_RIGHT, CUT = answers(200), answers(200, range(200)), answers(200, truncated=100)


@pytest.mark.parametrize(
    ("reference", "candidate", "status", "has_say"),
    [
        (NEVER_RIGHT, NEVER_RIGHT, "NOT MEASURED", False),
        (None, RIGHT, "NOT MEASURED", False),
        (CUT, CUT, "NOT MEASURED", False),
        (RIGHT, NEVER_RIGHT, "FAIL", True),  # it can be done, only not by this candidate
        (RIGHT, CUT, "UNDERPOWERED", True),
        (RIGHT, None, "NOT MEASURED", True),
        (RIGHT, RIGHT, "PASS", True),
    ],
)
def test_an_optional_gate_has_a_say_only_on_what_the_reference_can_do(
    reference: tuple[ItemResult, ...] | None, candidate: tuple[ItemResult, ...] | None, status: Status, has_say: bool
) -> None:
    other = task_of("needle", "needle", list(RIGHT))
    reference_values, candidate_values = (
        entry.model_copy(update={"tasks": (*entry.tasks, other)})
        for entry in (measured("fp8", reference), measured("w4a16", candidate))
    )
    gates = recipe({**SCORE, "required": False}, {**SCORE, "task": "needle"}, TRUNCATION)
    report = judged(reference_values, candidate_values, gates)
    assert (report.verdicts[0].status, report.verdicts[0].has_say) == (status, has_say)
    # its cut replies are no reason to doubt the other task, unless the candidate alone is cut
    assert report.overall == {"w4a16": "FAIL" if candidate is CUT and has_say else status if has_say else "PASS"}


def choices(label: str, items: tuple[ItemResult, ...], chance: float | None) -> Measurement:
    measurement = measured(label, items)
    return measurement.model_copy(update={"tasks": (measurement.tasks[0].model_copy(update={"chance": chance}),)})


@pytest.mark.parametrize(
    ("num_right", "n", "chance", "status"),
    [
        (60, 200, 0.25, "NOT MEASURED"),  # 30 %, at least 24: it may be guessing
        (60, 200, 0.1, "PASS"),
        (60, 200, 0.0, "PASS"),
        (60, 200, None, "PASS"),  # recorded before chance was
        (600, 2000, 0.25, "NOT MEASURED"),  # surely above chance, but only 5 points can be lost
        (800, 2000, 0.25, "PASS"),
    ],
)
def test_a_reference_that_may_be_guessing_shows_nothing(num_right: int, n: int, chance: float | None, status: Status) -> None:
    """Four choices: the candidate guesses in 25 %, and would PASS a margin of ten points."""
    reference, candidate = answers(n, range(num_right, n)), answers(n, range(num_right, n))
    gates = recipe({**SCORE, "max_drop": 0.10})
    [verdict] = judged(choices("fp8", reference, chance), choices("w4a16", candidate, chance), gates).verdicts
    assert (verdict.status, verdict.has_say) == (status, True)
    details = {
        200: "fp8 itself is right in 60 of 200 replies to arithmetic (30 %, 95 % interval: 24.1 % to 36.7 %), 25 % by "
        "guessing: it may only be guessing, so this task cannot show a loss; ask something easier, or more items.",
        2000: "fp8 itself is right in 600 of 2000 replies to arithmetic (30 %, 25 % by guessing): it has less than 10 points "
        "to lose, so this task cannot show such a loss; ask something easier, or give it the context or budget it needs.",
    }
    assert status == "PASS" or verdict.detail == details[n]
    optional = recipe({**SCORE, "max_drop": 0.10, "required": False})
    [verdict] = judged(choices("fp8", reference, chance), choices("w4a16", candidate, chance), optional).verdicts
    assert verdict.has_say == (status == "PASS")


# ------------------------------------------------------------------------------------------------ items that share a question
def translated(wrong: range, num_questions: int = 40, num_languages: int = 5) -> tuple[ItemResult, ...]:
    """Every question in every language; `wrong` questions are wrong in all of them."""
    return tuple(
        replace(item, item=f"{language}/{item.item}", cluster=item.item)
        for language in range(num_languages)
        for item in answers(num_questions, wrong)
    )


def test_translations_of_one_question_are_one_cluster() -> None:
    """Two questions lost in all of five languages are two losses, not ten: items needed and detectable effect say so too."""
    whole, lost = translated(range(0)), translated(range(2))
    alone = [tuple(replace(item, cluster=None) for item in side) for side in (whole, lost)]
    gates = recipe({**SCORE, "max_drop": 0.10})
    [by_item] = judged(measured("fp8", alone[0]), measured("w4a16", alone[1]), gates).verdicts
    [verdict] = judged(measured("fp8", whole), measured("w4a16", lost), gates).verdicts
    assert (by_item.status, by_item.observed) == ("PASS", paired_difference(10, 0, 200))
    t = stats.t.interval(0.95, 39, loc=0.05, scale=np.std([1] * 2 + [0] * 38, ddof=1) / np.sqrt(40))
    assert verdict.observed is not None and by_item.observed is not None
    assert (verdict.status, verdict.observed.n, verdict.observed.value) == ("UNDERPOWERED", 200, 0.05)
    error = (t[1] - 0.05) / stats.t.ppf(0.975, 39)
    # Two of forty questions hold all of the loss: Pearson type III, of a sample that lacks two such questions.
    apart = (np.array([1.0] * 2 + [0.0] * 38) - 0.05) * np.sqrt(40 / 39) / 40
    lacking = 4 * apart.max() ** 3 / error**2
    skewness = ((apart**3).sum() + lacking**3) / (error**2 + lacking**2) ** 1.5
    at = stats.norm.cdf(stats.t.ppf(0.975, 39))
    end = 0.05 + lacking + stats.pearson3.ppf(at, skewness, scale=np.sqrt(error**2 + lacking**2))
    assert (verdict.observed.low, verdict.observed.high) == (pytest.approx(t[0]), pytest.approx(end))
    assert verdict.minimum_detectable_effect == pytest.approx(error * stats.t.ppf([0.975, 0.8], 39).sum())
    assert by_item.minimum_detectable_effect is not None
    assert verdict.minimum_detectable_effect > 1.5 * by_item.minimum_detectable_effect
    times = verdict.items_needed / 200
    assert times > 0.9
    assert error / np.sqrt(times) * stats.t.ppf([0.975, 0.8], 39 * times).sum() == pytest.approx(0.10, rel=0.01)
    assert verdict.items_needed_at_loss is not None
    times = verdict.items_needed_at_loss / 200
    assert error / np.sqrt(times) * stats.t.ppf([0.975, 0.8], 39 * times).sum() == pytest.approx(0.05, rel=0.01)
    low, high = (f"{100 * end:.1f}" for end in (by_item.observed.low, by_item.observed.high))
    assert verdict.detail.endswith(
        f" 200 items share 40 questions or texts: the interval is the wider of that over items ({low} to {high} lost) and that "
        f"over questions or texts ({-100 * t[0]:.1f} gained to {100 * end:.1f} lost). "
        "Losses in fewer than 1 of 5 of these may be missed."
    )
    [same] = judged(measured("fp8", whole), measured("w4a16", whole), gates).verdicts
    assert same.status == "PASS"
    assert same.detail.endswith(
        "200 items share 40 questions or texts: the interval is the wider of that over items (1.9 gained to 1.9 lost) and that "
        "over questions or texts (0.0 to 0.0 lost). Losses in fewer than 1 of 5 of these may be missed."
    )
    these = gates.model_copy(update={"estimand": "these_clusters"})
    [of_these] = judged(measured("fp8", whole), measured("w4a16", lost), these).verdicts
    assert (of_these.observed, of_these.estimand) == (by_item.observed, "these_clusters")
    assert of_these.detail.endswith(
        "200 items share 40 questions or texts; the interval is for such items of these, not for other questions or texts."
    )


def test_a_dozen_clusters_never_pass_a_claim_about_others() -> None:
    """One in five lossy: a sample of twelve has none of them in 7 %, whatever was answered."""
    whole = translated(range(0), num_questions=12, num_languages=10)
    gates = recipe({**SCORE, "max_drop": 0.10})
    [verdict] = judged(measured("fp8", whole), measured("w4a16", whole), gates).verdicts
    assert (verdict.status, verdict.p_pass) == ("UNDERPOWERED", pytest.approx(0.8**12))
    assert verdict.detail.endswith(
        "120 items share 12 questions or texts; 12 questions or texts count as 12.0 of equal size: damage that one question or "
        "text in five has is in none of them with a chance of 7 %, so nothing is claimed of other questions or texts (17 would "
        "allow it; `estimand: these_clusters` claims it of these)."
    )
    [of_these] = judged(
        measured("fp8", whole), measured("w4a16", whole), gates.model_copy(update={"estimand": "these_clusters"})
    ).verdicts
    assert of_these.status == "PASS"


# ------------------------------------------------------------------------------------------------ several samples of an item
def sampled(rights: list[list[int]]) -> tuple[ItemResult, ...]:
    """One item for every list, one sample for every 0 or 1 in it."""
    plain = answers(len(rights))
    return tuple(
        replace(plain[i], sample=k, correct=bool(right)) for i, result in enumerate(rights) for k, right in enumerate(result)
    )


def test_several_samples_are_judged_by_item() -> None:
    """40 of 100 items of which the candidate gets one of four samples wrong: an interval over items, not replies."""
    reference_values, candidate_values = sampled([[1, 1, 1, 1]] * 100), sampled([[1, 1, 1, 0]] * 40 + [[1, 1, 1, 1]] * 60)
    reference, candidate = measured("fp8", reference_values), measured("w4a16", candidate_values)
    task = task_result("arithmetic", "arithmetic", candidate_values, 512)
    assert (task.num_samples, task.num_items) == (4, 400)
    assert task.accuracy is not None and task.pass_at_k is not None
    assert (task.accuracy.value, task.accuracy.n) == (pytest.approx(0.9), 100)
    assert (task.pass_at_k.value, task.pass_at_k.n) == (1, 100)
    report = judged(reference, candidate, recipe(SCORE))
    [verdict] = report.verdicts
    drop = graded_difference([1.0] * 100, [0.75] * 40 + [1.0] * 60)
    assert (verdict.observed, verdict.status, verdict.discordant) == (drop, "FAIL", (40, 0))
    assert (drop.value, drop.n) == (pytest.approx(0.1), 100)
    assert verdict.detail == "Loses 10.0 points on arithmetic (interval of at least 95 %: 6.3 to 13.7 lost); 5 allowed."
    assert verdict.p_value == pytest.approx(0.00086, abs=5e-6)
    same = judged(reference, measured("w4a16", reference_values), recipe(SCORE))
    assert same.verdicts[0].status == "PASS"  # 100 clean items: z^2 / (100 + z^2) is 3.7 points
    few = judged(measured("fp8", reference_values[:160]), measured("w4a16", reference_values[:160]), recipe(SCORE))
    assert few.verdicts[0].status == "UNDERPOWERED"  # 40 items, however often each was asked
    assert few.verdicts[0].items_needed == items_for_margin(0, 0, 40, 0.05)


# ------------------------------------------------------------------------------------------------ refusals
def with_fingerprint(measurement: Measurement, **changes: Any) -> Measurement:
    return measurement.model_copy(update={"fingerprint": measurement.fingerprint.model_copy(update=changes)})


def test_unlike_serving_is_refused_and_every_field_named() -> None:
    reference, candidate = measured("fp8", answers(9)), measured("w4a16", answers(9))
    flags = {**candidate.fingerprint.flags, "max-model-len": 2048}
    other = with_fingerprint(candidate, flags=flags, server="vllm 0.33.0")
    with pytest.raises(MeasureError) as caught:
        judged(reference, other, recipe(SCORE))
    assert str(caught.value) == (
        "w4a16 cannot be compared with fp8: served differently: flags.max-model-len (4096, candidate 2048); "
        "server (vllm 0.32.0, candidate vllm 0.33.0); measure both again with one profile"
    )


def test_what_belongs_to_the_checkpoint_may_differ() -> None:
    reference = measured("fp8", answers(200))
    candidate = with_fingerprint(
        measured("bf16", answers(200)), checkpoint_flags={}, emulated=None, kernels=("Marlin",), system_fingerprint="other"
    )
    assert judged(reference, candidate, recipe(SCORE)).overall == {"bf16": "PASS"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.model_copy(update={"suite_sha256": "0" * 64, "suite_recipe": {**m.suite_recipe, "seed": "eval-2"}}),
         "other questions: suite.seed"),
        (lambda m: m.model_copy(update={"model": "glm-5"}), "is of model glm-5"),
        (lambda m: m.model_copy(update={"is_reference": True}), "exactly one reference measurement, found: fp8, w4a16"),
        (lambda m: m.model_copy(update={"label": "fp8"}), "two measurements are labelled fp8"),
        (lambda m: m.model_copy(update={"tasks": (task_of("arithmetic", "arithmetic", [*answers(3), *answers(1)]),)}),
         "an item id occurs twice"),
        (lambda m: m.model_copy(
            update={"divergence": m.divergence.model_copy(update={"reference_checkpoint_sha256": "f" * 64})}),
         "measured against checkpoint ffffffffffff, the reference is "),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_is_refused(change: Change, message: str) -> None:
    with pytest.raises(MeasureError, match=message):
        judged(measured("fp8", answers(200)), change(measured("w4a16", answers(200))), recipe(SCORE))


def test_no_reference_is_refused() -> None:
    with pytest.raises(MeasureError, match="found: none"):
        judge([measured("w4a16", answers(9))], recipe(SCORE), model="tiny-glm")
