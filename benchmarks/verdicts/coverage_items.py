"""Items and replies with a known truth, and what the product prints of them: an interval for each draw."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from simulated_full import Bools, Floats, Kind, draw_chances

from assay.recipes.gate import Stopping
from assay.recipes.suite import ArithmeticTask, Range
from assay.records.base import Interval
from assay.records.measurement import Acceptance
from assay_evaluate.preflight.known_tasks import REPOSITORIES
from assay_evaluate.statistics.clustered import clustered_mean, clustered_proportion
from assay_evaluate.statistics.decisions import wider_interval
from assay_evaluate.statistics.drafts import acceptance_difference, ratio_standard_error
from assay_evaluate.statistics.graded import mean_of_shares
from assay_evaluate.statistics.item_pairs import Pairs
from assay_evaluate.statistics.paired import paired_difference
from assay_evaluate.statistics.proportions import weighted_sum
from assay_evaluate.statistics.sequential import nominal_levels
from assay_evaluate.statistics.swe_difference import InstancePair, difference
from assay_evaluate.tasks.looks import planned_looks, planned_shares
from assay_evaluate.verdicts.scores import repeated_interval, spendings_of
from assay_evaluate.verdicts.verbosity import Lengths, length_ratio

paired = functools.cache(paired_difference)


# ------------------------------------------------------------------------------------------------ scores
@dataclass(frozen=True)
class Items:
    """So many items of a population of `simulated_full`, of which `loss` is lost on average."""

    num_items: int
    accuracy: float
    discordance: float
    loss: float = 0.0
    kind: Kind = "even"

    def replies(self, rng: np.random.Generator, ours: int, theirs: int) -> tuple[Bools, Bools]:
        """[items, replies] of either side."""
        both = draw_chances(rng, self.num_items, self.kind, self, self.loss)
        before, after = (rng.random((self.num_items, n)) < one[:, None] for one, n in zip(both, (ours, theirs), strict=True))
        return before, after

    def drop(self, rng: np.random.Generator, ours: int, theirs: int) -> Interval:
        before, after = self.replies(rng, ours, theirs)
        if ours == theirs == 1:
            return paired(int((before & ~after).sum()), int((after & ~before).sum()), self.num_items)
        return pairs_of(before, after).drop(0.95)

    def drop_of_these(self, rng: np.random.Generator, replies: int) -> Interval:
        """`estimand: these_items`. The truth is moved to `loss`: it is that of the items drawn."""
        chances = draw_chances(rng, self.num_items, self.kind, self, self.loss)
        before, after = (rng.random((self.num_items, replies)) < one[:, None] for one in chances)
        found = pairs_of(before, after)._replace(of_these_items=True).drop(0.95)
        return moved(found, self.loss - float((chances[0] - chances[1]).mean()))

    def drop_over_looks(self, rng: np.random.Generator, margin: float, most: int = 5) -> Interval:
        """At the look where the task is decided."""
        task = ArithmeticTask(
            kind="arithmetic", name="t", num_items=1, max_tokens=9, temperature=1, num_samples=Range(min=1, max=most)
        )
        looks, spendings = planned_looks(task, Stopping()), spendings_of(Stopping())
        before, after = self.replies(rng, looks[-1].reference_samples, looks[-1].candidate_samples)
        low, high, growth = list[Interval](), list[Interval](), list[float]()
        for number, look in enumerate(looks):
            pairs = pairs_of(before[:, : look.reference_samples], after[:, : look.candidate_samples])
            growth.append(round(10 * math.log(1 / pairs.variance)) / 10)
            informations = [math.exp(one - growth[0]) for one in growth]
            times = planned_shares(looks)[: number + 1]
            for_pass, for_fail = (nominal_levels(times, informations, 0.025, spending)[-1] for spending in spendings)
            low.append(pairs.drop(1 - 2 * for_fail))
            high.append(pairs.drop(1 - 2 * for_pass))
            if high[-1].high < margin or low[-1].low > margin:
                break
        return repeated_interval(low, high, 0.95)

    def accuracy_of(self, rng: np.random.Generator, num_replies: int) -> Interval:
        return mean_of_shares(self.replies(rng, num_replies, 1)[0].mean(axis=1))


def moved(found: Interval, by: float) -> Interval:
    return found.model_copy(update={"low": found.low + by, "high": found.high + by, "value": found.value + by})


def pairs_of(before: Bools, after: Bools) -> Pairs:
    """As `pair_items` makes them."""
    n, common = len(before), min(before.shape[1], after.shape[1])
    items = [str(item) for item in range(n) for _ in range(common)]
    no_answers: list[str | None] = [None] * len(items)
    pairs = Pairs(
        before[:, :common].ravel().tolist(), after[:, :common].ravel().tolist(), 0, no_answers, no_answers, items, items
    )
    if before.shape[1] == after.shape[1]:
        return pairs
    shares = before.mean(axis=1).tolist(), after.mean(axis=1).tolist()
    return pairs._replace(unequal=shares, num_replies=([before.shape[1]] * n, [after.shape[1]] * n))


def mean_use(rng: np.random.Generator, tasks: Sequence[tuple[Items, float]]) -> Interval:
    """The claim about the whole. tasks: with their margins."""
    drops = [one.drop(rng, 2, 1) for one, _ in tasks]
    uses = [
        drop.model_copy(update={"value": drop.value / margin, "low": drop.low / margin, "high": drop.high / margin})
        for drop, (_, margin) in zip(drops, tasks, strict=True)
    ]
    return weighted_sum(uses, [1 / len(uses)] * len(uses))


def events(rng: np.random.Generator, num_items: int, before: float, after: float) -> Interval:
    """Replies cut off or looping, independent on the two sides."""
    ours, theirs = rng.random(num_items) < before, rng.random(num_items) < after
    return paired(int((theirs & ~ours).sum()), int((ours & ~theirs).sum()), num_items)


# ------------------------------------------------------------------------------------------------ clusters
def translations(rng: np.random.Generator, questions: int, languages: int, correlation: float, discordance: float) -> Interval:
    """Every question in every language: an item takes its question's difference with chance sqrt(correlation)."""
    n, labels = questions * languages, np.repeat(np.arange(questions), languages)
    chances = [discordance / 2, discordance / 2, 1 - discordance]
    shared, own = rng.choice([1, -1, 0], p=chances, size=questions)[labels], rng.choice([1, -1, 0], p=chances, size=n)
    moves = np.where(rng.random(n) < math.sqrt(correlation), shared, own)
    by_item = paired(int((moves > 0).sum()), int((moves < 0).sum()), n)
    return wider_interval(by_item, clustered_mean(moves, labels))


