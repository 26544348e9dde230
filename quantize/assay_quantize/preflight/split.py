"""Can tensor parallelism split every checkpoint? Rules of `plan/fits.py`."""

from __future__ import annotations

from assay.recipes.model import Serving
from assay.recipes.profile import ProfileRecipe
from assay.records.preflight.report import Check
from assay_quantize.plan.fits import misfits, ranks_of, remedy, sentence
from assay_quantize.plan.stored import StoredModel, is_speculative


def check_split(label: str, model: StoredModel, profile: ProfileRecipe, serving: Serving) -> Check:
    """One checkpoint on one profile."""
    ranks = ranks_of(profile)
    if not (found := misfits(model.served(is_speculative(profile, serving)), ranks)):
        n = ranks.tensor_parallel
        detail = f"each of {n} ranks has whole heads, and groups and blocks that share a scale end where its part ends"
        if ranks.tensor_parallel == 1:
            detail = "tensor-parallel-size 1: nothing is split"
        return Check(check="split", subject=label, outcome="PASS", detail=detail)
    return Check(check="split", subject=label, outcome="FAIL", detail=sentence(found), remedy=remedy(found))
