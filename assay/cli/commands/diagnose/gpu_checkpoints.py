"""What `assay gpu-check` serves: the wide twin of tiny-glm in each precision; and the same made by the CUDA code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from assay.cli.terminal import say
from assay.errors import AssayError, QuantizeError
from assay.foreign_text import one_line
from assay.recipes.load import load_recipe
from assay.recipes.precision import PrecisionRecipe
from assay.records.plan import Plan
from assay.records.preflight.gpu_check import CudaBytes

if TYPE_CHECKING:
    from assay.records.preflight.replay import Replay
    from assay_evaluate.diagnosis.gpu_check.check import Foresee
    from assay_evaluate.diagnosis.gpu_check.sides import Sides

FORMATS = (
    "w4a16", "fp8", "nvfp4a16", "fp8-channel", "mxfp8", "mxfp4", "nvfp4", "w8a8", "w4a16-g32", "w4a16-g64", "w4a16-asym",
    "w4a16-channel",
)  # fmt: skip
"""One precision of each scheme, what is deployed most first: the last ones are left out when time is up."""


@dataclass(frozen=True)
class Made:
    """source: the wide model. folders: of each precision's checkpoint."""

    source: Path
    plans: Mapping[str, Plan]
    folders: Mapping[str, Path]


def plan_all(source: Path, formats: Sequence[str]) -> dict[str, Plan]:
    """The plan of each precision for the wide model."""
    from assay_quantize.checkpoint.checkpoint import open_checkpoint
    from assay_quantize.plan.planner import make_plan

    checkpoint = open_checkpoint(source)
    recipes = [load_recipe(PrecisionRecipe, name) for name in formats]
    return {one.name: make_plan(checkpoint, one, model="gpu-check", family="glm4_moe") for one in recipes}


def widen_tiny_glm(folder: Path, *, for_kernels: bool) -> Path:
    """for_kernels: as wide as GPU kernels want it; else of its own width, for a self-test."""
    from assay.cli.targets import local_checkpoint, resolve_target
    from assay_evaluate.diagnosis.gpu_check.widened import FOR_KERNELS, Widths, widen

    trained = local_checkpoint(resolve_target("tiny-glm").location)
    return widen(trained, folder, FOR_KERNELS if for_kernels else Widths())


def make_all(source: Path, plans: Mapping[str, Plan], folder: Path) -> Made:
    """On the CPU, whose bytes are those of llm-compressor."""
    from assay_quantize.engine.quantize import quantize

    for name, plan in plans.items():
        quantize(plan, source, folder / name)
    say(f"{len(plans)} checkpoints are made in {folder}")
    return Made(source, plans, {name: folder / name for name in plans})


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


# ------------------------------------------------------------------------------------------------ CUDA's bytes
def compare_bytes(made: Made, name: str, folder: Path, *, on_cuda: bool) -> CudaBytes:
    """One checkpoint made once more: on the GPU, or in a self-test by the reference in eager PyTorch, shard by shard alike."""
    from assay.records.manifest import load_manifest
    from assay_quantize.engine.quantize import quantize

    device, kernels = ("cuda", "fused") if on_cuda else ("cpu", "reference")
    try:
        again = quantize(made.plans[name], made.source, folder / f"{name}-{device}", device=device, kernels=kernels)
    except QuantizeError as error:
        return CudaBytes(precision=name, outcome="NOT MEASURED", reasons=(one_line(str(error)),))
    except RuntimeError as error:  # what PyTorch says of a kernel that does not run
        return CudaBytes(precision=name, outcome="FAIL", reasons=(one_line(f"{type(error).__name__}: {error}")[:300],))
    first = load_manifest(made.folders[name])
    assert first is not None
    theirs = {shard.name: shard.sha256 for shard in again.shards}
    other = [shard.name for shard in first.shards if theirs.get(shard.name) != shard.sha256]
    return CudaBytes(
        precision=name,
        outcome="FAIL" if other else "PASS",
        reasons=(f"other bytes than the CPU's in {', '.join(other)}",) if other else (),
        num_bytes=again.bytes_out,
        compiled=on_cuda and _is_compiled(made.plans[name]),
    )


def _is_compiled(plan: Plan) -> bool:
    """Whether compiled operations were used for every scheme of the plan; found out while it was made, and kept."""
    from assay_quantize.kernels import compiled

    schemes = {tensor.scheme for tensor in plan.tensors if tensor.scheme is not None}
    return all(compiled.agrees(scheme, "BF16", "cuda") for scheme in schemes)
