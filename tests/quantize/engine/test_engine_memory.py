"""The engine's memory budget and workers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from engine_sources import plan_for
from safetensors import safe_open
from tiny_checkpoints import make_tiny_glm4_moe

from assay.errors import QuantizeError
from assay_quantize.engine.budget import RUNTIME_BYTES, Budget, parse_memory, plan_budget, slab_budget_bytes, window_of
from assay_quantize.engine.quantize import quantize
from assay_quantize.kernels.devices import default_workers
from assay_quantize.plan.slabs import SLAB_BYTES


# ------------------------------------------------------------------------------------------------ memory, workers
@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("2GiB", 2 << 30), ("1.5GiB", 3 << 29), ("800MB", 800_000_000), ("2g", 2 << 30), (" 64 KiB ", 65536), ("1TB", 10**12)],
)
def test_sizes(text: str, num_bytes: int) -> None:
    assert parse_memory(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "2 gigs", "1e9", "0x10"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(QuantizeError, match=re.escape(f"--memory {text}: not a size; write it like 2GiB, 1.5GiB or 800MB")):
        parse_memory(text)


@pytest.mark.parametrize("text", ["10", "2147483648", "10B"])
def test_a_size_needs_its_unit(text: str) -> None:
    number = text.removesuffix("B")
    with pytest.raises(QuantizeError, match=f"^--memory {text}: say the unit as well: {number}GiB, {number}MB, ...$"):
        parse_memory(text)


def test_budget_gives_up_workers_then_slabs_then_names_the_least() -> None:
    base = {"least_slab_bytes": 1 << 20, "held_bytes": 10 << 20, "kernels": "fused", "base_bytes": 100 << 20}
    four = slab_budget_bytes(4, SLAB_BYTES, "fused")
    fixed = 110 << 20
    assert plan_budget(fixed + four, 4, **base) == Budget(4, SLAB_BYTES, fixed + four)
    assert plan_budget(fixed + four - 1, 4, **base) == Budget(3, SLAB_BYTES, fixed + four - 1)
    one = slab_budget_bytes(1, SLAB_BYTES, "fused")
    assert plan_budget(fixed + one, 4, **base) == Budget(1, SLAB_BYTES, fixed + one)
    assert plan_budget(fixed + one - 1, 4, **base) == Budget(1, SLAB_BYTES // 2, fixed + one - 1)
    least = fixed + slab_budget_bytes(1, 1 << 20, "fused")
    assert plan_budget(least, 4, **base).slab_bytes == 1 << 20
    with pytest.raises(QuantizeError, match=r"--memory 138MiB: too little .* at least 139MiB are needed here"):
        plan_budget(138 << 20, 4, **base)
    with pytest.raises(QuantizeError, match=r"--memory 1MB: too little .* at least 146MB are needed here"):
        plan_budget(10**6, 4, **base)
    with pytest.raises(QuantizeError, match="--workers 0"):
        plan_budget(1 << 30, 0, **base)
    large = plan_budget(1 << 33, 2, **{**base, "least_slab_bytes": 3 * SLAB_BYTES})
    assert large.slab_bytes == 3 * SLAB_BYTES
    assert window_of(2) == 4 and RUNTIME_BYTES < 1 << 30


def test_too_little_memory_is_refused_before_anything_is_made(source: Path, tmp_path: Path) -> None:
    with pytest.raises(QuantizeError, match=r"--memory 50MiB: too little for one worker .*; at least \d+MiB are needed here"):
        quantize(plan_for(source, "w4a16"), source, tmp_path / "out", memory_bytes=50 << 20)
    assert not (tmp_path / "out").exists()


def test_workers_by_affinity_and_quota(tmp_path: Path) -> None:
    cores = len(os.sched_getaffinity(0))
    assert default_workers(tmp_path) == cores
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert default_workers(tmp_path) == cores
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    assert default_workers(tmp_path) == 1
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert default_workers(tmp_path) == 1
    (tmp_path / "cpu.max").unlink()
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("-1\n")
    assert default_workers(tmp_path) == cores
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("150000\n")
    assert default_workers(tmp_path) == 1


def hollow_source(folder: Path, experts: int, intermediate: int) -> Path:
    """One shard of zeros, sparse on the disk, with large experts."""
    make_tiny_glm4_moe(folder, shards=1, mtp=False, num_layers=1, first_dense=1, num_experts=2, hidden=1024)
    path = folder / "model.safetensors"
    with safe_open(path, framework="np") as file:
        names = {name: (file.get_slice(name).get_dtype(), file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    wide = {
        "gate_proj": [intermediate * experts, 1024],
        "up_proj": [intermediate * experts, 1024],
        "down_proj": [1024, intermediate * experts],
    }
    header, end = {}, 0
    for name, (dtype, shape) in names.items():
        part = name.split(".")[-2]
        shape = wide.get(part, shape)
        size = int(np.prod(shape)) * {"BF16": 2, "F32": 4}[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file_out:
        file_out.write(len(text).to_bytes(8, "little") + text)
        file_out.truncate(8 + len(text) + end)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": intermediate * experts}))
    return folder


PEAK = """
import sys
from pathlib import Path
from assay.records.plan import Plan
from assay_quantize.engine.quantize import quantize
quantize(Plan.load(Path(sys.argv[1])), Path(sys.argv[2]), Path(sys.argv[3]), workers=2)
print(*(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_shard(tmp_path: Path) -> None:
    """Peak RSS of a process that makes one shard, of 75 MB and of 600 MB."""
    peaks = []
    for size in (1, 8):
        folder = hollow_source(tmp_path / f"source-{size}", size, 12288)
        plan_for(folder, "w4a16").save(tmp_path / "plan.json")
        arguments = [str(tmp_path / "plan.json"), str(folder), str(tmp_path / f"out-{size}")]
        done = subprocess.run(
            [sys.executable, "-c", PEAK, *arguments], capture_output=True, text=True, check=True, cwd=tmp_path
        )
        peaks.append(int(done.stdout) << 10)
        assert (folder / "model.safetensors").stat().st_size > size * 70e6
    assert peaks[1] < peaks[0] + (24 << 20) and peaks[1] < 512 << 20, peaks
