"""The mean difference on these very items: against Welch's test, by simulation, and beside the interval for such items."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from assay_evaluate.statistics.fixed_items import FixedItems, fixed_items
from assay_evaluate.statistics.graded import graded_difference
from assay_evaluate.statistics.paired import paired_difference


def of(reference: np.ndarray, candidate: np.ndarray) -> FixedItems:
    """[items, replies] of both sides."""
    counts = [np.full(len(side), side.shape[1]) for side in (reference, candidate)]
    found = fixed_items(reference.mean(axis=1), candidate.mean(axis=1), *counts)
    assert found is not None
    return found


@pytest.mark.parametrize(("r", "c"), [(5, 5), (7, 3)])
def test_one_item_is_welchs_test(r: int, c: int) -> None:
    rng = np.random.default_rng(r)
    reference, candidate = rng.random(r) < 0.6, rng.random(c) < 0.5
    assert 0 < reference.mean() < 1 and 0 < candidate.mean() < 1
    result, each = of(reference[None, :], candidate[None, :]), min(r, c)
    welch = stats.ttest_ind(reference.astype(float), candidate.astype(float), equal_var=False)
    assert result.value == pytest.approx(reference.mean() - candidate.mean())
    assert result.degrees == pytest.approx(welch.df)
    unpadded = (result.standard_error * (1 + 2 / each)) ** 2 - 1 / each**2
    assert unpadded == pytest.approx(reference.var(ddof=1) / r + candidate.var(ddof=1) / c)


def test_items_are_strata() -> None:
    rng = np.random.default_rng(2)
    reference, candidate = rng.random((40, 3)) < 0.7, rng.random((40, 4)) < 0.6
    by_hand = sum(a.var(ddof=1) / 3 + b.var(ddof=1) / 4 for a, b in zip(reference, candidate, strict=True))
    mean = of(reference, candidate)
    assert mean.standard_error == pytest.approx(np.sqrt(by_hand + 1 / 9) / (40 + 2 / 3))
    assert (mean.num_items, mean.num_pairs) == (40, 120)
    low, high = stats.t.interval(0.95, mean.degrees, loc=mean.value, scale=mean.standard_error)
    assert (mean.interval(0.95).low, mean.interval(0.95).high) == pytest.approx((low, high))
    assert mean.p_at_least(high) == pytest.approx(0.025) == mean.p_at_most(low)


def test_equal_replies_are_no_point() -> None:
    mean = of(np.ones((30, 2), dtype=bool), np.ones((30, 2), dtype=bool))
    assert mean.interval(0.95).high == pytest.approx(paired_difference(0, 0, 60).high)
    assert (mean.p_at_least(0.0), mean.p_at_most(0.0)) == (1.0, 1.0)


def test_one_reply_on_a_side_says_nothing_of_these_items() -> None:
    assert fixed_items([1, 0], [1, 1], [2, 2], [1, 1]) is None
    with pytest.raises(ValueError, match="at least one reply"):
        fixed_items([1, 0], [1, 1], [2, 0], [2, 2])
    with pytest.raises(ValueError, match="at least one reply"):
        fixed_items([1, 0], [1], [2, 2], [2])


def test_a_reply_that_is_missing_counts_as_the_most_variable() -> None:
    full = fixed_items([0.5, 1.0], [1.0, 1.0], [2, 2], [2, 2])
    missing = fixed_items([0.5, 1.0], [1.0, 1.0], [2, 2], [2, 1])
    assert full is not None and missing is not None
    assert (missing.standard_error * 3) ** 2 - (full.standard_error * 3) ** 2 == pytest.approx(0.25)


def population(kind: str, n: int, loss: float) -> tuple[np.ndarray, np.ndarray]:
    """Chances of a right reply: GPQA's items, all losing alike, or a few of them wholly."""
    rng = np.random.default_rng(8)
    reference = rng.beta(0.48, 0.12, n) if kind != "sure" else np.where(rng.random(n) < 0.8, 0.97, 0.03)
    if kind == "even":
        return reference, reference * (1 - loss / reference.mean())
    lost = np.argsort(rng.random(n)).tolist()
    candidate = reference.copy()
    while lost and reference.mean() - candidate.mean() < loss:
        candidate[lost.pop()] = 0.0
    return reference, candidate


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["even", "broken", "sure"])
@pytest.mark.parametrize(("n", "replies"), [(60, 2), (198, 2), (198, 5)])
def test_it_covers_and_passes_a_lost_margin_seldom(kind: str, n: int, replies: int) -> None:
    chances = population(kind, n, 0.1)
    truth, rng = float((chances[0] - chances[1]).mean()), np.random.default_rng(9)
    drawn = [[rng.random((n, replies)) < side[:, None] for side in chances] for _ in range(1500)]
    results = [of(*sides) for sides in drawn]
    covers = np.mean([entry.interval(0.95).low <= truth <= entry.interval(0.95).high for entry in results])
    assert covers >= 0.94
    assert np.mean([entry.p_at_least(truth) < 0.025 for entry in results]) <= 0.025 + 3 * 0.004
    assert np.mean([entry.p_at_most(truth) < 0.025 for entry in results]) <= 0.025 + 3 * 0.004
    if kind != "even" and replies > 2:  # what items lose differs: such items are less certain than these
        width = np.mean([entry.interval(0.95).high - entry.interval(0.95).low for entry in results])
        such = [graded_difference(*(side.mean(axis=1) for side in sides)) for sides in drawn[:50]]
        assert width < 0.7 * np.mean([entry.high - entry.low for entry in such])


def test_replies_needed_would_do() -> None:
    chances = population("even", 198, 0.0)
    rng = np.random.default_rng(10)
    found = of(*(rng.random((198, 2)) < side[:, None] for side in chances))
    needed = found.replies_needed(2, 0.04, 0.95, 0.8)
    assert needed > 2
    passed = [of(*(rng.random((198, needed)) < side[:, None] for side in chances)).p_at_least(0.04) < 0.025 for _ in range(300)]
    assert 0.72 <= np.mean(passed) <= 0.95
    with pytest.raises(ValueError, match="above 0"):
        found.replies_needed(2, 0.0, 0.95, 0.8)
