"""Trajectories of SWE-bench in the browser of items: what is read, what is cut and said, what is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from swe_run import TASK, Told, make_swe_run, place_of

from assay.records.measurement import Measurement
from assay_reports.page import trajectories
from assay_reports.page.items import _trajectories, browser, unpacked
from assay_reports.page.trajectories import Step, clipped
from assay_reports.run import load_run

TOKEN = "hf_" + "abcdEFGH1234" * 3
THEIRS: Told = (
    [("Look.", "ls", "a.py"), ("Read.", "cat a.py", "x = 1"), ("Mend.", "sed -i s/1/2/ a.py", "")],
    "diff --git a\n+2\n",
)
OURS: Told = ([("Look.", "ls", "a.py b.py"), ("Read.", "cat b.py", "y = 1")], "")


def entry(run_dir: Path, instance: str) -> tuple[str | None, dict[str, Any]]:
    """(prompt, label -> what the page has) of one instance."""
    found = browser(load_run(run_dir), run_dir)
    assert found is not None
    index = unpacked(found.index)
    rows = index["rows"]
    [question] = {q for q, item in zip(rows["question"], rows["item"], strict=True) if item == instance}
    chunk = max(i for i, start in enumerate(index["starts"]) if start <= question)
    prompt, *sides = unpacked(found.chunks[chunk])[question - index["starts"][chunk]]
    return prompt, {k: v for k, v in zip([index["reference"], *index["candidates"]], sides, strict=True) if v is not None}


def test_both_sides_stand_step_by_step_with_the_first_that_differs(tmp_path: Path) -> None:
    run_dir = make_swe_run(tmp_path, {"fp8": {"a__a-1": THEIRS}, "w4a16": {"a__a-1": OURS}}, "a.py says 1.")
    prompt, sides = entry(run_dir, "a__a-1")
    assert prompt == "a.py says 1."
    assert sides == {
        "fp8": {
            "steps": [
                [0, "Look.", "$ ls", "a.py"], [1, "Read.", "$ cat a.py", "x = 1"], [2, "Mend.", "$ sed -i s/1/2/ a.py", ""],
            ],
            "num_steps": 3, "patch": "diff --git a\n+2\n", "ended": "Submitted", "outcome": "resolved", "first": None,
            "output": None,
        },
        "w4a16": {
            "steps": [[0, "Look.", "$ ls", "a.py b.py"], [1, "Read.", "$ cat b.py", "y = 1"]],
            "num_steps": 2, "patch": "", "ended": "Submitted", "outcome": "empty patch", "first": 1, "output": 0,
        },
    }  # fmt: skip


def test_a_trajectory_that_only_ends_earlier_differs_where_it_ended() -> None:
    steps = [Step("Look.", "$ ls", "a.py"), Step("Read.", "$ cat a.py", "x")]
    assert trajectories._first_difference(steps, steps) == (None, None)
    assert trajectories._first_difference(steps, steps[:1]) == trajectories._first_difference(steps[:1], steps) == (1, None)


def test_500_steps_of_a_megabyte_are_bounded_and_what_was_cut_is_said(tmp_path: Path) -> None:
    """The steps around the first difference are there wherever it is; secrets are not, and no output is whole."""
    lines = "".join(chr(97 + i % 26) * 61 + "\n" for i in range(17_000))  # a megabyte
    long = [(f"Step {i}.", f"make {i}", lines if i in (3, 200) else f"{TOKEN} {i} " * 400) for i in range(500)]
    other = [*long[:250], ("Something else.", "rm -r .", ""), *long[251:]]
    run_dir = make_swe_run(tmp_path, {"fp8": {"a__a-1": (long, "p" * 50_000)}, "w4a16": {"a__a-1": (other, "")}})
    _, sides = entry(run_dir, "a__a-1")
    numbers = [step[0] for step in sides["w4a16"]["steps"]]
    assert numbers == [*range(30), *range(249, 254), *range(492, 500)] == [step[0] for step in sides["fp8"]["steps"]]
    assert (sides["w4a16"]["first"], sides["w4a16"]["num_steps"], sides["w4a16"]["steps"][31][2]) == (250, 500, "$ rm -r .")
    for side in sides.values():
        assert sum(len(text) for step in side["steps"] for text in step[1:]) <= trajectories.MOST_CHARACTERS
    seen = sides["fp8"]["steps"][3][3]
    assert seen.startswith(lines[:200]) and seen.endswith(lines[-200:])
    shown, _, rest = seen.partition("\n[... ")
    left_out, _, tail = rest.partition(" characters left out ...]\n")
    assert len(shown) + int(left_out.replace(",", "")) + len(tail) == len(lines) == 1_054_000
    assert TOKEN not in json.dumps(sides) and "[secret] 4" in sides["fp8"]["steps"][4][3]
    assert "\n[... 38,000 characters left out ...]\n" in sides["fp8"]["patch"]


@pytest.mark.parametrize(("most", "length"), [(100, 100), (100, 101), (50, 10_000_000), (12_000, 480_001)])
def test_a_cut_text_tells_exactly_how_much_is_gone(most: int, length: int) -> None:
    text = "".join(map(str, range(10))) * (length // 10 + 1)
    told = clipped(text[:length], most)
    head, _, rest = told.partition("\n[... ")
    gone, _, tail = rest.partition(" characters left out ...]\n")
    assert len(head) + int(gone.replace(",", "") or 0) + len(tail) == length if rest else told == text[:length]
    assert len(head) + len(tail) <= most and (len(told) > length or rest or length <= most)


@pytest.fixture(scope="module")
def run_and_file(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run, and the file of the candidate's trajectory."""
    run_dir = make_swe_run(tmp_path_factory.mktemp("swe"), {"fp8": {"a__a-1": THEIRS}, "w4a16": {"a__a-1": OURS}})
    measurement = Measurement.load(run_dir / "measurements" / "w4a16.json")
    return run_dir, place_of(run_dir, measurement) / "a__a-1" / "a__a-1.traj.json"


