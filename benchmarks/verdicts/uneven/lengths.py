"""Replies of very unequal length, and items that share texts: what passes at the limit, and what a copy is held up by.

    python benchmarks/verdicts/uneven/lengths.py [--runs 1000] [--seed 1]

Three claims that took what they are over for alike: the acceptance of drafts over prompts, the mean KL over texts, and the loss
of a subgroup over items. *before* is the calculation that the product had, kept here to be compared with. The committed result
is lengths.md beside this file. No model and no server.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray
from scipy import special, stats

from assay_evaluate.statistics.clustered import clustered_difference, cr2_factors, satterthwaite_degrees
from assay_evaluate.statistics.decisions import benjamini_hochberg
from assay_evaluate.statistics.drafts import paired_acceptance_difference
from assay_evaluate.statistics.paired import mcnemar_midp
from assay_evaluate.statistics.skewed import HALF_AT_DEGREES, LACKING, MOST_LACKING, skewed_ends

Floats = NDArray[np.float64]
MARGIN, TAIL, SHOWN = 0.10, 0.025, 0.01
LENGTHS: dict[str, Callable[[np.random.Generator, int], Floats]] = {
    "all alike": lambda rng, n: np.full(n, 300.0),
    "log-normal, sigma 0.7": lambda rng, n: rng.lognormal(4.5, 0.7, n).round() + 3,
    "log-normal, sigma 1": lambda rng, n: rng.lognormal(5, 1, n).round() + 3,
    "log-normal, sigma 1.5": lambda rng, n: rng.lognormal(5, 1.5, n).round() + 3,
    "one in ten 40 times as long": lambda rng, n: np.where(rng.random(n) < 0.1, 4000.0, 100.0),
}


# ------------------------------------------------------------------------------------------------ acceptance
def counts(rng: np.random.Generator, num: int, lengths: str, lossy: float, drop: float) -> Floats:
    """Drafted and accepted tokens before, drafted and accepted after [prompts, 4]; `lossy` of them hold all of the drop."""
    before = LENGTHS[lengths](rng, num)
    after = np.maximum((before * rng.lognormal(0, 0.3, num)).round(), 1)
    rate = rng.beta(6, 2, num)
    lost = rate * (1 - np.where(rng.random(num) < lossy, drop / lossy / 0.75, 0.0))
    return np.stack([before, rng.binomial(before.astype(int), rate), after, rng.binomial(after.astype(int), lost)], axis=1)


def end_by_t(data: Floats) -> float:
    """Upper end by Student's t with a CR2 error and the fewer of both degrees: decision 233."""
    drafted, accepted = data[:, [0, 2]], data[:, [1, 3]]
    rates, sizes = accepted.sum(axis=0) / drafted.sum(axis=0), drafted.sum(axis=1)
    apart = (accepted - rates * drafted) / drafted.sum(axis=0)
    squares = (apart[:, 0] - apart[:, 1]) ** 2 * cr2_factors(sizes)
    kurtosis = len(data) * float(squares @ squares) / float(squares.sum()) ** 2
    degrees = max(1.0, min(satterthwaite_degrees(sizes), 2 * len(data) / (kurtosis - 1)))
    return float(rates[0] - rates[1] + stats.t.isf(TAIL, degrees) * math.sqrt(squares.sum()))


def of_acceptance(num_runs: int, seed: int) -> Iterator[str]:
    yield "## Accepted drafts: 10 points allowed"
    yield ""
    yield "PASS in %. In the first two pairs 10 points are lost, in a fifth or in a third of the prompts, and a PASS is false."
    yield ""
    yield "| prompts | lengths | a fifth: before | now | a third: before | now | a copy: before | now |"
    yield "|---|---|---|---|---|---|---|---|"
    for num in (60, 100, 300, 600):
        for lengths in LENGTHS:
            rng, told = np.random.default_rng(seed), []
            for lossy, drop in ((0.2, MARGIN), (1 / 3, MARGIN), (1.0, 0.0)):
                runs = [counts(rng, num, lengths, lossy, drop) for _ in range(num_runs)]
                ends = np.array([(end_by_t(one), paired_acceptance_difference(one, 0.95).high) for one in runs])
                told += [f"{100 * share:.1f}" for share in (ends < MARGIN).mean(axis=0)]
            yield f"| {num} | {lengths} | {' | '.join(told)} |"


