"""`python benchmarks/glm5_preflight.py`: the whole preflight of GLM-5 at full count, its wall time and memory.

Hollow checkpoints with true headers: the source in BF16 (282 shards whose boundaries run through layers, 78 + 1 layers, 256
experts), the published FP8 reference (141 shards), candidates w4a16 and nvfp4a16, on eight H200 that need not be here. Every
check is made, vLLM's loaders on all eight ranks with the draft included. Memory is the sum over all processes of what each
adds (PSS), looked at every three seconds. Exit 1: a checkpoint that would load does not, or it takes more than is promised.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPOSITORY / "tests" / "support" / folder) for folder in ("quantization", "models")]

import hollow  # noqa: E402
import psutil  # noqa: E402

from assay.records.preflight.report import PreflightReport  # noqa: E402

MAX_S = 120.0
"""On two cores without other work."""
MAX_BYTES = 4 * 10**9
RECIPE = """schema: 1
name: glm-5-hollow
description: "GLM-5, its data left out"
source: {{path: {folder}/source}}
family: glm_moe_dsa
reference: {{release: {{path: {folder}/release}}}}
precisions: [w4a16, nvfp4a16]
suite: full
profiles: [8xb200, 8xh200]
sampling: {{temperature: 1.0, top_p: 0.95, max_tokens: 131072}}
serving:
  reasoning_parser: glm45
  tool_call_parser: glm47
  num_speculative_tokens: 3
  vllm: {{enable-auto-tool-choice: true}}
"""
LABELS = ("reference", "w4a16", "nvfp4a16")
LOADED = {(check, label): "PASS" for check in ("memory", "split", "loading") for label in LABELS}


def pss_bytes(process: psutil.Process) -> int:
    """Of a process and all it started."""
    total = 0
    for one in (process, *process.children(recursive=True)):
        try:
            total += one.memory_full_info().pss
        except psutil.Error:
            continue  # it has ended
    return total


def measure(*words: str | Path) -> tuple[str, float, float, int]:
    """(stdout, wall seconds, CPU seconds, most memory in bytes) of the command."""
    command = [sys.executable, "-m", "assay", *map(str, words)]
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "HF_HUB_OFFLINE": "1"}
    before, began, peak = os.times(), time.monotonic(), 0
    with tempfile.TemporaryFile("w+") as out:
        child = subprocess.Popen(command, env=environment, stdout=out)
        watched = psutil.Process(child.pid)
        while child.poll() is None:
            try:
                peak = max(peak, pss_bytes(watched))
            except psutil.Error:
                break
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(3)
        child.wait()
        wall_s, after = time.monotonic() - began, os.times()
        out.seek(0)
        text = out.read()
    cpu_s = after.children_user + after.children_system - before.children_user - before.children_system
    return text, wall_s, cpu_s, peak


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="bench-glm5-") as name:
        folder = Path(name)
        hollow.hollow_glm5(folder / "source")
        hollow.hollow_glm5_fp8(folder / "release")
        (recipe := folder / "glm-5-hollow.yaml").write_text(RECIPE.format(folder=folder), encoding="utf-8")
        text, wall_s, cpu_s, peak_bytes = measure(
            "preflight", recipe, "--profile", "8xh200", "--runs", folder / "runs", "--json"
        )  # fmt: skip
    report = PreflightReport.model_validate_json(text)
    outcomes = {(check.check, check.subject): check.outcome for check in report.checks}
    counted = ", ".join(f"{number} {outcome}" for outcome, number in sorted(Counter(outcomes.values()).items()))
    print(
        f"preflight of GLM-5, FP8 reference, w4a16 and nvfp4a16 on 8xh200: {wall_s:.0f} s (at most {MAX_S:.0f}), {cpu_s:.0f} s "
        f"of CPU, {peak_bytes / 1e9:.2f} GB of memory (at most {MAX_BYTES / 1e9:.0f}); {counted}"
    )
    loaded = {which: outcomes.get(which) for which in LOADED}
    for check in report.checks:
        if check.check in {"memory", "split", "loading"} and check.outcome != "PASS":
            print(f"{check.outcome} {check.check} {check.subject}: {check.detail}")
    return 0 if loaded == LOADED and wall_s <= MAX_S and peak_bytes <= MAX_BYTES else 1


if __name__ == "__main__":
    sys.exit(main())
