"""`make planted`: checkpoints with a known damage are judged by real servers; each must be found, and named for what it is.

    python benchmarks/verdicts/planted.py runs                      # the run is runs/planted; goes on where it was stopped
    python benchmarks/verdicts/planted.py runs --write planted.md

The reference is tiny-glm as it is; `planted_checkpoints.py` says what was done to the others. Exits 1 if one is not judged as
`EXPECTED` says.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))  # python is run with PYTHONSAFEPATH, which leaves this folder out
from planted_checkpoints import EDITS, make  # noqa: E402

from assay.records.verdict import GateReport, Status  # noqa: E402

SOURCE = HERE.parents[1] / "examples" / "tiny_glm" / "checkpoint"


class Expected(NamedTuple):
    """words: of the headline. spared: gates of what the damage leaves alone, which must not fail."""

    status: Status
    words: str
    spared: frozenset[str] = frozenset()


EXPECTED = {
    "copy": Expected("PASS", "a loss of the margin is excluded on"),
    "one-language": Expected(
        "FAIL", "points on Chinese arithmetic; 10 allowed", frozenset({"score arithmetic-en", "truncation"}),
    ),
    "long-range": Expected(
        "FAIL", "points on needles at 1,024 tokens; 10 allowed",
        frozenset({"score arithmetic-en", "score arithmetic-zh", "score needle-192", "truncation"}),
    ),
    "looping": Expected("FAIL", "loops in ", frozenset({"score needle-1024"})),
}  # fmt: skip


def wrong(report: GateReport) -> Iterator[str]:
    """What is not as expected, one line each."""
    for label, expected in EXPECTED.items():
        reason = report.reasons[label]
        if report.overall[label] != expected.status:
            yield f"{label} is {report.overall[label]}, not {expected.status}: {reason}"
        elif expected.words.casefold() not in reason.casefold():
            yield f"{label}: `{expected.words}` is not said: {reason}"
        for verdict in report.verdicts:
            if verdict.candidate == label and verdict.gate in expected.spared and verdict.status == "FAIL":
                yield f"{label}: {verdict.gate} is FAIL: {verdict.detail}"


def table(report: GateReport) -> Iterator[str]:
    yield "| checkpoint | verdict | headline |"
    yield "|---|---|---|"
    for label in report.overall:
        yield f"| {label} | {report.overall[label]} | {report.reasons[label]} |"
    yield ""
    yield "| checkpoint | gate | verdict | what was seen |"
    yield "|---|---|---|---|"
    for one in report.verdicts:
        yield f"| {one.candidate} | {one.title or one.gate} | {one.status} | {one.detail} |"


def run(runs: Path) -> GateReport:
    """Make what is missing, have it judged, and read the verdicts."""
    folder = runs / "planted-checkpoints"
    for name in EDITS:
        if not (folder / name).exists():
            make(SOURCE, folder / name, name)
    candidates = [word for name in EDITS for word in ("--candidate", f"{name}={folder / name}")]
    words = [
        "evaluate", "--reference", f"reference={SOURCE}", *candidates, "--suite", str(HERE / "planted_suite.yaml"),
        "--profile", "cpu-emulated", "--runs", str(runs), "--name", "planted",
    ]  # fmt: skip
    subprocess.run([sys.executable, "-m", "assay", *words], check=True)
    return GateReport.load(runs / "planted" / "gates.json")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--write", type=Path, help="into this file, below its first line `## Results`")
    args = parser.parse_args()
    report = run(args.runs)
    text = "\n".join(table(report))
    print(text)
    if args.write is not None:
        before = args.write.read_text(encoding="utf-8").split("## Results\n")[0]
        args.write.write_text(f"{before}## Results\n\n{text}\n", encoding="utf-8")
    problems = list(wrong(report))
    print("\n".join(["", *problems] if problems else ["", "every checkpoint is judged as expected"]))
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
