"""How often the 95 % interval of a mean KL over texts holds the truth: assay's, bootstrap-t, BCa and Student's t.

    python benchmarks/verdicts/divergence_coverage.py [--draws 1000] [--texts 20,24,48,72,240]

Draws whole sets of texts from known populations, and from suites that ask for so many texts of each kind, computes each
interval over whole texts, and counts. No model and no server: three minutes on one core. The committed result is
divergence_coverage.md beside this file, and the program prints it: the assumptions first, then one row for each population and
number of texts, and for each suite.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from assay_evaluate.divergence.strata import Kind, strata_of
from assay_evaluate.statistics.clustered import NUM_RESAMPLES, bca_interval
from assay_evaluate.statistics.skewed import skewed_ends

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]
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
    heavy_positions(0.8, 2.0), rare_positions(0.5), rare_positions(1.0), two_kinds(), log_normal(1.5),
)  # fmt: skip


# ------------------------------------------------------------------------------------------------ what a suite fixes
@dataclass(frozen=True)
class Texts:
    """So many texts of one kind, whose means are log-normal. length: mean number of positions."""

    kind: Kind
    number: int
    mean: float
    length: float
    sigma: float = 1.0


@dataclass(frozen=True)
class Design:
    """Texts of unlike kinds, in numbers that the suite fixes. The truth is the mean over all positions of such texts."""

    name: str
    what: str
    texts: tuple[Texts, ...]

    @property
    def mean(self) -> float:
        positions = [one.number * one.length for one in self.texts]
        return sum(n * one.mean for n, one in zip(positions, self.texts, strict=True)) / sum(positions)

    @property
    def kinds(self) -> list[Kind]:
        return [one.kind for one in self.texts for _ in range(one.number)]

    def draw(self, rng: np.random.Generator, num_texts: int) -> tuple[Floats, Floats]:
        """num_texts: of all kinds, as `kinds` has them."""
        which = np.repeat(np.arange(len(self.texts)), [one.number for one in self.texts])
        mean, length, sigma = (
            np.array([getattr(one, name) for one in self.texts])[which] for name in ("mean", "length", "sigma")
        )
        counts = np.maximum(1, np.round(length * _log_normal(rng, LENGTH_SIGMA, num_texts)))
        return counts * mean * _log_normal(rng, sigma, num_texts), counts


LENGTH_SIGMA = 0.8
"""Of the texts of one kind in a design, log-normal: on tiny-glm the replies to one task differ in length by thirty times."""
TASKS = {
    "arithmetic": (1e-6, 60), "codes-en": (3e-3, 30), "codes-zh": (4e-3, 24), "needle": (1e-6, 23), "grid": (17e-3, 90),
    "ruler": (1e-3, 100),
}  # fmt: skip
"""Suite quick on tiny-glm, BF16 against FP8: mean KL and positions of the replies to each task."""


def _log_normal(rng: np.random.Generator, sigma: Any, number: int) -> Floats:
    """Mean 1."""
    return np.asarray(np.exp(sigma * rng.standard_normal(number) - np.square(sigma) / 2))


def quick(of_each_task: int, *, late: bool = False) -> Design:
    tasks = {name: how for name, how in TASKS.items() if not late or name != "arithmetic"}
    texts = [Texts(("suite_replies", name, "en"), of_each_task, mean, length) for name, (mean, length) in tasks.items()]
    own = [Texts(("replies", domain, "en"), 24, 2e-6, 120) for domain in ("writing", "arithmetic")]
    if late:
        what = f"the span from 512 on of suite quick on tiny-glm, {of_each_task} replies to each of five tasks"
        return Design(f"quick late, {of_each_task}", what, tuple(texts))
    what = f"suite quick on tiny-glm, 48 texts and {of_each_task} replies to each of six tasks, with mean KL from 1e-6 to 0.017"
    return Design(f"quick, {of_each_task}", what, (*own, *texts))


def full() -> Design:
    means = (0.02, 0.002, 0.03, 0.01, 0.01, 0.05, 0.002, 0.004, 0.01, 0.02)
    tasks = [Texts(("suite_replies", str(i), ""), 20, mean, 500, 0.8) for i, mean in enumerate(means)]
    own = [
        Texts(("replies", name, "en"), 100, mean, length, 0.8) for name, mean, length in (("a", 0.01, 900), ("b", 0.005, 300))
    ]
    what = "as suite full: 200 texts and 20 replies to each of ten tasks, with mean KL from 0.002 to 0.05"
    return Design("full", what, (*own, *tasks))


def two_strata() -> Design:
    texts = (Texts(("suite_replies",), 24, 0.016, 120), Texts(("replies",), 48, 1.6e-4, 120, 1.3))
    return Design("two strata", "as *two kinds*, but always 24 and 48 texts", texts)


DESIGNS = (
    quick(5, late=True),
    quick(10, late=True),
    quick(20, late=True),
    quick(5),
    quick(10),
    quick(20),
    two_strata(),
    full(),
)


# ------------------------------------------------------------------------------------------------ intervals
def one_text_more(sums: Floats, counts: Floats, strata: Ints) -> tuple[float, float]:
    return skewed_ends(sums, counts, strata, LEVEL)


def bootstrap_t(sums: Floats, counts: Floats, strata: Ints) -> tuple[float, float]:
    """Of whole texts without strata; the longer end takes a fifth of the nominal tail and is no nearer than Student's t."""
    mean, n = float(sums.sum() / counts.sum()), len(sums)
    apart = sums - mean * counts
    error = math.sqrt(float((apart**2).sum()) * n / (n - 1)) / float(counts.sum())
    weights = _weights(n)
    squares = weights @ np.stack([apart, counts, apart**2, apart * counts, counts**2], axis=1)
    shift = squares[:, 0] / squares[:, 1]
    variance = squares[:, 2] - 2 * shift * squares[:, 3] + shift**2 * squares[:, 4]
    known = variance > 1e-12 * squares[:, 2]
    t = shift[known] * squares[known, 1] / np.sqrt(variance[known] * n / (n - 1))
    tail, is_right = (1 - LEVEL) / 2, bool((apart**3).sum() > 0)
    below, above = (0.2 * tail, tail) if is_right else (tail, 0.2 * tail)
    from_low, from_high = (float(end) for end in np.quantile(t, [1 - above, below]))
    least = float(stats.t.ppf(1 - tail, n - 1))
    from_low, from_high = (from_low, min(from_high, -least)) if is_right else (max(from_low, least), from_high)
    return mean - from_low * error, mean - from_high * error


