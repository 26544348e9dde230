"""Replies that were cut off or repeat themselves: whether a budget suffices to compare scores, and the gate on their excess.

A reference that is cut off has too small a budget: NOT MEASURED. A candidate that is cut off, or loops, where the reference is
not has lost something: FAIL, on paired replies. Any other cut is bounded: a score passes only if it would with every cut reply
of the candidate wrong and every one of the reference right (Manski 1990, Am. Econ. Rev. 80:319-323).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from assay.quantities import percent_plain, percent_short
from assay.recipes.gate import GateRecipe, ScoreGate, TruncationGate
from assay.records.base import Interval
from assay.records.measurement import ItemResult, Measurement, TaskResult
from assay.records.verdict import Status, Verdict
from assay_evaluate.statistics import PairedEvidence, holm
from assay_evaluate.statistics.item_pairs import Pairs, accuracy_of, find_task, pair_items

DEFAULT_MAX_TRUNCATED = 0.05
"""Where a gate file sets no limit: a score whose replies were cut off must not pass for want of a line in it."""
SHARE_OF_MARGIN = 1 / 3
"""Of a task's margin, the most that may be cut off of the reference: cut replies of both sides then leave a third of it."""
Event = Callable[[ItemResult], bool]
LOOPS = "Loops"


def truncation_limit(recipe: GateRecipe, task: str) -> float:
    """Share of a task's replies that may be cut off: its own limit, or that for all, or DEFAULT_MAX_TRUNCATED."""
    own = [one.max_truncated for one in recipe.gates if isinstance(one, ScoreGate) and one.task == task]
    shared = [one.max_share for one in recipe.gates if isinstance(one, TruncationGate)]
    return own[0] if own and own[0] is not None else min(shared, default=DEFAULT_MAX_TRUNCATED)


def allowance(recipe: GateRecipe, task: str) -> float:
    """The same, and at most a third of the task's margin unless the gate says otherwise."""
    gate = next((one for one in recipe.gates if isinstance(one, ScoreGate) and one.task == task), None)
    limit = truncation_limit(recipe, task)
    return limit if gate is None or gate.max_truncated is not None else min(limit, SHARE_OF_MARGIN * gate.max_drop)


# ------------------------------------------------------------------------------------------------ can a score be compared?
def cut_share(task: TaskResult, level: float) -> Interval | None:
    """Share of the replies that were cut off, over items. None without any reply."""
    return accuracy_of(_marked(task, lambda item: item.truncated).items, level)[0]


def too_much_truncation(recipe: GateRecipe, reference: Measurement, task: TaskResult) -> str | None:
    """Why a task's budget is too small for the reference; None: it may not be, by the interval of its share.

    Replies that only the candidate has cut off are no matter of the budget: they count as they are scored, and the gate on
    truncation judges them.
    """
    limit, share = allowance(recipe, task.task), cut_share(task, recipe.level)
    if share is None or share.low <= limit:
        return None
    return (
        f"{task.num_truncated} of {task.num_items - task.num_failed} replies of {reference.label} itself to "
        f"{task.title or task.task} are cut off at {task.max_tokens} tokens ({percent_short(share.value)}, surely above "
        f"{percent_short(limit)}): the score measures the budget, not the model; raise max_tokens."
    )


def worst_case(reference: TaskResult, candidate: TaskResult) -> tuple[TaskResult, TaskResult] | None:
    """Both sides with every cut reply counted against the candidate. None: nothing was cut off."""
    if not any(item.truncated for task in (reference, candidate) for item in task.items):
        return None
    return _scored(reference, cut=True), _scored(candidate, cut=False)


def _scored(task: TaskResult, *, cut: bool) -> TaskResult:
    items = [
        dataclasses.replace(item, correct=cut) if item.truncated and item.correct is not None else item for item in task.items
    ]
    return task.model_copy(update={"items": tuple(items)})


def _marked(task: TaskResult, event: Event) -> TaskResult:
    """`correct` says whether the event happened; a reply that never came stays None."""
    items = [item if item.correct is None else dataclasses.replace(item, correct=event(item)) for item in task.items]
    return task.model_copy(update={"items": tuple(items)})


# ------------------------------------------------------------------------------------------------ the gate
@dataclass(frozen=True)
class _Excess:
    """One kind of event in one task, or in all: candidate minus reference."""

    what: str
    """`Loops`, `Is cut off or loops`, or `Is cut off` of records that do not tell loops."""
    where: str
    pairs: Pairs
    evidence: PairedEvidence


