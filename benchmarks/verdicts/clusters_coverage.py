"""How often the intervals of dependent items cover the truth, and how often a true loss of the margin passes: by simulation.

    python benchmarks/verdicts/clusters_coverage.py            # prints the tables of clusters_coverage.md
    python benchmarks/verdicts/clusters_coverage.py --draws 300

Every function draws from a stated model with a known truth and counts; the intervals are those of the verdicts, beside
those that they took the place of. Seeded: the same draws give the same tables.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from assay.records.measurement import Acceptance
from assay_evaluate.preflight.known_tasks import REPOSITORIES
from assay_evaluate.statistics import (
    clustered_mean,
    clustered_proportion,
    cr2_factors,
    paired_difference,
    satterthwaite_degrees,
    score_statistic,
    wider,
    wilson,
)
from assay_evaluate.statistics.drafts import acceptance_difference, ratio_standard_error
from assay_evaluate.statistics.proportions import independent_difference

Floats = NDArray[np.float64]
MARGIN = 0.05
DISCORDANCE = 0.17


class Covers(NamedTuple):
    """Shares of the draws. false_pass: upper end below the margin, the truth being the margin."""

    before: float
    now: float
    false_pass_before: float = float("nan")
    false_pass_now: float = float("nan")


# ------------------------------------------------------------------------------------------------ repositories
def repositories(sizes: Sequence[int], spread: float, loss: float, num_draws: int, seed: int = 1) -> Covers:
    """Instances of repositories whose true losses are normal around `loss` with this standard deviation.

    One trajectory each; DISCORDANCE of the instances come out differently, more where a repository's loss is larger than that.
    before: t with one degree fewer than repositories and the factor G / (G - 1); now: CR2 with Bell and McCaffrey's degrees.
    Both with Tango's interval by instance beside them, the wider end counting.
    """
    rng = np.random.default_rng(seed)
    size_G, n, groups = np.array(sizes, dtype=np.float64), sum(sizes), len(sizes)
    losses = np.clip(rng.normal(loss, spread, (num_draws, groups)), -0.99, 0.99)
    rates = np.maximum(DISCORDANCE, np.abs(losses))
    b = rng.binomial(size_G.astype(int), (rates + losses) / 2)
    c = rng.binomial(size_G.astype(int) - b, (rates - losses) / (2 - rates - losses))
    seen = (b - c).sum(axis=1) / n
    residual = (b - c) - seen[:, None] * size_G
    z = score_statistic(loss, b.sum(axis=1), c.sum(axis=1), n) if loss else _mcnemar(b.sum(axis=1), c.sum(axis=1))
    before = np.sqrt((residual**2).sum(axis=1) * groups / (groups - 1)) / n, groups - 1
    now = np.sqrt((residual**2 * cr2_factors(size_G)).sum(axis=1)) / n, satterthwaite_degrees(size_G)
    counted = []
    for error, degrees in (before, now):
        t = (seen - loss) / np.maximum(error, 1e-12)
        limit = stats.t.ppf(0.975, degrees)
        above, below = (t > limit) & (z > 1.96), (t < -limit) & (z < -1.96)
        counted.append((1 - float((above | below).mean()), float(below.mean())))
    (cover_before, low_before), (cover_now, low_now) = counted
    return Covers(cover_before, cover_now, low_before, low_now)


def _mcnemar(b: NDArray[np.int64], c: NDArray[np.int64]) -> Floats:
    return np.asarray((b - c) / np.sqrt(np.maximum(b + c, 1)))


# ------------------------------------------------------------------------------------------------ translations
def translations(
    questions: int, languages: int, correlation: float, discordance: float, num_draws: int, seed: int = 2
) -> Covers:
    """Every question in every language; two of its differences have this correlation, nothing or the margin is lost.

    An item takes its question's difference with chance sqrt(correlation), else one of its own. Margin: two points. before: by
    item (Tango); now: the wider of that and the interval over questions.
    """
    rng, n, margin = np.random.default_rng(seed), questions * languages, 0.02
    labels = np.repeat(np.arange(questions), languages)
    covered = {"before": 0, "now": 0}
    passed = {"before": 0, "now": 0}
    for loss in (0.0, margin):
        chances = [(discordance + loss) / 2, (discordance - loss) / 2, 1 - discordance]
        for _ in range(num_draws):
            shared = rng.choice([1, -1, 0], p=chances, size=questions)[labels]
            own = rng.choice([1, -1, 0], p=chances, size=n)
            moves = np.where(rng.random(n) < np.sqrt(correlation), shared, own)
            by_item = paired_difference(int((moves > 0).sum()), int((moves < 0).sum()), n)
            for name, found in (("before", by_item), ("now", wider(by_item, clustered_mean(moves, labels)))):
                covered[name] += found.low <= loss <= found.high
                passed[name] += loss > 0 and found.high < margin
    shares = [covered[name] / (2 * num_draws) for name in covered] + [passed[name] / num_draws for name in passed]
    return Covers(*shares)


# ------------------------------------------------------------------------------------------------ several samples
def resolutions(num_instances: int, num_trajectories: int, num_draws: int, seed: int = 3) -> tuple[float, float, float]:
    """(by unequal shares as before, by mean square as now, truth), half-widths in points: instances that both sides resolve
    with a chance of their own, Beta(0.35, 0.35) distributed; the truth is 1.96 standard deviations of the difference drawn."""
    rng = np.random.default_rng(seed)
    chances = rng.beta(0.35, 0.35, num_instances)
    drawn = rng.binomial(num_trajectories, chances, (2, num_draws, num_instances)) / num_trajectories
    apart = drawn[0] - drawn[1]
    before = 1.96 * np.sqrt((apart != 0).mean(axis=1) / num_instances).mean()
    now = 1.96 * np.sqrt((apart**2).mean(axis=1) / num_instances).mean()
    return 100 * float(before), 100 * float(now), 196 * float(apart.mean(axis=1).std())


def flips(num_items: int, num_samples: int, mean: float, num_draws: int, seed: int = 4) -> Covers:
    """Items flip with a chance of their own, Beta distributed around `mean` with a + b = 1; each is asked several times.

    before: Wilson's interval over all pairs; now: with the effective number of pairs.
    """
    rng, labels = np.random.default_rng(seed), np.repeat(np.arange(num_items), num_samples)
    before = now = 0
    for _ in range(num_draws):
        chances = rng.beta(mean, 1 - mean, num_items)
        flipped = rng.random((num_items, num_samples)) < chances[:, None]
        plain, clustered = wilson(int(flipped.sum()), flipped.size), clustered_proportion(flipped.ravel(), labels)
        before += plain.low <= mean <= plain.high
        now += clustered.low <= mean <= clustered.high
    return Covers(before / num_draws, now / num_draws)


def drafts(num_replies: int, spread: float, num_draws: int, seed: int = 5) -> Covers:
    """Replies of 50 to 400 drafted tokens whose acceptance is normal around 70 % with this standard deviation, on both sides.

    before: drafted tokens as independent (Newcombe); now: replies as clusters.
    """
    rng = np.random.default_rng(seed)
    before = now = 0
    for _ in range(num_draws):
        sides = []
        for _side in range(2):
            drafted = rng.integers(50, 400, num_replies)
            accepted = rng.binomial(drafted, np.clip(rng.normal(0.7, spread, num_replies), 0, 1))
            sides.append(_acceptance(drafted, accepted))
        ours, theirs = sides
        plain = independent_difference(
            ours.num_accepted_tokens, ours.num_draft_tokens, theirs.num_accepted_tokens, theirs.num_draft_tokens
        )
        clustered = acceptance_difference(ours, theirs, 0.95)
        before += plain.low <= 0 <= plain.high
        now += clustered.low <= 0 <= clustered.high
    return Covers(before / num_draws, now / num_draws)


def _acceptance(drafted: NDArray[np.int64], accepted: NDArray[np.int64]) -> Acceptance:
    total, right = int(drafted.sum()), int(accepted.sum())
    squares = (float(drafted @ drafted), float(drafted @ accepted), float(accepted @ accepted))
    return Acceptance(
        num_drafts=total, num_draft_tokens=total, num_accepted_tokens=right, rate=right / total, mean_length=None,
        num_replies=len(drafted), rate_standard_error=ratio_standard_error(len(drafted), total, right, squares),
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------ the tables
def tables(num_draws: int) -> Iterator[str]:
    yield f"""# Coverage of intervals over clusters

