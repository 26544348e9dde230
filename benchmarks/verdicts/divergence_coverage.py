"""How often the 95 % interval of a mean KL over texts holds the truth: bootstrap-t (ours), BCa (before) and Student's t.

    python benchmarks/verdicts/divergence_coverage.py [--draws 1000] [--texts 20,24,48,72,240]

Draws whole sets of texts from known populations, computes each interval as a measurement does (2,000 resamples, whole texts),
and counts. No model and no server: two minutes on one core. The committed result is divergence_coverage.md beside this file,
and the program prints it: the assumptions first, then one row for each population and number of texts.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from assay_evaluate.statistics.clustered import bca_interval
from assay_evaluate.statistics.studentized import LONG_TAIL, NUM_RESAMPLES, resample_weights, studentized_ends

Floats = NDArray[np.float64]
LEVEL = 0.95
POSITIONS = (30, 250)
"""Of a text, uniform: replies differ in length by nearly ten times, and every position counts alike."""
MOST_NATS = 20.0
"""No position is further away than so many times the mean."""


@dataclass(frozen=True)
class Population:
    """Texts with a mean KL per position that is known. sums: rng, numbers of positions [n] -> sum of each text's KL [n]."""

    name: str
    what: str
    mean: float
    sums: Callable[[np.random.Generator, Floats], Floats]

    def draw(self, rng: np.random.Generator, num_texts: int) -> tuple[Floats, Floats]:
        counts = rng.integers(*POSITIONS, num_texts).astype(np.float64)
        return self.sums(rng, counts), counts


# ------------------------------------------------------------------------------------------------ what texts are like
def log_normal(sigma: float) -> Population:
    def sums(rng: np.random.Generator, counts: Floats) -> Floats:
        return counts * np.exp(sigma * rng.standard_normal(len(counts)) - sigma**2 / 2)

    variation = math.sqrt(math.expm1(sigma**2))
    return Population(f"texts {sigma:g}", f"text means log-normal, sigma {sigma:g} (coefficient {variation:.1f})", 1.0, sums)


def symmetric() -> Population:
    def sums(rng: np.random.Generator, counts: Floats) -> Floats:
        return counts * (1 + 0.3 * rng.standard_normal(len(counts)))

    return Population("even", "text means normal, standard deviation 0.3 of the mean", 1.0, sums)


def heavy_positions(text_sigma: float, sigma: float) -> Population:
    """Log-normal positions, cut off at `MOST_NATS` times their mean, in texts that differ by a factor."""
    raw = math.exp(sigma**2 / 2)
    cut = MOST_NATS * raw
    z = math.log(cut) / sigma
    mean = raw * stats.norm.cdf(z - sigma) + cut * stats.norm.sf(z)

    def sums(rng: np.random.Generator, counts: Floats) -> Floats:
        sizes = counts.astype(int)
        ends = np.cumsum(sizes)
        values = np.minimum(np.exp(sigma * rng.standard_normal(ends[-1])), cut) / mean
        factor = np.exp(text_sigma * rng.standard_normal(len(sizes)) - text_sigma**2 / 2)
        return np.add.reduceat(values, ends - sizes) * factor

    what = f"positions log-normal, sigma {sigma:g}, at most {MOST_NATS:g} times the mean; texts differ by sigma {text_sigma:g}"
    return Population(f"positions {sigma:g}, texts {text_sigma:g}", what, 1.0, sums)


def rare_positions(text_sigma: float) -> Population:
    """As tiny-glm: nearly all positions are alike, a few are nats away."""
    share = 0.03

    def sums(rng: np.random.Generator, counts: Floats) -> Floats:
        rate = share * counts * np.exp(text_sigma * rng.standard_normal(len(counts)) - text_sigma**2 / 2)
        number = rng.poisson(rate)
        return np.where(number > 0, rng.standard_gamma(np.maximum(number, 1)), 0.0) / share

    what = f"3 % of the positions carry it, exponential; how many differs between texts by sigma {text_sigma:g}"
    return Population(f"rare, texts {text_sigma:g}", what, 1.0, sums)


def two_kinds() -> Population:
    """As suite quick on tiny-glm: a third of the texts answer the suite's questions, and have a hundred times the KL."""
    much, little = 0.016, 1.6e-4

    def sums(rng: np.random.Generator, counts: Floats) -> Floats:
        is_much = rng.random(len(counts)) < 1 / 3
        sigma = np.where(is_much, 1.0, 1.3)
        mean = np.where(is_much, much, little)
        return counts * mean * np.exp(sigma * rng.standard_normal(len(counts)) - sigma**2 / 2)

    what = "a third of the texts with 100 times the KL of the others, log-normal with sigma 1.0 and 1.3"
    return Population("two kinds", what, much / 3 + 2 * little / 3, sums)


