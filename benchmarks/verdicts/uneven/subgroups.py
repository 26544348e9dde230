"""A language, a subject or a kind that is ruined: what suite `full` decides with and without its gate on subgroups.

    python benchmarks/verdicts/uneven/subgroups.py [--runs 1000] [--seed 1]

Simulated runs of suite and gates `full` as in full_decides.py, of which every item has the language, part and length that the
suite gives it. The committed result is subgroups.md beside this file, and the program prints it. No model and no server.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[1]))
from full_decides import shipped
from simulated_full import (
    AT_ONCE,
    Design,
    Floats,
    Kind,
    Outcome,
    Replies,
    decided,
    designs_of,
    draw_chances,
    print_lines,
    seen_of,
)

from assay.recipes.gate import GateRecipe, SubgroupsGate
from assay.recipes.suite import RulerTask
from assay_evaluate.statistics.decisions import screen_subgroups
from assay_evaluate.statistics.graded import POWERS, MeanDifference

SUBJECTS = 14
Labels = dict[str, NDArray[np.int64]]
"""By property: the value of each item, as a number."""


def labels_of(one: Design) -> Labels:
    """As the tasks of suite `full` give them; empty: one of everything."""
    n, index = one.items[-1], np.arange(one.items[-1])
    if one.name == "arithmetic":
        return {"language": index % 2}
    if one.name == "needle":
        return {"language": index % 2, "length": index // 2 % 3}
    if one.name == "mmlu-pro":
        return {"part": index % SUBJECTS}
    if one.name == "aime":
        return {"part": index * 2 // n}
    if isinstance(one.task, RulerTask):
        assert one.length is not None
        of_length = len(one.task.tasks) * one.task.num_items
        return {"part": index % of_length // one.task.num_items, "length": one.length}
    if one.name == "tools":
        return {"language": index % 3, "length": index // 3 % 2, "part": index // 6 % 4}
    return {}


@dataclass(frozen=True)
class Group:
    """Items of one task with one value of a property; of languages also over all tasks."""

    task: int
    by: str
    value: int
    inside: NDArray[np.bool_]


def groups_of(designs: Sequence[Design]) -> list[Group]:
    return [
        Group(task, by, int(value), labels == value)
        for task, one in enumerate(designs)
        for by, labels in labels_of(one).items()
        for value in np.unique(labels)
    ]


# ------------------------------------------------------------------------------------------------ many runs
@dataclass(frozen=True)
class Lost:
    """What a candidate loses: on items of a task with these values, or on all of it."""

    task: str
    loss: float
    by: str | None = None
    value: int = 0

    def of_items(self, one: Design) -> Floats:
        n = one.items[-1]
        if self.task != one.name:
            return np.zeros(n)
        return np.full(n, self.loss) if self.by is None else np.where(labels_of(one)[self.by] == self.value, self.loss, 0.0)


def draw(rng: np.random.Generator, kind: Kind, one: Design, losses: Sequence[Lost], num_runs: int) -> Replies:
    """As `simulated_full.draw_replies`, of items that lose differently."""
    lost = np.sum([part.of_items(one) for part in losses], axis=0) if losses else np.zeros(one.items[-1])
    ours, theirs = draw_chances(rng, (num_runs, one.items[-1]), kind, one, 0.0)
    theirs = np.clip(ours * (1 - lost / one.accuracy), 0.0, 1.0)
    most = max(look.reference_samples for look in one.looks), max(look.candidate_samples for look in one.looks)
    both = (
        rng.random((*chances.shape, number), dtype=np.float32) < chances[..., None].astype(np.float32)
        for chances, number in zip((ours, theirs), most, strict=True)
    )
    first, second = both
    return first, second


def sums_of(one: Design, groups: Sequence[Group], replies: Replies) -> list[Floats]:
    """At each look, powers of the differences [power, runs, group]."""
    found = []
    for look, n in zip(one.looks, one.items, strict=True):
        ours, theirs = (
            side[:, :n, :number].mean(axis=2)
            for side, number in zip(replies, (look.reference_samples, look.candidate_samples), strict=True)
        )
        inside_NG = np.stack([group.inside[:n] for group in groups], axis=1).astype(np.float64)
        found.append(np.stack([(ours - theirs) ** power @ inside_NG for power in POWERS]))
    return found


def simulate(
    designs: Sequence[Design], gates: GateRecipe, gate: SubgroupsGate, losses: Sequence[Lost], num_runs: int, seed: int
) -> tuple[list[Outcome], list[str]]:
    """(what the other gates decide, what the gate on subgroups says), of every run."""
    rng, groups = np.random.default_rng(seed), groups_of(designs)
    tasks, by_look = [], dict[int, list[Floats]]()
    for at, one in enumerate(designs):
        own = [group for group in groups if group.task == at]
        parts, sums = [], []
        for start in range(0, num_runs, AT_ONCE):
            replies = draw(rng, "even", one, losses, min(AT_ONCE, num_runs - start))
            parts.append(seen_of(one, [replies]))
            sums.append(sums_of(one, own, replies) if own else [])
        tasks.append(_joined(parts))
        by_look[at] = [np.concatenate(same, axis=1) for same in zip(*sums, strict=True)] if own else []
    outcomes = decided(designs, gates, tasks)
    return outcomes, words(designs, gates, gate, groups, by_look, outcomes)


def _joined(parts):  # type: ignore[no-untyped-def]
    """Pieces of one task, as `seen_of` of all of them."""
    first = parts[0]
    evidence = [
        type(look)(
            look.num_items, look.is_sampled,
            tuple(np.concatenate([part.evidence[at].sums_DP[power] for part in parts]) for power in range(len(POWERS))),
            None if look.totals_DC is None else np.concatenate([part.evidence[at].totals_DC for part in parts]),
            look.sizes_C,
        )
        for at, look in enumerate(first.evidence)
    ]  # fmt: skip
    fixed = {"n", "padded_n"}
    lengths = [
        type(one)(*(
            getattr(one, name) if name in fixed else np.concatenate([getattr(part.at_lengths[at], name) for part in parts])
            for name in one.__dataclass_fields__
        ))
        for at, one in enumerate(first.at_lengths)
    ]  # fmt: skip
    return type(first)(evidence, lengths)


def words(
    designs: Sequence[Design], gates: GateRecipe, gate: SubgroupsGate, groups: Sequence[Group],
    by_look: Mapping[int, list[Floats]], outcomes: Sequence[Outcome],
) -> list[str]:  # fmt: skip
    """By the rules of `verdicts.subgroups`, at the last look of each task."""
    num_runs, alpha = len(outcomes), (1 - gates.level) / 2
    columns: list[tuple[NDArray[np.int64], Floats, Floats]] = []  # items, powers [power, runs], margin x items
    pooled = dict[int, list[int]]()
    for at, one in enumerate(designs):
        own = [group for group in groups if group.task == at]
        looks = np.array([outcome.asked[one.name][1] for outcome in outcomes])
        for number, group in enumerate(own):
            counts = np.array([int(group.inside[:n].sum()) for n in one.items])[looks]
            powers = np.stack([by_look[at][look][:, run, number] for run, look in enumerate(looks)], axis=1)
            if group.by == "language":
                pooled.setdefault(group.value, []).append(len(columns))
            columns.append((counts, powers, one.margin * counts))
    for members in pooled.values():
        if len(members) > 1:
            columns.append(tuple(sum(columns[at][part] for at in members) for part in range(3)))  # type: ignore[arg-type]
    looked_at = [column for column in columns if column[0].min() >= gate.min_items]
    p_loss, p_beyond, high, limits = [], [], [], []
    for counts, powers, weighted in looked_at:
        found, limit = MeanDifference.of_sums(counts, list(powers)), gate.max_margins * weighted / counts
        p_loss.append(found.p_at_most(0.0))
        p_beyond.append(np.array([float(p) for p in found.p_at_most(float(limit[0]))]))
        high.append(found.ends(gates.level)[1])
        limits.append(limit)
    seen = screen_subgroups(
        np.stack(p_loss, axis=1), np.stack(p_beyond, axis=1), np.stack(high, axis=1), np.stack(limits, axis=1),
        false_discovery=gate.false_discovery, alpha=alpha,
    )  # fmt: skip
    fails, is_open = seen.beyond.any(axis=1), seen.unbounded.any(axis=1)
    return ["FAIL" if fails[run] else "UNDERPOWERED" if is_open[run] else "PASS" for run in range(num_runs)]


# ------------------------------------------------------------------------------------------------ the table
def spread_evenly(designs: Sequence[Design], share: float) -> list[Lost]:
    return [Lost(one.name, share * one.margin) for one in designs]


def truths(designs: Sequence[Design]) -> Iterator[tuple[str, list[Lost]]]:
    yield "nothing lost", []
    yield "a quarter of every margin lost", spread_evenly(designs, 0.25)
    for loss in (0.09, 0.12, 0.15, 0.20):
        yield f"{100 * loss:.0f} points of tool calls in one language of three", [Lost("tools", loss, "language", 2)]
    yield "30 points of one MMLU-Pro subject of 14", [Lost("mmlu-pro", 0.30, "part", 3)]
    yield "60 points of one RULER kind of 13", [Lost("ruler", 0.60, "part", 3)]
    chinese = [Lost(task, 0.05, "language", 1) for task in ("arithmetic", "needle", "tools")]
    yield "5 points of one language in three tasks", chinese


def lines(num_runs: int, seed: int) -> Iterator[str]:
    suite, gates = shipped()
    designs = designs_of(suite, gates)
    gate = next(one for one in gates.gates if isinstance(one, SubgroupsGate))
    yield "# Subgroups under the verdict of suite `full`"
    yield ""
    yield f"`python benchmarks/verdicts/uneven/subgroups.py --runs {num_runs} --seed {seed}`"
    yield ""
    half, small = 50 / num_runs**0.5, 100 * (0.025 * 0.975 / num_runs) ** 0.5
    yield f"{num_runs} runs a row: a rate of 50 % has a standard error of {half:.1f} %, one of 2.5 % {small:.1f} %."
    yield f"{len(groups_of(designs))} subgroups of single tasks; false-discovery rate {100 * gate.false_discovery:g} %,"
    yield f"FAIL beyond {gate.max_margins:g} margins. Populations, looks and the other gates are those of"
    yield "[full_decides.md](../full_decides.md), items *even*."
    yield ""
    yield "| truth | PASS without the gate | PASS with it | FAIL with it | the gate alone: FAIL | UNDERPOWERED |"
    yield "|---|---|---|---|---|---|"
    for told, losses in truths(designs):
        outcomes, said = simulate(designs, gates, gate, losses, num_runs, seed)
        both = list(zip((one.overall for one in outcomes), said, strict=True))
        shares = [
            sum(other == "PASS" for other, _ in both), sum(set(pair) == {"PASS"} for pair in both),
            sum("FAIL" in pair for pair in both), said.count("FAIL"), said.count("UNDERPOWERED"),
        ]  # fmt: skip
        yield f"| {told} | {' | '.join(f'{100 * number / num_runs:.1f} %' for number in shares)} |"


if __name__ == "__main__":
    print_lines(lines, __doc__)
