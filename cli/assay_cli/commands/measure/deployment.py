"""The `assay deployment` command."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from assay.records.deployment.record import Deployment, deployment_place
from assay_cli.options import JsonOption, ProfileOption, RunArgument, RunsOption, named_run, several
from assay_cli.shown.verdicts import COLOURS
from assay_cli.terminal import emit, escape, print_rows, results, say
from assay_pipeline.deployment import deploy_candidates


def deployment(
    ctx: typer.Context,
    run: RunArgument,
    profile: ProfileOption = None,
    precisions: Annotated[
        list[str] | None,
        typer.Option(
            "--precisions", metavar="LABEL,...", callback=several, help="Candidates of the run. Default: all that have passed."
        ),
    ] = None,
    runs: RunsOption = Path("runs"),
    as_json: JsonOption = False,
) -> None:
    """Serve the candidates of a judged run on hardware that only they fit, and say whether their verdicts hold there.

    Each is compared with itself where it was judged: next-token probabilities, accepted drafts, probes. Exit 1 unless every
    verdict travels. The records are RUN/deployment/PROFILE/LABEL.json; with --json a list of them.
    """
    run_dir = named_run(ctx, run, runs)
    deployments = deploy_candidates(run_dir, precisions, profile, say)
    if as_json:
        emit([record.model_dump(mode="json") for record in deployments])
    else:
        print_deployments(deployments, results())
    for record in deployments:
        say(f"record: {deployment_place(run_dir, record.profile, record.label)}")
    raise typer.Exit(0 if all(record.outcome == "PASS" for record in deployments) else 1)


# ------------------------------------------------------------------------------------------------ the table
def print_deployments(deployments: Sequence[Deployment], out: Console) -> None:
    """For each candidate the sentence, then a row for each check."""
    for deployment_record in deployments:
        out.print(
            f"[bold {COLOURS[deployment_record.outcome]}]{deployment_record.label}[/]: {escape(deployment_record.sentence)}"
        )
        rows = [(f"[{COLOURS[c.status]}]{c.status}[/]", escape(c.gate), escape(c.detail)) for c in deployment_record.checks]
        print_rows(("outcome", "check", "what was seen"), rows, out)
