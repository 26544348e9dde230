"""`make full-count`: tests and benchmarks with all layers, experts and shards of GLM-5; writes full_count.txt."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))  # python is run with PYTHONSAFEPATH, which leaves this folder out
from machine import describe  # noqa: E402

COMMANDS = (
    ("-m", "pytest", "-m", "full_count", "--durations=0", "--durations-min=1", "-v", "-v"),
    (str(HERE / "glm5_overhead.py"),),
    (str(HERE / "glm5_preflight.py"),),
)


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        lines = [f"{what}: {words}" for what, words in describe(Path(folder)).items()]
    failed = False
    for words in COMMANDS:
        done = subprocess.run(
            [sys.executable, *words], cwd=HERE.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )  # fmt: skip
        printed = [line for line in done.stdout.splitlines() if not line.startswith(("platform ", "cachedir", "rootdir"))]
        lines += ["", f"$ python {' '.join(Path(word).name for word in words)}", *printed, f"exit {done.returncode}"]
        print("\n".join(lines[-len(printed) - 3 :]), flush=True)
        failed |= done.returncode != 0
    (HERE / "full_count.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
