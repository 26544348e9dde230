"""Measured until it passes: how often any of several attempts, or any of several candidates, passes what it should not.

    python benchmarks/verdicts/attempts.py [--runs 4000] [--seed 1]

One task, the same items in every attempt, replies drawn anew; the verdict's own test of one look. The committed result is
attempts.md beside this file. No model and no server.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from assay_evaluate.statistics.graded import POWERS, MeanDifference
from assay_reports.limits.scores import best_of

Floats = NDArray[np.float64]
ALPHA, LEVEL = 0.025, 0.95
COUNTS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Task:
    """accuracy, discordance: of the reference, as in full_decides.md. replies: of each side to each item."""

    name: str
    items: int
    margin: float
    accuracy: float
    discordance: float
    replies: int


TASKS = (
    Task("GPQA Diamond", 198, 0.04, 0.80, 0.12, 5), Task("MMLU-Pro", 2800, 0.02, 0.85, 0.08, 1),
    Task("tool calls", 480, 0.04, 0.93, 0.05, 2), Task("GSM8K", 1319, 0.01, 0.96, 0.03, 5),
)  # fmt: skip


def differences(rng: np.random.Generator, one: Task, loss: float, attempts: int, *, new_candidates: bool) -> Floats:
    """[attempts, items]. new_candidates: each against the same replies of the reference; else both sides answer anew."""
    concentration = one.discordance / (2 * one.accuracy * (1 - one.accuracy) - one.discordance)
    chances = rng.beta(one.accuracy * concentration, (1 - one.accuracy) * concentration, one.items)
    shape = (1 if new_candidates else attempts, one.items)
    ours = rng.binomial(one.replies, np.broadcast_to(chances, shape)) / one.replies
    lost = np.minimum(chances * (1 - loss / one.accuracy), 1.0)
    theirs = rng.binomial(one.replies, np.broadcast_to(lost, (attempts, one.items))) / one.replies
    return ours - theirs


def seen(one: Task, loss: float, num_runs: int, seed: int, *, new_candidates: bool) -> tuple[Floats, Floats, Floats]:
    """(whether it passes, the drop, its upper end) [runs, attempts]."""
    rng, most = np.random.default_rng(seed), max(COUNTS)
    passes, drops, highs = [], [], []
    for _ in range(num_runs):
        found = differences(rng, one, loss, most, new_candidates=new_candidates)
        mean = MeanDifference.of_sums(one.items, [(found**power).sum(axis=1) for power in POWERS])
        passes.append(mean.p_at_least(one.margin) < ALPHA)
        drops.append(mean.estimate)
        highs.append(mean.ends(LEVEL)[1])
    return np.array(passes), np.array(drops), np.array(highs)


def lines(num_runs: int, seed: int) -> Iterator[str]:
    yield "# Measured until it passes"
    yield ""
    yield f"`python benchmarks/verdicts/attempts.py --runs {num_runs} --seed {seed}`"
    yield ""
    yield f"{num_runs} runs a row; items are the same in all attempts of a run. Shares of PASS in any of so many, in %."
    yield "A verdict says which attempt it is, and in how many at most one of so many passes a lost margin;"
    yield "the error of each stays 2.5 %."
    for told, new in (
        ("attempts, both sides answer anew", False),
        ("candidates against the same replies of the reference", True),
    ):
        yield ""
        yield f"## Any of several {told}"
        yield ""
        yield f"| task | truly lost | {' | '.join(f'of {count}' for count in COUNTS)} |"
        yield f"|---|---|{'---|' * len(COUNTS)}"
        for one in TASKS:
            for part in (1.0, 0.75, 0.5):
                passes, _, _ = seen(one, part * one.margin, num_runs, seed, new_candidates=new)
                shares = [100 * passes[:, :count].any(axis=1).mean() for count in COUNTS]
                yield f"| {one.name} | {part:g} margins | {' | '.join(f'{share:.1f}' for share in shares)} |"
    yield ""
    yield "## The best-looking of eight candidates that lost nothing"
    yield ""
    yield "Too good: points by which its drop lies below the truth, and as the report's sentence foretells it. Beyond: its"
    yield "interval's upper end lies below the truth (nominal 2.5 %)."
    yield ""
    yield "| task | too good | foretold | beyond |"
    yield "|---|---|---|---|"
    for one in TASKS:
        _, drops, highs = seen(one, 0.0, num_runs, seed, new_candidates=True)
        best = drops.argmin(axis=1)
        rows = np.arange(num_runs)
        foretold = best_of(8) * float(((highs - drops) / 1.96).mean()) / math.sqrt(2)
        yield (
            f"| {one.name} | {-100 * drops[rows, best].mean():.2f} | {100 * foretold:.2f} | "
            f"{100 * (highs[rows, best] < 0).mean():.1f} % |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    for line in lines(options.runs, options.seed):
        print(line, flush=True)


if __name__ == "__main__":
    main()
