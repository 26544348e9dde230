"""From the looks at every task to the verdicts of every run: the rules of the gates, over arrays.

As in a run: each look has the level that alpha spending gives it (`sequential`); a task passes at the level of one test, fails
by Holm over all tasks, and is asked again while it does neither, has looks left, and can still change the overall verdict. The
claim about the whole takes the tasks' intervals as they then are (`proportions`). Tasks are independent: they ask different
questions, and a true loss is fixed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from assay_evaluate.statistics.decisions import margin_p
from assay_evaluate.statistics.joint.drawn import Bools, Draws, Evidence, Floats, LookEvidence, ScoreDesign
from assay_evaluate.statistics.proportions import half_width
from assay_evaluate.statistics.sequential import Spending, nominal_levels

NUM_DRAWS = 4_000
"""The standard error of a chance is 0.8 points at most."""
SEED = 1
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Rules:
    """Of the gates. whole: (limit of the mean use of the margins, margins that a task may lose); None: each task by itself."""

    level: float = 0.95
    min_items: int = 30
    holm: bool = True
    spending: Spending = field(default_factory=Spending)
    fail_spending: Spending = field(default_factory=Spending)
    """Of claims of equivalence `spending` is for both."""
    whole: tuple[float, float] | None = None
    every_task: bool = False
    """Ask until each is decided by itself, also with `whole`."""
    level_step: float = 0.2
    """Growths of information from look to look are rounded to so much of their logarithm, one step at least, so that few levels
    are computed. They differ by a few percent of themselves."""

    @property
    def alpha(self) -> float:
        return (1 - self.level) / 2


@dataclass(frozen=True)
class Chances:
    """Chances of the overall verdict, of the claim about the whole and of each task's; the rest is UNDERPOWERED.

    passes_alone, fails_alone: of each task, in the order of the paths; FAIL is Holm-adjusted like the overall verdict. stops:
    of each task the chances that its last look is that of the number.
    """

    passes: float
    fails: float
    passes_alone: tuple[float, ...]
    fails_alone: tuple[float, ...]
    whole_passes: float | None
    stops: tuple[tuple[float, ...], ...]
    spreads: tuple[float, ...]
    """Standard deviation of each task's difference when it stops, in units of its margin."""


def chances_of(
    designs: Sequence[ScoreDesign], losses: Sequence[float], rules: Rules, *, num_draws: int = NUM_DRAWS, seed: int = SEED
) -> Chances:
    """Chances of the verdicts on a candidate that truly loses `losses`, one for each design. The same seed, the same result.

    ValueError without designs, or for a loss outside (-1, 1).
    """
    drawn = zip(designs, losses, strict=True)
    paths = [draw_path(design, loss, rules, of=len(designs), num_draws=num_draws, seed=seed) for design, loss in drawn]
    return resolve(paths, rules)


def draw_path(
    design: ScoreDesign, loss: float, rules: Rules, *, of: int = 1, num_draws: int = NUM_DRAWS, seed: int = SEED
) -> Path:  # fmt: skip
    """One of at most `of` tasks. Tasks of other names are drawn independently of it."""
    draws = Draws(design, loss, num_draws, np.random.default_rng([seed, *design.task.encode()]))
    return Path(design, rules, of, [draws.see(number) for number in range(len(design.looks))])


# ------------------------------------------------------------------------------------------------ one look
def _levels(
    looks: Sequence[LookEvidence], alpha: float, where: Bools, spending: Spending, level_step: float
) -> Floats:  # fmt: skip
    """One-sided level at which the last of these looks decides, of every run; 0 where none was asked for."""
    times = [look.design.share for look in looks]
    level_D = np.zeros(len(where))
    if len(looks) == 1:
        return np.where(where, nominal_levels(times, [1.0], alpha, spending)[0], 0.0)
    information = np.stack([look.information[where] for look in looks])
    steps = np.maximum(np.round(np.diff(np.log(information), axis=0) / level_step), 1).astype(np.int64).T
    if len(steps):
        different, index = np.unique(steps, axis=0, return_inverse=True)
        levels = [
            nominal_levels(times, np.exp(level_step * np.cumsum([0, *growth])).tolist(), alpha, spending)[-1]
            for growth in different
        ]
        level_D[where] = np.array(levels)[index.ravel()]
    return level_D


@dataclass(frozen=True)
class LookVerdicts:
    """What a gate says of every run at a look, from all looks so far.

    strength: the largest number of tasks over which a FAIL would hold if it were the strongest of them; 0: not even alone.
    low, high: of the interval of the drop.
    """

    passed: Bools
    strength: Ints
    drop: Floats
    low: Floats
    high: Floats


FIELDS = tuple(field.name for field in dataclasses.fields(LookVerdicts))