def found_with(run_and_file: tuple[Path, Path], data: Any) -> dict[str, Any]:
    """Label -> what is shown if the candidate's file holds `data`; the file is put back."""
    run_dir, path = run_and_file
    before = path.read_bytes()
    try:
        path.write_bytes(data if isinstance(data, bytes) else json.dumps(data).encode())
        run = load_run(run_dir)
        told = _trajectories(run, run_dir, {(TASK, "a__a-1", 0)})
        return told[TASK, "a__a-1", 0]
    finally:
        path.write_bytes(before)


def test_another_trajectory_than_the_one_that_was_graded_is_not_shown(run_and_file: tuple[Path, Path]) -> None:
    data = json.loads(run_and_file[1].read_text())
    assert found_with(run_and_file, data).keys() == {"", "fp8", "w4a16"}
    for told in (data | {"info": {"submission": "diff"}}, data | {"messages": data["messages"][:-3]}):
        assert found_with(run_and_file, told).keys() == {"", "fp8"}


DEEP = b"[" * 100_000
HOSTILE: list[Any] = [
    b"", b"{", b"[]", b"null", b"\xff\xfe", DEEP, b'{"messages": ' + DEEP,
    b'{"messages": {}, "info": []}', b'{"messages": [1]}',
    {"messages": [{"role": 3, "content": [7, {"text": {}}], "extra": {"response": []}}], "info": {"submission": 7}},
    {"messages": [{"extra": {"response": {"choices": [3], "usage": {"completion_tokens": 1e400}}, "actions": "ls"}}] * 2},
]  # fmt: skip


def test_what_is_no_trajectory_is_not_shown(run_and_file: tuple[Path, Path]) -> None:
    for data in HOSTILE:
        assert found_with(run_and_file, data).keys() == {"", "fp8"}, data[:60] if isinstance(data, bytes) else data


def test_odd_parts_of_a_trajectory_that_was_graded_are_left_out(run_and_file: tuple[Path, Path]) -> None:
    data = json.loads(run_and_file[1].read_text())
    data["messages"][2] |= {"content": [{"text": "Lo\ud800ok."}, {"text": 3}, None]}
    data["messages"][2]["extra"]["actions"] = [{"command": ["rm"]}, 7, {"command": "ls"}]
    data["messages"][3]["extra"] = {"raw_output": {"a": 1}, "returncode": "x"}
    data["messages"].insert(4, "no message")
    data["messages"][6]["extra"]["returncode"] = 2
    assert found_with(run_and_file, data)["w4a16"]["steps"] == [
        [0, "Lo\ufffdok.", "$ ls", "a.py b.py"], [1, "Read.", "$ cat b.py", "[exit 2]\ny = 1"],
    ]  # fmt: skip


def test_files_outside_the_run_are_not_opened(tmp_path: Path) -> None:
    run_dir = make_swe_run(tmp_path, {"fp8": {"a__a-1": THEIRS}, "w4a16": {"a__a-1": OURS}})
    path = place_of(run_dir, Measurement.load(run_dir / "measurements" / "w4a16.json")) / "a__a-1" / "a__a-1.traj.json"
    outside = tmp_path / "outside.json"
    path.rename(outside)
    path.symlink_to(outside)
    assert entry(run_dir, "a__a-1")[1].keys() == {"fp8"}
    path.unlink()
    os.mkfifo(path)
    assert entry(run_dir, "a__a-1")[1].keys() == {"fp8"}


def test_without_the_folder_the_page_says_that_there_are_outcomes_only(tmp_path: Path) -> None:
    run_dir = make_swe_run(tmp_path, {"fp8": {"a__a-1": THEIRS}, "w4a16": {"a__a-1": OURS}})
    (run_dir / "swe").rename(run_dir / "moved")
    found = browser(load_run(run_dir), run_dir)
    assert found is not None and TASK in unpacked(found.index)["tasks"]
    assert found.why_no_texts == (
        "journal.db is not in the run's folder, so there are outcomes only; swe/ of the run's folder holds no trajectory of "
        "SWE-bench that was graded, so of it there are outcomes only"
    )
