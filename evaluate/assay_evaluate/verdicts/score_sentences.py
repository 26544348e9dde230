"""One task on both sides, and what the verdict of its gate says: what a candidate loses or gains and what is allowed, in one
clause; then what is still open. Counts and p values are fields of the verdict, for the tables of the report.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from assay import quantities
from assay.quantities import capital, points, points_short
from assay.recipes.gate import Estimand, GateRecipe
from assay.records.base import Interval
from assay.records.measurement import TaskResult
from assay.records.verdict import LookSeen, Status
from assay_evaluate.statistics import (
    POWER,
    PairedEvidence,
    clustered_values_needed,
    graded_items_needed,
    items_needed,
)
from assay_evaluate.statistics.fixed_items import FixedItems
from assay_evaluate.statistics.item_pairs import Pairs, TokenCost
from assay_evaluate.statistics.uneven.clusters import LOSSY_SHARE, chance_of_none, too_few


# ------------------------------------------------------------------------------------------------ what is compared
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


def items_needed_for(one: ComparedTask, recipe: GateRecipe) -> int | None:
    """TOST must pass on both sides: each may miss half as often. None: it is about these items, so no others help."""
    if one.pairs.fixed is not None:
        return None
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
    if not 0 < drop.value < margin or pairs.fixed is not None:
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


# ------------------------------------------------------------------------------------------------ a difference in words
def change(drop: Interval) -> str:
    """`loses 25.0 points`, `gains 16.7 points`; `shows no change` where the value rounds to zero."""
    return quantities.change(drop.value)


def interval_of(drop: Interval) -> str:
    """`95 % interval: 3.1 to 16.6 lost`, `interval of at least 95 %: 4.6 gained to 12.3 lost`."""
    return f"{quantities.interval_name(drop.level, drop.coverage)}: {quantities.lost_or_gained(drop.low, drop.high)}"


def allowed(drop: Interval, margin: float) -> str:
    """`10 allowed`; of a gain `a loss of 10 is allowed`."""
    limit = points_short(margin)
    return f"a loss of {limit} is allowed" if points(drop.value).startswith("-") else f"{limit} allowed"


def clause(one: ComparedTask, title: str) -> str:
    """`loses 25.0 points on Chinese code lookup; 10 allowed`; `10 allowed either way` where a gain may not be larger."""
    return f"{change(one.evidence.drop)} on {title}; {_limit(one)}"


def _limit(one: ComparedTask) -> str:
    margin = one.evidence.margin
    return (
        allowed(one.evidence.drop, margin)
        if one.evidence.claim == "non_inferior"
        else f"{points_short(margin)} allowed either way"
    )


def open_question(drop: Interval, margin: float) -> str:
    """What an interval leaves open that neither passed nor failed a margin: whether there is a loss, or only its size."""
    limit = f"{points_short(margin)} points"
    if drop.low > margin:
        return "by itself this fails, but among several tasks such a loss may be chance (Holm)"
    if -margin <= drop.low and drop.high < margin:
        return f"the {'loss' if drop.low > 0 else 'difference'} is less than {limit}, but too few items were asked to pass"
    if drop.low > 0:
        return f"a loss is shown, whether it is more than {limit} is open"
    if drop.high < 0:
        return f"a gain is shown, whether it is more than {limit} is open"
    if drop.high < margin:
        return f"there may be no difference, or a gain of more than {limit}"
    return f"there may be no loss, or one of more than {limit}"


def if_cut_replies_were_wrong(worst: Interval) -> str:
    """worst: of the drop with every cut reply counted against the candidate."""
    return f"with every cut reply counted against it, up to {points(worst.high)} points may be lost"


def remedy_of_cuts(one: ComparedTask) -> str:
    """What would settle replies that are cut off: a reply that repeats itself ends no sooner with a larger budget."""
    cut = [item for task in (one.reference, one.candidate) for item in task.items if item.truncated]
    looping = sum(item.loops is True for item in cut)
    if not looping:
        return "raise max_tokens"
    which = "all of them" if looping == len(cut) else f"{looping} of them"
    return f"{which} loop, which a larger max_tokens does not mend"


# ------------------------------------------------------------------------------------------------ the whole sentence
def sentences(one: ComparedTask, title: str, recipe: GateRecipe, status: Status, family: int) -> str:
    """`Loses 9.0 points on Chinese code lookup (95 % interval: 3.1 to 16.6 lost); 10 allowed.` and, if it is undecided, why.

    family: number of tasks among which a failure is adjusted.
    """
    drop = one.evidence.drop
    seen = f"{change(drop)} on {title} ({interval_of(drop)}); {_limit(one)}."
    undecided = f" {_sentence(_undecided(one, recipe, family))}" if status == "UNDERPOWERED" else ""
    is_change = one.evidence.claim == "non_inferior" and gains_more_than(drop, one.evidence.margin)
    changed = f" {CHANGED}" if is_change else ""
    return f"{capital(seen)}{undecided}{changed}"


CHANGED = (
    "A gain of more than the margin is a change of behaviour as well: this task may not measure the quality of this model, or "
    "the reference may not have been served well."
)


def gains_more_than(drop: Interval, margin: float) -> bool:
    """Shown by the whole interval."""
    return drop.high < -margin


def _sentence(text: str) -> str:
    return f"{capital(text)}."


def _undecided(one: ComparedTask, recipe: GateRecipe, family: int) -> str:
    evidence, drop = one.evidence, one.evidence.drop
    if evidence.p_fail < (1 - drop.level) / 2:
        return f"by itself this fails, but among {family} tasks such a loss may be chance (Holm)"
    if drop.n < recipe.min_items:
        shown = "a loss is shown, but " if drop.low > 0 else ""
        return f"{shown}fewer than {recipe.min_items} items never pass{_would_decide(one, recipe)}"
    return f"{open_question(drop, evidence.margin)}{_would_decide(one, recipe)}"


def _would_decide(one: ComparedTask, recipe: GateRecipe) -> str:
    """With how many items a PASS comes 4 times in 5: without any loss, unless one is shown; and with the loss that was seen."""
    drop, ways = one.evidence.drop, []
    if one.pairs.fixed is not None:
        return _replies_would_decide(one, one.pairs.fixed, recipe)
    if drop.low <= 0 and (needed := items_needed_for(one, recipe)) is not None and needed > drop.n:
        ways.append(f"about {needed:,} items give a PASS 4 times in 5 if nothing is lost")
    if drop.value >= one.evidence.margin:
        ways.append("more items would not pass it if the loss seen is the true one")
    elif (needed_then := items_needed_at_loss_seen(one, recipe)) is not None:
        may_be = (
            f"{points_short(drop.value)} points are the truth, which may be {quantities.lost_or_gained(drop.low, drop.high)}"
        )
        ways.append(f"about {needed_then:,} items give a PASS 4 times in 5 if {may_be}")
    return f"; {', '.join(ways)}" if ways else ""


def _replies_would_decide(one: ComparedTask, fixed: FixedItems, recipe: GateRecipe) -> str:
    """How many replies to each of these items would pass."""
    num_replies, margin = fixed.num_pairs // fixed.num_items, one.evidence.margin
    if fixed.value >= margin:
        return "; more replies would not pass it if the loss seen is the true one"
    needed = fixed.replies_needed(num_replies, margin - max(fixed.value, 0.0), recipe.level, POWER)
    if needed <= num_replies:
        return ""
    loss = "the loss seen is the true one" if fixed.value > 0 else "nothing is lost"
    return f"; about {needed:,} replies of each side to every item give a PASS 4 times in 5 if {loss}"


def of_which_items(one: ComparedTask) -> str:
    """What the interval is for, where the gates ask about these items."""
    if one.pairs.fixed is not None:
        return "The interval is for these items: for other replies to them, not for other questions."
    why = "one reply to each, or items drawn in rounds, do not give one for these"
    return f"The interval is the wider one, for such items: {why}."


def estimand_of(pairs: Pairs) -> Estimand:
    """What the interval is for."""
    if pairs.fixed is not None:
        return "these_items"
    return "these_clusters" if pairs.of_these_clusters and pairs.has_clusters else "such_items"


def by_cluster(pairs: Pairs, level: float) -> str:
    """How the interval of items came about that share questions or texts."""
    clustered, by_item = pairs.clustered, pairs.drop_by_item(level)
    sizes = list(Counter(dict(zip(pairs.items, pairs.clusters, strict=True)).values()).values())
    several = "questions or texts" if len(sizes) > 1 else "question or text"
    groups = f"{len(set(pairs.items))} items share {len(sizes)} {several}"
    if clustered is None:
        return f"{groups}; the interval is for such items of these, not for other questions or texts."
    if chance_of_none(sizes) >= (1 - level) / 2:
        return f"{groups}; {too_few(sizes, level, 'question or text', 'questions or texts')}."
    found = clustered.interval(level)
    return (
        f"{groups}: the interval is the wider of that over items ({_ends(by_item)}) and that over questions or texts "
        f"({_ends(found)}). Losses in fewer than 1 of {round(1 / LOSSY_SHARE)} of these may be missed."
    )


def _ends(drop: Interval) -> str:
    return interval_of(drop).split(": ", 1)[1]
