"""The power of a suite: can it pass a candidate that lost nothing, and fail one that lost more than it may?

A suite that asks too few items calls nearly every candidate UNDERPOWERED, whatever its quality: hours are spent and nothing is
decided. From the items of each task, the looks at it, the margins, and what is assumed of two runs of the same model
(`known_tasks`), the verdicts of all score gates and of the claim about the whole are drawn (`statistics.joint`). Divergence,
acceptance, truncation, tokens per answer and probes are taken to pass, and every reply to come.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from assay.quantities import percent_plain, percent_short
from assay.recipes.gate import DivergenceGate, GateRecipe, ScoreGate
from assay.recipes.suite import Range, SuiteRecipe, SweTask, TaskBase
from assay.records.divergence import FEWEST_TEXTS
from assay.records.preflight.report import Check
from assay_evaluate.preflight.known_tasks import DISCORDANCE_RANGE, UNKNOWN_COUNT, num_items
from assay_evaluate.preflight.power_designs import (
    LARGEST_DISCORDANCE,
    Assumptions,
    GatedTask,
    design_of,
    gated_tasks,
    rules_of,
)
from assay_evaluate.statistics.joint.chances import Chances, Path, Rules, draw_path, resolve

ENOUGH = 0.5
"""Below it a suite says so: a lossless candidate is more likely not to pass than to pass."""
WANTED = 0.8
"""What the advice aims at, for all tasks together; the field's convention for a power."""
MOST_SAMPLES = 16
"""Replies to each item that are advised at most."""
MOST_STEPS = 24
"""Of the search for what would raise the power."""
LEAST_GAIN = 0.002
"""Of the chance by a step, or the step is not advised: it is noise, or the task is no obstacle."""
LARGEST_LOSS = 0.99
SCENARIOS = {
    "lossless": (1.0, 0.0), "steadier": (DISCORDANCE_RANGE[0], 0.0), "noisier": (DISCORDANCE_RANGE[1], 0.0),
    "at_margin": (1.0, 1.0), "at_twice": (1.0, 2.0),
}  # fmt: skip
"""Name -> (times the assumed discordances, times every margin that is lost)."""
NO_SCORE_GATE = "no limit on a score, so no candidate can pass"


@dataclass(frozen=True)
class Together:
    """Some of the gates together. lossless: chances of a candidate that loses nothing; steadier, noisier: the same if
    discordances are lower or higher than assumed. at_margin, at_twice: of one that loses every margin, or twice that."""

    lossless: Chances
    steadier: Chances
    noisier: Chances
    at_margin: Chances
    at_twice: Chances


class Alone(NamedTuple):
    """Of a candidate that loses at one task alone: chances that its gate is PASS, or FAIL, and that the candidate is PASS."""

    passes: float
    fails: float
    candidate_passes: float


@dataclass(frozen=True)
class SuitePower:
    """gated: the score gates. all_gates; required: the required gates alone, which decide where the reference cannot do the
    tasks of the others; None: all are required. alone_at_margin, alone_at_twice: of each gate on one that loses its margin, or
    twice that, and nothing else. unknown: gated tasks that are left out, for how many items they have is not
    known."""

    gated: tuple[GatedTask, ...]
    all_gates: Together
    required: Together | None
    alone_at_margin: tuple[Alone, ...]
    alone_at_twice: tuple[Alone, ...]
    unknown: tuple[str, ...] = ()

    @property
    def weak(self) -> list[tuple[float, GatedTask]]:
        """Gates that a lossless candidate is likely to miss where all must be passed together, the weakest first."""
        chances = list(zip(self.all_gates.lossless.passes_alone, self.gated, strict=True))
        needed = WANTED ** (1 / len(self.gated))
        return sorted((pair for pair in chances if pair[0] < needed), key=lambda pair: pair[0])


