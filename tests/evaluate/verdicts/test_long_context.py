"""Losses by length and depth, the effective length, its error, and the sentences that say it."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from scipy import stats
from synthetic_run import make_measurement, task_of

from assay.recipes.gate import GateRecipe, gates_on
from assay.recipes.load import load_recipe
from assay.recipes.suite import SuiteRecipe
from assay.records.long_context import CellLoss, LongContext
from assay.records.measurement import ItemResult, Measurement
from assay.records.verdict import GateReport, Status, Verdict
from assay_evaluate.statistics.decisions import holm, inferiority_p, noninferiority_p
from assay_evaluate.statistics.graded import graded_difference
from assay_evaluate.statistics.paired import paired_difference
from assay_evaluate.verdicts.gates import judge

SUITE = load_recipe(SuiteRecipe, "long-context")
GATE = {"kind": "effective_length", "max_drop": 0.05}
LENGTHS = (16384, 32768, 65536)


def items_of(length: int, n: int, wrong: range = range(0), **more: Any) -> list[ItemResult]:
    """n items of one length, right but for `wrong`; their needles lie at five depths in turn, their parts are two."""
    fields = {"truncated": False, "finish_reason": "stop", **more}
    return [
        ItemResult(
            item=f"{length}/{i}", language="en", correct=i not in wrong, wrong_script=False, prompt_tokens=length,
            output_tokens=30, answer="1", subtask=("vt", "cwe")[i % 2], length_tokens=length, depth=(i % 5) / 4, **fields,
        )
        for i in range(n)
    ]  # fmt: skip


def measured(label: str, *parts: list[ItemResult], task: str = "ruler") -> Measurement:
    result = task_of(task, "ruler", [item for part in parts for item in part])
    return make_measurement(label, SUITE).model_copy(update={"tasks": (result,)})


def judged(reference: Measurement, candidate: Measurement, **gate: Any) -> GateReport:
    recipe = GateRecipe.model_validate({"schema": 1, "name": "test", "gates": [{**GATE, **gate}]})
    return judge([reference, candidate], recipe, model="tiny-glm")


def wrong_at(**wrong: int) -> list[list[ItemResult]]:
    """104 items at each length; so many wrong at 16K, 32K, 64K."""
    return [items_of(length, 104, range(wrong.get(f"at_{length >> 10}k", 0))) for length in LENGTHS]


REFERENCE = measured("fp8", *wrong_at())


def test_a_loss_at_long_range_only_fails_with_the_length_where_it_begins() -> None:
    candidate = measured("w4a16", *wrong_at(at_64k=20))
    report = judged(REFERENCE, candidate)
    drop = paired_difference(20, 0, 104)
    assert report.verdicts == (
        Verdict(
            gate="effective length",
            candidate="w4a16",
            status="FAIL",
            observed=drop,
            limit=0.05,
            detail="Within 5 points of fp8 up to 32K tokens; at 64K it loses 19.2 points (95 % interval: 12.2 to 27.8 lost).",
            clause="loses 19.2 points at 64K tokens; 5 allowed; within the margin up to 32K",
        ),
    )
    (result,) = report.effective_lengths
    assert result.model_dump(exclude={"lengths"}) == {
        "candidate": "w4a16", "tasks": ("ruler",), "max_drop": 0.05, "at_least_tokens": None, "effective_tokens": 32768,
        "reference_tokens": 65536,
    }  # fmt: skip
    clean, lost = noninferiority_p(0, 0, 104, 0.05), noninferiority_p(20, 0, 104, 0.05)
    beyond = holm([inferiority_p(0, 0, 104, 0.05)] * 2 + [inferiority_p(20, 0, 104, 0.05)])
    assert [(length.length_tokens, length.status, length.num_pairs, length.candidate) for length in result.lengths] == [
        (16384, "within", 104, 1.0), (32768, "within", 104, 1.0), (65536, "beyond", 104, 84 / 104),
    ]  # fmt: skip
    assert [length.p_within for length in result.lengths] == [clean, clean, lost]
    assert [length.p_beyond for length in result.lengths] == beyond
    assert report.overall == {"w4a16": "FAIL"}
    assert report.reasons["w4a16"].startswith(
        "loses 19.2 points at 64K tokens; 5 allowed; within the margin up to 32K; 1 gate failed"
    )


@pytest.mark.parametrize(
    ("wrong", "gate", "status", "effective", "detail"),
    [
        ({}, {}, "PASS", 65536,
         "Within 5 points of fp8 up to 64K tokens; with 97.5 % confidence at each length no more than 3.6 points are lost."),
        ({"at_64k": 20}, {"at_least": 32768}, "PASS", 32768,
         "Within 5 points of fp8 up to 32K tokens; with 97.5 % confidence at each length no more than 3.6 points are lost."),
        ({"at_32k": 4}, {}, "UNDERPOWERED", 16384,
         "Within 5 points of fp8 up to 16K tokens; at 32K it loses 3.8 points (interval of at least 95 %: 0.2 to 9.5 lost), so "
         "that a loss of 5 points is not excluded."),
        ({"at_16k": 20, "at_32k": 4}, {}, "FAIL", None,
         "Not shown to be within 5 points of fp8 at any length; at 16K it loses 19.2 points (95 % interval: 12.2 to "
         "27.8 lost)."),
        ({}, {"at_least": 131072}, "NOT MEASURED", 65536,
         "Within 5 points of fp8 up to 64K tokens; 128K are wanted, and the longest asked is 64K."),
    ],
)  # fmt: skip
def test_truth_table(wrong: dict[str, int], gate: dict[str, Any], status: Status, effective: int | None, detail: str) -> None:
    report = judged(REFERENCE, measured("w4a16", *wrong_at(**wrong)), **gate)
    (verdict,), (result,) = report.verdicts, report.effective_lengths
    assert (verdict.status, result.effective_tokens, verdict.detail) == (status, effective, detail)
    assert (verdict.items_needed is not None) is (status == "UNDERPOWERED")


def test_what_the_reference_cannot_do_is_said_and_not_judged() -> None:
    """At 64K the reference is right in 4 of 104: it cannot lose 5 points there, whatever the candidate does."""
    reference = measured("fp8", *wrong_at(at_64k=100))
    report = judged(reference, measured("w4a16", *wrong_at(at_64k=104)))
    (verdict,), (result,) = report.verdicts, report.effective_lengths
    assert (verdict.status, verdict.has_say, result.reference_tokens, result.effective_tokens) == ("PASS", True, 32768, 32768)
    assert verdict.detail.endswith("; 64K is not judged: fp8 itself is right in 4 of 104 replies.")
    assert result.lengths[2].model_dump(include={"status", "drop", "p_within", "reference", "candidate"}) == {
        "status": "reference cannot", "drop": None, "p_within": None, "reference": 4 / 104, "candidate": 0.0,
    }  # fmt: skip
    nowhere = measured("fp8", *wrong_at(at_16k=104, at_32k=104, at_64k=104))
    for required in (True, False):
        (verdict,) = judged(nowhere, measured("w4a16", *wrong_at()), required=required).verdicts
        assert (verdict.status, verdict.has_say) == ("NOT MEASURED", required)
        assert verdict.detail == (
            "Not shown to be within 5 points of fp8 at any length; 16K is not judged: fp8 itself is right in 0 of 104 replies; "
            "nothing is said of 32K, 64K."
        )


def test_cut_off_replies_count_against_the_candidate_and_disqualify_a_length_of_the_reference() -> None:
    looping = [*wrong_at()[:2], items_of(65536, 84), [*items_of(65536, 104, truncated=True, finish_reason="length")][84:]]
    (verdict,) = judged(REFERENCE, measured("w4a16", *looping)).verdicts
    assert verdict.status == "UNDERPOWERED"  # scored as right, so no loss is certain; but it does not pass either
    (verdict,) = judged(measured("fp8", *looping), measured("w4a16", *wrong_at())).verdicts
    assert verdict.status == "PASS"
    assert verdict.detail.endswith("; 64K is not judged: 19.2 % of its replies were cut off, allowed 5 %.")


def test_a_task_that_the_candidate_lacks_is_not_measured_and_named() -> None:
    (verdict,) = judged(REFERENCE, measured("w4a16", *wrong_at(), task="other"), tasks=("ruler",)).verdicts
    assert (verdict.gate, verdict.status) == ("effective length ruler", "NOT MEASURED")
    assert verdict.detail == "Ruler has no score for w4a16: it was not asked."


def test_more_replies_of_the_reference_count() -> None:
    """Two of the reference, one of the candidate, as after the first round: nothing that was asked is thrown away."""
    second = [dataclasses.replace(entry, sample=1, correct=i % 8 != 0) for part in wrong_at() for i, entry in enumerate(part)]
    reference, candidate = measured("fp8", *wrong_at(), second), measured("w4a16", *wrong_at(at_16k=9))
    lengths = judged(reference, candidate, max_drop=0.2).effective_lengths[0].lengths
    reference_values, candidate_values = [0.5 if i % 8 == 0 else 1.0 for i in range(104)], [float(i >= 9) for i in range(104)]
    assert [length.drop for length in lengths] == [
        graded_difference(reference_values, candidate_values),
        graded_difference(reference_values, [1.0] * 104),
        graded_difference(reference_values, [1.0] * 104),
    ]


def test_items_without_a_reply_end_the_sequence() -> None:
    lacking = [dataclasses.replace(item, correct=None) for item in items_of(32768, 104)[102:]]
    failed = [*wrong_at()[:1], [*items_of(32768, 102), *lacking], wrong_at()[2]]
    (verdict,) = judged(REFERENCE, measured("w4a16", *failed)).verdicts
    assert verdict.status == "NOT MEASURED"
    assert verdict.detail == (
        "Within 5 points of fp8 up to 16K tokens; 32K is not measured: 2 of 104 items have no reply on one side or both; "
        "nothing is said of 64K."
    )


def test_cells_by_part_length_and_depth() -> None:
    """Ten items a length: odd ones are of `cwe`, depths go 0, 0.25, ... in turn. The candidate loses items 0 and 5 at 32K."""
    lengths = LENGTHS[:2]
    reference = measured("fp8", *(items_of(length, 10) for length in lengths))
    lost = items_of(32768, 10, range(0, 6, 5))
    report = judged(reference, measured("w4a16", items_of(16384, 10), lost))

    def cell(subtask: str | None, length: int, depth: float | None, n: int, num_lost: int) -> CellLoss:
        return CellLoss(
            subtask=subtask, length_tokens=length, depth=depth, num_pairs=n, reference=1.0, candidate=1 - num_lost / n,
            drop=paired_difference(num_lost, 0, n),
        )  # fmt: skip

    assert report.long_context == (
        LongContext(
            candidate="w4a16",
            task="ruler",
            by_subtask=(cell("vt", 16384, None, 5, 0), cell("vt", 32768, None, 5, 1), cell("cwe", 16384, None, 5, 0),
                        cell("cwe", 32768, None, 5, 1)),
            by_length=(cell(None, 16384, None, 10, 0), cell(None, 32768, None, 10, 2)),
            by_depth=tuple(
                cell(None, length, depth / 4, 2, 2 if (length, depth) == (32768, 0) else 0)
                for length in lengths
                for depth in range(5)
            ),
        ),
    )  # fmt: skip
    plain = measured("fp8", [ItemResult(**{**vars_of(item), "length_tokens": None}) for item in items_of(1024, 10)])
    assert judged(plain, plain.model_copy(update={"label": "w4a16", "is_reference": False})).long_context == ()


def vars_of(item: ItemResult) -> dict[str, Any]:
    return {name: getattr(item, name) for name in ItemResult.__slots__}


def test_gates_go_with_suites_that_ask_at_lengths() -> None:
    gates = GateRecipe.model_validate(
        {"schema": 1, "name": "g", "gates": [{**GATE, "tasks": ["needle-grid"]}], "default_max_drop": 0.05}
    )
    assert gates_on(gates, SUITE).gates[-1] == gates.gates[0]
    code = load_recipe(SuiteRecipe, "code")
    assert all(gate.kind == "score" for gate in gates_on(gates, code).gates)
    with pytest.raises(Exception, match="a gate on the effective length of needle-grid, which the suite does not ask at"):
        gates_on(gates.model_copy(update={"default_max_drop": None}), code)


@pytest.mark.parametrize("first_lost", [0, 1, 3])
def test_the_chance_of_claiming_a_length_that_is_lost(first_lost: int) -> None:
    """From `first_lost` on the candidate loses exactly the margin: claimed in 2.5 % of the runs, however many lengths follow.

    The sequence is computed here from the counts alone; that `judge` follows it is tested above.
    """
    draw = np.random.default_rng(7)
    n, margin, discordance, num_runs = 200, 0.05, 0.10, 20_000
    false_claims = np.zeros(num_runs, bool)
    reached = np.ones(num_runs, bool)
    for length in range(5):
        loss = margin if length >= first_lost else 0.0
        counts = draw.multinomial(n, [(discordance + loss) / 2, (discordance - loss) / 2, 1 - discordance], size=num_runs)
        table = {(b, c): noninferiority_p(b, c, n, margin) < 0.025 for b, c in {(int(b), int(c)) for b, c, _ in counts}}
        reached &= np.array([table[int(b), int(c)] for b, c, _ in counts])
        if length >= first_lost:
            false_claims |= reached
    upper = stats.binom.ppf(0.999, num_runs, 0.025) / num_runs
    assert false_claims.mean() <= upper
