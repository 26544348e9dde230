"""`assay compare`: two runs side by side; items are paired where the questions are the same, and only there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from command_errors import one_error
from command_line import Run
from pages import Page
from synthetic_run import make_run, make_task

from assay.records.measurement import AskedWith, Measurement
from assay_evaluate.statistics.item_pairs import pair_items
from assay_evaluate.verdicts.run_comparison import RunComparison


@pytest.fixture
def runs(run: Run) -> tuple[Path, Path]:
    """Two runs of equal records."""
    return make_run(Path("before")), make_run(Path("after"))


def change(folder: Path, name: str, /, **changes: object) -> None:
    path = folder / "measurements" / f"{name}.json"
    data = json.loads(path.read_text())
    path.write_text(json.dumps(data | changes))


def change_all(folder: Path, **changes: object) -> None:
    for path in (folder / "measurements").glob("*.json"):
        change(folder, path.stem, **changes)


def compared(run: Run, runs: tuple[Path, Path]) -> RunComparison:
    code, out, err = run("compare", *runs, "--json")
    assert (code, err) == (0, "")
    return RunComparison.model_validate_json(out)


def test_equal_runs(run: Run, runs: tuple[Path, Path]) -> None:
    found = compared(run, runs)
    assert [one.label for one in found.checkpoints] == ["fp8", "bf16", "nvfp4a16", "w4a16"], "not the repeat"
    for one in found.checkpoints:
        assert one.verdicts[0] == one.verdicts[1] and len(set(one.checkpoint_sha256)) == 1
        for task in one.tasks:
            assert task.lost is not None and task.lost.value == 0 and (task.discordant, task.p_value) == ((0, 0), 1)
    code, out, _ = run("compare", *runs)
    assert code == 0
    lines = [line.split() for line in out.splitlines()]
    assert out.splitlines()[:3] == [
        "first   before/tiny-glm: tiny-glm, reference fp8, suite quick",
        "second  after/tiny-glm: tiny-glm, reference fp8, suite quick",
        "same model, reference, suite and limits",
    ]
    assert lines[4] == ["fp8", "size", "9.1", "MB", "9.1", "MB", "the", "same", "checkpoint"]
    assert ["verdict", "UNDERPOWERED", "UNDERPOWERED"] in lines


def test_what_is_lost_from_the_first_to_the_second(run: Run, runs: tuple[Path, Path]) -> None:
    """The second run's w4a16 answers as nvfp4a16 does."""
    worse = make_task("arithmetic", "arithmetic", "nvfp4a16", num_items=100, base_accuracy=0.96, max_tokens=512, seed=0)
    before = Measurement.load(runs[0] / "measurements/w4a16.json")
    change(runs[1], "w4a16", tasks=[worse.model_dump(mode="json")], checkpoint_sha256="7" * 64)
    found = next(one for one in compared(run, runs).checkpoints if one.label == "w4a16")
    arithmetic, needle = found.tasks
    pairs = pair_items(before.tasks[0], worse)
    assert (arithmetic.num_pairs, arithmetic.lost, arithmetic.discordant) == (200, pairs.drop(0.95), pairs.discordant)
    assert pairs.discordant != (0, 0) and found.checkpoint_sha256[1] == "7" * 64
    assert (needle.lost, needle.not_paired) == (None, "the second run did not ask it")
    assert needle.scores == (before.tasks[1].accuracy, None)
    code, out, _ = run("compare", *runs)
    assert code == 0 and "gains 1.0 points (interval of at least 95 %: 3.6 gained to 0.9 lost), 200 pairs" in " ".join(
        out.split()
    )


def test_other_questions_are_not_paired(run: Run, runs: tuple[Path, Path]) -> None:
    suite = Measurement.load(runs[1] / "measurements/fp8.json").suite_recipe
    suite["tasks"][1]["num_needles"] = 6
    change_all(runs[1], suite_recipe=suite, suite_sha256="9" * 64)
    found = compared(run, runs)
    assert [task.not_paired for task in found.checkpoints[0].tasks] == [
        None, "other questions: task.num_needles (5, second 6)"
    ]  # fmt: skip
    assert found.checkpoints[1].kl_not_compared == "over other texts"
    code, out, _ = run("compare", *runs)
    assert code == 0 and f"other suites: quick ({found.first.suite_sha256[:12]}) and quick (999999999999)" in out
    assert out.splitlines()[-1] == (
        "needle of fp8, bf16, nvfp4a16, w4a16: not paired: other questions: task.num_needles (5, second 6)"
    )
    suite["seed"] = "eval-other"
    change_all(runs[1], suite_recipe=suite)
    assert all(task.lost is None for one in compared(run, runs).checkpoints for task in one.tasks)


def test_texts_made_for_another_reference_are_not_paired(run: Run, runs: tuple[Path, Path]) -> None:
    change_all(runs[0], reference_checkpoint_sha256=Measurement.load(runs[0] / "measurements/fp8.json").checkpoint_sha256)
    change_all(runs[1], reference_checkpoint_sha256="8" * 64)
    for path in (runs[1] / "measurements").glob("*.json"):
        divergence = json.loads(path.read_text())["divergence"]
        if divergence is not None:
            change(runs[1], path.stem, divergence=divergence | {"reference_checkpoint_sha256": "8" * 64})
    for label in ("fp8", "fp8-repeat"):
        change(runs[1], label, checkpoint_sha256="8" * 64)
    found = compared(run, runs)
    arithmetic, needle = found.checkpoints[1].tasks
    assert arithmetic.lost is not None
    assert needle.not_paired is not None and "made for the tokens of another reference" in needle.not_paired
    assert found.checkpoints[1].kl_not_compared == "against another reference"


