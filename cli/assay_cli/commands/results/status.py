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
        found = status_of(run, runs)
        if as_json:
            emit(found)
        else:
            _print_run(found, out)
        return
    every = status_of_all(runs)
    if as_json:
        emit([one.model_dump(mode="json") for one in every])
    elif every:
        _print_runs(every, out)
    else:
        say(f"{runs}: no runs")


# ------------------------------------------------------------------------------------------------ one run
def _print_run(found: RunStatus, out: Console) -> None:
    about = (
        f"made from {found.source}"
        if found.source is not None
        else f"compared with {found.reference or 'what nobody recorded'}"
    )
    suite = "not evaluated yet" if found.suite is None else f"suite {found.suite}"
    out.print(escape(f"{found.run}: {found.model}, {about}; {suite}"))
    for work in found.at_work:
        whose = "" if work.pid is None else f", pid {work.pid}"
        out.print(escape(f"in work: {work.what}{f' {work.label}' if work.label else ''}{whose}"))
    rows = [_row(one) for one in found.checkpoints]
    print_rows(("checkpoint", "made", "verified", "measured", "verdict"), rows, out)
    for line in _deploying(found):
        out.print(escape(line))


def _deploying(found: RunStatus) -> Iterator[str]:
    """Speeds and the choice, one line each, where there are any."""
    if (speed := found.speed) is not None:
        points = ", ".join(f"{number} {origin}" for origin, number in speed.points.items())
        of = f" of {', '.join(speed.checkpoints)}" if speed.checkpoints else ""
        without = f"; none of {', '.join(speed.not_measured)}" if speed.not_measured else ""
        old = f"; of other bytes than now: {', '.join(speed.other_bytes)}" if speed.other_bytes else ""
        yield f"speed: {f'{points} points{of}' if points else 'nothing that holds'}{without}{old}"
    if (choice := found.choice) is not None:
        yield f"choice: {choice.recommendation}" + (f"; outdated: {choice.outdated}" if choice.outdated else "")


def _row(one: CheckpointStatus) -> tuple[str, ...]:
    verdict = "reference" if one.is_reference else one.verdict or ("not judged" if one.measured else "")
    colour = None if one.verdict is None else COLOURS[one.verdict]
    cells = (one.label, _made(one), one.verified or "", _measured(one))
    where = escape("".join(f"; {HOLDS[status]} {profile}" for profile, status in one.deployments.items()))
    return *map(escape, cells), (f"[{colour}]{verdict}[/]" if colour else verdict) + where


def _made(one: CheckpointStatus) -> str:
    if one.made is None:
        return "the reference again"
    size = "" if one.num_bytes is None else quantities.size(one.num_bytes)
    if one.made == "unfinished":
        return f"unfinished, {one.num_shards_finished} shards"
    return {"finished": size, "elsewhere": f"{size}, elsewhere", "missing": "missing"}[one.made]


def _measured(one: CheckpointStatus) -> str:
    if one.measured == "another checkpoint":
        return "before it was made again"
    if one.measured is None:
        return f"begun, {one.num_replies:,} replies" if one.num_replies else "no"
    without = f", without {', '.join(one.not_measured)}" if one.not_measured else ""
    undecided = f", no verdict on {', '.join(one.tasks_without_verdict)}" if one.tasks_without_verdict else ""
    return f"{one.num_tasks_scored} of {one.num_tasks} tasks{without}{undecided}"


# ------------------------------------------------------------------------------------------------ all runs
def _print_runs(every: list[RunStatus], out: Console) -> None:
    rows = []
    for one in every:
        if one.problem is not None:
            rows.append((one.run, one.model, "", "", "", f"damaged: {one.problem}"))
            continue
        made = [c for c in one.checkpoints if c.made == "finished"]
        there = [c for c in one.checkpoints if c.made != "missing"]
        verdicts = ", ".join(f"{c.label} {c.verdict}" for c in one.checkpoints if c.verdict is not None)
        work = ", ".join(f"{w.what}{'' if w.pid is None else f' (pid {w.pid})'}" for w in one.at_work)
        measured = f"{sum(c.measured == 'measured' for c in there)} of {len(there)}"
        rows.append((one.run, one.suite or "", f"{len(made)}", measured, work, verdicts))
    print_rows(("run", "suite", "made", "measured", "in work", "verdicts"), [tuple(map(escape, row)) for row in rows], out)
