"""`assay status`: made, verified, measured, missing, in work; nothing is started and nothing written."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

import pytest
from command_errors import one_error
from command_line import Run
from deployments import make_deployment, seen
from synthetic_run import checkpoint_sha256, make_run, write_checkpoint

from assay.records.measurement import Measurement
from assay.records.run import RunRecord, SourceData
from assay.records.speed import NotMeasured, SpeedRecord, SpeedRepeat, SpeedRow
from assay.records.verdict import GateReport
from assay_evaluate.client.journal import Identity, Journal, Reply, Request
from assay_evaluate.client.journal_reading import count_replies
from assay_pipeline.run_folders import locked_run
from assay_pipeline.status import RunStatus, SpeedStatus
from assay_quantize.checkpoint.file_names import JOURNAL


@pytest.fixture
def run_dir(run: Run) -> Path:
    """Of tiny-glm, in runs/ of the working directory. Its manifests are of shards that are not there."""
    folder = make_run(Path("runs"))
    RunRecord(model="tiny-glm", source=SourceData(location="zai-org/tiny-glm")).save(folder / "run.json")
    return folder


def state_of(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_a_finished_run(run: Run, run_dir: Path) -> None:
    before = state_of(Path("runs"))
    code, out, err = run("status", "tiny-glm")
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "runs/tiny-glm: tiny-glm, made from zai-org/tiny-glm; not evaluated yet",
        "checkpoint     made                 verified  measured      verdict",
        "fp8            9.1 MB               passed    2 of 2 tasks  reference",
        "w4a16          6.3 MB               passed    2 of 2 tasks  PASS",
        "w4a16-channel  missing                        no",
        "w4a16-gptq     missing                        no",
        "nvfp4a16       6.7 MB               passed    2 of 2 tasks  UNDERPOWERED",
        "auto-4.5bpw    missing                        no",
        "bf16           14.6 MB, elsewhere             2 of 2 tasks  PASS",
        "fp8-repeat     the reference again            2 of 2 tasks  PASS",
    ]
    assert state_of(Path("runs")) == before
    code, out, _ = run("status", "runs/tiny-glm", "--json")
    assert code == 0 and [one.label for one in RunStatus.model_validate_json(out).checkpoints][:2] == ["fp8", "w4a16"]


def test_speeds_and_the_choice(run: Run, run_dir: Path) -> None:
    """Counted by origin; those of other bytes apart; a choice whose verdicts have changed is called outdated."""

    def row(label: str, **more: Any) -> SpeedRow:
        given = {"origin": "measured", "source": "s", "hardware": "a CPU", "num_gpus": 0, "speculation": 0, "prompts": "chat"}
        return SpeedRow(
            checkpoint=label, concurrency=1, repeats=(SpeedRepeat(output_tokens_s=9.0),), **(given | more)
        )  # fmt: skip

    measured = row("fp8", checkpoint_sha256=checkpoint_sha256("fp8"))
    rows = (measured, row("bf16", checkpoint_sha256="0" * 64), row("w4a16", origin="imported"))
    left = NotMeasured(checkpoint="nvfp4a16", reason="emulated: x")
    SpeedRecord(rows=rows, not_measured=(left,)).save(run_dir / "speed.json")
    assert run("choose", "tiny-glm")[0] == 0
    code, out, err = run("status", "tiny-glm")
    assert (code, err) == (0, "") and out.splitlines()[-2:] == [
        "speed: 1 measured, 1 imported points of fp8; none of nvfp4a16; of other bytes than now: bf16",
        "choice: fp8 at 1 stream",
    ]
    gates = GateReport.load(run_dir / "gates.json")
    gates.model_copy(update={"overall": gates.overall | {"w4a16": "FAIL"}}).save(run_dir / "gates.json")
    assert run("status", "tiny-glm")[1].splitlines()[-1] == (
        "choice: fp8 at 1 stream; outdated: w4a16 was PASS then and is FAIL now"
    )
    found = RunStatus.model_validate_json(run("status", "tiny-glm", "--json")[1])
    assert found.speed == SpeedStatus(
        points={"measured": 1, "imported": 1}, checkpoints=("fp8",), other_bytes=("bf16",),
        not_measured={"nvfp4a16": "emulated: x"},
    )  # fmt: skip


def test_where_a_verdict_travels(run: Run, run_dir: Path) -> None:
    make_deployment().save(run_dir / "deployment" / "4xh200" / "w4a16.json")
    make_deployment(seen(profile="4xb200", probes=None)).save(run_dir / "deployment" / "4xb200" / "w4a16.json")
    code, out, _ = run("status", "tiny-glm")
    assert code == 0 and out.splitlines()[3].endswith("  PASS; not known on 4xb200; also holds on 4xh200")
    _, out, _ = run("status", "tiny-glm", "--json")
    found = {one.label: one.deployments for one in RunStatus.model_validate_json(out).checkpoints}
    assert found["w4a16"] == {"4xb200": "NOT MEASURED", "4xh200": "PASS"} and found["nvfp4a16"] == {}


def test_what_is_missing_begun_or_of_another_checkpoint(run: Run, run_dir: Path) -> None:
    for label in ("nvfp4a16", "w4a16"):
        (run_dir / f"measurements/{label}.json").unlink()
    (run_dir / "gates.json").unlink()
    for name in ("plan.json", "verify.json", "checkpoint/assay_manifest.json"):
        (run_dir / "nvfp4a16" / name).unlink()
    (run_dir / "nvfp4a16" / "checkpoint" / JOURNAL).write_text('{"plan": "x"}\n{"name": "a"}\n{"name": "b"}\n')
    path = run_dir / "measurements/fp8.json"
    Measurement.load(path).model_copy(update={"checkpoint_sha256": "0" * 64}).save(path)
    with Journal(run_dir / "journal.db") as journal:
        who = Identity(checkpoint_sha256("w4a16"), "f")
        journal.write_requests([("a", Request("t", "i", 0, "/p", {})), ("b", Request("t", "j", 0, "/p", {}))], who)
        journal.write_replies([("a", Reply("answered", "x"), 1)])
        assert count_replies(journal.path) == {who.checkpoint_sha256: 1}
    code, out, _ = run("status", "tiny-glm")
    assert code == 0
    assert [line.split("  ", 1)[1].split() for line in out.splitlines()[2:7] if " missing " not in line] == [
        ["8.99", "MB", "passed", "before", "it", "was", "made", "again", "reference"],
        ["6.38", "MB", "passed", "begun,", "1", "replies"],
        ["unfinished,", "2", "shards", "no"],
    ]


def test_what_is_in_work_and_a_precision_nobody_made(run: Run) -> None:
    folder = Path("runs/tiny-glm")
    write_checkpoint(folder, "fp8")
    RunRecord(model="tiny-glm", source=SourceData(location="zai-org/tiny-glm")).save(folder / "run.json")
    (folder / "w4a16/checkpoint").mkdir(parents=True)
    with locked_run(folder), (folder / "w4a16/checkpoint" / JOURNAL).open("w") as journal:
        fcntl.flock(journal, fcntl.LOCK_EX)
        _, out, _ = run("status", "tiny-glm")
        _, listed, _ = run("status")
    assert out.splitlines()[1:3] == [f"in work: evaluate, pid {os.getpid()}", "in work: quantize w4a16"]
    assert [line.split()[:2] for line in out.splitlines()[4:]] == [
        ["fp8", "8.99"], ["w4a16", "unfinished,"], ["w4a16-channel", "missing"], ["w4a16-gptq", "missing"],
        ["nvfp4a16", "missing"], ["auto-4.5bpw", "missing"],
    ]  # fmt: skip
    assert listed.splitlines()[1].split() == [
        "runs/tiny-glm", "1", "0", "of", "2", "evaluate", "(pid", f"{os.getpid()}),", "quantize",
    ]  # fmt: skip
    _, out, _ = run("status", "tiny-glm")
    assert "in work" not in out


def test_a_scored_task_that_the_gate_calls_not_measured_is_named(run: Run, run_dir: Path) -> None:
    """A score that cannot be believed is none for the gate, though every item was scored."""
    path = run_dir / "gates.json"
    gates = GateReport.load(path)
    verdicts = [
        one.model_copy(update={"status": "NOT MEASURED"}) if one.gate == "score needle" else one for one in gates.verdicts
    ]
    gates.model_copy(update={"verdicts": tuple(verdicts)}).save(path)
    measured = run_dir / "measurements/w4a16.json"
    Measurement.load(measured).model_copy(update={"not_measured": {"acceptance": "nothing was drafted"}}).save(measured)
    _, out, _ = run("status", "tiny-glm")
    assert "2 of 2 tasks, without acceptance, no verdict on needle  PASS" in out
    found = RunStatus.model_validate_json(run("status", "tiny-glm", "--json")[1])
    assert {one.label: one.tasks_without_verdict for one in found.checkpoints} == {
        "fp8": (), **dict.fromkeys(("w4a16", "nvfp4a16", "bf16", "fp8-repeat"), ("needle",)),
        **dict.fromkeys(("w4a16-channel", "w4a16-gptq", "auto-4.5bpw"), ()),
    }  # fmt: skip


def test_runs_is_refused_where_run_is_a_folder(run: Run, run_dir: Path) -> None:
    for command in ("status", "gate", "report", "card"):
        assert one_error(run(command, "runs/tiny-glm", "--runs", "elsewhere")) == (
            "--runs is not used with the folder of a run; leave it out"
        )
    assert one_error(run("compare", "runs/tiny-glm", "runs/tiny-glm", "--runs", "x")).startswith("--runs is not used with")
    assert "are the same run" in one_error(run("compare", "tiny-glm", "runs/tiny-glm", "--runs", "runs"))


def test_all_runs_and_one_of_them_damaged(run: Run, run_dir: Path) -> None:
    Path("runs/other").mkdir()
    Path("runs/other/run.json").write_text("{")
    code, out, _ = run("status")
    assert code == 0
    lines = out.splitlines()
    assert [line.split()[0] for line in lines] == ["run", "runs/other", "runs/tiny-glm"]
    assert "damaged: runs/other/run.json: not a RunRecord record of schema 1" in lines[1]
    assert one_error(run("status", "other")).startswith("runs/other/run.json: not a RunRecord record of schema 1")
    assert one_error(run("status", "nothing")) == (
        "nothing: no run of that name; the folder runs has other, tiny-glm; `assay run TARGET` makes one"
    )


def test_names_of_folders_and_records_are_text(run: Run, run_dir: Path) -> None:
    (run_dir / "[bold]x" / "checkpoint").mkdir(parents=True)
    path = run_dir / "measurements/w4a16.json"
    Measurement.load(path).model_copy(update={"not_measured": {"[/a]\n\x1b[2J": "why"}}).save(path)
    code, out, err = run("status", "tiny-glm")
    assert (code, err) == (0, "") and "[bold]x" in out and "without [/a]\\n\\u001b[2J" in out and "\x1b" not in out


def test_no_runs_at_all(run: Run) -> None:
    assert run("status") == (0, "", "runs: no runs\n")
    assert run("status", "--json") == (0, "[]\n", "")
    assert not Path("runs").exists()
