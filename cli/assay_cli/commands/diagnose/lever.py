"""The `assay diagnose lever` command: which serving parameter a failure depends on, and a folder that shows it to anybody."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, get_args

import typer
from rich.console import Console
from rich.table import Table

from assay.records.diagnosis.lever import STRUCTURAL, LeverName, LeverReport
from assay_cli.options import (
    CHECKPOINT_FORM,
    URL_FORM,
    ApiKeyOption,
    ConcurrencyOption,
    JsonOption,
    LabelOption,
    MaxTokensOption,
    ModelOption,
    OutFolderOption,
    ProfileOption,
    RunOption,
    RunsOption,
    SeedOption,
    UrlOrTargetArgument,
    choices,
    refuse_unused,
)
from assay_cli.terminal import emit, escape, results, say
from assay_pipeline.diagnosing import find_levers
from assay_pipeline.targets import url_in


def lever(
    ctx: typer.Context,
    target: UrlOrTargetArgument,
    levers: Annotated[
        list[str] | None,
        typer.Option(
            "--levers",
            metavar="NAME,...",
            callback=choices(*get_args(LeverName)),
            help=f"One or several of: {', '.join(get_args(LeverName))}. Default: all; with a URL those that need no restart.",
        ),
    ] = None,
    requests: Annotated[int, typer.Option("--requests", min=2, help="Requests, each asked twice under every setting.")] = 48,
    concurrency: ConcurrencyOption = None,
    max_tokens: MaxTokensOption = 96,
    seed: SeedOption = "eval-lever",
    profile: ProfileOption = None,
    model: ModelOption = None,
    api_key_env: ApiKeyOption = None,
    label: LabelOption = None,
    run: RunOption = None,
    runs: RunsOption = Path("runs"),
    out: OutFolderOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find the serving parameter that a failure depends on, by changing one at a time. Exit 1 if requests failed.

    A checkpoint is served anew under every setting; with a URL, only settings of requests are tried. If requests fail, they are
    reduced to the fewest that still fail, and a script that shows the failure without assay is written.
    """
    from assay_evaluate.diagnosis.levers.search import LeverSettings

    settings = LeverSettings(
        num_requests=requests, concurrency=concurrency or 16, max_tokens=max_tokens, seed=seed,
        levers=None if levers is None else tuple(levers),
    )  # fmt: skip
    if url_in(target) is not None:
        refuse_unused(ctx, URL_FORM, "profile", "runs")
    else:
        refuse_unused(ctx, CHECKPOINT_FORM, "model", "api_key_env")
        if run is not None or out is not None:
            refuse_unused(ctx, "with --run or --out", "runs")
    report, record = find_levers(
        target, settings, concurrency=concurrency, profile=profile, model=model, api_key_env=api_key_env, label=label, run=run,
        runs=runs, out=out, say=say,
    )  # fmt: skip
    if as_json:
        emit(report)
    else:
        print_levers(report, results())
    say(f"record: {record}")
    raise typer.Exit(1 if report.baseline.failures else 0)


def print_levers(report: LeverReport, out: Console) -> None:
    """A table on a terminal, lines in a log; the sentence last."""
    if out.is_terminal:
        table = Table("lever", "from", "to", "effect", "what was seen")
        for row in report.effects:
            mark = f"[bold red]{row.effect}[/]" if row.effect in STRUCTURAL else row.effect
            table.add_row(row.lever, escape(row.before), escape(row.after), mark, escape(row.sentence))
        out.print(table)
    else:
        for row in report.effects:
            out.print(escape(f"{row.lever:16} {row.before:>10} -> {row.after:10} {row.effect:10} {row.sentence}"))
    out.print(escape(report.sentence))
    if report.smallest:
        out.print(escape(f"smallest set that fails: {len(report.smallest)} requests: {', '.join(report.smallest)}"))
    if report.bundle is not None:
        out.print(escape(f"reproduction: python {shlex.quote(f'{report.bundle}/reproduce.py')} URL"))
