"""Kill `assay screen` twenty times, then let it finish: its figures must be those of one that nobody disturbed.

    python benchmarks/screen/kills.py REFERENCE CANDIDATE [--kills 20] [--seed 1]

Each run is killed (SIGKILL) at a moment drawn between 0 and the time that the undisturbed one took.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from assay.records.screening import Screening


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("reference")
    arguments.add_argument("candidate")
    arguments.add_argument("--kills", type=int, default=20)
    arguments.add_argument("--seed", type=int, default=1)
    options = arguments.parse_args()
    draw = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        whole, killed = Path(folder) / "whole", Path(folder) / "killed"
        started = time.monotonic()
        run(options, whole).wait()
        took = time.monotonic() - started
        kills = rounds = 0
        while kills < options.kills:
            process = run(options, killed)
            try:
                process.wait(draw.uniform(0, took))
                (killed / "screening.json").unlink(missing_ok=True)
                rounds += 1
                shutil.rmtree(killed / "passes")  # finished: from the beginning again
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                process.wait()
                kills += 1
        run(options, killed).wait()
        same = figures(whole) == figures(killed)
        states = hashes(whole) == hashes(killed)
    print(f"{kills} kills between 0 and {took:.1f} s of one run, {rounds} runs finished between them:")
    print(f"figures {verdict(same)}, states {verdict(states)}.")
    sys.exit(0 if same and states else 1)


def run(options: argparse.Namespace, out: Path) -> subprocess.Popen[bytes]:
    words = ["screen", options.reference, options.candidate, "--tokens", "4000", "--out", str(out)]
    command = [sys.executable, "-c", "from assay_cli.root import main; main()", *words]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def figures(out: Path) -> Screening:
    record = Screening.load(out / "screening.json")
    return record.model_copy(update={"seconds": 0.0, "estimate": None})


def hashes(out: Path) -> dict[str, str]:
    """Of every state that was kept, and of the experts that tokens chose."""
    return {
        str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted((out / "passes").rglob("*"))
        if path.is_file()
    }


def verdict(is_same: bool) -> str:
    return "equal" if is_same else "DIFFERENT"


if __name__ == "__main__":
    main()