def repositories(rng: np.random.Generator, name: str, spread: float, trajectories: int) -> Interval:
    """SWE-bench: each repository's own loss is normal around 0; 17 % of the instances come out differently."""
    sizes = np.array(list(REPOSITORIES[name].values()))
    labels = np.repeat(np.arange(len(sizes)), sizes)
    losses = np.clip(rng.normal(0, spread, len(sizes)), -0.15, 0.15)[labels]
    drawn = rng.random((len(labels), trajectories))
    lost, gained = drawn < ((0.17 + losses) / 2)[:, None], drawn > 1 - ((0.17 - losses) / 2)[:, None]
    ours, theirs = (0.5 + lost.mean(axis=1) / 2), (0.5 + gained.mean(axis=1) / 2)
    if trajectories == 1:
        ours, theirs = lost[:, 0].astype(np.float64), gained[:, 0].astype(np.float64)
    pairs = [InstancePair(str(i), str(label), a, b) for i, (label, a, b) in enumerate(zip(labels, ours, theirs, strict=True))]
    return difference(pairs).drop


def steps_of_trajectories(rng: np.random.Generator, name: str) -> Interval:
    """Mean number of steps over instances; repositories differ by a sixth. Truth: 50."""
    sizes = np.array(list(REPOSITORIES[name].values()))
    labels = np.repeat(np.arange(len(sizes)), sizes)
    own = rng.normal(50, 8, len(sizes))[labels]
    return clustered_mean(own * np.exp(0.5 * rng.standard_normal(len(labels)) - 0.125), labels).interval(0.95)


def flips(rng: np.random.Generator, num_items: int, num_samples: int, mean: float) -> Interval:
    """Items flip with a chance of their own, beta around `mean` with a + b = 1."""
    flipped = rng.random((num_items, num_samples)) < rng.beta(mean, 1 - mean, num_items)[:, None]
    return clustered_proportion(flipped.ravel(), np.repeat(np.arange(num_items), num_samples))


def drafts(rng: np.random.Generator, num_replies: int, spread: float) -> Interval:
    """Replies of 50 to 400 drafted tokens, accepted at 70 % with this standard deviation between replies, on both sides."""
    sides = []
    for _ in range(2):
        drafted = rng.integers(50, 400, num_replies)
        accepted = rng.binomial(drafted, np.clip(rng.normal(0.7, spread, num_replies), 0, 1))
        sides.append(_acceptance(drafted, accepted))
    return acceptance_difference(sides[0], sides[1], 0.95)


def _acceptance(drafted: NDArray[np.int64], accepted: NDArray[np.int64]) -> Acceptance:
    total, right = int(drafted.sum()), int(accepted.sum())
    squares = (float(drafted @ drafted), float(drafted @ accepted), float(accepted @ accepted))
    return Acceptance(
        num_drafts=total, num_draft_tokens=total, num_accepted_tokens=right, rate=right / total, mean_length=None,
        num_replies=len(drafted), rate_standard_error=ratio_standard_error(len(drafted), total, right, squares),
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------ lengths
def _lengths(rng: np.random.Generator, items: int, samples: int, between: float, within: float) -> list[Floats]:
    """Log-normal tokens of either side, the candidate's 5 % longer."""
    own = np.repeat(rng.normal(6, between, items), samples)
    return [np.exp(own + rng.normal(0, within, len(own))) * longer for longer in (1, 1.05)]


def verbosity(rng: np.random.Generator, items: int, samples: int, between: float, within: float) -> Interval:
    ours, theirs = _lengths(rng, items, samples, between, within)
    both = zip(ours, theirs, strict=True)
    lengths = [Lengths(str(at // samples), max(1, round(a)), max(1, round(b)), None) for at, (a, b) in enumerate(both)]
    return length_ratio(lengths, 0.05).increase


def extra_tokens(rng: np.random.Generator, items: int, between: float, within: float) -> Interval:
    """Of every reply, right or wrong: candidate minus reference. Truth: 5 % of the mean length."""
    ours, theirs = _lengths(rng, items, 1, between, within)
    return clustered_mean(theirs - ours, np.arange(items)).interval(0.95)
