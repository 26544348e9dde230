"""Texts with a known mean: populations, and suites that ask for so many texts of each kind. Used by interval_coverage.py."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from assay_evaluate.divergence.strata import Kind

Floats = NDArray[np.float64]
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


def agreeing(mean: float, concentration: float) -> Population:
    def sums(rng: np.random.Generator, counts: Floats) -> Floats:
        rates = rng.beta(mean * concentration, (1 - mean) * concentration, len(counts))
        return rng.binomial(counts.astype(int), rates).astype(np.float64)

    spread = 100 * math.sqrt(mean * (1 - mean) / (1 + concentration))
    return Population(f"agrees {mean:g}", f"share of equal first choices, beta with an sd of {spread:.1f} points", mean, sums)


def signed(shift: float) -> Population:
    """As the log of the ratio of probabilities: sums to both sides, larger in texts that are further away."""

    def sums(rng: np.random.Generator, counts: Floats) -> Floats:
        scale = np.exp(0.8 * rng.standard_normal(len(counts)) - 0.32)
        return counts * shift * scale + np.sqrt(counts) * 0.3 * scale * rng.standard_normal(len(counts))

    return Population(
        "signed", "mean log ratio, in texts that differ by sigma 0.8, with noise of 0.3 nats a position", shift, sums
    )


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
"""Of a mean KL."""
AGREEING, SIGNED = (agreeing(0.97, 40), agreeing(0.995, 100)), signed(0.02)


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
    quick(20, late=True),
    quick(20),
    two_strata(),
    full(),
)
