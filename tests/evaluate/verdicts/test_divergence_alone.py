"""A suite that asks no task: the words of a screening, whatever the divergence is, and what the other commands make of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from command_errors import one_error
from command_line import Run
from divergence_alone import GATES, SUITE, run_of_divergence_alone, without_tasks
from synthetic_run import MODEL, make_measurement

from assay.errors import RecipeError
from assay.recipes.gate import GateRecipe, gates_on
from assay.records.choice.record import Quality
from assay.records.verdict import GateReport, Overall
from assay_evaluate.choice.quality import quality_of
from assay_evaluate.verdicts.gates import judge
from assay_reports.card import render_card
from assay_reports.numbers import build_report
from assay_reports.page.charts import deciding_gate
from assay_reports.page.first_screen import Step, first_screen
from assay_reports.page.report_rows import candidates
from assay_reports.report import render_html, render_markdown
from assay_reports.run import load_run


def judged(gates: GateRecipe, **changes: Any) -> GateReport:
    """w4a16, 0.0231 nats (0.0185 to 0.0277) as a mean over texts, against fp8. changes: of its measurement."""
    reference, candidate = (without_tasks(make_measurement(label, SUITE)) for label in ("fp8", "w4a16"))
    return judge([reference, candidate.model_copy(update=changes)], gates, model=MODEL)


def most(nats: float) -> GateRecipe:
    gate = {"kind": "divergence", "metric": "kl_mean", "max": nats}
    return gates_on(GateRecipe.model_validate({"schema": 1, "name": "own", "gates": [gate]}), SUITE)


def test_gates_on_replies_to_tasks_do_not_apply() -> None:
    assert [gate.kind for gate in GATES.gates] == ["divergence", "divergence", "divergence"]
    own = GateRecipe.model_validate({"schema": 1, "name": "own", "gates": [{"kind": "truncation", "max_share": 0.05}]})
    with pytest.raises(RecipeError) as caught:
        gates_on(own, SUITE)
    assert str(caught.value) == (
        "gates own do not go with suite kl: a gate on truncation, which is about replies to tasks, and the suite asks none; "
        "remove it from the gates, or ask for it in the suite"
    )


@pytest.mark.parametrize(
    ("gates", "word", "reason"),
    [
        (
            GATES, "not failed",
            "KL, unbiased: 0.02163 nats; allowed at most 0.08 nats for 4-bit weights; no task was asked, and only tasks can "
            "pass it; 3 gates passed",
        ),
        (
            most(0.03), "not failed",
            "KL, unbiased, as a mean over texts: 0.0231 nats; allowed at most 0.03 nats; no task was asked, and only tasks can "
            "pass it; 1 gate passed",
        ),
        (
            most(0.02), "UNDERPOWERED",
            "KL, unbiased, as a mean over texts: 0.0231 nats; allowed at most 0.02 nats, which lies inside the interval; no "
            "task was asked, and only tasks can pass it; 1 gate underpowered",
        ),
        (
            most(0.01), "FAIL",
            "KL, unbiased, as a mean over texts: 0.0231 nats; allowed at most 0.01 nats; 1 gate failed",
        ),
    ],
)  # fmt: skip
def test_the_word_is_that_of_a_screening(gates: GateRecipe, word: Overall, reason: str) -> None:
    report = judged(gates)
    assert (report.overall, report.reasons) == ({"w4a16": word}, {"w4a16": reason})


def test_without_a_number_nothing_is_said() -> None:
    report = judged(GATES, divergence=None, not_measured={"divergence": "no log-probabilities"})
    assert report.overall == {"w4a16": "NOT MEASURED"}


def test_a_suite_that_asks_tasks_and_has_no_score_is_not_measured() -> None:
    """Its tasks may have failed: that is no screening."""
    sides = [make_measurement(label, SUITE).model_copy(update={"tasks": (), "suite_recipe": {}}) for label in ("fp8", "w4a16")]
    report = judge(sides, most(0.03), model=MODEL)
    assert report.overall == {"w4a16": "NOT MEASURED"}
    assert report.reasons["w4a16"].startswith("no score was judged, and a small divergence alone does not show")


# ------------------------------------------------------------------------------------------------ what is made of the word
@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return run_of_divergence_alone(tmp_path / "runs", without_tasks)


def test_no_such_checkpoint_is_chosen() -> None:
    assert quality_of(judged(most(0.03)), "w4a16") == Quality(
        checkpoint="w4a16", word="not failed", may_be_chosen=False,
        detail="KL, unbiased, as a mean over texts: 0.0231 nats; allowed at most 0.03 nats; no task was asked, and only tasks "
        "can pass it; 1 gate passed",
        to_run=("a suite with tasks",),
    )  # fmt: skip


def test_report_and_card_have_the_word(run_dir: Path) -> None:
    run = load_run(run_dir)
    report = build_report(run)
    screen = first_screen(report)
    assert screen.answer == ("Keep fp8: no smaller checkpoint passes (nvfp4a16 and w4a16 are not failed by their divergence)")
    assert Step("Evaluate with a suite that asks tasks: no divergence passes a checkpoint") in screen.steps
    assert [row.status for row in candidates(report)] == ["not failed"] * 3
    row = next(row for row in candidates(report) if row.label == "w4a16")
    decider = deciding_gate(report, row)
    assert decider is not None and decider.verdict.gate == "divergence top1_agreement"
    page, markdown, card = render_html(report), render_markdown(report), render_card(run, "w4a16", run.checkpoints["w4a16"])
    assert '<a class="term badge not-failed" href="#word-not-failed"' in page and 'id="word-not-failed"' in page
    assert "| w4a16 | not failed |" in markdown
    trust = "not failed: its divergence from fp8 is within its limits. No task was asked: what it lost is not known."
    assert trust in card
    assert "**not failed** against fp8: KL, unbiased" in card
    assert "PASS**" not in card and "PASS: it lost" not in card


def test_the_command_exits_1_and_nothing_is_published(run: Run, run_dir: Path) -> None:
    code, out, _ = run("gate", run_dir)
    assert code == 1
    assert [line.split()[:3] for line in out.splitlines() if "w4a16" in line] == [["not", "failed", "w4a16"]]
    error = one_error(run("publish", run_dir / "w4a16", "me/model"))
    assert error.startswith(
        "w4a16: its divergence is within its limits, and no task was asked (not failed); publish it knowingly with --despite "
        "NOT-FAILED"
    )
    assert "not failed" not in one_error(run("publish", run_dir / "w4a16", "me/model", "--despite", "not-failed"))
