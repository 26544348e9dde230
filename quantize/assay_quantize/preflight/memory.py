"""Does a GPU hold its part of a checkpoint, and beside it the KV cache of one whole sequence? Arithmetic of `plan/fits.py`."""

from __future__ import annotations

from collections.abc import Sequence

from assay.recipes.model import Serving
from assay.recipes.profile import ProfileRecipe, context_tokens
from assay.records.preflight.report import Check
from assay_quantize.plan.fits import WORKSPACE_BYTES, Fit, fit_on, misfits, ranks_of
from assay_quantize.plan.stored import StoredModel, is_speculative

GIB = 2**30


def check_memory(
    label: str, model: StoredModel, profile: ProfileRecipe, serving: Serving, others: Sequence[ProfileRecipe]
) -> Check | None:
    """One checkpoint on one profile. others: profiles to take instead, best first. None: the profile states no memory.

    FAIL: it does not fit, even if nothing but weights and KV cache took memory. What else does is an allowance that was not
    measured, so a checkpoint that fits without it only is UNKNOWN.
    """
    if profile.hardware.memory_bytes_each is None:
        return None
    fit, length = fit_on(model, profile, serving), context_of(model, profile, serving)
    detail = _detail(fit, length)
    if fit.holds(length):
        detail += f"; {fit.kv_tokens:,} tokens of KV cache fit"
        return Check(check="memory", subject=label, outcome="PASS", detail=detail)
    remedy = _remedy(fit, model, serving, others)
    left_bytes = fit.free_bytes + WORKSPACE_BYTES - fit.kv_bytes(length)
    if left_bytes >= 0:
        detail += f"; it fits if the rest takes no more than {left_bytes / GIB:.1f} GiB"
        return Check(check="memory", subject=label, outcome="UNKNOWN", detail=detail, remedy=remedy)
    return Check(check="memory", subject=label, outcome="FAIL", detail=detail, remedy=remedy)


def problem_on(model: StoredModel, profile: ProfileRecipe, serving: Serving) -> str | None:
    """Why a profile's GPUs cannot share or hold a checkpoint, in a few words; None: they can, or its memory is not known."""
    if wrong := misfits(model.served(is_speculative(profile, serving)), ranks_of(profile)):
        return wrong[0].sentence
    if profile.hardware.memory_bytes_each is None:
        return None
    fit, length = fit_on(model, profile, serving), context_of(model, profile, serving)
    return None if fit.holds(length) else f"{_needed(fit, length):.1f} GiB needed, {fit.usable_bytes / GIB:.1f} usable"


def context_of(model: StoredModel, profile: ProfileRecipe, serving: Serving) -> int:
    """Tokens of the longest sequence that the server takes; 0 if nobody says."""
    return context_tokens(model.config, profile, serving) or 0


def _needed(fit: Fit, length: int) -> float:
    """GiB."""
    return (fit.weight_bytes + fit.kv_bytes(length) + WORKSPACE_BYTES) / GIB


def _detail(fit: Fit, length: int) -> str:
    return (
        f"{_needed(fit, length):.1f} GiB needed, {fit.usable_bytes / GIB:.1f} usable on each of {fit.num_gpus} GPUs: weights "
        f"{fit.weight_bytes / GIB:.1f}, KV cache for max-model-len {length:,} {fit.kv_bytes(length) / GIB:.1f}, "
        f"allowed for the rest {WORKSPACE_BYTES / GIB:g}"
    )


def _remedy(fit: Fit, model: StoredModel, serving: Serving, others: Sequence[ProfileRecipe]) -> str:
    """A shorter context if there is room for one; profiles that hold it, and why the others of the recipe do not."""
    problems = {one.name: problem_on(model, one, serving) for one in others}
    ways = []
    if (room := fit.kv_tokens // 1024 * 1024) > 0:
        ways.append(f"set `serving: {{max_model_len: {room}}}` in the model's recipe (`max-model-len` in the profile wins)")
    if holds := [name for name, problem in problems.items() if problem is None]:
        ways.append(f"take a profile that holds it: --profile {' or '.join(holds)}")
    ways += [] if ways else ["take a profile with more GPUs or more memory each"]
    why_not = "; ".join(f"not {name}: {problem}" for name, problem in problems.items() if problem is not None)
    return ", or ".join(ways) + (f" ({why_not})" if why_not else "")
