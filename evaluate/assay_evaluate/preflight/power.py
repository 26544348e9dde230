"""The power of a suite: can it pass a candidate that lost nothing, and fail one that lost more than it may?

A suite that asks too few items calls nearly every candidate UNDERPOWERED, whatever its quality: hours are spent and nothing is
decided. From the items of each task, the margins, and what is assumed of the discordance between two runs of the same model
(`known_tasks`), the decision rule of the verdicts is simulated (`statistics.joint_power`). Score gates only: divergence,
acceptance, truncation and probes are taken to pass, and every reply to come.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from assay.quantities import percent_plain, percent_short
from assay.recipes.gate import GateRecipe, ScoreGate
from assay.recipes.suite import LmEvalTask, SuiteRecipe, SweTask, TaskBase, ToolsTask
from assay.records.preflight.report import Check
from assay_evaluate.preflight.known_tasks import DISCORDANCE_RANGE, GENERATED_DISCORDANCE, LM_EVAL, UNKNOWN_DISCORDANCE
from assay_evaluate.preflight.suite_items import UNKNOWN_COUNT, cluster_sizes, num_items, replies_each
from assay_evaluate.statistics.joint_power import Chances, ScoreDesign, chances

ENOUGH = 0.5
"""Below it a suite says so: a lossless candidate is more likely not to pass than to pass."""
WANTED = 0.8
"""What the advice aims at, for all tasks together; the field's convention for a power."""
MOST_SAMPLES = 16
"""Replies to each item that are advised at most."""


@dataclass(frozen=True)
class SuitePower:
    """designs: one for each score gate. lossless: chances of a candidate that loses nothing. passes_range: of its PASS, if
    discordances are higher or lower than assumed. required_passes: by the required gates alone, which decide where the
    reference cannot do the tasks of the others; None: all are required. at_margin, at_twice: of one that loses every margin,
    or twice that."""

    designs: tuple[ScoreDesign, ...]
    lossless: Chances
    passes_range: tuple[float, float]
    required_passes: float | None
    at_margin: Chances
    at_twice: Chances

    @property
    def weak(self) -> list[tuple[float, ScoreDesign]]:
        """Gates that a lossless candidate is likely to miss where all must be passed together, the weakest first."""
        found = [(alone, one) for alone, one in zip(self.lossless.passes_alone, self.designs, strict=True)]
        return sorted((pair for pair in found if pair[0] < _wanted_alone(self.designs)), key=lambda pair: pair[0])


def suite_power(suite: SuiteRecipe, gates: GateRecipe) -> SuitePower | list[str]:
    """The power of a suite under gates as they apply to it (`gates_on`), or the names of gated tasks of unknown length.

    ValueError without a score gate.
    """
    designs, unknown = score_designs(suite, gates)
    if unknown:
        return unknown
    lossless, fewer, more = (_chances(_scaled(designs, factor), gates, 0.0) for factor in (1.0, *DISCORDANCE_RANGE))
    return SuitePower(
        designs=designs,
        lossless=lossless,
        passes_range=(more.passes, fewer.passes),
        required_passes=_required_passes(designs, gates),
        at_margin=_chances(designs, gates, 1.0),
        at_twice=_chances(designs, gates, 2.0),
    )


def _required_passes(designs: Sequence[ScoreDesign], gates: GateRecipe) -> float | None:
    optional = {gate.task for gate in gates.gates if isinstance(gate, ScoreGate) and not gate.required}
    required = [one for one in designs if one.task not in optional]
    return None if len(required) in {0, len(designs)} else _chances(required, gates, 0.0).passes


def score_designs(suite: SuiteRecipe, gates: GateRecipe) -> tuple[tuple[ScoreDesign, ...], list[str]]:
    """(one design for each score gate whose task has a known number of items, names of the other tasks)."""
    tasks = {task.name: task for task in suite.tasks}
    designs, unknown = [], []
    for gate in gates.gates:
        if not isinstance(gate, ScoreGate) or gate.task not in tasks:
            continue
        task = tasks[gate.task]
        count = num_items(task)
        if count is None:
            unknown.append(gate.task)
            continue
        clusters = cluster_sizes(task) if isinstance(task, SweTask) else None
        designs.append(
            ScoreDesign(
                gate.task, count, gate.max_drop, discordance_of(task), replies_each(task), gate.claim,
                clusters if clusters is not None and len(clusters) > 1 else (),
            )
        )  # fmt: skip
    return tuple(designs), unknown


def discordance_of(task: TaskBase) -> float:
    """Assumed share of items on which two runs of one model differ; of several tasks behind one name, the mean over items."""
    if not isinstance(task, LmEvalTask):
        return GENERATED_DISCORDANCE[str(getattr(task, "kind"))]  # noqa: B009  each kind of task has one
    known = [LM_EVAL[name] for name in task.tasks if name in LM_EVAL]
    total = sum(sum(one.sizes) for one in known)
    return sum(sum(one.sizes) * one.discordance for one in known) / total if total else UNKNOWN_DISCORDANCE


