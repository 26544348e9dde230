"""Statistics against published worked examples, independent implementations (statsmodels), and exact coverage."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats
from statsmodels.stats.contingency_tables import mcnemar
from statsmodels.stats.proportion import proportion_confint

from assay.records.base import Interval
from assay_evaluate.statistics.clustered import cluster_bootstrap_mean
from assay_evaluate.statistics.paired import discordant_counts, exact_tail, mcnemar_midp, paired_difference, score_interval
from assay_evaluate.statistics.power import _detection_power, _fewest_lost, items_for_margin, minimum_detectable_effect
from assay_evaluate.statistics.proportions import clopper_pearson, independent_difference, wilson


@pytest.mark.parametrize(
    ("b", "c", "n", "level", "low", "high"),
    [
        # Fagerland, Lydersen & Laake 2014, table: airway hyper-responsiveness (Bentur 2009), R contingencytables
        (1, 7, 21, 0.95, -0.517, -0.026),
        # the same, complete response before and after consolidation therapy (Cavo 2012), R contingencytables 3.0
        (6, 16, 161, 0.95, -0.1240, -0.0054),
        # R PropCIs::scoreci.mp(25, 28, 618, 0.90), whose estimand is (second - first) / n
        (28, 25, 618, 0.90, -0.0148, 0.0247),
    ],
)
def test_tango_interval_of_published_examples(b: int, c: int, n: int, level: float, low: float, high: float) -> None:
    interval = score_interval(b, c, n, level)
    digits = 3 if n == 21 else 4
    assert (round(interval.low, digits), round(interval.high, digits)) == (low, high)
    assert (interval.value, interval.n, interval.level) == ((b - c) / n, n, level)


@pytest.mark.parametrize(("b", "c", "n", "end"), [(7, 1, 21, 0.020), (16, 6, 161, 0.0051)])
def test_an_interval_clear_of_0_begins_where_the_exact_tail_does(b: int, c: int, n: int, end: float) -> None:
    """It lies a little nearer to 0 than the published one; the other end is Tango's."""
    interval = paired_difference(b, c, n)
    assert interval.low == pytest.approx(end, rel=0.02)
    assert float(exact_tail(interval.low, b, c, n)) == pytest.approx(0.025, abs=1e-5)
    assert interval.high == score_interval(b, c, n).high


@pytest.mark.parametrize(("b", "c", "n"), [(0, 0, 10), (3, 0, 10), (0, 7, 14), (25, 12, 200), (1, 0, 1), (14, 0, 14)])
def test_tango_interval_is_symmetric_and_contains_the_estimate(b: int, c: int, n: int) -> None:
    result, mirrored = paired_difference(b, c, n), paired_difference(c, b, n)
    assert (result.low, result.high) == pytest.approx((-mirrored.high, -mirrored.low), abs=1e-9)
    assert -1 <= result.low <= result.value <= result.high <= 1


def test_no_discordant_pair_is_not_certainty() -> None:
    z_squared = stats.norm.ppf(0.975) ** 2
    for n in (10, 80, 200):
        interval = paired_difference(0, 0, n)
        assert (interval.low, interval.high) == pytest.approx((-z_squared / (n + z_squared), z_squared / (n + z_squared)))
    assert paired_difference(0, 0, 10).high > 0.2  # ten clean items say nothing about a margin of five points
    assert paired_difference(0, 0, 72).high >= 0.05 > paired_difference(0, 0, 73).high


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "p_b", "p_c"),
    [
        (100, 0.0005, 0.0005),  # almost always no discordant pair
        (100, 0.02, 0.0),
        (200, 0.03, 0.01),
        (80, 0.10, 0.05),
        (150, 0.15, 0.12),
    ],
)
def test_tango_coverage_is_exact_to_a_few_percent(n: int, p_b: float, p_c: float) -> None:
    """Summed over every possible (b, c), not simulated: the chance that the 95 % interval holds the true difference."""
    covered = 0.0
    total = 0.0
    most = int(stats.binom.ppf(1 - 1e-7, n, p_b + p_c)) + 1
    for m in range(most + 1):
        for b in range(m + 1):
            share = p_b / (p_b + p_c)
            chance = float(stats.binom.pmf(m, n, p_b + p_c) * stats.binom.pmf(b, m, share))
            if chance < 1e-9:
                continue
            interval = paired_difference(b, m - b, n)
            total += chance
            covered += chance * (interval.low <= p_b - p_c <= interval.high)
    assert total > 0.9999
    assert covered >= 0.93, f"coverage {covered:.4f}"
    if p_b + p_c >= 0.04:  # with hardly any discordant pair every interval is wide and holds the truth
        assert covered <= 0.985, f"coverage {covered:.4f}"