POPULATIONS = (
    symmetric(), log_normal(0.5), log_normal(0.8), log_normal(1.0), log_normal(1.2), heavy_positions(0.5, 2.0),
    heavy_positions(0.8, 2.0), rare_positions(0.5), rare_positions(1.0), two_kinds(),
)  # fmt: skip


# ------------------------------------------------------------------------------------------------ intervals
def bootstrap_t(sums: Floats, counts: Floats) -> tuple[float, float]:
    return studentized_ends(sums, counts, LEVEL)


def bca(sums: Floats, counts: Floats) -> tuple[float, float]:
    pieces = resample_weights(len(sums), NUM_RESAMPLES, 0)
    resampled = np.concatenate([weights @ sums / (weights @ counts) for weights in pieces])
    left_out = (sums.sum() - sums) / (counts.sum() - counts)
    return bca_interval(resampled, float(sums.sum() / counts.sum()), left_out, LEVEL)


def student(sums: Floats, counts: Floats) -> tuple[float, float]:
    mean, n = float(sums.sum() / counts.sum()), len(sums)
    error = math.sqrt(float(((sums - mean * counts) ** 2).sum()) * n / (n - 1)) / float(counts.sum())
    half = float(stats.t.ppf(0.5 + LEVEL / 2, n - 1)) * error
    return mean - half, mean + half


INTERVALS: dict[str, Callable[[Floats, Floats], tuple[float, float]]] = {
    "bootstrap-t": bootstrap_t, "BCa": bca, "Student's t": student,
}  # fmt: skip


@dataclass(frozen=True)
class Coverage:
    """Shares of the draws."""

    above: float
    """The truth lies above the interval: drift is missed."""
    below: float
    median_high: float
    """Upper end over the truth."""

    @property
    def holds(self) -> float:
        return 1 - self.above - self.below


def coverage(
    population: Population, num_texts: int, draws: int, names: tuple[str, ...] = tuple(INTERVALS)
) -> dict[str, Coverage]:
    """Of each interval over the same draws."""
    rng = np.random.default_rng(num_texts)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for _ in range(draws):
        sums, counts = population.draw(rng, num_texts)
        for name in names:
            found[name].append(INTERVALS[name](sums, counts))
    ends = {name: np.array(pairs) / population.mean for name, pairs in found.items()}
    return {
        name: Coverage(float((pairs[:, 1] < 1).mean()), float((pairs[:, 0] > 1).mean()), float(np.median(pairs[:, 1])))
        for name, pairs in ends.items()
    }


# ------------------------------------------------------------------------------------------------ printing
def lines(texts: list[int], draws: int) -> Iterator[str]:
    yield "# Coverage of the interval of a mean KL"
    yield ""
    yield f"`python benchmarks/verdicts/divergence_coverage.py --draws {draws} --texts {','.join(map(str, texts))}`"
    yield ""
    yield "Assumed:"
    first, last = POSITIONS[0], POSITIONS[1] - 1
    yield f"- a text has {first} to {last} positions, uniform; the mean is over positions; texts are independent;"
    how = f"bootstrap-t takes {LONG_TAIL:g} of the tail at its long end"
    yield f"- intervals at {LEVEL:.0%}, {NUM_RESAMPLES:,} resamples; {how};"
    yield f"- {draws:,} draws: a share of 95 % is known to about {196 * math.sqrt(0.95 * 0.05 / draws):.1f} points;"
    yield from (f"- *{one.name}*: {one.what}{';' if one is not POPULATIONS[-1] else '.'}" for one in POPULATIONS)
    yield ""
    yield "Each cell: covers (truth above / below the interval; median upper end over the truth), in percent."
    yield ""
    yield f"| population | texts | {' | '.join(INTERVALS)} |"
    yield f"|---|---|{'---|' * len(INTERVALS)}"
    for population in POPULATIONS:
        for num_texts in texts:
            found = coverage(population, num_texts, draws)
            cells = [
                f"{100 * one.holds:.1f} ({100 * one.above:.1f} / {100 * one.below:.1f}; {one.median_high:.2f})"
                for one in found.values()
            ]
            yield f"| {population.name} | {num_texts} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--texts", default="20,24,48,72,240")
    args = parser.parse_args()
    for line in lines([int(number) for number in args.texts.split(",")], args.draws):
        print(line, flush=True)


if __name__ == "__main__":
    main()
