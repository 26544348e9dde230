"""How often a task that is asked in rounds is decided wrongly, how often rightly, and what it costs.

    python benchmarks/verdicts/sequential_errors.py [--draws 20000] [--seed 1] [--only "400 generated"]

Draws items and replies from known populations whose loss is exactly the margin (any word is then an error), or nothing (PASS
is right), looks as `recipes/gates` plans it by default, and counts. Tests are those of the gates: a look decides PASS or FAIL
where the p value of the margin lies below the look's level. No model and no server: ten minutes on one core. The committed
result is sequential_errors.md beside this file, and the program prints it.
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
from assay_evaluate.statistics.graded import POWERS
from assay_evaluate.statistics.joint.drawn import Bools, Evidence, Floats
from assay_evaluate.statistics.sequential import Spending, nominal_levels
from assay_evaluate.tasks.looks import Look, planned_looks, planned_shares
from assay_evaluate.verdicts.scores import spendings_of

Kind = Literal["even", "broken", "sure"]
ALPHA = 0.025
STEP = 0.05
"""Growths of information are rounded to so much of their logarithm, so that few boundaries are computed."""
AT_ONCE = 500
"""Draws."""
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


def generated(first: int, last: int) -> TaskBase:
    return ArithmeticTask(kind="arithmetic", name="t", max_tokens=9, num_items=Range(min=first, max=last))


SETTINGS = (
    Setting("30 problems (one AIME), margin 6", (30, 30), 0.06, 0.85, repeats(5)),
    Setting("60 problems (two AIME), margin 6", (60, 60), 0.06, 0.85, repeats(5)),
    Setting("60 problems (two AIME), two margins of 6", (60, 60), 0.12, 0.85, repeats(5)),
    Setting("198 questions (GPQA), two margins of 4", (198, 198), 0.08, 0.8, repeats(5)),
    Setting("198 questions (GPQA), margin 4", (198, 198), 0.04, 0.8, repeats(5)),
    Setting("541 prompts (IFEval), margin 3", (541, 541), 0.03, 0.88, repeats(5)),
    Setting("1319 problems (GSM8K), margin 1", (1319, 1319), 0.01, 0.96, repeats(5)),
    Setting("200 to 800 new items, sampled, margin 5", (200, 800), 0.05, 0.8, fresh(200, 800, 1.0)),
    Setting("200 to 800 new items, greedy, margin 5", (200, 800), 0.05, 0.8, fresh(200, 800, 0.0)),
    Setting("100 to 400 generated items (codes of `quick`), greedy, margin 10", (100, 400), 0.10, 0.86, generated(100, 400)),
)


# ------------------------------------------------------------------------------------------------ populations
def draw_items(
    rng: np.random.Generator, shape: tuple[int, int], kind: Kind, accuracy: float, loss: float
) -> tuple[Floats, Floats]:  # fmt: skip
    """Chances of a right reply, [draws, items]: reference, candidate; `loss` apart on average over the population."""
    if kind == "even":
        ours = rng.beta(2 * accuracy, 2 * (1 - accuracy), shape)
        return ours, ours * (1 - loss / accuracy)
    if kind == "broken":
        ours, mean = rng.beta(0.5 * accuracy, 0.5 * (1 - accuracy), shape), accuracy
    else:
        ours, mean = np.where(rng.random(shape) < accuracy, 0.98, 0.02), 0.98 * accuracy + 0.02 * (1 - accuracy)
    return ours, np.where(rng.random(shape) < loss / mean, 0.0, ours)


def right_replies(rng: np.random.Generator, chances: Floats, num_samples: int) -> list[NDArray[np.int8]]:
    """Of the first 0, 1, ... replies to each item, how many are right."""
    found, chances = [np.zeros(chances.shape, dtype=np.int8)], chances.astype(np.float32)
    for _ in range(num_samples):
        found.append(found[-1] + (rng.random(chances.shape, dtype=np.float32) < chances))
    return found


# ------------------------------------------------------------------------------------------------ one task
def seen(ours: list[NDArray[np.int8]], theirs: list[NDArray[np.int8]], look: Look) -> Evidence:
    """As `Pairs` has it: exact of one reply each, else over the items' shares."""
    r, c = look.reference_samples, look.candidate_samples
    n = look.limit or ours[0].shape[1]
    difference = ours[r][:, :n] / r - theirs[c][:, :n] / c
    sums = tuple((difference**power).sum(axis=1) for power in POWERS)
    return Evidence(n, (r, c) != (1, 1), sums, None, np.zeros(0))


