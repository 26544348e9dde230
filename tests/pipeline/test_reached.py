"""Right answers reached and lost, from servers whose replies think, through an evaluation, to the report."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_server import Scripted
from scripted_world import World, make_folders, pair_of

from assay.recipes.suite import ArithmeticTask, SuiteRecipe
from assay.records.reached import REACHED_NAME, Reached, ReachedAndLost
from assay_evaluate.statistics.graded import graded_difference
from assay_evaluate.statistics.paired import paired_difference
from assay_evaluate.statistics.proportions import wilson
from assay_evaluate.tasks.generated import arithmetic_items
from assay_pipeline.judging import report
from assay_reports.schema import Report

SUITE = SuiteRecipe.model_validate(
    {
        "schema": 1, "name": "small", "seed": "eval-small", "acceptance": False,
        "tasks": [{"kind": "arithmetic", "name": "sums", "num_items": 10, "num_steps": [2], "languages": ["en"],
                   "max_tokens": 400}],
    }
)  # fmt: skip
SUMS = SUITE.tasks[0]
assert isinstance(SUMS, ArithmeticTask)
ITEMS = list(arithmetic_items(SUMS, SUITE.seed))
NUMBER = {item.prompt: number for number, item in enumerate(ITEMS)}


def asked(body: dict[str, Any]) -> tuple[int, str]:
    """Number of the item, and its answer."""
    number = NUMBER[body["messages"][-1]["content"]]
    return number, str(ITEMS[number].answer)


def right(body: dict[str, Any]) -> Scripted:
    return Scripted(f"#### {asked(body)[1]}", reasoning=f"It is {asked(body)[1]}.")


def quantized(body: dict[str, Any]) -> Scripted:
    """0 and 1 reach the answer and give another; 2 is cut inside thinking, behind the answer; 3 never has it."""
    number, answer = asked(body)
    if number in {0, 1}:
        return Scripted("#### 1000", reasoning=f"It is {answer}. Wait: it is 1000.")
    if number == 2:
        return Scripted("", reasoning=f"It is {answer}. {'Wait. ' * 60}"[:400], finish_reason="length")
    return Scripted("#### 1000", reasoning="It is 1000.") if number == 3 else right(body)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("reached")
    world, folders = World(), make_folders(place)
    replies: dict[str, Callable[[dict[str, Any]], Scripted]] = {"reference": right, "candidate": quantized}
    world.reply = replies
    world.measure(place / "tiny", pair_of(folders), SUITE)
    return place / "tiny"


def rows_of(run_dir: Path) -> dict[str, tuple[Reached, ...]]:
    report(run_dir)
    written = Report.load(run_dir / "report" / "report.json")
    return {row.label: row.reached for row in written.rows}


def test_a_finished_run_is_read_again(run_dir: Path) -> None:
    """Every server has gone: all that is known comes from records and stored replies."""
    nothing: dict[str, Any] = {
        "task": "sums", "num_wrong": 0, "num_unknown": 0, "num_cut": 0, "num_reached": 0, "num_reached_cut": 0, "share": None,
        "chance": None, "beyond_chance": None,
    }  # fmt: skip
    assert rows_of(run_dir) == {
        "fp8": (Reached(label="fp8", **nothing),),
        "fp8-repeat": (
            Reached(label="fp8-repeat", lost_more=paired_difference(0, 0, 10), lost_more_by_chance=0.0, **nothing),
        ),
        "w4a16": (
            Reached(
                label="w4a16", task="sums", num_wrong=4, num_unknown=0, num_cut=1, num_reached=3, num_reached_cut=1,
                share=wilson(3, 4), chance=0.0, beyond_chance=graded_difference([1, 1, 1, 0], [0, 0, 0, 0]),
                lost_more=paired_difference(3, 0, 10), lost_more_by_chance=0.0,
            ),
        ),
    }  # fmt: skip
    markdown = (run_dir / "report" / "report.md").read_text()
    page = (run_dir / "report" / "index.html").read_text()
    heading = "Right answers reached and lost: no task shows more than in fp8"
    assert heading in markdown and heading in page
    assert "| sums | w4a16 | 4 | 75.0 % [30.1, 95.4] | 0.0 % | -30.0 [" in markdown


def test_the_record_is_made_once(run_dir: Path) -> None:
    """And anew where it is gone, damaged, or of other measurements; without the journal it stays as it is."""
    place, journal = run_dir / REACHED_NAME, run_dir / "journal.db"
    before = rows_of(run_dir)
    first, written = place.read_bytes(), place.stat().st_mtime_ns
    assert rows_of(run_dir) == before and place.stat().st_mtime_ns == written
    for text in (None, "{}", first.decode().replace('"rule": 1', '"rule": 0'), first.decode().replace('"fp8": "', '"fp8": "0')):
        place.unlink() if text is None else place.write_text(text)
        assert rows_of(run_dir) == before
        assert place.read_bytes() == first
    kept = journal.read_bytes()
    journal.unlink()
    assert rows_of(run_dir) == before
    place.unlink()
    for damage in (None, b"no database"):
        if damage is not None:
            journal.write_bytes(damage)
        reasons = {reached.not_measured for row in rows_of(run_dir).values() for reached in row}
        assert reasons == {"the run has no journal.db that can be read"}
        assert ReachedAndLost.load(place).replies_read is False
    journal.write_bytes(kept)
    assert rows_of(run_dir) == before  # what could not be read then is read now
