"""Tests that are not part of `make test`, and programs beside them; what they printed is written to a file.

    python benchmarks/tests_apart.py MARKER [PROGRAM...] --write FILE

MARKER: of pytest. PROGRAM: a file in this folder, run after the tests. `make full-count` and `make long-tests` call it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))  # python is run with PYTHONSAFEPATH, which leaves this folder out
from machine import describe  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("marker")
    parser.add_argument("programs", nargs="*")
    parser.add_argument("--write", type=Path, required=True)
    words = parser.parse_args()
    tests = ("-m", "pytest", "-m", words.marker, "--durations=0", "--durations-min=1", "-v", "-v")
    with tempfile.TemporaryDirectory() as folder:
        lines = [f"{what}: {described}" for what, described in describe(Path(folder)).items()]
    failed = False
    for command in (tests, *((str(HERE / program),) for program in words.programs)):
        done = subprocess.run(
            [sys.executable, *command], cwd=HERE.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            check=False,
        )  # fmt: skip
        printed = [line for line in done.stdout.splitlines() if not line.startswith(("platform ", "cachedir", "rootdir"))]
        lines += ["", f"$ python {' '.join(Path(word).name for word in command)}", *printed, f"exit {done.returncode}"]
        print("\n".join(lines[-len(printed) - 3 :]), flush=True)
        failed |= done.returncode != 0
    words.write.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
