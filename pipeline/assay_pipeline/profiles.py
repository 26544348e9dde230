"""Which profile serves, and whether its GPUs can hold what is to be served."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from assay.errors import AssayError, PlanError
from assay.recipes.load import load_recipe
from assay.recipes.model import Serving
from assay.recipes.profile import ProfileRecipe
from assay.records.plan import Plan

if TYPE_CHECKING:
    from assay_pipeline.targets import Target


def profile_for(
    target: Target,
    requested: str | None,
    problem_on: Callable[[ProfileRecipe], str | None] | None = None,
    *,
    tensor_parallel_size: int | None = None,
) -> ProfileRecipe:
    """The profile that was named, if this machine has what it needs; else the first of the recipe's that fits.

    problem_on: why a profile cannot serve what is to be served; None: it can. tensor_parallel_size: instead of the profile's.
    AssayError: it has not, or the profile names servers that run already.
    """
    from assay_evaluate.serving.hardware import choose_profile

    if requested is None:
        return choose_profile(target.recipe, problem_on, tensor_parallel_size)
    return profile_named(requested, tensor_parallel_size)


def profile_named(requested: str, tensor_parallel_size: int | None = None) -> ProfileRecipe:
    """The profile of that name. AssayError: this machine has not what it needs, or it names servers that run already."""
    profile = load_recipe(ProfileRecipe, requested)
    if profile.endpoints:
        raise AssayError(
            f"profile {profile.name}: its `endpoints` run already and are for `assay evaluate`; give the server's URL itself, "
            "or a profile without `endpoints`"
        )
    profile = profile.with_tensor_parallel(tensor_parallel_size)
    require_hardware(profile)
    return profile


def require_hardware(profile: ProfileRecipe) -> None:
    """AssayError: the profile's GPUs are not here. Servers that run already have theirs."""
    from assay_evaluate.serving.hardware import describe_hardware, find_gpus, fits

    if not profile.endpoints and not fits(profile.hardware, find_gpus()):
        needed = f"{profile.hardware.num_gpus}x {profile.hardware.gpu or 'NVIDIA GPU'}"
        raise AssayError(
            f"profile {profile.name} needs {needed}, this machine has {describe_hardware().get('gpus', 'no GPU')}; "
            "leave --profile out to have one chosen, or write one under recipes/profiles/"
        )


def check_plans_served(plans: Iterable[Plan], target: Target, profile: ProfileRecipe) -> None:
    """PlanError for the first planned checkpoint that the profile's GPUs cannot share or hold."""
    from assay_quantize.plan.fits import check_served
    from assay_quantize.plan.stored import stored_by

    for plan in plans:
        check_served(stored_by(plan), profile, target.recipe.serving)


def check_folder_served(folder: Path, label: str, serving: Serving, profile: ProfileRecipe) -> None:
    """The same for a folder, by its headers. A family that assay does not know is not judged: vLLM serves more of them."""
    from assay.recipes.families import family_of
    from assay_quantize.checkpoint.checkpoint import open_checkpoint
    from assay_quantize.plan.fits import check_served
    from assay_quantize.plan.stored import stored_in

    if profile.hardware.device == "cpu":
        return
    checkpoint = open_checkpoint(folder, allow_quantized=True)
    try:
        family = family_of(checkpoint.config)
    except PlanError:
        return
    check_served(stored_in(checkpoint, family, label), profile, serving)
