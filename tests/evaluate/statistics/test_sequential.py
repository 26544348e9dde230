"""Group-sequential boundaries against published tables, and by simulation."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from scipy import stats

from assay_evaluate.statistics.decisions import holm
from assay_evaluate.statistics.sequential import Spending, SpendingName, nominal_levels, sequential_p

OBRIEN_FLEMING, POCOCK = Spending("obrien_fleming"), Spending("pocock")


def bounds(times: list[float], alpha: float, spending: Spending) -> list[float]:
    return [float(stats.norm.isf(level)) for level in nominal_levels(times, times, alpha, spending)]


def fifths(num_looks: int) -> list[float]:
    return [(look + 1) / num_looks for look in range(num_looks)]


@pytest.mark.parametrize(
    ("spending", "num_looks", "published"),
    [
        # Lan & DeMets 1983, as LanDeM (Reboussin et al. 2000) and gsDesign (sfLDOF, sfLDPocock) tabulate them.
        (OBRIEN_FLEMING, 2, [2.9626, 1.9686]),
        (OBRIEN_FLEMING, 3, [3.7103, 2.5114, 1.9930]),
        (OBRIEN_FLEMING, 5, [4.8769, 3.3569, 2.6803, 2.2898, 2.0310]),
        (POCOCK, 5, [2.4380, 2.4268, 2.4101, 2.3966, 2.3859]),
        # gsDesign's default (sfHSD, gamma -4, three looks).
        (Spending("hwang_shih_decani", -4), 3, [3.0107, 2.5465, 1.9992]),
    ],
)
def test_bounds_are_the_published_ones(spending: Spending, num_looks: int, published: list[float]) -> None:
    np.testing.assert_allclose(bounds(fifths(num_looks), 0.025, spending), published, atol=2e-4)


def test_bounds_agree_with_the_multivariate_normal() -> None:
    """Times and information apart: what is spent follows the plan, the correlation what was seen."""
    times, informations = [0.3, 0.5, 1.0], [1.0, 1.2, 3.0]
    results = [stats.norm.isf(level) for level in nominal_levels(times, informations, 0.025, POCOCK)]
    correlation = np.array([[np.sqrt(min(a, b) / max(a, b)) for b in informations] for a in informations])
    for look in range(1, 4):
        if look == 1:
            stays = stats.norm.cdf(results[0])
        else:
            normal = stats.multivariate_normal(mean=np.zeros(look), cov=correlation[:look, :look], abseps=1e-7, seed=1)
            stays = normal.cdf(np.array(results[:look]))
        assert 1 - stays == pytest.approx(POCOCK.spent(times[look - 1], 0.025), abs=2e-6)


@pytest.mark.parametrize(
    "spending", [OBRIEN_FLEMING, POCOCK, Spending("hwang_shih_decani", -2), Spending("hwang_shih_decani", 0)]
)
def test_what_is_spent_ascends_from_nothing_to_alpha(spending: Spending) -> None:
    spent = [spending.spent(time, 0.025) for time in np.linspace(0, 1, 21)]
    assert spent[0] == 0
    assert spent[-1] == 0.025
    assert all(before < after for before, after in pairwise(spent))


def test_one_look_is_the_plain_test() -> None:
    assert nominal_levels([1.0], [7.0], 0.025) == [0.025]
    assert sequential_p([0.012345678901234567], [1.0], [7.0]) == 0.012345678901234567


def test_a_sequential_p_is_the_level_at_which_the_look_would_reject() -> None:
    times, informations, p_values = [0.25, 0.5, 1.0], [1.0, 1.9, 4.1], [0.2, 0.011, 0.04]
    for spending in (OBRIEN_FLEMING, POCOCK, Spending("hwang_shih_decani", -2)):
        p_value = sequential_p(p_values, times, informations, spending)
        above = nominal_levels(times, informations, p_value * 1.001, spending)
        below = nominal_levels(times, informations, p_value * 0.999, spending)
        assert any(p < level for p, level in zip(p_values, above, strict=True))
        assert not any(p < level for p, level in zip(p_values, below, strict=True))


def test_a_look_more_never_makes_a_rejection_undone() -> None:
    times, informations = [0.25, 0.5, 1.0], [1.0, 2.0, 4.0]
    first = sequential_p([0.004], times[:1], informations[:1])
    assert first < 0.025
    assert sequential_p([0.004, 0.9, 0.9], times, informations) == pytest.approx(first, rel=1e-4)


def test_information_that_does_not_grow_is_no_reason_to_look_again() -> None:
    """Both looks are then nearly the same number, and the second may be held to what was spent in all."""
    levels = nominal_levels([0.5, 1.0], [3.0, 2.9], 0.025)
    assert levels[0] < levels[1] < 0.025
    assert nominal_levels([0.5, 1.0], [3.0, 3.0], 0.025) == levels


@pytest.mark.parametrize("spending", [OBRIEN_FLEMING, POCOCK])
def test_false_rejections_are_what_is_spent(spending: Spending) -> None:
    """200,000 walks under the null hypothesis, looks at unequal steps: 2.5 % +- 0.1."""
    rng = np.random.default_rng(5)
    informations = np.array([1.0, 1.5, 2.25, 4.0])
    steps = np.diff(np.concatenate([[0], informations]))
    walks = (rng.standard_normal((200_000, 4)) * np.sqrt(steps)).cumsum(axis=1)
    p_values = stats.norm.sf(walks / np.sqrt(informations))
    levels = nominal_levels([0.27, 0.4, 0.6, 1.0], informations.tolist(), 0.025, spending)
    assert (p_values < levels).any(axis=1).mean() == pytest.approx(0.025, abs=0.001)


def test_holm_over_sequential_p_values_keeps_the_family() -> None:
    """Ten true null hypotheses that stop at different looks: any of them is rejected in 2.5 % at most."""
    rng = np.random.default_rng(6)
    times, informations = [0.4, 1.0], [1.0, 2.5]
    rejected = 0
    for _ in range(400):
        steps = rng.standard_normal((10, 2)) * np.sqrt([1.0, 1.5])
        p_values = stats.norm.sf(steps.cumsum(axis=1) / np.sqrt(informations))
        looks = rng.integers(1, 3, 10)
        results = [sequential_p(p[:k].tolist(), times[:k], informations[:k]) for p, k in zip(p_values, looks, strict=True)]
        rejected += min(holm(results)) < 0.025
    assert rejected <= stats.binom.ppf(0.999, 400, 0.025)


@pytest.mark.parametrize(
    ("times", "informations", "message"),
    [
        ([], [], "need one of each"),
        ([0.5], [1.0, 2.0], "need one of each"),
        ([0.5, 0.5], [1.0, 2.0], "must ascend"),
        ([0.5, 1.5], [1.0, 2.0], "must ascend"),
        ([0.5, 1.0], [1.0, 0.0], "positive and finite"),
    ],
)
def test_looks_that_cannot_be(times: list[float], informations: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        nominal_levels(times, informations, 0.025)


@pytest.mark.parametrize("name", ["pocock", "obrien_fleming", "hwang_shih_decani"])
def test_a_part_of_alpha_is_spent_by_several_looks_and_one_look_has_all_of_it(name: SpendingName) -> None:
    whole, part = Spending(name), Spending(name, part=0.9)
    times, informations = [0.25, 0.5, 1.0], [1.0, 2.2, 4.1]
    assert nominal_levels(times, informations, 0.025, part) == nominal_levels(times, informations, 0.9 * 0.025, whole)
    p_values = [0.02, 0.013, 0.009]
    assert sequential_p(p_values, times, informations, part) == pytest.approx(
        sequential_p(p_values, times, informations, whole) / 0.9, rel=1e-5
    )
    assert nominal_levels([1.0], [7.0], 0.025, part) == [0.025]
    assert sequential_p([0.021], [1.0], [7.0], part) == 0.021
