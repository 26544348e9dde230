"""Replies that were cut off or repeat themselves: whether a budget suffices to compare scores, and the gate on their excess.

A reference that is cut off has too small a budget: NOT MEASURED. A candidate that is cut off, or loops, where the reference is
not has lost something: FAIL, on paired replies. Any other cut is bounded: a score passes only if it would with every cut reply
of the candidate wrong and every one of the reference right (Manski 1990, Am. Econ. Rev. 80:319-323).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from assay.quantities import capital, interval_name, percent_plain, percent_short, points
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
    own = [gate.max_truncated for gate in recipe.gates if isinstance(gate, ScoreGate) and gate.task == task]
    shared = [gate.max_share for gate in recipe.gates if isinstance(gate, TruncationGate)]
    return own[0] if own and own[0] is not None else min(shared, default=DEFAULT_MAX_TRUNCATED)


def allowance(recipe: GateRecipe, task: str) -> float:
    """The same, and at most a third of the task's margin unless the gate says otherwise."""
    gate = next((gate for gate in recipe.gates if isinstance(gate, ScoreGate) and gate.task == task), None)
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
    above = f"above {percent_short(limit)} at {percent_short(0.5 + recipe.level / 2)}"
    return (
        f"{task.num_truncated} of {task.num_items - task.num_failed} replies of {reference.label} itself to "
        f"{task.title or task.task} are cut off at {task.max_tokens} tokens ({percent_short(share.value)}; {above}): the score "
        "measures the budget, not the model; raise max_tokens."
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


@dataclass(frozen=True)
class _Hypothesis:
    """One test of the family that Holm adjusts."""

    tested: _Excess
    loops: _Excess | None = None
    """Part of what is tested; named in its place where it is too much by itself."""

    @property
    def p_fail(self) -> float:
        return self.tested.evidence.p_fail

    def named(self, alpha: float) -> _Excess:
        return self.loops if self.loops is not None and self.loops.evidence.p_fail < alpha else self.tested

    def rank(self, alpha: float) -> tuple[bool, float]:
        """What is said first of several: loops, then the larger excess."""
        one = self.named(alpha)
        return one.what == LOOPS, one.evidence.drop.value


def judge_truncation(
    gate: TruncationGate, reference: Measurement, candidate: Measurement, recipe: GateRecipe, beyond: frozenset[str]
) -> Verdict:
    """FAIL: surely more than `max_excess` more replies than of the reference, in a task or in all (Holm). NOT MEASURED: the
    reference's own replies are cut off. UNDERPOWERED: an excess that fails by its own p value, but not after Holm. PASS
    otherwise: smaller excesses are bounded by the scores' worst case.

    beyond: tasks that the reference cannot do, of optional gates.
    """
    alpha, left_out = (1 - recipe.level) / 2, _not_counted(beyond, reference, candidate)

    def verdict(status: Status, detail: str) -> Verdict:
        return Verdict(
            gate="truncation", candidate=candidate.label, status=status, observed=None, limit=gate.max_excess, detail=detail
        )

    def seen(status: Status, at: int, then: str = "") -> Verdict:
        one = family[at].tested if status == "PASS" else family[at].named(alpha)
        chance = f": {_may_be_chance(family)}" if status == "UNDERPOWERED" else ""
        return verdict(status, f"{_sentence(one, reference, gate)}.{then}").model_copy(
            update={
                "observed": one.evidence.drop, "clause": f"{_clause(one, reference)}; {_allowed(gate)}{chance}",
                "p_fail": family[at].p_fail, "p_fail_holm": adjusted[at],
            }
        )  # fmt: skip

    both = [
        (ours, theirs)
        for ours in reference.tasks
        if ours.task not in beyond and (theirs := find_task(candidate, ours.task)) is not None
    ]
    family = list(_family(both, gate, recipe))
    alone = [one.p_fail for one in family]
    adjusted = holm(alone) if recipe.adjust == "holm" else alone
    order = sorted(range(len(family)), key=lambda at: family[at].rank(alpha), reverse=True)
    failed = [at for at in order if adjusted[at] < alpha]
    if failed:
        return seen("FAIL", failed[0])
    for ours, _ in both:
        if (why := too_much_truncation(recipe, reference, ours)) is not None:
            return verdict("NOT MEASURED", f"{why}{left_out}")
    if not family:
        return verdict("NOT MEASURED", "No task has replies of both sides to two items or more.")
    unsure = [at for at in order if alone[at] < alpha]
    if unsure:
        return seen("UNDERPOWERED", unsure[0], f" {capital(_may_be_chance(family))}.{left_out}")
    most = max(order, key=lambda at: (family[at].tested.evidence.drop.value, family[at].tested.pairs.n))
    return seen("PASS", most, left_out)


def _may_be_chance(family: Sequence[_Hypothesis]) -> str:
    return f"by itself this fails, but among {len(family)} such comparisons it may be chance (Holm)"


def _not_counted(beyond: frozenset[str], *sides: Measurement) -> str:
    """Cut replies of tasks that are left out, so that no small share stands beside large ones unexplained."""
    cut = [
        f"{task.num_truncated} of {task.num_items - task.num_failed} on {task.title or task.task} ({side.label})"
        for side in sides
        for task in side.tasks
        if task.task in beyond and task.num_truncated
    ]
    return f" Not counted, for the reference cannot do the task: {', '.join(cut)}." if cut else ""


def _family(both: Sequence[tuple[TaskResult, TaskResult]], gate: TruncationGate, recipe: GateRecipe) -> Iterator[_Hypothesis]:
    """One test for each task and one for all: of replies cut off or looping. Loops are part of these, and a test of their own
    only where the reference has replies that are cut off without looping: elsewhere their excess cannot be the larger one."""
    groups = [(ours.title or ours.task, [(ours, theirs)]) for ours, theirs in both]
    for where, tasks in [*groups, *([("all tasks", list(both))] if len(both) > 1 else [])]:
        known = all(item.loops is not None or item.correct is None for pair in tasks for one in pair for item in one.items)
        cut = _excess("Is cut off or loops" if known else "Is cut off", _cut_or_loops, where, tasks, gate, recipe)
        loops = _excess(LOOPS, _loops, where, tasks, gate, recipe) if known else None
        if cut is None:
            continue
        if loops is not None and any(item.truncated and not item.loops for ours, _ in tasks for item in ours.items):
            yield _Hypothesis(cut)
            yield _Hypothesis(loops)
        else:
            yield _Hypothesis(cut, loops)


def _excess(
    what: str, event: Event, where: str, tasks: Sequence[tuple[TaskResult, TaskResult]], gate: TruncationGate,
    recipe: GateRecipe,
) -> _Excess | None:  # fmt: skip
    """None below two items."""
    pairs = pair_items(*(_together([pair[side] for pair in tasks], event) for side in (0, 1)))
    if len(set(pairs.items)) < 2:
        return None
    return _Excess(what, where, pairs, pairs.evidence(gate.max_excess, level=recipe.level))


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
    drop = one.evidence.drop
    name = interval_name(drop.level, drop.coverage)
    return f"{capital(_clause(one, reference))} ({name}: {_more_or_fewer(drop)}); {_allowed(gate)}"


def _allowed(gate: TruncationGate) -> str:
    return f"{percent_plain(gate.max_excess)} more allowed"


def _more_or_fewer(excess: Interval) -> str:
    """`23.7 to 36.7 points more`, `3.7 points fewer to 3.7 more`."""
    low, high = points(abs(excess.low)), points(abs(excess.high))
    if excess.low >= 0:
        return f"{low} to {high} points more"
    return f"{high} to {low} points fewer" if excess.high < 0 else f"{low} points fewer to {high} more"


def _clause(one: _Excess, reference: Measurement) -> str:
    """`loops in 30 % of its replies to arithmetic (60 of 200), fp8 in none`."""
    n = one.pairs.n
    ours, theirs = n - sum(one.pairs.reference), n - sum(one.pairs.candidate)
    seen = f"in {percent_short(theirs / n)} of its replies to {one.where} ({theirs} of {n})" if theirs else (
        f"in none of its {n} replies to {one.where}"
    )  # fmt: skip
    before = f"{reference.label} in {percent_short(ours / n)} ({ours})" if ours else f"{reference.label} in none"
    return f"{one.what.lower()} {seen}, {before}"
