"""A checkpoint by path with hidden size 576, which has no groups of 128: made, served with its MTP block, and judged."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_checkpoints import make_tiny_glm4_moe
from warm import WarmVllm

from assay.records.measurement import Measurement
from assay.records.verdict import GateReport
from assay_reports.schema import Report

pytestmark = [pytest.mark.serve, pytest.mark.long]

TINY_GLM = Path(__file__).resolve().parents[2] / "examples" / "tiny_glm" / "checkpoint"
LABELS = ("fp8-channel", "fp8-channel-repeat", "bf16", "nvfp4a16", "w4a16-g64")
SUITE = """schema: 1
name: few
seed: eval-few
tasks:
  - {kind: arithmetic, name: arithmetic, num_items: 4, num_steps: [3], max_tokens: 24}
  - {kind: ruler, name: ruler, tasks: [niah_single_1], lengths_tokens: [512], num_items: 2, max_tokens: 24}
divergence: {num_documents: 3, max_tokens: 32, top_k: 64, spans: [0]}
acceptance: true
"""
"""A few items of what suite `quick` asks; a random model fills every budget."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, warm_vllm: WarmVllm) -> Path:
    """A random model of that shape, which reads and writes tiny-glm's text; its suite."""
    folder = tmp_path_factory.mktemp("odd-width")
    checkpoint = make_tiny_glm4_moe(
        folder / "checkpoint-576", hidden=576, num_layers=2, num_experts=4, num_heads=9, num_kv_heads=3, vocab_size=896
    )
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(TINY_GLM / name, checkpoint / name)
    (folder / "few.yaml").write_text(SUITE)
    warm_vllm.link(folder)
    return folder


@pytest.fixture(scope="module")
def done(folder: Path) -> subprocess.CompletedProcess[str]:
    """Preflight, quantize, serve four times, judge, report."""
    command = [sys.executable, "-m", "assay", "run", "checkpoint-576", "--suite", "few.yaml"]
    done = subprocess.run(command, cwd=folder, env=os.environ | {"COLUMNS": "200"}, capture_output=True, text=True, check=False)
    assert (folder / "runs").exists(), done.stdout + done.stderr
    return done


def test_what_fits_is_made_and_measured(folder: Path, done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode in {0, 1}, done.stderr
    measured = {label: Measurement.load(folder / f"runs/checkpoint-576/measurements/{label}.json") for label in LABELS}
    for one in measured.values():
        assert {task.task for task in one.tasks} == {"arithmetic", "ruler"}
        assert one.acceptance is not None and one.acceptance.num_drafts > 0  # the MTP block was served, and drafts
    assert all(measured[label].divergence is not None for label in LABELS[1:])


def test_why_these_precisions_is_printed_and_reported(folder: Path, done: subprocess.CompletedProcess[str]) -> None:
    for chosen, replaced in (("fp8-channel", "fp8"), ("w4a16-g64", "w4a16")):
        assert f"precision {chosen} in place of {replaced}: " in done.stderr
    report = Report.load(folder / "runs/checkpoint-576/report/report.json")
    assert [row.label for row in report.rows] == list(LABELS)
    choices = json.loads((folder / "runs/checkpoint-576/run.json").read_text())["choices"]
    assert [one.split()[1] for one in choices] == ["fp8-channel", "w4a16-g64"]


def test_it_is_judged(folder: Path, done: subprocess.CompletedProcess[str]) -> None:
    gates = GateReport.load(folder / "runs/checkpoint-576/gates.json")
    assert set(gates.overall) == set(LABELS[1:])