def test_how_they_were_served_and_asked(run: Run, runs: tuple[Path, Path]) -> None:
    fingerprint = Measurement.load(runs[1] / "measurements/fp8.json").fingerprint
    flags = {**fingerprint.flags, "dtype": "bfloat16"}
    for path in (runs[1] / "measurements").glob("*.json"):
        there = json.loads(path.read_text())["fingerprint"]
        change(runs[1], path.stem, fingerprint=there | {"flags": flags})
    code, out, _ = run("compare", *runs)
    line = "served differently, so a difference may come from serving as well as from weights: flags.dtype (float32, second "
    assert code == 0 and line + "bfloat16)" in out and "not paired" not in out

    asked = AskedWith(
        is_chat=True, chat_template_sha256="a", chat_template_kwargs={}, reasoning_parser=None, tool_call_parser=None,
        sends_seeds=False,
    )  # fmt: skip
    change_all(runs[0], asked_with=asked.model_dump())
    change_all(runs[1], asked_with=asked.model_copy(update={"chat_template_sha256": "b"}).model_dump())
    found = compared(run, runs)
    assert found.asked_differently == ("chat_template_sha256 (a, second b)",)
    assert {task.not_paired for one in found.checkpoints for task in one.tasks} == {
        "asked differently: chat_template_sha256 (a, second b)"
    }


def test_what_cannot_be_compared(run: Run, runs: tuple[Path, Path]) -> None:
    assert one_error(run("compare", runs[0], runs[0])) == (
        "before/tiny-glm and before/tiny-glm are the same run, before/tiny-glm; name two"
    )
    for label in ("bf16", "w4a16", "nvfp4a16", "fp8", "fp8-repeat"):
        change(runs[1], label, label=f"x-{label}")
    assert one_error(run("compare", *runs)) == (
        "before/tiny-glm and after/tiny-glm have no checkpoint of one name, so nothing can be compared: fp8, bf16, nvfp4a16, "
        "w4a16 in the first, x-fp8, x-bf16, x-nvfp4a16, x-w4a16 in the second"
    )
    assert one_error(run("compare", runs[0])) == (
        "compare before/tiny-glm: only one run is named; name the run that it is compared with as well"
    )
    assert one_error(run("compare", runs[0], "none")).startswith("none: no run of that name")


# ------------------------------------------------------------------------------------------------ as a page
def test_three_runs_stand_on_one_page(run: Run, runs: tuple[Path, Path]) -> None:
    third = make_run(Path("third"))
    worse = make_task("needle", "needle", "w4a16", num_items=40, base_accuracy=0.4, max_tokens=256, seed=1)
    path = third / "measurements" / "w4a16.json"
    lost = Measurement.load(path)
    lost.model_copy(update={"tasks": (lost.tasks[0], worse)}).save(path)
    code, out, err = run("compare", *runs, third, "--out", "page.html")
    assert (code, err.splitlines()) == (0, ["page: page.html"])
    assert out.count("same model, reference, suite and limits") == 2, "each of the others beside the first"
    page = Page(Path("page.html").read_text(encoding="utf-8"))
    heads = [text for _, text in page.headings]
    drop = pair_items(Measurement.load(runs[0] / "measurements" / "w4a16.json").tasks[1], worse).drop(0.95)
    assert (
        heads[0] == "3 runs of tiny-glm"
        and "after/tiny-glm: no significant difference from the first run on shared items" in heads
    )
    assert f"third/tiny-glm compared with the first run: needle of w4a16 loses {100 * drop.value:.1f} points" in heads
    table = page.table("Checkpoints of all runs")
    assert [row[:2] for row in table.rows[1:]] == [
        [f"{name}/tiny-glm", label] for name in ("before", "after", "third") for label in ("bf16", "nvfp4a16", "w4a16")
    ]
    assert max(table.columns for table in page.tables) == 8
    picture, on_a_phone = page.pictures
    assert picture == on_a_phone
    assert picture.count("before/tiny-glm: w4a16, 6.3 MB: ") == 1 and picture.count(": fp8, 9.1 MB: ") == 3


def test_runs_whose_parents_are_called_alike_too_keep_apart(run: Run, runs: tuple[Path, Path]) -> None:
    """a/before/tiny-glm and b/before/tiny-glm: their names on the page have as many folders as tell them apart."""
    for name in ("a", "b"):
        shutil.copytree(runs[0], Path(name) / "before" / "tiny-glm")
    assert run("compare", "a/before/tiny-glm", "b/before/tiny-glm", runs[1], "--out", "page.html")[0] == 0
    page = Page(Path("page.html").read_text(encoding="utf-8"))
    names = [row[0] for row in page.table("Checkpoints of all runs").rows[1:]]
    assert list(dict.fromkeys(names)) == ["a/before/tiny-glm", "b/before/tiny-glm", "after/tiny-glm"]


def test_pages_that_cannot_be_written(run: Run, runs: tuple[Path, Path]) -> None:
    said = one_error(run("compare", *runs, "--out", "nowhere/page.html"))
    assert said == "nowhere/page.html: its folder does not exist; make it, or name another place with --out"
    said = one_error(run("compare", *runs, "--out", "."))
    assert said == ".: is a folder; name a file in it with --out"
    said = one_error(run("compare", *runs, make_run(Path("third")), "--json"))
    assert said == "compare: --json compares two runs, and 3 are named; compare them two at a time"
    said = one_error(run("compare", *runs, runs[1]))
    assert said.endswith("are the same run, after/tiny-glm; name two")
