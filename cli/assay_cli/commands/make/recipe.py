"""The `assay recipe` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from assay_cli.commands.make.plan import MAX_USERS
from assay_cli.options import JsonOption, RunOption, TargetArgument, named, recipe_option, refuse_unused, several
from assay_cli.shown.mix import print_mix
from assay_cli.terminal import emit, results, say
from assay_pipeline.mixes.written_recipe import propose_recipe


def recipe(
    ctx: typer.Context,
    target: TargetArgument,
    budget: Annotated[
        str | None,
        typer.Option(
            "--budget",
            metavar="SIZE|BITS",
            help="Bytes of the whole checkpoint (405GB is 405 * 10^9, 377GiB is 377 * 2^30), or bits for each weight that is "
            "chosen for, scales included (4.5bpw). May be left out with --profile.",
        ),
    ] = None,
    profile: Annotated[
        str | None,
        recipe_option(
            "--profile",
            "profiles",
            help="GPUs it must run on: schemes that they compute as such, groups that their ranks can share, memory with KV "
            f"cache. {named('profiles')}",
        ),
    ] = None,
    sensitivity: Annotated[
        Path | None,
        typer.Option(
            "--sensitivity", metavar="FILE", help="What `assay sensitivity` wrote. Default: sensitivity.json of the run."
        ),
    ] = None,
    run: RunOption = None,
    base: Annotated[
        str | None,
        recipe_option(
            "--base",
            "precisions",
            help="The precision that says which roles are chosen for, what is kept and how. Default: w4a16, or w4a16-mse where "
            "the sensitivities were measured so.",
        ),
    ] = None,
    schemes: Annotated[
        list[str] | None,
        typer.Option("--schemes", metavar="NAME,...", help="Take only these. Default: every scheme that was measured."),
    ] = None,
    users: Annotated[int, typer.Option("--users", min=1, max=MAX_USERS, help="With --profile: sequences in flight.")] = 32,
    context: Annotated[
        str, typer.Option("--context", metavar="TOKENS", help="With --profile: of each, prompt and reply; 32k is 32768.")
    ] = "32k",
    slack: Annotated[
        float,
        typer.Option(
            "--slack",
            min=0.0,
            max=0.5,
            help="Share of the least loss that may be given up so that neighbouring layers are alike; 0: the optimum itself.",
        ),
    ] = 0.02,
    mix: Annotated[
        bool,
        typer.Option(
            "--mix/--best",
            help="Write the mix also where a uniform recipe is proposed: `assay sensitivity --mix FILE` then measures it as a "
            "whole, which decides.",
        ),
    ] = False,
    replay: Annotated[
        bool,
        typer.Option(
            "--replay/--no-replay", help="Ask vLLM's own loaders whether they take it: for --profile, else for one B200."
        ),
    ] = True,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="FILE.yaml", help="Where to write the recipe; its record (.json) and picture (.svg) go beside it."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Choose a scheme for every layer and role under a budget, by what `assay sensitivity` measured, and write it as a recipe.

    The choice is exact. The uniform recipe of the same budget is its control: where that is as good, it is proposed. Reads
    headers only. Exit 1: vLLM's loaders would not take it.
    """
    if profile is None:
        refuse_unused(ctx, "without --profile", "users", "context")
    proposed = propose_recipe(
        target, budget=budget, profile=profile, sensitivity=sensitivity, run=run, base=base, schemes=several(schemes),
        users=users, context=context, slack=slack, always_mix=mix, replay=replay, out=out, say=say,
    )  # fmt: skip
    proposal = proposed.proposal
    if as_json:
        emit(proposal.mix)
    else:
        print_mix(proposal.mix, results())
        if out is None:
            print(f"\n{proposal.text}", end="")
    if proposal.undecided and not mix:
        say(
            "the sums cannot tell the mix from this: `--mix --out MIX.yaml` writes the mix, `assay sensitivity ... --mix "
            f"MIX.yaml{'' if proposal.control is None else ',THIS.yaml'}` measures "
            f"{'it' if proposal.control is None else 'it, and this recipe,'} as a whole, and this command then goes by that"
        )
    if not proposed.is_taken:
        say("nothing was written: vLLM's loaders would not take this recipe")
        raise typer.Exit(1)
