"""The `assay power` command."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from assay.errors import AssayError
from assay_cli.options import GatesOption, JsonOption, ProfileOption, RunsOption, completes, named, recipe, several
from assay_cli.shown.screening import print_screening_power
from assay_cli.terminal import emit, escape, print_rows, results, say


def power(
    suite: Annotated[
        str | None,
        typer.Argument(
            metavar="SUITE", callback=recipe("suites"), autocompletion=completes("suites"),
            help=f"What is measured. {named('suites')}",
        ),
    ] = None,
    screening: Annotated[
        Path | None,
        typer.Option(
            "--screening", metavar="FOLDER|FILE",
            help="Instead of a suite: what `assay screen` wrote. How many tokens of such texts would decide, and how well so "
            "many tell the KL.",
        ),
    ] = None,
    kl_limit: Annotated[
        float | None,
        typer.Option("--kl-limit", metavar="NATS", help="With --screening. Default: that of each candidate's bits."),
    ] = None,
    tokens: Annotated[
        list[int] | None,
        typer.Option("--tokens", min=2, metavar="NUMBER", help="Of tokens, with --screening; several times for several."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", metavar="TARGET", autocompletion=completes("models"),
            help="Ask as this model's recipe says, and count GPU-hours: a recipe, a checkpoint folder, or a Hugging Face id.",
        ),
    ] = None,
    gates: GatesOption = None,
    profile: ProfileOption = None,
    discordance: Annotated[
        list[str] | None,
        typer.Option(
            "--discordance", metavar="TASK=SHARE,...", callback=several,
            help="Share of replies that differ between two runs of one model (0.12), instead of what is assumed.",
        ),
    ] = None,
    reply_noise: Annotated[
        float | None,
        typer.Option(
            "--reply-noise", metavar="SHARE",
            help="Share of that which other replies would not show again. Default: 1, all of it.",
        ),
    ] = None,
    run: Annotated[
        str | None, typer.Option("--run", metavar="RUN", help="Take both from an earlier run, for tasks of the same names.")
    ] = None,
    runs: RunsOption = Path("runs"),
    as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Predict whether a suite can reach a verdict (power analysis): would a lossless candidate pass, a lossy one fail?

    From the suite, its gates and what is assumed of two runs of one model; nothing is served. Also what it costs, and what
    would raise it.

    With --screening: what more tokens would show of checkpoints that were screened.
    """
    from assay_evaluate.preflight import power_report
    from assay_pipeline.power import predict_power, predict_screening

    of_suite = {
        "--model": model, "--gates": gates, "--profile": profile, "--discordance": discordance, "--reply-noise": reply_noise,
        "--run": run,
    }  # fmt: skip
    if screening is not None:
        _check_alone("--screening", {"SUITE": suite, **of_suite})
        foretold = predict_screening(screening, limit=kl_limit, tokens=tokens or ())
        emit(foretold) if as_json else print_screening_power(foretold, results())
        return
    if suite is None:
        raise AssayError("power: name a suite, or with --screening what `assay screen` wrote")
    _check_alone(f"suite {suite}", {"--kl-limit": kl_limit, "--tokens": tokens})
    report = predict_power(
        suite, model=model, gates=gates, profile=profile, discordance=discordance or (), reply_noise=reply_noise, run=run,
        runs=runs, say=say,
    )  # fmt: skip
    if as_json:
        emit(report)
        return
    out = results()
    of_model = "" if report.model is None else f", asked of {report.model}"
    out.print(escape(f"power of suite {report.suite} under gates {report.gate_recipe}{of_model}"))
    print_rows(power_report.COLUMNS, [[escape(cell) for cell in row] for row in power_report.rows(report)], out)
    print_rows(power_report.NEEDED_COLUMNS, [[escape(cell) for cell in row] for row in power_report.needed_rows(report)], out)
    for line in power_report.sentences(report):
        out.print(escape(line))


def _check_alone(what: str, others: Mapping[str, object]) -> None:
    """AssayError: one of the others was given beside it."""
    for name, value in others.items():
        if value not in (None, []):
            raise AssayError(f"{name}: does not go with {what}; leave one of them out")
