"""`assay gate --import`: results of other harnesses in, a run's verdicts and report out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_errors import one_error
from command_line import Run
from foreign_results import Scores, write_csv, write_lm_eval

from assay.records.verdict import GateReport

BEFORE: Scores = {str(i): float(i % 10 < 7) for i in range(400)}
LOSSY: Scores = {item: score if int(item) % 5 else 0.0 for item, score in BEFORE.items()}


@pytest.fixture
def results(run: Run) -> Path:
    """bf16, fp8 (as good) and nvfp4 (which lost), of lm-eval."""
    for name, scores in (("bf16", BEFORE), ("fp8", BEFORE), ("nvfp4", LOSSY)):
        write_lm_eval(Path("results", name), scores)
    return Path("results")


def test_verdicts_report_and_exit_code(run: Run, results: Path) -> None:
    code, out, err = run("gate", "--import", "results/bf16", "results/fp8", "w4=results/nvfp4", "--json", "--name", "mine")
    report = GateReport.model_validate_json(out)
    assert (code, report.model, report.reference, report.overall) == (1, "tiny", "bf16", {"fp8": "PASS", "w4": "FAIL"})
    assert report.reasons["w4"].startswith("loses 20.0 points on gsm8k; 5 allowed")
    assert "report: runs/mine/report/index.html" in err
    page = Path("runs/mine/report/report.md").read_text()
    assert "How the checkpoints were served is unknown: another harness asked them" in page
    assert (
        "Another harness asked and scored (lm-eval 0.4.13), so NOT MEASURED: engine and version, flags and environment, "
        "hardware and kernels, speculative decoding, faults of serving, which replies were cut off (gsm8k), how often a "
        "guess is right (gsm8k). A change may come from any of these."
    ) in page
    assert "| gsm8k | bf16 (reference) | 70.0 %" in page
    code, _, _ = run("gate", "--import", "results/bf16", "results/fp8", "--name", "one")
    assert code == 0


def test_the_run_is_judged_again_by_other_gates(run: Run, results: Path) -> None:
    run("gate", "--import", "results/bf16", "results/nvfp4")
    Path("mine.yaml").write_text(
        "schema: 1\nname: mine\ngates:\n- {kind: score, task: gsm8k, max_drop: 0.4}\n- {kind: truncation, max_share: 0.05}\n"
    )
    assert one_error(run("gate", "tiny", "--gates", "mine.yaml")) == (
        "gates mine do not go with suite imported: a gate on cut replies, which the imported results do not tell; remove it "
        "from the gates, or ask for it in the suite"
    )
    Path("mine.yaml").write_text("schema: 1\nname: mine\ngates: [{kind: score, task: gsm8k, max_drop: 0.4}]\n")
    code, out, _ = run("gate", "tiny", "--gates", "mine.yaml", "--json")
    assert (code, GateReport.model_validate_json(out).overall) == (0, {"nvfp4": "PASS"})


def test_more_candidates_join_the_run_of_their_reference(run: Run, results: Path) -> None:
    run("gate", "--import", "results/bf16", "results/fp8")
    code, out, _ = run("gate", "--import", "results/bf16", "results/nvfp4", "--json")
    assert (code, GateReport.model_validate_json(out).overall) == (1, {"fp8": "PASS", "nvfp4": "FAIL"})
    before = Path("runs/tiny/gates.json").read_bytes()
    error = one_error(run("gate", "--import", "first=results/bf16", "results/nvfp4"))
    assert error == "runs/tiny: its reference is called bf16; call it so here: bf16=results/bf16, or give another --name"
    assert Path("runs/tiny/gates.json").read_bytes() == before


def test_a_table_of_both_sides(run: Run) -> None:
    rows = [f"{item},{side},{score}" for side, scores in (("bf16", BEFORE), ("fp8", LOSSY)) for item, score in scores.items()]
    Path("scores.csv").write_text("\n".join(["item,side,score", *rows]) + "\n")
    assert one_error(run("gate", "--import", "scores.csv")) == (
        "scores.csv: has no side reference; it has bf16, fp8; say which is the reference: SIDE=scores.csv"
    )
    code, out, _ = run("gate", "--import", "bf16=scores.csv", "--json")
    assert (code, GateReport.model_validate_json(out).overall) == (1, {"fp8": "FAIL"})


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("results/bf16", "results/fp8"), "gate: 2 runs are named; judge one, or import results by --import"),
        (("results/bf16", "--metric", "acc"), "--metric is not used without --import; leave it out"),
        (("--import", "results/bf16"), "gate --import results/bf16: what it is compared with is missing; give REFERENCE and "
         "CANDIDATE, or one table with a column `side`"),
        (("--import", "results/bf16", "results/bf16"), "two sides are called bf16; name them: bf16-2=PATH"),
        (("--import", "results/bf16", "results/none"), "results/none: no such file or folder; give results of a harness"),
        (("--import", "results/bf16", "results/fp8", "--metric", "f1"),
         "results/bf16/model/samples_gsm8k_2026-11-01T10-00-00.000000.jsonl: has no metric f1; "
         "--metric takes one of: exact_match, exact_match,none"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_said(run: Run, results: Path, words: tuple[str, ...], said: str) -> None:
    assert one_error(run("gate", *words)) == said
    assert not Path("runs").exists()


def test_a_refused_pair_leaves_nothing(run: Run, results: Path) -> None:
    write_lm_eval(Path("results", "shuffled"), BEFORE, questions=[f"question {(i + 1) % 400}" for i in range(400)])
    error = one_error(run("gate", "--import", "results/bf16", "results/shuffled"))
    assert error.startswith(
        "gsm8k: shuffled cannot be compared with bf16: 400 of 400 items of the same name are other questions"
    )
    assert not Path("runs").exists()


def test_hostile_names_stay_text(run: Run) -> None:
    names = {f"<script>alert({i})</script>\x1b[31m|": 1.0 for i in range(60)}
    for side in ("bf16", "fp8"):
        write_csv(Path(side), names)
    code, _, _ = run("gate", "--import", "bf16", "fp8")
    assert code == 1
    page = Path("runs/bf16/report/index.html").read_text()
    assert "<script>alert" not in page and "\x1b" not in page
    assert json.loads(Path("runs/bf16/gates.json").read_text())["overall"] == {"fp8": "UNDERPOWERED"}