# ------------------------------------------------------------------------------------------------ KL
def end_before(sums_D: Floats, counts_D: Floats) -> float:
    """Upper end of decision 210: n - 1 degrees, and below a sample skewed downwards the lighter tail."""
    total, n = counts_D.sum(), len(sums_D)
    mean = sums_D.sum() / total
    apart = (sums_D - mean * counts_D) / total
    apart = apart - apart.mean()
    variance, third = n / (n - 1) * (apart**2).sum(), (n / (n - 1)) ** 2 * (apart**3).sum()
    lacking = 0.0
    tail = TAIL
    if third > 0:
        lacking = min(LACKING * apart.max() ** 2 / (apart**2).sum(), MOST_LACKING) * apart.max()
        tail = TAIL / (1 + HALF_AT_DEGREES / (n - 1))
    widening = special.stdtrit(n - 1, 1 - tail) / special.ndtri(1 - tail)
    variance, third = variance * widening**2 + lacking**2, third * widening**3 + lacking**3
    return float(mean + lacking + math.sqrt(variance) * stats.pearson3.ppf(1 - tail, third / variance**1.5))


def of_kl(num_runs: int, seed: int) -> Iterator[str]:
    """Token means of texts whose own KL is log-normal, and falls, stays or rises with length."""
    yield "## Mean KL over tokens, the truth at the limit"
    yield ""
    yield "*false PASS*: the upper end below the truth. *half*: PASS in % of a candidate with half of what is allowed."
    yield ""
    yield "| texts | lengths | KL of a text | false PASS: before | now | half: before | now |"
    yield "|---|---|---|---|---|---|---|"
    spread = {"equal": 0.0, "at most 512 tokens": 0.8, "log-normal, sigma 1": 1.0}
    kinds = {
        "sigma 0.5": (0.5, 0.0),
        "sigma 0.8, lower in long texts": (0.8, -0.8),
        "sigma 0.8, higher in long texts": (0.8, 0.8),
    }
    for num in (20, 40, 60, 150, 300):
        for lengths, sigma in spread.items():
            for kind, (deviation, slope) in kinds.items():
                if sigma == 0 and slope != 0:
                    continue
                rng = np.random.default_rng(seed)
                length = rng.lognormal(6 if sigma < 1 else 5.5, sigma, (num_runs, num)) + 10
                length = np.minimum(length, 512) if "512" in lengths else length
                kl = np.exp(deviation * rng.normal(size=length.shape) + slope * (np.log(length) - 5.5))
                sums = kl * rng.gamma(length / 9, 9 / length) * length
                true, zeros = float((kl * length).sum() / length.sum()), np.zeros(num, np.intp)
                ends = np.array(
                    [(end_before(*one), skewed_ends(*one, zeros)[1]) for one in zip(sums, length, strict=True)]
                )  # fmt: skip
                told = [f"{100 * share:.1f}" for part in (1, 2) for share in (ends < part * true).mean(axis=0)]
                yield f"| {num} | {lengths} | {kind} | {' | '.join(told)} |"


# ------------------------------------------------------------------------------------------------ subgroups
def of_subgroups(num_runs: int, seed: int) -> Iterator[str]:
    """A copy, whose differences on items of one text have the correlation that is stated."""
    yield "## Subgroups of a copy whose items share texts"
    yield ""
    yield f"Ten subgroups; % of runs in which a loss of some of them is shown, at {100 * SHOWN:g} %. 10 % of the items differ."
    yield ""
    yield "| texts of a subgroup | items of a text | correlation | before | now |"
    yield "|---|---|---|---|---|"
    for num, size, correlation in ((40, 5, 0.0), (40, 5, 0.2), (40, 5, 0.5), (20, 20, 0.2), (50, 10, 0.1), (250, 3, 0.3)):
        rng, labels = np.random.default_rng(seed), np.repeat(np.arange(num), size)
        shown = np.zeros(2)
        for _ in range(num_runs):
            own, shared = (rng.choice([1, -1, 0], p=[0.05, 0.05, 0.9], size=(10, num, each)) for each in (size, 1))
            lost = np.where(rng.random((10, num, size)) < math.sqrt(correlation), shared, own).reshape(10, -1)
            by_item, by_text = np.ones(10), np.ones(10)
            for number, one in enumerate(lost):
                if one.sum() > 0:
                    by_item[number] = mcnemar_midp(int((one > 0).sum()), int((one < 0).sum())) / 2
                    if by_item[number] < SHOWN:
                        by_text[number] = max(by_item[number], clustered_difference(one, labels).p_at_most(0.0))
            shown += [(benjamini_hochberg(p) < SHOWN).any() for p in (by_item, by_text)]
        before, now = 100 * shown / num_runs
        yield f"| {num} | {size} | {correlation:g} | {before:.1f} | {now:.1f} |"


def lines(num_runs: int, seed: int) -> Iterator[str]:
    yield "# Replies of unequal length, and items that share texts"
    yield ""
    yield f"`python benchmarks/verdicts/uneven/lengths.py --runs {num_runs} --seed {seed}`"
    yield ""
    yield f"{num_runs} runs a row: 2.5 % has a standard error of {100 * math.sqrt(0.025 * 0.975 / num_runs):.1f} %."
    for part in (of_acceptance, of_kl, of_subgroups):
        yield ""
        yield from part(num_runs, seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    for line in lines(options.runs, options.seed):
        print(line, flush=True)


if __name__ == "__main__":
    main()
