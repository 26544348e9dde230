"""The `assay plan` command."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from assay.cli.options import JsonOption, TargetArgument, named, recipe_option
from assay.cli.stages import estimate_for, plans_for
from assay.cli.terminal import emit, results
from assay.recipes.load import load_recipe
from assay.recipes.precision import PrecisionRecipe


def plan(
    target: TargetArgument,
    precision: Annotated[str, recipe_option("--precision", "-p", "precisions", help=named("precisions"))],
    hardware: Annotated[
        str | None,
        typer.Option(
            "--hardware",
            help="Estimate hours and bytes of quantizing on a machine: workstation, server, cloud, 8xh200, 8xb200, `this` "
            "(measured for two seconds), or cores=64,read=6.5,write=3,network=1.2 (rates in GB per second).",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what will happen to every tensor, the bytes of each role, and on which GPUs the result fits. Reads headers only.

    With --json and --hardware: an object with the keys `plan` and `estimate`.
    """
    from assay.cli.targets import resolve_target
    from assay_quantize.plan.show import print_plan

    (made,) = plans_for(resolve_target(target), [load_recipe(PrecisionRecipe, precision)])
    estimate = None if hardware is None else estimate_for(made, hardware)
    if as_json:
        emit(made if estimate is None else {"plan": made.model_dump(mode="json"), "estimate": asdict(estimate)})
        return
    out = results()
    print_plan(made, out)
    if estimate is not None:
        from assay_quantize.estimate.show import print_estimate

        print_estimate(estimate, out)
