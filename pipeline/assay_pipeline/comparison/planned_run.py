"""A run as the command line describes it, before anything of it is made: what would be served, plans of what is made here.

Reads recipes, headers and configs; those of a reference or source on the hub are read there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.callbacks import Say, say_nothing
from assay.errors import AssayError, PlanError
from assay.recipes.families import family_of
from assay.recipes.gate import GateRecipe
from assay.recipes.load import load_recipe
from assay.recipes.model import Automatic, Location
from assay.recipes.precision import PrecisionRecipe
from assay.recipes.profile import ProfileRecipe
from assay.recipes.suite import SuiteRecipe
from assay.records.manifest import load_manifest
from assay.records.measurement import Measurement
from assay.records.plan import Plan
from assay.records.run import RunRecord, SourceData, SuiteIdentity
from assay_evaluate.serving.hardware import choose_profile, find_gpus, fits
from assay_pipeline.comparison.checkpoints import check_candidates
from assay_pipeline.gate_choice import ChosenGates, choose_gates, selected, suite_for
from assay_pipeline.mixes.automatic import chosen_in
from assay_pipeline.planning import plan_for, precisions_for, stand_in
from assay_pipeline.run_folders import choose_run
from assay_pipeline.targets import Target, open_source, open_stored, resolve_source, source_label

if TYPE_CHECKING:
    from assay_quantize.checkpoint.checkpoint import Checkpoint
    from assay_quantize.plan.stored import StoredModel


@dataclass(frozen=True)
class PlannedCheckpoint:
    """One checkpoint that would be served.

    Made here: `plan`, or `problem`, why it cannot be made. Not made here (the source, a release): `headers` and `location`.
    automatic: its schemes are chosen in the run; `plan` is that of its base until they are (`is_chosen`).
    """

    label: str
    plan: Plan | None = None
    problem: str | None = None
    headers: Checkpoint | None = None
    location: Location | None = None
    automatic: Automatic | None = None
    is_chosen: bool = False

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

    def problem_on(self, profile: ProfileRecipe, target: Target) -> str | None:
        """Why the GPUs of a profile cannot share or hold it; None: they can, or it is not known."""
        from assay_quantize.plan.fits import check_served

        try:
            if self.stored is not None:
                check_served(self.stored, profile, target.recipe.serving)
        except PlanError as problem:
            return str(problem)
        return None


@dataclass(frozen=True)
class PlannedRun:
    """What `assay run` would do with the same words.

    target: with the precisions that its recipe has for the profile. named: the user named the profile. suite: as the model asks
    it; why_suite: a line, if it is not the model's. limits: the gates, as they apply to the suite. source: its headers.
    checkpoints: all that would be served, the reference first. name: of the run's folder, if the user gave one. stream_from:
    `hub`, if the source is not to be downloaded whole. here: it is to begin now, so the profile's hardware must be here.
    """

    target: Target
    profile: ProfileRecipe
    named: bool
    suite: SuiteRecipe
    why_suite: str | None
    limits: ChosenGates
    source: Checkpoint
    checkpoints: tuple[PlannedCheckpoint, ...]
    runs: Path
    name: str | None
    stream_from: str | None
    here: bool = False

    @property
    def reference(self) -> PlannedCheckpoint:
        return self.checkpoints[0]

    @property
    def candidates(self) -> tuple[PlannedCheckpoint, ...]:
        return self.checkpoints[1:]

    @property
    def plans(self) -> tuple[Plan, ...]:
        """Of every checkpoint that is made here and can be."""
        return tuple(checkpoint.plan for checkpoint in self.checkpoints if checkpoint.plan is not None)

    @property
    def plans_to_make(self) -> tuple[Plan | Automatic, ...]:
        """What is to be made here: plans, and what the run chooses."""
        return tuple(checkpoint.automatic or checkpoint.plan for checkpoint in self.checkpoints if checkpoint.plan is not None)

    def stored(self) -> Iterator[tuple[str, StoredModel]]:
        """(label, weights as they are stored) of every checkpoint of which they are known."""
        yield from ((checkpoint.label, checkpoint.stored) for checkpoint in self.checkpoints if checkpoint.stored is not None)

    @functools.cached_property
    def run_dir(self) -> Path:
        """The folder that would hold the checkpoints."""
        return choose_run(self.runs, self._about, self.name)[0]

    @property
    def _about(self) -> RunRecord:
        data = SourceData(location=self.source.location, revision=self.source.revision, files=dict(self.source.data))
        return RunRecord(model=self.target.recipe.name, source=data)

    @property
    def is_done(self) -> bool:
        """Whether every checkpoint is made and measured on this suite already."""
        about = self._about.model_copy(update={"suite": SuiteIdentity(name=self.suite.name, sha256=self.suite.sha256)})
        measurements = choose_run(self.runs, about, self.name)[0] / "measurements"
        measured = {
            checkpoint.label: Measurement.load_if_there(measurements / f"{checkpoint.label}.json")
            for checkpoint in self.checkpoints
        }
        if any(measurement is None or measurement.suite_sha256 != self.suite.sha256 for measurement in measured.values()):
            return False
        folders = {plan.precision: self.run_dir / plan.precision / "checkpoint" for plan in self.plans}
        return all(is_made(plan, folders[plan.precision]) for plan in self.plans)

    @property
    def gates(self) -> GateRecipe:
        """As they apply to the suite."""
        return self.limits.recipe

    @property
    def is_served_here(self) -> bool:
        """Whether vLLM is started for the checkpoints; no if the profile names servers that run already."""
        return not self.profile.endpoints


class Planning:
    """Plans and headers of one target, each made once, whatever profiles are tried. AssayError: the source cannot be read."""

    def __init__(
        self,
        target: Target,
        precisions: list[str] | None,
        runs: Path | None = None,
        name: str | None = None,
        say: Say = say_nothing,
    ) -> None:
        """runs, name: where a run may have chosen schemes. None: it is not looked for."""
        self.target, self.source = target, open_source(target)
        self._precisions, self._runs, self._name, self._say = precisions, runs, name, say
        self._known: dict[str, PlannedCheckpoint] = {}
        self._recipes: dict[tuple[str, ...], dict[str, PrecisionRecipe | Automatic]] = {}

    def checkpoints(self, target: Target) -> tuple[PlannedCheckpoint, ...]:
        """All that would be served, as `of_target` compares them. target: on a profile, which may change its precisions."""
        if target.recipe.precisions not in self._recipes:  # why they were chosen is said once
            self._recipes[target.recipe.precisions] = precisions_for(
                target, None, self._precisions, with_reference=True, say=self._say
            )
        recipes = self._recipes[target.recipe.precisions]
        check_candidates(target.recipe, recipes)
        made = [self._of(recipe) for recipe in recipes.values()]
        first = self._released() if target.recipe.reference.release is not None else made.pop(0)
        if not target.recipe.include_source:
            return (first, *made)
        source = PlannedCheckpoint(source_label(self.source.config), headers=self.source, location=target.location)
        return (first, source, *made)

    def problem_on(self, profile: ProfileRecipe) -> str | None:
        """Why the GPUs of a profile cannot share or hold one of the checkpoints; None: they can, or it is not known."""
        if not is_on_gpus(profile):
            return None
        target = self.target.on_profile(profile)
        problems = (checkpoint.problem_on(profile, target) for checkpoint in self.checkpoints(target))
        return next((problem for problem in problems if problem is not None), None)

    def _of(self, recipe: PrecisionRecipe | Automatic) -> PlannedCheckpoint:
        if isinstance(recipe, Automatic):
            return self._of_automatic(recipe)
        if recipe.sha256 not in self._known:
            try:
                made = PlannedCheckpoint(recipe.name, plan=plan_for(self.target, self.source, recipe))
            except PlanError as problem:
                made = PlannedCheckpoint(recipe.name, problem=str(problem))
            self._known[recipe.sha256] = made
        return self._known[recipe.sha256]

    def _of_automatic(self, automatic: Automatic) -> PlannedCheckpoint:
        if automatic.name not in self._known:
            self._known[automatic.name] = self._chosen(automatic)
        return self._known[automatic.name]

    def _chosen(self, requested: Automatic) -> PlannedCheckpoint:
        recipe = None
        if self._runs is not None:
            data = SourceData(location=self.source.location, revision=self.source.revision, files=dict(self.source.data))
            recipe = chosen_in(
                [choose_run(self._runs, RunRecord(model=self.target.recipe.name, source=data), self._name)[0]], requested
            )
        try:
            if recipe is None:
                return PlannedCheckpoint(requested.name, stand_in(self.target, self.source, requested), automatic=requested)
            plan = plan_for(self.target, self.source, recipe)
        except PlanError as problem:
            return PlannedCheckpoint(requested.name, problem=str(problem))
        return PlannedCheckpoint(requested.name, plan, automatic=requested, is_chosen=True)

    def _released(self) -> PlannedCheckpoint:
        release = self.target.recipe.reference.release
        assert release is not None, "the caller saw to it"
        if "release" not in self._known:
            self._known["release"] = released(release)
        return self._known["release"]


def is_made(plan: Plan, folder: Path) -> bool:
    """Whether the checkpoint is there whole, whatever it was calibrated with."""
    from assay_quantize.engine.quantize import is_complete

    if (manifest := load_manifest(folder)) is None:
        return False
    made = {"importance_sha256": manifest.importance_sha256, "calibrated": manifest.calibrated}
    return is_complete(plan.model_copy(update=made), folder)


def released(release: Location) -> PlannedCheckpoint:
    """A published reference, by its headers."""
    return PlannedCheckpoint("reference", headers=open_stored(release), location=release)


def problem_before(
    target: Target, precisions: list[str] | None, say: Say = say_nothing
) -> Callable[[ProfileRecipe], str | None]:
    """Why a profile cannot serve what a target compares, asked before anything is downloaded; None: it can, or is not known.

    Headers are read when the first profile with GPUs is asked about. Where they cannot be (a hub that is out of reach), what
    is on the disk is judged later.
    """

    @functools.cache
    def planning() -> Planning:
        return Planning(target, precisions, say=say)

    def problem_on(profile: ProfileRecipe) -> str | None:
        try:
            return planning().problem_on(profile) if is_on_gpus(profile) else None
        except AssayError:
            return None

    return problem_on


def check_released(target: Target, profile: ProfileRecipe) -> None:
    """PlanError: a published reference that is on the hub cannot be served on a profile. Reads its headers only."""
    release = target.recipe.reference.release
    if release is None or release.hub is None or not is_on_gpus(profile):
        return
    if (problem := released(release).problem_on(profile, target)) is not None:
        raise PlanError(problem)


def is_on_gpus(profile: ProfileRecipe) -> bool:
    """Whether vLLM is started here, on GPUs."""
    return not profile.endpoints and profile.hardware.device == "cuda"


def planned_run(
    target: str,
    *,
    precisions: list[str] | None = None,
    suite: str | None = None,
    tasks: Sequence[str] | None = None,
    limit: int | None = None,
    gates: str | None = None,
    profile: str | None = None,
    runs: Path = Path("runs"),
    name: str | None = None,
    stream_from: str | None = None,
    here: bool = False,
    tensor_parallel_size: int | None = None,
    base_model: str | None = None,
    mtp: str | None = None,
    reference: str | None = None,
    say: Say = say_nothing,
) -> PlannedRun:
    """Everything that is planned before the first byte.

    tasks, limit: some tasks of the suite, so many items of each of their parts.
    reference: what candidates are compared with, instead of the recipe's. here: the run is to begin now. AssayError: then no
    profile was named and none is for this machine; a recipe, the source or a release cannot be read; the source is but a
    candidate; there is nothing to compare. A precision that cannot be made is no error (`PlannedCheckpoint.problem`), nor is a
    profile that was named and whose hardware is not here.
    """
    resolved = resolve_source(target, base_model, mtp, reference)
    planning = Planning(resolved, precisions, runs, name, say)
    if profile is not None:
        chosen = load_recipe(ProfileRecipe, profile).with_tensor_parallel(tensor_parallel_size)
    elif here:
        chosen = choose_profile(resolved.recipe, planning.problem_on, tensor_parallel_size)
    else:
        chosen = _best_profile(resolved, planning, tensor_parallel_size)
    resolved = resolved.on_profile(chosen)
    asked, why_suite = suite_for(resolved, suite, chosen, gates)
    limits = choose_gates(resolved, asked, gates).on_tasks(tasks)
    asked = selected(asked, tasks, limit, say)
    return PlannedRun(
        resolved, chosen, profile is not None, asked, why_suite, limits, planning.source, planning.checkpoints(resolved), runs,
        name, stream_from, here,
    )  # fmt: skip


def _best_profile(target: Target, planning: Planning, tensor_parallel_size: int | None) -> ProfileRecipe:
    """Of the recipe's profiles the first whose GPUs are here and which holds everything, else the nearest to that."""
    gpus = find_gpus()
    recipes = (load_recipe(ProfileRecipe, name) for name in target.recipe.profiles)
    profiles = [profile.with_tensor_parallel(tensor_parallel_size) for profile in recipes]
    here = [profile for profile in profiles if fits(profile.hardware, gpus)] or profiles
    return next((profile for profile in here if planning.problem_on(profile) is None), here[0])
