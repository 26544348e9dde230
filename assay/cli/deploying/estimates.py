"""Hours and bytes of making a checkpoint on some machine, from the headers of its hub or the shapes that ship with assay."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from assay.cli.targets import Target, open_source
from assay.cli.terminal import say
from assay.errors import CheckpointError
from assay.foreign_text import one_line
from assay.records.plan import Plan

if TYPE_CHECKING:
    from assay_quantize.estimate.calibration_time import CalibrationEstimate
    from assay_quantize.estimate.hardware_time import Estimate


def with_shapes(aim: Target) -> Target:
    """The target with the headers of its hub, or, where that cannot be asked, with the shapes that ship with assay."""
    from assay_quantize.plan.shipped import has_shapes, shipped_model

    name = aim.recipe.name
    if aim.opened is not None or aim.location.hub is None or not has_shapes(name):
        return aim
    try:
        return replace(aim, opened=open_source(aim))
    except CheckpointError as problem:
        shipped = shipped_model(name, every_expert=True)
        if shipped.source != aim.location.hub:
            raise
        say(f"note: {one_line(str(problem))}; planned from the shapes that ship with assay")
        return replace(aim, opened=shipped.checkpoint)


def estimate_for(made: Plan, hardware: str) -> tuple[Estimate, tuple[CalibrationEstimate, ...]]:
    """Time, disk and memory on the hardware that is named; `this` measures this machine and the working directory's disk.

    Of a calibrated precision also what its calibration takes: on a GPU where the machine has one, and on its cores.
    """
    from assay_quantize.estimate.calibration_time import MEASURED_CALIBRATION, estimate_calibration
    from assay_quantize.estimate.hardware_time import estimate, measured_rates, parse_hardware
    from assay_quantize.plan.calibrated import is_asked

    is_here = hardware.split(",")[0].strip() == "this"
    if is_here:
        from assay_quantize.estimate.measure_machine import calibrate

        here, rates = calibrate(made, Path.cwd())
        machine = parse_hardware(hardware, here)
    else:
        machine, rates = parse_hardware(hardware), measured_rates(made)
    whole = estimate(made, machine, rates)
    if not is_asked(made):
        return whole, ()
    of_torch = MEASURED_CALIBRATION
    if is_here:
        from assay_quantize.estimate.measure_torch import measured_torch

        of_torch = measured_torch(made)
    where = (True, False) if machine.gpu is not None else (False,)
    return whole, tuple(estimate_calibration(made, machine, rates, of_torch, gpu=gpu) for gpu in where)