# ------------------------------------------------------------------------------------------------ the chances
def suite_power(suite: SuiteRecipe, gates: GateRecipe, assumptions: Assumptions | None = None) -> SuitePower | None:
    """The power of a suite under gates as they apply to it (`gates_on`). None: no gated task has a known number of items.

    ValueError without a score gate.
    """
    if not any(isinstance(gate, ScoreGate) for gate in gates.gates):
        raise ValueError(f"gates {gates.name} have {NO_SCORE_GATE}")
    gated, unknown = gated_tasks(suite, gates, assumptions or Assumptions())
    if not gated:
        return None
    rules = rules_of(gates)
    drawn: dict[str, list[Path]] = {}
    for name, (factor, margins) in SCENARIOS.items():
        scaled = [
            _assuming(gated_task, discordance=min(LARGEST_DISCORDANCE, factor * gated_task.design.assumed.discordance))
            for gated_task in gated
        ]
        drawn[name] = _paths(scaled, margins, rules)
    required = [at for at, gated_task in enumerate(gated) if gated_task.gate.required]
    return SuitePower(
        gated=tuple(gated),
        all_gates=Together(**{name: resolve(paths, rules) for name, paths in drawn.items()}),
        required=None
        if len(required) in {0, len(gated)}
        else Together(**{name: resolve([paths[at] for at in required], rules) for name, paths in drawn.items()}),
        alone_at_margin=tuple(_one_by_one(drawn["lossless"], drawn["at_margin"], rules)),
        alone_at_twice=tuple(_one_by_one(drawn["lossless"], drawn["at_twice"], rules)),
        unknown=tuple(unknown),
    )


def lossless_chances(suite: SuiteRecipe, gates: GateRecipe) -> tuple[Chances, Chances | None] | None:
    """(of all score gates, of the required ones alone) on a candidate that loses nothing. None: there is no score gate, or how
    many items some task has is not known."""
    gated, unknown = gated_tasks(suite, gates, Assumptions())
    if unknown or not gated:
        return None
    rules = rules_of(gates)
    paths = _paths(gated, 0.0, rules)
    required = [path for gated_task, path in zip(gated, paths, strict=True) if gated_task.gate.required]
    return resolve(paths, rules), None if len(required) in {0, len(paths)} else resolve(required, rules)


def _paths(gated: Sequence[GatedTask], margins: float, rules: Rules) -> list[Path]:
    """Of a candidate that loses so many times every margin."""
    losses = [min(margins * gated_task.design.margin, LARGEST_LOSS) for gated_task in gated]
    return [draw_path(gated_task.design, loss, rules, of=len(gated)) for gated_task, loss in zip(gated, losses, strict=True)]


def _assuming(gated: GatedTask, **changes: float) -> GatedTask:
    """The gate with something else assumed of its task."""
    design = dataclasses.replace(gated.design, assumed=gated.design.assumed._replace(**changes))
    return gated._replace(design=design)


def _one_by_one(lossless: Sequence[Path], lossy: Sequence[Path], rules: Rules) -> Iterator[Alone]:
    """Each gate on a candidate that loses at its task alone."""
    for at, path in enumerate(lossy):
        chances = resolve([*lossless[:at], path, *lossless[at + 1 :]], rules)
        yield Alone(chances.passes_alone[at], chances.fails_alone[at], chances.passes)


LASTING = (0.5, 0.75)
"""Shares of the discordance that are lasting, of a checkpoint that is no copy."""
CUT = 0.01
"""Share of the replies of both sides that are cut off."""


def lasting_passes(power: SuitePower, gates: GateRecipe) -> dict[str, float]:
    """Chance of a candidate that loses nothing on balance, where so much of the discordance is items that only one side gets
    right, whatever the reply: more replies do not average it out."""
    rules, passes = rules_of(gates), dict[str, float]()
    for share in LASTING:
        lasting = [_assuming(gated_task, noise=1 - share) for gated_task in power.gated]
        passes[f"{share:g}"] = resolve(_paths(lasting, 0.0, rules), rules).passes
    return passes


def cut_passes(power: SuitePower, gates: GateRecipe) -> float:
    """Chance of an identical copy of which, as of the reference, `CUT` of the replies to every task are cut off: a PASS must
    also hold with these right in the reference and wrong in the candidate, as if it had lost as much."""
    rules = rules_of(gates)
    return resolve([draw_path(gated_task.design, CUT, rules, of=len(power.gated)) for gated_task in power.gated], rules).passes


