"""Plans of GLM-5 at full size."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import hollow
import pytest
from engine_sources import plan_of

from assay.records.plan import Plan
from assay_quantize.checkpoint.checkpoint import open_checkpoint


# ------------------------------------------------------------------------------------------------ GLM-5 at full size
@pytest.fixture(scope="module")
def glm5(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("glm-5")
    yield hollow.hollow_glm5(folder)
    shutil.rmtree(folder)


@pytest.mark.slow
def test_glm5_is_what_it_is_said_to_be(glm5: Path) -> None:
    """59,585 tensors, 282 shards, 1507 GB, an MTP block of 790 BF16 tensors and one F32, 19.9 GB (model cards)."""
    checkpoint = open_checkpoint(glm5)
    assert (len(checkpoint.tensors), len(checkpoint.shards)) == (59_585, 282)
    assert round(sum(t.num_bytes for t in checkpoint.tensors.values()) / 1e9) == 1507
    block = [t for t in checkpoint.tensors.values() if t.name.startswith("model.layers.78.")]
    assert (len(block), sum(t.dtype == "F32" for t in block)) == (791, 1)
    assert round(sum(t.num_bytes for t in block) / 1e9, 1) == 19.9


MEASURED = """
import sys
from assay_cli.root import main
from assay_quantize.checkpoint import checkpoint
headers, read = [], checkpoint.read_shard_header
checkpoint.read_shard_header = lambda folder, shard: headers.append(shard) or read(folder, shard)
sys.argv = ["assay", "plan", sys.argv[1], "--precision", "w4a16"]
try:
    main()
finally:
    # VmHWM is this program's own; ru_maxrss begins with what the parent had when it forked
    peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]
    print("peak", int(peak) * 1024, file=sys.stderr)
    print("headers", len(headers), len(set(headers)), file=sys.stderr)
    print("heavy", sorted({"torch", "transformers", "vllm", "numba"} & set(sys.modules)), file=sys.stderr)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "summary"),
    [
        (hollow.hollow_glm5, "59,585 tensors, 1,506.7 GB -> 406.5 GB (27.0%) in 282 shards"),
        (hollow.hollow_glm5_fp8, "118,629 tensors, 755.6 GB -> 406.5 GB (53.8%) in 141 shards"),
    ],
)
def test_planning_glm5_stays_within_its_promise(tmp_path: Path, make: Callable[[Path], Path], summary: str) -> None:
    """`assay plan` of 1.5 TB: below 500 MB, nothing heavy imported, each header read once (time: benchmarks/)."""
    environment = {**os.environ, "COLUMNS": "100", "PYTHONSAFEPATH": "1"}
    folder = make(tmp_path / "glm-5")
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, str(folder)], env=environment, capture_output=True, text=True, timeout=240, check=True
    )
    shutil.rmtree(folder)
    assert summary in done.stdout
    assert "heavy []" in done.stderr
    num_shards = re.search(r"in (\d+) shards", summary)
    assert num_shards is not None
    assert f"headers {num_shards[1]} {num_shards[1]}\n" in done.stderr
    peak = re.search(r"peak (\d+)", done.stderr)
    assert peak is not None
    assert int(peak[1]) < 500_000_000


@pytest.fixture(scope="module")
def glm5_plan(glm5: Path) -> Plan:
    return plan_of(glm5)


@pytest.mark.slow
def test_a_plan_of_glm5_is_saved_and_read_back_equal(glm5_plan: Plan, tmp_path: Path) -> None:
    glm5_plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == glm5_plan
