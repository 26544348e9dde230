"""What "95 %" covers, of every interval that the product prints.

    python benchmarks/verdicts/interval_coverage.py [--draws 2000] [--only "mean KL"]

Each row draws data with a known truth and counts how often the interval, made by the product's own code, holds it. No model and
no server: a quarter of an hour on one core. It prints what interval_coverage.md beside this file has.
"""

from __future__ import annotations

import argparse
import math
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))  # python is run with PYTHONSAFEPATH, which leaves this folder out

from coverage_items import (
    Items,
    drafts,
    events,
    extra_tokens,
    flips,
    mean_use,
    repositories,
    steps_of_trajectories,
    translations,
    verbosity,
)
from coverage_texts import AGREEING, DESIGNS, POPULATIONS, SIGNED, Design, Population

from assay.records.base import Coverage as CoverageWord
from assay.records.base import Interval
from assay_evaluate.divergence.strata import strata_of
from assay_evaluate.statistics.graded import mean_of_shares
from assay_evaluate.statistics.proportions import clopper_pearson, difference_of, wilson
from assay_evaluate.statistics.rates import upper_bound
from assay_evaluate.statistics.skewed import skewed_ends

LEVEL = 0.95
RANGE = (0.93, 0.97)
WORDS: dict[CoverageWord, str] = {"nominal": "95 %", "at_least": "at least 95 %", "about": "about 95 %"}
SELDOM = 0.05
"""Share of the draws that may call themselves otherwise than the row asks for."""
Draw = Callable[[np.random.Generator], Interval]


@dataclass(frozen=True)
class Row:
    """One printed interval on one population. place: module of `assay_evaluate` that makes it."""

    printed: str
    place: str
    population: str
    truth: float
    draw: Draw


@dataclass(frozen=True)
class Coverage:
    """Shares of the draws. above: the truth lies above the interval. called: by the word of the interval's record."""

    above: float
    below: float
    median_width: float
    called: dict[CoverageWord, float]
    num_draws: int

    @property
    def holds(self) -> float:
        return 1 - self.above - self.below

    @property
    def word(self) -> CoverageWord:
        """What most of the intervals are called."""
        return max(self.called, key=lambda word: self.called[word])

    @property
    def remark(self) -> str:
        """What is wrong with the word; empty: nothing."""
        error = math.sqrt(LEVEL * (1 - LEVEL) / self.num_draws)
        if self.holds < RANGE[0]:
            return "**below 93 %**"
        if self.word == "at_least" and self.holds < LEVEL - 2 * error:
            return "**below 95 %**"
        if self.called["nominal"] > SELDOM and self.holds > RANGE[1] + 2 * error:
            return "**above 97 %**"
        return ""


def covers(row: Row, num_draws: int) -> Coverage:
    """The same draws for a row, whatever other rows there are."""
    rng = np.random.default_rng(zlib.crc32(f"{row.printed}{row.population}".encode()))
    drawn = [row.draw(rng) for _ in range(num_draws)]
    low, high = np.array([one.low for one in drawn]), np.array([one.high for one in drawn])
    called = {word: sum(one.coverage == word for one in drawn) / num_draws for word in WORDS}
    above, below = float((high < row.truth).mean()), float((low > row.truth).mean())
    return Coverage(above, below, float(np.median(high - low)), called, num_draws)


