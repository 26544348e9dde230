"""A run as the command line describes it, before anything of it is made: what would be served, plans of what is made here.

Reads recipes, headers and configs; those of a reference or source on the hub are read there.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.cli.candidates.of_target import check_candidates
from assay.cli.gate_choice import choose_gates, suite_for
from assay.cli.stages import plan_for, precisions_for
from assay.cli.targets import Target, open_released, open_source, resolve_target, source_label
from assay.errors import PlanError
from assay.recipes.families import family_of
from assay.recipes.gate import GateRecipe
from assay.recipes.load import load_recipe
from assay.recipes.model import Location
from assay.recipes.precision import PrecisionRecipe
from assay.recipes.profile import ProfileRecipe
from assay.recipes.suite import SuiteRecipe
from assay.records.plan import Plan
from assay_evaluate.serving.hardware import find_gpus, fits

if TYPE_CHECKING:
    from assay_quantize.checkpoint.checkpoint import Checkpoint
    from assay_quantize.plan.stored import StoredModel


@dataclass(frozen=True)
class PlannedCheckpoint:
    """One checkpoint that would be served.

    Made here: `plan`, or `problem`, why it cannot be made. Not made here (the source, a release): `headers` and `location`.
    """

    label: str
    plan: Plan | None = None
    problem: str | None = None
    headers: Checkpoint | None = None
    location: Location | None = None

    @functools.cached_property
    def config(self) -> dict[str, Any] | None:
        """Its config.json. None: its plan could not be made."""
        if self.headers is not None:
            return self.headers.config
        if self.plan is None:
            return None
        from assay_quantize.formats.config_groups import config_json

        return config_json(self.plan)

    @functools.cached_property
    def stored(self) -> StoredModel | None:
        """Its weights as they are stored. None: its plan could not be made, or its family is not known."""
        from assay_quantize.plan.stored import stored_by, stored_in

        if self.plan is not None:
            return stored_by(self.plan)
        try:
            return None if self.headers is None else stored_in(self.headers, family_of(self.headers.config), self.label)
        except PlanError:
            return None


@dataclass(frozen=True)
class PlannedRun:
    """What `assay run` would do with the same words.

    aim: with the precisions that its recipe has for the profile. named: the user named the profile; else it is the first of the
    recipe whose GPUs are here, or the first of all. suite: as the model asks it. gates: as they apply to the suite. source: its
    headers. checkpoints: all that would be served, the reference first. name: of the run's folder, if the user gave one.
    """

    aim: Target
    profile: ProfileRecipe
    named: bool
    suite: SuiteRecipe
    gates: GateRecipe
    source: Checkpoint
    checkpoints: tuple[PlannedCheckpoint, ...]
    runs: Path
    name: str | None

    @property
    def reference(self) -> PlannedCheckpoint:
        return self.checkpoints[0]

    @property
    def candidates(self) -> tuple[PlannedCheckpoint, ...]:
        return self.checkpoints[1:]

    @property
    def plans(self) -> tuple[Plan, ...]:
        """Of every checkpoint that is made here and can be."""
        return tuple(one.plan for one in self.checkpoints if one.plan is not None)

    @property
    def is_served_here(self) -> bool:
        """Whether vLLM is started for the checkpoints; no if the profile names servers that run already."""
        return not self.profile.endpoints


def planned_run(
    target: str,
    *,
    precisions: list[str] | None = None,
    suite: str | None = None,
    gates: str | None = None,
    profile: str | None = None,
    runs: Path = Path("runs"),
    name: str | None = None,
) -> PlannedRun:
    """Everything that is planned before the first byte. The profile's hardware need not be here.

    AssayError: a recipe, the source or a release cannot be read, or there is nothing to compare. A precision that cannot be
    made is no error (`PlannedCheckpoint.problem`).
    """
    aim = resolve_target(target)
    chosen = load_recipe(ProfileRecipe, profile or _profile_here(aim))
    aim = aim.on_profile(chosen)
    recipes = precisions_for(aim, None, precisions, with_reference=True)
    check_candidates(aim.recipe, recipes)
    asked, _ = suite_for(aim, suite, chosen, gates)
    limits = choose_gates(aim, asked, gates)
    source = open_source(aim)
    checkpoints = tuple(_in_order(aim, source, recipes.values()))
    return PlannedRun(aim, chosen, profile is not None, asked, limits.recipe, source, checkpoints, runs, name)


def _profile_here(aim: Target) -> str:
    """The first of the recipe's profiles whose GPUs are here, or its first."""
    gpus = find_gpus()
    here = (name for name in aim.recipe.profiles if fits(load_recipe(ProfileRecipe, name).hardware, gpus))
    return next(here, aim.recipe.profiles[0])


def _in_order(aim: Target, source: Checkpoint, recipes: Iterable[PrecisionRecipe]) -> Iterator[PlannedCheckpoint]:
    """As `of_target` compares them: reference, source (if the recipe wants it), candidates."""
    made = [_planned(aim, source, recipe) for recipe in recipes]
    if (release := aim.recipe.reference.release) is not None:
        yield PlannedCheckpoint("reference", headers=open_released(release), location=release)
    else:
        yield made.pop(0)
    if aim.recipe.include_source:
        yield PlannedCheckpoint(source_label(source.config), headers=source, location=aim.location)
    yield from made


def _planned(aim: Target, source: Checkpoint, recipe: PrecisionRecipe) -> PlannedCheckpoint:
    try:
        return PlannedCheckpoint(recipe.name, plan=plan_for(aim, source, recipe))
    except PlanError as problem:
        return PlannedCheckpoint(recipe.name, problem=str(problem))
