"""A loss that sits in a few clusters: false PASS by simulation, and ends against an independent calculation."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy import stats

from assay_evaluate.statistics.clustered import clustered_difference, clustered_mean, cr2_factors, satterthwaite_degrees
from assay_evaluate.statistics.joint.drawn import Evidence
from assay_evaluate.statistics.uneven_clusters import chance_of_none, effective_number

UNEQUAL = (80,) * 5 + (10,) * 55


def drawn(sizes: tuple[int, ...], lossy: float, loss: float, num_draws: int, discordance: float = 0.10) -> Evidence:
    """One reply to each item; `lossy` of the clusters hold all of `loss`."""
    rng = np.random.default_rng(3)
    lost = np.where(rng.random((num_draws, len(sizes))) < lossy, loss / lossy, 0.0)
    better = np.maximum((discordance + lost) / 2, lost)
    worse = np.maximum((discordance - lost) / 2, 0.0)
    only_ours = rng.binomial(sizes, better)
    only_theirs = rng.binomial(np.array(sizes) - only_ours, worse / (1 - better))
    totals, squares = only_ours - only_theirs, (only_ours + only_theirs).sum(axis=1)
    sums = tuple(entry.astype(float) for entry in (totals.sum(axis=1), squares, totals.sum(axis=1), squares))
    return Evidence(sum(sizes), False, sums, totals.astype(float), np.array(sizes, dtype=float))


@pytest.mark.parametrize("sizes", [(20,) * 20, (10,) * 50, (5,) * 104, UNEQUAL])
def test_a_margin_that_a_fifth_of_the_clusters_lost_passes_in_two_and_a_half_percent(sizes: tuple[int, ...]) -> None:
    """Student's t with a CR2 error passes it in 5.3, 3.4, 3.7 and 9.1 %."""
    draws = drawn(sizes, 0.2, 0.05, 3000)
    assert (draws.p_at_least(0.05) < 0.025).mean() < 0.025 + 2 * np.sqrt(0.025 * 0.975 / 3000)


def test_what_it_costs_a_lossless_candidate() -> None:
    """Of 83, 92 and 97 % by Student's t."""
    designs = (((20,) * 20, 0.05, 0.10), ((10,) * 50, 0.05, 0.10), ((5,) * 104, 0.04, 0.05))
    passes = [
        (drawn(sizes, 1.0, 0.0, 2000, discordance).p_at_least(margin) < 0.025).mean() for sizes, margin, discordance in designs
    ]
    assert passes == pytest.approx([0.69, 0.89, 0.957], abs=0.03)


@pytest.mark.parametrize("sizes", [(20,) * 20, UNEQUAL])
def test_the_upper_end_lies_below_a_margin_where_its_p_decides(sizes: tuple[int, ...]) -> None:
    draws = drawn(sizes, 0.3, 0.04, 60)
    for level, margin in itertools.product((0.95, 0.8), (0.01, 0.05, 0.08)):
        low, high = draws.ends(np.full(60, level))
        assert ((draws.p_at_least(margin) < (1 - level) / 2) == (high < margin)).all()
        assert (low <= draws.drop).all() and (high >= draws.drop).all()


def test_one_sample_is_the_same_as_many() -> None:
    sizes = (12, 3, 8, 40, 5, 5, 9, 9, 9, 11, 6, 7, 8, 9, 10, 11, 4, 5, 6, 7, 8, 9, 10)
    labels = np.repeat(np.arange(len(sizes)), sizes)
    rng = np.random.default_rng(6)
    values = rng.choice([1.0, -1.0, 0.0], p=[0.1, 0.05, 0.85], size=len(labels))
    mean = clustered_difference(values, labels)
    totals = np.bincount(labels, weights=values)[None]
    sums = tuple(np.array([(values**power).sum()]) for power in (1, 2, 3, 4))
    many = Evidence(len(values), False, sums, totals, np.array(sizes, dtype=float))
    assert many._uneven is not None
    assert mean.p_at_least(0.15) == pytest.approx(float(many._uneven.p_at_least(0.15)[0]))
    assert (mean.interval(0.9).low, mean.interval(0.9).high) == pytest.approx(
        tuple(float(end[0]) for end in many._uneven.ends(0.9))
    )
    assert (mean.value, mean.standard_error) == (
        pytest.approx(clustered_mean(values, labels).value), pytest.approx(clustered_mean(values, labels).standard_error)
    )  # fmt: skip


def test_towards_the_longer_tail_the_end_is_pearsons() -> None:
    values, labels = np.repeat([1.0, 0.5, *[0.0] * 38], 5), np.repeat(np.arange(40), 5)
    found = clustered_difference(values, labels).interval(0.9)
    apart = (np.array([1.0, 0.5, *[0.0] * 38]) - 0.0375) / 40 * np.sqrt(cr2_factors([5] * 40))
    variance = (apart**2).sum()
    lacking = min(4 * apart.max() ** 2 / variance, 3) * apart.max()
    skewness = ((apart**3).sum() + lacking**3) / (variance + lacking**2) ** 1.5
    at = stats.norm.cdf(stats.t.ppf(0.95, satterthwaite_degrees([5] * 40)))
    assert found.high == pytest.approx(
        0.0375 + lacking + stats.pearson3.ppf(at, skewness, scale=np.sqrt(variance + lacking**2))
    )
    assert found.low == pytest.approx(0.0375 - stats.t.ppf(0.95, 39) * np.sqrt(variance))
    gained = clustered_difference(-values, labels).interval(0.9)
    assert (gained.low, gained.high) == (pytest.approx(-found.high), pytest.approx(-found.low))


@pytest.mark.parametrize(("num_clusters", "claims"), [(1, False), (12, False), (16, False), (17, True), (40, True)])
def test_so_few_clusters_claim_nothing_of_others(num_clusters: int, claims: bool) -> None:
    mean = clustered_difference(np.zeros(5 * num_clusters), np.repeat(np.arange(num_clusters), 5))
    assert (mean.p_at_least(0.05) < 0.025, mean.interval().high < 0.05) == (claims, claims)
    assert mean.p_at_least(0.05) == pytest.approx(min(0.5, 0.8**num_clusters))


def test_unequal_clusters_count_as_fewer() -> None:
    assert effective_number([7] * 9) == 9
    assert effective_number([8, 1, 1]) == pytest.approx(100 / 66)
    assert chance_of_none([8, 1, 1]) == pytest.approx(0.8 ** (100 / 66))