@pytest.mark.slow
def test_tango_coverage_by_simulation() -> None:
    rng = np.random.default_rng(7)
    tables, counts = np.unique(rng.multinomial(250, [0.08, 0.05, 0.87], size=2000), axis=0, return_counts=True)
    hits = [paired_difference(int(b), int(c), 250) for b, c, _ in tables]
    covered = np.average([interval.low <= 0.03 <= interval.high for interval in hits], weights=counts)
    assert 0.935 <= covered <= 0.965


@pytest.mark.parametrize(
    ("b", "c", "p"),
    [
        (6, 16, 0.034690),  # Cavo 2012, R contingencytables: "The McNemar mid-P test: P = 0.034690"
        (1, 7, 0.039062),  # Bentur 2009, Fagerland 2013: 0.039
        (0, 0, 1.0),
    ],
)
def test_midp_mcnemar_of_published_examples(b: int, c: int, p: float) -> None:
    assert mcnemar_midp(b, c) == pytest.approx(p, abs=1e-6)
    assert mcnemar_midp(b, c) == mcnemar_midp(c, b)


@pytest.mark.parametrize(("b", "c"), [(3, 11), (9, 4), (20, 21), (5, 5)])
def test_midp_is_the_exact_p_less_the_chance_of_what_was_seen(b: int, c: int) -> None:
    exact = float(mcnemar([[0, b], [c, 0]], exact=True).pvalue)
    observed = float(stats.binom.pmf(min(b, c), b + c, 0.5))
    assert mcnemar_midp(b, c) == pytest.approx(1 - observed if b == c else exact - observed)


@pytest.mark.parametrize(("successes", "n"), [(0, 10), (97, 100), (10, 10), (500, 1319)])
@pytest.mark.parametrize("level", [0.9, 0.95])
def test_proportion_intervals_are_those_of_statsmodels(successes: int, n: int, level: float) -> None:
    for reference, method in ((wilson, "wilson"), (clopper_pearson, "beta")):
        result = reference(successes, n, level)
        low, high = proportion_confint(successes, n, alpha=1 - level, method=method)
        assert (result.low, result.high) == pytest.approx((float(low), float(high)), abs=1e-9)
        assert (result.value, result.n) == (successes / n, n)


def test_newcombe_interval_of_published_example() -> None:
    """Newcombe 1998, table II, contrast 56/70 - 48/80, method 10: 0.0524 to 0.3339."""
    interval = independent_difference(56, 70, 48, 80)
    assert (round(interval.value, 4), round(interval.low, 4), round(interval.high, 4)) == (0.2, 0.0524, 0.3339)


@pytest.mark.slow
@pytest.mark.parametrize(("b", "c", "n"), [(0, 0, 80), (0, 0, 500), (10, 10, 200), (40, 40, 400)])
def test_minimum_detectable_effect_is_detected_four_times_in_five(b: int, c: int, n: int) -> None:
    effect = minimum_detectable_effect(b, c, n)
    rate = max((b + c) / n, effect)
    draws = np.random.default_rng(3).multinomial(n, [(rate + effect) / 2, (rate - effect) / 2, 1 - rate], size=1500)
    tables, counts = np.unique(draws, axis=0, return_counts=True)
    observed = np.average([paired_difference(int(x), int(y), n).low > 0 for x, y, _ in tables], weights=counts)
    assert observed == pytest.approx(0.8, abs=0.035)
    assert power_of(effect, rate, n) == pytest.approx(0.8, abs=0.002)


def test_minimum_detectable_effect_of_known_designs() -> None:
    # 500 items with 17 % discordant pairs (agentic): about 5 points, two-sided 95 %
    assert minimum_detectable_effect(50, 35, 500) == pytest.approx(0.051, abs=0.001)
    assert minimum_detectable_effect(0, 0, 3) == 1.0  # three items can show nothing


@pytest.mark.parametrize(("loss", "rate", "n"), [(0.0661, 0.1212, 60), (0.0661, 0.1212, 198), (0.2, 0.3, 30), (0.05, 0.05, 60)])
def test_a_loss_is_detected_as_often_as_the_interval_shows_it(loss: float, rate: float, n: int) -> None:
    """Over all tables that have a chance; by the score test the second was detected with 80.0 %, and shown with 78.0 %. An
    interval that the exact tail ends at 0 ended at 1e-9, which is clear of 0."""
    shown = total = 0.0
    for discordant in range(n + 1):
        chance = stats.binom.pmf(discordant, n, rate)
        if chance < 1e-7:
            continue
        lost = np.arange(discordant + 1)
        among = stats.binom.pmf(lost, discordant, (rate + loss) / (2 * rate))
        is_shown = [
            p > 1e-9 and paired_difference(int(b), discordant - int(b), n).low > 0 for b, p in zip(lost, among, strict=True)
        ]
        shown, total = shown + chance * float(among[is_shown].sum()), total + chance
    assert total > 0.99999
    assert power_of(loss, rate, n) == pytest.approx(shown, abs=2e-5)


