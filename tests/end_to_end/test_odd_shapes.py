"""A checkpoint by path with hidden size 576, four experts and an MTP block goes through `assay run` without a flag.

Its weights are random: it answers nothing right and never stops by itself, and the run says so instead of a score.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_families import glm4_moe, make_tiny

from assay.records.measurement import Measurement
from assay.records.run import RunRecord
from assay.records.verdict import GateReport
from assay_reports.schema import Report

pytestmark = pytest.mark.serve

SUITE = """schema: 1
name: few
seed: eval-few-1
tasks:
  - {kind: arithmetic, name: arithmetic, languages: [en], num_items: 30, num_steps: [3], max_tokens: 24}
divergence: {languages: [en, zh], num_documents: 2, max_tokens: 32, top_k: 64}
acceptance: true
"""
IN_PLACE = ["precision fp8-channel in place of fp8", "precision w4a16-g64 in place of w4a16"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the command runs; the checkpoint, in two shards, is `odd`."""
    folder = tmp_path_factory.mktemp("odd_shapes")
    odd = glm4_moe(
        hidden_size=576, num_attention_heads=9, num_key_value_heads=3, moe_intermediate_size=320, num_hidden_layers=2
    )
    make_tiny(folder / "odd", odd, shards=2)
    (folder / "few.yaml").write_text(SUITE)
    return folder


@pytest.fixture(scope="module")
def printed(folder: Path) -> str:
    command = [sys.executable, "-c", "from assay.cli import main; main()", "run", "odd", "--suite", "few.yaml"]
    done = subprocess.run(
        command, cwd=folder, env=os.environ | {"COLUMNS": "200"}, capture_output=True, text=True, check=False
    )  # fmt: skip
    assert done.returncode == 1, done.stderr  # not every candidate is PASS
    return done.stdout + done.stderr


def test_what_fits_was_chosen_said_once_and_kept(folder: Path, printed: str) -> None:
    assert [printed.count(f"note: {why}: model.layers.") for why in IN_PLACE] == [1, 1]
    assert [why.partition(":")[0] for why in RunRecord.load(folder / "runs/odd/run.json").choices] == IN_PLACE
    report = Report.load(folder / "runs/odd/report/report.json")
    assert {row.label for row in report.rows} == {"fp8-channel", "fp8-channel-repeat", "bf16", "w4a16-g64", "nvfp4a16"}
    assert all(why in (folder / "runs/odd/report/report.md").read_text() for why in IN_PLACE)


def test_a_model_that_answers_nothing_is_not_measured_and_never_passes(folder: Path, printed: str) -> None:
    gates = GateReport.load(folder / "runs/odd/gates.json")
    scores = {v.candidate: v for v in gates.verdicts if v.gate == "score arithmetic"}
    assert {v.status for v in scores.values()} == {"NOT MEASURED"}
    cut = "30 of 30 replies of fp8-channel to arithmetic were cut off at 24 tokens (100 %, allowed 5 %)"
    assert all(v.detail.startswith(cut) for v in scores.values()), scores
    assert "PASS" not in set(gates.overall.values())
    assert all(gates.reasons[name] in printed for name in ("w4a16-g64", "nvfp4a16"))


@pytest.mark.parametrize("precision", ["fp8-channel", "w4a16-g64", "nvfp4a16"])
def test_the_mtp_block_was_kept_and_drafts(folder: Path, printed: str, precision: str) -> None:
    measured = Measurement.load(folder / f"runs/odd/measurements/{precision}.json")
    assert measured.acceptance is not None and measured.acceptance.num_draft_tokens > 100
    assert measured.divergence is not None or precision == "fp8-channel"