Made by `python benchmarks/verdicts/clusters_coverage.py --draws {num_draws}`; seeded. Nominal: 95 % covered, 2.5 % false PASS.

## SWE-bench: repositories as clusters
One trajectory per instance, {100 * DISCORDANCE:.0f} % come out differently; each repository's own loss is normal around 0, or
around the margin of {100 * MARGIN:.0f} points for false PASS. Truth: the mean over all such repositories. Before: t with G - 1
degrees; now: CR2, Bell and McCaffrey's degrees; beside both Tango's interval by instance, the wider end counts.
{10 * num_draws:,} draws.

| data set | degrees | sd of repositories, points | covers, before | covers, now | false PASS, before | false PASS, now |
|---|---|---|---|---|---|---|"""
    for name in ("verified", "lite", "multilingual"):
        sizes = tuple(REPOSITORIES[name].values())
        for spread in (0.0, 0.02, 0.05, 0.10):
            alone = repositories(sizes, spread, 0.0, 10 * num_draws)
            lost = repositories(sizes, spread, MARGIN, 10 * num_draws)
            yield (
                f"| {name} | {satterthwaite_degrees(sizes):.1f} | {100 * spread:.0f} | {alone.before:.1%} | {alone.now:.1%} | "
                f"{lost.false_pass_before:.1%} | {lost.false_pass_now:.1%} |"
            )
    yield f"""
