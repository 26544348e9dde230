"""Replies that were cut off: whether a score can still be believed, and the gate on their share."""

from __future__ import annotations

from assay.quantities import percent_short
from assay.recipes.gate import GateRecipe, ScoreGate, TruncationGate
from assay.records.base import Interval
from assay.records.measurement import Measurement, TaskResult
from assay.records.verdict import Status, Verdict
from assay_evaluate.statistics import wilson
from assay_evaluate.statistics.item_pairs import truncation_share

DEFAULT_MAX_TRUNCATED = 0.05
"""Where a gate file sets no limit: a score whose replies were cut off must not pass for want of a line in it."""


def truncation_limit(recipe: GateRecipe, task: str) -> float:
    """Share of a task's replies that may be cut off: its own limit, or that for all, or DEFAULT_MAX_TRUNCATED."""
    own = [one.max_truncated for one in recipe.gates if isinstance(one, ScoreGate) and one.task == task]
    shared = [one.max_share for one in recipe.gates if isinstance(one, TruncationGate)]
    return own[0] if own and own[0] is not None else min(shared, default=DEFAULT_MAX_TRUNCATED)


def too_much_truncation(gate: ScoreGate, recipe: GateRecipe, *sides: tuple[Measurement, TaskResult]) -> str | None:
    limit = truncation_limit(recipe, gate.task)
    for measurement, task in sides:
        share = truncation_share(task)
        if share is not None and share > limit:
            return (
                f"{task.num_truncated} of {task.num_items - task.num_failed} replies of {measurement.label} to {task.task} "
                f"were cut off at {task.max_tokens} tokens ({percent_short(share)}, allowed {percent_short(limit)}): "
                "the score would measure the budget, not the model; raise max_tokens."
            )
    return None


def judge_truncation(
    gate: TruncationGate, reference: Measurement, candidate: Measurement, level: float, beyond: frozenset[str]
) -> Verdict:
    def verdict(status: Status, detail: str, observed: Interval | None = None) -> Verdict:
        return Verdict(
            gate="truncation", candidate=candidate.label, status=status, observed=observed, limit=gate.max_share, detail=detail
        )  # fmt: skip

    shares = [
        (share, side.label, task)
        for side in (reference, candidate)
        for task in side.tasks
        if task.task not in beyond and (share := truncation_share(task)) is not None
    ]
    if not shares:
        return verdict("NOT MEASURED", "No reply to look at.")
    share, label, task = max(shares, key=lambda found: found[0])
    replies = task.num_items - task.num_failed
    detail = (
        f"At most {percent_short(share)} of the replies of a task were cut off"
        + (f" ({task.num_truncated} of {replies}, {label}, {task.task})" if task.num_truncated else "")
        + f"; allowed {percent_short(gate.max_share)}.{_not_counted(beyond, reference, candidate)}"
    )
    status: Status = "PASS" if share <= gate.max_share else "NOT MEASURED"
    return verdict(status, detail, wilson(task.num_truncated, replies, level))


def _not_counted(beyond: frozenset[str], *sides: Measurement) -> str:
    """Cut replies of tasks that are left out, so that no small share stands beside large ones unexplained."""
    cut = [
        f"{task.num_truncated} of {task.num_items - task.num_failed} on {task.title or task.task} ({side.label})"
        for side in sides
        for task in side.tasks
        if task.task in beyond and task.num_truncated
    ]
    return f" Not counted, for the reference cannot do the task: {', '.join(cut)}." if cut else ""
