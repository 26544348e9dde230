"""The `assay plan` command."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from assay.errors import AssayError
from assay.recipes.load import load_recipe
from assay.recipes.precision import PrecisionRecipe
from assay.recipes.profile import ProfileRecipe
from assay_cli.options import FamilyOption, JsonOption, TargetArgument, named, recipe_option, refuse_unused
from assay_cli.shown.hardware_plan import print_hardware_plan
from assay_cli.terminal import emit, results, say
from assay_pipeline.hardware.estimates import estimate_for, with_shapes
from assay_pipeline.hardware.plan import plan_for_hardware, tokens_of
from assay_pipeline.planning import plan_for

MAX_USERS = 100_000


def plan(
    ctx: typer.Context,
    target: TargetArgument,
    precision: Annotated[
        str | None,
        recipe_option(
            "--precision",
            "-p",
            "precisions",
            help=f"{named('precisions')} With --profile it may be left out: several are shown then.",
        ),
    ] = None,
    hardware: Annotated[
        str | None,
        typer.Option(
            "--hardware",
            help="Estimate hours and bytes of quantizing, and of calibrating, on a machine: workstation, server, cloud, "
            "8xh200, 8xb200, 1xh200, `this` (measured for some seconds), or cores=64,read=6.5,write=3,network=1.2 (rates in GB "
            "per second).",
        ),
    ] = None,
    profile: Annotated[
        str | None,
        recipe_option(
            "--profile",
            "profiles",
            help="Show instead, for every precision, what it needs there: memory with KV cache, kernels, bytes of a step, the "
            f"least time per token. {named('profiles')}",
        ),
    ] = None,
    users: Annotated[int, typer.Option("--users", min=1, max=MAX_USERS, help="With --profile: sequences in flight.")] = 32,
    context: Annotated[
        str, typer.Option("--context", metavar="TOKENS", help="With --profile: of each, prompt and reply; 32k is 32768.")
    ] = "32k",
    family: FamilyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what will happen to every tensor, the bytes of each role, and on which GPUs the result fits. Reads headers only.

    With --profile: one row per precision, of models that have recipes without asking the hub. With --hardware, a model whose
    shapes ship with assay needs no hub either; with --json, an object with the keys `plan`, `estimate` and `calibration`.
    """
    from assay_pipeline.targets import open_source, resolve_target
    from assay_quantize.plan.show import print_plan

    if profile is not None:
        refuse_unused(ctx, "with --profile", "hardware")
        where = load_recipe(ProfileRecipe, profile)
        length = tokens_of("--context", context)
        named_here = None if precision is None else [precision]
        hardware_plan = plan_for_hardware(resolve_target(target), where, named_here, users=users, context=length, say=say)
        if as_json:
            emit(hardware_plan)
        else:
            print_hardware_plan(hardware_plan, results())
        return
    refuse_unused(ctx, "without --profile", "users", "context")
    resolved = resolve_target(target)
    if precision is None:
        raise AssayError(
            "say --precision NAME, such as w4a16, nvfp4a16 or fp8 (`assay recipes precisions` lists all), "
            "or --profile NAME, which shows several on its GPUs"
        )
    resolved = resolved if hardware is None else with_shapes(resolved, say)
    made = plan_for(resolved, open_source(resolved, say), load_recipe(PrecisionRecipe, precision))
    if hardware is None:
        if as_json:
            emit(made)
        else:
            print_plan(made, results())
        return
    estimate, calibration = estimate_for(made, hardware)
    if as_json:
        of_calibration = [asdict(calibration_estimate) for calibration_estimate in calibration]
        emit({"plan": made.model_dump(mode="json"), "estimate": asdict(estimate), "calibration": of_calibration})
        return
    from assay_quantize.estimate.show import print_calibration, print_estimate

    out = results()
    print_plan(made, out)
    print_estimate(estimate, out)
    for calibration_estimate in calibration:
        print_calibration(calibration_estimate, out)
