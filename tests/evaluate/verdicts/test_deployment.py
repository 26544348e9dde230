"""Whether a verdict travels: every check in each of its outcomes, by hand-made numbers."""

from __future__ import annotations

from typing import Any

import pytest
from deployments import QUICK, drafting, seen
from probe_reports import ALARM, CLEAN, probed, result
from synthetic_run import make_acceptance, make_divergence

from assay.recipes.gate import AcceptanceGate, DivergenceGate, Gate, GateRecipe
from assay.records.base import Interval
from assay.records.measurement import Divergence
from assay.records.verdict import Verdict
from assay_evaluate.verdicts.deployment import judge_deployment, outcome_of, outcome_sentence

KL, ACCEPTANCE = DivergenceGate(kind="divergence", metric="kl_mean", max=0.10), AcceptanceGate(kind="acceptance", max_drop=0.10)


def limits(*gates: Gate) -> GateRecipe:
    return QUICK.model_copy(update={"gates": gates})


def apart(value: float, low: float, high: float, **changes: Any) -> Divergence:
    """A divergence with this mean KL, unbiased and as a lower bound."""
    kl = Interval(value=value, low=low, high=high, n=9216)
    return make_divergence("w4a16").model_copy(update={"kl_mean": kl, "kl_corrected_mean": kl, "drift": (), **changes})


def kl_check(**changes: Any) -> Verdict:
    return judge_deployment(limits(KL, ACCEPTANCE), seen(**changes))[0]


NOISE = apart(0.0004, 0.0003, 0.0005)


@pytest.mark.parametrize(
    ("divergence", "floor", "status", "limit"),
    [
        (apart(0.004, 0.003, 0.005), NOISE, "PASS", 0.01),
        (apart(0.02, 0.015, 0.03), NOISE, "FAIL", 0.01),
        (apart(0.01, 0.005, 0.03), NOISE, "UNDERPOWERED", 0.01),
        (apart(0.02, 0.015, 0.03), apart(0.03, 0.02, 0.04), "PASS", 0.04),  # no more than its own noise
        (apart(0.05, 0.045, 0.06), apart(0.03, 0.02, 0.04), "FAIL", 0.04),
        (apart(0.2, 0.15, 0.25), apart(0.3, 0.2, 0.4), "FAIL", 0.10),  # noise above the gate's own limit excuses nothing
        (apart(0.004, 0.003, 0.005), None, "PASS", 0.01),
        (None, NOISE, "NOT MEASURED", 0.01),
        (apart(0.004, 0.003, 0.005, num_non_finite=3), NOISE, "FAIL", 0.01),
        (apart(0.004, 0.003, 0.005, num_non_finite=3), NOISE.model_copy(update={"num_non_finite": 3}), "NOT MEASURED", 0.01),
    ],
)  # fmt: skip
def test_divergence_truth_table(divergence: Divergence | None, floor: Divergence | None, status: str, limit: float) -> None:
    check = kl_check(divergence=divergence, noise_floor=floor, not_measured={"divergence": "it wrote none"})
    assert (check.status, check.limit) == (status, pytest.approx(limit))


def test_sentences_have_the_numbers_and_where_the_limit_is_from() -> None:
    assert kl_check(divergence=apart(0.004, 0.003, 0.005), noise_floor=NOISE).detail == (
        "KL, unbiased: 0.004 nats (95 % interval: 0.003 to 0.005); allowed at most 0.01 nats. The limit is a tenth of the "
        "gate's 0.1; its own repeat on cpu-emulated: 0.0005."
    )
    assert kl_check(divergence=apart(0.02, 0.015, 0.03), noise_floor=apart(0.03, 0.02, 0.04)).detail == (
        "KL, unbiased: 0.02 nats (95 % interval: 0.015 to 0.03); allowed at most 0.04 nats. The limit is its own noise, within "
        "the gate's 0.1; its own repeat on cpu-emulated: 0.04."
    )
    assert kl_check(divergence=None, not_measured={"divergence": "it wrote none"}).detail == (
        "No divergence for w4a16: it wrote none."
    )
    broken = kl_check(divergence=apart(0.004, 0.003, 0.005, num_non_finite=3), noise_floor=NOISE)
    assert broken.detail == "3 positions have no finite log-probability that had one on cpu-emulated."


@pytest.mark.parametrize(
    ("gate", "name", "limit"),
    [
        ({"metric": "kl_mean", "over": "spans", "max": 0.10}, "divergence kl_mean, by span", 0.01),
        ({"metric": "kl_mean", "texts": "every", "max": 0.10}, "divergence kl_mean, all texts", 0.01),
        ({"metric": "top1_agreement", "min": 0.90}, "divergence top1_agreement", 0.99),
        ({"metric": "perplexity_ratio", "max": 1.20}, "divergence perplexity_ratio", 1.02),
        ({"metric": "kl_exact_mean", "max": 0.10}, "divergence kl_unbiased_mean", 0.01),
    ],
)
def test_of_every_divergence_gate_a_tenth_of_the_way_is_allowed(gate: dict[str, Any], name: str, limit: float) -> None:
    """The exact mean needs servers of its own: on a deployment its unbiased estimate stands for it."""
    own = DivergenceGate.model_validate({"kind": "divergence", **gate})
    silent = make_divergence("fp8-repeat", 1e-6)
    check = judge_deployment(limits(own), seen(noise_floor=silent))[0]
    assert (check.gate, check.limit) == (name, pytest.approx(limit))
    # Of held-out text only a lower bound is known, which cannot pass.
    assert check.status == "NOT MEASURED" if own.texts == "every" else check.status in {"PASS", "FAIL", "UNDERPOWERED"}


