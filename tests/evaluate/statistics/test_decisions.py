"""Coverage, errors of a verdict, sample sizes, Holm, TOST, flips and clustered errors: published examples and exact chances."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from scipy import optimize, special, stats
from statsmodels.api import OLS
from statsmodels.stats.multitest import multipletests

from assay_evaluate.preflight.known_tasks import REPOSITORIES
from assay_evaluate.statistics.clustered import (
    ClusteredMean,
    bca_interval,
    cluster_bootstrap_mean,
    cluster_bootstrap_ratio,
    clustered_difference,
    clustered_mean,
    clustered_minimum_detectable_effect,
    clustered_values_needed,
    cr2_factors,
    satterthwaite_degrees,
)
from assay_evaluate.statistics.decisions import decide, equivalence_p, holm, inferiority_p, noninferiority_p, paired_evidence
from assay_evaluate.statistics.graded import (
    graded_difference,
    graded_evidence,
    graded_items_needed,
    graded_minimum_detectable_effect,
    mean_of_shares,
)
from assay_evaluate.statistics.paired import Flips, count_flips, exact_tail, mcnemar_midp, paired_difference, score_statistic
from assay_evaluate.statistics.power import items_for_margin, items_needed, minimum_detectable_effect, noninferiority_power
from assay_evaluate.statistics.proportions import wilson

Z = float(stats.norm.ppf(0.975))


# ------------------------------------------------------------------------------------------------ coverage
def tables(most: int) -> tuple[np.ndarray, np.ndarray]:
    """Every (b, c) with b + c <= most."""
    totals = np.arange(most + 1)
    b = np.concatenate([np.arange(total + 1) for total in totals])
    return b, np.repeat(totals, totals + 1) - b


def chances(b: np.ndarray, c: np.ndarray, n: int, p_b: float, p_c: float) -> np.ndarray:
    """Trinomial probability of every table."""
    rest = n - b - c
    ways = special.gammaln(n + 1) - special.gammaln(b + 1) - special.gammaln(c + 1) - special.gammaln(rest + 1)
    return np.exp(ways + special.xlogy(b, p_b) + special.xlogy(c, p_c) + special.xlog1py(rest, -(p_b + p_c)))


def exact_coverages(n: int, fewest: float, most: float, num_designs: int = 60) -> np.ndarray:
    """Chance that Tango's 95 % interval holds the truth, for designs drawn with `fewest` to `most` expected discordant pairs.

    Summed over all tables; by duality the interval holds d exactly where the score statistic at d is within +-z, its tail away
    from 0 counted exactly.
    """
    rng = np.random.default_rng(11)
    expected = np.exp(rng.uniform(math.log(fewest), math.log(most), num_designs))
    share = rng.uniform(0, 1, num_designs)
    b, c = tables(int(stats.binom.isf(1e-8, n, most / n)))
    results = []
    for discordant, part in zip(expected / n, share, strict=True):
        p_b, p_c = discordant * part, discordant * (1 - part)
        loss = p_b - p_c
        away_from_0 = math.copysign(1.0, loss) * score_statistic(loss, b, c, n)
        holds, near = np.abs(away_from_0) <= Z, (away_from_0 > 1.5) & (away_from_0 < 4)
        lost, gained = (b, c) if loss > 0 else (c, b)
        holds[near] = exact_tail(abs(loss), lost[near], gained[near], n) >= 0.025
        results.append(chances(b, c, n, p_b, p_c)[holds].sum())
    return np.array(results)


@pytest.mark.parametrize(("b", "c", "n"), [(0, 0, 80), (3, 0, 200), (0, 9, 50), (25, 12, 200), (300, 280, 1319)])
def test_the_interval_is_what_the_score_test_does_not_reject(b: int, c: int, n: int) -> None:
    """What makes coverage countable without a single root search. An end near 0 of an interval clear of 0 is an exact tail."""
    interval = paired_difference(b, c, n)
    low = stats.norm.isf(exact_tail(interval.low, b, c, n)) if interval.low > 0 else score_statistic(interval.low, b, c, n)
    high = (
        -stats.norm.isf(exact_tail(-interval.high, c, b, n)) if interval.high < 0 else score_statistic(interval.high, b, c, n)
    )
    assert [float(low), float(high)] == pytest.approx([Z, -Z], abs=1e-4)
    assert float(score_statistic(0.0, b, c, n)) == pytest.approx((b - c) / math.sqrt(b + c) if b + c else 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("n", [80, 200, 1319])
def test_coverage_with_many_discordant_pairs(n: int) -> None:
    coverages = exact_coverages(n, 10, 30)
    assert 0.945 <= coverages.mean() <= 0.96
    assert coverages.min() >= 0.935
    assert coverages.max() <= 0.97


@pytest.mark.parametrize("n", [80, 200, 1319])
def test_coverage_with_few_discordant_pairs(n: int) -> None:
    five = exact_coverages(n, 5, 10)
    assert 0.945 <= five.mean() <= 0.967
    assert five.min() >= 0.925
    assert five.max() <= 0.985
    three = exact_coverages(n, 3, 5)
    assert 0.93 <= three.mean() <= 0.98
    assert three.min() >= 0.925


@pytest.mark.parametrize("n", [80, 200, 1319])
def test_coverage_with_hardly_any_discordant_pair_errs_on_the_safe_side(n: int) -> None:
    """No interval that means anything can do otherwise: see the next test."""
    assert exact_coverages(n, 0.05, 1).min() >= 0.995
    assert exact_coverages(n, 1, 3).min() >= 0.96


@pytest.mark.parametrize(("expected", "least"), [(0.5, 0.9999), (2, 0.997), (4, 0.98), (5, 0.975)])
def test_no_interval_that_agrees_with_the_exact_test_covers_less(expected: float, least: float) -> None:
    """Without a true difference an interval misses 0 only where it claims one; mid-p McNemar forbids that below 5 : 0."""
    n = 500
    b, c = tables(40)
    unclaimed = np.array([mcnemar_midp(int(x), int(y)) > 0.05 for x, y in zip(b, c, strict=True)])
    assert chances(b, c, n, expected / n / 2, expected / n / 2)[unclaimed].sum() >= least


@pytest.mark.parametrize(
    ("p_b", "p_c", "low", "high"),
    [
        (0.0, 0.0, 1.0, 1.0),  # no discordant pair ever: the interval always holds 0
        (0.012, 0.008, 0.93, 0.97),  # six expected
        (0.02, 0.0, 0.93, 0.97),  # six, all of them losses
        (0.10, 0.08, 0.93, 0.97),
        (0.30, 0.25, 0.93, 0.97),
    ],
)
def test_coverage_by_simulation(p_b: float, p_c: float, low: float, high: float) -> None:
    draws = np.random.default_rng(20).multinomial(300, [p_b, p_c, 1 - p_b - p_c], size=20_000)
    covered = float((np.abs(score_statistic(p_b - p_c, draws[:, 0], draws[:, 1], 300)) <= Z).mean())
    assert low <= covered <= high


# ------------------------------------------------------------------------------------------------ non-inferiority, TOST
def test_noninferiority_of_published_example() -> None:
    """Tango 1998, cross-over trial of contact-lens cleaning (Miyanaga 1994): 43, 0, 1, 0; margin 0.1: Z = 1.709, p = 0.044."""
    p = noninferiority_p(1, 0, 44, 0.1)
    assert (round(float(stats.norm.isf(p)), 3), round(p, 3)) == (1.709, 0.044)


@pytest.mark.parametrize(("b", "c", "n"), [(0, 0, 72), (0, 0, 73), (6, 0, 200), (20, 3, 200), (40, 40, 400), (30, 2, 150)])
def test_p_values_and_interval_say_the_same(b: int, c: int, n: int) -> None:
    drop, margin = paired_difference(b, c, n), 0.05
    assert (noninferiority_p(b, c, n, margin) < 0.025) == (drop.high < margin)
    assert (inferiority_p(b, c, n, margin) < 0.025) == (drop.low > margin)
    assert (equivalence_p(b, c, n, margin) < 0.025) == (-margin < drop.low and drop.high < margin)
    assert inferiority_p(b, c, n, -margin) == pytest.approx(noninferiority_p(c, b, n, margin))
    assert inferiority_p(b, c, n, margin) == pytest.approx(noninferiority_p(c, b, n, -margin))


def restricted_p_c(difference: float, b: int, c: int, n: int) -> float:
    """Maximum of the trinomial likelihood over p_c where p_b = p_c + difference, searched by scipy."""

    def minus_log_likelihood(p_c: float) -> float:
        probabilities = np.array([p_c + difference, p_c, 1 - 2 * p_c - difference])
        return -float(special.xlogy([b, c, n - b - c], np.maximum(probabilities, 0)).sum())

    most = (1 - difference) / 2
    return float(optimize.minimize_scalar(minus_log_likelihood, bounds=(0, most), method="bounded", options={"xatol": 1e-12}).x)


@pytest.mark.parametrize(("b", "c", "n", "margin"), [(7, 1, 40, 0.1), (3, 0, 30, 0.02), (9, 0, 60, 0.05), (20, 10, 30, 0.1)])
def test_the_exact_tail_is_the_sum_over_every_table(b: int, c: int, n: int, margin: float) -> None:
    every_b, every_c = tables(n)
    p_c = restricted_p_c(margin, b, c, n)
    as_far = score_statistic(margin, every_b, every_c, n) >= float(score_statistic(margin, b, c, n)) - 1e-9
    expected = float(chances(every_b, every_c, n, p_c + margin, p_c)[as_far].sum())
    assert float(exact_tail(margin, b, c, n)) == inferiority_p(b, c, n, margin) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("end", [0.0, -0.1, 1.0])
def test_tails_at_differences_that_are_no_loss_are_refused(end: float) -> None:
    with pytest.raises(ValueError, match="must lie between 0 and 1"):
        exact_tail(end, 1, 1, 10)


def chance_of_fail(n: int, margin: float, more: float, alpha: float, *, by_exact_tail: bool) -> float:
    """That a candidate FAILs which loses exactly `margin`, of margin + more discordant items: exact, over every table."""
    rate = margin + more
    m = np.arange(stats.binom.ppf(1e-7, n, rate), stats.binom.isf(1e-7, n, rate) + 1)
    b, num_discordant = np.meshgrid(np.arange(m[-1] + 1), m)
    possible = (b <= num_discordant) & (b - (num_discordant - b) > n * margin)
    b, c = b[possible], (num_discordant - b)[possible]
    p = exact_tail(margin, b, c, n) if by_exact_tail else stats.norm.sf(score_statistic(margin, b, c, n))
    return float(chances(b, c, n, margin + more / 2, more / 2)[p < alpha].sum())


@pytest.mark.parametrize(("n", "margin", "normal"), [(104, 0.05, 1.5), (198, 0.05, 2.1), (200, 0.02, 2.0), (325, 0.05, 1.5)])
def test_a_loss_of_the_margin_fails_no_more_often_than_the_level_says(n: int, margin: float, normal: float) -> None:
    """Also at a fifth of 2.5 %, as Holm has it of five lengths. By the normal tail: `normal` times the level, or more."""
    worst = {True: 0.0, False: 0.0}
    for alpha in (0.025, 0.005):
        for more in (0.0, 0.001, 0.005, 0.02):
            for exact in worst:
                share = chance_of_fail(n, margin, more, alpha, by_exact_tail=exact) / alpha
                worst[exact] = max(worst[exact], share)
    assert worst[True] <= 1.1
    assert worst[False] >= normal


@pytest.mark.parametrize("margin", [0.01, 0.02, 0.05, 0.1])
@pytest.mark.parametrize("n", [80, 200, 500, 1319])
def test_a_loss_of_the_margin_hardly_ever_passes(margin: float, n: int) -> None:
    """Exact, at every discordant rate: the error that a gate exists to avoid, nominally 2.5 %."""
    worst = max(noninferiority_power(margin, margin + more, n, loss=margin) for more in (0.0, *np.geomspace(5e-4, 0.3, 30)))
    assert worst <= 0.027


def test_a_loss_of_the_margin_is_rarely_called_equivalent() -> None:
    draws = np.random.default_rng(4).multinomial(400, [0.07, 0.02, 0.91], size=20_000)
    b, c = draws[:, 0], draws[:, 1]
    passed = (score_statistic(0.05, b, c, 400) < -Z) & (score_statistic(-0.05, b, c, 400) > Z)
    assert 0.01 <= passed.mean() <= 0.03


@pytest.mark.parametrize(
    ("counts", "claim", "status"),
    [
        ((0, 0, 10), "non_inferior", "UNDERPOWERED"),
        ((0, 0, 73), "non_inferior", "PASS"),
        ((0, 40, 200), "non_inferior", "PASS"),
        ((0, 40, 200), "equivalent", "FAIL"),
        ((40, 0, 200), "equivalent", "FAIL"),
        ((2, 2, 200), "equivalent", "PASS"),
        ((40, 40, 200), "equivalent", "UNDERPOWERED"),
    ],
)
def test_decisions(counts: tuple[int, int, int], claim: str, status: str) -> None:
    evidence = paired_evidence(*counts, 0.05, claim="equivalent" if claim == "equivalent" else "non_inferior")
    assert decide(evidence, min_items=30) == status
    assert decide(evidence, min_items=counts[2] + 1) == ("UNDERPOWERED" if status == "PASS" else status)
    if status == "FAIL":
        assert decide(evidence, min_items=30, p_fail_adjusted=0.0251) == "UNDERPOWERED"


@pytest.mark.parametrize("margin", [0.0, 1.0, -1.0])
def test_margins_that_mean_nothing_are_refused(margin: float) -> None:
    with pytest.raises(ValueError, match="margin"):
        noninferiority_p(1, 1, 10, margin)


# ------------------------------------------------------------------------------------------------ Holm
def test_holm_of_a_worked_example() -> None:
    """0.01, 0.04, 0.03, 0.005 at 5 %: the second and third are not rejected (the usual textbook example of Holm 1979)."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]) == []
    with pytest.raises(ValueError):
        holm([0.5, 1.2])


