"""Accepted drafts of two sides: a drop that sits in few prompts, or in few long replies."""

from __future__ import annotations

import numpy as np
import pytest

from assay_evaluate.statistics.drafts import paired_acceptance_difference

RUNS = 400
LENGTHS = {
    "all alike": lambda rng: np.full(100, 300),
    "log-normal": lambda rng: rng.lognormal(5, 1, 100).astype(int) + 3,
    "one prompt in ten is forty times as long": lambda rng: np.where(rng.random(100) < 0.1, 4000, 100),
}


def passes(lengths: str, lossy: float, drop: float, margin: float) -> float:
    """Share of runs whose upper end is below the margin, where `lossy` of the prompts hold all of the drop."""
    rng, result = np.random.default_rng(4), []
    for _ in range(RUNS):
        drafted = LENGTHS[lengths](rng)
        before = rng.beta(6, 2, 100)
        after = before * (1 - np.where(rng.random(100) < lossy, drop / lossy / 0.75, 0.0))
        counts = [drafted, rng.binomial(drafted, before), drafted, rng.binomial(drafted, after)]
        result.append(paired_acceptance_difference(np.stack(counts, axis=1), 0.95).high < margin)
    return float(np.mean(result))


@pytest.mark.parametrize(("lengths", "before"), [("all alike", 0.045), ("log-normal", 0.0875), (list(LENGTHS)[2], 0.14)])
def test_a_drop_of_the_margin_in_a_fifth_of_the_prompts_seldom_passes(lengths: str, before: float) -> None:
    """before: with Student's t alone."""
    assert passes(lengths, 0.2, 0.10, 0.10) < 0.025 + 2 * np.sqrt(0.025 * 0.975 / RUNS) < before


def test_a_copy_still_passes() -> None:
    assert [passes(lengths, 1.0, 0.0, 0.10) > 0.95 for lengths in ("all alike", "log-normal")] == [True, True]


def test_where_tokens_lie_in_too_few_prompts_nothing_is_claimed_of_others() -> None:
    """Ten prompts of 4,000 tokens and ninety of 100 count as 15: a fifth that is lossy is in none of them with 3.6 %."""
    counts = [(drafted, drafted // 2, drafted, drafted // 2) for drafted in [4000] * 10 + [100] * 90]
    assert paired_acceptance_difference(counts, 0.95).high == 1.0
    assert paired_acceptance_difference([(100, 50, 100, 50)] * 100, 0.95).high < 0.001
