"""The `assay report` command."""

from __future__ import annotations

from pathlib import Path

from assay.cli.options import RunArgument, RunsOption
from assay.cli.run_folders import find_run


def report(run: RunArgument, runs: RunsOption = Path("runs")) -> None:
    """Write report/{index.html,report.json,report.md} of a run again, from its records only."""
    from assay_reports.report import write_report

    print(write_report(find_run(run, runs)))