@pytest.mark.slow
def test_holm_is_that_of_statsmodels() -> None:
    rng = np.random.default_rng(6)
    for size in (1, 2, 13, 40):
        p = rng.beta(0.3, 2, size)
        assert holm(list(p)) == pytest.approx(multipletests(p, method="holm")[1])


def test_holm_keeps_a_harmless_candidate_from_failing_by_chance() -> None:
    """Thirteen tasks that all lose exactly the margin: at least one FAIL in 1 of 4 runs unadjusted, in 1 of 40 adjusted."""
    draws = np.random.default_rng(8).multinomial(500, [0.08, 0.03, 0.89], size=(2000, 13))
    p = stats.norm.sf(score_statistic(0.05, draws[..., 0], draws[..., 1], 500))
    assert (p.min(axis=1) < 0.025).mean() > 0.2
    adjusted = np.array([min(holm(list(row))) for row in p])
    assert (adjusted < 0.025).mean() <= 0.04


# ------------------------------------------------------------------------------------------------ power, sample size
@pytest.mark.slow
def test_power_is_the_sum_over_every_table() -> None:
    n, discordance, margin = 60, 0.12, 0.15
    b, c = tables(n)
    passes = np.array([paired_difference(int(x), int(y), n).high < margin for x, y in zip(b, c, strict=True)])
    for loss in (0.0, 0.05, -0.03, 0.12):
        expected = chances(b, c, n, (discordance + loss) / 2, (discordance - loss) / 2)[passes].sum()
        assert noninferiority_power(margin, discordance, n, loss=loss) == pytest.approx(expected, abs=1e-8), loss


