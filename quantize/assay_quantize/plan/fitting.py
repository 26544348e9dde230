"""Which precisions a checkpoint's shapes allow: a hidden size of 576 or 2,880 has no blocks of 128, and no groups of 128."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from assay.errors import PlanError
from assay.recipes.load import load_recipe
from assay.recipes.precision import PrecisionRecipe
from assay_quantize.checkpoint.checkpoint import Checkpoint
from assay_quantize.plan.planner import check_shapes_of

INSTEAD = {"fp8": ("fp8-channel",), "w4a16": ("w4a16-g64", "w4a16-g32", "w4a16-channel")}
"""Precision -> those that take its place where its blocks or groups do not divide a weight, the nearest first."""


class Chosen(NamedTuple):
    """precision: None: nothing fits. why_not: of the one that was wanted, if another takes its place."""

    wanted: str
    precision: str | None
    why_not: str | None

    @property
    def sentence(self) -> str | None:
        """What was chosen and why, without what to do about it; None: what was wanted."""
        if self.why_not is None:
            return None
        taken = (
            f"precision {self.precision} in place of {self.wanted}"
            if self.precision
            else f"precision {self.wanted} is left out"
        )
        return f"{taken}: {self.why_not.partition('; ')[0]}"


def choose_fitting(checkpoint: Checkpoint, wanted: Sequence[str]) -> list[Chosen]:
    """For each precision itself, or the first that takes its place and fits the shapes. Reads headers only."""
    found = []
    checkpoint = _one_of_each(checkpoint)
    for name in wanted:
        problem = shape_problem(checkpoint, name)
        others = () if problem is None else INSTEAD.get(name, ())
        fits = name if problem is None else next((one for one in others if shape_problem(checkpoint, one) is None), None)
        found.append(Chosen(name, fits, problem))
    return found


def _one_of_each(checkpoint: Checkpoint) -> Checkpoint:
    """The first layer and expert with each shape: the others cannot say more, and a large model has 60,000 tensors."""
    first: dict[object, str] = {}
    for name, header in checkpoint.tensors.items():
        first.setdefault((re.sub(r"\.\d+\.", ".0.", name), header.shape, header.dtype), name)
    return replace(checkpoint, tensors={name: checkpoint.tensors[name] for name in first.values()})


def shape_problem(checkpoint: Checkpoint, precision: str) -> str | None:
    """The first weight that does not fit a shipped precision; None: all do."""
    try:
        check_shapes_of(checkpoint, load_recipe(PrecisionRecipe, precision))
    except PlanError as problem:
        return str(problem)
    return None


def with_what_fits(problem: PlanError, checkpoint: Checkpoint, precision: str) -> PlanError:
    """`problem`, and the precision that would work, where shapes are the problem."""
    if precision not in INSTEAD or str(problem) != shape_problem(checkpoint, precision):
        return problem
    fits = next((one for one in INSTEAD[precision] if shape_problem(checkpoint, one) is None), None)
    return problem if fits is None else PlanError(f"{problem}; precision {fits} fits this checkpoint")