class Path:
    """One task of every run, from look to look, under rules for `of` tasks or fewer. Only what is asked for is computed."""

    def __init__(self, design: ScoreDesign, rules: Rules, of: int, evidence: Sequence[Evidence]) -> None:
        """evidence: at every look."""
        self.design, self.num_draws = design, len(evidence[0].drop)
        self._rules, self._of, self._evidence = rules, of if rules.holm else 1, evidence
        self._looks = list[LookEvidence]()
        self._known = [np.zeros(self.num_draws, dtype=np.bool_) for _ in evidence]
        self._words = [
            LookVerdicts(*(np.zeros(self.num_draws, dtype=kind) for kind in (np.bool_, np.int64, *[np.float64] * 3)))
            for _ in evidence
        ]

    def at(self, number: Ints) -> LookVerdicts:
        """Of each run at the look that it has come to."""
        for look in range(int(number.max()) + 1):
            self._come_to(look, (number >= look) & ~self._known[look])
        runs = np.arange(self.num_draws)
        return LookVerdicts(*(np.stack([getattr(word, name) for word in self._words])[number, runs] for name in FIELDS))

    def _come_to(self, number: int, where: Bools) -> None:
        """The words of some runs at a look; those of the look before are known."""
        if not where.any():
            return
        rules, evidence = self._rules, self._evidence[number]
        if number == len(self._looks):
            p_pass, p_fail = margin_p(evidence, self.design.margin, self.design.claim)
            self._looks.append(LookEvidence(self.design.looks[number], p_pass, p_fail, evidence.information))
        looks = self._looks[: number + 1]
        last = looks[-1]
        for_fail = rules.spending if self.design.claim == "equivalent" else rules.fail_spending
        level = _levels(looks, rules.alpha, where, rules.spending, rules.level_step)
        passed = (last.p_pass < level) & (last.design.num_items >= rules.min_items)
        strength = np.zeros(self.num_draws, dtype=np.int64)
        for step in range(1, self._of + 1):
            likely = where & (last.p_fail < rules.alpha / step)
            if not likely.any():
                break
            strength[likely & (last.p_fail < _levels(looks, rules.alpha / step, likely, for_fail, rules.level_step))] = step
        low, high = -np.ones(self.num_draws), np.ones(self.num_draws)
        if rules.whole is not None:
            fail_level = _levels(looks, rules.alpha, where, for_fail, rules.level_step)
            low, high = (
                evidence.ends(np.where(where, 1 - 2 * tail, rules.level))[end] for end, tail in enumerate((fail_level, level))
            )
        if number:  # an interval is that of the last look within those of the looks before (`verdicts.scores`)
            before = self._words[number - 1]
            passed, strength = before.passed | passed, np.maximum(before.strength, strength)
            low, high = np.maximum(before.low, low), np.minimum(before.high, high)
        for name, new in zip(FIELDS, (passed, strength, evidence.drop, low, high), strict=True):
            getattr(self._words[number], name)[where] = new[where]
        self._known[number] |= where


def resolve(paths: Sequence[Path], rules: Rules) -> Chances:
    """The verdicts of runs whose tasks were drawn. ValueError without any."""
    if not paths:
        raise ValueError("no design: without a score gate nothing passes")
    at = [np.zeros(path.num_draws, dtype=np.int64) for path in paths]
    verdicts = judge_runs(paths, at, rules)
    for number in range(1, max(len(path.design.looks) for path in paths)):
        for task, (path, asked) in enumerate(zip(paths, runs_asked_further(paths, verdicts, rules), strict=True)):
            if number < len(path.design.looks):
                at[task][asked & (at[task] == number - 1)] = number
        verdicts = judge_runs(paths, at, rules)
    drops = [word.drop for word in verdicts.words]
    return Chances(
        passes=float(verdicts.passes.mean()),
        fails=float(verdicts.fails.mean()),
        passes_alone=tuple(float(share) for share in verdicts.passed.mean(axis=1)),
        fails_alone=tuple(float(share) for share in verdicts.failed.mean(axis=1)),
        whole_passes=None if verdicts.whole is None else float(verdicts.whole.passes.mean()),
        stops=tuple(
            tuple(float((looks == number).mean()) for number in range(len(path.design.looks)))
            for path, looks in zip(paths, at, strict=True)
        ),
        spreads=tuple(float(drop.std()) / path.design.margin for path, drop in zip(paths, drops, strict=True)),
    )


@dataclass(frozen=True)
class WholeVerdicts:
    """Of the claim about the whole, in every run. within: of each task, whether it lost surely less than the most."""

    passes: Bools
    fails: Bools
    mean_is_shown: Bools
    within: Bools


