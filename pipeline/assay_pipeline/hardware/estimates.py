"""Hours and bytes of making a checkpoint on some machine, from the headers of its hub or the shapes that ship with assay."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from assay.callbacks import Say, say_nothing
from assay.errors import CheckpointError
from assay.foreign_text import one_line
from assay.recipes.load import load_recipe
from assay.recipes.precision import PrecisionRecipe
from assay.records.plan import Plan
from assay_pipeline.planning import plan_for
from assay_pipeline.targets import Target, open_source, resolve_source

if TYPE_CHECKING:
    from assay_quantize.estimate.calibration_time import CalibrationEstimate, TorchRates
    from assay_quantize.estimate.hardware_time import CoreRates, Estimate, Machine


def with_shapes(target: Target, say: Say = say_nothing) -> Target:
    """The target with the headers of its hub, or, where that cannot be asked, with the shapes that ship with assay."""
    from assay_quantize.plan.shipped import has_shapes, shipped_model

    name = target.recipe.name
    if target.opened is not None or target.location.hub is None or not has_shapes(name):
        return target
    try:
        return replace(target, opened=open_source(target))
    except CheckpointError as problem:
        shipped = shipped_model(name, every_expert=True)
        if shipped.source != target.location.hub:
            raise
        say(f"note: {one_line(str(problem))}; planned from the shapes that ship with assay")
        return replace(target, opened=shipped.checkpoint)


def machine_for(made: Plan, hardware: str, *, with_torch: bool) -> tuple[Machine, CoreRates, TorchRates]:
    """The machine that is named, and the rates of its cores; `this`: measured, on the disk of the working directory.

    with_torch: whether those of torch are needed; else they are what was measured elsewhere.
    """
    from assay_quantize.estimate.calibration_time import MEASURED_CALIBRATION
    from assay_quantize.estimate.hardware_time import measured_rates, parse_hardware

    if hardware.split(",")[0].strip() != "this":
        return parse_hardware(hardware), measured_rates(made), MEASURED_CALIBRATION
    from assay_quantize.estimate.measure_machine import measured_machine, measured_torch

    here, rates = measured_machine(made, Path.cwd())
    return parse_hardware(hardware, here), rates, measured_torch(made) if with_torch else MEASURED_CALIBRATION


@dataclass(frozen=True)
class EstimatedPlan:
    """What making a checkpoint takes on a machine. calibration: of a calibrated precision, on each device of the machine."""

    plan: Plan
    estimate: Estimate
    calibration: tuple[CalibrationEstimate, ...]


def estimate_plan(
    target: str, precision: str, hardware: str, *, mtp: str | None = None, reference: str | None = None, say: Say = say_nothing
) -> EstimatedPlan:
    """The plan of a precision, with time, disk and memory on the hardware that is named.

    Of a calibrated precision also what its calibration takes: on a GPU where the machine has one, and on its cores.
    """
    from assay_quantize.estimate.calibration_time import estimate_calibration
    from assay_quantize.estimate.hardware_time import estimate
    from assay_quantize.plan.calibrated import is_calibrated

    resolved = with_shapes(resolve_source(target, mtp=mtp, reference=reference), say)
    plan = plan_for(resolved, open_source(resolved, say), load_recipe(PrecisionRecipe, precision))
    machine, rates, of_torch = machine_for(plan, hardware, with_torch=is_calibrated(plan))
    devices = () if not is_calibrated(plan) else (False,) if machine.gpu is None else (True, False)
    calibration = tuple(estimate_calibration(plan, machine, rates, of_torch, gpu=gpu) for gpu in devices)
    return EstimatedPlan(plan, estimate(plan, machine, rates), calibration)
