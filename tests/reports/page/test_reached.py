"""Right answers reached and lost on the page and in the Markdown: what is measured, what is not, and what is outdated."""

from __future__ import annotations

from pathlib import Path

from synthetic_run import few_items, make_run

from assay.records.base import Interval, sha256_of_file
from assay.records.reached import REACHED_NAME, Reached, ReachedAndLost
from assay_reports.page.findings import reached as heading_of
from assay_reports.report import write_report
from assay_reports.schema import Report


def interval(value: float, low: float, high: float) -> Interval:
    return Interval(value=value, low=low, high=high, n=40)


REFERENCE = Reached(
    label="fp8", task="arithmetic", num_wrong=20, num_unknown=0, num_cut=0, num_reached=2, num_reached_cut=0,
    share=interval(0.1, 0.03, 0.3), chance=0.02, beyond_chance=interval(0.08, -0.01, 0.28),
)  # fmt: skip
CANDIDATE = Reached(
    label="w4a16", task="arithmetic", num_wrong=40, num_unknown=3, num_cut=4, num_reached=20, num_reached_cut=1,
    share=interval(0.5, 0.35, 0.65), chance=0.04, beyond_chance=interval(0.46, 0.3, 0.6),
    lost_more=interval(0.09, 0.03, 0.15), lost_more_by_chance=0.005,
)  # fmt: skip
UNMEASURED = CANDIDATE.model_copy(
    update={"share": None, "beyond_chance": None, "lost_more": None, "lost_more_by_chance": None, "not_measured": "too likely"}
)


def reported(folder: Path, *tasks: Reached) -> tuple[Report, str, str]:
    """report.json, report.md and the page of a run with such a record; all measurements are as they were."""
    run_dir = make_run(folder, change=few_items)
    hashes = {path.stem: sha256_of_file(path) for path in (run_dir / "measurements").glob("*.json")}
    record = ReachedAndLost(level=0.95, replies_read=True, measurements=hashes, tasks=tasks)
    record.save(run_dir / REACHED_NAME)
    return again(run_dir)


def again(run_dir: Path) -> tuple[Report, str, str]:
    page = write_report(run_dir)
    return Report.load(run_dir / "report" / "report.json"), (run_dir / "report" / "report.md").read_text(), page.read_text()


def test_what_is_measured(tmp_path: Path) -> None:
    report, markdown, page = reported(tmp_path, REFERENCE, CANDIDATE)
    assert {row.label: row.reached for row in report.rows if row.reached} == {"fp8": (REFERENCE,), "w4a16": (CANDIDATE,)}
    assert heading_of(report) == "Right answers reached and lost: w4a16 loses 9 points more than fp8 on arithmetic"
    assert heading_of(report) in page and f"{heading_of(report)}. Reached: " in markdown
    for line in (
        "| arithmetic | fp8 | 20 | 10.0 % [3.0, 30.0] | 2.0 % | – |",
        "| arithmetic | w4a16 | 40 and 3 not known | 50.0 % [35.0, 65.0] | 4.0 % | -9.0 [-15.0, -3.0] |",
    ):
        assert line in markdown.splitlines()
    assert "1 of 4" in page and "-9.0<br><small>[-15.0, -3.0]</small>" in page and ">-0.5</tr>" in page


def test_what_is_not_measured_says_why(tmp_path: Path) -> None:
    report, markdown, page = reported(tmp_path, REFERENCE, UNMEASURED)
    assert heading_of(report) == "Right answers reached and lost: not measured (too likely)"
    assert "| arithmetic | w4a16 | NOT MEASURED: too likely | – | – | – |" in markdown.splitlines()
    assert "</span>: too likely</tr>" in page


def test_no_loss_is_said(tmp_path: Path) -> None:
    report, _, _ = reported(tmp_path, REFERENCE, CANDIDATE.model_copy(update={"lost_more": interval(0.02, -0.01, 0.05)}))
    assert heading_of(report) == "Right answers reached and lost: no task shows more than in fp8"


def test_figures_of_another_measurement_are_left_out(tmp_path: Path) -> None:
    reported(tmp_path, REFERENCE, CANDIDATE)
    file = tmp_path / "tiny-glm" / "measurements" / "w4a16.json"
    file.write_text(file.read_text().replace('"seconds": 214.0', '"seconds": 215.0'))
    report, markdown, _ = again(tmp_path / "tiny-glm")
    assert {row.label: row.reached for row in report.rows if row.reached} == {"fp8": (REFERENCE,)}
    assert "| arithmetic | w4a16 | 40" not in markdown


def test_a_run_without_the_record_has_no_table(tmp_path: Path) -> None:
    report, markdown, page = again(make_run(tmp_path, change=few_items))
    assert not any(row.reached for row in report.rows)
    assert "eached and lost" not in markdown and "eached and lost" not in page
    assert '"reached"' not in (tmp_path / "tiny-glm" / "report" / "report.json").read_text()