def judge_truncation(
    gate: TruncationGate, reference: Measurement, candidate: Measurement, recipe: GateRecipe, beyond: frozenset[str]
) -> Verdict:
    """FAIL: surely more than `max_excess` more replies than of the reference, in a task or in all (Holm). NOT MEASURED: the
    reference's own replies are cut off. PASS otherwise: smaller excesses are bounded by the scores' worst case.

    beyond: tasks that the reference cannot do, of optional gates.
    """

    def verdict(status: Status, detail: str, observed: Interval | None = None) -> Verdict:
        return Verdict(
            gate="truncation", candidate=candidate.label, status=status, observed=observed, limit=gate.max_excess, detail=detail
        )  # fmt: skip

    both = [
        (ours, theirs)
        for ours in reference.tasks
        if ours.task not in beyond and (theirs := find_task(candidate, ours.task)) is not None
    ]
    found = list(_excesses(both, gate, recipe))
    adjusted = holm([one.evidence.p_fail for one in found]) if recipe.adjust == "holm" else [o.evidence.p_fail for o in found]
    failed = [one for one, p in zip(found, adjusted, strict=True) if p < (1 - recipe.level) / 2]
    if failed:
        loops = [one for one in failed if one.what == LOOPS]
        worst = max(loops or failed, key=lambda one: one.evidence.drop.value)
        return verdict("FAIL", f"{_sentence(worst, reference, gate)}.", worst.evidence.drop)
    for ours, _ in both:
        if (why := too_much_truncation(recipe, reference, ours)) is not None:
            return verdict("NOT MEASURED", f"{why}{_not_counted(beyond, reference, candidate)}")
    if not found:
        return verdict("NOT MEASURED", "No reply to look at.")
    most = max((one for one in found if one.what != LOOPS), key=lambda one: one.evidence.drop.value)
    left_out = _not_counted(beyond, reference, candidate)
    return verdict("PASS", f"{_sentence(most, reference, gate)}.{left_out}", most.evidence.drop)


def _not_counted(beyond: frozenset[str], *sides: Measurement) -> str:
    """Cut replies of tasks that are left out, so that no small share stands beside large ones unexplained."""
    cut = [
        f"{task.num_truncated} of {task.num_items - task.num_failed} on {task.title or task.task} ({side.label})"
        for side in sides
        for task in side.tasks
        if task.task in beyond and task.num_truncated
    ]
    return f" Not counted, for the reference cannot do the task: {', '.join(cut)}." if cut else ""


def _excesses(both: Sequence[tuple[TaskResult, TaskResult]], gate: TruncationGate, recipe: GateRecipe) -> Iterator[_Excess]:
    groups = [(ours.title or ours.task, [(ours, theirs)]) for ours, theirs in both]
    for where, tasks in [*groups, *([("all tasks", list(both))] if len(both) > 1 else [])]:
        known = all(item.loops is not None or item.correct is None for pair in tasks for one in pair for item in one.items)
        events = [("Is cut off or loops", _cut_or_loops), (LOOPS, _loops)] if known else [("Is cut off", _cut_or_loops)]
        for what, event in events:
            sides = [_together([pair[side] for pair in tasks], event) for side in (0, 1)]
            pairs = pair_items(*sides)
            if len(set(pairs.items)) > 1:
                yield _Excess(what, where, pairs, pairs.evidence(gate.max_excess, level=recipe.level))


def _cut_or_loops(item: ItemResult) -> bool:
    return item.truncated or item.loops is True


def _loops(item: ItemResult) -> bool:
    return item.loops is True


def _together(tasks: Sequence[TaskResult], event: Event) -> TaskResult:
    """Items of all the tasks, right where the event did *not* happen: what is lost are whole replies."""
    items = [
        dataclasses.replace(item, item=f"{task.task}/{item.item}", cluster=item.cluster and f"{task.task}/{item.cluster}")
        for task in tasks
        for item in _marked(task, lambda one: not event(one)).items
    ]
    return tasks[0].model_copy(update={"items": tuple(items)})


def _sentence(one: _Excess, reference: Measurement, gate: TruncationGate) -> str:
    n, drop = one.pairs.n, one.evidence.drop
    ours, theirs = n - sum(one.pairs.reference), n - sum(one.pairs.candidate)
    seen = f"in {percent_short(theirs / n)} of its replies to {one.where} ({theirs} of {n})" if theirs else (
        f"in none of its {n} replies to {one.where}"
    )  # fmt: skip
    before = f"{reference.label} in {percent_short(ours / n)} ({ours})" if ours else f"{reference.label} in none"
    return (
        f"{one.what} {seen}, {before} ({percent_short(drop.level)} interval of the difference: {100 * drop.low:.1f} to "
        f"{100 * drop.high:.1f} points); {percent_plain(gate.max_excess)} more allowed"
    )
