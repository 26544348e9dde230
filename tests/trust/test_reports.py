"""The table of public reports (`make reports` runs its tests): each names tests that are there, and what did not hold shows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "trust" / "reports"))

from report_rows import SECTIONS, Report
from report_table import ROOT, Cases, node_ids, outcome_of, read_junit

REPORTS = [report for section in SECTIONS.values() for report in section]
JUNIT = """<?xml version="1.0" encoding="utf-8"?><testsuites><testsuite name="pytest">
<testcase classname="tests.a.test_b" name="test_c[one]"/><testcase classname="tests.a.test_b" name="test_c[two]"/>
<testcase classname="tests.a.test_b" name="test_cd"><failure message="x">y</failure></testcase>
<testcase classname="tests.a.test_b" name="test_e"><error message="x">y</error></testcase>
<testcase classname="tests.a.test_b" name="test_f"><skipped message="x">y</skipped></testcase>
</testsuite></testsuites>"""


@pytest.fixture
def cases(tmp_path: Path) -> Cases:
    (tmp_path / "junit.xml").write_text(JUNIT)
    return read_junit(tmp_path / "junit.xml")


@pytest.mark.parametrize(
    ("tests", "outcome"),
    [
        (("test_c",), "held"),
        (("test_c[one]", "test_c[two]"), "held"),
        (("test_c[one]", "test_cd"), "FAILED"),
        (("test_c", "test_e", "test_f"), "FAILED"),
        (("test_c", "test_f"), "NOT RUN"),
        (("test_c", "test_g"), "NOT RUN"),
        (("test_c[three]",), "NOT RUN"),
    ],
)
def test_a_report_holds_if_all_of_its_tests_do(tests: tuple[str, ...], outcome: str, cases: Cases) -> None:
    report = Report("it broke", "", "it is told", tuple(f"a/test_b.py::{test}" for test in tests))
    assert outcome_of(report, cases) == outcome


def test_without_a_file_of_pytest_nothing_held(tmp_path: Path) -> None:
    assert (
        outcome_of(Report("it broke", "", "it is told", ("a/test_b.py::test_c",)), read_junit(tmp_path / "none.xml"))
        == "NOT RUN"
    )


def test_every_report_is_one_row_with_tests() -> None:
    assert len({report.kind for report in REPORTS}) == len(REPORTS)
    assert all(report.public_source and report.expected and report.tests for report in REPORTS)
    assert not any("|" in text for report in REPORTS for text in report[:3])


@pytest.mark.slow
def test_every_test_of_the_table_is_there() -> None:
    """pytest itself says so: an id that names none ends the collection with an error."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "--collect-only", *node_ids(REPORTS)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