@pytest.mark.parametrize(
    ("margin", "discordance", "approximation"),
    [(0.01, 0.05, 3924), (0.01, 0.10, 7849), (0.02, 0.17, 3336), (0.005, 0.02, 6279)],
)
def test_items_needed_agree_with_the_normal_approximation(margin: float, discordance: float, approximation: int) -> None:
    """(z_a + z_b)^2 D / margin^2 (Connor 1987 without a true difference), which the exact number exceeds a little."""
    z = Z + float(stats.norm.ppf(0.8))
    assert math.ceil(z**2 * discordance / margin**2) == pytest.approx(approximation, abs=1)
    assert approximation <= items_needed(margin, discordance) <= 1.04 * approximation


@pytest.mark.parametrize(
    ("margin", "discordance", "power", "loss"), [(0.05, 0.0, 0.8, 0.0), (0.05, 0.1, 0.8, 0.0), (0.02, 0.06, 0.9, 0.005)]
)
def test_items_needed_give_the_power_and_fewer_do_not(margin: float, discordance: float, power: float, loss: float) -> None:
    needed = items_needed(margin, discordance, power, loss=loss)
    draws = np.random.default_rng(9).multinomial(
        needed, [(discordance + loss) / 2, (discordance - loss) / 2, 1 - discordance], size=20_000
    )
    passed = (score_statistic(margin, draws[:, 0], draws[:, 1], needed) < -Z).mean()
    assert passed >= power - 0.01
    assert noninferiority_power(margin, discordance, needed, loss=loss) >= power
    assert noninferiority_power(margin, discordance, needed - 1, loss=loss) < power
    assert noninferiority_power(margin, discordance, math.floor(needed * 0.8), loss=loss) < power - 0.05


