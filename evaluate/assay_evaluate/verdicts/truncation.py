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
from assay.records.measurement import ItemResult, Measurement, TaskResult
from assay.records.verdict import Status, Verdict
from assay_evaluate.statistics.decisions import PairedEvidence, holm
from assay_evaluate.statistics.item_pairs import Pairs, accuracy_of, common_tasks, pair_items

DEFAULT_MAX_TRUNCATED = 0.05
"""Where a gate file sets no limit: a score whose replies were cut off must not pass for want of a line in it."""
SHARE_OF_MARGIN = 1 / 3
"""Of a task's margin, the most that may be cut off of the reference: cut replies of both sides then leave a third of it."""
Event = Callable[[ItemResult], bool]
LOOPS = "Loops"


def truncation_limit(recipe: GateRecipe, task: str) -> float:
    """Share of a task's replies that may be cut off: its own limit, or that for all, or DEFAULT_MAX_TRUNCATED."""
    gate = _score_gate(recipe, task)
    if gate is not None and gate.max_truncated is not None:
        return gate.max_truncated
    return min((gate.max_share for gate in recipe.gates if isinstance(gate, TruncationGate)), default=DEFAULT_MAX_TRUNCATED)


def allowance(recipe: GateRecipe, task: str) -> float:
    """The same, and at most a third of the task's margin unless the gate says otherwise."""
    gate, limit = _score_gate(recipe, task), truncation_limit(recipe, task)
    return limit if gate is None or gate.max_truncated is not None else min(limit, SHARE_OF_MARGIN * gate.max_drop)


def _score_gate(recipe: GateRecipe, task: str) -> ScoreGate | None:
    return next((gate for gate in recipe.gates if isinstance(gate, ScoreGate) and gate.task == task), None)


# ------------------------------------------------------------------------------------------------ can a score be compared?
def too_much_truncation(recipe: GateRecipe, reference: Measurement, task: TaskResult) -> str | None:
    """Why a task's budget is too small for the reference; None: it may not be, by the interval of its share of cut replies.

    Replies that only the candidate has cut off are no matter of the budget: they count as they are scored, and the gate on
    truncation judges them.
    """
    limit = allowance(recipe, task.task)
    share, _, _ = accuracy_of(rescored(task, lambda item: item.truncated).items, recipe.level)
    if share is None or share.low <= limit:
        return None
    above = f"above {percent_short(limit)} at {percent_short(0.5 + recipe.level / 2)}"
    budget = "" if task.max_tokens is None else f" at {task.max_tokens} tokens"
    return (
        f"{task.num_truncated} of {task.num_items - task.num_failed} replies of {reference.label} itself to "
        f"{task.title or task.task} are cut off{budget} ({percent_short(share.value)}; {above}): the score "
        "measures the budget, not the model; raise max_tokens."
    )


def worst_case(reference: TaskResult, candidate: TaskResult) -> tuple[TaskResult, TaskResult] | None:
    """Both sides with every cut reply counted against the candidate. None: nothing was cut off."""
    if not any(item.truncated for task in (reference, candidate) for item in task.items):
        return None
    return _with_cut(reference, right=True), with_cut_wrong(candidate)


def with_cut_wrong(task: TaskResult) -> TaskResult:
    """A reply that was cut off counts as wrong, whatever was read out of it."""
    return _with_cut(task, right=False)


def _with_cut(task: TaskResult, *, right: bool) -> TaskResult:
    """Replies that were cut off, all of them right or all of them wrong; of partial credit all of it, or none."""
    items = [
        dataclasses.replace(item, correct=right, score=None if item.score is None else float(right))
        if item.truncated and item.correct is not None
        else item
        for item in task.items
    ]
    return task.model_copy(update={"items": tuple(items)})


def rescored(task: TaskResult, is_right: Event) -> TaskResult:
    """Right or wrong by another rule. A reply that never came stays None."""
    items = [item if item.correct is None else dataclasses.replace(item, correct=is_right(item)) for item in task.items]
    return task.model_copy(update={"items": tuple(items), "is_graded": False})


# ------------------------------------------------------------------------------------------------ the gate
@dataclass(frozen=True)
class _Excess:
    """One kind of event in one task, or in all: candidate minus reference; a test of the family that Holm adjusts."""

    what: str
    """`Loops`, `Is cut off or loops`, or `Is cut off` of records that do not tell loops."""
    where: str
    pairs: Pairs
    evidence: PairedEvidence
    loops: _Excess | None = None
    """Part of it; named in its place where it is too much by itself."""

    def clause(self, reference: str) -> str:
        """`loops in 30 % of its replies to arithmetic (60 of 200), fp8 in none`."""
        n = self.pairs.n
        before, after = n - sum(self.pairs.reference), n - sum(self.pairs.candidate)
        replies = f"{n} replies to {self.where}" if not after else f"replies to {self.where} ({after} of {n})"
        share = f"{percent_short(after / n)} of its {replies}" if after else f"none of its {replies}"
        return (
            f"{self.what.lower()} in {share}, {reference} in {f'{percent_short(before / n)} ({before})' if before else 'none'}"
        )

    def named(self, alpha: float) -> _Excess:
        return self.loops if self.loops is not None and self.loops.evidence.p_fail < alpha else self

    def rank(self, alpha: float) -> tuple[bool, float]:
        """What is said first of several: loops, then the larger excess."""
        excess = self.named(alpha)
        return excess.what == LOOPS, excess.evidence.drop.value


