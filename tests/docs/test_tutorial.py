"""Every command of the tutorial, in order, with real servers; then those of other pages that need its run."""

from __future__ import annotations

from pathlib import Path

import pytest
from page_commands import Block, blocks_of, pages
from page_runner import clone, first_not_printed, run_block
from warm import WarmVllm

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


def test_what_is_held_against_the_page() -> None:
    printed = "a 12 MB in 3 s\nb\nFAIL c loses 36.0 points\n"
    assert first_not_printed("a 9 kB in 2 min\n...\nFAIL c loses 1 points", printed) is None
    assert first_not_printed("FAIL c ...", printed) is None
    assert first_not_printed("b\na 12 MB in 3 s", printed) == "a 12 MB in 3 s"
    assert first_not_printed("PASS c loses 36.0 points", printed) == "PASS c loses 36.0 points"
