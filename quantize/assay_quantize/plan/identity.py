"""The identity of what a plan does, whatever it is called."""

from __future__ import annotations

from assay.recipes.calibrated.texts import without_folders
from assay.records.base import sha256_of
from assay.records.plan import Plan

_IDENTITY = ("family", "source_sha256", "precision_recipe", "config", "mtp_layers", "ignore", "tensors")


def plan_sha256(plan: Plan) -> str:
    """Identity of what a plan does: everything but the names given to model, precision and source folder."""
    fields = {field: getattr(plan, field) for field in _IDENTITY}
    fields["precision_recipe"] = without_folders(plan.precision_recipe)
    if plan.importance_sha256 is not None:
        fields["importance_sha256"] = plan.importance_sha256
    if plan.calibrated is not None:
        fields["calibrated_layers"] = {str(layer): digest for layer, digest in sorted(plan.calibrated.layers.items())}
    return sha256_of(fields)
