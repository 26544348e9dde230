"""Which suite an evaluation asks, by which gates it is judged, and the note of them in the run's folder.

The gates are registered before the first request: `RUN/gates.registered.json` holds a copy of the limits as they apply to the
suite, so that `assay gate`, report and card use these whatever becomes of the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from assay.callbacks import Say, say_nothing
from assay.errors import AssayError, RecipeError
from assay.recipes.gate import GateRecipe, ScoreGate, gates_on
from assay.recipes.imported import ImportedSuite
from assay.recipes.load import load_recipe, recipe_names
from assay.recipes.profile import ProfileRecipe
from assay.recipes.suite import SuiteRecipe
from assay.recipes.suite_files import as_model_asks, with_files_hashed, with_selection
from assay.records.base import sha256_of
from assay.records.comparable import find_reference
from assay.records.measurement import Measurement
from assay.records.verdict import RegisteredGates

if TYPE_CHECKING:
    from assay_pipeline.targets import Target

REGISTERED_GATES = "gates.registered.json"
"""In a run's folder: the limits as they stood when measuring began."""
GPU_SUITE, CPU_SUITE = "full", "quick"
"""What a model's recipe asks for by default, and what a CPU is asked instead."""


# ------------------------------------------------------------------------------------------------ suite and gates
def selected(suite: SuiteRecipe, tasks: Sequence[str] | None, limit: int | None, say: Say) -> SuiteRecipe:
    """Some tasks of a suite, so many items of each of their parts, which is said. RecipeError: it has no such task."""
    part = with_selection(suite, tasks, limit)
    if part != suite:
        told = part.description.removesuffix(suite.description).strip(" .")
        say(f"note: verdicts are on a part of suite {suite.name} alone: {told[0].lower()}{told[1:]}")
    return part


def suite_for(
    target: Target, requested: str | None, profile: ProfileRecipe, gates: str | None = None
) -> tuple[SuiteRecipe, str | None]:  # fmt: skip
    """The suite that was named, else the model's; on a CPU `quick` instead of `full`, and the line that says so.

    gates: the ones that the user named, for that line.
    """
    chosen = with_files_hashed(
        as_model_asks(load_recipe(SuiteRecipe, requested or target.recipe.suite), target.recipe.sampling)
    )
    if requested is not None or target.recipe.suite != GPU_SUITE or profile.hardware.device != "cpu":
        return chosen, None
    instead = load_recipe(SuiteRecipe, CPU_SUITE)
    most = max(task.max_tokens for task in chosen.tasks)
    note = (
        f"suite {instead.name}, judged by gates {gates_named(target, instead, gates)}, instead of {chosen.name}: profile "
        f"{profile.name} is a CPU, and {chosen.name} lets a reply have up to {most:,} tokens; --suite {chosen.name} insists"
    )
    return instead, note


@dataclass(frozen=True)
class ChosenGates:
    """Limits as they apply to a suite. named: recipe or file that they came from. insisted: the user named them."""

    recipe: GateRecipe
    named: str
    insisted: bool = False

    def on_tasks(self, tasks: Sequence[str] | None) -> ChosenGates:
        """Without the score gates of other tasks. None: all of them."""
        if tasks is None:
            return self
        kept = [gate for gate in self.recipe.gates if not isinstance(gate, ScoreGate) or gate.task in tasks]
        return replace(self, recipe=self.recipe.model_copy(update={"gates": tuple(kept)}))


def choose_gates(target: Target, suite: SuiteRecipe, requested: str | None) -> ChosenGates:
    """RecipeError if they do not go with the suite."""
    named = gates_named(target, suite, requested)
    return ChosenGates(load_gates(named, suite), named, requested is not None)


def gates_named(target: Target, suite: SuiteRecipe, requested: str | None = None) -> str:
    """Name or file of the gates: the ones asked for, the model's with its own suite, or those of the suite."""
    own = target.recipe.gates if suite.name == Path(target.recipe.suite).stem else None
    return requested or own or gates_of_suite(suite)


def gates_of_suite(suite: SuiteRecipe | ImportedSuite) -> str:
    """Name or file of the gates of a suite, whatever the model: its own, the shipped ones of a shipped suite, or `default`."""
    if isinstance(suite, ImportedSuite):
        return "default"
    if suite.gates is not None:
        return suite.gates
    return suite.name if suite.name in recipe_names("gates") and _is_shipped(suite) else "default"


