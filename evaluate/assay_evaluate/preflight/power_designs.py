"""The score gates of a suite as designs whose power can be drawn: looks, items, clusters, and what is assumed of each task;
and how many items, or replies to each of them, a gate needs so that a candidate passes it 4 times in 5.

One reply to each item: the exact power. Several: the normal test of a mean whose variance is the lasting part of the
discordance and, of its noise, a share for each reply of either side. Of clusters, Student's t with Bell and McCaffrey's
degrees as well.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from scipy import stats

from assay.recipes.gate import GateRecipe, ScoreGate
from assay.recipes.suite import LmEvalTask, NeedleTask, Range, SuiteRecipe, SweTask, TaskBase
from assay.records.comparable import check_measurements
from assay.records.measurement import Measurement
from assay_evaluate.preflight.known_tasks import (
    CODES_DISCORDANCE,
    GENERATED_DISCORDANCE,
    MANY_NEEDLES,
    UNKNOWN_DISCORDANCE,
    cluster_sizes,
    mean_of_known,
    num_items,
)
from assay_evaluate.statistics.clustered import ClusteredMean, clustered_values_needed, satterthwaite_degrees
from assay_evaluate.statistics.item_pairs import Pairs, find_task, pair_items
from assay_evaluate.statistics.joint.chances import Rules
from assay_evaluate.statistics.joint.drawn import Assumption, LookDesign, ScoreDesign
from assay_evaluate.statistics.power import items_needed
from assay_evaluate.statistics.proportions import detection_quantile
from assay_evaluate.tasks.looks import planned_looks, planned_shares, task_at_look
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
    others = [measurement for measurement in measurements if measurement is not reference]
    discordance, noise, losses = dict[str, float](), dict[str, float](), dict[str, float]()
    for task in reference.tasks:
        replies = [
            (measurement.is_noise_floor, pair_items(task, other_task))
            for measurement in others
            if (other_task := find_task(measurement, task.task))
        ]
        of_candidates = [pairs for is_floor, pairs in replies if not is_floor]
        if drops := [sum(pairs.differences) / len(pairs.differences) for pairs in of_candidates if pairs.n]:
            losses[task.task] = max(drops)
        floors, shares = (
            [share for pairs in side if (share := _share(pairs)) is not None]
            for side in ([pairs for is_floor, pairs in replies if is_floor], of_candidates)
        )
        if shares or floors:
            discordance[task.task] = most = max(shares or floors[:1])
            noise[task.task] = min(1.0, floors[0] / most) if floors else 1.0
    return Assumptions(discordance, noise, dict.fromkeys(discordance, f"measured in {where}"), losses=losses)


def _share(pairs: Pairs) -> float | None:
    """Of pairs of replies of which one is right and one wrong, with two pairs more of which one is. None: too few pairs."""
    if pairs.n < FEWEST_PAIRS:
        return None
    return (sum(a != b for a, b in zip(pairs.reference, pairs.candidate, strict=True)) + 1) / (pairs.n + 2)


class GatedTask(NamedTuple):
    """A score gate, its task, and its design."""

    gate: ScoreGate
    task: TaskBase
    design: ScoreDesign


def gated_tasks(suite: SuiteRecipe, gates: GateRecipe, assumptions: Assumptions) -> tuple[list[GatedTask], list[str]]:
    """(score gates whose task has a known number of items, names of the other gated tasks)."""
    tasks = {task.name: task for task in suite.tasks}
    gated, unknown = [], []
    for gate in gates.gates:
        if not isinstance(gate, ScoreGate) or gate.task not in tasks:
            continue
        design = design_of(tasks[gate.task], gate, gates, assumptions)
        if design is None:
            unknown.append(gate.task)
        else:
            gated.append(GatedTask(gate, tasks[gate.task], design))
    return gated, unknown


def design_of(task: TaskBase, gate: ScoreGate, gates: GateRecipe, assumptions: Assumptions) -> ScoreDesign | None:
    """None: how many items the task has is not known."""
    planned = planned_looks(task, gates.stopping)
    looks = []
    for look, share in zip(planned, planned_shares(planned), strict=True):
        count = num_items(task_at_look(task, look.candidate_samples, look.limit) if task.is_adaptive else task)
        if count is None:
            return None
        samples = (task.num_repeats, task.num_repeats) if isinstance(task, SweTask) else look[:2]
        looks.append(LookDesign(*samples, count, share))
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
    known = mean_of_known(task.tasks, "discordance")
    return UNKNOWN_DISCORDANCE if known is None else known


def rules_of(gates: GateRecipe) -> Rules:
    """The rules by which the gates judge."""
    whole = None if gates.whole is None else (gates.whole.max_mean_use, gates.whole.max_task)
    every_task = gates.stopping.until == "every_task"
    for_pass, for_fail = spendings_of(gates.stopping)
    return Rules(gates.level, gates.min_items, gates.adjust == "holm", for_pass, for_fail, whole, every_task)


# ------------------------------------------------------------------------------------------------ what a gate needs
MOST_ITEMS = 1_000_000
MOST_REPLIES = 100
"""More of either are not proposed: what is lost is then the margin, as far as anybody can tell."""


class Needed(NamedTuple):
    """items: with as many replies to each as the suite asks at most. replies: to each of the suite's items, of either side.
    None: no number up to `MOST_ITEMS` or `MOST_REPLIES` would do; of replies also where greedy ones are all alike."""

    items: int | None
    replies: int | None


def needed(design: ScoreDesign, rules: Rules, power: float, *, loss: float = 0.0, can_repeat: bool = True) -> Needed:
    """For a PASS of this gate with chance `power` if `loss` is the true one."""
    if not loss < design.margin:
        return Needed(None, None)
    return Needed(_items(design, rules, power, loss), _replies(design, rules, power, loss) if can_repeat else None)


def _items(design: ScoreDesign, rules: Rules, power: float, loss: float) -> int | None:
    last, room = design.looks[-1], design.margin - loss
    discordance, noise = design.assumed
    left = (1 / last.reference_samples + 1 / last.candidate_samples) / 2  # of the noise; 1 for one reply of either side
    variance = discordance * (1 - noise) + discordance * noise * left  # of an item's difference
    by_normal = (detection_quantile(rules.level, power) / room) ** 2 * variance
    if by_normal > MOST_ITEMS:
        return None
    if (last.reference_samples, last.candidate_samples) == (1, 1):
        count = items_needed(design.margin, max(discordance, abs(loss)), power, loss=loss, level=rules.level)
    else:
        count = max(math.ceil(by_normal), items_needed(room, 0.0, power, level=rules.level))
    if design.cluster_sizes and variance > 0:
        error, degrees = math.sqrt(variance / design.num_items), satterthwaite_degrees(design.cluster_sizes)
        clustered = ClusteredMean(loss, error, degrees, len(design.cluster_sizes))
        by_cluster = clustered_values_needed(clustered, design.num_items, design.margin, rules.level, power, loss=loss)
        count = max(count, by_cluster)
    return max(count, rules.min_items)


def _replies(design: ScoreDesign, rules: Rules, power: float, loss: float) -> int | None:
    n, room, (discordance, noise) = design.num_items, design.margin - loss, design.assumed
    if n < max(rules.min_items, items_needed(room, 0.0, power, level=rules.level)):
        return None
    quantiles = detection_quantile(rules.level, power)
    if design.cluster_sizes:
        degrees = satterthwaite_degrees(design.cluster_sizes)
        quantiles = float(stats.t.ppf(0.5 + rules.level / 2, degrees) + stats.t.ppf(power, degrees))
    left = n * (room / quantiles) ** 2 - discordance * (1 - noise)  # of the variance of a difference, for noise
    if discordance * noise == 0:
        return 1 if left >= 0 else None
    count = math.ceil(discordance * noise / left) if left > 0 else MOST_REPLIES + 1
    return count if count <= MOST_REPLIES else None
