"""What the verdict of a score gate says: what was compared, with the numbers, and what they leave open."""

from __future__ import annotations

from assay.quantities import percent_short, points_short, points_signed, signed
from assay.recipes.gate import GateRecipe
from assay.records.base import Interval
from assay.records.measurement import Measurement
from assay.records.verdict import Status
from assay_evaluate.statistics import clustered_values_needed, items_needed
from assay_evaluate.statistics.item_pairs import Pairs, TokenCost
from assay_evaluate.verdicts.compared_task import ComparedTask, items_needed_for


def sentences(
    one: ComparedTask,
    reference: Measurement,
    candidate: Measurement,
    recipe: GateRecipe,
    status: Status,
    p_holm: float,
    family: int,
) -> str:
    """What was compared, with the numbers; whether there is a difference at all; what the replies cost."""
    evidence, flips = one.evidence, one.pairs.flips
    drop = evidence.drop
    found, right = f"over {drop.n} paired items", "right"
    if one.pairs.is_sampled:
        found, right = f"{found}, {one.pairs.n} pairs of replies", "more often right"
    seen = (
        f"{one.reference.task}: {points_lost(drop)} {found}, {evidence.b} {right} in {reference.label} only and {evidence.c} "
        f"in {candidate.label} only"
        + (f", {flips.wrong_to_other_wrong} wrong in another way" if flips.wrong_to_other_wrong else "")
        + (f", {one.pairs.num_excluded} without a reply left out" if one.pairs.num_excluded else "")
    )
    test = "skew-corrected t, p" if one.pairs.is_sampled else "McNemar mid-p"
    tests = f"{test} {evidence.p_difference:.2g}" + (f", Holm over {family} tasks {p_holm:.2g}" if family > 1 else "")
    return f"{seen}: {_conclusion(one, recipe, status, family)}. {tests}.{_token_sentence(one.tokens, reference.label)}"


def points_lost(drop: Interval) -> str:
    """+1.5 points lost (95 % interval -0.3 to +3.3)."""
    low, high = points_signed(drop.low), points_signed(drop.high)
    return f"{points_signed(drop.value)} points lost ({percent_short(drop.level)} interval {low} to {high})"


def _conclusion(one: ComparedTask, recipe: GateRecipe, status: Status, family: int) -> str:
    evidence = one.evidence
    margin = f"{points_short(evidence.margin)} points"
    equivalent = evidence.claim == "equivalent"
    if status == "PASS":
        return f"equivalent within {margin}" if equivalent else f"less than {margin}"
    beyond = evidence.p_fail < (1 - evidence.drop.level) / 2
    if status == "FAIL":
        return f"differs by more than {margin}" if equivalent else f"more than {margin}"
    if beyond:
        return f"more than {margin} by itself, but among {family} tasks that may be chance (Holm)"
    needed = items_needed_for(one, recipe)
    if evidence.drop.n < recipe.min_items:
        seen = "a loss, and " if evidence.drop.low > 0 else ""
        return f"{seen}fewer than {recipe.min_items} items never pass; about {needed} would decide if nothing was lost"
    seen = open_question(evidence.drop, evidence.margin)
    if needed > evidence.drop.n:
        return f"{seen}; about {needed} items would decide if nothing was lost"
    return f"{seen}{_if_the_loss_is_real(one)}"


def open_question(drop: Interval, margin: float) -> str:
    """What an interval leaves open that neither passed nor failed a margin."""
    limit = f"{points_short(margin)} points"
    if drop.low > margin:
        return f"more than {limit} by itself, but among several tasks that may be chance (Holm)"
    if -margin <= drop.low and drop.high < margin:
        return f"{'a loss' if drop.low > 0 else 'a difference'} of less than {limit}, but of too few items"
    if drop.low > 0 or drop.high < 0:
        return f"a {'loss' if drop.low > 0 else 'gain'}, but whether it stays within {limit} is open"
    if drop.high < margin:
        return f"may be no difference at all, or a gain of more than {limit}"
    return f"may be no loss at all, or more than {limit}"


def _if_the_loss_is_real(one: ComparedTask) -> str:
    """Items so that the loss that was seen, taken for the true one, would pass; nothing close to the margin or beyond it."""
    evidence, drop = one.evidence, one.evidence.drop
    if one.pairs.is_sampled or not 0 < drop.value < 0.9 * evidence.margin:
        return ""
    needed = items_needed(evidence.margin, (evidence.b + evidence.c) / drop.n, loss=drop.value, level=drop.level)
    if (clustered := one.pairs.clustered) is not None:
        needed = max(needed, clustered_values_needed(clustered, drop.n, evidence.margin, drop.level, loss=drop.value))
    return f"; about {needed} items would decide if what is seen is the true loss"


def by_cluster(pairs: Pairs, level: float) -> str:
    """How the interval of items came about that share questions or texts."""
    clustered, by_item = pairs.clustered, pairs.drop_by_item(level)
    low, high = points_signed(by_item.low), points_signed(by_item.high)
    groups = f"{len(set(pairs.items))} items share {len(set(pairs.clusters))} questions or texts"
    if clustered is None:
        return f"{groups}, which differ in nothing: the interval takes items for independent."
    found = clustered.interval(level)
    return (
        f"{groups}: by item {low} to {high} points, by question or text {points_signed(found.low)} to "
        f"{points_signed(found.high)}; the wider end counts."
    )


def _token_sentence(tokens: TokenCost | None, reference: str) -> str:
    if tokens is None:
        return ""
    extra = tokens.extra
    return (
        f" {tokens.candidate_mean:.1f} tokens a reply, {tokens.reference_mean:.1f} in {reference} "
        f"({signed(extra.value)}, {percent_short(extra.level)} interval {signed(extra.low)} to {signed(extra.high)})."
    )