def _is_shipped(suite: SuiteRecipe) -> bool:
    """Whether it is the shipped suite of its name, up to options of its tasks."""
    if suite.name not in recipe_names("suites"):
        return False
    shipped = load_recipe(SuiteRecipe, suite.name)
    return [task.name for task in suite.tasks] == [task.name for task in shipped.tasks]


def load_gates(named: str, suite: SuiteRecipe | ImportedSuite) -> GateRecipe:
    """The limits as they apply to the suite. RecipeError if they do not go with it."""
    return gates_on(load_recipe(GateRecipe, named), suite)


def describe_gates(gates: GateRecipe, suite: SuiteRecipe | ImportedSuite) -> str:
    """One line: the margin of every task, and which have none."""
    margins: dict[float, list[str]] = {}
    for gate in gates.gates:
        if isinstance(gate, ScoreGate):
            margins.setdefault(gate.max_drop, []).append(gate.task)
    parts = [f"{100 * margin:g} points on {', '.join(tasks)}" for margin, tasks in sorted(margins.items())]
    gated = {task for tasks in margins.values() for task in tasks}
    if without := [task.name for task in suite.tasks if task.name not in gated]:
        parts.append(f"no gate on {', '.join(without)}")
    others = dict.fromkeys(gate.kind for gate in gates.gates if not isinstance(gate, ScoreGate))
    return f"gates {gates.name}: {'; '.join([*parts, *others])}"


# ------------------------------------------------------------------------------------------------ registered
def register_gates(chosen: ChosenGates, run_dir: Path, say: Say = say_nothing) -> GateRecipe:
    """Write down the limits before anything is measured; the limits that hold for the run, which are the first ones that were.

    A run that has measurements and no such note gets none: nobody could say any more that the limits came first.
    AssayError: the user names other limits after something was measured.
    """
    note, is_measured = registered_gates(run_dir), any((run_dir / "measurements").glob("*.json"))
    if not is_measured:
        recipe = chosen.recipe.model_dump(mode="json", by_alias=True)
        RegisteredGates(named=chosen.named, recipe=recipe, sha256=sha256_of(recipe)).save(run_dir / REGISTERED_GATES)
    if not is_measured or note is None:
        return chosen.recipe
    registered, named = GateRecipe.model_validate(note.recipe), chosen.named
    if registered != chosen.recipe and chosen.insisted:
        raise AssayError(
            f"--gates {named}: {run_dir} was measured under gates {registered.name}, registered before; `assay gate "
            f"{run_dir} --gates {named}` judges by the others, and says that they were chosen after the run"
        )
    if registered != chosen.recipe:
        say(f"gates {named} are not those registered before {run_dir} was measured; the registered ones are used")
    return registered


def registered_gates(run_dir: Path) -> RegisteredGates | None:
    """What `register_gates` wrote down. None: it was never called for this run. AssayError: the file was changed since."""
    path = run_dir / REGISTERED_GATES
    if (note := RegisteredGates.load_if_there(path)) is None:
        return None
    try:
        GateRecipe.model_validate(note.recipe)
    except ValidationError as error:
        raise AssayError(f"{path}: not the gates of this version of assay: {error.errors()[0]['msg']}") from None
    if sha256_of(note.recipe) != note.sha256:
        raise AssayError(
            f"{path}: was changed after the gates were registered; put the file back, or measure under another --name"
        )
    return note


def gates_of_run(
    run_dir: Path, measurements: list[Measurement], requested: str | None = None, say: Say = say_nothing
) -> GateRecipe:
    """The limits to judge a run by: those asked for, else the registered ones, else those of its suite.

    Says so where the file of the registered limits is gone or has changed since.
    """
    note = registered_gates(run_dir)
    suite = _suite_of(find_reference(measurements))
    if requested is not None:
        return load_gates(requested, suite)
    if note is None:
        return load_gates(gates_of_suite(suite), suite)
    registered = GateRecipe.model_validate(note.recipe)
    try:
        if load_gates(note.named, suite) != registered:
            say(f"gates {note.named} have changed since they were registered; the registered limits are used")
    except RecipeError:
        say(f"gates {note.named} cannot be read any more; the registered limits are used")
    return registered


def _suite_of(measurement: Measurement) -> SuiteRecipe | ImportedSuite:
    try:
        if measurement.imported is not None:
            return ImportedSuite.model_validate(measurement.suite_recipe)
        return SuiteRecipe.model_validate(measurement.suite_recipe)
    except ValidationError:
        raise AssayError(
            f"{measurement.label}: its suite {measurement.suite} was recorded by another version of assay; measure again"
        ) from None
