"""The `assay report` command."""

from __future__ import annotations

from pathlib import Path

import typer

from assay_cli.options import JsonOption, RunArgument, RunsOption, named_run
from assay_cli.terminal import emit, escape, results
from assay_pipeline.judging import load_report
from assay_pipeline.judging import report as write_report


def report(ctx: typer.Context, run: RunArgument, runs: RunsOption = Path("runs"), as_json: JsonOption = False) -> None:
    """Write report/{index.html,report.json,report.md} of a run again, from its records only. --json prints report.json."""
    run_dir = named_run(ctx, run, runs)
    page = write_report(run_dir)
    if as_json:
        emit(load_report(run_dir))
    else:
        results().print(escape(str(page)))
