"""The `assay diagnose lever` command: which serving parameter a failure depends on, and a folder that shows it to anybody."""

from __future__ import annotations

import functools
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer
from rich.console import Console
from rich.table import Table

from assay.errors import AssayError
from assay.foreign_text import check_label, safe_name
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
from assay_pipeline.places import Place, belongs_to, check_places, place_for
from assay_pipeline.targets import url_in

if TYPE_CHECKING:
    from assay_evaluate.diagnosis.levers.search import LeverSettings
    from assay_evaluate.diagnosis.levers.settings import Start
    from assay_evaluate.serving.server import ServerSpec

RECORD = "levers.json"


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

    check_label(label)
    check_places(run, out)
    settings = LeverSettings(
        num_requests=requests, concurrency=concurrency or 16, max_tokens=max_tokens, seed=seed,
        levers=None if levers is None else tuple(levers),
    )  # fmt: skip
    if (url := url_in(target)) is not None:
        refuse_unused(ctx, URL_FORM, "profile", "runs")
        result, place = _levers_of_url(url, settings, model, api_key_env, label, run, out)
    else:
        refuse_unused(ctx, CHECKPOINT_FORM, "model", "api_key_env")
        if run is not None or out is not None:
            refuse_unused(ctx, "with --run or --out", "runs")
        result, place = _levers_of_checkpoint(target, settings, concurrency, profile, label, run, runs, out)
    result.save(place.records / RECORD)
    if as_json:
        emit(result)
    else:
        print_levers(result, results())
    say(f"record: {place.records / RECORD}")
    raise typer.Exit(1 if result.baseline.failures else 0)


def _levers_of_url(
    url: str,
    settings: LeverSettings,
    model: str | None,
    api_key_env: str | None,
    label: str | None,
    run: Path | None,
    out: Path | None,
) -> tuple[LeverReport, Place]:
    from assay_evaluate.diagnosis.endpoint import find_endpoint
    from assay_evaluate.diagnosis.levers.settings import LEVERS, ask_running
    from assay_evaluate.serving.api_key import bearer

    if restarts := [name for name in settings.levers or () if LEVERS[name].needs_restart]:
        raise AssayError(
            f"--levers {','.join(restarts)}: the server would have to be started with other settings; give its checkpoint "
            "folder instead of the URL, and it is served here"
        )
    if run is not None and label is None:
        raise AssayError(
            "--run with a URL: say --label as well; what a server calls itself must not speak for a checkpoint of a run"
        )
    endpoint = find_endpoint(url, model, headers=bearer(api_key_env, "--api-key-env"))
    name = label or safe_name(endpoint.model)
    place = place_for("lever", f"levers/{name}", run=run, out=out, say=say)
    return _search(ask_running(endpoint), None, settings, name, place.records), place


def _levers_of_checkpoint(
    target: str,
    settings: LeverSettings,
    concurrency: int | None,
    profile: str | None,
    label: str | None,
    run: Path | None,
    runs: Path,
    out: Path | None,
) -> tuple[LeverReport, Place]:
    from assay_evaluate.diagnosis.levers.settings import serve_here
    from assay_evaluate.serving.server import ServerSpec
    from assay_pipeline.profiles import profile_for
    from assay_pipeline.targets import local_checkpoint, resolve_target

    resolved = resolve_target(target)
    chosen = profile_for(resolved, profile)
    checkpoint = local_checkpoint(resolved.location, say=say)
    its_run, its_label = belongs_to(resolved, checkpoint, runs)
    name = label or its_label
    place = place_for("lever", f"levers/{name}", run=run or its_run, out=out, say=say)
    spec = ServerSpec(
        checkpoint=checkpoint, profile=chosen, serving=resolved.recipe.serving, speculate=True,
        log_path=place.logs / f"vllm-lever-{name}.log",
    )  # fmt: skip
    settings = replace(settings, concurrency=concurrency or chosen.concurrency)
    return _search(serve_here(spec, say), spec, settings, name, place.records), place


def _search(start: Start, spec: ServerSpec | None, settings: LeverSettings, label: str, folder: Path) -> LeverReport:
    """Search; of a failure the smallest set that fails is sought, and the reproduction written to `folder`."""
    from assay_evaluate.diagnosis.levers.reproduction import reproduce
    from assay_evaluate.diagnosis.levers.search import find_levers
    from assay_evaluate.diagnosis.levers.settings import Setting, facts_of

    facts = functools.partial(facts_of, can_restart=spec is not None)
    base = Setting(settings.concurrency)
    result, search = find_levers(start, settings, label=label, base=base, facts=facts, on_progress=say)
    return reproduce(result, search, folder, spec, say) if result.baseline.failures else result


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
