"""The `assay plan` command."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from assay.errors import AssayError
from assay_cli.options import (
    FamilyOption,
    JsonOption,
    MtpOption,
    ReferenceOption,
    TargetArgument,
    named,
    recipe_option,
    refuse_unused,
)
from assay_cli.shown.hardware_plan import print_hardware_plan
from assay_cli.terminal import emit, results, say
from assay_pipeline.hardware.estimates import estimate_plan
from assay_pipeline.hardware.plan import plan_for_hardware
from assay_pipeline.planning import plan as pipeline_plan
from assay_pipeline.targets import resolve_source

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
    mtp: MtpOption = None,
    reference: ReferenceOption = None,
    family: FamilyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what will happen to every tensor, the bytes of each role, and on which GPUs the result fits. Reads headers only.

    With --profile: one row per precision, of models that have recipes without asking the hub. With --hardware, a model whose
    shapes ship with assay needs no hub either; with --json, an object with the keys `plan`, `estimate` and `calibration`.
    """
    from assay_quantize.plan.show import print_plan

    if profile is not None:
        refuse_unused(ctx, "with --profile", "hardware")
        hardware_plan = plan_for_hardware(
            target, profile, precision, users=users, context=context, mtp=mtp, reference=reference, say=say
        )
        if as_json:
            emit(hardware_plan)
        else:
            print_hardware_plan(hardware_plan, results())
        return
    refuse_unused(ctx, "without --profile", "users", "context")
    if precision is None:
        resolve_source(target, reference=reference)  # a misspelt model is said first
        raise AssayError(
            "say --precision NAME, such as w4a16, nvfp4a16 or fp8 (`assay recipes precisions` lists all), "
            "or --profile NAME, which shows several on its GPUs"
        )
    if hardware is None:
        planned = pipeline_plan(target, precision, mtp=mtp, reference=reference, say=say)
        if as_json:
            emit(planned)
        else:
            print_plan(planned, results())
        return
    estimated = estimate_plan(target, precision, hardware, mtp=mtp, reference=reference, say=say)
    if as_json:
        calibration = [asdict(calibration_estimate) for calibration_estimate in estimated.calibration]
        emit({
            "plan": estimated.plan.model_dump(mode="json"),
            "estimate": asdict(estimated.estimate),
            "calibration": calibration,
        })  # fmt: skip
        return
    from assay_quantize.estimate.show import print_calibration, print_estimate

    out = results()
    print_plan(estimated.plan, out)
    print_estimate(estimated.estimate, out)
    for calibration_estimate in estimated.calibration:
        print_calibration(calibration_estimate, out)
