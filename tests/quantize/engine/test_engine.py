"""The engine: the same bytes however it is run, casts, progress."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_sources import SHARDS, bytes_of, plan_for
from rich.console import Console
from safetensors.numpy import save_file

from assay.errors import QuantizeError
from assay.recipes.load import load_recipe
from assay.recipes.precision import PrecisionRecipe
from assay.records.manifest import ShardRecord
from assay_cli.progress import ByteProgress
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.engine.local_runner import run_local
from assay_quantize.engine.quantize import quantize
from assay_quantize.engine.shards import ShardOptions, quantize_shard
from assay_quantize.formats.casting import cast_rows
from assay_quantize.plan.planner import make_plan
from assay_quantize.plan.slabs import least_slab_bytes


# ------------------------------------------------------------------------------------------------ the same bytes
@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "precision"),
    [("w4a16", "w4a16"), ("w4a16_asym", "w4a16"), ("fp8_block", "fp8"), ("nvfp4a16", "nvfp4a16"), ("mxfp4", "w4a16"),
     ("w8a8", "w4a16")],
)  # fmt: skip
def test_workers_slabs_lanes_and_engines_do_not_show(source: Path, tmp_path: Path, scheme: str, precision: str) -> None:
    recipe = load_recipe(PrecisionRecipe, precision)
    plan = make_plan(open_checkpoint(source), recipe.model_copy(update={"scheme": scheme}), model="tiny", family=None)
    ways = {
        "one slab per tensor": ShardOptions(),
        "many slabs": ShardOptions(workers=3, slab_bytes=3000),
        "reference": ShardOptions(workers=2, slab_bytes=20_000, kernels="reference"),
    }
    made: dict[str, tuple[list[ShardRecord], dict[str, str]]] = {}
    for way, options in ways.items():
        (folder := tmp_path / way).mkdir()
        records = [quantize_shard(plan, name, source, folder, options) for name in SHARDS]
        made[way] = ([record.model_copy(update={"seconds": 0.0}) for record in records], bytes_of(folder))
    (folder := tmp_path / "lanes").mkdir()
    records = sorted(run_local(plan, SHARDS, source, folder, ShardOptions(workers=9, slab_bytes=5000)), key=lambda r: r.name)
    made["lanes"] = ([record.model_copy(update={"seconds": 0.0}) for record in records], bytes_of(folder))
    first = made["one slab per tensor"]
    assert {record.name: record.sha256 for record in first[0]} == first[1]
    assert all(way == first for way in made.values()), [name for name, way in made.items() if way != first]


def test_no_files_are_left_open_and_none_half_written(source: Path, tmp_path: Path) -> None:
    plan = plan_for(source, "nvfp4a16")
    before = len(os.listdir("/proc/self/fd"))
    quantize(plan, source, tmp_path / "out", workers=2)
    assert len(os.listdir("/proc/self/fd")) == before
    assert list((tmp_path / "out").glob(".*")) == []
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("assay-")] == []


# ------------------------------------------------------------------------------------------------ casts, progress
def test_casts_are_those_of_torch() -> None:
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 40_000, dtype=np.uint32)
    wide = bits.view(np.float32)
    with np.errstate(invalid="ignore"):
        fits = ~(np.isfinite(wide) & (np.abs(wide) > 3.38e38))
    wide = np.ascontiguousarray(wide[fits])
    theirs = torch.from_numpy(wide.copy()).to(torch.bfloat16)
    ours = torch.from_numpy(cast_rows(wide, "F32", "BF16", "w")).view(torch.bfloat16)
    assert torch.equal(ours.isnan(), theirs.isnan()) and torch.equal(ours[~ours.isnan()], theirs[~theirs.isnan()])
    half = rng.integers(0, 2**16, 40_000, dtype=np.uint16).view(np.float16)
    finite = half[np.isfinite(half)]
    assert torch.equal(
        torch.from_numpy(cast_rows(finite, "F16", "BF16", "w")).view(torch.bfloat16),
        torch.from_numpy(finite).to(torch.bfloat16),
    )
    assert np.array_equal(cast_rows(finite, "F16", "F32", "w"), finite.astype(np.float32))
    short = rng.integers(0, 2**16, 1000, dtype=np.uint16)
    same = cast_rows(cast_rows(short, "BF16", "F32", "w"), "F32", "BF16", "w")
    is_nan = (short & 0x7FFF) > 0x7F80
    assert np.array_equal(same[~is_nan], short[~is_nan])
    with pytest.raises(QuantizeError, match="w: some values do not fit BF16"):
        cast_rows(np.array([3.4e38], np.float32), "F32", "BF16", "w")


def test_progress_in_a_log(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_for(source, "w4a16")
    console = Console(record=True, width=200, force_terminal=False)
    clock = iter([100.0, 100.0, 130.0, 130.0, 131.0])
    monkeypatch.setattr("assay_cli.progress.time.monotonic", lambda: next(clock))
    total = sum(tensor.num_bytes for tensor in plan.tensors)
    with ByteProgress(console, plan.precision, total) as progress:
        progress("first", 0)
        progress("one (done before)", total // 2)
        progress("two", total // 4)
    (line,) = console.export_text().splitlines()
    assert line == "w4a16      938 kB of 1.88 MB, checking, one (done before)"


def test_the_file_of_importance_is_the_plans(source: Path, tmp_path: Path) -> None:
    save_file({"a": np.ones(4, np.float32)}, tmp_path / "importance.safetensors")
    with pytest.raises(QuantizeError, match=r"importance\.safetensors: the plan was made for none; make the plan anew"):
        quantize(plan_for(source, "w4a16"), source, tmp_path / "out", importance=tmp_path / "importance.safetensors")
    other = plan_for(source, "w4a16").model_copy(update={"importance_sha256": "abc"})
    with pytest.raises(QuantizeError, match="no file of channel weights: the plan was made for abc"):
        quantize(other, source, tmp_path / "out")
    assert least_slab_bytes(other) > 0
