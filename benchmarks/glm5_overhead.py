"""`python benchmarks/glm5_overhead.py`: what GLM-5's size costs apart from its bytes, against parsing its headers.

`assay plan` of two hollow checkpoints (282 shards, 59,585 tensors in BF16; 141 shards, 118,629 tensors in FP8), and the engine
over the first without reading, rounding and writing weights (tests/support/quantization/hollow_engine.py). Each process is
started anew, one after the other in rounds (A B A B); the best of each counts. Ratios are bounded: CPU seconds depend on the
machine.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPOSITORY / "tests" / "support" / folder) for folder in ("quantization", "models")]

import hollow  # noqa: E402

ROUNDS = 3
MAX_PLAN_RATIO = 12.0
"""Of CPU time. What a plan adds: classes, actions and outputs of each tensor, ignore list, the memory of seven GPU profiles."""
MAX_ENGINE_RATIO = 90.0
"""What the engine adds to a plan: 800,000 slabs cut and handed to workers, journal, index, manifest."""
PLAN = "import sys; from assay_cli.root import main; sys.argv = ['assay', 'plan', sys.argv[1], '-p', 'w4a16']; main()"
PARSE = """
import sys; from pathlib import Path
from assay_quantize.checkpoint.checkpoint import open_checkpoint
open_checkpoint(Path(sys.argv[1]))
"""


OUT = "OUT"
ENGINE = REPOSITORY / "tests" / "support" / "quantization" / "hollow_engine.py"


def cpu_s(*words: str | Path) -> float:
    """CPU seconds of a new Python process, its start included."""
    before = os.times()
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    subprocess.run([sys.executable, *words], env=environment, stdout=subprocess.DEVNULL, check=True)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def compare(what: str, folder: Path, max_ratio: float, *words: str | Path) -> bool:
    """Print both times and their ratio; whether it is within its bound. `OUT` in `words` is a new folder in each round."""
    rounds = []
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory(dir=folder.parent) as name:
            ours_s = cpu_s(*(Path(name) / "out" if word is OUT else word for word in words))
        rounds.append((ours_s, cpu_s("-c", PARSE, folder)))
    ours_s, parse_s = (min(values) for values in zip(*rounds, strict=True))
    seen = ", ".join(f"{ours:.1f} {parse:.1f}" for ours, parse in rounds)
    print(
        f"{what}: {ours_s:.1f} s of CPU, headers alone {parse_s:.1f} s: {ours_s / parse_s:.1f} times, at most {max_ratio:.0f} "
        f"allowed; all rounds: {seen}",
        flush=True,
    )
    return ours_s / parse_s <= max_ratio


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="bench-glm5-") as name:
        bf16, fp8 = hollow.hollow_glm5(Path(name) / "bf16"), hollow.hollow_glm5_fp8(Path(name) / "fp8")
        passed = [
            compare("plan, BF16 source", bf16, MAX_PLAN_RATIO, "-c", PLAN, bf16),
            compare("plan, FP8 source", fp8, MAX_PLAN_RATIO, "-c", PLAN, fp8),
            compare("engine, nvfp4a16", bf16, MAX_ENGINE_RATIO, ENGINE, bf16, OUT, "nvfp4a16"),
        ]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
