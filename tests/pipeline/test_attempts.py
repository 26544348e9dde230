"""Evaluations done again are found, counted and said."""

from __future__ import annotations

import errno
import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from synthetic_run import make_measurement

from assay.errors import AssayError
from assay.recipes.gate import GateRecipe
from assay.recipes.load import load_recipe
from assay.recipes.suite import SuiteRecipe
from assay.records.measurement import Measurement
from assay.records.verdict import Attempt, GateReport, Status
from assay_evaluate.verdicts.gates import judge
from assay_pipeline.attempts import NAME, earlier_attempts, note_attempts

SUITE = load_recipe(SuiteRecipe, "quick")
GATES = GateRecipe.model_validate(
    {"schema": 1, "name": "g", "gates": [{"kind": "score", "task": "arithmetic", "max_drop": 0.5}]}
)


def sides(hour: int, **changes: object) -> list[Measurement]:
    reference = make_measurement("fp8", SUITE)
    candidate = make_measurement("w4a16", SUITE).model_copy(
        update={"started": f"2026-11-28T{hour:02}:00:00.000+00:00"} | changes
    )
    return [reference, candidate]


def judged(measurements: list[Measurement], earlier: dict[str, tuple[Attempt, ...]] | None = None) -> GateReport:
    return judge(measurements, GATES, model="tiny-glm", earlier=earlier or {})


def with_status(report: GateReport, status: Status) -> GateReport:
    return report.model_copy(update={"overall": {"w4a16": status}})


def test_attempts_on_the_same_weights_are_counted_over_runs(tmp_path: Path) -> None:
    first, second, third = sides(1), sides(2), sides(3)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    assert earlier_attempts(tmp_path / "one", first) == {}
    note_attempts(tmp_path / "one", first, with_status(judged(first), "FAIL"))
    assert earlier_attempts(tmp_path / "one", first) == {}  # judged again, it is the same attempt
    note_attempts(tmp_path / "one", first, with_status(judged(first), "UNDERPOWERED"))  # by other gates
    [seen] = earlier_attempts(tmp_path / "two", second)["w4a16"]
    assert (seen.run, seen.label, seen.started, seen.status) == ("one", "w4a16", first[1].started, "UNDERPOWERED")
    note_attempts(tmp_path / "two", second, with_status(judged(second), "FAIL"))
    found = earlier_attempts(tmp_path / "one", third)
    assert [one.status for one in found["w4a16"]] == ["UNDERPOWERED", "FAIL"]
    report = judged(third, found)
    assert report.attempts == found
    assert report.overall == {"w4a16": "PASS"}
    assert report.reasons["w4a16"].endswith(
        "; attempt 3 on these weights, after UNDERPOWERED and FAIL: one of 3 attempts passes a lost margin in up to 7.5 %"
    )
    assert earlier_attempts(tmp_path / "one", first) == {}  # what came later is no earlier attempt


def test_other_weights_another_suite_and_the_repeat_are_no_attempts(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    note_attempts(run, sides(1), judged(sides(1)))
    other_serving = {"declared": {"flags.kv-cache-dtype": "fp8"}}
    repeat = {"is_noise_floor": True, "label": "fp8-repeat"}
    for changes in ({"checkpoint_sha256": "f" * 64}, {"suite": "full"}, other_serving, repeat):
        assert earlier_attempts(run, sides(2, **changes)) == {}
    assert list(earlier_attempts(run, sides(2, suite_sha256="e" * 64))) == ["w4a16"]  # another seed of the suite is one more


def test_a_list_that_is_damaged_or_cannot_be_written_loses_nothing_else(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    path = tmp_path / NAME
    path.write_bytes(b'{"torn": \n[[[[\n\xff\xfe\n{"run": 3}\n{"reference_sha256": "x"')
    note_attempts(run, sides(1), judged(sides(1)))
    assert list(earlier_attempts(run, sides(2))) == ["w4a16"]
    before = path.read_bytes()
    note_attempts(run, sides(1), judged(sides(1)))
    assert path.read_bytes() == before
    assert re.search(rb"\n\n?\{\"reference_sha256\":", before)


@pytest.mark.parametrize("fault", ["short", "kill"])
def test_a_write_that_was_cut_short_leaves_the_list_as_it_was(
    tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    run = tmp_path / "run"
    run.mkdir()
    note_attempts(run, sides(1), judged(sides(1)))
    path = tmp_path / NAME
    before = path.read_bytes()

    def fails(partial: Path, data: bytes) -> int:
        partial.open("wb", buffering=0).write(data[:100])
        raise OSError(errno.ENOSPC, "No space left on device") if fault == "short" else KeyboardInterrupt

    with monkeypatch.context() as context:
        context.setattr(Path, "write_bytes", fails)
        with pytest.raises(OSError if fault == "short" else KeyboardInterrupt):
            note_attempts(run, sides(2), judged(sides(2)))
    assert (sorted(tmp_path.iterdir()), path.read_bytes()) == ([path, run], before)
    note_attempts(run, sides(2), judged(sides(2)))
    assert path.read_bytes().startswith(before) and path.read_bytes().count(b"\n") == 2


def test_two_runs_judged_at_once_are_both_in_the_list(tmp_path: Path) -> None:
    def note(day: int) -> None:
        run = tmp_path / f"run{day}"
        run.mkdir()
        note_attempts(run, sides(day), judged(sides(day)))

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(note, range(1, 25)))
    assert {json.loads(line)["run"] for line in (tmp_path / NAME).read_text().splitlines()} == {
        f"run{day}" for day in range(1, 25)
    }


@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_what_is_no_list_of_ours_is_named(tmp_path: Path, kind: str) -> None:
    run = tmp_path / "run"
    run.mkdir()
    path = tmp_path / NAME
    os.mkfifo(path) if kind == "pipe" else path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(AssayError, match=f"{NAME}: is (a link|not a regular file), "):
        note_attempts(run, sides(1), judged(sides(1)))