def power_of(loss: float, rate: float, n: int) -> float:
    """Chance that the interval of n pairs lies above 0."""
    return _detection_power(loss, rate, n, _fewest_lost(n, int(stats.binom.isf(1e-10, n, rate)), 0.95))


def test_items_for_margin_pass_the_margin() -> None:
    assert items_for_margin(0, 0, 10, 0.05) == 73
    needed = items_for_margin(4, 4, 80, 0.05)
    draws = np.random.default_rng(5).multinomial(needed, [0.05, 0.05, 0.9], size=1500)
    tables, counts = np.unique(draws, axis=0, return_counts=True)
    passed = np.average([paired_difference(int(b), int(c), needed).high < 0.05 for b, c, _ in tables], weights=counts)
    assert passed == pytest.approx(0.8, abs=0.05)


def test_discordant_counts() -> None:
    assert discordant_counts([True, True, False, False, True], [True, False, True, False, False]) == (2, 1)
    with pytest.raises(ValueError):
        discordant_counts([True], [])


def test_cluster_bootstrap_is_wider_than_a_bootstrap_of_values() -> None:
    """With values that agree within a cluster the interval is that of the cluster means: t interval as a yardstick."""
    rng = np.random.default_rng(0)
    means = rng.normal(1.0, 0.2, 60)
    values = np.repeat(means, 50) + rng.normal(0, 0.01, 3000)
    clusters = np.repeat(np.arange(60), 50)
    found = cluster_bootstrap_mean(values, clusters, seed=1)
    t = stats.t.interval(0.95, 59, loc=means.mean(), scale=stats.sem(means))
    assert found.value == pytest.approx(values.mean())
    assert found.n == 60
    assert found.high - found.low == pytest.approx(t[1] - t[0], rel=0.12)
    naive = cluster_bootstrap_mean(values, np.arange(3000), seed=1)
    assert (naive.high - naive.low) * 4 < found.high - found.low
    assert cluster_bootstrap_mean(values, clusters, seed=1) == found


def test_bca_interval_is_that_of_scipy() -> None:
    """On skewed data, clusters of unequal size; scipy's BCa of the same ratio as an independent implementation."""
    rng = np.random.default_rng(2)
    counts = rng.integers(1, 40, 45)
    clusters = np.repeat(np.arange(45), counts)
    values = rng.exponential(np.repeat(rng.exponential(1.0, 45), counts))
    interval = cluster_bootstrap_mean(values, clusters, seed=3, num_resamples=20_000)
    sums = np.bincount(clusters, weights=values)
    candidate = stats.bootstrap(
        (sums, counts.astype(float)), lambda s, c, axis=-1: s.sum(axis=axis) / c.sum(axis=axis), paired=True, vectorized=True,
        n_resamples=20_000, method="BCa", rng=np.random.default_rng(4),
    ).confidence_interval  # fmt: skip
    width = candidate.high - candidate.low
    assert (interval.low, interval.high) == pytest.approx((candidate.low, candidate.high), abs=0.02 * width)
    assert interval.high - interval.value > interval.value - interval.low  # skewed to the right


def test_cluster_bootstrap_edges() -> None:
    assert cluster_bootstrap_mean([0.0] * 6, [0, 0, 1, 1, 2, 2]) == Interval(value=0.0, low=0.0, high=0.0, n=3)
    with pytest.raises(ValueError, match="at least two"):
        cluster_bootstrap_mean([1.0, 2.0], [0, 0])
    with pytest.raises(ValueError, match="finite"):
        cluster_bootstrap_mean([1.0, float("nan")], [0, 1])


@pytest.mark.parametrize(("b", "c", "n"), [(0, 0, 0), (-1, 0, 5), (3, 3, 5)])
def test_counts_that_do_not_fit_are_refused(b: int, c: int, n: int) -> None:
    for function in (paired_difference, minimum_detectable_effect):
        with pytest.raises(ValueError):
            function(b, c, n)
    with pytest.raises(ValueError):
        wilson(1, 0)
