"""The `assay probe` command: serving-fidelity probes of a URL, or of a checkpoint that is served for them."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn, get_args

import typer
from rich.console import Console
from rich.table import Table

from assay.cli.options import ProfileOption, choices
from assay.cli.targets import url_in
from assay.cli.terminal import console, emit, escape, say, stdout
from assay.errors import AssayError
from assay.foreign_text import check_label, safe_name
from assay.records.probe import ProbeName, ProbeReport, ProbeResult, ProbeSettings, ledger_of, probes_place
from assay_evaluate.run.set_aside import make_room_for_probes
from assay_evaluate.serving.api_key import bearer

if TYPE_CHECKING:
    from assay.cli.targets import Target

COLOURS = {"ok": "green", "alarm": "bold red", "not_run": "yellow"}
WORDS = {"ok": "ok", "alarm": "ALARM", "not_run": "not run"}


def probe(
    target: Annotated[
        str,
        typer.Argument(
            metavar="URL|TARGET",
            help="Any OpenAI-compatible endpoint; or a checkpoint folder, model recipe, Hugging Face id.",
        ),
    ],
    probes: Annotated[
        list[str] | None,
        typer.Option(
            "--probes",
            metavar="NAME,...",
            callback=choices(*get_args(ProbeName)),
            help=f"One or several of: {', '.join(get_args(ProbeName))}. Default: all.",
        ),
    ] = None,
    requests: Annotated[int, typer.Option("--requests", min=2, help="Replies whose log-probabilities are examined.")] = 48,
    garble: Annotated[
        int, typer.Option("--garble", min=1, help="Replies of the garble scan; 7,500 to see a fault of 4 in 10,000.")
    ] = 256,
    concurrency: Annotated[
        int | None, typer.Option("--concurrency", min=1, help="Requests in flight; default 16, of a checkpoint its profile's.")
    ] = None,
    long_tokens: Annotated[int, typer.Option("--long-tokens", min=1, help="Tokens of long prompts.")] = 768,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=8, help="Budget of a reply, in tokens.")] = 160,
    abort_share: Annotated[
        float, typer.Option("--abort-share", min=0, max=0.9, help="Share of the garble scan's requests that hang up.")
    ] = 0.1,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0, help="Of the garble scan; above 0 habits are told from faults less well.")
    ] = 0.0,
    expected_acceptance: Annotated[
        float | None, typer.Option("--expected-acceptance", min=1, help="Tokens a step that this model's drafts should reach.")
    ] = None,
    without_speculation: Annotated[
        str | None,
        typer.Option("--without-speculation", help="URL of the same checkpoint without drafts, for the pair."),
    ] = None,
    api_key_env: Annotated[
        str | None, typer.Option("--api-key-env", help="Environment variable whose value is sent to the URL as a bearer token.")
    ] = None,
    model: Annotated[str | None, typer.Option("--model", help="Its name at the URL; default: the first listed.")] = None,
    label: Annotated[str | None, typer.Option("--label", help="What the result is called: a candidate's name.")] = None,
    run: Annotated[Path | None, typer.Option("--run", help="Folder of the run that the result belongs to.")] = None,
    runs: Annotated[Path, typer.Option("--runs", help="Folder of all runs.")] = Path("runs"),
    profile: ProfileOption = None,
    seed: Annotated[str, typer.Option("--seed", help="Prompts are drawn from it.")] = "eval-probe",
    lever: Annotated[
        str | None,
        typer.Option(
            "--lever", help="Instead of the probes: which parameter a failure hangs on. Comma-separated names, or all."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The record as JSON on stdout.")] = False,
) -> None:
    """Look for failures that are not in the weights: under load, in caches, in speculation. Exit 1 if a probe alarms.

    The record goes to RUN/probes/LABEL.json, every request and reply beside it; gates and the report read it there.
    """
    check_label(label)
    if lever is not None:
        _probe_levers(target, lever, requests, concurrency, max_tokens, seed, profile, model, label, run, runs, as_json)
    settings = ProbeSettings(
        num_requests=requests, num_garble_requests=garble, concurrency=concurrency or 16, long_tokens=long_tokens,
        max_tokens=max_tokens, abort_share=abort_share, temperature=temperature,
        expected_acceptance_length=expected_acceptance, seed=seed,
    )  # fmt: skip
    if (url := url_in(target)) is not None:
        headers = bearer(api_key_env, "--api-key-env")
        report, path = _probe_url(url, settings, probes, model, without_speculation, label, run, runs, headers)
    else:
        if without_speculation is not None or model is not None or api_key_env is not None:
            raise AssayError(
                "--model, --api-key-env and --without-speculation belong to a URL; a checkpoint is served both ways by itself"
            )
        report, path = _probe_checkpoint(target, settings, probes, profile, concurrency, label, run, runs)
    report.save(path)
    if as_json:
        emit(report)
    else:
        print_probes(report, stdout(soft_wrap=not console.is_terminal))
    say(f"record: {path}; requests and replies: {ledger_of(path)}")
    raise typer.Exit(1 if report.alarms else 0)


def _probe_levers(
    target: str,
    names: str,
    requests: int,
    concurrency: int | None,
    max_tokens: int,
    seed: str,
    profile: str | None,
    model: str | None,
    label: str | None,
    run: Path | None,
    runs: Path,
    as_json: bool,
) -> NoReturn:
    """Exit 1 if requests failed, whatever it hangs on."""
    from assay.cli.commands.diagnose.lever import levers, parse_levers, print_levers
    from assay_evaluate.diagnosis.levers.search import LeverSettings

    settings = LeverSettings(
        num_requests=requests, concurrency=concurrency or 16, max_tokens=max_tokens, levers=parse_levers(names), seed=seed
    )
    folder = None if run is None else run / "levers"
    found = levers(target, settings, profile=profile, model=model, label=label, folder=folder, runs=runs)
    if as_json:
        emit(found)
    else:
        print_levers(found, stdout(soft_wrap=not console.is_terminal))
    raise typer.Exit(1 if found.baseline.failures else 0)


def _new_place(folder: Path, label: str, checkpoint_sha256: str | None) -> Path:
    """Of the record; the ledger of an earlier run is not added to."""
    if (line := make_room_for_probes(folder, label, checkpoint_sha256)) is not None:
        say(line)
    path = probes_place(folder, label)
    ledger_of(path).unlink(missing_ok=True)
    return path


def _probe_url(
    url: str,
    settings: ProbeSettings,
    names: list[str] | None,
    model: str | None,
    without_speculation: str | None,
    label: str | None,
    run: Path | None,
    runs: Path,
    headers: dict[str, str],
) -> tuple[ProbeReport, Path]:
    from assay_evaluate.diagnosis.endpoint import find_endpoint
    from assay_evaluate.diagnosis.probes.run_probes import run_probes

    find = functools.partial(find_endpoint, model=model, timeout_s=settings.timeout_s, headers=headers)
    if run is not None and label is None:
        raise AssayError(
            "--run with a URL: say --label as well; what a server calls itself must not speak for a checkpoint of a run"
        )
    endpoint = find(url)
    other = None if without_speculation is None else find(without_speculation)
    name = safe_name(endpoint.model)
    path = _new_place(run or runs / name, label or name, None)
    report = run_probes(
        endpoint, settings, names, label=label or name, without_speculation=other, ledger=ledger_of(path), on_progress=say
    )
    return report, path


def _probe_checkpoint(
    target: str,
    settings: ProbeSettings,
    names: list[str] | None,
    profile: str | None,
    concurrency: int | None,
    label: str | None,
    run: Path | None,
    runs: Path,
) -> tuple[ProbeReport, Path]:
    from assay.cli.stages import profile_for
    from assay.cli.targets import local_checkpoint, resolve_target
    from assay_evaluate.client.journal import Journal
    from assay_evaluate.diagnosis.probes.served import probe_checkpoint
    from assay_evaluate.run.identity import checkpoint_sha256
    from assay_evaluate.serving.server import ServerSpec

    aim = resolve_target(target)
    folder = local_checkpoint(aim.location)
    run_dir, own_label = _place_in_run(aim, folder, run, runs)
    name = label or own_label
    chosen = profile_for(aim, profile)
    if concurrency is None:
        settings = settings.model_copy(update={"concurrency": chosen.concurrency})
    spec = ServerSpec(
        checkpoint=folder, profile=chosen, serving=aim.recipe.serving, speculate=True,
        log_path=run_dir / "logs" / f"vllm-probe-{name}.log",
    )  # fmt: skip
    with Journal(run_dir / "journal.db") as journal:
        sha256 = checkpoint_sha256(folder, journal.file_sha256)
    path = _new_place(run_dir, name, sha256)
    report = probe_checkpoint(
        spec, settings, names, label=name, checkpoint_sha256=sha256, ledger=ledger_of(path), on_progress=say
    )
    return report, path


def _place_in_run(aim: Target, folder: Path, run: Path | None, runs: Path) -> tuple[Path, str]:
    """(run's folder, label): of RUN/PRECISION/checkpoint those, else the run of the target and its source's label.

    run: the folder, if the user named one.
    """
    from assay.cli.run_folders import run_of
    from assay.cli.targets import source_label
    from assay_evaluate.serving.vllm_command import read_config

    whole = folder.resolve()
    if whole.name == "checkpoint" and (whole.parent / "plan.json").is_file():
        return run or folder.parent.parent, whole.parent.name
    return run or run_of(folder, aim.recipe.name, runs), source_label(read_config(folder))


def print_probes(report: ProbeReport, out: Console) -> None:
    """A table on a terminal; in a log, whose width nobody knows, a line per probe."""
    offer = report.offer
    what = f"vLLM {offer.version}" if offer.is_vllm else "an OpenAI-compatible server"
    out.print(escape(f"{report.label} at {report.base_url} ({what}): {report.num_requests} requests, {report.seconds:.0f} s"))
    if out.is_terminal:
        table = Table("probe", "", "what was seen")
        for one in report.results:
            table.add_row(one.name, f"[{COLOURS[one.status]}]{WORDS[one.status]}[/]", escape(_line(one)))
        out.print(table)
    else:
        for one in report.results:
            out.print(escape(f"{one.name:12} {WORDS[one.status]:8} {_line(one)}"))
    if report.errors:
        out.print(escape("no reply: " + ", ".join(f"{count} times {error}" for error, count in report.errors.items())))


def _line(one: ProbeResult) -> str:
    if one.status == "not_run" or one.reason is None:
        return one.reason or one.sentence
    return f"{one.reason}. {one.sentence}"
