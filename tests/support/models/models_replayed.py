"""The second half of docs/models.md: what vLLM's own loaders for GPUs say of each cell, and of cells that cut a group.

    P=tests/support; PYTHONPATH=$P/quantization:$P/models:$P/serving .venv/bin/python $P/models/models_replayed.py

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

Each checkpoint of the first table was given to the model classes and loaders that vLLM {version} has for the profile's GPU
(`assay_vllm.replay`): every rank, target and draft, true widths, few layers and experts. The kernels are vLLM's choice for the
quantized experts, the linear layers and the attention of the target.
{outcome}

On Blackwell `nvfp4a16` stays weight-only: vLLM has Marlin for its experts, FlashInfer for its linear layers. Recipes name
`nvfp4-fp8-attention` for B200 instead: experts and MLPs compute in 4 bits, attention has FP8 blocks, as in published NVFP4
checkpoints (decision 089).

| models | profiles | checkpoint | experts | linear layers | attention |
|---|---|---|---|---|---|
"""
ALL_PASS = "All pass: everything stored is taken, and nothing is missing. {drafting} no draft, as the model has no MTP block."
REFUSED = """
## What vLLM refuses

Combinations that no recipe names because a GPU's share would cut a quantization group, and what vLLM answered. A test fails
when it answers otherwise.

| model | checkpoint | profiles | vLLM |
|---|---|---|---|
"""
CONTEXT = """
`glm-5.2` is served with 202,752 tokens of context: its own 1,048,576 need more KV cache than eight H200 have left.
"""


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


def cut_groups() -> list[Asked]:
    """Cells of the original recipes that none names now, because a GPU's share would cut a quantization group.

    What else may be in the way, memory, vLLM says only on a GPU.
    """
    defaults = set(default_cells())
    original = (
        Asked(model, profile, checkpoint)
        for model, (profiles, precisions) in ORIGINALLY.items()
        for profile in profiles
        for checkpoint in ("reference", *precisions)
    )
    return [cell for cell in original if cell not in defaults and "share a scale" in (_problem(cell) or "")]


def _problem(cell: Asked) -> str | None:
    return models_page.stored_of(cell.model).cell(cell.profile, "", cell.checkpoint).problem


# ------------------------------------------------------------------------------------------------ as text
def second_half(records: Mapping[Asked, Replay]) -> str:
    """records: of the default cells, and of those that vLLM refuses."""
    (version,) = {record.vllm for record in records.values()}
    rows = _grouped((cell.model, cell.checkpoint, *_kernels(records[cell]), cell.profile) for cell in default_cells())
    alike = _grouped((profiles, checkpoint, *kernels, model) for (model, checkpoint, *kernels), profiles in rows)
    loaded = "".join(f"| {models} | {' | '.join(cells)} |\n" for cells, models in alike)
    answers = _grouped(
        (cell.model, cell.checkpoint, _said(records[cell]).removeprefix("FAIL: "), cell.profile) for cell in cut_groups()
    )
    out = "".join(f"| {model} | {checkpoint} | {profiles} | {answer} |\n" for (model, checkpoint, answer), profiles in answers)
    return SAID.format(version=version, outcome=_outcome(records)) + loaded + REFUSED + out + CONTEXT


def _outcome(records: Mapping[Asked, Replay]) -> str:
    """One sentence while every default cell passes; else each cell that does not, and its record."""
    defaults = {cell: records[cell] for cell in default_cells()}
    failed = list(not_passed(defaults))
    if failed:
        return "; ".join(failed) + "."
    undrafted = sorted({f"`{cell.model}`" for cell, record in defaults.items() if len(record.parts) == 1})
    return ALL_PASS.format(drafting=f"{', '.join(undrafted)} has")


def _grouped(rows: Iterable[tuple[str, ...]]) -> list[tuple[tuple[str, ...], str]]:
    """Rows that differ in their last cell only, as one, in the order of the first of each."""
    last_cells: dict[tuple[str, ...], list[str]] = {}
    for *cells, last in rows:
        last_cells.setdefault(tuple(cells), []).append(last)
    return [(cells, ", ".join(names)) for cells, names in last_cells.items()]


def _kernels(record: Replay) -> list[str]:
    return [", ".join(chosen(record.parts[0], what)) or "–" for what in ("experts", "linear", "attention")]


def chosen(part: ReplayedPart, what: str) -> list[str]:
    """vLLM's kernels for the quantized modules of one kind, and all attention; with the scheme where there are several."""
    rows = [row for row in part.modules if row.what == what and (what == "attention" or row.scheme is not None)]
    several = len({row.scheme for row in rows}) > 1
    return list(dict.fromkeys(f"{row.scheme}: {_short(row.kernel)}" if several else _short(row.kernel) for row in rows))


def _short(kernel: str | None) -> str:
    """`MARLIN (MarlinExperts)` -> `MARLIN`; `MacheteLinearKernel` -> `Machete`."""
    return "chosen later" if kernel is None else kernel.partition(" (")[0].removesuffix("Kernel").removesuffix("Linear")


def _said(record: Replay) -> str:
    """The outcome, and the beginning of the first finding."""
    words = [finding.message.partition(" Reasons: ")[0] for finding in record.every_finding[:1]]
    return ": ".join([record.outcome, *words]).replace("|", "\\|")


def not_passed(records: Mapping[Asked, Replay]) -> Iterator[str]:
    """A line for each cell that is not PASS."""
    return (f"{' '.join(cell)}: {_said(record)}" for cell, record in records.items() if record.outcome != "PASS")


if __name__ == "__main__":
    all_records = replay_all([*default_cells(), *cut_groups()])
    models_page.PAGE.write_text(models_page.first_half() + second_half(all_records), encoding="utf-8")
