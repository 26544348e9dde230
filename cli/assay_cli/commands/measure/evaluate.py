"""The `assay evaluate` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from assay.errors import AssayError
from assay.recipes.suite_files import with_swe_options
from assay.records.run import SuiteIdentity
from assay_cli.options import (
    ApiKeyOption,
    GatesOption,
    JsonOption,
    NameOption,
    PrecisionsOption,
    ProfileOption,
    RunsOption,
    SuiteOption,
    completes,
    refuse_unused,
)
from assay_cli.shown.budgets import print_budgets
from assay_cli.shown.verdicts import print_summary
from assay_cli.terminal import console, emit, escape, results, say
from assay_pipeline.evaluating import evaluate_in_run, replies_kept
from assay_pipeline.gate_choice import choose_gates, suite_for
from assay_pipeline.interrupted import says_what_is_kept
from assay_pipeline.judging import load_report
from assay_pipeline.profiles import check_checkpoints_served
from assay_pipeline.run_folders import open_run


def evaluate(
    ctx: typer.Context,
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="TARGET",
            autocompletion=completes("models"),
            help="A model recipe's name, a checkpoint folder, or a Hugging Face id.",
        ),
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(
            "--reference",
            metavar="[LABEL=]DIR|URL|URL,DIR",
            help="Without TARGET: the checkpoint to compare with. A folder, or the URL of a vLLM server that runs already; "
            "after a comma, the folder that it serves.",
        ),
    ] = None,
    candidate: Annotated[
        list[str] | None,
        typer.Option("--candidate", metavar="[LABEL=]DIR|URL|URL,DIR", help="Without TARGET: a checkpoint to judge."),
    ] = None,
    api_key_env: ApiKeyOption = None,
    same_weights: Annotated[
        bool,
        typer.Option(
            "--same-weights", help="Allow two of the given servers to have the same weights, to compare one setup with another."
        ),
    ] = False,
    again: Annotated[
        list[str] | None,
        typer.Option(
            "--again",
            metavar="LABEL",
            help="Measure this label anew, whatever was answered before: its server was repaired, say. With the reference's "
            "label all are, since its texts are what they are held against.",
        ),
    ] = None,
    precisions: PrecisionsOption = None,
    suite: SuiteOption = None,
    gates: GatesOption = None,
    profile: ProfileOption = None,
    runs: RunsOption = Path("runs"),
    name: NameOption = None,
    own_texts: Annotated[
        bool | None,
        typer.Option(
            "--own-texts/--no-own-texts",
            help="Let every candidate write texts of its own, which `assay deployment` needs. Default: where the model's "
            "recipe names deployment profiles.",
        ),
    ] = None,
    budget_check: Annotated[
        bool,
        typer.Option(
            "--budget-check",
            help="Only ask the reference twenty items of every task, and say whether the token budgets suffice; exit 1 if not.",
        ),
    ] = False,
    swe_slice: Annotated[
        str | None, typer.Option("--slice", help="SWE-bench: a slice of the instances sorted by id, e.g. 0:50.")
    ] = None,
    swe_filter: Annotated[
        str | None,
        typer.Option("--filter", help="SWE-bench: only instances whose id begins with a match of this regular expression."),
    ] = None,
    swe_repeats: Annotated[int | None, typer.Option("--repeats", min=1, help="SWE-bench: trajectories per instance.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Serve the reference and every candidate alike, measure and judge them, and write report and cards.

    Exits 0 when everything was measured, whatever the verdicts; `assay gate` exits 1 unless all are PASS.
    """
    from assay_evaluate.run.budget_check import check_budgets
    from assay_pipeline.candidates.of_sides import given_endpoints, model_of, of_sides, parse_sides, profile_of
    from assay_pipeline.candidates.of_target import of_target
    from assay_pipeline.candidates.planned import check_released, problem_before
    from assay_pipeline.targets import resolve_target

    if budget_check:
        unused = ("precisions", "candidate", "same_weights", "again", "own_texts", "swe_slice", "swe_filter", "swe_repeats")
        refuse_unused(ctx, "with --budget-check, which asks the reference single questions only", *unused)
    if reference is not None:
        refuse_unused(ctx, "with --reference, whose candidates are named by --candidate", "precisions")
    else:
        refuse_unused(ctx, "without --reference: a profile's `endpoints` name their keys themselves", "api_key_env")
    endpoints = given_endpoints(profile)
    if (target is None and reference is None) or (reference is not None and not budget_check) != bool(candidate):
        raise AssayError(
            "say what to measure: `assay evaluate TARGET`, or `assay evaluate --reference DIR|URL --candidate DIR|URL`"
        )
    sides = None if reference is None else parse_sides(reference, candidate or [], endpoints, api_key_env)
    given = bool(endpoints) if sides is None else sides[0].endpoint is not None
    if same_weights and not given:
        raise AssayError("--same-weights: is for servers that run already; give their URLs, or leave it out")
    if own_texts and given:
        raise AssayError("--own-texts: is for servers that assay starts; leave it out")
    # What cannot work fails before checkpoints are hashed and servers started.
    aim = resolve_target(str(target)) if sides is None else model_of(sides, target)
    chosen = profile_of(aim, profile, given=given, problem_on=None if sides else problem_before(aim, precisions, say))
    aim = aim.on_profile(chosen)
    chosen_suite, why_suite = suite_for(aim, suite, chosen, gates)
    chosen_suite = with_swe_options(chosen_suite, slice_=swe_slice, filter_=swe_filter, num_repeats=swe_repeats)
    limits = choose_gates(aim, chosen_suite, gates)
    if sides is None and not given:
        check_released(aim, chosen)
    if sides is None:
        compared = of_target(aim, runs, name, precisions, endpoints, only_reference=budget_check, say=say)
    else:
        compared = of_sides(aim, sides, runs)
    if not given:
        check_checkpoints_served(compared.candidates, aim, chosen)
    for one in compared.candidates:
        for note in one.notes:
            console.print(escape(f"note: {one.label}: {note}"))
    if why_suite is not None:
        say(why_suite)
    if budget_check:
        about = compared.about.model_copy(update={"suite": SuiteIdentity(name=chosen_suite.name, sha256=chosen_suite.sha256)})
        with (
            open_run(runs, about, name=name, lock=True, keep_suite=False, say=say) as run_dir,
            says_what_is_kept(lambda: replies_kept(run_dir)),
        ):
            checked = check_budgets(
                aim.recipe.name, compared.candidates[0], suite=chosen_suite, gates=limits.recipe, profile=chosen,
                serving=aim.recipe.serving, run_dir=run_dir, on_progress=say,
            )  # fmt: skip
        print_budgets(checked, results(as_json=as_json))
        if as_json:
            emit(checked)
        if not checked.suffices:
            raise typer.Exit(1)
        return
    judged = evaluate_in_run(
        aim, compared, chosen_suite, chosen, limits, runs, name,
        same_weights=same_weights, own_texts=own_texts, again=again or (), say=say,
    )  # fmt: skip
    if as_json:
        emit(load_report(judged.run_dir))
    else:
        print_summary(judged.gates, judged.measurements, results())
    say(f"report: {judged.run_dir / 'report' / 'index.html'}")