def test_the_worst_span_counts() -> None:
    """A drift that grows along the text fails by span where the mean over all passes."""
    short, long = make_divergence("w4a16", 0.05), make_divergence("w4a16", 1.0)
    every = short.drift[0].model_copy(update={"by_span": long.drift[0].by_span})
    drifted = short.model_copy(update={"drift": (every,)})
    by_span = DivergenceGate(kind="divergence", metric="kl_mean", over="spans", max=0.10)
    checks = judge_deployment(limits(KL, by_span), seen(divergence=drifted))
    assert [check.status for check in checks[:2]] == ["PASS", "FAIL"]
    assert "at positions 128 to 255" in checks[1].detail


def test_acceptance_is_judged_as_its_gate_does() -> None:
    def check(**sides: Any) -> Verdict:
        return judge_deployment(limits(KL, ACCEPTANCE), seen(**sides))[1]

    lost = make_acceptance("w4a16").model_copy(update={"num_accepted_tokens": 6000, "rate": 0.5})
    before = drafting("cpu-emulated")
    assert check().status == "PASS"
    fallen = check(drafts=(before, drafting("4xh200", acceptance=lost)))
    assert fallen.status == "FAIL"
    assert fallen.detail.startswith("69.4 % of drafted tokens accepted in cpu-emulated, 50 % in 4xh200: loses 19.4 points")
    undrafted = check(drafts=(before, drafting("4xh200", drafts=False, acceptance=None)))
    assert (undrafted.status, undrafted.has_say) == ("NOT MEASURED", True)
    assert undrafted.detail == "No acceptance rate for 4xh200: it was served without speculative decoding."
    neither = check(drafts=tuple(drafting(name, drafts=False, acceptance=None) for name in ("cpu-emulated", "4xh200")))
    assert (neither.status, neither.has_say) == ("NOT MEASURED", False)
    unlimited = judge_deployment(limits(KL), seen())[1]
    assert (unlimited.status, unlimited.has_say) == ("NOT MEASURED", False)


def test_probes_must_not_alarm_where_they_did_not() -> None:
    def check(**sides: Any) -> tuple[str, str]:
        results = judge_deployment(limits(KL), seen(**sides))[-1]
        return results.status, results.detail

    clean, alarm = probed("w4a16", *CLEAN), probed("w4a16", *ALARM)
    assert check() == ("PASS", "No new alarm in 2 probes, 2,400 requests; it was not probed on cpu-emulated.")
    assert check(probes_there=clean) == ("PASS", "No new alarm in 2 probes, 2,400 requests; none on cpu-emulated either.")
    assert check(probes=alarm, probes_there=clean)[0] == check(probes=alarm)[0] == "FAIL"
    assert check(probes=alarm, probes_there=alarm)[0] == "PASS"
    pair = probed("w4a16", result("argmax", 9, 4000, "9 ranks differ"), ALARM[1])
    assert check(probes=pair, probes_there=alarm) == ("FAIL", "argmax: 9 ranks differ.")
    with_pair = probed("w4a16", *CLEAN, result("speculation", 0, 48))
    assert check(probes_there=with_pair)[0] == "PASS", "the pair of servers is not asked on a deployment"
    assert check(probes=None) == ("NOT MEASURED", "No probes: none were run.")


@pytest.mark.parametrize(
    ("changes", "outcome", "sentence"),
    [
        ({}, "PASS", "the verdict PASS also holds on 4xh200: 3 checks passed (divergence kl_mean; acceptance; probes)"),
        (
            {"probes": probed("w4a16", *ALARM), "divergence": None},  # a failure is one, whatever else is missing
            "FAIL",
            "the verdict PASS does not hold on 4xh200: "
            "probes: garble: 3 of 2000 replies are garbled, and not by the model's habit",
        ),
        (
            {"probes": None},
            "NOT MEASURED",
            "whether the verdict PASS also holds on 4xh200 is not known: probes: No probes: none were run",
        ),
    ],
)
def test_only_what_passed_in_every_check_travels(changes: dict[str, Any], outcome: str, sentence: str) -> None:
    checks = judge_deployment(limits(KL, ACCEPTANCE), seen(**changes))
    assert (outcome_of(checks), outcome_sentence(checks, "4xh200", "PASS")) == (outcome, sentence)


def test_without_a_limit_on_divergence_nobody_knows() -> None:
    checks = judge_deployment(limits(ACCEPTANCE), seen())
    assert outcome_of(checks) == "NOT MEASURED"
    assert checks[0].detail == "The gates have no limit on divergence, so none says how far is too far."