def decide(
    looks: tuple[Look, ...], evidence: list[Evidence], margin: float, spendings: tuple[Spending, Spending]
) -> tuple[Bools, Bools, NDArray[np.int64]]:
    """(PASS, FAIL, looks taken) of every draw, at the first look where a p value lies below the level of the look."""
    growth = np.diff(np.log([one.information for one in evidence]), axis=0).T
    steps, index = np.unique(np.round(growth / STEP).astype(np.int64), axis=0, return_inverse=True)
    times = planned_shares(looks)
    growths = [np.exp(STEP * np.cumsum([0, *one])).tolist() for one in steps]
    passes_DL, fails_DL = (
        np.stack(p_values, axis=1) < np.array([nominal_levels(times, one, ALPHA, spending) for one in growths])[index.ravel()]
        for p_values, spending in zip(
            ([one.p_at_least(margin) for one in evidence], [one.p_at_most(margin) for one in evidence]), spendings, strict=True
        )
    )
    decided_DL = passes_DL | fails_DL
    last = np.where(decided_DL.any(axis=1), decided_DL.argmax(axis=1), len(looks) - 1)
    draws = np.arange(len(last))
    return passes_DL[draws, last], fails_DL[draws, last], last


@dataclass(frozen=True)
class Counted:
    passed: float
    failed: float
    mean_replies: float
    """Of the candidate, as a share of those at the last look."""


def simulate(setting: Setting, kind: Kind, loss: float, stopping: Stopping, num_draws: int, seed: int) -> Counted:
    rng = np.random.default_rng(seed)
    looks, spendings = planned_looks(setting.task, stopping), spendings_of(stopping)
    words: list[tuple[Bools, Bools, NDArray[np.int64]]] = []
    for start in range(0, num_draws, AT_ONCE):
        shape = min(AT_ONCE, num_draws - start), setting.items[1]
        before, after = draw_items(rng, shape, kind, setting.accuracy, loss)
        ours = right_replies(rng, before, looks[-1].reference_samples)
        theirs = right_replies(rng, after, looks[-1].candidate_samples)
        words.append(decide(looks, [seen(ours, theirs, look) for look in looks], setting.margin, spendings))
    passed, failed, last = (np.concatenate(parts) for parts in zip(*words, strict=True))
    replies = np.array([look.candidate_samples * (look.limit or 1) for look in looks])
    return Counted(float(passed.mean()), float(failed.mean()), float(replies[last].mean() / replies[-1]))


# ------------------------------------------------------------------------------------------------ the table
def lines(num_draws: int, seed: int, only: str) -> Iterator[str]:
    error = 100 * (ALPHA * (1 - ALPHA) / num_draws) ** 0.5
    yield "# Errors and cost of tasks that are asked in rounds"
    yield ""
    yield f"`python benchmarks/verdicts/sequential_errors.py --draws {num_draws} --seed {seed}`"
    yield ""
    yield f"{num_draws:,} draws a row: a rate of 2.5 % has a standard error of {error:.2f} %. Without a loss a tenth as many."
    yield "Items and replies are drawn anew each time (the claim is about such items). Looks are those of `Stopping()`. Cost:"
    yield "the mean number of the candidate's replies, as a share of those at the last look. Populations:"
    yield ""
    for kind, what in KINDS.items():
        yield f"- {kind}: {what}"
    yield ""
    yield "| task | population | spending for PASS | loss = margin: PASS | FAIL | cost | no loss: PASS | FAIL | cost |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for setting in (one for one in SETTINGS if only in one.name):
        for kind in KINDS:
            for stopping in (Stopping(), Stopping(spending="obrien_fleming", fail_spending="obrien_fleming")):
                if stopping.spending != "pocock" and kind != "even":
                    continue
                at_margin = simulate(setting, kind, setting.margin, stopping, num_draws, seed)  # type: ignore[arg-type]
                lossless = simulate(setting, kind, 0.0, stopping, max(100, num_draws // 10), seed)  # type: ignore[arg-type]
                numbers = [value for one in (at_margin, lossless) for value in (one.passed, one.failed, one.mean_replies)]
                told = " | ".join(
                    f"{100 * value:.2f} %" if place % 3 != 2 else f"{100 * value:.0f} %" for place, value in enumerate(numbers)
                )
                yield f"| {setting.name} | {kind} | {stopping.spending} | {told} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="only settings whose name holds this text; no row depends on the others")
    options = parser.parse_args()
    for line in lines(options.draws, options.seed, options.only):
        print(line, flush=True)


if __name__ == "__main__":
    main()