def judge_truncation(
    gate: TruncationGate, reference: Measurement, candidate: Measurement, recipe: GateRecipe, beyond: frozenset[str]
) -> Verdict:
    """FAIL: surely more than `max_excess` more replies than of the reference, in a task or in all (Holm). NOT MEASURED: the
    reference's own replies are cut off. UNDERPOWERED: an excess that fails by its own p value, but not after Holm. PASS
    otherwise: smaller excesses are bounded by the scores' worst case.

    beyond: tasks that the reference cannot do, of optional gates.
    """
    alpha = (1 - recipe.level) / 2
    # Cut replies of tasks that are left out, so that no small share stands beside large ones unexplained.
    cut = [
        f"{task.num_truncated} of {task.num_items - task.num_failed} on {task.title or task.task} ({side.label})"
        for side in (reference, candidate)
        for task in side.tasks
        if task.task in beyond and task.num_truncated
    ]
    left_out = f" Not counted, for the reference cannot do the task: {', '.join(cut)}." if cut else ""

    def verdict(status: Status, detail: str) -> Verdict:
        return Verdict(
            gate="truncation", candidate=candidate.label, status=status, observed=None, limit=gate.max_excess, detail=detail
        )

    def verdict_by(status: Status, at: int, then: str = "") -> Verdict:
        excess = family[at] if status == "PASS" else family[at].named(alpha)
        clause, drop = excess.clause(reference.label), excess.evidence.drop
        allowed = f"{percent_plain(gate.max_excess)} more allowed"
        low, high = points(abs(drop.low)), points(abs(drop.high))
        if drop.low >= 0:
            ends = f"{low} to {high} points more"
        else:
            ends = f"{high} to {low} points fewer" if drop.high < 0 else f"{low} points fewer to {high} more"
        detail = f"{capital(clause)} ({interval_name(drop.level, drop.coverage)}: {ends}); {allowed}.{then}"
        chance = f": {may_be_chance}" if status == "UNDERPOWERED" else ""
        return verdict(status, detail).model_copy(
            update={
                "observed": drop, "clause": f"{clause}; {allowed}{chance}",
                "p_fail": p_values[at], "p_fail_holm": adjusted[at],
            }
        )  # fmt: skip

    tasks = [
        (task, other)
        for task, other in common_tasks(reference, candidate)
        if task.task not in beyond and task.knows_cuts and other.knows_cuts
    ]
    family = list(_family(tasks, gate, recipe))
    may_be_chance = f"by itself this fails, but among {len(family)} such comparisons it may be chance (Holm)"
    p_values = [excess.evidence.p_fail for excess in family]
    adjusted = holm(p_values) if recipe.adjust == "holm" else p_values
    order = sorted(range(len(family)), key=lambda at: family[at].rank(alpha), reverse=True)
    failed = [at for at in order if adjusted[at] < alpha]
    if failed:
        return verdict_by("FAIL", failed[0])
    for reference_task, _ in tasks:
        if (reason := too_much_truncation(recipe, reference, reference_task)) is not None:
            return verdict("NOT MEASURED", f"{reason}{left_out}")
    if not family:
        return verdict("NOT MEASURED", "No task has replies of both sides to two items or more.")
    unsure = [at for at in order if p_values[at] < alpha]
    if unsure:
        return verdict_by("UNDERPOWERED", unsure[0], f" {capital(may_be_chance)}.{left_out}")
    most = max(order, key=lambda at: (family[at].evidence.drop.value, family[at].pairs.n))
    return verdict_by("PASS", most, left_out)


def _family(tasks: Sequence[tuple[TaskResult, TaskResult]], gate: TruncationGate, recipe: GateRecipe) -> Iterator[_Excess]:
    """One test for each task and one for all: of replies cut off or looping. Loops are part of these, and a test of their own
    only where the reference has replies that are cut off without looping: elsewhere their excess cannot be the larger one."""
    groups = [(pair[0].title or pair[0].task, [pair]) for pair in tasks]
    for where, group in [*groups, *([("all tasks", list(tasks))] if len(tasks) > 1 else [])]:
        known = all(item.loops is not None or item.correct is None for pair in group for task in pair for item in task.items)
        what = "Is cut off or loops" if known else "Is cut off"
        cut = _excess(what, lambda item: item.truncated or item.loops is True, where, group, gate, recipe)
        loops = _excess(LOOPS, lambda item: item.loops is True, where, group, gate, recipe) if known else None
        if cut is None:
            continue
        if loops is not None and any(item.truncated and not item.loops for reference, _ in group for item in reference.items):
            yield cut
            yield loops
        else:
            yield dataclasses.replace(cut, loops=loops)


def _excess(
    what: str, event: Event, where: str, tasks: Sequence[tuple[TaskResult, TaskResult]], gate: TruncationGate,
    recipe: GateRecipe,
) -> _Excess | None:  # fmt: skip
    """Of the items of all the tasks, right where the event did *not* happen: what is lost are whole replies. None below two
    items."""

    def joined(side: Sequence[TaskResult]) -> TaskResult:
        items = [
            dataclasses.replace(item, item=f"{task.task}/{item.item}", cluster=item.cluster and f"{task.task}/{item.cluster}")
            for task in side
            for item in rescored(task, lambda item: not event(item)).items
        ]
        return side[0].model_copy(update={"items": tuple(items)})

    pairs = pair_items(joined([reference for reference, _ in tasks]), joined([candidate for _, candidate in tasks]))
    if len(set(pairs.items)) < 2:
        return None
    return _Excess(what, where, pairs, pairs.evidence(gate.max_excess, level=recipe.level))
