"""Simulated runs of a suite under its gates: items and replies are drawn, tasks are looked at and asked again, gates decide.

Tests and rules are those of `statistics.joint`, which `assay power` has too; items are drawn from populations of their own.
`tests/evaluate/verdicts/test_simulated_full.py` holds what is asked and decided against the run's own code on the same replies.
Used by full_decides.py.

Simulated are score gates on tasks that are sampled, the whole, and `effective_length` over RULER. Every other gate is taken to
pass, and every reply to come.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from assay.recipes.gate import EffectiveLengthGate, GateRecipe, ScoreGate
from assay.recipes.suite import RulerTask, SuiteRecipe, TaskBase
from assay.records.verdict import Status
from assay_evaluate.preflight.known_tasks import num_items
from assay_evaluate.preflight.power_designs import discordance_of, rules_of
from assay_evaluate.statistics.decisions import holm
from assay_evaluate.statistics.graded import POWERS, MeanDifference
from assay_evaluate.statistics.joint.chances import Path, judge_runs, runs_asked_further
from assay_evaluate.statistics.joint.drawn import Assumption, Evidence, LookDesign, ScoreDesign
from assay_evaluate.tasks.looks import Look, planned_looks, planned_shares, task_at_look

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Replies = tuple[Bools, Bools]
"""Whether each reply is right: [runs, items, replies] of the reference and of the candidate."""
Kind = Literal["even", "broken", "sure"]
KINDS: dict[Kind, str] = {
    "even": "an item's chance of a right reply is beta; each item loses the same part of it",
    "broken": "the same items; some of them are lost wholly, the others lose nothing",
    "sure": "items are right nearly always or nearly never; some are lost wholly",
}
ACCURACY = {
    "arithmetic": 0.99, "needle": 0.99, "gsm8k": 0.96, "math500": 0.95, "aime": 0.85, "gpqa-diamond": 0.80, "mmlu-pro": 0.85,
    "ifeval": 0.88, "ruler": 0.92, "tools": 0.93,
}  # fmt: skip
"""Of the reference. Assumption; a population has this accuracy and the discordance of `preflight/known_tasks.py`."""
UNKNOWN_ACCURACY = 0.85
LEVEL_STEP = 0.05
"""Growths of information are rounded to so much of their logarithm."""
AT_ONCE = 100
"""Runs, whose replies are drawn together."""
SEVERITY: tuple[Status, ...] = ("FAIL", "NOT MEASURED", "UNDERPOWERED", "PASS")


# ------------------------------------------------------------------------------------------------ what is asked
@dataclass(frozen=True, eq=False)
class Design:
    """One score gate, and its task as the suite asks it. items: at each look. cluster: of each item, or None. length: in tokens
    of each item, or None: the task has no stated lengths."""

    task: TaskBase
    margin: float
    accuracy: float
    discordance: float
    looks: tuple[Look, ...]
    items: tuple[int, ...]
    cluster: NDArray[np.int64] | None = None
    length: NDArray[np.int64] | None = None

    @property
    def name(self) -> str:
        return self.task.name

    @property
    def cluster_sizes(self) -> tuple[int, ...]:
        return () if self.cluster is None else tuple(np.unique(self.cluster, return_counts=True)[1].tolist())

    @property
    def score_design(self) -> ScoreDesign:
        """ValueError for a task of which a look has one reply of either side: of such tasks no item's share is drawn."""
        if any(look.reference_samples == look.candidate_samples == 1 for look in self.looks):
            raise ValueError(f"{self.name}: the simulation knows tasks that are sampled more than once on some side")
        planned = zip(self.looks, self.items, planned_shares(self.looks), strict=True)
        looks = tuple(LookDesign(look.reference_samples, look.candidate_samples, n, share) for look, n, share in planned)
        assumed = Assumption(self.discordance)
        return ScoreDesign(self.name, self.margin, assumed, looks, cluster_sizes=self.cluster_sizes)


