"""Every command of the tutorial, in order, with real servers; then those of other pages that need its run."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest
from page_commands import Block, blocks_of, pages
from page_runner import clone, first_not_printed, run_block
from warm import WarmVllm

from assay_reports.page.first_screen import first_screen
from assay_reports.schema import Report

pytestmark = [pytest.mark.serve, pytest.mark.timeout(1800)]

AFTERWARDS = [block for page in pages() for block in blocks_of(page) if block.needs == "run"]


@pytest.fixture(scope="module")
def walked(tmp_path_factory: pytest.TempPathFactory, warm_vllm: WarmVllm) -> Path:
    """The folder in which the tutorial was walked through; each of its commands ended, and printed, as the page says."""
    folder = tmp_path_factory.mktemp("walk")
    clone(folder, warm_vllm)
    for block in blocks_of("docs/tutorial.md"):
        if block.needs is None:
            run_block(block, folder)
    return folder


def test_the_tutorial_leaves_what_it_says(walked: Path) -> None:
    run = walked / "runs" / "tiny-glm"
    for name in ("report/index.html", "gates.json", "journal.db", "nvfp4a16/checkpoint/README.md", "nvfp4a16/verify.json"):
        assert (run / name).is_file(), name


@pytest.mark.parametrize("block", [pytest.param(one, id=one.where) for one in AFTERWARDS])
def test_what_needs_the_run_of_the_tutorial(walked: Path, block: Block) -> None:
    run_block(block, walked)


def test_the_commands_of_the_report_run_in_the_folder_of_runs(walked: Path) -> None:
    """That folder is where the page says they work; a command that compares two checkpoints exits 1 where they differ."""
    runs = walked / "runs"
    steps = first_screen(Report.load(runs / "tiny-glm" / "report" / "report.json")).steps
    commands = [step.command for step in steps if step.command is not None]
    assert commands == ["assay diagnose locate tiny-glm/fp8/checkpoint tiny-glm/nvfp4a16/checkpoint"]
    environment = os.environ | {"PATH": f"{walked / '.venv' / 'bin'}:{os.environ['PATH']}", "PYTHONSAFEPATH": "1"}
    done = subprocess.run(shlex.split(commands[0]), cwd=runs, env=environment, check=False, text=True, capture_output=True)
    assert done.returncode == 1 and "error:" not in done.stderr, done.stderr
    assert done.stdout


def test_what_is_held_against_the_page() -> None:
    printed = "a 12 MB in 3 s\nb\nFAIL c loses 36.0 points\n"
    assert first_not_printed("a 9 kB in 2 min\n...\nFAIL c loses 1 points", printed) is None
    assert first_not_printed("FAIL c ...", printed) is None
    assert first_not_printed("b\na 12 MB in 3 s", printed) == "a 12 MB in 3 s"
    assert first_not_printed("PASS c loses 36.0 points", printed) == "PASS c loses 36.0 points"