def test_items_needed_grow_with_discordance_and_shrink_with_the_margin() -> None:
    by_rate = [items_needed(0.02, rate) for rate in (0.0, 0.02, 0.05, 0.1, 0.3)]
    assert all(few < more for few, more in pairwise(by_rate))
    assert items_needed(0.05, 0.0) == items_for_margin(0, 0, 10, 0.05) == 73


@pytest.mark.parametrize(
    ("margin", "discordance", "power", "loss"),
    [(0.05, 0.1, 0.8, 0.06), (0.05, 0.1, 0.8, 0.05), (0.05, 0.01, 0.8, 0.02), (0.0, 0.1, 0.8, 0.0), (0.1, 0.1, 1.0, 0.0)],
)
def test_designs_without_an_answer_are_refused(margin: float, discordance: float, power: float, loss: float) -> None:
    with pytest.raises(ValueError):
        items_needed(margin, discordance, power, loss=loss)


# ------------------------------------------------------------------------------------------------ flips
def test_flips_count_every_direction() -> None:
    flips = count_flips(
        [True, True, False, False, False, False, False],
        [True, False, True, False, False, False, False],
        ["4", "4", "5", "6", "6", None, None],
        ["4", "5", "4", "6", "7", "9", None],
    )
    assert flips == Flips(right_to_wrong=1, wrong_to_right=1, wrong_to_other_wrong=2, n=7)
    assert flips.rate == 2 / 7
    with pytest.raises(ValueError):
        count_flips([], [], [], [])


