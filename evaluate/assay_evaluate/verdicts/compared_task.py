"""One task on both sides, and the items that would decide it."""

from __future__ import annotations

from dataclasses import dataclass

from assay.recipes.gate import GateRecipe
from assay.records.measurement import TaskResult
from assay.records.verdict import LookSeen
from assay_evaluate.statistics import POWER, PairedEvidence
from assay_evaluate.statistics.item_pairs import Pairs, TokenCost


@dataclass(frozen=True)
class ComparedTask:
    """One task that both sides answered, held against its margin."""

    reference: TaskResult
    candidate: TaskResult
    pairs: Pairs
    evidence: PairedEvidence
    tokens: TokenCost | None
    looks: tuple[LookSeen, ...] = ()
    """Of a task that is asked in rounds; `evidence` is of all of them together."""


def items_needed_for(one: ComparedTask, recipe: GateRecipe) -> int:
    """TOST must pass on both sides: each may miss half as often."""
    power = POWER if one.evidence.claim == "non_inferior" else (1 + POWER) / 2
    return max(one.pairs.needed(one.evidence.margin, recipe.level, power), recipe.min_items)
