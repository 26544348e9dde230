"""docs/records.md: the fields it names are there, and its example runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from synthetic_run import make_measurements

from assay.records.base import Part
from assay.records.choice.record import Choice
from assay.records.deployment.record import Deployment
from assay.records.manifest import Manifest
from assay.records.measurement import ItemResult, Measurement, TaskResult
from assay.records.run import RunRecord
from assay.records.speed import SpeedRecord
from assay.records.verdict import GateReport, RegisteredGates, Verdict
from assay_evaluate.client.journal import Identity, Journal, Reply, Request
from assay_evaluate.verdicts.run_comparison import RunComparison
from assay_pipeline.status import RunStatus
from assay_reports.schema import Report, Row

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "records.md").read_text()
SECTIONS: dict[str, type] = {
    "run.json": RunRecord, "assay_manifest.json": Manifest, "measurements/LABEL.json": Measurement, "tasks": TaskResult,
    "items": ItemResult, "gates.registered.json": RegisteredGates, "gates.json": GateReport, "verdicts": Verdict,
    "deployment/PROFILE/LABEL.json": Deployment, "speed.json": SpeedRecord, "choice.json": Choice,
    "report/report.json": Report, "rows": Row, "assay status --json": RunStatus, "assay compare --json": RunComparison,
}  # fmt: skip
WHOLE = (
    "run.json", "assay_manifest.json", "deployment/PROFILE/LABEL.json", "speed.json", "choice.json", "assay status --json",
    "assay compare --json",
)  # fmt: skip
"""Sections that name every field."""


def fields_of(record: type) -> set[str]:
    names = record.model_fields if issubclass(record, Part) else record.__dataclass_fields__  # type: ignore[attr-defined]
    return set(names) - {"kind", "schema_version"} if record not in (TaskResult, Row) else set(names)


def documented(section: str) -> set[str]:
    """Names in the first column of the section's table."""
    body = re.split(r"^##+ ", PAGE.split(f"# {section}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]
    cells = [line.split("|")[1] for line in body.splitlines() if line.startswith("| `")]
    return {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}


@pytest.mark.parametrize("section", SECTIONS)
def test_fields_are_there(section: str) -> None:
    named, there = documented(section), fields_of(SECTIONS[section])
    assert named and named <= there, named - there
    if section in WHOLE:
        assert named == there


def test_every_question_that_was_answered_wrong(tmp_path: Path) -> None:
    example = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert example is not None and len(example[1].splitlines()) <= 14
    measured = next(m for m in make_measurements() if m.label == "w4a16")
    measured.save(tmp_path / "measurements" / "w4a16.json")
    items = measured.tasks[0].items
    wrong = [one.item for one in items if one.correct is False]
    who = Identity(measured.checkpoint_sha256, "f", "quick")
    with Journal(tmp_path / "journal.db") as journal:
        for sample in (0, 1):
            for one in items:
                long = "x" * 5000 if one.item == wrong[0] else ""
                body = {"messages": [{"role": "user", "content": f"question {one.item}{long}"}]}
                request = Request("arithmetic", one.item, sample, "/v1/chat/completions", body)
                journal.write_requests([(request.key(who), request)], who)
                journal.write_replies([(request.key(who), Reply("answered", f"reply {one.item} {sample}"), 1)])
    done = subprocess.run(
        [sys.executable, "-c", example[1], str(tmp_path), "w4a16", "arithmetic"], capture_output=True, text=True, check=True
    )
    lines = [line.removesuffix("x" * 5000) for line in done.stdout.splitlines()]
    assert lines == [line for item in wrong for line in (item, f"question {item}", f"reply {item} 0")]
