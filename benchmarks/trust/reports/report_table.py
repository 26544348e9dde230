"""`make reports`: the tests that rebuild public reports and attacks, run at once; writes benchmarks/trust/reports.md.

    python benchmarks/trust/reports/report_table.py --write benchmarks/trust/reports.md

Exits 1 when a report did not hold or one of its tests is not there.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(Path(__file__).parent))  # python is run with PYTHONSAFEPATH
from report_rows import SECTIONS, Report  # noqa: E402

Outcome = Literal["held", "FAILED", "NOT RUN"]
Cases = Mapping[tuple[str, str], Outcome]
"""(file, test with its parameters) -> what became of it."""


def node_ids(reports: Iterable[Report]) -> list[str]:
    """Each once, as pytest takes them."""
    return list(dict.fromkeys(f"tests/{test}" for report in reports for test in report.tests))


def ran(ids: list[str], junit: Path) -> int:
    """All of them in one call of pytest, whose exit code it is."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", f"--junitxml={junit}", *ids]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def read_junit(path: Path) -> Cases:
    """Of a file that pytest wrote; empty where it wrote none, since it found an id that names no test."""
    if not path.exists():
        return {}
    return {
        (f"{case.get('classname', '').replace('.', '/')}.py", case.get("name", "")): _outcome(case)
        for case in ElementTree.parse(path).iter("testcase")
    }


def _outcome(case: ElementTree.Element) -> Outcome:
    if case.find("failure") is not None or case.find("error") is not None:
        return "FAILED"
    return "NOT RUN" if case.find("skipped") is not None else "held"


def cases_of(node_id: str, cases: Cases) -> list[Outcome]:
    """Of a test, or of all cases of a parametrized one."""
    file, _, name = node_id.partition("::")
    return [
        outcome
        for (where, which), outcome in cases.items()
        if where == file and (which == name or which.startswith(f"{name}["))
    ]


def outcome_of(report: Report, cases: Cases) -> Outcome:
    """The worst of its tests; a test that is not there was not run."""
    outcomes = {outcome for test in report.tests for outcome in cases_of(f"tests/{test}", cases) or ["NOT RUN"]}
    return "FAILED" if "FAILED" in outcomes else "NOT RUN" if "NOT RUN" in outcomes else "held"


def table(cases: Cases) -> str:
    """The Markdown: counts, then each report."""
    outcomes = {report: outcome_of(report, cases) for section in SECTIONS.values() for report in section}
    counts = Counter(outcomes.values())
    said = ", ".join(f"{number} {outcome}" for outcome, number in counts.most_common())
    lines = ["# Public reports and attacks, rebuilt", ""]
    lines += [
        f"{len(outcomes)} reports: {said}. {len(cases)} tests, run by `make reports`; each is written anew from the report."
    ]
    for name, section in SECTIONS.items():
        lines += [
            "",
            f"## {name}",
            "",
            "| what happened | public report | what assay has to say | tests | |",
            "|---|---|---|---|---|",
        ]
        lines += [_line(report, outcomes[report], cases) for report in section]
    return "\n".join(lines) + "\n"


def _line(report: Report, outcome: Outcome, cases: Cases) -> str:
    by_name: dict[str, int] = {}
    for test in report.tests:
        file, _, name = test.partition("::")
        short = f"[{name.partition('[')[0]}](../../tests/{file})"
        by_name[short] = by_name.get(short, 0) + len(cases_of(f"tests/{test}", cases))
    tests = "; ".join(f"{short} ({count})" if count != 1 else short for short, count in by_name.items())
    return f"| {report.kind} | {report.public_source} | {report.expected} | {tests} | {outcome} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, metavar="FILE", help="where the table goes; without it, it is printed")
    arguments = parser.parse_args()
    reports = [report for section in SECTIONS.values() for report in section]
    with tempfile.TemporaryDirectory() as folder:
        code = ran(node_ids(reports), Path(folder) / "junit.xml")
        cases = read_junit(Path(folder) / "junit.xml")
    text = table(cases)
    if arguments.write:
        arguments.write.write_text(text, encoding="utf-8")
    else:
        print(text)
    return int(code != 0 or any(outcome_of(report, cases) != "held" for report in reports))


if __name__ == "__main__":
    sys.exit(main())
