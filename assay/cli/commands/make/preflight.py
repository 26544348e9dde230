"""The `assay preflight` command."""

from __future__ import annotations

from pathlib import Path

import typer

from assay.cli.options import (
    GatesOption,
    JsonOption,
    NameOption,
    PrecisionsOption,
    ProfileOption,
    RunsOption,
    SuiteOption,
    TargetArgument,
)
from assay.cli.terminal import emit, results, say


def preflight(
    target: TargetArgument,
    precisions: PrecisionsOption = None,
    suite: SuiteOption = None,
    gates: GatesOption = None,
    profile: ProfileOption = None,
    runs: RunsOption = Path("runs"),
    name: NameOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find out what would fail before anything is downloaded, made or served: disk, memory, vLLM's loaders and more.

    Reads headers only. With --profile, also for a machine that is not this one. Exit 1 if something would fail.
    """
    from assay.cli.candidates.planned import planned_run
    from assay.cli.preflight import preflight as look
    from assay.cli.preflight import show

    run = planned_run(target, precisions=precisions, suite=suite, gates=gates, profile=profile, runs=runs, name=name)
    found = look(run, say)
    if as_json:
        emit(found)
    else:
        show(found, results())
    if found.outcome == "FAIL":
        raise typer.Exit(1)
