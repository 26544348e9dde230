"""Accepted drafts of two sides that answer the same prompts: the interval with and without pairing.

    python benchmarks/verdicts/paired_drafts.py [--runs 4000] [--seed 1]

Prompts differ in how well they are drafted (beta, standard deviation as stated) and in length; a reply's own acceptance varies
around its prompt's. The committed result is paired_drafts.md beside this file. No model and no server.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from scipy import stats

from assay_evaluate.statistics.drafts import paired_acceptance_difference, ratio_standard_error

MARGIN, LEVEL = 0.10, 0.95


@dataclass(frozen=True)
class Drafting:
    """num: prompts. rate: share accepted. between, within: standard deviations of the rate over prompts, and over replies to
    one."""

    name: str
    num: int
    rate: float
    between: float
    within: float


DESIGNS = (
    Drafting("622 prompts as suite quick asks", 622, 0.86, 0.10, 0.03),
    Drafting("100 prompts", 100, 0.80, 0.15, 0.03),
    Drafting("100 prompts, replies to one differ as prompts do", 100, 0.80, 0.10, 0.10),
    Drafting("60 prompts, chat beside code", 60, 0.65, 0.20, 0.05),
)
LOSSES = (0.0, 0.05, 0.10)


def beta(rng: np.random.Generator, mean: np.ndarray, deviation: float) -> np.ndarray:
    spread = np.minimum(deviation**2, 0.9 * mean * (1 - mean))
    concentration = mean * (1 - mean) / spread - 1
    return rng.beta(mean * concentration, (1 - mean) * concentration)


def counts(rng: np.random.Generator, one: Drafting, loss: float) -> np.ndarray:
    """Of one run: drafted and accepted before, drafted and accepted after [prompts, 4]."""
    prompts = np.clip(beta(rng, np.full(one.num, one.rate), one.between), 0.02, 0.98)
    columns, length = [], rng.lognormal(4.5, 0.7, one.num)
    for rates in (prompts, np.clip(prompts - loss, 0.01, 0.98)):
        own = beta(rng, rates, one.within)
        drafted = np.maximum((length * rng.lognormal(0, 0.1, one.num)).astype(int), 1)
        columns += [drafted, rng.binomial(drafted, own)]
    return np.stack(columns, axis=1)


def unpaired_half(data: np.ndarray) -> tuple[float, float]:
    """(value, half-width) as the gates had it: each side's replies are a sample of its own."""
    errors, rates = [], []
    for drafted, accepted in ((data[:, 0], data[:, 1]), (data[:, 2], data[:, 3])):
        squares = (float((drafted**2).sum()), float((drafted * accepted).sum()), float((accepted**2).sum()))
        error = ratio_standard_error(len(data), float(drafted.sum()), float(accepted.sum()), squares)
        assert error is not None
        errors.append(error)
        rates.append(accepted.sum() / drafted.sum())
    return float(rates[0] - rates[1]), float(stats.t.ppf(0.5 + LEVEL / 2, len(data) - 1)) * math.hypot(*errors)


def row(one: Drafting, loss: float, num_runs: int, seed: int) -> str:
    rng = np.random.default_rng(seed)
    big = counts(rng, Drafting(one.name, 400_000, one.rate, one.between, one.within), loss)
    truth = float(big[:, 1].sum() / big[:, 0].sum() - big[:, 3].sum() / big[:, 2].sum())
    seen = []
    for _ in range(num_runs):
        data = counts(rng, one, loss)
        value, half = unpaired_half(data)
        paired = paired_acceptance_difference(data, LEVEL)
        seen.append(
            (half, abs(value - truth) <= half, value + half < MARGIN, paired.high - paired.value,
             paired.low <= truth <= paired.high, paired.high < MARGIN)
        )  # fmt: skip
    mean = 100 * np.array(seen, dtype=float).mean(axis=0)
    told = " | ".join(f"{number:.1f}" for number in mean)
    return f"| {one.name} | {100 * truth:.1f} | {told} |"


def lines(num_runs: int, seed: int) -> Iterator[str]:
    yield "# Accepted drafts, prompt by prompt"
    yield ""
    yield f"`python benchmarks/verdicts/paired_drafts.py --runs {num_runs} --seed {seed}`"
    yield ""
    yield f"{num_runs} runs a row; 10 points are allowed. Half-widths and the true loss in points, the rest in %."
    yield ""
    yield "| prompts | truly lost | unpaired: half-width | covers | PASS | paired: half-width | covers | PASS |"
    yield "|---|---|---|---|---|---|---|---|"
    for one in DESIGNS:
        for loss in LOSSES:
            yield row(one, loss, num_runs, seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    for line in lines(options.runs, options.seed):
        print(line, flush=True)


if __name__ == "__main__":
    main()
