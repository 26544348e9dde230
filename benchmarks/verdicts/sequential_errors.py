"""How often a task that is asked in rounds is decided wrongly, how often rightly, and what it costs.

    python benchmarks/verdicts/sequential_errors.py [--draws 2000] [--seed 1]

Draws items and replies from known populations whose loss is exactly the margin (any word is then an error), or nothing (PASS
is right), looks as `recipes/gates` plans it by default, and counts. Decisions are those of the gates: a look decides PASS where
the interval of the drop at the look's level lies below the margin, FAIL where it lies above it. No model and no server: a
quarter of an hour on one core. The committed result is sequential_errors.md beside this file, and the program prints it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from assay.recipes.gate import Stopping
from assay.recipes.suite import ArithmeticTask, LmEvalTask, Range, TaskBase
from assay.records.base import Interval
from assay_evaluate.statistics import discordant_counts, graded_difference, paired_difference
from assay_evaluate.statistics.sequential import Spending, nominal_levels
from assay_evaluate.tasks.looks import Look, planned_looks, planned_shares

Floats = NDArray[np.float64]
Kind = Literal["even", "broken", "sure"]
ALPHA = 0.025
KINDS = {
    "even": "chances of a right reply spread evenly over items (beta), every item loses the same part of its chance",
    "broken": "most items nearly always right or wrong (beta, U-shaped); a few items are lost wholly, the others not at all",
    "sure": "items are right in 98 % or in 2 % of the replies; a few are lost wholly",
}


@dataclass(frozen=True)
class Setting:
    """A task like those of suite `full`. items: at the first look, and at the last."""

    name: str
    items: tuple[int, int]
    margin: float
    accuracy: float
    task: TaskBase


def repeats(most: int) -> TaskBase:
    return ArithmeticTask(
        kind="arithmetic", name="t", num_items=1, max_tokens=9, temperature=1, num_samples=Range(min=1, max=most)
    )


def fresh(first: int, last: int, temperature: float) -> TaskBase:
    return LmEvalTask(
        kind="lm_eval", name="t", tasks=("t",), max_tokens=9, temperature=temperature, limit=Range(min=first, max=last)
    )


SETTINGS = (
    Setting("30 problems (one AIME), margin 15", (30, 30), 0.15, 0.85, repeats(5)),
    Setting("60 problems (two AIME), margin 15", (60, 60), 0.15, 0.85, repeats(5)),
    Setting("198 questions (GPQA), margin 5", (198, 198), 0.05, 0.75, repeats(5)),
    Setting("541 prompts (IFEval), margin 3", (541, 541), 0.03, 0.88, repeats(3)),
    Setting("200 to 800 new items, sampled, margin 5", (200, 800), 0.05, 0.8, fresh(200, 800, 1.0)),
    Setting("200 to 800 new items, greedy, margin 5", (200, 800), 0.05, 0.8, fresh(200, 800, 0.0)),
)


# ------------------------------------------------------------------------------------------------ populations
def draw_items(rng: np.random.Generator, n: int, kind: Kind, accuracy: float, loss: float) -> tuple[Floats, Floats]:
    """Chance of a right reply on each of `n` items: reference, candidate; `loss` apart on average over the population."""
    if kind == "even":
        ours = rng.beta(2 * accuracy, 2 * (1 - accuracy), n)
        return ours, ours * (1 - loss / accuracy)
    if kind == "broken":
        ours, mean = rng.beta(0.5 * accuracy, 0.5 * (1 - accuracy), n), accuracy
    else:
        ours, mean = np.where(rng.random(n) < accuracy, 0.98, 0.02), 0.98 * accuracy + 0.02 * (1 - accuracy)
    return ours, np.where(rng.random(n) < loss / mean, 0.0, ours)


def replies(rng: np.random.Generator, chances: Floats, num_samples: int) -> NDArray[np.bool_]:
    return rng.random((len(chances), num_samples)) < chances[:, None]


# ------------------------------------------------------------------------------------------------ one task
def seen_at(ours: NDArray[np.bool_], theirs: NDArray[np.bool_], look: Look) -> tuple[Floats, Floats]:
    """Shares of right replies to the items of a look."""
    n = look.limit or len(ours)
    return ours[:n, : look.reference_samples].mean(axis=1), theirs[:n, : look.candidate_samples].mean(axis=1)


def information(differences: Floats) -> float:
    """As `Pairs.variance` has it."""
    n = len(differences) + 2
    return float(n / ((differences @ differences + 1) / n - (differences.sum() / n) ** 2))


def interval(ours: Floats, theirs: Floats, look: Look, level: float) -> Interval:
    """As `Pairs.drop` has it: exact of one reply each, else the bootstrap over items."""
    if look.reference_samples == look.candidate_samples == 1:
        return paired_difference(*discordant_counts(list(ours > 0), list(theirs > 0)), len(ours), level)
    return graded_difference(ours, theirs, level=level)


def decide(
    ours: NDArray[np.bool_], theirs: NDArray[np.bool_], looks: tuple[Look, ...], margin: float, spending: Spending
) -> tuple[str, int]:
    """(PASS, FAIL or UNDERPOWERED, looks taken)."""
    shares, informations = planned_shares(looks), list[float]()
    for number, look in enumerate(looks):
        before, after = seen_at(ours, theirs, look)
        informations.append(information(before - after))
        level = nominal_levels(shares[: number + 1], informations, ALPHA, spending)[-1]
        drop = interval(before, after, look, 1 - 2 * level)
        if drop.high < margin or drop.low > margin:
            return ("PASS" if drop.high < margin else "FAIL"), number + 1
    return "UNDERPOWERED", len(looks)


@dataclass(frozen=True)
class Counted:
    passed: float
    failed: float
    mean_replies: float
    """Of the candidate, as a share of those at the last look."""


def simulate(setting: Setting, kind: Kind, loss: float, stopping: Stopping, num_draws: int, seed: int) -> Counted:
    rng = np.random.default_rng(seed)
    looks = planned_looks(setting.task, stopping)
    spending = Spending(stopping.spending, stopping.gamma)
    words, taken = [], []
    for _ in range(num_draws):
        chances = draw_items(rng, setting.items[1], kind, setting.accuracy, loss)
        ours = replies(rng, chances[0], looks[-1].reference_samples)
        theirs = replies(rng, chances[1], looks[-1].candidate_samples)
        word, number = decide(ours, theirs, looks, setting.margin, spending)
        words.append(word)
        taken.append(looks[number - 1])
    most = looks[-1].candidate_samples * (looks[-1].limit or 1)
    mean = float(np.mean([look.candidate_samples * (look.limit or 1) for look in taken])) / most
    return Counted(words.count("PASS") / num_draws, words.count("FAIL") / num_draws, mean)


# ------------------------------------------------------------------------------------------------ the table
def lines(num_draws: int, seed: int) -> Iterator[str]:
    error = 100 * (ALPHA * (1 - ALPHA) / num_draws) ** 0.5
    yield "# Errors and cost of tasks that are asked in rounds"
    yield ""
    yield f"`python benchmarks/verdicts/sequential_errors.py --draws {num_draws} --seed {seed}`"
    yield ""
    yield f"{num_draws} draws a row: a rate of 2.5 % has a standard error of {error:.2f} %. Without a loss a fifth as many."
    yield "Items and replies are drawn anew each time (the claim is about such items). Looks are those of `Stopping()`. Cost:"
    yield "the mean number of the candidate's replies, as a share of those at the last look. Populations:"
    yield ""
    for kind, what in KINDS.items():
        yield f"- {kind}: {what}"
    yield ""
    yield "| task | population | spending | loss = margin: PASS | FAIL | cost | no loss: PASS | FAIL | cost |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for setting in SETTINGS:
        for kind in KINDS:
            for stopping in (Stopping(), Stopping(spending="obrien_fleming")):
                if stopping.spending != "pocock" and kind != "even":
                    continue
                at_margin = simulate(setting, kind, setting.margin, stopping, num_draws, seed)  # type: ignore[arg-type]
                lossless = simulate(setting, kind, 0.0, stopping, max(100, num_draws // 5), seed)  # type: ignore[arg-type]
                numbers = [value for one in (at_margin, lossless) for value in (one.passed, one.failed, one.mean_replies)]
                told = " | ".join(
                    f"{100 * value:.1f} %" if place % 3 != 2 else f"{100 * value:.0f} %" for place, value in enumerate(numbers)
                )
                yield f"| {setting.name} | {kind} | {stopping.spending} | {told} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    for line in lines(options.draws, options.seed):
        print(line, flush=True)


if __name__ == "__main__":
    main()