# ------------------------------------------------------------------------------------------------ clusters
SPATIAL_TEST_A = [48, 36, 20, 29, 42, 42, 20, 42, 22, 41, 45, 14, 6, 0, 33, 28, 34, 4, 32, 24, 47, 41, 24, 26, 30, 41]


def test_bca_of_published_example() -> None:
    """Efron & Tibshirani 1993, table 14.2: variance of 26 test scores, 171.5; 90 % BCa interval 115.8 to 259.6."""
    scores = np.array(SPATIAL_TEST_A, dtype=np.float64)
    assert scores.var() == pytest.approx(171.5, abs=0.05)
    drawn = np.random.default_rng(0).integers(0, 26, (40_000, 26))
    left_out = np.array([np.delete(scores, i).var() for i in range(26)])
    low, high = bca_interval(scores[drawn].var(axis=1), float(scores.var()), left_out, 0.90)
    assert (low, high) == pytest.approx((115.8, 259.6), rel=0.025)


def clustered(rng: np.random.Generator, num_clusters: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Values whose clusters share half of the variance; true mean 0."""
    labels = np.repeat(np.arange(num_clusters), size)
    return rng.normal(size=num_clusters)[labels] + rng.normal(size=len(labels)), labels


def dense_cr2(values: np.ndarray, labels: np.ndarray) -> tuple[float, float]:
    """(standard error, degrees) by the general formulas of Pustejovsky & Tipton 2018 (eq. 4 and 11), with matrices of every
    value: X a column of ones, A_g = (I - H_gg)^(-1/2), the degrees from the eigenvalues of the quadratic form in the values."""
    n = len(values)
    design = np.ones((n, 1))
    bread = np.linalg.inv(design.T @ design)
    outside = np.eye(n) - design @ bread @ design.T
    columns = []
    for label in np.unique(labels):
        own = labels == label
        sizes, vectors = np.linalg.eigh(outside[np.ix_(own, own)])
        root = vectors @ np.diag(sizes**-0.5) @ vectors.T
        columns.append(outside[own].T @ root @ design[own] @ bread)
    form = np.hstack(columns) @ np.hstack(columns).T
    eigenvalues = np.linalg.eigvalsh(form)
    return float(np.sqrt(values @ form @ values)), float(eigenvalues.sum() ** 2 / (eigenvalues**2).sum())


@pytest.mark.parametrize("sizes", [(3, 40, 8, 1, 12, 1, 20), (1, 1), (30, 30, 30, 30), (1,) * 25, (60, 2)])
def test_clustered_mean_is_cr2_with_bell_and_mccaffreys_degrees(sizes: tuple[int, ...]) -> None:
    rng = np.random.default_rng(1)
    labels = np.repeat(np.arange(len(sizes)), sizes)
    values = rng.normal(size=len(labels)) + rng.normal(size=len(sizes))[labels]
    found = clustered_mean(values, labels)
    error, degrees = dense_cr2(values, labels)
    assert (found.value, found.num_clusters) == (pytest.approx(values.mean()), len(sizes))
    assert (found.standard_error, found.degrees) == (pytest.approx(error), pytest.approx(degrees))
    if len(set(sizes)) == 1:  # the sandwich of statsmodels, which has no CR2, with its usual factor
        fit = OLS(values, np.ones(len(values))).fit(cov_type="cluster", cov_kwds={"groups": labels, "use_correction": False})
        groups = len(sizes)
        assert found.standard_error == pytest.approx(float(fit.bse[0]) * math.sqrt(groups / (groups - 1)))
        assert found.degrees == pytest.approx(groups - 1)


def test_verifieds_twelve_repositories_have_three_degrees_of_freedom() -> None:
    assert satterthwaite_degrees(list(REPOSITORIES["verified"].values())) == pytest.approx(3.33, abs=0.005)


@pytest.mark.parametrize(("num_clusters", "times"), [(1, 16.531), (5, 16.531 / 5), (12, 16.531 / 12)])
def test_values_that_clusters_need_are_of_clusters_enough_to_claim_anything(num_clusters: int, times: float) -> None:
    """0.8^16.531 = 2.5 %: however little values differ, fewer clusters of equal size never pass."""
    values, labels = np.zeros(10 * num_clusters), np.repeat(np.arange(num_clusters), 10)
    assert clustered_values_needed(clustered_difference(values, labels), len(values), 0.5) == pytest.approx(
        times * len(values), abs=1
    )


@pytest.mark.parametrize("sizes", [(60, 40, 30, 20, 15, 10, 5), (10,) * 60])
def test_the_values_that_clusters_need_give_the_power_that_was_asked_for(sizes: tuple[int, ...]) -> None:
    """The margin that four times the clusters are said to pass in eight of ten: simulated, with normal sums of clusters."""
    n, error = sum(sizes), 0.03
    found = ClusteredMean(0.0, error, satterthwaite_degrees(sizes), len(sizes))
    quantiles = stats.t.ppf([0.975, 0.8], 4 * found.degrees)
    margin = float(quantiles.sum()) * error / 2
    assert clustered_values_needed(found, n, margin) == pytest.approx(4 * n, abs=1)
    assert clustered_values_needed(found, n, 2 * margin, loss=margin) == pytest.approx(4 * n, abs=1)
    more = np.array(sizes * 4, dtype=float)
    sums = np.random.default_rng(12).normal(size=(20_000, len(more))) * error * np.sqrt(n * more)
    estimate = sums.sum(axis=1) / more.sum()
    residual = sums - estimate[:, None] * more
    observed = np.sqrt((residual**2 * cr2_factors(more)).sum(axis=1)) / more.sum()
    passes = estimate + stats.t.ppf(0.975, satterthwaite_degrees(more)) * observed < margin
    assert passes.mean() == pytest.approx(0.8, abs=0.02)


def test_what_clusters_can_detect_is_their_t() -> None:
    mean = ClusteredMean(0.0, 0.02, 3.33, 12)
    quantiles = stats.t.ppf([0.975, 0.8], 3.33)
    assert clustered_minimum_detectable_effect(mean) == pytest.approx(0.02 * quantiles.sum())
    assert clustered_minimum_detectable_effect(ClusteredMean(0.0, 0.5, 1.0, 2)) == 1.0


def test_clustered_mean_of_equal_clusters_is_the_t_interval_of_their_means() -> None:
    values, labels = clustered(np.random.default_rng(2), 12, 5)
    means = values.reshape(12, 5).mean(axis=1)
    t = stats.t.interval(0.9, 11, loc=means.mean(), scale=stats.sem(means))
    found = clustered_mean(values, labels).interval(0.9)
    assert (found.low, found.high, found.n) == (pytest.approx(t[0]), pytest.approx(t[1]), 12)


@pytest.mark.parametrize("method", ["t", "BCa"])
def test_clustered_intervals_cover_by_simulation(method: str) -> None:
    rng = np.random.default_rng(3)
    covered = independent = 0
    for trial in range(600):
        values, labels = clustered(rng, 40, 6)
        if method == "t":
            found = clustered_mean(values, labels).interval()
        else:
            found = cluster_bootstrap_mean(values, labels, seed=trial, num_resamples=600)
        covered += found.low <= 0 <= found.high
        naive = clustered_mean(values, np.arange(len(values))).interval()
        independent += naive.low <= 0 <= naive.high
    assert 0.93 <= covered / 600 <= 0.97
    assert independent / 600 < 0.85  # what taking them for independent would do


def test_ratio_covers_by_simulation() -> None:
    """A candidate that writes 10 % more tokens on average, lengths being skewed and shared with the reference."""
    rng = np.random.default_rng(5)
    covered = 0
    for trial in range(500):
        length = rng.lognormal(6, 0.6, 120)
        reference, candidate = length * rng.lognormal(0, 0.2, 120), 1.1 * length * rng.lognormal(0, 0.2, 120)
        interval = cluster_bootstrap_ratio(candidate, reference, np.arange(120), seed=trial, num_resamples=600)
        covered += interval.low <= 1.1 <= interval.high
    assert 0.92 <= covered / 500 <= 0.975
    with pytest.raises(ValueError, match="more than 0"):
        cluster_bootstrap_ratio([1, 2], [0, 1], [0, 1])


def test_graded_scores_without_a_difference_are_not_certainty() -> None:
    least = Z**2 / (10 + Z**2)
    result = graded_difference([0.5] * 10, [0.5] * 10)
    assert (result.value, result.low, result.high, result.n) == (0.0, pytest.approx(-least), pytest.approx(least), 10)
    rng = np.random.default_rng(12)
    reference, candidate = rng.uniform(size=4000), rng.uniform(size=4000)
    result, resampled = graded_difference(reference, candidate), cluster_bootstrap_mean(reference - candidate, np.arange(4000))
    assert (result.value, result.n) == (resampled.value, resampled.n)
    assert (result.low, result.high) == (pytest.approx(resampled.low, abs=1e-3), pytest.approx(resampled.high, abs=1e-3))
    with pytest.raises(ValueError, match="at least two"):
        graded_difference([1.0], [0.0])
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        graded_difference([1.2, 0.0], [0.0, 0.0])


# ------------------------------------------------------------------------------------------------ several samples of an item
def drawn_shares(rng: np.random.Generator, n: int, k: int, loss: float) -> tuple[np.ndarray, np.ndarray]:
    """Shares of k right samples of n items of all difficulties; each item of the candidate is `loss` harder."""
    easy = rng.beta(2, 1, n) * (1 - loss) + loss
    return rng.binomial(k, easy, n) / k, rng.binomial(k, easy - loss, n) / k


@pytest.mark.slow
@pytest.mark.parametrize(("n", "k", "loss"), [(60, 4, 0.0), (60, 4, 0.06), (150, 8, 0.03)])
def test_interval_of_sampled_items_covers(n: int, k: int, loss: float) -> None:
    """Over 400 simulated comparisons (two standard errors: 2.2 points); never narrower than Tango's, hence more than 97 %."""
    rng = np.random.default_rng(1)
    results = [graded_difference(*drawn_shares(rng, n, k, loss)) for _ in range(400)]
    assert 0.925 <= np.mean([entry.low <= loss <= entry.high for entry in results]) <= 0.985


def test_the_mean_of_a_skewed_sample_is_tested_as_hall_has_it() -> None:
    """Against the transformation written out (Hall 1992), with two items more; a root search instead of its inverse. Upwards,
    where the items lost wholly are, t has the degrees of a variance that varies as the kurtosis says."""
    rng = np.random.default_rng(8)
    reference = rng.binomial(2, np.full(90, 0.9)) / 2
    candidate = np.where(rng.random(90) < 0.15, 0.0, reference)
    differences = np.concatenate([reference - candidate, [0.5**0.5, -(0.5**0.5)]])
    n, mean, deviation, third = 92, differences.mean(), differences.std(), float(stats.skew(differences))

    degrees = 2 * n / (float(stats.kurtosis(differences, fisher=False)) - 1)
    assert third > 0 and 20 < degrees < 50

    def transformed(loss: float) -> float:
        s = (mean - loss) / deviation
        return float(np.sqrt(n) * (s + third * s**2 / 3 + third**2 * s**3 / 27) + third / (6 * np.sqrt(n)))

    for level in (0.8, 0.95, 0.999):
        below, above = stats.t.ppf(0.5 + level / 2, [n - 1, degrees])
        low = optimize.brentq(lambda loss, q=below: transformed(loss) - q, -1, 1)
        high = optimize.brentq(lambda loss, q=above: transformed(loss) + q, -1, 1)
        result, z = graded_difference(reference, candidate, level=level), float(stats.norm.ppf(0.5 + level / 2))
        least = z**2 / (90 + z**2)
        expected = min(low, result.value - least), max(high, result.value + least)
        assert (result.low, result.high) == pytest.approx(expected)
        mirrored = graded_difference(candidate, reference, level=level)
        assert (mirrored.low, mirrored.high) == pytest.approx((-result.high, -result.low))
    evidence = graded_evidence(reference, candidate, 0.25)
    assert evidence.p_pass == pytest.approx(float(stats.t.cdf(transformed(0.25), degrees)))


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0.05, 0.15])
def test_few_items_lost_wholly_are_not_passed_or_failed_too_often(lost: float) -> None:
    """GPQA and AIME, a few items lost and the others as good as before; 4,000 draws each (a standard error of 0.25 %)."""
    rng, words = np.random.default_rng(9), []
    n = 198 if lost == 0.05 else 60
    for _ in range(4000):
        easy = np.where(rng.random(n) < 0.8, 0.98, 0.02)
        kept = np.where(rng.random(n) < lost / (0.98 * 0.8 + 0.02 * 0.2), 0.0, easy)
        evidence = graded_evidence(rng.binomial(5, easy) / 5, rng.binomial(5, kept) / 5, lost)
        words.append((evidence.p_pass < 0.025, evidence.p_fail < 0.025))
    passed, failed = np.mean(words, axis=0)
    assert passed < 0.032
    assert failed < 0.032


