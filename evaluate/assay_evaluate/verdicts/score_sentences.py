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
from assay_evaluate.statistics.clustered import clustered_values_needed
from assay_evaluate.statistics.decisions import PairedEvidence
from assay_evaluate.statistics.graded import graded_items_needed
from assay_evaluate.statistics.item_pairs import Pairs
from assay_evaluate.statistics.power import POWER, items_needed
from assay_evaluate.statistics.uneven_clusters import LOSSY_SHARE, chance_of_none, too_few_clusters

MOST_ITEMS = 1_000_000
"""More are not computed or proposed: what was lost is then the margin itself, as far as anybody can tell."""
CHANGED = (
    "A gain of more than the margin is a change of behaviour as well: this task may not measure the quality of this model, or "
    "the reference may not have been served well."
)


# ------------------------------------------------------------------------------------------------ what is compared
@dataclass(frozen=True)
class ComparedTask:
    """One task that both sides answered, compared with its margin."""

    reference: TaskResult
    candidate: TaskResult
    pairs: Pairs
    """At the last look."""
    evidence: PairedEvidence
    """Of all looks together."""
    looks: tuple[LookSeen, ...] = ()
    """Empty: looked at once, at all there is."""

    @property
    def estimand(self) -> Estimand:
        """What the interval is for."""
        if self.pairs.fixed is not None:
            return "these_items"
        return "these_clusters" if self.pairs.of_these_clusters and self.pairs.has_clusters else "such_items"


def items_needed_without_loss(task: ComparedTask, recipe: GateRecipe) -> int | None:
    """TOST must pass on both sides: each may miss half as often. None: it is about these items, so no others help."""
    if task.pairs.fixed is not None:
        return None
    power = POWER if task.evidence.claim == "non_inferior" else (1 + POWER) / 2
    return max(task.pairs.needed(task.evidence.margin, recipe.level, power), recipe.min_items)


def items_needed_at_observed_loss(task: ComparedTask, recipe: GateRecipe) -> int | None:
    """Items with which the observed loss, taken for the true one, would pass the margin 4 times in 5, at the observed spread.

    None: nothing was lost, the loss is not below the margin, or more than `MOST_ITEMS` would be needed.
    """
    drop, margin, pairs = task.evidence.drop, task.evidence.margin, task.pairs
    room = margin - drop.value
    if not 0 < drop.value < margin or pairs.fixed is not None:
        return None
    # Of order (2.8 spread / room)^2; exact powers of more items than this would take minutes.
    if drop.n * ((drop.high - drop.low) / room) ** 2 > MOST_ITEMS:
        return None
    if pairs.is_sampled:
        needed = graded_items_needed(pairs.differences, room, recipe.level, POWER)
    else:
        rate = (task.evidence.b + task.evidence.c) / drop.n
        needed = items_needed(margin, rate, POWER, loss=drop.value, level=recipe.level)
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


def limit_of(evidence: PairedEvidence) -> str:
    """`10 allowed`; `10 allowed either way` where a gain may not be larger."""
    if evidence.claim == "non_inferior":
        return allowed(evidence.drop, evidence.margin)
    return f"{points_short(evidence.margin)} allowed either way"


def open_question(drop: Interval, margin: float) -> str:
    """What an interval leaves open that neither passed nor failed a margin: whether there is a loss, or only its size."""
    limit = f"{points_short(margin)} points"
    if drop.low > margin:
        return "by itself this fails, but among several tasks such a loss may be chance (Holm)"
    if -margin <= drop.low and drop.high < margin:
        return f"the {'loss' if drop.low > 0 else 'difference'} is less than {limit}, but too few items were asked to pass"
    if drop.low > 0:
        return f"there is a real loss, but the data cannot tell whether it exceeds {limit}"
    if drop.high < 0:
        return f"there is a real gain, but the data cannot tell whether it exceeds {limit}"
    if drop.high < margin:
        return f"anything from no difference to a gain of more than {limit} is compatible with the data"
    return f"anything from no loss to more than {limit} is compatible with the data"


def if_cut_replies_were_wrong(worst: Interval) -> str:
    """worst: of the drop with every cut reply counted against the candidate."""
    return f"with every cut reply counted against it, up to {points(worst.high)} points may be lost"


def remedy_of_cuts(task: ComparedTask) -> str:
    """What would settle replies that are cut off: a reply that repeats itself ends no sooner with a larger budget."""
    cut = [item for side in (task.reference, task.candidate) for item in side.items if item.truncated]
    looping = sum(item.loops is True for item in cut)
    if not looping:
        return "raise max_tokens"
    which = "all of them" if looping == len(cut) else f"{looping} of them"
    return f"{which} loop, which a larger max_tokens does not mend"


