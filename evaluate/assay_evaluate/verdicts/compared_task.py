"""One task on both sides, and the items that would decide it."""

from __future__ import annotations

from dataclasses import dataclass

from assay.recipes.gate import GateRecipe
from assay.records.measurement import TaskResult
from assay.records.verdict import LookSeen
from assay_evaluate.statistics import (
    POWER,
    PairedEvidence,
    clustered_values_needed,
    graded_items_needed,
    items_needed,
)
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


MOST_ITEMS = 1_000_000
"""More are not computed or proposed: what was lost is then the margin itself, as far as anybody can tell."""


def items_needed_at_loss_seen(one: ComparedTask, recipe: GateRecipe) -> int | None:
    """Items with which the loss that was seen, taken for the true one, would pass the margin 4 times in 5, at the spread seen.

    None: nothing was lost, the loss is not below the margin, or more than `MOST_ITEMS` would be needed.
    """
    drop, margin, pairs = one.evidence.drop, one.evidence.margin, one.pairs
    room = margin - drop.value
    if not 0 < drop.value < margin:
        return None
    # Of order (2.8 spread / room)^2; exact powers of more items than this would take minutes.
    if drop.n * ((drop.high - drop.low) / room) ** 2 > MOST_ITEMS:
        return None
    if pairs.is_sampled:
        needed = graded_items_needed(pairs.differences, room, recipe.level, POWER)
    else:
        needed = items_needed(margin, (one.evidence.b + one.evidence.c) / drop.n, POWER, loss=drop.value, level=recipe.level)
    if (clustered := pairs.clustered) is not None:
        needed = max(needed, clustered_values_needed(clustered, drop.n, margin, recipe.level, POWER, loss=drop.value))
    return max(needed, recipe.min_items)
