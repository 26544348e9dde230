"""The first half of docs/models.md: which model, profile and precision go together, and why the others do not.

Names and shapes are the true ones (`hollow.py`); rules and sizes are those of `assay_quantize.plan`. `models_replayed.py` has
the second half, and writes the page.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import hollow

from assay.recipes.families import family_of
from assay.recipes.load import load_recipe, recipe_names
from assay.recipes.model import ModelRecipe
from assay.recipes.precision import PrecisionRecipe
from assay.recipes.profile import ProfileRecipe, context_tokens
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.plan.fits import Misfit, fit_on, misfits, ranks_of
from assay_quantize.plan.planner import make_plan
from assay_quantize.plan.stored import StoredModel, stored_by, stored_in

PAGE = Path(__file__).parents[3] / "docs" / "models.md"
CONTEXTS = {
    "deepseek-v3": 163_840, "glm-4.5-air": 131_072, "glm-4.7": 202_752, "glm-5": 202_752, "glm-5.2": 1_048_576,
    "qwen3-30b-a3b": 40_960, "qwen3-next-80b-a3b": 262_144,
}  # fmt: skip
"""`max_position_embeddings` of the published config.json."""
HEAD = """# Models, GPUs and precisions

Which checkpoints of the shipped model recipes fit which GPUs. Made from `recipes/` by
`tests/support/models/models_replayed.py`; tests fail when it is out of date. Figures are for one GPU, computed from each
model's true shapes: weights in GiB as tensor parallelism splits them + tokens of KV cache that fit beside them and 8 GiB of
workspace. A combination is in a recipe only if quantization groups end where the GPUs' shares end, and one sequence of the
whole context fits.

Kimi-K2 has no recipe: its tokenizer is a Python program that comes with the checkpoint (`tokenization_kimi.py`), and assay
runs no code from the hub.

`deepseek-v3` cannot PASS suite `full` as its recipe stands: the model's chat template has no tools, so the gate on tools is NOT
MEASURED. `recipes/models/deepseek-v3.yaml` says what to add.

## What the recipes hold

`compared`: the reference fits, so candidates are compared with it. `deployed`: only candidates fit.

| model | context | profile | | reference | W4A16 | NVFP4 |
|---|---|---|---|---|---|---|
"""
REST = """
## What they do not hold

| model | profiles | reason |
|---|---|---|
"""
NOT_NEEDED = "not needed: four GPUs of this kind hold it, and a machine of eight has four"


class Cell(NamedTuple):
    """One checkpoint on one profile."""

    model: str
    profile: str
    use: str
    checkpoint: str
    weight_bytes: int
    kv_tokens: int
    context: int
    problem: str | None


def models() -> list[str]:
    """Recipes for GPUs."""
    return [name for name in recipe_names("models") if name in hollow.MODELS]


def gpu_profiles() -> list[str]:
    return [name for name in recipe_names("profiles") if load_recipe(ProfileRecipe, name).hardware.device == "cuda"]


class Stored:
    """Checkpoints of one model, made when they are asked for."""

    def __init__(self, model: str) -> None:
        self.recipe = load_recipe(ModelRecipe, model)
        with tempfile.TemporaryDirectory() as folder:
            self._source = open_checkpoint(hollow.hollow_shapes(Path(folder) / "source", model))
            release = open_checkpoint(hollow.hollow_shapes(Path(folder) / "release", model, release=True))
        reference = stored_in(release, family_of(release.config), "reference")
        self._known = {"reference": hollow.at_true_size(reference, model)}

    def of(self, precision: str) -> StoredModel:
        if precision not in self._known:
            plan = make_plan(self._source, load_recipe(PrecisionRecipe, precision), model="m", family=self.recipe.family)
            self._known[precision] = hollow.at_true_size(stored_by(plan), self.recipe.name)
        return self._known[precision]

    def cell(self, profile_name: str, use: str, precision: str) -> Cell:
        profile, model = load_recipe(ProfileRecipe, profile_name), self.of(precision)
        fit = fit_on(model, profile, self.recipe.serving)
        config = {"max_position_embeddings": CONTEXTS[self.recipe.name]}
        context = context_tokens(config, profile, self.recipe.serving) or 0
        wrong = misfits(model, ranks_of(profile))
        problem = None
        if wrong:
            first = wrong[0]
            assert isinstance(first, Misfit), first.sentence
            what = f"{first.role} {first.projection} has {first.width:g} {first.side} a GPU"
            problem = f"{precision}: {what}, and {first.unit} share a scale"
        elif not fit.holds(context):
            problem = f"{precision}: {gib(fit.weight_bytes)} of {gib(fit.usable_bytes)} usable, no room for {context:,} tokens"
        return Cell(self.recipe.name, profile_name, use, precision, fit.weight_bytes, fit.kv_tokens, context, problem)


@functools.cache
def stored_of(name: str) -> Stored:
    return Stored(name)


def default_cells() -> Iterator[Cell]:
    for name in models():
        stored = stored_of(name)
        for profile in stored.recipe.profiles:
            for precision in ("reference", *stored.recipe.on_profile(profile).precisions):
                yield stored.cell(profile, "compared", precision)
        for profile in stored.recipe.deployment_profiles:
            for precision in stored.recipe.on_profile(profile).precisions:
                yield stored.cell(profile, "deployed", precision)


def left_out() -> Iterator[tuple[str, str, str]]:
    """(model, profile, why) of every profile that a recipe does not name."""
    for name in models():
        stored = stored_of(name)
        named = {*stored.recipe.profiles, *stored.recipe.deployment_profiles}
        for profile in gpu_profiles():
            if profile not in named:
                cells = [stored.cell(profile, "", one) for one in ("reference", *stored.recipe.precisions)]
                why = [one.problem for one in cells if one.problem is not None]
                yield (name, profile, "; ".join(why) or NOT_NEEDED)


def gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.0f}"


def first_half() -> str:
    columns: dict[tuple[str, str, str, str], dict[str, str]] = {}
    for cell in default_cells():
        column = "reference" if cell.checkpoint == "reference" else cell.checkpoint[:5]
        name = "" if column == "reference" else f"{cell.checkpoint}: "
        row = columns.setdefault((cell.model, f"{cell.context:,}", cell.profile, cell.use), {})
        assert column not in row, cell
        row[column] = f"{name}{gib(cell.weight_bytes)} + {cell.kv_tokens:,}"
    fits = (
        f"| {' | '.join(machine)} | {' | '.join(row.get(column, '–') for column in ('reference', 'w4a16', 'nvfp4'))} |\n"
        for machine, row in columns.items()
    )
    reasons: dict[tuple[str, str], list[str]] = {}
    for model, profile, why in left_out():
        reasons.setdefault((model, why), []).append(profile)
    holds_not = (f"| {model} | {', '.join(profiles)} | {why} |\n" for (model, why), profiles in reasons.items())
    return HEAD + "".join(fits) + REST + "".join(holds_not)
