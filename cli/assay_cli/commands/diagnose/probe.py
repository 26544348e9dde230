"""The `assay diagnose probe` command: serving-fidelity probes of a URL, or of a checkpoint that is served for them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, get_args

import typer
from rich.console import Console
from rich.table import Table

from assay.errors import AssayError
from assay.foreign_text import one_line
from assay.records.probe import ProbeName, ProbeReport, ProbeResult, ProbeSettings, ledger_of
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
from assay_pipeline.diagnosing import probe as run_probes
from assay_pipeline.targets import url_in

SHOWN_REPLIES = 3
"""Of each probe, in the terminal; the record and the ledger have more."""
COLOURS = {"ok": "green", "alarm": "bold red", "not_run": "yellow"}
WORDS = {"ok": "ok", "alarm": "ALARM", "not_run": "not run"}


PURPOSES: dict[ProbeName, str] = {
    "argmax": "greedy tokens are the likeliest",
    "recompute": "log-probabilities are those of a fresh prefill",
    "consensus": "decoding and prefill rank the same tokens",
    "routing": "decoding and prefill choose the same experts",
    "determinism": "load and prefix cache change no greedy reply",
    "speculation": "drafts change no greedy reply",
    "acceptance": "drafts are accepted at a plausible rate",
    "temperature": "sampling obeys the temperature",
    "tools": "calls stay valid with many tools",
    "garble": "no garbled text under load",
    "text": "no text is lost or changed",
    "nonfinite": "no NaN or infinity",
    "swapped": "no reply to another request",
}
"""Probe -> what it checks, for --help."""
SETTINGS_OF: dict[str, tuple[str, ...]] = {
    "garble": ("garble", "abort_share", "temperature"),
    "acceptance": ("expected_acceptance",),
    "speculation": ("without_speculation",),
}
"""Probe -> parameters of the command that no other probe uses."""
ASKS_ITS_OWN = {"garble", "tools"}
"""Probes that look at none of the replies that --requests counts."""


def _is_another_command(value: str | None) -> None:
    if value is not None:
        raise AssayError("--lever: levers are a command of their own: assay diagnose lever URL|TARGET [--levers NAME,...]")


def probe(
    ctx: typer.Context,
    target: UrlOrTargetArgument,
    probes: Annotated[
        list[str] | None,
        typer.Option(
            "--probes",
            metavar="NAME,...",
            callback=choices(*get_args(ProbeName)),
            help=f"One or several of: {'; '.join(f'{name} ({what})' for name, what in PURPOSES.items())}. Default: all.",
        ),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(
            "--requests",
            min=2,
            help="At most so many requests of all probes together; the output says which faults so few cannot show. With "
            "--garble, which sets the size of the garble scan: replies whose log-probabilities are examined (48).",
        ),
    ] = None,
    garble: Annotated[
        int | None,
        typer.Option(
            "--garble", min=1, help="Replies of the garble scan (256). To see a fault of 4 in 10,000 requests takes 7,500."
        ),
    ] = None,
    concurrency: ConcurrencyOption = None,
    long_tokens: Annotated[int, typer.Option("--long-tokens", min=1, help="Tokens of long prompts.")] = 768,
    max_tokens: MaxTokensOption = 160,
    abort_share: Annotated[
        float,
        typer.Option("--abort-share", min=0, max=0.9, help="Share of the garble scan's requests that are broken off midway."),
    ] = 0.1,
    temperature: Annotated[
        float,
        typer.Option(
            "--temperature",
            min=0,
            help="Temperature of the garble scan; above 0, a model's habits are harder to tell from faults.",
        ),
    ] = 0.0,
    expected_acceptance: Annotated[
        float | None,
        typer.Option("--expected-acceptance", min=1, help="Tokens per step that this model should reach with its drafts."),
    ] = None,
    without_speculation: Annotated[
        str | None,
        typer.Option(
            "--without-speculation", help="URL of a server of the same checkpoint without drafts, for probe speculation."
        ),
    ] = None,
    profile: ProfileOption = None,
    model: ModelOption = None,
    api_key_env: ApiKeyOption = None,
    label: LabelOption = None,
    run: RunOption = None,
    runs: RunsOption = Path("runs"),
    out: OutFolderOption = None,
    seed: SeedOption = "eval-probe",
    lever: Annotated[str | None, typer.Option("--lever", hidden=True, callback=_is_another_command)] = None,
    as_json: JsonOption = False,
) -> None:
    """Look for failures that are not in the weights: under load, in caches, in speculation. Exit 1 if a probe alarms.

    In a run the record is RUN/probes/LABEL.json, where gates and report find it, with every request and reply beside it.
    """
    _refuse_settings_of_others(ctx, probes)
    settings = ProbeSettings(
        concurrency=concurrency or 16, long_tokens=long_tokens, max_tokens=max_tokens, abort_share=abort_share,
        temperature=temperature, expected_acceptance_length=expected_acceptance, seed=seed,
    )  # fmt: skip
    if garble is not None:
        settings = settings.model_copy(
            update={"num_garble_requests": garble, **({"num_requests": requests} if requests else {})}
        )
    if url_in(target) is not None:
        refuse_unused(ctx, URL_FORM, "profile", "runs")
    else:
        refuse_unused(ctx, f"{CHECKPOINT_FORM}, with drafts and without", "model", "api_key_env", "without_speculation")
        if run is not None or out is not None:
            refuse_unused(ctx, "with --run or --out", "runs")
    report, record = run_probes(
        target, settings, probes, most=requests if garble is None else None, concurrency=concurrency,
        without_speculation=without_speculation, profile=profile, model=model, api_key_env=api_key_env, label=label, run=run,
        runs=runs, out=out, say=say,
    )  # fmt: skip
    if as_json:
        emit(report)
    else:
        print_probes(report, results())
    say(f"record: {record}; requests and replies: {ledger_of(record)}")
    raise typer.Exit(1 if report.alarms else 0)


def _refuse_settings_of_others(ctx: typer.Context, probes: list[str] | None) -> None:
    """AssayError: a setting of a probe that was not asked for."""
    for name, parameters in SETTINGS_OF.items():
        if probes is not None and name not in probes:
            refuse_unused(ctx, f"without the probe {name}, which --probes leaves out", *parameters)
    is_limit = ctx.params.get("garble") is None  # then --requests is of all
    if probes is not None and not set(probes) - ASKS_ITS_OWN and not is_limit:
        refuse_unused(ctx, f"by the probes {' and '.join(probes)}, which ask requests of their own", "requests")


def print_probes(report: ProbeReport, out: Console) -> None:
    """A table on a terminal; in a log, whose width nobody knows, a line per probe."""
    offer = report.offer
    what = f"vLLM {offer.version}" if offer.is_vllm else "an OpenAI-compatible server"
    out.print(escape(f"{report.label} at {report.base_url} ({what}): {report.num_requests} requests, {report.seconds:.0f} s"))
    if out.is_terminal:
        table = Table("probe", "", "what was seen")
        for result in report.results:
            table.add_row(result.name, f"[{COLOURS[result.status]}]{WORDS[result.status]}[/]", escape(_line(result)))
        out.print(table)
    else:
        for result in report.results:
            out.print(escape(f"{result.name:12} {WORDS[result.status]:8} {_line(result)}"))
    _print_replies(report, out)
    if report.errors:
        out.print(escape("no reply: " + ", ".join(f"{count} times {error}" for error, count in report.errors.items())))


def _print_replies(report: ProbeReport, out: Console) -> None:
    """Some of the replies that are at fault, and of those that nobody could tell, as they came."""
    for result in report.results:
        for what, shown_ones in (("", result.witnesses), ("undecided ", result.undecided)):
            for each in [each for each in shown_ones if each.text is not None][:SHOWN_REPLIES]:
                out.print(escape(f"{result.name}: {what}reply {each.request}: {each.what}: {_quoted(each.text or '')}"))


def _quoted(text: str) -> str:
    """On one line, with what cannot be seen written out."""
    return "nothing" if not text else f'"{one_line(text.replace(chr(10), chr(92) + "n"))}"'


def _line(result: ProbeResult) -> str:
    if result.status == "not_run" or result.reason is None:
        return result.reason or result.sentence
    return f"{result.reason}. {result.sentence}"
