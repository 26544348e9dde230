"""`python benchmarks/planning.py`: `assay plan` of GLM-5 at full size, against parsing its headers and nothing else.

Two hollow checkpoints (282 shards, 59,585 tensors in BF16; 141 shards, 118,629 tensors in FP8), each process started anew,
one after the other in rounds (A B A B); the best of each counts. The ratio is bounded: CPU seconds depend on the machine.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPOSITORY / "tests" / "support" / "quantization")]

import hollow  # noqa: E402

ROUNDS = 3
MAX_RATIO = 12.0
"""Of CPU time. What a plan adds: classes, actions and outputs of each tensor, ignore list, the memory of seven GPU profiles."""
PLAN = "import sys; from assay.cli.root import main; sys.argv = ['assay', 'plan', sys.argv[1], '-p', 'w4a16']; main()"
PARSE = """
import sys; from pathlib import Path
from assay_quantize.checkpoint.checkpoint import open_checkpoint
open_checkpoint(Path(sys.argv[1]))
"""


def cpu_s(program: str, folder: Path) -> float:
    """CPU seconds of a new process, its start included."""
    before = os.times()
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    subprocess.run([sys.executable, "-c", program, str(folder)], env=environment, stdout=subprocess.DEVNULL, check=True)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def main() -> int:
    failed = False
    for make in (hollow.hollow_glm5, hollow.hollow_glm5_fp8):
        with tempfile.TemporaryDirectory(prefix="bench-planning-") as name:
            folder = make(Path(name) / "glm-5")
            rounds = [(cpu_s(PLAN, folder), cpu_s(PARSE, folder)) for _ in range(ROUNDS)]
        plan_s, parse_s = (min(values) for values in zip(*rounds, strict=True))
        failed |= plan_s / parse_s > MAX_RATIO
        print(
            f"{make.__name__}: plan {plan_s:.1f} s of CPU, headers alone {parse_s:.1f} s: {plan_s / parse_s:.1f} times, "
            f"at most {MAX_RATIO:.0f} are allowed; all rounds: {[(round(a, 1), round(b, 1)) for a, b in rounds]}"
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
