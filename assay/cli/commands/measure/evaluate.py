"""The `assay evaluate` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from assay.cli.gate_choice import choose_gates, suite_for
from assay.cli.interrupted import says_what_is_kept
from assay.cli.options import (
    GatesOption,
    JsonOption,
    NameOption,
    PrecisionsOption,
    ProfileOption,
    RunsOption,
    SuiteOption,
    completes,
    refuse_unused,
    several,
)
from assay.cli.run_folders import open_run
from assay.cli.stages import check_budgets_of, check_checkpoints_served, load_report, profile_for
from assay.cli.summary import print_summary
from assay.cli.terminal import console, emit, escape, results, say
from assay.cli.whole_run import evaluate_in_run, replies_kept
from assay.errors import AssayError
from assay.recipes.suite_files import with_swe_options
from assay.records.run import SuiteIdentity


def evaluate(
    ctx: typer.Context,
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="[TARGET]",
            autocompletion=completes("models"),
            help="A model recipe's name, a checkpoint folder, or a Hugging Face id.",
        ),
    ] = None,
    reference: Annotated[
        Path | None, typer.Option("--reference", help="Any two checkpoints: the folder compared with.")
    ] = None,
    candidate: Annotated[
        list[str] | None,
        typer.Option("--candidate", metavar="DIR,...", callback=several, help="Any two checkpoints: one or several to judge."),
    ] = None,
    precisions: PrecisionsOption = None,
    suite: SuiteOption = None,
    gates: GatesOption = None,
    profile: ProfileOption = None,
    runs: RunsOption = Path("runs"),
    name: NameOption = None,
    budget_check: Annotated[
        bool,
        typer.Option(
            "--budget-check",
            help="Only ask the reference twenty items of every task, and say whether the token budgets suffice; exit 1 if not.",
        ),
    ] = False,
    swe_slice: Annotated[
        str | None, typer.Option("--slice", help="SWE-bench: Python's slice over the instances sorted by id, 0:50.")
    ] = None,
    swe_filter: Annotated[
        str | None, typer.Option("--filter", help="SWE-bench: instances whose id begins with a match of this expression.")
    ] = None,
    swe_repeats: Annotated[int | None, typer.Option("--repeats", min=1, help="SWE-bench: trajectories per instance.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Serve the reference and every candidate alike, measure, judge; report and cards are written from the records.

    Exits 0 when everything was measured, whatever the verdicts: `assay gate` is the one that fails.
    """
    from assay.cli.run_candidates import of_target, of_two
    from assay.cli.targets import resolve_target

    if budget_check:
        unused = ("precisions", "candidate", "swe_slice", "swe_filter", "swe_repeats")
        refuse_unused(ctx, "with --budget-check, which asks the reference single questions only", *unused)
    if reference is not None:
        refuse_unused(ctx, "with --reference, whose candidates are named by --candidate", "precisions")
    needs_candidate = reference is not None and not budget_check
    if (target is None) == (reference is None) or needs_candidate != bool(candidate):
        raise AssayError("say what to measure: `assay evaluate TARGET`, or `assay evaluate --reference DIR --candidate DIR`")
    # What cannot work fails before checkpoints are hashed and servers started.
    aim = resolve_target(str(target if reference is None else reference))
    chosen = profile_for(aim, profile)
    chosen_suite, why_suite = suite_for(aim, suite, chosen, gates)
    chosen_suite = with_swe_options(chosen_suite, slice_=swe_slice, filter_=swe_filter, num_repeats=swe_repeats)
    limits = choose_gates(aim, chosen_suite, gates)
    if reference is None:
        compared = of_target(aim, runs, name, precisions, only_reference=budget_check)
    else:
        compared = of_two(aim.recipe.name, reference, [Path(one) for one in candidate or ()], runs)
    check_checkpoints_served(compared.candidates, aim, chosen)
    for one in compared.candidates:
        for note in one.notes:
            console.print(escape(f"note: {one.label}: {note}"))
    if why_suite is not None:
        say(why_suite)
    if budget_check:
        about = compared.about.model_copy(update={"suite": SuiteIdentity(name=chosen_suite.name, sha256=chosen_suite.sha256)})
        with (
            open_run(runs, about, name=name, lock=True, keep_suite=False) as run_dir,
            says_what_is_kept(lambda: replies_kept(run_dir)),
        ):
            checked = check_budgets_of(
                aim, compared.candidates[0], chosen_suite, limits.recipe, chosen, run_dir, results(as_json=as_json)
            )
        if as_json:
            emit(checked)
        if not checked.suffices:
            raise typer.Exit(1)
        return
    judged = evaluate_in_run(aim, compared, chosen_suite, chosen, limits, runs, name)
    if as_json:
        emit(load_report(judged.run_dir))
    else:
        print_summary(judged.gates, judged.measurements, results())
    say(f"report: {judged.run_dir / 'report' / 'index.html'}")
