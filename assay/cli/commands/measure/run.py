"""The `assay run` command: all of `quantize`, `evaluate` and `gate`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from assay.cli.gate_choice import choose_gates, suite_for
from assay.cli.options import (
    GatesOption,
    JsonOption,
    NameOption,
    PrecisionsOption,
    ProfileOption,
    RunnerOption,
    RunsOption,
    SuiteOption,
    TargetArgument,
    WorkersOption,
)
from assay.cli.stages import check_plans_served, load_report, plans_for, precisions_for, quantize_options
from assay.cli.summary import print_summary
from assay.cli.terminal import emit, results, say
from assay.cli.whole_run import evaluate_in_run, passed, quantize_in_run


def run(
    target: TargetArgument,
    precisions: PrecisionsOption = None,
    suite: SuiteOption = None,
    gates: GatesOption = None,
    profile: ProfileOption = None,
    runs: RunsOption = Path("runs"),
    name: NameOption = None,
    runner: RunnerOption = "local",
    workers: WorkersOption = None,
    memory: Annotated[
        str | None, typer.Option("--memory", help="Most memory the quantizer may use, e.g. 1.5GiB or 800MB. Default: 2GiB.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Do everything: make and verify every precision, measure it against the reference, judge, write report and cards.

    The same command again does only what is missing. Exit 1 unless every candidate is PASS.
    """
    from assay.cli.candidates.of_sides import given_endpoints, profile_of
    from assay.cli.candidates.of_target import check_candidates, of_target
    from assay.cli.targets import resolve_target
    from assay_evaluate.serving.server import interpreter_for

    # What cannot work fails before the first byte is written.
    options = quantize_options("auto", runner, workers, memory, None)
    aim = resolve_target(target)
    endpoints = given_endpoints(profile)
    chosen = profile_of(aim, profile, given=bool(endpoints))
    aim = aim.on_profile(chosen)
    recipes = precisions_for(aim, None, precisions, with_reference=True)
    check_candidates(aim.recipe, recipes)
    if not endpoints:
        interpreter_for(chosen)
    chosen_suite, why_suite = suite_for(aim, suite, chosen, gates)
    limits = choose_gates(aim, chosen_suite, gates)
    plans = plans_for(aim, recipes.values())
    check_plans_served(plans, aim, chosen)

    if why_suite is not None:
        say(why_suite)
    out = results(as_json=as_json)
    made = quantize_in_run(aim, plans, options, runs, name, out)
    if not all(record.passed for record in made):
        say("nothing is measured: a checkpoint is damaged")
        raise typer.Exit(1)
    compared = of_target(replace(aim, choices=()), runs, name, precisions, endpoints)  # the choices were said above
    judged = evaluate_in_run(aim, compared, chosen_suite, chosen, limits, runs, name)
    if as_json:
        emit(load_report(judged.run_dir))
    else:
        print_summary(judged.gates, judged.measurements, out)
    say(f"report: {judged.run_dir / 'report' / 'index.html'}")
    if not passed(judged.gates):
        raise typer.Exit(1)
