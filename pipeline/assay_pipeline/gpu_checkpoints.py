"""`assay diagnose gpu-check`: the wide twin of tiny-glm in each precision, served natively and emulated, and compared."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from assay.callbacks import Say, say_nothing
from assay.errors import AssayError
from assay.foreign_text import one_line
from assay.recipes.load import load_recipe
from assay.recipes.precision import PrecisionRecipe
from assay.records.plan import Plan
from assay.records.preflight.gpu_check import GpuCheck

if TYPE_CHECKING:
    from assay.records.preflight.replay import Replay
    from assay_evaluate.diagnosis.gpu_check.check import Foresee
    from assay_evaluate.diagnosis.gpu_check.sides import Sides

FORMATS = (
    "w4a16", "fp8", "nvfp4a16", "fp8-channel", "mxfp8", "mxfp4", "nvfp4", "w8a8", "w4a16-g32", "w4a16-g64", "w4a16-asym",
    "w4a16-channel",
)  # fmt: skip
"""One precision of each scheme, what is deployed most first: the last ones are left out when time is up."""


WIDE = "tiny-glm, widened to hidden 1024 and experts of 1024 (141 M parameters), MTP head in BF16"


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


def kernels_foreseen(names: Sequence[str], gpu: str) -> dict[str, str]:
    """Precision -> kernels that vLLM's loaders for a GPU take, or why it would not be served; asked without one."""
    from assay_evaluate.diagnosis.gpu_check.judgement import compare_kernels, foreseen_refusal
    from assay_evaluate.diagnosis.gpu_check.sides import facts_of_gpu, sides_on
    from assay_evaluate.serving.hardware import Gpu

    facts = facts_of_gpu(gpu)
    sides = sides_on(Gpu(gpu if facts is None else facts.driver_name, 0 if facts is None else facts.memory_bytes, ""))
    with tempfile.TemporaryDirectory(prefix="assay-gpu-check-") as temporary:
        foreseen = foresee(plan_all(widen_tiny_glm(Path(temporary), for_kernels=True), names), sides)
    kernels_by_format = {}
    for name, replay in foreseen.items():
        kernels = compare_kernels(replay, ())
        foreseen_kernels = [f"{each.what}: {each.kernel}" for each in kernels.foreseen or ()]
        reason = foreseen_refusal(replay)
        foreseen_kernels += (
            [f"not served: {reason}"] if reason else [f"not known: {kernels.unknown}"] if kernels.unknown else []
        )
        kernels_by_format[name] = "; ".join(foreseen_kernels)
    return kernels_by_format


# ------------------------------------------------------------------------------------------------ the check
def check_on_gpu(
    names: Sequence[str], minutes: float, logs: Path, *, self_test: bool = False, say: Say = say_nothing
) -> GpuCheck:
    """Make, serve, compare. The checkpoints (2 GB) lie in a temporary folder that goes again."""
    from assay_evaluate.diagnosis.gpu_check.check import check_formats, formats_at_once
    from assay_evaluate.diagnosis.gpu_check.questions import Length
    from assay_evaluate.diagnosis.gpu_check.sides import self_test_sides, sides_on
    from assay_evaluate.serving.hardware import describe_hardware, find_gpus

    started, began = datetime.now().astimezone(), time.monotonic()
    sides = self_test_sides() if self_test else sides_on(find_gpus()[0])
    with tempfile.TemporaryDirectory(prefix="assay-gpu-check-") as temporary:
        folder = Path(temporary)
        source = widen_tiny_glm(folder / "source", for_kernels=not self_test)
        plans = plan_all(source, names)
        folders = make_all(source, plans, folder, say)
        with foreseeing(plans, sides) as foreseen:
            checks = check_formats(
                folders,
                sides,
                logs,
                foresee=foreseen,
                deadline=began + 60 * minutes,
                at_once=1 if self_test else formats_at_once(),
                length=Length(24, 16, 4) if self_test else Length(),
                on_progress=say,
            )
    return GpuCheck(
        started=started.isoformat(timespec="seconds"), seconds=round(time.monotonic() - began, 1),
        hardware=describe_hardware(), gpu=sides.gpu, self_test=self_test, model="tiny-glm" if self_test else WIDE,
        formats=checks,
    )  # fmt: skip