# ------------------------------------------------------------------------------------------------ scores
def scores() -> Iterator[Row]:
    place = "item_pairs.Pairs.drop"
    once = {
        "198 questions, 12 % differ": Items(198, 0.8, 0.12), "the same, 4 points lost": Items(198, 0.8, 0.12, 0.04),
        "1319 problems, 3 % differ": Items(1319, 0.96, 0.03), "60 problems, 15 % differ": Items(60, 0.85, 0.15),
        "400 codes, 3 % differ, 2 points lost": Items(400, 0.95, 0.03, 0.02, "broken"),
        "400 generated items, 0.5 % differ (two pairs)": Items(400, 0.99, 0.005),
    }  # fmt: skip
    for name, one in once.items():
        yield Row("loss, one reply to each item", place, name, one.loss, partial(one.drop, ours=1, theirs=1))
    for kind in ("even", "broken", "sure"):
        for replies in ((2, 1), (5, 5)):
            for name, of in (("60 problems", (60, 0.85, 0.15)), ("198 questions", (198, 0.8, 0.12))):
                for loss in (0.0, 0.04 if "198" in name else 0.06):
                    items = Items(*of, loss, kind)  # type: ignore[arg-type]
                    what = f"{name}, {kind}, {replies[0]} + {replies[1]} replies, {100 * loss:g} points lost"
                    yield Row(
                        "loss, several replies", place, what, loss,
                        partial(items.drop, ours=replies[0], theirs=replies[1]),
                    )  # fmt: skip
    for name, items, margin in (
        ("198 questions, even, nothing lost", Items(198, 0.8, 0.12), 0.04),
        ("198 questions, sure, 4 points lost", Items(198, 0.8, 0.12, 0.04, "sure"), 0.04),
        ("60 problems, broken, 6 points lost", Items(60, 0.85, 0.15, 0.06, "broken"), 0.06),
    ):
        yield Row(
            "loss over several looks, when it is decided", "verdicts.scores", name, items.loss,
            partial(items.drop_over_looks, margin=margin),
        )  # fmt: skip
    for n, replies, loss in ((60, 2, 0.0), (198, 5, 0.04)):
        items = Items(n, 0.82, 0.13, loss, "sure")
        yield Row(
            "loss on these items", "fixed_items", f"{n} items, sure, {replies} replies, {100 * loss:g} points lost", loss,
            partial(items.drop_of_these, replies=replies),
        )  # fmt: skip
    tasks = [(Items(198, 0.8, 0.12), 0.04), (Items(60, 0.85, 0.15), 0.06), (Items(541, 0.88, 0.07), 0.03)]
    tasks += [(Items(500, 0.95, 0.04), 0.03), (Items(480, 0.93, 0.05), 0.04), (Items(400, 0.99, 0.005), 0.03)]
    yield Row("mean use of the margins", "pooled", "six tasks of `full`, nothing lost", 0.0, partial(mean_use, tasks=tasks))
    for n, depth in ((8, "one length and depth"), (24, "one length and depth"), (104, "one length")):
        yield Row(
            "loss at a length (cells, effective length)", "verdicts.long_context", f"{n} items ({depth}), 5 % differ", 0.0,
            partial(Items(n, 0.92, 0.05).drop, ours=1, theirs=1),
        )  # fmt: skip


def single_scores() -> Iterator[Row]:
    for n, accuracy in ((60, 0.85), (198, 0.8), (480, 0.97), (400, 0.995)):
        yield Row(
            "score, one reply (Wilson)", "proportions", f"{n} items, {100 * accuracy:g} % right", accuracy,
            partial(_rate, of=wilson, n=n, rate=accuracy),
        )  # fmt: skip
    for n, accuracy, discordance, replies in (
        (60, 0.85, 0.15, 2),
        (60, 0.85, 0.15, 5),
        (198, 0.8, 0.12, 5),
        (400, 0.99, 0.005, 2),
    ):
        what = f"{n} items, {100 * accuracy:g} % right, {replies} replies"
        yield Row(
            "score, several replies", "graded.mean_of_shares", what, accuracy,
            partial(Items(n, accuracy, discordance).accuracy_of, num_replies=replies),
        )  # fmt: skip
    for n in (40, 104):
        yield Row(
            "mean score with partial credit", "graded.mean_of_shares", f"{n} items, four in five whole, the rest uniform", 0.9,
            partial(_partial_credit, n=n),
        )  # fmt: skip
    yield Row(
        "published minus measured", "verdicts.published", "198 questions, 80 % right, measured with 2 replies, others", 0.0,
        _published,
    )  # fmt: skip
    for n, rate in ((8, 0.9), (256, 0.01), (7500, 4e-4)):
        yield Row(
            "rate (cells of RULER, probes, levers, budget check)", "proportions.clopper_pearson",
            f"{n} trials, {100 * rate:g} %", rate, partial(_rate, of=clopper_pearson, n=n, rate=rate),
        )  # fmt: skip
    yield Row(
        "upper bound of a rate", "rates.upper_bound", "7500 requests, 0.04 %", 4e-4,
        _upper_bound,
    )  # fmt: skip