def designs_of(suite: SuiteRecipe, gates: GateRecipe) -> list[Design]:
    """suite: as the model asks. ValueError for a task whose number of items is not known."""
    tasks = {task.name: task for task in suite.tasks}
    return [_design(tasks[gate.task], gate, gates) for gate in gates.gates if isinstance(gate, ScoreGate)]


def _design(task: TaskBase, gate: ScoreGate, gates: GateRecipe) -> Design:
    looks = planned_looks(task, gates.stopping)
    counts = [num_items(task_at_look(task, look.candidate_samples, look.limit) if task.is_adaptive else task) for look in looks]
    if any(count is None for count in counts):
        raise ValueError(f"{task.name}: how many items it has is not known")
    cluster, length = _of_ruler(task) if isinstance(task, RulerTask) else (None, None)
    return Design(
        task, gate.max_drop, ACCURACY.get(task.name, UNKNOWN_ACCURACY), discordance_of(task), looks,
        tuple(count for count in counts if count is not None), cluster, length,
    )  # fmt: skip


def _of_ruler(task: RulerTask) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(cluster, length) of each item: those of qa_1 and qa_2 share their question with every other length."""
    cluster, length, number = [], [], 0
    for place, _ in enumerate(task.lengths_tokens):
        for name in task.tasks:
            of_grid = len(task.depths) * len(task.languages) if name == "needle_grid" else 1
            for item in range(task.num_items * of_grid):
                shared = task.tasks.index(name) * task.num_items + item
                cluster.append(-1 - shared if name in {"qa_1", "qa_2"} else number)
                length.append(place)
                number += 1
    return np.array(cluster), np.array(length)


# ------------------------------------------------------------------------------------------------ populations
class Population(Protocol):
    """What replies of the reference are like: share of right ones, and how often two to one item differ."""

    @property
    def accuracy(self) -> float: ...
    @property
    def discordance(self) -> float: ...


def draw_chances(
    rng: np.random.Generator, shape: int | tuple[int, ...], kind: Kind, one: Population, loss: float
) -> tuple[Floats, Floats]:
    """Chance of a right reply to each of so many items: reference, candidate; `loss` apart on average over the population.

    Two replies of the reference to an item differ with the population's discordance on average.
    """
    a, d = one.accuracy, one.discordance
    if kind == "sure":
        wrong = (1 - math.sqrt(1 - 2 * d)) / 2
        ours = np.where(rng.random(shape) < (a - wrong) / (1 - 2 * wrong), 1 - wrong, wrong)
    else:
        concentration = d / (2 * a * (1 - a) - d)
        ours = rng.beta(a * concentration, (1 - a) * concentration, shape)
    if kind == "even" or loss <= 0:
        return ours, np.minimum(ours * (1 - loss / a), 1.0)
    return ours, np.where(rng.random(shape) < loss / a, 0.0, ours)


def draw_replies(rng: np.random.Generator, kind: Kind, one: Design, loss: float, num_runs: int) -> Replies:
    """As many as the looks may ask."""
    both = draw_chances(rng, (num_runs, one.items[-1]), kind, one, loss)
    most = max(look.reference_samples for look in one.looks), max(look.candidate_samples for look in one.looks)
    ours, theirs = (
        rng.random((*chances.shape, number), dtype=np.float32) < chances[..., None].astype(np.float32)
        for chances, number in zip(both, most, strict=True)
    )
    return ours, theirs


# ------------------------------------------------------------------------------------------------ one task in many runs
@dataclass(frozen=True)
class SeenTask:
    """Of every run, at each look. at_lengths: mean differences [runs, lengths]; empty: the task has no stated lengths."""

    evidence: list[Evidence]
    at_lengths: list[MeanDifference]


def seen_of(one: Design, pieces: Iterable[Replies]) -> SeenTask:
    """pieces: some of the runs each."""
    parts = [_sums(one, replies) for replies in pieces]
    looks = [[np.concatenate(same, axis=-2) for same in zip(*look, strict=True)] for look in zip(*parts, strict=True)]
    sizes = np.array(one.cluster_sizes, dtype=np.float64)
    evidence = [
        Evidence(n, True, tuple(powers_PR1[..., 0]), clusters_RC if len(sizes) else None, sizes)
        for n, (powers_PR1, clusters_RC, _) in zip(one.items, looks, strict=True)
    ]
    if one.length is None:
        return SeenTask(evidence, [])
    return SeenTask(evidence, [MeanDifference.of_sums(np.bincount(one.length), list(lengths)) for _, _, lengths in looks])


def _sums(one: Design, replies: Replies) -> list[tuple[Floats, Floats, Floats]]:
    """Of the differences, at each look: powers [power, runs, 1], by cluster [runs, clusters], powers by length [power, runs,
    lengths]; of a task without clusters or lengths over all its items instead."""
    found = []
    for look, n in zip(one.looks, one.items, strict=True):
        ours, theirs = (
            side[:, :n, :number].mean(axis=2)
            for side, number in zip(replies, (look.reference_samples, look.candidate_samples), strict=True)
        )
        powers = np.stack([(ours - theirs) ** power for power in POWERS])
        alike = np.zeros(n, dtype=np.int64)
        labels = [alike if one_each is None else one_each for one_each in (one.cluster, one.length)]
        found.append((powers.sum(axis=2, keepdims=True), _sums_by(powers[0], labels[0]), _sums_by(powers, labels[1])))
    return found


def _sums_by(values: Floats, labels: NDArray[np.int64]) -> Floats:
    """Over the last axis, of each label in ascending order."""
    order = np.argsort(labels, kind="stable")
    starts = np.unique(labels[order], return_index=True)[1]
    return np.asarray(np.add.reduceat(values[..., order], starts, axis=-1))


# ------------------------------------------------------------------------------------------------ many runs
@dataclass(frozen=True)
class Outcome:
    """What one simulated run decided, and what it asked."""

    overall: Status
    whole: Status | None
    """None: the gates claim nothing of it."""
    tasks: dict[str, Status]
    effective_length: Status | None
    asked: dict[str, tuple[int, int]]
    """Task -> last look that was asked of the reference, and of the candidate, counted from 0."""
    starts: tuple[int, int]
    """Of the reference's server, and of the candidate's."""


def simulate(
    designs: Sequence[Design], gates: GateRecipe, losses: Mapping[str, float], kind: Kind, num_runs: int, seed: int
) -> list[Outcome]:  # fmt: skip
    """Runs of a reference and one candidate. losses: of a population, by task; those not named lose nothing."""
    rng = np.random.default_rng(seed)

    def drawn(one: Design) -> SeenTask:
        numbers = (min(AT_ONCE, num_runs - start) for start in range(0, num_runs, AT_ONCE))
        return seen_of(one, (draw_replies(rng, kind, one, losses.get(one.name, 0.0), number) for number in numbers))

    return decided(designs, gates, [drawn(one) for one in designs])


def decided(
    designs: Sequence[Design], gates: GateRecipe, found: Sequence[SeenTask], level_step: float = LEVEL_STEP
) -> list[Outcome]:  # fmt: skip
    """Of every run; found: of each design. In the order of `run/rounds.py`: what the reference has replies for, then the
    reference, then the rest."""
    rules = dataclasses.replace(rules_of(gates), level_step=level_step)
    paths = [Path(one.score_design, rules, len(designs), task.evidence) for one, task in zip(designs, found, strict=True)]
    at, of_reference = np.zeros((2, len(designs), paths[0].num_draws), dtype=np.int64)
    starts = np.ones(paths[0].num_draws, dtype=np.int64)
    last = np.array([[len(one.looks) - 1] for one in designs])
    while True:
        seen = judge_runs(paths, list(at), rules)
        wanted = runs_asked_further(paths, seen, rules) & (at < last)
        if not wanted.any():
            break
        has_replies = np.stack([_has_replies(one)[of_reference[task], at[task]] for task, one in enumerate(designs)])
        now = wanted & has_replies
        asks_reference = wanted & ~now.any(axis=0)
        of_reference = np.where(asks_reference, at + 1, of_reference)
        starts += asks_reference.any(axis=0)
        at = np.where(now | asks_reference, at + 1, at)
    lengths = next((_at_lengths(gates, one, task) for one, task in zip(designs, found, strict=True) if task.at_lengths), None)
    ruler = next((task for task, one in enumerate(designs) if one.length is not None), 0)
    whole = None if seen.whole is None else _words(seen.whole.passes, seen.whole.fails)
    tasks = [_words(passed, failed) for passed, failed in zip(seen.passed, seen.failed, strict=True)]
    return [
        _outcome(
            None if whole is None else whole[run],
            {one.name: words[run] for one, words in zip(designs, tasks, strict=True)},
            None if lengths is None else lengths[run][at[ruler, run]],
            {one.name: (int(of_reference[task, run]), int(at[task, run])) for task, one in enumerate(designs)},
            int(starts[run]),
        )
        for run in range(paths[0].num_draws)
    ]  # fmt: skip


def _has_replies(one: Design) -> Bools:
    """[look that the reference was asked, look that the candidate was asked]: whether the reference holds what the next look of
    the candidate needs."""
    found = np.ones((len(one.looks), len(one.looks)), dtype=np.bool_)
    for reached, has in enumerate(one.looks):
        for look, needs in enumerate(one.looks[1:]):
            enough = has.reference_samples >= needs.reference_samples and (has.limit or 0) >= (needs.limit or 0)
            found[reached, look] = enough
    return found


def _words(passes: Bools, fails: Bools) -> list[Status]:
    return ["FAIL" if fail else "PASS" if passed else "UNDERPOWERED" for passed, fail in zip(passes, fails, strict=True)]


def _outcome(
    whole: Status | None, tasks: dict[str, Status], long: Status | None, asked: dict[str, tuple[int, int]], starts: int
) -> Outcome:  # fmt: skip
    counted = [status for status in tasks.values() if status != "UNDERPOWERED" or whole is None]
    counted += [status for status in (whole, long) if status is not None]
    return Outcome(min(counted, key=SEVERITY.index), whole, tasks, long, asked, (starts, starts))


def _at_lengths(gates: GateRecipe, one: Design, found: SeenTask) -> list[list[Status]] | None:
    """Of the gate `effective_length`, by run and look. None: there is none.

    ValueError for a gate over several tasks, or up to a stated length.
    """
    gate = next((gate for gate in gates.gates if isinstance(gate, EffectiveLengthGate)), None)
    if gate is None:
        return None
    if gate.tasks != (one.name,) or gate.at_least != "reference":
        raise ValueError("the simulation knows effective_length over RULER, as far as the reference reaches")
    alpha = (1 - gates.level) / 2

    def word(passes: list[float], fails: list[float], fewest: int) -> Status:
        beyond = min(holm(fails) if gates.adjust == "holm" else fails) < alpha
        return "FAIL" if beyond else "PASS" if max(passes) < alpha and fewest >= gates.min_items else "UNDERPOWERED"

    by_look = [
        [
            word(passes, fails, int(long.n.min()))
            for passes, fails in zip(
                long.p_at_least(gate.max_drop).tolist(), long.p_at_most(gate.max_drop).tolist(), strict=True
            )
        ]
        for long in found.at_lengths
    ]
    return [list(run) for run in zip(*by_look, strict=True)]


def every_task(gates: GateRecipe) -> GateRecipe:
    """The same gates, asked until each task is decided by itself."""
    return gates.model_copy(update={"stopping": gates.stopping.model_copy(update={"until": "every_task"})})


def print_lines(lines: Callable[[int, int], Iterable[str]], description: str | None) -> None:
    """The result of a simulation, line by line as it comes; lines: of a number of runs and a seed."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    for line in lines(options.runs, options.seed):
        print(line, flush=True)
