"""The second half of docs/models.md: what vLLM's own loaders for GPUs say of each cell, and of those that were taken out.

    P=tests/support; PYTHONPATH=.:quantize:evaluate:$P/quantization:$P/models .venv/bin/python $P/models/models_replayed.py

writes the page; it takes a minute on two cores. Widths are the true ones, layers and experts are few: choices of kernels
follow from widths, formats and the GPU. `test_replay.py` has a model at full count.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import hollow
import models_page
from serving_interpreter import with_our_plugin

from assay.recipes.load import load_recipe
from assay.recipes.model import ModelRecipe
from assay.recipes.precision import PrecisionRecipe
from assay.recipes.profile import ProfileRecipe
from assay.records.preflight.replay import Replay, ReplayedPart
from assay_evaluate.serving.replay import Candidate, PlannedCheckpoint, planned, replay
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.formats.config_groups import config_json
from assay_quantize.plan.planner import make_plan

EXPERTS = 16
"""More than any model chooses for a token."""
LAYERS = {"qwen3-next-80b-a3b": 4}
"""One layer of each kind; of the others two do: one dense, one with experts."""
ORIGINALLY: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "deepseek-v3": (("8xb200", "8xh200", "8xrtx-pro-6000", "4xh200"), ("w4a16", "nvfp4a16")),
    "glm-4.5-air": (("4xh200", "8xh200", "8xb200", "8xrtx-pro-6000"), ("w4a16-experts", "nvfp4a16")),
    "glm-4.7": (("8xb200", "8xh200", "8xrtx-pro-6000", "4xh200"), ("w4a16", "nvfp4a16")),
    "glm-5": (("8xb200", "8xh200", "8xrtx-pro-6000", "4xh200"), ("w4a16", "nvfp4a16")),
    "glm-5.2": (("8xb200", "8xh200", "8xrtx-pro-6000", "4xh200"), ("w4a16", "nvfp4a16")),
    "qwen3-30b-a3b": (("4xh200", "8xh200", "8xb200", "8xrtx-pro-6000"), ("w4a16", "nvfp4a16")),
    "qwen3-next-80b-a3b": (("4xh200", "8xh200", "8xb200", "8xrtx-pro-6000"), ("w4a16", "nvfp4a16")),
}
"""Model recipe -> profiles and precisions that it named before its cells were planned and replayed."""
SAID = """
## What vLLM's loaders say

Each checkpoint of the first table, given to the model classes and loaders that vLLM {version} has for the profile's GPU
(`assay_vllm.replay`): every rank, target and draft, true widths, few layers and experts. PASS: all that is stored is taken, and
nothing is missing. The kernels are vLLM's choice for the target's quantized experts and linear layers and for its attention.

NVFP4 weights with 16-bit activations (`nvfp4a16`) stay weight-only on Blackwell: vLLM has a FlashInfer kernel for their linear
layers, and Marlin for their experts. Recipes name `nvfp4-fp8-attention` for B200 instead: experts and MLPs compute in 4 bits,
and attention has FP8 blocks, as in published NVFP4 checkpoints (decision 089).

| model | profile | checkpoint | target | draft | experts | linear layers | attention |
|---|---|---|---|---|---|---|---|
"""
TAKEN_OUT = """
## What was taken out

Cells that the recipes held before they were checked. Where the split is the reason, vLLM was asked again, and its words follow:
a test fails when it answers otherwise. Memory, and what an unneeded cell would do, no loader was asked.

