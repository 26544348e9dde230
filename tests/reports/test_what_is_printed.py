"""What the tables print of the numbers that decide: p values, accepted drafts by reply, and quantiles without an interval."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from pages import Page
from scipy import stats
from synthetic_run import make_acceptance, make_drift, make_run, task_of

from assay.records.base import Interval
from assay.records.measurement import Measurement
from assay_reports import text
from assay_reports.card import write_card
from assay_reports.find_limits import find_limits
from assay_reports.numbers import build_report
from assay_reports.report import write_report
from assay_reports.run import load_run

ERROR = 0.012


def told_by_reply(measurement: Measurement) -> Measurement:
    """Other drafts are accepted on every side, told by reply of 300 replies; its drift has 48 texts."""
    changes: dict[str, object] = {
        "acceptance": make_acceptance(measurement.label).model_copy(update={"num_replies": 300, "rate_standard_error": ERROR})
    }
    if measurement.divergence is not None:
        changes["divergence"] = measurement.divergence.model_copy(update={"drift": (make_drift("all", 0.1, 0.9),)})
    return measurement.model_copy(update=changes)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make_run(tmp_path_factory.mktemp("run"), change=told_by_reply)
    write_report(made)
    return made


def rows(path: Path, start: str) -> list[list[str]]:
    """Cells of the table rows that begin so."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [line.strip("| ").split(" | ") for line in lines if line.startswith(start)]


def test_the_p_values_that_decide_stand_before_the_one_that_does_not(run_dir: Path) -> None:
    run = load_run(run_dir)
    assert run.gates is not None
    [verdict] = [v for v in run.gates.verdicts if (v.gate, v.candidate) == ("score needle", "nvfp4a16")]
    cells = [text.pvalue(p) for p in (verdict.p_pass, verdict.p_fail_holm, verdict.p_value)]
    assert len(set(cells)) == 3
    [task] = [task for row in build_report(run).rows if row.label == "nvfp4a16" for task in row.tasks if task.task == "needle"]
    assert (task.p_pass, task.p_fail_holm, task.mcnemar_midp) == (verdict.p_pass, verdict.p_fail_holm, verdict.p_value)
    table = page_of(run_dir).table("Statistics of needle")
    assert table.rows[1][:3] == ["pass", "fail", "any"]
    assert table.row("nvfp4a16")[4:7] == cells
    card = write_card(run_dir, "nvfp4a16")
    assert [row[4:7] for row in rows(card, "| task | correct | ")] == [["p pass", "p fail", "p any"]]
    assert [row[4:7] for row in rows(card, "| needle | ")] == [cells]


def test_accepted_drafts_have_an_interval_of_replies(run_dir: Path, tmp_path: Path) -> None:
    run = load_run(run_dir)
    drops = {row.label: row.acceptance_drop for row in build_report(run).rows}
    half = float(stats.t.ppf(0.975, 299)) * math.hypot(ERROR, ERROR)
    drop = drops["w4a16"]
    assert drop is not None and drop.n == 300
    assert [drop.value, drop.low, drop.high] == pytest.approx([0.018, 0.018 - half, 0.018 + half])
    assert "acceptance_interval" not in {limit.key for limit in find_limits(run)}
    totals = load_run(make_run(tmp_path))
    assert [limit.text for limit in find_limits(totals) if limit.key == "acceptance_interval"] == [
        "MTP acceptance is known in total only, not per reply, for fp8, fp8-repeat, bf16, nvfp4a16 and w4a16: its intervals "
        "treat drafted tokens as independent, and are too narrow if replies differ."
    ]


def test_quantiles_and_the_worst_positions_have_no_interval(run_dir: Path) -> None:
    """Over tens of texts none covers what it says; the mean beside them has one."""
    drift = make_drift("all", 0.1, 0.9)
    assert isinstance(drift.kl_mean, Interval)
    table = page_of(run_dir).table("Drift, table 1 of tiny-glm")
    shown = dict(zip(table.rows[0], table.row("w4a16", "sampled texts"), strict=True))
    assert {name: shown[name] for name in ("KL, lower bound", "bound, p95", "p99", "p99.9", "worst 5 %")} == {
        "KL, lower bound": "0.1 [0.088, 0.112]", "bound, p95": "0.4", "p99": "0.95", "p99.9": "2.5", "worst 5 %": "1.1",
    }  # fmt: skip


def page_of(run_dir: Path) -> Page:
    return Page((run_dir / "report" / "index.html").read_text(encoding="utf-8"))


# ------------------------------------------------------------------------------------------------ numbers that must agree
def half_asked(measurement: Measurement) -> Measurement:
    """All but the reference answered the first half of arithmetic; w4a16 surely loses on the needles."""
    if measurement.is_reference:
        return measurement
    arithmetic, needle = measurement.tasks
    half = task_of("arithmetic", "arithmetic", list(arithmetic.items[:100]))
    if measurement.label == "w4a16":
        lost = [replace(item, correct=False) if i < 20 else item for i, item in enumerate(needle.items)]
        needle = task_of("needle", "needle", lost)
    return measurement.model_copy(update={"tasks": (half, needle)})


def test_a_change_and_the_two_scores_agree_or_the_page_says_why(tmp_path: Path) -> None:
    """A reference that answered more items has another score on the pairs."""
    folder = make_run(tmp_path, change=half_asked)
    page = write_report(folder).read_text(encoding="utf-8")
    [row] = [row for row in build_report(load_run(folder)).rows if row.label == "w4a16"]
    [reference] = [row for row in build_report(load_run(folder)).rows if row.kind == "reference"]
    arithmetic, needle = row.tasks
    assert arithmetic.drop and arithmetic.accuracy and needle.drop and needle.accuracy
    assert arithmetic.reference_on_pairs == pytest.approx(arithmetic.accuracy.value + arithmetic.drop.value)
    assert needle.reference_on_pairs is None and reference.tasks[1].accuracy is not None
    assert reference.tasks[1].accuracy.value == pytest.approx(needle.accuracy.value + needle.drop.value)
    said = (
        "Arithmetic: fp8 answered 200 items, some candidates fewer. On the 100 items shared with fp8-repeat, bf16, nvfp4a16 "
        "and w4a16, fp8 scores 94.0 %."
    )
    markdown = (folder / "report" / "report.md").read_text(encoding="utf-8")
    assert said in markdown and said in page
    own = "arithmetic: the change is over the 100 items that fp8 shares with this checkpoint; on these fp8 scores 94.0 %."
    assert own in write_card(folder, "w4a16").read_text(encoding="utf-8")


def test_items_that_no_loss_would_need_are_no_answer_to_a_certain_loss(tmp_path: Path) -> None:
    folder = make_run(tmp_path, change=half_asked)
    write_report(folder)
    tasks = next(row for row in build_report(load_run(folder)).rows if row.label == "w4a16").tasks
    assert [task.drop is not None and task.drop.low > 0 for task in tasks] == [False, True]
    pairs = [page_of(folder).table(f"Statistics of {name}").row("w4a16")[8] for name in ("arithmetic", "needle")]
    assert pairs == [f"{tasks[0].num_pairs} {tasks[0].items_needed}", f"{tasks[1].num_pairs}"]
