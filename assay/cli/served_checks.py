"""What a profile's GPUs cannot serve, found before a weight is read or a server started: groups that ranks cannot share, memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from assay.errors import PlanError
from assay.recipes.families import family_of
from assay.recipes.model import ModelRecipe
from assay.recipes.profile import ProfileRecipe
from assay.records.plan import Plan

if TYPE_CHECKING:
    from assay_evaluate.run.evaluate import Candidate
    from assay_quantize.plan.stored import StoredModel


def check_plans(plans: Iterable[Plan], recipe: ModelRecipe, profile: ProfileRecipe) -> None:
    """PlanError for the first planned checkpoint that the profile cannot serve."""
    from assay_quantize.plan.stored import stored_by

    for plan in plans:
        _check(stored_by(plan), recipe, profile)


def check_checkpoints(candidates: Iterable[Candidate], recipe: ModelRecipe, profile: ProfileRecipe) -> None:
    """The same for folders, by their headers; a checkpoint of a family that assay does not know is not judged."""
    from assay_quantize.checkpoint.checkpoint import open_checkpoint
    from assay_quantize.plan.stored import stored_in

    if not _is_started_on_gpus(profile):
        return
    for one in candidates:
        checkpoint = open_checkpoint(one.checkpoint, allow_quantized=True)
        try:
            family = family_of(checkpoint.config)
        except PlanError:
            continue
        _check(stored_in(checkpoint, family, one.label), recipe, profile)


def _check(model: StoredModel, recipe: ModelRecipe, profile: ProfileRecipe) -> None:
    from assay_quantize.plan.fits import check_memory
    from assay_quantize.plan.parallel import check_parallel

    if _is_started_on_gpus(profile):
        check_parallel(model, profile)
        check_memory(model, profile, recipe.serving)


def _is_started_on_gpus(profile: ProfileRecipe) -> bool:
    return profile.hardware.device == "cuda" and not profile.urls
