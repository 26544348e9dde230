"""The `assay status` command."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from assay import quantities
from assay.records.verdict import Status
from assay_cli.options import JsonOption, RunsOption, complete_run, refuse_runs
from assay_cli.shown.verdicts import COLOURS
from assay_cli.terminal import emit, escape, print_rows, results, say

if TYPE_CHECKING:
    from assay_pipeline.status import CheckpointStatus, RunStatus


HOLDS: dict[Status, str] = {
    "PASS": "also holds on", "FAIL": "does not hold on", "UNDERPOWERED": "not decided on", "NOT MEASURED": "not known on",
}  # fmt: skip
"""What is said of a verdict on a deployment profile."""


def status(
    ctx: typer.Context,
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN", autocompletion=complete_run, help="A run's folder, or its name under --runs. Default: all runs."
        ),
    ] = None,
    runs: RunsOption = Path("runs"),
    as_json: JsonOption = False,
) -> None:
    """Show what of a run is made, verified, measured, judged and chosen, what is missing, and which commands are at work.

    With --json: the record of the run; without RUN a list of them.
    """
    from assay_pipeline.status import status_of, status_of_all

    out = results()
    if run is not None:
        refuse_runs(ctx, run)
        run_status = status_of(run, runs)
        if as_json:
            emit(run_status)
        else:
            _print_run(run_status, out)
        return
    every = status_of_all(runs)
    if as_json:
        emit([run_status_record.model_dump(mode="json") for run_status_record in every])
    elif every:
        _print_runs(every, out)
    else:
        say(f"{runs}: no runs")


# ------------------------------------------------------------------------------------------------ one run
def _print_run(run_status: RunStatus, out: Console) -> None:
    about = (
        f"made from {run_status.source}"
        if run_status.source is not None
        else f"compared with {run_status.reference or 'what nobody recorded'}"
    )
    suite = "not evaluated yet" if run_status.suite is None else f"suite {run_status.suite}"
    out.print(escape(f"{run_status.run}: {run_status.model}, {about}; {suite}"))
    for work in run_status.at_work:
        whose = "" if work.pid is None else f", pid {work.pid}"
        out.print(escape(f"in work: {work.what}{f' {work.label}' if work.label else ''}{whose}"))
    rows = [_row(checkpoint) for checkpoint in run_status.checkpoints]
    print_rows(("checkpoint", "made", "verified", "measured", "verdict"), rows, out)
    for line in _deploying(run_status):
        out.print(escape(line))


def _deploying(run_status: RunStatus) -> Iterator[str]:
    """Speeds and the choice, one line each, where there are any."""
    if (speed := run_status.speed) is not None:
        points = ", ".join(f"{number} {origin}" for origin, number in speed.points.items())
        of = f" of {', '.join(speed.checkpoints)}" if speed.checkpoints else ""
        without = f"; none of {', '.join(speed.not_measured)}" if speed.not_measured else ""
        old = f"; of other bytes than now: {', '.join(speed.other_bytes)}" if speed.other_bytes else ""
        yield f"speed: {f'{points} points{of}' if points else 'nothing that holds'}{without}{old}"
    if (choice := run_status.choice) is not None:
        yield f"choice: {choice.recommendation}" + (f"; outdated: {choice.outdated}" if choice.outdated else "")


def _row(checkpoint: CheckpointStatus) -> tuple[str, ...]:
    verdict = "reference" if checkpoint.is_reference else checkpoint.verdict or ("not judged" if checkpoint.measured else "")
    colour = None if checkpoint.verdict is None else COLOURS[checkpoint.verdict]
    cells = (checkpoint.label, _made(checkpoint), checkpoint.verified or "", _measured(checkpoint))
    where = escape("".join(f"; {HOLDS[status]} {profile}" for profile, status in checkpoint.deployments.items()))
    return *map(escape, cells), (f"[{colour}]{verdict}[/]" if colour else verdict) + where


def _made(checkpoint: CheckpointStatus) -> str:
    if checkpoint.made is None:
        return "the reference again"
    size = "" if checkpoint.num_bytes is None else quantities.size(checkpoint.num_bytes)
    if checkpoint.made == "unfinished":
        return f"unfinished, {checkpoint.num_shards_finished} shards"
    return {"finished": size, "elsewhere": f"{size}, elsewhere", "missing": "missing"}[checkpoint.made]


def _measured(checkpoint: CheckpointStatus) -> str:
    if checkpoint.measured == "another checkpoint":
        return "before it was made again"
    if checkpoint.measured is None:
        return f"begun, {checkpoint.num_replies:,} replies" if checkpoint.num_replies else "no"
    without = f", without {', '.join(checkpoint.not_measured)}" if checkpoint.not_measured else ""
    undecided = f", no verdict on {', '.join(checkpoint.tasks_without_verdict)}" if checkpoint.tasks_without_verdict else ""
    return f"{checkpoint.num_tasks_scored} of {checkpoint.num_tasks} tasks{without}{undecided}"


# ------------------------------------------------------------------------------------------------ all runs
def _print_runs(every: list[RunStatus], out: Console) -> None:
    rows = []
    for run_status in every:
        if run_status.problem is not None:
            rows.append((run_status.run, run_status.model, "", "", "", f"damaged: {run_status.problem}"))
            continue
        made = [c for c in run_status.checkpoints if c.made == "finished"]
        present = [c for c in run_status.checkpoints if c.made != "missing"]
        verdicts = ", ".join(f"{c.label} {c.verdict}" for c in run_status.checkpoints if c.verdict is not None)
        work = ", ".join(f"{w.what}{'' if w.pid is None else f' (pid {w.pid})'}" for w in run_status.at_work)
        measured = f"{sum(c.measured == 'measured' for c in present)} of {len(present)}"
        rows.append((run_status.run, run_status.suite or "", f"{len(made)}", measured, work, verdicts))
    print_rows(("run", "suite", "made", "measured", "in work", "verdicts"), [tuple(map(escape, row)) for row in rows], out)