# ------------------------------------------------------------------------------------------------ in words
def check_power(suite: SuiteRecipe, gates: GateRecipe) -> Check:
    """PASS if an identical copy passes with a chance of one half or more; else UNKNOWN, with what would raise it.

    gates: as they apply to the suite. Never FAIL: a suite of little power measures, and its verdicts say UNDERPOWERED.
    """
    try:
        power = suite_power(suite, gates)
    except ValueError:
        detail = f"gates {gates.name} have {NO_SCORE_GATE}"
        return Check(check="power", subject=suite.name, outcome="UNKNOWN", detail=detail, remedy="write a score gate")
    if power is None or power.unknown:
        names = gated_tasks(suite, gates, Assumptions())[1]
        detail_unknown = f"the chance that an identical copy passes cannot be told: {', '.join(names)}: {UNKNOWN_COUNT}"
        return Check(check="power", subject=suite.name, outcome="UNKNOWN", detail=detail_unknown)
    every_gate, required = power.all_gates, power.required
    once, twice = percent_short(every_gate.at_margin.passes), percent_short(every_gate.at_twice.fails)
    detail = lossless_passes(
        every_gate.lossless.passes, None if required is None else required.lossless.passes,
        (every_gate.noisier.passes, every_gate.steadier.passes),
    )  # fmt: skip
    if power.weak and every_gate.lossless.passes < WANTED:
        detail += ": " + ", ".join(f"{gated_task.gate.task} {100 * chance:.0f} %" for chance, gated_task in power.weak)
    detail += (
        f"; otherwise it is UNDERPOWERED; one that loses every margin passes with {once}, one that loses twice every margin "
        f"fails with {twice}"
    )
    enough = every_gate.lossless.passes >= ENOUGH
    return Check(
        check="power", subject=suite.name, outcome="PASS" if enough else "UNKNOWN", detail=detail,
        remedy=None if enough else advice(power, gates),
    )  # fmt: skip


def check_num_texts(suite: SuiteRecipe, gates: GateRecipe) -> Check | None:
    """UNKNOWN: fewer texts are scored than a gate on divergence judges, so that every candidate will be NOT MEASURED."""
    spec = suite.divergence
    if spec is None:
        return None
    num_texts = len(spec.languages) * spec.num_documents + len(suite.tasks) * spec.suite_documents  # at most
    judged = [
        gate.metric for gate in gates.gates
        if isinstance(gate, DivergenceGate) and gate.texts != "held_out" and gate.decides == "pass_and_fail"
    ]  # fmt: skip
    if not judged or num_texts >= FEWEST_TEXTS:
        return None
    return Check(
        check="power", subject=suite.name, outcome="UNKNOWN",
        detail=f"divergence {judged[0]}: {num_texts} texts are scored, and fewer than {FEWEST_TEXTS} are never judged: no "
        "candidate can pass",
        remedy=f"set num_documents of divergence to {FEWEST_TEXTS}",
    )  # fmt: skip


def lossless_passes(passes: float, required: float | None, ends: tuple[float, float]) -> str:
    """`an identical copy passes with 15.5 % (99.4 % if the reference cannot do the tasks whose gates are not required), 11.0 %
    to 21.3 % if replies are less or more steady than assumed`."""
    text = f"an identical copy passes with {percent_short(passes)}"
    if required is not None:
        text += f" ({percent_short(required)} if the reference cannot do the tasks whose gates are not required)"
    low, high = map(percent_short, ends)
    return f"{text}, {low} to {high} if replies are less or more steady than assumed"


