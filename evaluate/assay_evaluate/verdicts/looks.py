"""A task that is asked in rounds, as the gates see it: replayed look by look from the records alone.

A look holds the first replies, or the first drawn items, that it was planned to hold, whatever was asked later or for another
candidate. What each look says is a test of its own (`Pairs.evidence`); together they keep one alpha (`statistics.sequential`).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from assay.recipes.gate import GateRecipe, ScoreGate, Stopping
from assay.recipes.suite import GeneratedTask, LmEvalTask, SuiteRecipe, TaskBase
from assay.records.base import Interval
from assay.records.measurement import Measurement, TaskResult
from assay.records.verdict import LookSeen
from assay_evaluate.statistics import Claim, PairedEvidence
from assay_evaluate.statistics.item_pairs import Pairs, pair_items
from assay_evaluate.statistics.sequential import Spending, nominal_levels, sequential_p
from assay_evaluate.tasks.looks import Look, items_at, planned_looks


@dataclass(frozen=True)
class Seen:
    """What the gates see of one task of one candidate."""

    pairs: Pairs
    """At the last look."""
    evidence: PairedEvidence
    """Of all looks together."""
    looks: tuple[LookSeen, ...] = ()
    """Empty: looked at once, at all there is."""


RANGES = ("num_samples", *(kind.items_field for kind in (GeneratedTask, LmEvalTask)))
"""Fields of a task that may be a range."""


def recorded_task(measurement: Measurement, name: str) -> TaskBase | None:
    """A task with a range as the measurement's suite has it. None: another task, which is asked once."""
    for task in measurement.suite_recipe.get("tasks", ()):
        if task.get("name") == name and any(isinstance(task.get(field), dict) for field in RANGES):
            return SuiteRecipe.model_validate({"schema": 1, "name": "recorded", "seed": "eval", "tasks": [task]}).tasks[0]
    return None


def look_at(
    gate: ScoreGate, recipe: GateRecipe, reference: Measurement, ours: TaskResult, candidate: Measurement, theirs: TaskResult
) -> Seen | None:
    """None: no item was answered by both sides."""
    task, seed = recorded_task(reference, gate.task), str(reference.suite_recipe.get("seed", ""))
    if task is None or candidate.is_noise_floor or not (ours.rounds and theirs.rounds):
        pairs = pair_items(ours, theirs)._replace(
            of_these_items=_of_these_items(recipe, ours), of_these_clusters=_of_these_clusters(recipe)
        )  # fmt: skip
        return Seen(pairs, _evidence(pairs, gate, recipe)) if pairs.n else None
    planned = planned_looks(task, recipe.stopping)
    reached = [look for look in planned if _is_reached(look, ours, theirs)] or [_asked(ours, theirs)]
    found = [
        pair_items(_at(task, ours, look.reference_samples, look, seed), _at(task, theirs, look.candidate_samples, look, seed))
        for look in reached
    ]
    if not all(pairs.n for pairs in found):
        return None
    if _of_these_items(recipe, ours) and reached[-1].limit is None:  # a range of items: each look is about others
        found = [pairs._replace(of_these_items=True) for pairs in found]
    found = [pairs._replace(of_these_clusters=_of_these_clusters(recipe)) for pairs in found]
    return _together(gate, recipe, planned, reached, found)


def _of_these_items(recipe: GateRecipe, ours: TaskResult) -> bool:
    """SWE-bench has an interval by instance and one by repository, and says which counts."""
    return recipe.estimand == "these_items" and ours.kind != "swe"


def _of_these_clusters(recipe: GateRecipe) -> bool:
    return recipe.estimand == "these_clusters"


def _evidence(pairs: Pairs, gate: ScoreGate, recipe: GateRecipe) -> PairedEvidence:
    return pairs.evidence(gate.max_drop, level=recipe.level, claim=gate.claim)


def _at(task: TaskBase, asked: TaskResult, num_samples: int, look: Look, seed: str) -> TaskResult:
    return asked.model_copy(update={"items": items_at(task, asked.items, num_samples, look.limit, seed)})


def _asked(ours: TaskResult, theirs: TaskResult) -> Look:
    """All there is, of a run that was asked by other looks than these gates have."""
    limits = [task.rounds[-1].limit for task in (ours, theirs) if task.rounds and task.rounds[-1].limit is not None]
    return Look(ours.num_samples, theirs.num_samples, min(limits, default=None))


