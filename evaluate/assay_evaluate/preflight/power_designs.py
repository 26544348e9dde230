"""The score gates of a suite as designs whose power can be drawn: looks, items, clusters, and what is assumed of each task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from assay.recipes.gate import GateRecipe, ScoreGate
from assay.recipes.suite import LmEvalTask, NeedleTask, Range, SuiteRecipe, SweTask, TaskBase
from assay.records.comparable import check_measurements
from assay.records.measurement import Measurement, TaskResult
from assay_evaluate.preflight.known_tasks import (
    CODES_DISCORDANCE,
    GENERATED_DISCORDANCE,
    LM_EVAL,
    MANY_NEEDLES,
    UNKNOWN_DISCORDANCE,
)
from assay_evaluate.preflight.suite_items import cluster_sizes, num_items
from assay_evaluate.statistics.item_pairs import find_task, pair_items
from assay_evaluate.statistics.joint.chances import Rules
from assay_evaluate.statistics.joint.drawn import Assumption, LookDesign, ScoreDesign
from assay_evaluate.tasks.looks import asked_for, planned_looks, planned_shares
from assay_evaluate.verdicts.scores import spendings_of

LARGEST_DISCORDANCE = 0.5
"""Of two runs that guess between right and wrong."""
FROM_TABLE = "assumed"
FEWEST_PAIRS = 30
"""Of replies, to say how often they differ."""


@dataclass(frozen=True)
class Assumptions:
    """About two runs of one model, by task; other tasks are looked up in `known_tasks`.

    noise: share of a discordance that other replies would not show again. sources: task -> where its numbers come from.
    losses: task -> the largest loss that was seen of a candidate.
    """

    discordance: Mapping[str, float] = field(default_factory=dict)
    noise: Mapping[str, float] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    noise_of_others: float = 1.0
    losses: Mapping[str, float] = field(default_factory=dict)

    def of(self, task: TaskBase) -> Assumption:
        stated = self.discordance.get(task.name)
        discordance = discordance_of(task) if stated is None else stated
        return Assumption(min(discordance, LARGEST_DISCORDANCE), self.noise.get(task.name, self.noise_of_others))

    def source(self, task: str) -> str:
        return self.sources.get(task, FROM_TABLE)


def measured(measurements: Sequence[Measurement], where: str) -> Assumptions:
    """What a run has seen, for tasks of the same names: where replies of a candidate differ from the reference's, most often of
    all candidates, and which part of it the reference's own repeat shows too. Tasks of too few replies are left to the table.

    MeasureError: no reference, or two.
    """
    reference = check_measurements(measurements)
    others = [one for one in measurements if one is not reference]
    discordance, noise, losses = dict[str, float](), dict[str, float](), dict[str, float]()
    for task in reference.tasks:
        pairs = [pair_items(task, theirs) for one in others if not one.is_noise_floor and (theirs := find_task(one, task.task))]
        if drops := [sum(both.differences) / len(both.differences) for both in pairs if both.n]:
            losses[task.task] = max(drops)
        found = [(one.is_noise_floor, _share(task, theirs)) for one in others if (theirs := find_task(one, task.task))]
        floor = next((share for is_floor, share in found if is_floor and share is not None), None)
        seen = [share for is_floor, share in found if not is_floor and share is not None] or ([] if floor is None else [floor])
        if seen:
            discordance[task.task] = max(seen)
            noise[task.task] = 1.0 if floor is None else min(1.0, floor / max(seen))
    return Assumptions(discordance, noise, dict.fromkeys(discordance, f"measured in {where}"), losses=losses)


def _share(ours: TaskResult, theirs: TaskResult) -> float | None:
    """Of pairs of replies of which one is right and one wrong, with two pairs more of which one is. None: too few pairs."""
    pairs = pair_items(ours, theirs)
    if pairs.n < FEWEST_PAIRS:
        return None
    return (sum(a != b for a, b in zip(pairs.reference, pairs.candidate, strict=True)) + 1) / (pairs.n + 2)


class Gated(NamedTuple):
    """A score gate, its task, and its design."""

    gate: ScoreGate
    task: TaskBase
    design: ScoreDesign


def gated_tasks(suite: SuiteRecipe, gates: GateRecipe, assumptions: Assumptions) -> tuple[list[Gated], list[str]]:
    """(score gates whose task has a known number of items, names of the other gated tasks)."""
    tasks = {task.name: task for task in suite.tasks}
    found, unknown = [], []
    for gate in gates.gates:
        if not isinstance(gate, ScoreGate) or gate.task not in tasks:
            continue
        design = design_of(tasks[gate.task], gate, gates, assumptions)
        if design is None:
            unknown.append(gate.task)
        else:
            found.append(Gated(gate, tasks[gate.task], design))
    return found, unknown


def design_of(task: TaskBase, gate: ScoreGate, gates: GateRecipe, assumptions: Assumptions) -> ScoreDesign | None:
    """None: how many items the task has is not known."""
    planned = planned_looks(task, gates.stopping)
    looks = []
    for look, share in zip(planned, planned_shares(planned), strict=True):
        count = num_items(asked_for(task, look.candidate_samples, look.limit) if task.is_adaptive else task)
        if count is None:
            return None
        ours, theirs = (task.num_repeats,) * 2 if isinstance(task, SweTask) else look[:2]
        looks.append(LookDesign(ours, theirs, count, share))
    clusters = () if gates.estimand == "these_clusters" else _clusters(task)
    return ScoreDesign(gate.task, gate.max_drop, assumptions.of(task), tuple(looks), gate.claim, clusters)


def _clusters(task: TaskBase) -> tuple[int, ...]:
    """Items of each cluster; empty: every item stands for itself."""
    if isinstance(task, SweTask):
        sizes = cluster_sizes(task) or ()
        return sizes if len(sizes) > 1 else ()
    if not isinstance(task, LmEvalTask) or not task.translations or isinstance(task.limit, Range):
        return ()
    questions = (num_items(task) or 0) // len(task.tasks)
    return (len(task.tasks),) * questions


def discordance_of(task: TaskBase) -> float:
    """Assumed share of items on which two runs of one model differ; of several tasks behind one name, the mean over items."""
    if isinstance(task, NeedleTask) and task.num_needles > MANY_NEEDLES:
        return CODES_DISCORDANCE
    if not isinstance(task, LmEvalTask):
        return GENERATED_DISCORDANCE[str(getattr(task, "kind"))]  # noqa: B009  each kind of task has one
    known = [LM_EVAL[name] for name in task.tasks if name in LM_EVAL]
    total = sum(sum(one.sizes) for one in known)
    return sum(sum(one.sizes) * one.discordance for one in known) / total if total else UNKNOWN_DISCORDANCE


def rules_of(gates: GateRecipe) -> Rules:
    """The rules by which the gates judge."""
    whole = None if gates.whole is None else (gates.whole.max_mean_use, gates.whole.max_task)
    every_task = gates.stopping.until == "every_task"
    for_pass, for_fail = spendings_of(gates.stopping)
    return Rules(gates.level, gates.min_items, gates.adjust == "holm", for_pass, for_fail, whole, every_task)
