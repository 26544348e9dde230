"""A margin lost in few clusters: how often each interval over clusters passes it, and what a lossless candidate then passes.

    python benchmarks/verdicts/uneven/few_clusters.py [--runs 10000] [--seed 1]

One reply of either side to each item; in a share of the clusters every item is lost with a chance of margin / share more than
in the others. The committed result is few_clusters.md beside this file, and the program prints it. No model and no server.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import special, stats

from assay_evaluate.statistics.clustered import cr2_factors, satterthwaite_degrees
from assay_evaluate.statistics.paired import score_statistic
from assay_evaluate.statistics.uneven_clusters import UnevenMean, chance_of_none, effective_number

Floats = NDArray[np.float64]
ALPHA = 0.025
VERIFIED = (231, 75, 44, 34, 32, 22, 22, 19, 10, 8, 2, 1)
"""Instances of each repository of SWE-bench Verified."""
LOGNORMAL = tuple(sorted(int(max(1, round(size))) for size in np.random.default_rng(5).lognormal(2, 0.8, 45)))
BOOTSTRAP_RUNS, RESAMPLES = 1000, 400


@dataclass(frozen=True)
class Clusters:
    """Items of each cluster, the margin, and how often two lossless sides differ."""

    name: str
    sizes: tuple[int, ...]
    margin: float
    discordance: float


DESIGNS = (
    Clusters("12 repositories of SWE-bench Verified", VERIFIED, 0.05, 0.17),
    Clusters("20 x 20", (20,) * 20, 0.05, 0.10),
    Clusters("24 x 10", (10,) * 24, 0.05, 0.10),
    Clusters("50 x 10", (10,) * 50, 0.05, 0.10),
    Clusters("104 x 5", (5,) * 104, 0.04, 0.05),
    Clusters("RULER of suite full: 16 x 5, 440 x 1", (5,) * 16 + (1,) * 440, 0.04, 0.05),
    Clusters("MGSM of suite languages: 250 x 11", (11,) * 250, 0.02, 0.05),
    Clusters("5 x 80, 55 x 10", (80,) * 5 + (10,) * 55, 0.05, 0.10),
    Clusters("45 of lognormal size", LOGNORMAL, 0.07, 0.10),
)


@dataclass(frozen=True)
class Seen:
    """Of every run: items that only one side gets right, by cluster."""

    only_ours: NDArray[np.int64]
    only_theirs: NDArray[np.int64]
    design: Clusters

    @property
    def totals(self) -> Floats:
        return (self.only_ours - self.only_theirs).astype(np.float64)

    @property
    def value(self) -> Floats:
        return np.asarray(self.totals.sum(axis=1) / sum(self.design.sizes))

    @property
    def uneven(self) -> UnevenMean:
        sizes = self.design.sizes
        squares = (self.only_ours + self.only_theirs).sum(axis=1)
        return UnevenMean.of_totals(self.totals, squares, sizes, cr2_factors(sizes), satterthwaite_degrees(sizes))


def drawn(rng: np.random.Generator, one: Clusters, lossy: float, loss: float, num_runs: int) -> Seen:
    lost = np.where(rng.random((num_runs, len(one.sizes))) < lossy, loss / lossy, 0.0)
    better, worse = np.maximum((one.discordance + lost) / 2, lost), np.maximum((one.discordance - lost) / 2, 0.0)
    only_ours = rng.binomial(one.sizes, better)
    return Seen(only_ours, rng.binomial(np.array(one.sizes) - only_ours, worse / (1 - better)), one)


# ------------------------------------------------------------------------------------------------ the methods
def by_item(seen: Seen, margin: float) -> Floats:
    """Tango's score test, items taken for independent."""
    b, c = seen.only_ours.sum(axis=1), seen.only_theirs.sum(axis=1)
    return np.asarray(stats.norm.cdf(score_statistic(margin, b, c, sum(seen.design.sizes))))


def student(seen: Seen, margin: float) -> Floats:
    """CR2 with Bell and McCaffrey's degrees: what the gates had."""
    found = seen.uneven
    return np.asarray(special.stdtr(found.degrees, (found.value - margin) / np.maximum(found.error, 1e-9)))


def hall(seen: Seen, margin: float) -> Floats:
    """Hall's transformation of that t, with the degrees that the kurtosis of the clusters leaves."""
    sizes = np.array(seen.design.sizes, dtype=np.float64)
    apart = (seen.totals - seen.value[:, None] * sizes) * np.sqrt(cr2_factors(sizes)) / sizes.sum()
    variance = np.maximum((apart**2).sum(axis=1), 1e-18)
    skewness, kurtosis = (apart**3).sum(axis=1) / variance**1.5, len(sizes) * (apart**4).sum(axis=1) / variance**2
    t, g = (seen.value - margin) / np.sqrt(variance), np.where(np.abs(skewness) < 1e-6, 1e-6, skewness)
    degrees = satterthwaite_degrees(sizes)
    short = np.minimum(degrees, 2 * len(sizes) / np.maximum(kurtosis - 1, 1e-12))
    corrected = ((1 + g * t / 3) ** 3 - 1) / g + g / 6
    return np.asarray(special.stdtr(np.where(skewness > 0, short, degrees), corrected))


def null_score(seen: Seen, margin: float) -> Floats:
    """A score test with the variance of residuals from the margin."""
    apart = seen.totals - margin * np.array(seen.design.sizes)
    return np.asarray(special.ndtr(apart.sum(axis=1) / np.sqrt((apart**2).sum(axis=1))))


