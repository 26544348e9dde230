"""The whole program against real servers: emulation against emulation, on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from warm import WarmVllm

from assay.records.preflight.gpu_check import GpuCheck, Greedy


@pytest.mark.serve
def test_self_test(tmp_path: Path, warm_vllm: WarmVllm) -> None:
    """Both sides are one program on one machine, so nothing differs; given ids are what vLLM on a CPU refuses."""
    warm_vllm.link(tmp_path)
    words = ["gpu-check", "--self-test", "--formats", "w4a16", "--minutes", "14", "--out", "out", "--json"]
    command = [sys.executable, "-m", "assay", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=880, check=False)
    assert done.returncode == 2, done.stderr
    record = GpuCheck.model_validate(json.loads(done.stdout))
    assert record == GpuCheck.load(tmp_path / "out" / "gpu-check.json")
    (check,) = record.formats
    assert (record.self_test, record.gpu, record.outcome) == (True, None, "NOT MEASURED")
    assert len(check.reasons) == 1 and "requires the V2 model runner" in check.reasons[0]
    assert check.greedy == Greedy(
        num_replies=16, num_tokens=16 * 24, num_equal=16, num_ties=0, tie_bound=0.2, first=None
    )  # fmt: skip
    assert check.logprobs is not None and check.logprobs.num_tokens > 16 * 24
    assert check.logprobs.max_difference < 1e-3
    assert check.drafts is not None and check.drafts.num_drafted > 100 and check.drafts.accepted_share > 0.8
    assert check.speed is not None and check.speed.alone > 0 and check.speed.num_together == 4
    assert check.kernels is not None and any(line.startswith("assay-emulate") for line in check.kernels.chosen)
    assert {path.name for path in (tmp_path / "out").glob("*.log")} == {"w4a16-native.log", "w4a16-emulated.log"}