def _scaled(designs: Sequence[ScoreDesign], factor: float) -> tuple[ScoreDesign, ...]:
    return tuple(dataclasses.replace(one, discordance=min(1.0, one.discordance * factor)) for one in designs)


def _chances(designs: Sequence[ScoreDesign], gates: GateRecipe, margins: float) -> Chances:
    """Of a candidate that loses so many times every margin."""
    losses = [min(margins * one.margin, 0.99) for one in designs]
    return chances(designs, losses, level=gates.level, min_items=gates.min_items, holm=gates.adjust == "holm")


# ------------------------------------------------------------------------------------------------ the check
def check_power(suite: SuiteRecipe, gates: GateRecipe) -> Check:
    """PASS if a lossless candidate passes with a chance of one half or more; else UNKNOWN, with what would raise it.

    gates: as they apply to the suite. Never FAIL: a suite of little power measures, and its verdicts say UNDERPOWERED.
    """
    if not any(isinstance(gate, ScoreGate) for gate in gates.gates):
        why = f"gates {gates.name} have no limit on a score, so no candidate can pass"
        return Check(check="power", subject=suite.name, outcome="UNKNOWN", detail=why, remedy="write a score gate")
    found = suite_power(suite, gates)
    if isinstance(found, list):
        why = f"the chance that a lossless candidate passes cannot be told: {', '.join(found)}: {UNKNOWN_COUNT}"
        return Check(check="power", subject=suite.name, outcome="UNKNOWN", detail=why)
    enough = found.lossless.passes >= ENOUGH
    return Check(
        check="power", subject=suite.name, outcome="PASS" if enough else "UNKNOWN", detail=_detail(found),
        remedy=None if enough else advice(found, suite, gates),
    )  # fmt: skip


def _detail(found: SuitePower) -> str:
    low, high = (percent_short(share) for share in found.passes_range)
    text = f"a lossless candidate passes with {percent_short(found.lossless.passes)}"
    if found.required_passes is not None:
        alone = percent_short(found.required_passes)
        text += f" ({alone} if the reference cannot do the tasks whose gates are not required)"
    text += f", {low} to {high} if replies are less or more steady than assumed"
    if found.weak:
        text += ": " + ", ".join(f"{one.task} {100 * chance:.0f} %" for chance, one in found.weak)
    once, twice = percent_short(found.at_margin.passes), percent_short(found.at_twice.fails)
    return (
        f"{text}; otherwise it is UNDERPOWERED; one that loses every margin passes with {once}, one that loses twice every "
        f"margin fails with {twice}"
    )


def advice(found: SuitePower, suite: SuiteRecipe, gates: GateRecipe) -> str:
    """What would let a lossless candidate pass with `WANTED`: more replies or items of the weak tasks."""
    tasks = {task.name: task for task in suite.tasks}
    improved = {one.task: _improved(one, tasks[one.task], gates, _wanted_alone(found.designs)) for _, one in found.weak}
    stuck = [name for name, better in improved.items() if better is None]
    ways = [_way(one, better) for _, one in found.weak if (better := improved[one.task]) is not None]
    text = ""
    if ways:
        better_designs = [improved.get(one.task) or one for one in found.designs]
        chance = _chances(better_designs, gates, 0.0).passes
        text = f"{', '.join(ways)}: it would pass with {percent_short(chance)}"
    if stuck:
        margins = {one.task: one.margin for one in found.designs}
        wide = ", ".join(f"{name} (now {percent_plain(margins[name])})" for name in stuck)
        text += f"{'; and ' if text else ''}more items, or a wider margin, for {wide}"
    return text


def _improved(one: ScoreDesign, task: TaskBase, gates: GateRecipe, wanted: float) -> ScoreDesign | None:
    """The smallest number of replies, or of items where greedy replies or tools are asked, that makes a gate strong enough."""
    for factor in range(2, MOST_SAMPLES + 1):
        better = (
            dataclasses.replace(one, num_samples=one.num_samples * factor)
            if can_repeat(task)
            else dataclasses.replace(one, num_items=one.num_items * factor)
        )
        if not can_repeat(task) and isinstance(task, LmEvalTask | SweTask):
            return None
        if _chances([better], gates, 0.0).passes >= wanted:
            return better
    return None


def can_repeat(task: TaskBase) -> bool:
    """Whether several replies to an item may differ, and a suite may ask for them."""
    return isinstance(task, SweTask) or (task.temperature > 0 and not isinstance(task, ToolsTask))


def _way(one: ScoreDesign, better: ScoreDesign) -> str:
    if better.num_items > one.num_items:
        return f"{better.num_items // one.num_items} times the items of {one.task}"
    return f"{better.num_samples} replies to each item of {one.task}"


def _wanted_alone(designs: Sequence[ScoreDesign]) -> float:
    """Chance of each gate so that all of them together have `WANTED`."""
    return float(WANTED ** (1 / len(designs)))
