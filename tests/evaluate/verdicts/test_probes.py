"""Probe reports in a run: judged by a gate, shown in the report, and missing is not a pass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from probe_reports import ALARM, CLEAN, probed, result, sha256_of_label
from synthetic_run import MODEL, make_measurements, make_run

from assay.errors import AssayError
from assay.recipes.gate import GateRecipe, ProbesGate
from assay.recipes.load import load_recipe
from assay.records.measurement import Measurement
from assay.records.probe import ProbeReport, load_probes, probes_place
from assay.records.verdict import GateReport, Verdict
from assay_evaluate.statistics.proportions import clopper_pearson
from assay_evaluate.verdicts.gates import judge
from assay_evaluate.verdicts.probes import judge_probes
from assay_reports.find_limits import find_limits
from assay_reports.report import write_report
from assay_reports.run import load_run

Run = Callable[..., tuple[int, str, str]]
MANY = (*ALARM[:-1], result("garble", 60, 2000, "60 of 2000 replies are garbled"))


def measured(label: str) -> Measurement:
    return next(measurement for measurement in make_measurements(0) if measurement.label == label)


def verdict_of(gate: ProbesGate, *reports: ProbeReport, label: str = "w4a16") -> Verdict:
    return judge_probes(gate, reports, measured("fp8"), measured(label))


# ------------------------------------------------------------------------------------------------ verdicts
def test_verdicts() -> None:
    gate = ProbesGate(kind="probes", required=("argmax",))
    verdict = verdict_of(gate, probed("nvfp4a16", *ALARM), probed("w4a16", *CLEAN))
    assert (verdict.gate, verdict.candidate, verdict.status, verdict.observed) == ("probes", "w4a16", "PASS", None)
    assert verdict.detail == (
        "No alarm in 2 probes, 2,400 requests. garble: 0 of 2,000 requests at fault: below 0.15 % at 95 %; to see a fault of "
        "4 in 10,000 requests takes 7,500."
    )
    verdict = verdict_of(gate, probed("w4a16", *ALARM))
    assert verdict.status == "NOT MEASURED" and verdict.observed == clopper_pearson(3, 2000)
    assert verdict.detail == (
        "garble: 3 of 2000 replies are garbled, and not by the model's habit; whether fp8 does the same was not probed, so it "
        "may be the serving's: probe fp8."
    )
    verdict = verdict_of(gate, probed("w4a16", *MANY), probed("fp8", *CLEAN))
    assert (verdict.status, verdict.detail) == (
        "FAIL", "garble: 60 of 2000 replies are garbled; in fp8 none of 2,000 requests, here 60 of 2,000 (p 6e-19)."
    )  # fmt: skip


def test_few_events_against_none_are_chance() -> None:
    """One garbled reply of 7,500 against none has p = 0.5; the number of requests that would tell is said."""
    [garbled] = (result("garble", 1, 7500, "1 of 7500 replies are garbled, and not by the model's habit"),)
    verdict = verdict_of(ProbesGate(kind="probes"), probed("w4a16", garbled), probed("fp8", result("garble", 0, 7500)))
    assert (verdict.status, verdict.detail) == (
        "UNDERPOWERED",
        "garble: 1 of 7500 replies are garbled, and not by the model's habit; in fp8 none of 7,500 requests: so many more come "
        "by chance with p 0.5; about 60,000 requests of each would tell, if that is its rate.",
    )
    five = verdict_of(
        ProbesGate(kind="probes"), probed("w4a16", result("garble", 5, 7500, "5")), probed("fp8", result("garble", 0, 7500))
    )
    six = verdict_of(
        ProbesGate(kind="probes"), probed("w4a16", result("garble", 6, 7500, "6")), probed("fp8", result("garble", 0, 7500))
    )
    assert (five.status, six.status) == ("UNDERPOWERED", "FAIL")


def test_events_of_one_request_are_one() -> None:
    """40 tokens of one reply with another's cache rows are one request that was hit, of 64."""
    tokens = result("consensus", 40, 4000, "40 of 4000 positions").model_copy(
        update={"unit": "token", "requests_hit": 1, "num_requests": 64}
    )
    clean = result("consensus", 0, 4000).model_copy(update={"unit": "token", "requests_hit": 0, "num_requests": 64})
    verdict = verdict_of(ProbesGate(kind="probes"), probed("w4a16", tokens), probed("fp8", clean))
    assert (
        verdict.status == "UNDERPOWERED"
        and "in fp8 none of 64 requests: so many more come by chance with p 0.5" in verdict.detail
    )
    all_hit = tokens.model_copy(update={"requests_hit": 50})
    assert verdict_of(ProbesGate(kind="probes"), probed("w4a16", all_hit), probed("fp8", clean)).status == "FAIL"


def test_several_probes_share_one_alpha() -> None:
    """Six events against none fail alone (p 0.016), and not as one of three probes that had any."""
    several = [
        result(name, 6, 7500, "6") if name == "garble" else result(name, 1, 7500, "1") for name in ("garble", "text", "x")
    ]
    clean = [result(name, 0, 7500) for name in ("garble", "text", "x")]
    verdict = verdict_of(ProbesGate(kind="probes"), probed("w4a16", *several), probed("fp8", *clean))
    assert verdict.status == "UNDERPOWERED" and "(alarms also in text, x)" in verdict.detail


