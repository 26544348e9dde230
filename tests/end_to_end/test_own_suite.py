"""A model, a suite, its gates and a precision of one's own, all by path, through `assay run` on real servers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from assay.recipes.load import recipes_dir
from assay.recipes.suite import ArithmeticTask
from assay.records.measurement import Measurement
from assay.records.verdict import GateReport, RegisteredGates
from assay_evaluate.tasks.generated import arithmetic_items
from assay_reports.schema import Report

pytestmark = [pytest.mark.serve, pytest.mark.long]

NUM_ITEMS = 40


def assay(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from assay_cli import main; main()", *arguments]
    return subprocess.run(command, cwd=folder, env=os.environ | {"COLUMNS": "200"}, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files: a local lm-eval task of questions that tiny-glm can answer, and the recipes that name each other."""
    folder = tmp_path_factory.mktemp("own")
    for part in ("tasks", "suites", "models", "my"):
        (folder / part).mkdir()
    asked = ArithmeticTask(kind="arithmetic", name="x", languages=("en",), num_items=NUM_ITEMS, num_steps=(3,), max_tokens=512)
    rows = [{"question": item.prompt, "answer": item.answer} for item in arithmetic_items(asked, "eval-own-1")]
    (folder / "tasks/data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "tasks/stories.yaml").write_text(
        f"""task: stories
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder / "tasks/data.jsonl"}}}, cache_dir: {folder / "cache"}}}
output_type: generate_until
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
filter_list:
  - name: after-mark
    filter:
      - {{function: regex, regex_pattern: "#### (-?[0-9]+)"}}
      - {{function: take_first}}
"""
    )
    (folder / "suites/own.yaml").write_text(
        "schema: 1\nname: own\nseed: eval-own-1\ntasks:\n"
        "  - {kind: lm_eval, name: my-stories, tasks: [stories], include_path: tasks, max_tokens: 512}\n"
    )
    shipped = (recipes_dir() / "models/tiny-glm.yaml").read_text()
    for old, new in (
        ("name: tiny-glm", "name: mine"),
        ("path: examples/tiny_glm/checkpoint", f"path: {recipes_dir().parent / 'examples/tiny_glm/checkpoint'}"),
        ("suite: demo", "suite: ../suites/own.yaml"),
        (
            "precisions: [fp8, w4a16, w4a16-channel, w4a16-gptq, nvfp4a16, auto-4.5bpw]",
            "precisions: [../my/attention-kept.yaml]",
        ),
        ("include_source: true", "include_source: false"),
    ):
        assert old in shipped
        shipped = shipped.replace(old, new)
    (folder / "models/mine.yaml").write_text(shipped)
    (folder / "my/attention-kept.yaml").write_text(
        "schema: 1\nname: attention-kept\nextends: w4a16\nkeep: {bf16: [attention]}\n"
    )
    return folder


@pytest.fixture(scope="module")
def printed(folder: Path) -> str:
    """Quantize, serve the reference and the candidate, measure, judge, report."""
    done = assay(folder, "run", "models/mine.yaml", "--precisions", "my/attention-kept.yaml")
    assert done.returncode in {0, 1}, done.stderr
    return done.stdout + done.stderr


def test_the_suites_task_is_gated_by_the_default_margin_and_nothing_else_is(folder: Path, printed: str) -> None:
    assert "gates default: 5 points on my-stories; subgroups; acceptance; truncation; verbosity\n" in printed
    gates = GateReport.load(folder / "runs/mine/gates.json")
    mine = [v for v in gates.verdicts if v.candidate == "attention-kept"]
    limits = [("score my-stories", 0.05), ("acceptance", 0.1), ("truncation", 0.02), ("verbosity", 0.05)]
    assert [(v.gate, v.limit) for v in mine] == limits and not mine[3].has_say
    score = mine[0]
    assert score.status in {"PASS", "UNDERPOWERED", "FAIL"} and score.observed is not None and score.observed.n == NUM_ITEMS
    assert " on my-stories (interval of at least 95 %: " in score.detail and "5" in score.detail.partition("); ")[2]
    assert mine[1].status != "NOT MEASURED" and mine[2].status == "PASS"
    assert set(gates.overall) == {"fp8-repeat", "attention-kept"} == set(gates.reasons)
    for line in printed.splitlines():
        assert not re.search(r"\b(arithmetic|needle|codes-|ruler|tools)\b", line), line
    assert gates.reasons["attention-kept"] in printed


def test_the_limits_were_registered_first(folder: Path, printed: str) -> None:
    note = RegisteredGates.load(folder / "runs/mine/gates.registered.json")
    gates = GateReport.load(folder / "runs/mine/gates.json")
    assert (note.named, note.recipe) == ("default", gates.gate_recipe)
    assert gates.chosen == "before the run"


def test_the_precision_is_called_by_its_name_everywhere(folder: Path, printed: str) -> None:
    run_dir = folder / "runs/mine"
    measured = Measurement.load(run_dir / "measurements/attention-kept.json")
    assert (measured.label, Path(measured.checkpoint).parent.name) == ("attention-kept", "attention-kept")
    report = Report.load(run_dir / "report/report.json")
    assert [(row.label, row.kind) for row in report.rows] == [
        ("fp8", "reference"), ("fp8-repeat", "noise floor"), ("attention-kept", "candidate"),
    ]  # fmt: skip
    assert [plan.precision for plan in report.plans if plan.precision != "fp8"] == ["attention-kept"]
    task = report.rows[0].tasks[0]
    assert task.task == "my-stories" and task.accuracy is not None and task.accuracy.value > 0.3
    text = (run_dir / "report/report.md").read_text()
    assert "\n## Divergence was not measured\n\nNot part of suite own.\n" in text
    card = (run_dir / "attention-kept/checkpoint/README.md").read_text()
    assert "Measured with suite own, begun " in card and "| score my-stories |" in card


def test_the_second_run_asks_nothing(folder: Path, printed: str) -> None:
    again = assay(folder, "evaluate", "models/mine.yaml", "--precisions", "my/attention-kept.yaml")
    assert again.returncode == 0 and again.stderr.count(": measured already, on ") == 3
