"""GLM-5 at full count through the engine: 59,585 tensors, 282 shards, 1.5 TB of holes; killed half-way and resumed.

Only the reading, rounding and writing of weights is left out (hollow_engine.py says where), so what is measured is
everything else: planning, cutting into slabs, scheduling, journal, resume, index, manifest. Its time:
benchmarks/glm5_overhead.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hollow import hollow_glm5

from assay.recipes.load import load_recipe
from assay.recipes.precision import PrecisionRecipe
from assay.records.manifest import Manifest, ShardRecord
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.checkpoint.shard_files import layout, planned_shards
from assay_quantize.plan.planner import make_plan
from assay_quantize.plan.slabs import SLAB_BYTES, amax_members, slabs_of

pytestmark = pytest.mark.full_count

SLABS_BEFORE_THE_KILL = 400_000
ENGINE = Path(__file__).resolve().parents[2] / "support" / "quantization" / "hollow_engine.py"
NUM_SHARDS = 282


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hollow_glm5(tmp_path_factory.mktemp("hollow") / "glm-5")


def run(source: Path, out_folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """The child, ended."""
    return subprocess.run(
        [sys.executable, ENGINE, source, out_folder, "nvfp4a16", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=600,
    )


def journaled(out_folder: Path) -> list[ShardRecord]:
    first, *lines = (out_folder / "assay_journal.jsonl").read_text().splitlines()
    assert len(json.loads(first)["source_data"]) == NUM_SHARDS
    return [ShardRecord.model_validate_json(line) for line in lines]


def test_a_hollow_glm_5_is_killed_half_way_and_resumed(source: Path, tmp_path: Path) -> None:
    out_folder = tmp_path / "out"
    killed = run(source, out_folder, SLABS_BEFORE_THE_KILL)
    assert killed.returncode == -9, killed.stderr
    before = {record.name: record for record in journaled(out_folder)}
    assert len(journaled(out_folder)) == len(before)
    assert 100 < len(before) < 200, "the kill was to land in the middle"
    assert not (out_folder / "config.json").exists() and not (out_folder / "assay_manifest.json").exists()

    resumed = run(source, out_folder)
    assert resumed.returncode == 0, resumed.stderr
    seen: dict[str, Any] = json.loads(resumed.stdout)
    assert (seen["tensors"], seen["shards"]) == (59_585, NUM_SHARDS)
    assert not before.keys() & set(seen["shards_seen"]), "made again, although journaled"
    assert len(before) + len(seen["shards_seen"]) == NUM_SHARDS

    manifest = Manifest.load(out_folder / "assay_manifest.json")
    assert [record.name for record in manifest.shards] == [f"model-{n:05d}-of-00282.safetensors" for n in range(1, 283)]
    assert {record.name: record for record in manifest.shards if record.name in before} == before
    assert not (out_folder / "assay_journal.jsonl").exists()
    assert not list(out_folder.glob(".*"))
    index = json.loads((out_folder / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {record.name for record in manifest.shards}

    assert seen["peak_bytes"] < 10**9, f"{seen['peak_bytes'] / 1e6:.0f} MB"

    again = run(source, out_folder)
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["slabs"] == 0, "finished, and made again"


def test_every_byte_of_the_source_is_in_one_slab(source: Path) -> None:
    plan = make_plan(open_checkpoint(source), load_recipe(PrecisionRecipe, "nvfp4a16"), model="glm-5", family=None)
    of_work: Counter[str] = Counter()
    for tensors in planned_shards(plan).values():
        next_row = dict.fromkeys((tensor.name for tensor in tensors), 0)
        for slab in slabs_of(layout(tensors)[0], amax_members(plan, tensors), SLAB_BYTES):
            rows = slab.end - slab.begin
            of_work[slab.work] += rows * slab.tensor.num_bytes // slab.tensor.shape[0] if slab.work != "copy" else rows
            if slab.work != "amax":
                assert slab.begin == next_row[slab.tensor.name]
                next_row[slab.tensor.name] = slab.end
        ends = {t.name: t.shape[0] if t.action == "quantize" else t.num_bytes for t in tensors}
        assert next_row == ends
    assert of_work["copy"] + of_work["quantize"] == plan.bytes_in == 1_506_659_919_872
    # NVFP4's first pass reads every quantized weight, and both halves of a pair that two shards share once for each
    assert 1.0 < of_work["amax"] / of_work["quantize"] < 1.01