def test_an_alarm_of_all_requests_together() -> None:
    """It does not rest on single events, so that there is nothing to count; nor does one without an event."""
    gate = ProbesGate(kind="probes")
    every = result("recompute", 1, 64, "mean exp|Δ| is 1.2").model_copy(update={"stands_without_events": True})
    single = result("recompute", 1, 64, "1 of 64 replies are above 1.05")
    clean = result("recompute", 0, 64)
    assert verdict_of(gate, probed("w4a16", every), probed("fp8", clean)).detail == (
        "recompute: mean exp|Δ| is 1.2; no alarm in fp8."
    )
    assert verdict_of(gate, probed("w4a16", every), probed("fp8", clean)).status == "FAIL"
    assert verdict_of(gate, probed("w4a16", every), probed("fp8", single)).detail.endswith(
        "; fp8 has it in single requests only."
    )
    assert verdict_of(gate, probed("w4a16", every), probed("fp8", every)).status == "NOT MEASURED"
    without = result("acceptance", 0, 64, "1.05 tokens per step over all")
    assert verdict_of(gate, probed("w4a16", without), probed("fp8", result("acceptance", 0, 64))).status == "FAIL"


def test_an_alarm_of_the_reference_is_said() -> None:
    verdict = verdict_of(ProbesGate(kind="probes"), probed("w4a16", *CLEAN), probed("fp8", *ALARM))
    assert (verdict.status, verdict.detail) == (
        "PASS",
        "No alarm in 2 probes, 2,400 requests. garble: 0 of 2,000 requests at fault: below 0.15 % at 95 %; to see a fault of "
        "4 in 10,000 requests takes 7,500. fp8 itself alarms: garble: 3 of 2000 replies are garbled, and not by the "
        "model's habit.",
    )


def test_an_alarm_that_the_reference_shares_is_not_the_candidates() -> None:
    gate = ProbesGate(kind="probes")
    verdict = verdict_of(gate, probed("w4a16", *ALARM), probed("fp8", *ALARM))
    assert (verdict.status, verdict.detail) == (
        "NOT MEASURED",
        "garble: 3 of 2000 replies are garbled, and not by the model's habit; fp8 has it too, in 3 of 2,000 requests (here 3 "
        "of 2,000, p 0.66): the serving is at fault, and not shown to be this checkpoint.",
    )
    verdict = verdict_of(gate, probed("w4a16", *MANY), probed("fp8", *ALARM))
    assert (verdict.status, verdict.detail) == (
        "FAIL", "garble: 60 of 2000 replies are garbled; in fp8 3 of 2,000 requests, here 60 of 2,000 (p 3e-15).",
    )  # fmt: skip


def test_missing_is_not_a_pass() -> None:
    gate = ProbesGate(kind="probes", required=("argmax", "tools"))
    assert verdict_of(gate).detail == "No probes of w4a16: it was not probed; `assay diagnose probe` does it."
    other = probed("w4a16", *CLEAN, sha256="0" * 64)
    assert "are of another checkpoint" in verdict_of(gate, other).detail
    not_run = verdict_of(gate, probed("w4a16", *CLEAN))
    assert (not_run.status, not_run.detail) == (
        "NOT MEASURED",
        "Probe tools did not run: the server does not accept tool calls.",
    )
    absent = verdict_of(ProbesGate(kind="probes", required=("routing",)), probed("w4a16", *CLEAN))
    assert absent.detail == "Probe routing did not run: it was not asked for."
    assert verdict_of(ProbesGate(kind="probes", max_rate={"tools": 0.1}), probed("w4a16", *CLEAN)).status == "NOT MEASURED"


@pytest.mark.parametrize(("limit", "status"), [(0.001, "UNDERPOWERED"), (0.0015, "PASS")])
def test_a_rate_must_be_excluded(limit: float, status: str) -> None:
    """0 of 2,000 bounds the rate at 0.1497 %."""
    verdict = verdict_of(ProbesGate(kind="probes", max_rate={"garble": limit}), probed("w4a16", *CLEAN))
    assert verdict.status == status
    if status == "UNDERPOWERED":
        assert (verdict.limit, verdict.observed) == (limit, clopper_pearson(0, 2000)) and "allowed 0.001" in verdict.detail


def test_an_endpoint_of_somebody_else_is_found_by_its_label() -> None:
    foreign = probed("w4a16", *ALARM).model_copy(update={"checkpoint_sha256": None})
    assert verdict_of(ProbesGate(kind="probes"), foreign).status == "NOT MEASURED", "its alarm, without one of the reference"
    reference = probed("anything", *CLEAN, sha256=sha256_of_label("w4a16"))
    assert verdict_of(ProbesGate(kind="probes"), foreign, reference).status == "PASS", "the hash says more than a name"