@dataclass(frozen=True)
class RunVerdicts:
    """words, passed, failed: of each task, in every run. passes, fails: the overall verdict."""

    words: list[LookVerdicts]
    passed: Bools
    failed: Bools
    passes: Bools
    fails: Bools
    whole: WholeVerdicts | None


def judge_runs(paths: Sequence[Path], at: Sequence[Ints], rules: Rules) -> RunVerdicts:
    """All runs, each task at the look that it has come to."""
    words = [path.at(number) for path, number in zip(paths, at, strict=True)]
    failed = _failed(np.stack([word.strength for word in words]), holm=rules.holm)
    passed = np.stack([word.passed for word in words]) & ~failed
    if rules.whole is None:
        return RunVerdicts(words, passed, failed, np.all(passed, axis=0), np.any(failed, axis=0), None)
    items = [np.array([look.num_items for look in path.design.looks]) for path in paths]
    enough = np.min([count[number] for count, number in zip(items, at, strict=True)], axis=0) >= rules.min_items
    whole = _whole(words, [path.design.margin for path in paths], enough, rules.whole)
    fails = np.any([*failed, whole.fails], axis=0)
    # A task that is undecided alone has no say then, but for a claim of equivalence.
    have_say = [ok for path, ok in zip(paths, passed, strict=True) if path.design.claim == "equivalent"]
    return RunVerdicts(words, passed, failed, np.all([whole.passes, ~fails, *have_say], axis=0), fails, whole)


def _whole(
    words: Sequence[LookVerdicts], margins: Sequence[float], enough: Bools, limits: tuple[float, float]
) -> WholeVerdicts:
    """As `verdicts.whole` has it."""
    most_mean, most_of_task = limits
    weights = [1 / len(words) / margin for margin in margins]
    drops = [word.drop for word in words]
    # An interval contains its value, whatever earlier looks had.
    lows, highs = [np.minimum(word.low, word.drop) for word in words], [np.maximum(word.high, word.drop) for word in words]
    mean = np.sum([weight * drop for weight, drop in zip(weights, drops, strict=True)], axis=0)
    below = half_width([weight * (drop - low) for weight, drop, low in zip(weights, drops, lows, strict=True)])
    above = half_width([weight * (high - drop) for weight, drop, high in zip(weights, drops, highs, strict=True)])
    within = np.stack([high / margin < most_of_task for high, margin in zip(highs, margins, strict=True)])
    fails, is_shown = np.asarray(mean - below > most_mean), np.asarray(mean + above < most_mean)
    return WholeVerdicts(is_shown & within.all(axis=0) & enough & ~fails, fails, is_shown, within)


def runs_asked_further(paths: Sequence[Path], verdicts: RunVerdicts, rules: Rules) -> Bools:
    """Of each task the runs in which it is worth another look (`verdicts.whole`)."""
    whole, undecided = verdicts.whole, ~verdicts.passed & ~verdicts.failed
    if whole is None:
        return undecided
    beyond = np.stack([word.drop > path.design.margin for path, word in zip(paths, verdicts.words, strict=True)])
    both_ways = np.array([[path.design.claim == "equivalent"] for path in paths])
    has_say = ~whole.within | beyond | both_ways
    return worth_another_look(undecided, has_say, verdicts.fails, whole.mean_is_shown, every_task=rules.every_task)


def _failed(strength_TD: Ints, *, holm: bool) -> Bools:
    """`decisions.holm`: the n-th strongest of m FAILs if it holds over m - n tasks, as all stronger ones do."""
    if not holm:
        return strength_TD > 0
    order = np.argsort(-strength_TD, axis=0, kind="stable")
    needed = np.arange(len(strength_TD), 0, -1)[:, None]
    holds = np.logical_and.accumulate(np.take_along_axis(strength_TD, order, axis=0) >= needed, axis=0)
    failed = np.empty_like(holds)
    np.put_along_axis(failed, order, holds, axis=0)
    return failed


def expected_value(stops: Sequence[float], amounts: Iterable[float]) -> float:
    """Mean over the runs of something that is known of each look."""
    return math.fsum(chance * amount for chance, amount in zip(stops, amounts, strict=True))


def worth_another_look(
    undecided_TD: Bools, has_say_TD: Bools, is_over_D: Bools, mean_is_shown_D: Bools, *, every_task: bool
) -> Bools:
    """Which tasks [T, D] of D runs are asked further under a claim about the whole: one rule for gates and for drawn runs;
    `verdicts.whole` says why it is this one.

    has_say: tasks that can change the overall verdict by themselves, were the mean shown. is_over: a task or the whole is
    FAIL. every_task: ask until each is decided.
    """
    mean_is_open_D = ~is_over_D & ~mean_is_shown_D
    by_themselves_TD = undecided_TD if every_task else undecided_TD & has_say_TD & ~is_over_D
    return np.asarray(mean_is_open_D | by_themselves_TD)
