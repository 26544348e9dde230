"""The `assay power` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from assay_cli.options import GatesOption, JsonOption, ProfileOption, RunsOption, completes, named, recipe, several
from assay_cli.terminal import emit, escape, print_rows, results, say


def power(
    suite: Annotated[
        str,
        typer.Argument(
            metavar="SUITE", callback=recipe("suites"), autocompletion=completes("suites"),
            help=f"What is measured. {named('suites')}",
        ),
    ],
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
    """
    from assay_evaluate.preflight import power_report
    from assay_pipeline.power import predict_power

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