def test_the_whole_judgement() -> None:
    """An alarm fails a candidate that passes all other gates; the noise floor has the reference's probes."""
    recipe = load_recipe(GateRecipe, "quick")
    with_probes = recipe.model_copy(update={"gates": (*recipe.gates, ProbesGate(kind="probes"))})
    measurements = make_measurements(0)
    before = judge(measurements, recipe, model=MODEL).overall
    reports = [probed("w4a16", *MANY), *(probed(label, *CLEAN) for label in ("fp8", "bf16", "nvfp4a16"))]
    judged = judge(measurements, with_probes, model=MODEL, probes=reports)
    observed = {v.candidate: v.status for v in judged.verdicts if v.gate == "probes"}
    assert observed == {"fp8-repeat": "PASS", "bf16": "PASS", "w4a16": "FAIL", "nvfp4a16": "PASS"}
    assert judged.overall == {**before, "w4a16": "FAIL"}
    unprobed = judge(measurements, with_probes, model=MODEL)
    assert {v.status for v in unprobed.verdicts if v.gate == "probes"} == {"NOT MEASURED"}


# ------------------------------------------------------------------------------------------------ the report
@pytest.mark.slow
def test_report_shows_probes(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path)
    write_report(run_dir)
    assert "Serving fidelity" not in (run_dir / "report/report.md").read_text()
    probed("w4a16", *ALARM).save(probes_place(run_dir, "w4a16"))
    probed("fp8", *CLEAN).save(probes_place(run_dir, "fp8"))
    page = write_report(run_dir).read_text()
    text = (run_dir / "report/report.md").read_text()
    assert "| w4a16 | garble | **ALARM** | 3 of 2000 replies are garbled, and not by the model's habit. 3 of 2,000" in text
    assert "| fp8 | tools | not run | the server does not accept tool calls |" in text
    assert '<section id="fidelity">' in page and "3 of 2000 replies are garbled" in page
    assert [report.label for report in load_probes(run_dir)] == ["fp8", "w4a16"]


def test_limits_of_probes(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path)
    before = {limit.key for limit in find_limits(load_run(run_dir))}
    assert "no_load" in before and not before & {"probes_not_run", "probes_not_judged", "rare_faults"}
    for label in ("fp8", "bf16", "w4a16", "nvfp4a16"):
        probed(label, *(ALARM if label == "w4a16" else CLEAN)).save(probes_place(run_dir, label))
    results = {limit.key: limit.text for limit in find_limits(load_run(run_dir))}
    assert "no_load" not in results
    assert results["probes_not_judged"].startswith("Probe alarms that no gate judges: garble of w4a16 (3 of 2000")
    assert results["probes_not_run"].count("the server does not accept tool calls") == 3
    assert "2,000 of w4a16" in results["rare_faults"] and "take 7,488 requests under load" in results["rare_faults"]
    gates = GateReport.load(run_dir / "gates.json")
    recipe = {**gates.gate_recipe, "gates": [*gates.gate_recipe["gates"], {"kind": "probes"}]}
    gates.model_copy(update={"gate_recipe": recipe}).save(run_dir / "gates.json")
    assert "probes_not_judged" not in {limit.key for limit in find_limits(load_run(run_dir))}


@pytest.mark.slow
def test_gate_command_reads_them(run: Run, tmp_path: Path) -> None:
    run_dir = make_run(tmp_path)
    gates = tmp_path / "strict.yaml"
    text = (Path(__file__).resolve().parents[3] / "recipes/gates/quick.yaml").read_text()
    gate = "  - {kind: probes, required: [garble], max_rate: {garble: 0.01}}\n"
    gates.write_text(text.replace("name: quick", "name: strict") + gate)
    for label in ("fp8", "bf16", "w4a16", "nvfp4a16"):
        probed(label, *(MANY if label == "w4a16" else CLEAN)).save(probes_place(run_dir, label))
    code, out, _ = run("gate", run_dir, "--gates", gates, "--json")
    observed = {
        verdict.candidate: verdict.status
        for verdict in GateReport.model_validate_json(out).verdicts
        if verdict.gate == "probes"
    }
    assert code == 1 and observed == {"fp8-repeat": "PASS", "bf16": "PASS", "nvfp4a16": "PASS", "w4a16": "FAIL"}
    probes_place(run_dir, "fp8").write_text("{}")
    code, _, err = run("gate", run_dir, "--gates", gates)
    assert code == 2 and "not a ProbeReport record" in err
    with pytest.raises(AssayError, match="not a ProbeReport record"):
        load_probes(run_dir)


def test_interval_of_a_result_is_two_sided() -> None:
    """`rate` is the usual interval; `upper` is the one-sided bound that the sentence uses."""
    entry = result("garble", 0, 2000)
    assert entry.rate is not None and (entry.rate.value, entry.rate.low, entry.rate.n) == (0, 0, 2000)
    assert entry.rate.high == pytest.approx(1 - 0.025 ** (1 / 2000), rel=1e-9)
    assert entry.upper == pytest.approx(1 - 0.05 ** (1 / 2000), rel=1e-9)
