"""The `assay diagnose probe` command: serving-fidelity probes of a URL, or of a checkpoint that is served for them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, get_args

import typer
from rich.console import Console
from rich.table import Table

from assay.errors import AssayError
from assay.foreign_text import check_label, one_line, safe_name
from assay.records.base import sha256_of_file
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
from assay_evaluate.run.set_aside import make_room_for_probes
from assay_evaluate.serving.api_key import bearer
from assay_pipeline.places import Place, belongs_to, check_places, place_for
from assay_pipeline.targets import url_in

SHOWN_REPLIES = 3
"""Of each probe, in the terminal; the record and the ledger have more."""
COLOURS = {"ok": "green", "alarm": "bold red", "not_run": "yellow"}
WORDS = {"ok": "ok", "alarm": "ALARM", "not_run": "not run"}


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
            help=f"One or several of: {', '.join(get_args(ProbeName))}. Default: all.",
        ),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(
            "--requests",
            min=2,
            help="At most so many requests of all probes together; what fewer cannot show is said. Beside --garble, which "
            "sizes the scan by itself: replies whose log-probabilities are examined (48).",
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
    check_label(label)
    check_places(run, out)
    _refuse_settings_of_others(ctx, probes)
    settings = ProbeSettings(
        concurrency=concurrency or 16, long_tokens=long_tokens, max_tokens=max_tokens, abort_share=abort_share,
        temperature=temperature, expected_acceptance_length=expected_acceptance, seed=seed,
    )  # fmt: skip
    if garble is not None:
        settings = settings.model_copy(
            update={"num_garble_requests": garble, **({"num_requests": requests} if requests else {})}
        )
    most = requests if garble is None else None
    if (url := url_in(target)) is not None:
        refuse_unused(ctx, URL_FORM, "profile", "runs")
        headers = bearer(api_key_env, "--api-key-env")
        report, path = _probe_url(url, settings, most, probes, model, without_speculation, label, run, out, headers)
    else:
        refuse_unused(ctx, f"{CHECKPOINT_FORM}, with drafts and without", "model", "api_key_env", "without_speculation")
        if run is not None or out is not None:
            refuse_unused(ctx, "with --run or --out", "runs")
        report, path = _probe_checkpoint(target, settings, most, probes, profile, concurrency, label, run, runs, out)
    report.save(path)
    if as_json:
        emit(report)
    else:
        print_probes(report, results())
    say(f"record: {path}; requests and replies: {ledger_of(path)}")
    raise typer.Exit(1 if report.alarms else 0)


def _refuse_settings_of_others(ctx: typer.Context, probes: list[str] | None) -> None:
    """AssayError: a setting of a probe that was not asked for."""
    for name, parameters in SETTINGS_OF.items():
        if probes is not None and name not in probes:
            refuse_unused(ctx, f"without the probe {name}, which --probes leaves out", *parameters)
    is_limit = ctx.params.get("garble") is None  # then --requests is of all
    if probes is not None and not set(probes) - ASKS_ITS_OWN and not is_limit:
        refuse_unused(ctx, f"by the probes {' and '.join(probes)}, which ask requests of their own", "requests")


def _new_file(place: Place, label: str, checkpoint_sha256: str | None) -> Path:
    """Of the record; the ledger of an earlier run is not added to."""
    if place.run_dir is not None and (line := make_room_for_probes(place.run_dir, label, checkpoint_sha256)) is not None:
        say(line)
    path = place.records / f"{label}.json"
    ledger_of(path).unlink(missing_ok=True)
    return path


def _limited(settings: ProbeSettings, most: int | None, names: Sequence[str] | None, *, has_pair: bool) -> ProbeSettings:
    """Settings of which everything is `most` at most. MeasureError if it is too few for an endpoint that offers everything."""
    from assay_evaluate.diagnosis.probes.planned import fit_settings
    from assay_evaluate.diagnosis.probes.run_probes import checked_names

    return settings if most is None else fit_settings(settings, most, checked_names(names), has_pair=has_pair)


def _announce(asked: ProbeSettings, limited: ProbeSettings, names: Sequence[str] | None, *, has_pair: bool) -> None:
    """Say what will be sent at most to an endpoint of which nothing is known yet, and what a limit takes away."""
    from assay_evaluate.diagnosis.endpoint import MOST_DISCOVERY_REQUESTS
    from assay_evaluate.diagnosis.probes.planned import cost_of_limit, plan_requests
    from assay_evaluate.diagnosis.probes.run_probes import checked_names

    chosen = checked_names(names)
    planned, unlimited = (plan_requests(each, chosen, has_pair=has_pair) for each in (limited, asked))
    small = f"up to {MOST_DISCOVERY_REQUESTS} small ones before find out what the endpoint offers"
    say(f"{planned.sentence(limited)}; {small}")
    if limited.most_requests is not None:
        say(cost_of_limit(limited, planned, unlimited))


def _probe_url(
    url: str,
    settings: ProbeSettings,
    most: int | None,
    names: list[str] | None,
    model: str | None,
    without_speculation: str | None,
    label: str | None,
    run: Path | None,
    out: Path | None,
    headers: dict[str, str],
) -> tuple[ProbeReport, Path]:
    from assay_evaluate.diagnosis.endpoint import find_endpoint
    from assay_evaluate.diagnosis.probes.run_probes import run_probes

    find = functools.partial(find_endpoint, model=model, timeout_s=settings.timeout_s, headers=headers)
    if run is not None and label is None:
        raise AssayError(
            "--run with a URL: say --label as well; what a server calls itself must not speak for a checkpoint of a run"
        )
    has_pair = without_speculation is not None
    asked, settings = settings, _limited(settings, most, names, has_pair=has_pair)
    endpoint = find(url, before_asking=lambda: _announce(asked, settings, names, has_pair=has_pair))
    other = None if without_speculation is None else find(url_in(without_speculation) or without_speculation)
    name = label or safe_name(endpoint.model)
    path = _new_file(place_for("probe", "probes", run=run, out=out, say=say), name, None)
    report = run_probes(
        endpoint, settings, names, label=name, without_speculation=other, ledger=ledger_of(path), is_announced=True,
        on_progress=say,
    )  # fmt: skip
    return report, path


def _probe_checkpoint(
    target: str,
    settings: ProbeSettings,
    most: int | None,
    names: list[str] | None,
    profile: str | None,
    concurrency: int | None,
    label: str | None,
    run: Path | None,
    runs: Path,
    out: Path | None,
) -> tuple[ProbeReport, Path]:
    from assay_evaluate.diagnosis.probes.run_probes import probe_checkpoint
    from assay_evaluate.serving.server import ServerSpec
    from assay_pipeline.profiles import profile_for
    from assay_pipeline.targets import local_checkpoint, resolve_target

    resolved = resolve_target(target)
    folder = local_checkpoint(resolved.location, say=say)
    its_run, its_label = belongs_to(resolved, folder, runs)
    name = label or its_label
    chosen = profile_for(resolved, profile)
    place = place_for("probe", "probes", run=run or its_run, out=out, say=say)
    if concurrency is None:
        settings = settings.model_copy(update={"concurrency": chosen.concurrency})
    asked, settings = settings, _limited(settings, most, names, has_pair=True)
    _announce(asked, settings, names, has_pair=True)
    spec = ServerSpec(
        checkpoint=folder, profile=chosen, serving=resolved.recipe.serving, speculate=True,
        log_path=place.logs / f"vllm-probe-{name}.log",
    )  # fmt: skip
    sha256 = _sha256_of(folder, place)
    path = _new_file(place, name, sha256)
    report = probe_checkpoint(
        spec, settings, names, label=name, checkpoint_sha256=sha256, ledger=ledger_of(path), is_announced=True,
        on_progress=say,
    )  # fmt: skip
    return report, path


def _sha256_of(checkpoint: Path, place: Place) -> str:
    """A run's journal knows the hashes of files that did not change."""
    from assay_evaluate.client.journal import Journal
    from assay_evaluate.run.identity import checkpoint_sha256

    if place.run_dir is None:
        return checkpoint_sha256(checkpoint, sha256_of_file)
    with Journal(place.run_dir / "journal.db") as journal:
        return checkpoint_sha256(checkpoint, journal.file_sha256)


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