| model | profile | checkpoint | why | vLLM |
|---|---|---|---|---|
"""
NOT_A_CELL = """
Not a cell of its own: `glm-5.2` is served with 202,752 tokens of context, because its own 1,048,576 need more KV cache than
eight H200 have left. What kept whole checkpoints from loading was in assay, and is mended: a draft head that no release of
GLM-5 stores, scales that weight-only NVFP4 experts do not have, layers of the target that a draft is given with whole shards,
and the MTP block of Qwen3-Next, of which its config says nothing. The second table shows each of them.
"""
WEIGHT_ONLY = "weight-only on B200, too: nvfp4-fp8-attention took its place"


class Asked(NamedTuple):
    """A cell: a model recipe, a profile, and `reference` or a precision."""

    model: str
    profile: str
    checkpoint: str


def replay_all(cells: Iterable[Asked]) -> dict[Asked, Replay]:
    """One record for each cell, in their order."""
    wanted = list(dict.fromkeys(cells))
    with tempfile.TemporaryDirectory() as folder:
        interpreter = with_our_plugin(Path(folder))
        made = {which: _checkpoint(Path(folder), *which) for which in {(cell.model, cell.checkpoint) for cell in wanted}}
        records = replay([_candidate(cell, made, interpreter) for cell in wanted])
    return dict(zip(wanted, records, strict=True))


def _candidate(cell: Asked, made: dict[tuple[str, str], Path | PlannedCheckpoint], interpreter: str) -> Candidate:
    """On a machine of eight GPUs, whatever the profile has: of a GPU only one process need start vLLM."""
    recipe = load_recipe(ProfileRecipe, cell.profile)
    assert recipe.vllm["tensor-parallel-size"] == recipe.hardware.num_gpus
    hardware = recipe.hardware.model_copy(update={"num_gpus": 8})
    profile = recipe.model_copy(update={"interpreter": interpreter, "hardware": hardware})
    serving = load_recipe(ModelRecipe, cell.model).serving
    return Candidate(" ".join(cell), made[cell.model, cell.checkpoint], profile, serving)


def _checkpoint(folder: Path, model: str, checkpoint: str) -> Path | PlannedCheckpoint:
    """The published release, on disk; or what the plan of a precision will make."""
    release = checkpoint == "reference"
    path = folder / f"{model}{'-release' if release else ''}"
    if not path.exists():
        hollow.hollow_model(path, model, layers=LAYERS.get(model, 2), dense=1, experts=EXPERTS, release=release)
    if release:
        return path
    plan = make_plan(open_checkpoint(path), load_recipe(PrecisionRecipe, checkpoint), model="m", family=None)
    return planned(plan, config_json(plan))


# ------------------------------------------------------------------------------------------------ which cells
def default_cells() -> list[Asked]:
    """Of the first table."""
    return [Asked(cell.model, cell.profile, cell.checkpoint) for cell in models_page.default_cells()]


def taken_out() -> dict[Asked, str]:
    """Cell of the original recipes that is no default any more -> why."""
    now, found = set(default_cells()), dict[Asked, str]()
    for model, (profiles, precisions) in ORIGINALLY.items():
        stored = models_page.stored_of(model)
        named = {*stored.recipe.profiles, *stored.recipe.deployment_profiles}
        for cell in (Asked(model, profile, one) for profile in profiles for one in ("reference", *precisions)):
            if cell not in now:
                problem = stored.cell(cell.profile, "", cell.checkpoint).problem
                no_problem = WEIGHT_ONLY if cell.profile in named else models_page.NOT_NEEDED
                found[cell] = no_problem if problem is None else problem.partition(": ")[2]
    return found


def refused(out: Mapping[Asked, str]) -> list[Asked]:
    """Those that vLLM cannot split: what else is in the way (memory) it says only on a GPU."""
    return [cell for cell, why in out.items() if "share a scale" in why]


# ------------------------------------------------------------------------------------------------ as text
def second_half(records: Mapping[Asked, Replay]) -> str:
    """records: of the default cells, and of those that vLLM refuses."""
    (version,) = {record.vllm for record in records.values()}
    rows = "".join(_row(cell, records[cell]) for cell in default_cells())
    out = "".join(
        f"| {' | '.join(cell)} | {why} | {_said(records[cell]) if cell in records else ''} |\n"
        for cell, why in taken_out().items()
    )
    return SAID.format(version=version) + rows + TAKEN_OUT + out + NOT_A_CELL


def _row(cell: Asked, record: Replay) -> str:
    outcomes = [record.outcome if part.findings or record.findings else "PASS" for part in record.parts]
    target, *draft = outcomes
    kernels = [", ".join(chosen(record.parts[0], what)) or "–" for what in ("experts", "linear", "attention")]
    return f"| {' | '.join((*cell, target, *(draft or ['none']), *kernels))} |\n"


def chosen(part: ReplayedPart, what: str) -> list[str]:
    """vLLM's kernels for the quantized modules of one kind, and all attention; with the scheme where there are several."""
    rows = [row for row in part.modules if row.what == what and (what == "attention" or row.scheme is not None)]
    several = len({row.scheme for row in rows}) > 1
    return list(dict.fromkeys(f"{row.scheme}: {_short(row.kernel)}" if several else _short(row.kernel) for row in rows))


def _short(kernel: str | None) -> str:
    """`MARLIN (MarlinExperts)` -> `MARLIN`; `MacheteLinearKernel` -> `Machete`."""
    return "chosen later" if kernel is None else kernel.partition(" (")[0].removesuffix("Kernel").removesuffix("Linear")


def _said(record: Replay) -> str:
    """The outcome, and the beginning of what was found first."""
    words = [finding.message.partition(" Reasons: ")[0] for finding in record.every_finding[:1]]
    return ": ".join([record.outcome, *words]).replace("|", "\\|")


def not_passed(records: Mapping[Asked, Replay]) -> Iterator[str]:
    """A line for each cell that is not PASS."""
    return (f"{' '.join(cell)}: {_said(record)}" for cell, record in records.items() if record.outcome != "PASS")


if __name__ == "__main__":
    all_records = replay_all([*default_cells(), *refused(taken_out())])
    models_page.PAGE.write_text(models_page.first_half() + second_half(all_records), encoding="utf-8")