@pytest.mark.slow
def test_p_values_of_sampled_items_agree_with_their_interval() -> None:
    """PASS and FAIL by p are PASS and FAIL by the interval's ends, at every level."""
    rng = np.random.default_rng(2)
    statuses = set()
    for _ in range(40):
        reference, candidate = drawn_shares(rng, 80, 4, float(rng.uniform(0, 0.15)))
        margin, level = float(rng.uniform(0.02, 0.12)), float(rng.choice([0.9, 0.95, 0.99]))
        evidence = graded_evidence(reference, candidate, margin, level=level)
        drop = graded_difference(reference, candidate, level=level)
        assert evidence.drop == drop
        alpha = (1 - level) / 2
        assert (evidence.p_pass < alpha, evidence.p_fail < alpha) == (drop.high < margin, drop.low > margin)
        assert (evidence.p_difference < 2 * alpha) == (not drop.low <= 0 <= drop.high)
        statuses.add(decide(evidence, min_items=30))
    assert statuses == {"PASS", "FAIL", "UNDERPOWERED"}
    pair = graded_evidence(reference, reference, 0.05, claim="equivalent")
    assert (pair.p_difference, pair.b, pair.c, decide(pair, min_items=30)) == (1.0, 0, 0, "PASS")


@pytest.mark.slow
def test_items_needed_by_sampled_items_are_enough() -> None:
    """With as many items as were asked for, a candidate that loses nothing passes about 4 times in 5."""
    rng = np.random.default_rng(3)
    pilot, other = drawn_shares(rng, 400, 4, 0.0)
    needed = graded_items_needed(pilot - other, 0.08)
    assert 50 < needed < 400
    passed = [decide(graded_evidence(*drawn_shares(rng, needed, 4, 0.0), 0.08), min_items=30) == "PASS" for _ in range(150)]
    assert 0.7 <= np.mean(passed) <= 0.92
    assert graded_items_needed(np.zeros(50), 0.05) == items_for_margin(0, 0, 50, 0.05)
    assert graded_minimum_detectable_effect(np.zeros(50)) == minimum_detectable_effect(0, 0, 50)
    assert graded_minimum_detectable_effect(pilot - other) > minimum_detectable_effect(0, 0, 400)


def test_mean_of_equal_shares_is_not_a_point() -> None:
    assert mean_of_shares([1.0] * 50) == wilson(50, 50)
    half = mean_of_shares([0.5] * 50)
    assert half.value == 0.5 and half.low < 0.4 and half.high > 0.6