# ------------------------------------------------------------------------------------------------ what would raise it
def advice(power: SuitePower, gates: GateRecipe, assumptions: Assumptions | None = None) -> str | None:
    """What would let a lossless candidate pass with `WANTED`: more items or replies of the weakest tasks, step by step.

    None: it does.
    """
    chances = power.all_gates.lossless
    if chances.passes >= WANTED:
        return None
    rules, factors = rules_of(gates), dict.fromkeys(range(len(power.gated)), 1)
    current, paths = list(power.gated), _paths(power.gated, 0.0, rules)
    stuck, done = set[int](), set[int]()
    for _ in range(MOST_STEPS):
        if chances.passes >= WANTED or (at := _weakest(chances, paths, rules, stuck | done)) is None:
            break
        gated, factor = power.gated[at], factors[at] + max(1, factors[at] // 2)
        task = more(gated.task, factor)
        design = None if task is None else design_of(task, gated.gate, gates, assumptions or Assumptions())
        if task is None or design is None:
            stuck.add(at)
            continue
        path = draw_path(design, 0.0, rules, of=len(current))
        then = resolve([*paths[:at], path, *paths[at + 1 :]], rules)
        was_enough = rules.whole is not None and paths[at].design.num_items >= rules.min_items
        if was_enough and then.passes < chances.passes + LEAST_GAIN:
            done.add(at)
            continue
        factors[at], current[at], paths[at], chances = factor, gated._replace(task=task, design=design), path, then
    ways = [_way(power.gated[at].task, current[at].task) for at, factor in factors.items() if factor > 1]
    text = f"{', '.join(ways)}: it would pass with {percent_short(chances.passes)}" if ways else ""
    if chances.passes < WANTED and stuck:
        margins = {power.gated[at].gate.task: power.gated[at].gate.max_drop for at in sorted(stuck)}
        wide = ", ".join(f"{name} (now {percent_plain(margin)})" for name, margin in margins.items())
        text += f"{'; and ' if text else ''}more items, or a wider margin, for {wide}"
    return text or None


def _weakest(chances: Chances, paths: Sequence[Path], rules: Rules, left_out: set[int]) -> int | None:
    """The gate that stands most against a PASS: of single gates the one passed least often, of the whole the one that spreads
    most in units of its margin; one with too few items before all others."""
    left = [at for at in range(len(paths)) if at not in left_out]
    if rules.whole is None:
        needed = WANTED ** (1 / len(paths))
        return min(
            (at for at in left if chances.passes_alone[at] < needed), key=lambda at: chances.passes_alone[at], default=None
        )
    few = (at for at in left if paths[at].design.num_items < rules.min_items)
    return next(few, max(left, key=lambda at: chances.spreads[at], default=None))


def more(task: TaskBase, factor: int) -> TaskBase | None:
    """The task with so many times its items, or, where a data set has no more, its replies to each. None: it cannot grow."""
    if isinstance(task, SweTask):
        return _within(task.model_copy(update={"num_repeats": task.num_repeats * factor}))

    def longer(times: int) -> TaskBase:
        assert task.items_field is not None and task.most_items is not None, "it has a number of items"
        most = task.most_items * times
        items = Range(min=task.items.min, max=most) if isinstance(task.items, Range) else most
        return task.model_copy(update={task.items_field: items})

    if task.items is not None and (num_items(longer(factor)) or 0) > (num_items(longer(factor - 1)) or 0):
        return longer(factor)
    if task.temperature == 0:
        return None
    samples = task.num_samples
    increased = Range(min=samples.min, max=samples.max * factor) if isinstance(samples, Range) else samples * factor
    return _within(task.model_copy(update={"num_samples": increased}))


def _within(task: TaskBase) -> TaskBase | None:
    replies = task.num_repeats if isinstance(task, SweTask) else task.most_samples
    return task if replies <= MOST_SAMPLES else None


def _way(before: TaskBase, after: TaskBase) -> str:
    """What is different: `4 replies to each item of gpqa-diamond`, `2 times the items of tools`."""
    if isinstance(after, SweTask):
        return f"{after.num_repeats} trajectories of each instance of {after.name} (num_repeats)"
    if after.most_samples > before.most_samples:
        at_most = "up to " if isinstance(after.num_samples, Range) else ""
        return f"{at_most}{after.most_samples} replies to each item of {after.name} (num_samples)"
    items, items_before = num_items(after), num_items(before)
    assert items is not None and items_before is not None, "its design was made"
    return (
        f"{items / items_before:g} times the items of {after.name}"
        if items % items_before == 0
        else f"{items} items of {after.name}"
    )