## Translations of one question
250 questions in eleven languages, or 588 in eight; 5 or 8 % of the items come out differently; margin 2 points. Before: by
item; now: the wider of that and the interval over questions. {num_draws:,} draws each without loss and with the margin lost.

| questions x languages | correlation | covers, before | covers, now | false PASS, before | false PASS, now |
|---|---|---|---|---|---|"""
    for questions, languages, discordance in ((250, 11, 0.05), (588, 8, 0.08)):
        for correlation in (0.0, 0.1, 0.3):
            one = translations(questions, languages, correlation, discordance, num_draws)
            yield (
                f"| {questions} x {languages} | {correlation} | {one.before:.1%} | {one.now:.1%} | "
                f"{one.false_pass_before:.1%} | {one.false_pass_now:.1%} |"
            )
    yield f"""
## Resolution with several trajectories
500 instances, each resolved by both sides with a chance of its own, Beta(0.35, 0.35). Points; {num_draws:,} draws.

| trajectories | by unequal shares (before) | by mean square (now) | truth |
|---|---|---|---|"""
    for count in (1, 2, 4, 8):
        yield f"| {count} | " + " | ".join(f"{value:.2f}" for value in resolutions(500, count, num_draws)) + " |"
    yield f"""
## Flips of several samples
Items flip with a chance of their own, Beta(m, 1 - m). Before: Wilson over pairs; now: with the effective number. {num_draws:,}
draws.

| items x samples | mean rate | covers, before | covers, now |
|---|---|---|---|"""
    for items, samples, mean in ((60, 4, 0.05), (60, 8, 0.15), (200, 4, 0.05), (200, 8, 0.15)):
        one = flips(items, samples, mean, num_draws)
        yield f"| {items} x {samples} | {mean:.0%} | {one.before:.1%} | {one.now:.1%} |"
    yield f"""
## MTP acceptance
Replies of 50 to 400 drafted tokens, accepted at 70 % on average, on both sides. Before: drafted tokens as independent; now:
replies as clusters. {num_draws:,} draws.

| replies | sd between replies, points | covers, before | covers, now |
|---|---|---|---|"""
    for replies in (40, 400):
        for spread in (0.0, 0.08, 0.15):
            one = drafts(replies, spread, num_draws)
            yield f"| {replies} | {100 * spread:.0f} | {one.before:.1%} | {one.now:.1%} |"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=4000)
    for line in tables(parser.parse_args().draws):
        print(line, flush=True)