def _is_reached(look: Look, ours: TaskResult, theirs: TaskResult) -> bool:
    """Whether both sides were asked so much."""
    return all(
        task.rounds and task.rounds[-1].num_samples >= wanted and (task.rounds[-1].limit or 0) >= (look.limit or 0)
        for task, wanted in ((ours, look.reference_samples), (theirs, look.candidate_samples))
    )


# ------------------------------------------------------------------------------------------------ several looks, one alpha
def _together(gate: ScoreGate, recipe: GateRecipe, planned: tuple[Look, ...], reached: list[Look], found: list[Pairs]) -> Seen:
    for_pass, for_fail = spendings_of(recipe.stopping, gate.claim)
    alpha = (1 - recipe.level) / 2
    evidence = [_evidence(pairs, gate, recipe) for pairs in found]
    whole = planned[-1].planned_information
    shares = [min(look.planned_information / whole, 1.0) for look in reached]
    informations = [1 / pairs.variance for pairs in found]
    levels, fail_levels = (nominal_levels(shares, informations, alpha, spending) for spending in (for_pass, for_fail))
    looks = tuple(
        LookSeen(
            reference_samples=look.reference_samples, candidate_samples=look.candidate_samples, num_items=len(set(pairs.items)),
            share=share, alpha_spent=alpha if shares == [1.0] else for_pass.spent(share, alpha), level=level,
            fail_level=fail_level, p_pass=one.p_pass, p_fail=one.p_fail, drop=one.drop.value, information=information,
        )
        for look, pairs, share, level, fail_level, one, information in zip(
            reached, found, shares, levels, fail_levels, evidence, informations, strict=True
        )
    )  # fmt: skip
    if shares == [1.0]:
        return Seen(found[0], evidence[0], looks)

    def over_looks(p_values: list[float], spending: Spending = for_pass) -> float:
        return sequential_p(p_values, shares, informations, spending)

    def ends_at(tails: list[float]) -> list[Interval]:
        return [pairs.drop(1 - 2 * tail) for pairs, tail in zip(found, tails, strict=True)]

    together = dataclasses.replace(
        evidence[-1],
        drop=repeated_interval(ends_at(fail_levels), ends_at(levels), recipe.level),
        p_pass=over_looks([one.p_pass for one in evidence]),
        p_fail=over_looks([one.p_fail for one in evidence], for_fail),
        p_difference=min(1.0, 2 * over_looks([one.p_difference / 2 for one in evidence])),
    )
    return Seen(found[-1], together, looks)


def spendings_of(stopping: Stopping, claim: Claim = "non_inferior") -> tuple[Spending, Spending]:
    """(for PASS, for FAIL); of equivalence, whose PASS needs both ends of the interval, one for both."""
    for_pass = Spending(stopping.spending, stopping.gamma, stopping.pass_part)
    return for_pass, for_pass if claim == "equivalent" else Spending(stopping.fail_spending, stopping.gamma)


def repeated_interval(for_fail: list[Interval], for_pass: list[Interval], level: float) -> Interval:
    """Of the last look, within those of the looks before: all of them cover the truth together with chance `level` (repeated
    confidence intervals; Jennison & Turnbull 1989, JRSS B 51:305-361). A word that was said at a look is not taken back.

    for_fail, for_pass: of each look, at its level for FAIL, whose low end counts, and for PASS, whose high end does.
    """
    last = for_pass[-1]
    low, high = max(one.low for one in for_fail), min(one.high for one in for_pass)
    ends = {"low": min(low, last.value), "high": max(high, last.value)}
    return last.model_copy(update={**ends, "level": level, "coverage": "at_least"})


def asked_in_rounds(looks: tuple[LookSeen, ...]) -> str:
    """One line: what was asked at each look, and its p values beside the level that would have decided."""
    told = [
        f"{look.reference_samples} + {look.candidate_samples} replies to {look.num_items} items (p {look.p_pass:.2g} for PASS, "
        f"{look.p_fail:.2g} for FAIL; {_levels(look)})"
        for look in looks
    ]
    times = "once" if len(looks) == 1 else f"{len(looks)} times"
    return f"Looked at {times}: {', then '.join(told)}; alpha spent {looks[-1].alpha_spent:.2g}."


def _levels(look: LookSeen) -> str:
    if look.fail_level is None or look.fail_level == look.level:
        return f"{look.level:.2g} decides"
    return f"{look.level:.2g} and {look.fail_level:.2g} decide"