@lru_cache(maxsize=2)
def _weights(n: int) -> Floats:
    """How often each of n texts is drawn, a row for each resample."""
    return np.random.default_rng(0).multinomial(n, np.full(n, 1 / n), NUM_RESAMPLES).astype(np.float64)


def bca(sums: Floats, counts: Floats, strata: Ints) -> tuple[float, float]:
    resampled = (_weights(len(sums)) @ sums) / (_weights(len(sums)) @ counts)
    left_out = (sums.sum() - sums) / (counts.sum() - counts)
    return bca_interval(resampled, float(sums.sum() / counts.sum()), left_out, LEVEL)


def student(sums: Floats, counts: Floats, strata: Ints) -> tuple[float, float]:
    mean, n = float(sums.sum() / counts.sum()), len(sums)
    error = math.sqrt(float(((sums - mean * counts) ** 2).sum()) * n / (n - 1)) / float(counts.sum())
    half = float(stats.t.ppf(0.5 + LEVEL / 2, n - 1)) * error
    return mean - half, mean + half


INTERVALS: dict[str, Callable[[Floats, Floats, Ints], tuple[float, float]]] = {
    "one text more": one_text_more, "bootstrap-t": bootstrap_t, "BCa": bca, "Student's t": student,
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
    texts: Population | Design, num_texts: int, draws: int, names: tuple[str, ...] = tuple(INTERVALS)
) -> dict[str, Coverage]:
    """Of each interval over the same draws."""
    rng = np.random.default_rng(num_texts)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    strata = np.zeros(num_texts, dtype=np.intp)
    if isinstance(texts, Design):
        strata = np.unique([str(stratum) for stratum in strata_of(texts.kinds)], return_inverse=True)[1]
    for _ in range(draws):
        sums, counts = texts.draw(rng, num_texts)
        for name in names:
            found[name].append(INTERVALS[name](sums, counts, strata))
    ends = {name: np.array(pairs) / texts.mean for name, pairs in found.items()}
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
    yield f"- a text of a population has {first} to {last} positions, uniform; texts are independent;"
    yield f"- texts of a suite have log-normal means (sigma 1, of *full* 0.8) and lengths (sigma {LENGTH_SIGMA:g});"
    yield f"- intervals at {LEVEL:.0%}. *One text more* is what assay records; strata are those of `divergence/strata.py`;"
    yield f"- bootstrap-t and BCa resample all texts, {NUM_RESAMPLES:,} times; bootstrap-t takes 0.2 of the longer tail;"
    yield f"- {draws:,} draws: a share of 95 % is known to about {196 * math.sqrt(0.95 * 0.05 / draws):.1f} points;"
    every = (*POPULATIONS, *DESIGNS)
    yield from (f"- *{one.name}*: {one.what}{';' if one is not every[-1] else '.'}" for one in every)
    yield ""
    yield "Each cell: covers (truth above / below the interval; median upper end over the truth), in percent."
    yield ""
    yield f"| population or suite | texts | {' | '.join(INTERVALS)} |"
    yield f"|---|---|{'---|' * len(INTERVALS)}"
    rows: list[tuple[Population | Design, int]] = [(one, number) for one in POPULATIONS for number in texts]
    for one, num_texts in [*rows, *((design, len(design.kinds)) for design in DESIGNS)]:
        cells = [
            f"{100 * one.holds:.1f} ({100 * one.above:.1f} / {100 * one.below:.1f}; {one.median_high:.2f})"
            for one in coverage(one, num_texts, draws).values()
        ]
        yield f"| {one.name} | {num_texts} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--texts", default="20,24,48,72,240")
    args = parser.parse_args()
    for line in lines([int(number) for number in args.texts.split(",")], args.draws):
        print(line, flush=True)


if __name__ == "__main__":
    main()
