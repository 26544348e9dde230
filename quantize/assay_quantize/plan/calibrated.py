"""Which tensors of a plan a calibration changes: weights that are rounded to integers, in decoder layers.

The MTP block is none of these layers: transformers does not build it, so no text goes through it. What is not named here
is made from the source as in any other precision.
"""

from __future__ import annotations

from collections import defaultdict

from assay.recipes.families import split_layer
from assay.records.plan import Plan, TensorPlan
from assay_quantize.formats.schemes import SCHEMES


def is_asked(plan: Plan) -> bool:
    """Whether the precision's weights are calibrated."""
    return bool(plan.precision_recipe.get("calibration", "none") != "none")


def is_calibrated(plan: Plan, tensor: TensorPlan) -> bool:
    """Whether a calibration, and not the weight alone, says what the tensor becomes."""
    return (
        is_asked(plan)
        and tensor.action == "quantize"
        and tensor.role != "mtp"
        and tensor.scheme is not None
        and SCHEMES[tensor.scheme].layout == "int4"
        and split_layer(tensor.name) is not None
    )


def calibrated_tensors(plan: Plan) -> dict[int, list[TensorPlan]]:
    """Layer -> its tensors that are calibrated, layers in order."""
    found: defaultdict[int, list[TensorPlan]] = defaultdict(list)
    for tensor in plan.tensors:
        at = split_layer(tensor.name)
        if at is not None and is_calibrated(plan, tensor):
            found[at.layer].append(tensor)
    return dict(sorted(found.items()))