def _rate(rng: np.random.Generator, of: Callable[[int, int], Interval], n: int, rate: float) -> Interval:
    return of(int(rng.binomial(n, rate)), n)


def _partial_credit(rng: np.random.Generator, n: int) -> Interval:
    return mean_of_shares(np.where(rng.random(n) < 0.8, 1.0, rng.random(n)))


def _published(rng: np.random.Generator) -> Interval:
    return difference_of(wilson(int(rng.binomial(198, 0.8)), 198), Items(198, 0.8, 0.12).accuracy_of(rng, 2))


def _upper_bound(rng: np.random.Generator) -> Interval:
    high = upper_bound(int(rng.binomial(7500, 4e-4)), 7500)
    return Interval(value=high, low=0.0, high=high, n=7500)


# ------------------------------------------------------------------------------------------------ dependent items
def clusters() -> Iterator[Row]:
    for correlation in (0.0, 0.1, 0.3):
        yield Row(
            "loss, translations of a question", "clustered", f"250 questions in 11 languages, correlation {correlation:g}", 0.0,
            partial(translations, questions=250, languages=11, correlation=correlation, discordance=0.05),
        )  # fmt: skip
    for name, spread, trajectories in (
        ("verified", 0.0, 1), ("verified", 0.02, 1), ("verified", 0.05, 1), ("verified", 0.05, 4), ("lite", 0.05, 1),
        ("multilingual", 0.05, 1),
    ):  # fmt: skip
        what = f"{name}, sd of repositories {100 * spread:g} points, trajectories: {trajectories}"
        yield Row(
            "SWE-bench: loss", "swe_difference", what, 0.0,
            partial(repositories, name=name, spread=spread, trajectories=trajectories),
        )  # fmt: skip
    for name in ("verified", "multilingual"):
        yield Row(
            "SWE-bench: steps of a trajectory", "tasks.swebench.task", f"{name}, repositories differ by a sixth", 50.0,
            partial(steps_of_trajectories, name=name),
        )  # fmt: skip
    for items, samples, mean in ((60, 4, 0.05), (200, 4, 0.05), (200, 8, 0.15)):
        yield Row(
            "flips, several replies", "clustered_proportion", f"{items} items, {samples} replies, {100 * mean:g} %", mean,
            partial(flips, num_items=items, num_samples=samples, mean=mean),
        )  # fmt: skip
    for replies in (40, 400):
        for spread in (0.0, 0.08):
            yield Row(
                "acceptance of drafts, by reply", "drafts", f"{replies} replies with an sd of {100 * spread:g} points", 0.0,
                partial(drafts, num_replies=replies, spread=spread),
            )  # fmt: skip


def lengths() -> Iterator[Row]:
    for items, samples, between, within in ((30, 1, 0.5, 0.3), (100, 1, 1.0, 0.5), (100, 4, 1.0, 0.5), (400, 1, 1.0, 0.5)):
        what = f"{items} items, {samples} replies, log-normal: sigma {between:g} between items, {within:g} between replies"
        yield Row(
            "tokens per answer (verbosity)", "verdicts.verbosity", what, 0.05,
            partial(verbosity, items=items, samples=samples, between=between, within=within),
        )  # fmt: skip
    for items, between, within in ((30, 0.5, 0.3), (198, 1.0, 0.5), (1319, 1.0, 0.5)):
        truth = 0.05 * math.exp(6 + between**2 / 2 + within**2 / 2)
        yield Row(
            "more tokens a reply", "item_pairs.output_tokens", f"{items} items, sigma {between:g} and {within:g}", truth,
            partial(extra_tokens, items=items, between=between, within=within),
        )  # fmt: skip
    for n, before, after in ((200, 0.02, 0.02), (1000, 0.01, 0.01), (1000, 0.01, 0.03)):
        yield Row(
            "more replies cut off or looping", "verdicts.truncation",
            f"{n} replies, {100 * before:g} % of the reference's and {100 * after:g} % of the candidate's", after - before,
            partial(events, num_items=n, before=before, after=after),
        )  # fmt: skip


