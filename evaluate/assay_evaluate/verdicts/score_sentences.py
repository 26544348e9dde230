"""What the verdict of a score gate says: what a candidate loses or gains on the task and what is allowed, in one clause; then
what is still open. Counts and p values are fields of the verdict, for the tables of the report.
"""

from __future__ import annotations

from assay.quantities import percent_short, points, points_short
from assay.recipes.gate import GateRecipe
from assay.records.base import Interval
from assay.records.verdict import Status
from assay_evaluate.statistics.item_pairs import Pairs
from assay_evaluate.verdicts.compared_task import ComparedTask, items_needed_at_loss_seen, items_needed_for


# ------------------------------------------------------------------------------------------------ a difference in words
def change(drop: Interval) -> str:
    """`loses 25.0 points`, `gains 16.7 points`; `neither gains nor loses` where the value rounds to zero."""
    size = points(abs(drop.value))
    if size == "0.0":
        return "neither gains nor loses"
    return f"{'loses' if drop.value > 0 else 'gains'} {size} points"


def interval_of(drop: Interval) -> str:
    """`95 % interval: 3.1 to 16.6 lost`, `6.5 to 24.2 gained`, `4.6 gained to 12.3 lost`."""
    low, high = points(abs(drop.low)), points(abs(drop.high))
    if drop.low >= 0:
        ends = f"{low} to {high} lost"
    elif drop.high <= 0:
        ends = f"{high} to {low} gained"
    else:
        ends = f"{low} gained to {high} lost"
    return f"{percent_short(drop.level)} interval: {ends}"


def allowed(drop: Interval, margin: float) -> str:
    """`10 allowed`; of a gain `a loss of 10 is allowed`."""
    limit = points_short(margin)
    return f"a loss of {limit} is allowed" if points(drop.value).startswith("-") else f"{limit} allowed"


def clause(title: str, drop: Interval, margin: float) -> str:
    """`loses 25.0 points on Chinese code lookup; 10 allowed`."""
    return f"{change(drop)} on {title}; {allowed(drop, margin)}"


def open_question(drop: Interval, margin: float) -> str:
    """What an interval leaves open that neither passed nor failed a margin: whether there is a loss, or only its size."""
    limit = f"{points_short(margin)} points"
    if drop.low > margin:
        return "by itself this fails, but among several tasks such a loss may be chance (Holm)"
    if -margin <= drop.low and drop.high < margin:
        return f"the {'loss' if drop.low > 0 else 'difference'} is less than {limit}, but too few items were asked to pass"
    if drop.low > 0:
        return f"the loss is certain, whether it is more than {limit} is not"
    if drop.high < 0:
        return f"the gain is certain, whether it is more than {limit} is not"
    if drop.high < margin:
        return f"there may be no difference, or a gain of more than {limit}"
    return f"there may be no loss, or one of more than {limit}"


# ------------------------------------------------------------------------------------------------ the whole sentence
def sentences(one: ComparedTask, title: str, recipe: GateRecipe, status: Status, family: int) -> str:
    """`Loses 9.0 points on Chinese code lookup (95 % interval: 3.1 to 16.6 lost); 10 allowed.` and, if it is undecided, why.

    family: number of tasks among which a failure is adjusted.
    """
    drop, margin = one.evidence.drop, one.evidence.margin
    limit = allowed(drop, margin) if one.evidence.claim == "non_inferior" else f"{points_short(margin)} allowed either way"
    seen = f"{change(drop)} on {title} ({interval_of(drop)}); {limit}."
    undecided = f" {_sentence(_undecided(one, recipe, family))}" if status == "UNDERPOWERED" else ""
    return f"{_capital(seen)}{undecided}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _sentence(text: str) -> str:
    return f"{_capital(text)}."


def _undecided(one: ComparedTask, recipe: GateRecipe, family: int) -> str:
    evidence, drop = one.evidence, one.evidence.drop
    if evidence.p_fail < (1 - drop.level) / 2:
        return f"by itself this fails, but among {family} tasks such a loss may be chance (Holm)"
    if drop.n < recipe.min_items:
        certain = "the loss is certain, but " if drop.low > 0 else ""
        return f"{certain}fewer than {recipe.min_items} items never pass{_would_decide(one, recipe)}"
    return f"{open_question(drop, evidence.margin)}{_would_decide(one, recipe)}"


def _would_decide(one: ComparedTask, recipe: GateRecipe) -> str:
    """How many items would pass: without any loss, unless a loss is certain; and with the loss that was seen."""
    drop, ways = one.evidence.drop, []
    if drop.low <= 0 and (needed := items_needed_for(one, recipe)) > drop.n:
        ways.append(f"about {needed:,} items would decide if nothing is lost")
    if drop.value >= one.evidence.margin:
        ways.append("more items would not pass it if the loss seen is the true one")
    elif (needed_then := items_needed_at_loss_seen(one, recipe)) is not None:
        ways.append(f"about {needed_then:,} items would decide if the loss seen is the true one")
    return f"; {', '.join(ways)}" if ways else ""


def by_cluster(pairs: Pairs, level: float) -> str:
    """How the interval of items came about that share questions or texts."""
    clustered, by_item = pairs.clustered, pairs.drop_by_item(level)
    groups = f"{len(set(pairs.items))} items share {len(set(pairs.clusters))} questions or texts"
    if clustered is None:
        return f"{groups}; these do not differ, so the interval takes items for independent."
    found = clustered.interval(level)
    return (
        f"{groups}: the interval is the wider of that over items ({_ends(by_item)}) and that over questions or texts "
        f"({_ends(found)})."
    )


def _ends(drop: Interval) -> str:
    return interval_of(drop).split(": ", 1)[1]