# ------------------------------------------------------------------------------------------------ the whole sentence
def score_sentence(task: ComparedTask, title: str, recipe: GateRecipe, status: Status, family: int) -> str:
    """`Loses 9.0 points on Chinese code lookup (95 % interval: 3.1 to 16.6 lost); 10 allowed.` and, if it is undecided, why.

    family: number of tasks among which a failure is adjusted.
    """
    evidence, drop = task.evidence, task.evidence.drop
    text = f"{capital(change(drop))} on {title} ({interval_of(drop)}); {limit_of(evidence)}."
    if status == "UNDERPOWERED":
        text += f" {capital(_undecided(task, recipe, family))}."
    if evidence.claim == "non_inferior" and gains_more_than(drop, evidence.margin):
        text += f" {CHANGED}"
    return text


def gains_more_than(drop: Interval, margin: float) -> bool:
    """Shown by the whole interval."""
    return drop.high < -margin


def _undecided(task: ComparedTask, recipe: GateRecipe, family: int) -> str:
    evidence, drop = task.evidence, task.evidence.drop
    if evidence.p_fail < (1 - drop.level) / 2:
        return f"by itself this fails, but among {family} tasks such a loss may be chance (Holm)"
    if drop.n >= recipe.min_items:
        return f"{open_question(drop, evidence.margin)}{_would_decide(task, recipe)}"
    shown = "a loss is shown, but " if drop.low > 0 else ""
    return f"{shown}fewer than {recipe.min_items} items never pass{_would_decide(task, recipe)}"


def _would_decide(task: ComparedTask, recipe: GateRecipe) -> str:
    """With how many items, or replies to each of these items, a PASS comes 4 times in 5: without any loss, unless one is
    shown; and with the observed loss."""
    drop, margin = task.evidence.drop, task.evidence.margin
    if (fixed := task.pairs.fixed) is not None:
        num_replies = fixed.num_pairs // fixed.num_items
        if fixed.value >= margin:
            return "; more replies would not pass it if the loss seen is the true one"
        needed = fixed.replies_needed(num_replies, margin - max(fixed.value, 0.0), recipe.level, POWER)
        if needed <= num_replies:
            return ""
        loss = "the loss seen is the true one" if fixed.value > 0 else "nothing is lost"
        return f"; about {needed:,} replies of each side to every item give a PASS 4 times in 5 if {loss}"
    ways = []
    without_loss = items_needed_without_loss(task, recipe)
    if drop.low <= 0 and without_loss is not None and without_loss > drop.n:
        ways.append(f"about {without_loss:,} items give a PASS 4 times in 5 if nothing is lost")
    if drop.value >= margin:
        ways.append("more items would not pass it if the loss seen is the true one")
    elif (at_loss := items_needed_at_observed_loss(task, recipe)) is not None:
        truth = (
            f"{points_short(drop.value)} points are the truth, which may be {quantities.lost_or_gained(drop.low, drop.high)}"
        )
        ways.append(f"about {at_loss:,} items give a PASS 4 times in 5 if {truth}")
    return f"; {', '.join(ways)}" if ways else ""


def estimand_sentence(task: ComparedTask) -> str:
    """What the interval is for, where the gates ask about these items."""
    if task.pairs.fixed is not None:
        return "The interval is for these items: for other replies to them, not for other questions."
    reason = "one reply to each, or items drawn in rounds, do not give one for these"
    return f"The interval is the wider one, for such items: {reason}."


def cluster_sentence(pairs: Pairs, level: float) -> str:
    """How the interval of items came about that share questions or texts."""
    clustered = pairs.clustered
    sizes = list(Counter(dict(zip(pairs.items, pairs.clusters, strict=True)).values()).values())
    plural = "questions or texts" if len(sizes) > 1 else "question or text"
    groups = f"{len(set(pairs.items))} items share {len(sizes)} {plural}"
    if clustered is None:
        return f"{groups}; the interval is for such items of these, not for other questions or texts."
    if chance_of_none(sizes) >= (1 - level) / 2:
        return f"{groups}; {too_few_clusters(sizes, level, 'question or text', 'questions or texts')}."
    over_items, over_clusters = (
        interval_of(drop).split(": ", 1)[1] for drop in (pairs.drop_by_item(level), clustered.interval(level))
    )
    return (
        f"{groups}: the interval is the wider of that over items ({over_items}) and that over questions or texts "
        f"({over_clusters}). Losses in fewer than 1 of {round(1 / LOSSY_SHARE)} of these may be missed."
    )
