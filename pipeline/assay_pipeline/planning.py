"""The source by its headers, the precisions that were asked for, and a plan of each."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from assay.callbacks import Say, say_nothing
from assay.errors import PlanError
from assay.recipes.load import load_recipe
from assay.recipes.model import Automatic, automatic_of, is_automatic
from assay.recipes.precision import PrecisionRecipe
from assay.records.plan import Plan
from assay_pipeline.targets import Target, open_source, resolve_source

if TYPE_CHECKING:
    from assay_quantize.checkpoint.checkpoint import Checkpoint


def plan(target: str, precision: str, *, mtp: str | None = None, reference: str | None = None, say: Say = say_nothing) -> Plan:
    """What would happen to every tensor of a target, and the bytes of each role; reads headers only.

    target: a model recipe's name, a checkpoint folder or a hub id. precision: a recipe's name or file. mtp: `drop`: as in a
    model's recipe. reference: what candidates are compared with, instead of the recipe's. PlanError: what does not fit, and the
    precision that would, where shapes are the problem.
    """
    resolved = resolve_source(target, mtp=mtp, reference=reference)
    return plan_for(resolved, open_source(resolved, say), load_recipe(PrecisionRecipe, precision))


def precisions_for(
    target: Target, precision_alone: str | None, several: list[str] | None, *, with_reference: bool,
    say: Say = say_nothing,
) -> dict[str, PrecisionRecipe | Automatic]:  # fmt: skip
    """What was named (a recipe's name, or its file) -> recipe, the reference's first: nothing can be measured without it.

    `auto-BUDGET` has no recipe before a run chooses one. A recipe that is named twice counts once. PlanError: two different
    recipes have one name; it is that of the checkpoint.
    """
    if precision_alone is not None and several is not None:
        raise PlanError("say --precision or --precisions, not both")
    reference = target.recipe.reference.precision
    first = [reference] if with_reference and reference is not None else []
    named = [*first, *([precision_alone] if precision_alone else several or target.recipe.precisions)]
    for note in choices_of(
        target, first if precision_alone or several else named, all_of_recipe=not (precision_alone or several)
    ):
        say(f"note: {note}")
    by_name: dict[str, tuple[str, PrecisionRecipe | Automatic]] = {}
    for text in named:
        recipe = automatic_of(text) if is_automatic(text) else as_model_says(target, load_recipe(PrecisionRecipe, text))
        before, same_name = by_name.setdefault(recipe.name, (text, recipe))
        if _meaning(same_name) != _meaning(recipe):
            raise PlanError(
                f"{before} and {text} are different recipes, both called {recipe.name}, which is also the name of the "
                "checkpoint; give one of them another name, and its file too"
            )
    return dict(by_name.values())


def as_model_says(target: Target, precision: PrecisionRecipe) -> PrecisionRecipe:
    """A precision with what the model's recipe says of all of them: `mtp: drop`. PlanError: it calibrates the block."""
    if target.recipe.mtp is None or precision.mtp == target.recipe.mtp:
        return precision
    if precision.calibration != "none" and precision.calibration.mtp:
        raise PlanError(
            f"precision {precision.name}: calibration.mtp calibrates the MTP block, which mtp: {target.recipe.mtp} leaves out; "
            "take another precision"
        )
    return precision.model_copy(update={"mtp": target.recipe.mtp})


def _meaning(precision: PrecisionRecipe | Automatic) -> object:
    return precision if isinstance(precision, Automatic) else precision.sha256


def choices_of(target: Target, precisions: Collection[str], *, all_of_recipe: bool) -> tuple[str, ...]:
    """Why these precisions were chosen, where shapes forbid others. all_of_recipe: and why others are left out."""
    return tuple(sentence for taken, sentence in target.choices if taken in precisions or (taken is None and all_of_recipe))


def stand_in(target: Target, checkpoint: Checkpoint, automatic: Automatic) -> Plan:
    """For a precision of which nothing is chosen yet: its base."""
    return plan_for(target, checkpoint, automatic_base(target)).model_copy(update={"precision": automatic.name})


def automatic_base(target: Target) -> PrecisionRecipe:
    """What a run's choices extend: w4a16 unless the model's recipe names another. PlanError: no part is measured so."""
    base = load_recipe(PrecisionRecipe, target.recipe.automatic.base or "w4a16")
    if base.needs_calibration:
        problem = "has scales that come from a file of `assay calibrate`, with which no part is measured"
    elif base.calibration != "none" and base.calibration.method != "gptq":
        problem = "parts are measured data-free or by gptq"
    else:
        return base
    raise PlanError(f"automatic.base {base.name}: {problem}; take w4a16 or w4a16-gptq")


def plan_for(target: Target, checkpoint: Checkpoint, recipe: PrecisionRecipe) -> Plan:
    """The plan of one precision. PlanError: what does not fit, and the precision that would, where shapes are the problem."""
    from assay_quantize.plan.planner import make_plan, suggesting_fit

    try:
        recipe = as_model_says(target, recipe)
        plan = make_plan(checkpoint, recipe, model=target.recipe.name, family=target.recipe.family)
        return plan.model_copy(update={"base_model": target.recipe.base_model, "foreign_source": checkpoint.foreign})
    except PlanError as problem:
        raise suggesting_fit(problem, checkpoint, recipe.name) from None