# ------------------------------------------------------------------------------------------------ divergence
def texts() -> Iterator[Row]:
    for one in POPULATIONS:
        for n in (20, 24, 48):
            yield _of_texts("mean KL", one, n)
    for design in DESIGNS:
        yield _of_texts("mean KL", design, len(design.kinds))
    for one in AGREEING:
        for n in (20, 48):
            yield _of_texts("top-1 agreement", one, n, most=1.0)
    for n in (20, 48):
        yield _of_texts("perplexity ratio, corrected KL, change of a chance", SIGNED, n, least=-math.inf)


def _of_texts(printed: str, what: Population | Design, n: int, least: float = 0.0, most: float = math.inf) -> Row:
    kinds = what.kinds if isinstance(what, Design) else [()] * n
    strata = np.unique([str(stratum) for stratum in strata_of(kinds)], return_inverse=True)[1]

    def draw(rng: np.random.Generator) -> Interval:
        sums, counts = what.draw(rng, n)
        low, high = skewed_ends(sums, counts, strata)
        return Interval(
            value=float(sums.sum() / counts.sum()), low=max(low, least), high=min(high, most), n=n, coverage="at_least"
        )

    return Row(printed, "skewed.skewed_mean", f"{n} texts: {what.name}", what.mean, draw)


def every_row() -> list[Row]:
    return [*scores(), *single_scores(), *clusters(), *lengths(), *texts()]


# ------------------------------------------------------------------------------------------------ the table
def lines(num_draws: int, only: str) -> Iterator[str]:
    error = 100 * math.sqrt(LEVEL * (1 - LEVEL) / num_draws)
    yield "# What 95 % covers"
    yield ""
    yield f"`python benchmarks/verdicts/interval_coverage.py --draws {num_draws}`"
    yield ""
    yield f"{num_draws:,} draws a row: a share of 95 % has a standard error of {error:.2f} points. Intervals are made by the"
    yield "product's own code, items and replies drawn anew each time. *called*: what the interval calls itself where it is"
    yield 'printed, with the share of draws where that is not all of them. What is called "95 %" covers 93 to 97 %, "at least'
    yield '95 %" no less than 95 %, each within two standard errors; the last column says where that does not hold.'
    yield ""
    yield "Populations of items, with accuracy and discordance of the task: *even*, an item's chance of a right reply is beta;"
    yield "*broken*, some items are lost wholly; *sure*, an item is right nearly always or nearly never. Populations of texts:"
    yield ""
    yield from (f"- *{one.name}*: {one.what}" for one in (*POPULATIONS, *DESIGNS, *AGREEING, SIGNED))
    yield ""
    yield "| printed | by | population | called | covers | truth above | truth below | |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in (one for one in every_row() if only in one.printed):
        found = covers(row, num_draws)
        called, share = WORDS[found.word], found.called[found.word]
        called += "" if share == 1 else f" ({100 * share:.0f} % of draws)"
        shares = " | ".join(f"{100 * share:.1f} %" for share in (found.holds, found.above, found.below))
        yield f"| {row.printed} | `{row.place}` | {row.population} | {called} | {shares} | {found.remark} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--draws", type=int, default=2000)
    parser.add_argument("--only", default="", help="only what is printed with these words in its name; rows are independent")
    args = parser.parse_args()
    for line in lines(args.draws, args.only):
        print(line, flush=True)


if __name__ == "__main__":
    main()
