"""Shards that are checked while others are made: the same findings, and nothing is taken of a file that was touched since."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoints import make_tiny_glm4_moe

from assay.errors import CheckpointError
from assay.recipes.load import load_recipe
from assay.recipes.precision import PrecisionRecipe
from assay.records.manifest import ShardRecord
from assay.records.plan import Plan
from assay.records.verification import Verification, is_as_verified
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.engine.quantize import quantize
from assay_quantize.plan.planner import make_plan
from assay_quantize.verify import headers as library
from assay_quantize.verify import slabs
from assay_quantize.verify.finished import FinishedShards
from assay_quantize.verify.verify import num_bytes_of, verify

SHARD = "model-00001-of-00002.safetensors"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "source"
    return make_tiny_glm4_moe(folder, num_layers=2, num_experts=2, hidden=128, dense_intermediate=128)


def plan_for(source: Path, precision: str) -> Plan:
    return make_plan(open_checkpoint(source), load_recipe(PrecisionRecipe, precision), model="tiny", family=None)


def flip_last_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def without_seconds(result: Verification) -> Verification:
    return result.model_copy(update={"seconds": 0.0})


@pytest.mark.parametrize("precision", ["w4a16", "nvfp4a16"])
def test_the_findings_are_those_of_verifying_afterwards(
    source: Path, tmp_path: Path, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, out = plan_for(source, precision), tmp_path / "made"
    told: list[int] = []
    with FinishedShards(plan, out, source, workers=2) as finished:
        quantize(plan, source, out, on_shard=finished.add, on_slab=finished.judge)
        finished.wait()
        looked: list[str] = []
        sound = slabs.SlabChecks.look
        monkeypatch.setattr(
            slabs.SlabChecks, "look", lambda self, tensor, *rows: (looked.append(tensor.name), sound(self, tensor, *rows))[1]
        )
        result = verify(out, source=source, finished=finished, on_progress=lambda _, count: told.append(count))
    assert looked == []
    headers = sum(8 + int.from_bytes(path.read_bytes()[:8], "little") for path in out.glob("*.safetensors"))
    assert sum(told) == num_bytes_of(out) - headers
    afterwards = verify(out, source=source)
    assert result.passed and afterwards.passed and len(looked) > 0
    # every byte was compared, so the two hashes are not computed again; the headers were compared with the plan
    counts = {**result.checks, "hashes": result.checks["hashes"] + 2, "headers": result.checks["headers"] - 2}
    assert without_seconds(result.model_copy(update={"checks": counts})) == without_seconds(afterwards)


def before_it_is_checked(finished: FinishedShards, out: Path) -> Callable[[ShardRecord], None]:
    """A byte on the disk changes before the check of the shard begins."""

    def add(record: ShardRecord) -> None:
        if record.name == SHARD:
            flip_last_byte(out / SHARD)
        finished.add(record)

    return add


def test_a_byte_that_went_wrong_on_its_way_to_the_disk(source: Path, tmp_path: Path) -> None:
    plan, out = plan_for(source, "w4a16"), tmp_path / "made"
    with FinishedShards(plan, out, source, workers=2) as finished:
        quantize(plan, source, out, on_shard=before_it_is_checked(finished, out))
        result = verify(out, source=source, finished=finished)
    assert [damage.check for damage in result.damages] == ["hashes", "kept"]


def test_a_shard_that_was_touched_since_is_checked_again(source: Path, tmp_path: Path) -> None:
    plan, out = plan_for(source, "w4a16"), tmp_path / "made"
    with FinishedShards(plan, out, source, workers=2) as finished:
        quantize(plan, source, out, on_shard=finished.add, on_slab=finished.judge)
        finished.wait()
        flip_last_byte(out / SHARD)
        result = verify(out, source=source, finished=finished)
    assert [damage.check for damage in result.damages] == ["hashes", "kept"]


def test_another_plan_takes_nothing(source: Path, tmp_path: Path) -> None:
    """What was found for one plan says nothing about a checkpoint of another."""
    plan, out = plan_for(source, "w4a16"), tmp_path / "made"
    with FinishedShards(plan, out, source, workers=2) as finished:
        quantize(plan, source, out, on_shard=finished.add, on_slab=finished.judge)
        finished.wait()
        assert len(finished.valid_findings(plan, finished.groups, *stamps_and_hashes(out))) == 2
        other = plan_for(source, "w4a16-g64")
        assert finished.valid_findings(other, finished.groups, *stamps_and_hashes(out)) == {}
        assert finished.valid_findings(plan, None, *stamps_and_hashes(out)) == {}


def stamps_and_hashes(out: Path) -> tuple[dict[str, str], dict[str, str]]:
    from assay.file_data import data_of_files
    from assay.records.manifest import load_manifest

    manifest = load_manifest(out)
    assert manifest is not None
    names = [shard.name for shard in manifest.shards]
    return data_of_files(out, names), {shard.name: shard.sha256 for shard in manifest.shards}


def test_shards_of_a_killed_run_are_told_first(source: Path, tmp_path: Path) -> None:
    plan, out = plan_for(source, "w4a16"), tmp_path / "made"

    class Killed(Exception):
        pass

    def stop(record: ShardRecord) -> None:
        raise Killed

    with pytest.raises(Killed):
        quantize(plan, source, out, workers=1, on_shard=stop)
    told: list[str] = []
    manifest = quantize(plan, source, out, workers=1, on_shard=lambda record: told.append(record.name))
    assert sorted(told) == [shard.name for shard in manifest.shards] and len(set(told)) == len(told) == 2


def test_what_cannot_be_read_of_the_source_is_no_damage_of_the_checkpoint(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantize(plan_for(source, "w4a16"), source, out := tmp_path / "made")
    sound = library.safe_open

    def of_a_failing_disk(path: Path, **options: Any) -> Any:
        if Path(path).parent == source:
            raise FileNotFoundError(f"No such file or directory: {path}")  # what the library says, and no errno
        return sound(path, **options)

    monkeypatch.setattr(library, "safe_open", of_a_failing_disk)
    with pytest.raises(CheckpointError) as refused:
        verify(out, source=source)
    assert str(refused.value) == f"{source / SHARD}: cannot be read: the safetensors library cannot read it"
    with pytest.raises(OSError) as unnamed:  # the command line shows its path, and that it has an errno
        FinishedShards(plan_for(source, "w4a16"), out, source, workers=1)
    assert (unnamed.value.errno, unnamed.value.filename) == (errno.EIO, str(source / SHARD))


def test_a_hidden_file_does_not_undo_a_verification(source: Path, tmp_path: Path) -> None:
    quantize(plan_for(source, "w4a16"), source, out := tmp_path / "made")
    result = verify(out, source=source)
    assert result.passed and is_as_verified(out, result)
    (out / ".README.md.0123abcd.partial").write_text("# half a ca")
    assert is_as_verified(out, result)
    (out / "more.txt").write_text("x")
    assert not is_as_verified(out, result)