def empirical_likelihood(seen: Seen, margin: float) -> Floats:
    """Adjusted (Chen, Variyath & Abraham 2008): one pseudo-cluster more on the other side of the margin."""
    apart = seen.totals - margin * np.array(seen.design.sizes)
    pseudo = -max(1.0, math.log(apart.shape[1]) / 2) * apart.mean(axis=1, keepdims=True)
    apart = np.concatenate([apart, pseudo], axis=1)
    low, high = -(1 - 1 / apart.shape[1]) / apart.max(axis=1), -(1 - 1 / apart.shape[1]) / apart.min(axis=1)
    for _ in range(50):
        middle = (low + high) / 2
        is_left = (apart / (1 + middle[:, None] * apart)).sum(axis=1) > 0
        low, high = np.where(is_left, middle, low), np.where(is_left, high, middle)
    ratio = 2 * np.log(np.maximum(1 + low[:, None] * apart, 1e-12)).sum(axis=1)
    p = stats.norm.sf(np.sqrt(np.maximum(ratio, 0.0)))
    return np.where(seen.value >= margin, 1.0, p)


def bootstrap_t(seen: Seen, margin: float) -> Floats:
    """Clusters resampled, studentized by CR2; 0 or 1, for PASS at the level."""
    rng, sizes = np.random.default_rng(7), np.array(seen.design.sizes, dtype=np.float64)
    totals, value = seen.totals[:BOOTSTRAP_RUNS], seen.value[:BOOTSTRAP_RUNS]
    error, ends = seen.uneven.error[:BOOTSTRAP_RUNS], np.empty(len(totals))
    for run, (own, centre) in enumerate(zip(totals, value, strict=True)):
        index = rng.integers(0, len(sizes), (RESAMPLES, len(sizes)))
        sums, n = own[index], sizes[index]
        means = sums.sum(axis=1) / n.sum(axis=1)
        factors = 1 / (1 - np.minimum(n / n.sum(axis=1, keepdims=True), 0.999))
        spread = np.sqrt((((sums - means[:, None] * n) ** 2) * factors).sum(axis=1)) / n.sum(axis=1)
        ends[run] = centre - np.quantile((means - centre) / np.maximum(spread, 1e-6), ALPHA) * error[run]
    return np.where(ends < margin, 0.0, 1.0)


def chosen(seen: Seen, margin: float) -> Floats:
    return seen.uneven.p_at_least(margin)


METHODS: dict[str, Callable[[Seen, float], Floats]] = {
    "items alone": by_item, "t, CR2 (before)": student, "Hall": hall, "null score": null_score,
    "empirical likelihood": empirical_likelihood, "bootstrap-t": bootstrap_t, "chosen": chosen,
}  # fmt: skip


# ------------------------------------------------------------------------------------------------ the tables
def passes(seen: Seen, method: str) -> float:
    """Every method beside the test over items, as the gates have it."""
    p = METHODS[method](seen, seen.design.margin)
    return float((np.maximum(p, by_item(seen, seen.design.margin)[: len(p)]) < ALPHA).mean())


TRUTHS: tuple[tuple[str, float, float], ...] = (
    ("the margin lost by 10 % of the clusters", 0.1, 1.0),
    ("the margin lost by 20 %", 0.2, 1.0),
    ("the margin lost by 50 %", 0.5, 1.0),
    ("the margin lost by all", 1.0, 1.0),
    ("nothing lost", 1.0, 0.0),
    ("half of the margin lost by all", 1.0, 0.5),
)


def lines(num_runs: int, seed: int) -> Iterator[str]:
    error, of_bootstrap = 100 * math.sqrt(ALPHA * (1 - ALPHA) / num_runs), min(BOOTSTRAP_RUNS, num_runs)
    yield "# A margin lost in few clusters"
    yield ""
    yield f"`python benchmarks/verdicts/uneven/few_clusters.py --runs {num_runs} --seed {seed}`"
    yield ""
    yield f"{num_runs} runs a cell (bootstrap-t {of_bootstrap}): 2.5 % has a standard error of {error:.2f} %."
    yield "Each cell is the share of PASS in %. Every method counts beside the test over items, as in a gate."
    yield "In the first four rows a PASS is false."
    for one in DESIGNS:
        yield from _table(one, num_runs, seed)


def _table(one: Clusters, num_runs: int, seed: int) -> Iterator[str]:
    counts, none = effective_number(one.sizes), 100 * chance_of_none(one.sizes)
    yield ""
    yield f"## {one.name}: margin {100 * one.margin:.3g} points"
    yield ""
    yield f"{100 * one.discordance:.3g} % of the items differ without a loss. Counts as {counts:.1f} clusters of equal size;"
    yield f"a sample has none of a lossy fifth with {none:.2g} %."
    yield ""
    yield f"| truth | {' | '.join(METHODS)} |"
    yield "|---|" + "---|" * len(METHODS)
    for told, lossy, margins in TRUTHS:
        seen = drawn(np.random.default_rng(seed), one, lossy, margins * one.margin, num_runs)
        shares = [f"{100 * passes(seen, method):.1f}" for method in METHODS]
        yield f"| {told} | {' | '.join(shares)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    for line in lines(options.runs, options.seed):
        print(line, flush=True)


if __name__ == "__main__":
    main()
