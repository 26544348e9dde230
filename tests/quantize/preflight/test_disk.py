"""One sum for each disk: what is there already is not counted, and streaming is proposed where it helps."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import hollow
import pytest
from huggingface_hub import constants

from assay.recipes.load import load_recipe
from assay.recipes.precision import PrecisionRecipe
from assay_quantize.checkpoint.checkpoint import Checkpoint, open_checkpoint
from assay_quantize.plan.planner import make_plan
from assay_quantize.preflight.disk import Writes, check_disk, staged_bytes

GB = 10**9


@pytest.fixture
def source(tmp_path: Path) -> Checkpoint:
    """On the hub: three shards, 38 GB."""
    opened = open_checkpoint(hollow.hollow_model(tmp_path / "source", "glm-5"))
    data = {shard: f"sha256:{number:064x}" for number, shard in enumerate(opened.shards)}
    return replace(opened, location="org/model", folder=None, data=data, revision="c" * 40)


@pytest.fixture
def writes(source: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Writes:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    plan = make_plan(source, load_recipe(PrecisionRecipe, "w4a16"), model="m", family=None)
    folder = tmp_path / "runs" / "m"
    return Writes(source, False, None, {"w4a16": (plan, folder / "w4a16" / "checkpoint")}, folder, GB)


def with_free(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=num_bytes))


def lines(writes: Writes, tmp_path: Path) -> list[tuple[str | None, str, str, str | None]]:
    def short(text: str | None) -> str | None:
        return text and text.replace(str(tmp_path), "TMP")

    return [(short(c.subject), c.outcome, short(c.detail) or "", short(c.remedy)) for c in check_disk(writes)]


def test_everything_is_one_sum(writes: Writes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_free(monkeypatch, 100 * GB)
    released = replace(writes.source, location="org/model-FP8")
    assert lines(replace(writes, released=released), tmp_path) == [
        (
            "TMP/hub and TMP/runs/m", "PASS",
            "22.2 GB still to be written (source org/model 7.82 GB, w4a16 5.55 GB, reference org/model-FP8 7.82 GB, "
            "journal, logs and report (allowed) 1 GB), 100 GB free",
            None,
        ),
    ]  # fmt: skip


def test_what_is_there_is_not_counted(writes: Writes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard in the hub's cache, and a shard that an interrupted run finished."""
    with_free(monkeypatch, 100 * GB)
    blobs = tmp_path / "hub" / "models--org--model" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{0:064x}").touch()
    (blobs / f"{1:064x}.abc.incomplete").touch()
    (plan, folder) = writes.folders["w4a16"]
    folder.mkdir(parents=True)
    (folder / next(tensor.shard_out for tensor in plan.tensors if tensor.shard_out)).touch()
    assert lines(writes, tmp_path) == [
        (
            "TMP/hub and TMP/runs/m", "PASS",
            "9.53 GB still to be written (source org/model 5.11 GB, w4a16 3.42 GB, journal, logs and report (allowed) 1 GB), "
            "100 GB free",
            None,
        ),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("free_gb", "remedy"),
    [
        (5, "free 9.63 GB, or put the runs on another disk (--runs DIR; make: RUNS=DIR), or put the hub's cache on another "
            "disk (HF_HUB_CACHE=DIR)"),
        (13, "--stream-from hub (make: STREAM=hub) keeps no source on the disk and fits, with 11.9 GB, or free 1.63 GB, or put "
             "the runs on another disk (--runs DIR; make: RUNS=DIR), or put the hub's cache on another disk "
             "(HF_HUB_CACHE=DIR)"),
    ],
)  # fmt: skip
def test_too_little_room(
    writes: Writes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_gb: int, remedy: str
) -> None:  # fmt: skip
    """Streaming helps where a checkpoint fits without its source."""
    with_free(monkeypatch, free_gb * GB)
    assert lines(writes, tmp_path) == [
        (
            "TMP/hub and TMP/runs/m", "FAIL",
            "14.4 GB still to be written (source org/model 7.82 GB, w4a16 5.55 GB, journal, logs and report (allowed) 1 GB), "
            f"{free_gb} GB free",
            remedy,
        ),
    ]  # fmt: skip


def test_a_source_that_is_served_too_cannot_be_streamed(
    writes: Writes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_free(monkeypatch, 13 * GB)
    ((_, outcome, _, remedy),) = lines(replace(writes, includes_source=True), tmp_path)
    assert outcome == "FAIL" and "--stream-from" not in str(remedy)


def test_disks_are_told_apart(writes: Writes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's cache on another disk than the runs."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", "/dev/shm/hub")
    with_free(monkeypatch, 100 * GB)
    assert [check.subject for check in check_disk(writes)] == ["/dev/shm/hub", str(writes.run_dir)]


def test_at_most_two_outputs_are_staged(writes: Writes) -> None:
    plan, _ = writes.folders["w4a16"]
    sizes = list(writes.source.shards.values())
    assert staged_bytes(plan, writes.source.shards) == max(sizes[0] + sizes[1], sizes[1] + sizes[2])
