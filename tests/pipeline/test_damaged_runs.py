"""Run folders in which a record is damaged: one line that names the file, exit 2, no traceback."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from command_errors import one_error
from command_line import Run
from probe_reports import CLEAN, probed
from synthetic_run import make_run

from assay.recipes.load import load_recipe
from assay.recipes.suite import SuiteRecipe
from assay.records.base import sha256_of
from assay.records.manifest import MANIFEST
from assay.records.probe import probes_place
from assay.records.run import RunRecord, SourceData
from assay.records.verdict import RegisteredGates
from assay_pipeline.gate_choice import REGISTERED_GATES, load_gates

pytestmark = pytest.mark.slow


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-30])


def write(data: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(data)


def make_a_pipe(path: Path) -> None:
    """That nobody writes to."""
    path.unlink()
    os.mkfifo(path)


def make_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: dict[str, Callable[[Path], object]] = {
    "truncated": truncate, "empty": write(b""), "a list": write(b"[]"), "not UTF-8": write(b'{"model": "\xff"}'),
    "nested": write(b"[" * 100_000), "a folder": make_a_folder, "a pipe": make_a_pipe,
}  # fmt: skip
FILES = {
    "run.json": ("status", "quantize"),
    "measurements/w4a16.json": ("status", "gate", "report", "card", "compare"),
    "gates.json": ("status", "report", "card", "compare"),
    REGISTERED_GATES: ("gate", "report", "card"),
    "w4a16/plan.json": ("report", "card"),
    "w4a16/verify.json": ("status", "report", "card"),
    f"w4a16/checkpoint/{MANIFEST}": ("status", "report", "card"),
    "probes/w4a16.json": ("gate", "report"),
}
"""File -> the commands that read it."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two runs."""
    folder = tmp_path_factory.mktemp("damaged")
    for runs in ("runs", "others"):
        run_dir = make_run(folder / runs)
        RunRecord(model="tiny-glm", source=SourceData(location="x")).save(run_dir / "run.json")
        probed("w4a16", *CLEAN).save(probes_place(run_dir, "w4a16"))
        gates = load_gates("default", load_recipe(SuiteRecipe, "quick"))
        recipe = gates.model_dump(mode="json", by_alias=True)
        RegisteredGates(named="default", sha256=sha256_of(recipe), recipe=recipe).save(run_dir / REGISTERED_GATES)
    return folder


@pytest.mark.parametrize(
    ("file", "damage"),
    [(file, damage) for file in FILES for damage in ("truncated", "not UTF-8", "a folder", "a pipe")]
    + [("measurements/w4a16.json", damage) for damage in ("empty", "a list", "nested")],
)
def test_one_line_names_the_file(run: Run, base: Path, file: str, damage: str) -> None:
    shutil.copytree(base, ".", dirs_exist_ok=True)
    path = Path("runs/tiny-glm", file)
    DAMAGES[damage](path)
    if file == f"w4a16/checkpoint/{MANIFEST}" and damage in {"a folder", "a pipe"}:
        return  # as of a checkpoint that is not finished
    for command in FILES[file]:
        words: tuple[object, ...] = ("runs/tiny-glm",)
        if command == "compare":
            words = ("others/tiny-glm", "runs/tiny-glm")
        if command == "quantize":
            words = ("tiny-glm", "--precision", "w4a16")
        assert one_error(run(command, *words)).startswith(f"{path}: "), command
    if file == "run.json":
        assert run("status")[1].count(f"damaged: {path}: ") == 1


def test_what_the_gate_refuses_is_not_shown(run: Run, base: Path) -> None:
    shutil.copytree(base, ".", dirs_exist_ok=True)
    path = Path("runs/tiny-glm", REGISTERED_GATES)
    path.write_text(re.sub(r'"max_drop": [0-9.]+', '"max_drop": 0.9', path.read_text(), count=1))
    for command in ("gate", "report", "card"):
        assert one_error(run(command, "runs/tiny-glm")) == (
            f"{path}: was changed after the gates were registered; put the file back, or measure under another --name"
        )


def test_a_name_that_no_file_system_takes(run: Run) -> None:
    for command in ("quantize", "evaluate", "run"):
        assert one_error(run(command, "tiny-glm", "--name", "x" * 300)) == (
            f"--name {'x' * 200}…: is 300 bytes long, 100 are allowed"
        )
    assert not Path("runs").exists()


@pytest.mark.parametrize("as_json", [(), ("--json",)])
def test_a_card_that_cannot_be_written_is_no_success(run: Run, base: Path, as_json: tuple[str, ...]) -> None:
    shutil.copytree(base, ".", dirs_exist_ok=True)
    place = Path("runs/tiny-glm/w4a16/checkpoint/README.md")
    place.mkdir()
    code, out, err = run("card", "runs/tiny-glm", *as_json)
    assert (code, err) == (2, f"{place}: cannot be written: Is a directory\n")
    assert "fp8/checkpoint/README.md" in out and "nvfp4a16/checkpoint/README.md" in out


def test_a_card_that_the_disk_does_not_take_is_no_verdict(run: Run, base: Path) -> None:
    """The card that lies there may say what is no longer true; report and verdicts are written all the same."""
    shutil.copytree(base, ".", dirs_exist_ok=True)
    place, report = Path("runs/tiny-glm/w4a16/checkpoint/README.md"), Path("runs/tiny-glm/report/index.html")
    place.mkdir()
    report.unlink(missing_ok=True)
    assert one_error(run("gate", "runs/tiny-glm")) == (
        f"{place}: cannot be written: Is a directory; run `assay card runs/tiny-glm` when it can be"
    )
    assert report.is_file() and (place.parents[2] / "fp8/checkpoint/README.md").is_file()


def test_a_card_that_nobody_may_write_is_left(run: Run, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(base, ".", dirs_exist_ok=True)

    def refuse(made: object, label: str) -> Path:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("assay_reports.card._write", refuse)
    code, _, err = run("gate", "runs/tiny-glm")
    assert code != 2 and "runs/tiny-glm/w4a16/checkpoint/README.md: cannot be written: Read-only file system" in err


def test_a_run_that_was_only_begun_is_a_run(run: Run) -> None:
    """An evaluation was interrupted before its first measurement; `status` lists it."""
    RunRecord(model="m", source=SourceData(location="x")).save(Path("runs/begun/run.json"))
    assert one_error(run("gate", "begun")) == "runs/begun: nothing was measured yet; run `assay evaluate` first"


@pytest.mark.parametrize("name", [".lock", "w4a16/checkpoint/assay_journal.jsonl", "journal.db"])
def test_a_pipe_in_place_of_a_lock_or_a_journal_makes_nobody_wait(run: Run, base: Path, name: str) -> None:
    shutil.copytree(base, ".", dirs_exist_ok=True)
    Path("runs/tiny-glm/w4a16/checkpoint", MANIFEST).unlink()
    os.mkfifo(Path("runs/tiny-glm", name))
    code, out, err = run("status", "tiny-glm")
    assert (code, err) == (0, "") and "in work" not in out


def test_a_report_is_written_into_its_run_only(run: Run, base: Path) -> None:
    shutil.copytree(base, ".", dirs_exist_ok=True)
    Path("elsewhere").mkdir()
    Path("runs/tiny-glm/report").symlink_to(Path("elsewhere").resolve())
    assert one_error(run("report", "tiny-glm")) == (
        "runs/tiny-glm/report: is a link, and a report is written into its run only; delete the link"
    )
    assert list(Path("elsewhere").iterdir()) == []
