"""What `assay diagnose gpu-check` serves: the wide twin of tiny-glm in each precision."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from assay.callbacks import Say, say_nothing
from assay.errors import AssayError
from assay.foreign_text import one_line
from assay.recipes.load import load_recipe
from assay.recipes.precision import PrecisionRecipe
from assay.records.plan import Plan

if TYPE_CHECKING:
    from assay.records.preflight.replay import Replay
    from assay_evaluate.diagnosis.gpu_check.check import Foresee
    from assay_evaluate.diagnosis.gpu_check.sides import Sides

FORMATS = (
    "w4a16", "fp8", "nvfp4a16", "fp8-channel", "mxfp8", "mxfp4", "nvfp4", "w8a8", "w4a16-g32", "w4a16-g64", "w4a16-asym",
    "w4a16-channel",
)  # fmt: skip
"""One precision of each scheme, what is deployed most first: the last ones are left out when time is up."""


def plan_all(source: Path, formats: Sequence[str]) -> dict[str, Plan]:
    """The plan of each precision for the wide model."""
    from assay_quantize.checkpoint.checkpoint import open_checkpoint
    from assay_quantize.plan.planner import make_plan

    checkpoint = open_checkpoint(source)
    recipes = [load_recipe(PrecisionRecipe, name) for name in formats]
    return {recipe.name: make_plan(checkpoint, recipe, model="gpu-check", family="glm4_moe") for recipe in recipes}


def widen_tiny_glm(folder: Path, *, for_kernels: bool) -> Path:
    """for_kernels: as wide as GPU kernels want it; else of its own width, for a self-test."""
    from assay_evaluate.diagnosis.gpu_check.widened import FOR_KERNELS, Widths, widen
    from assay_pipeline.targets import local_checkpoint, resolve_target

    trained = local_checkpoint(resolve_target("tiny-glm").location)
    return widen(trained, folder, FOR_KERNELS if for_kernels else Widths())


def make_all(source: Path, plans: Mapping[str, Plan], folder: Path, say: Say = say_nothing) -> dict[str, Path]:
    """A checkpoint of each plan, in a folder of its name."""
    from assay_quantize.engine.quantize import quantize

    for name, plan in plans.items():
        quantize(plan, source, folder / name)
    say(f"{len(plans)} checkpoints are made in {folder}")
    return {name: folder / name for name in plans}


# ------------------------------------------------------------------------------------------------ what is foreseen
def foresee(plans: Mapping[str, Plan], sides: Sides) -> dict[str, Replay | str]:
    """What vLLM's own loaders for this GPU say of each checkpoint, from its plan; or why they cannot be asked."""
    from assay_evaluate.diagnosis.gpu_check.sides import SERVING
    from assay_evaluate.serving.replay import Candidate, planned, replay
    from assay_quantize.formats.config_groups import config_json

    if sides.gpu is None:
        return dict.fromkeys(plans, "a self-test has no GPU whose kernels could be foreseen")
    candidates = [Candidate(name, planned(plan, config_json(plan)), sides.native, SERVING) for name, plan in plans.items()]
    try:
        return dict(zip(plans, replay(candidates), strict=True))
    except AssayError as error:
        return dict.fromkeys(plans, one_line(str(error).split("\n", 1)[0]))


@contextmanager
def foreseeing(plans: Mapping[str, Plan], sides: Sides) -> Iterator[Foresee]:
    """The replay takes half a minute of one core; it runs beside the servers, and is waited for when it is asked."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(foresee, plans, sides).result
