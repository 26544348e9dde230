"""The interval of a mean KL over texts: against scipy's Pearson type III, with strata, by simulation, and in extremes."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from assay.records.base import Interval
from assay_evaluate.statistics.clustered import cluster_bootstrap_mean
from assay_evaluate.statistics.skewed import skewed_ends, skewed_mean, skewed_ratio, unseen_share


def texts(seed: int, num_texts: int = 30) -> tuple[np.ndarray, np.ndarray]:
    """Skewed values of texts of different lengths that differ among themselves, and each one's text."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(5, 60, num_texts)
    return rng.exponential(np.repeat(rng.lognormal(size=num_texts), sizes)), np.repeat(np.arange(num_texts), sizes)


def by_hand(values: np.ndarray, text_N: np.ndarray, stratum_of: dict[int, int]) -> tuple[float, float]:
    """Ends for values skewed to the right, text by text and with scipy's distribution."""
    total, mean = len(values), values.mean()
    apart = {i: float((values[text_N == i] - mean).sum()) / total for i in stratum_of}
    variance = third = squares = below = 0.0
    farthest = 0.0
    for stratum in set(stratum_of.values()):
        own = np.array([apart[i] for i in stratum_of if stratum_of[i] == stratum])
        n, off = len(own), own - own.mean()
        variance += n / (n - 1) * (off**2).sum()
        sizes = np.array([(text_N == i).sum() for i in stratum_of if stratum_of[i] == stratum])
        below += (n / (n - 1) * (off**2).sum()) ** 2 / (sizes.sum() ** 2 / (sizes**2).sum() - 1)
        third += (n / (n - 1)) ** 2 * (off**3).sum()
        squares += (off**2).sum()
        farthest = max(farthest, off.max())
    degrees = variance**2 / below
    low = np.sqrt(variance) * stats.pearson3.ppf(0.025, third / variance**1.5)
    low *= stats.t.ppf(0.975, degrees) / stats.norm.ppf(0.975)
    sure = 1 - 0.025 / (1 + 150 / degrees)
    widening = stats.t.ppf(sure, degrees) / stats.norm.ppf(sure)
    variance, third = variance * widening**2, third * widening**3
    lacking = farthest * min(9 * farthest**2 / squares, 4)
    wide = variance + lacking**2
    return mean + low, mean + lacking + np.sqrt(wide) * stats.pearson3.ppf(sure, (third + lacking**3) / wide**1.5)


@pytest.mark.parametrize("num_strata", [1, 3])
def test_interval_by_hand(num_strata: int) -> None:
    values, index = texts(1)
    stratum = index % num_strata
    interval = skewed_mean(values, index, stratum if num_strata > 1 else None)
    low, high = by_hand(values, index, {i: i % num_strata for i in range(30)})
    assert (interval.value, interval.low, interval.high) == pytest.approx((values.mean(), low, high), rel=1e-9)
    assert (interval.n, interval.level) == (30, 0.95)
    assert skewed_mean(values, index, stratum if num_strata > 1 else None) == interval


def test_mirrored_values_have_the_mirrored_interval() -> None:
    """The longer tail may be on either side: agreement, which has a highest value, is skewed downwards, KL upwards."""
    values, index = texts(2)
    up, down = skewed_mean(values, index), skewed_mean(-values, index, most=0.0)
    assert (down.value, down.low, down.high) == pytest.approx((-up.value, -up.high, -up.low))
    assert up.high - up.value > up.value - up.low


def test_strata_take_out_what_the_design_fixes() -> None:
    """Half of the texts have a hundred times the values of the others, always: that is no chance."""
    values, index = texts(3, 60)
    values = np.where(index % 2 == 0, values, 100 + values)
    entry, two = skewed_mean(values, index), skewed_mean(values, index, index % 2)
    assert two.value == entry.value
    assert two.high - two.low < 0.5 * (entry.high - entry.low)  # what is left: texts differ in length
    same = skewed_mean(values, index, np.where(index % 2 == 0, "b", "a"))
    assert (same.low, same.high) == pytest.approx((two.low, two.high))


def test_one_text_with_everything_does_not_make_the_interval_endless() -> None:
    """A resample without that text has hardly an error of its own: bootstrap-t ended at 24 times the mean. How many such texts
    there are is a count of one: 7.8 times the mean by Poisson's exact limit for this end's error, of the same size only."""
    values = np.full(25, 1e-6)
    values[7] = 0.03
    interval = skewed_mean(values, np.arange(25), least=0.0)
    assert interval.low == 0 and 7.8 < interval.high / interval.value < 20


def test_ends_stay_inside_what_the_mean_can_be() -> None:
    shares = np.ones(200)
    shares[:3] = 0
    interval = skewed_mean(shares, np.repeat(np.arange(20), 10), least=0.0, most=1.0)
    assert (interval.value, interval.high) == (pytest.approx(0.985), 1.0) and 0.5 < interval.low < 0.985
    assert skewed_mean(shares, np.repeat(np.arange(20), 10)).high > 1


def test_texts_all_alike_are_a_point() -> None:
    assert skewed_mean(np.zeros(40), np.repeat(np.arange(20), 2)) == Interval(
        value=0.0, low=0.0, high=0.0, n=20, coverage="at_least"
    )
    by_stratum = skewed_mean(np.repeat([1.0, 3.0], 20), np.arange(40), np.repeat([0, 1], 20))
    assert by_stratum == Interval(value=2.0, low=2.0, high=2.0, n=40, coverage="at_least")


@pytest.mark.parametrize(
    ("values", "clusters", "strata", "words"),
    [
        ([1.0, 2.0], [0, 0], None, "1 cluster: an interval needs at least two"),
        ([1.0, np.nan], [0, 1], None, "values must be finite"),
        ([1.0, 2.0, 3.0], [0, 1, 2], ["a", "a", "b"], "a stratum of one cluster: an interval needs at least two of each"),
        ([1.0, 2.0, 3.0], [0, 0, 1], ["a", "b", "a"], "a cluster lies in two strata"),
    ],
)
def test_what_has_no_interval_is_refused(values: list[float], clusters: list[int], strata: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        skewed_mean(values, clusters, strata)


def test_one_text_more_or_less_is_what_is_sampled() -> None:
    """Not the positions: as independent values the interval would be several times too narrow."""
    values, index = texts(4)
    by_text, by_value = skewed_mean(values, index), skewed_mean(values, np.arange(len(values)))
    assert by_text.high - by_text.low > 3 * (by_value.high - by_value.low)
    bca = cluster_bootstrap_mean(values, index)
    assert by_text.value == bca.value and by_text.high > bca.high


@pytest.mark.parametrize(("num_texts", "one_in"), [(20, 5.9), (24, 7.0), (60, 16.8), (100, 27.6), (400, 108.9)])
def test_what_texts_have_not_shown(num_texts: int, one_in: float) -> None:
    """So rare that a sample has none of it in 2.5 %: by the exact binomial distribution."""
    share = unseen_share(num_texts)
    assert 1 / share == pytest.approx(one_in, abs=0.05)
    assert stats.binom.pmf(0, num_texts, share) == pytest.approx(0.025)


def of_unequal_texts(seed: int, num_texts: int, deviation: float) -> tuple[np.ndarray, np.ndarray]:
    """(sum of the KL of each text, its length in tokens); long texts tend to differ less, as far as `deviation` says."""
    rng = np.random.default_rng(seed)
    length = rng.lognormal(5.5, 1, num_texts) + 10
    kl = np.exp(deviation * (0.7 * rng.normal(size=num_texts) - 0.7 * (np.log(length) - 5.5)))
    return kl * length, length


@pytest.mark.parametrize(("num_texts", "before"), [(20, 0.061), (60, 0.051)])
def test_a_limit_is_seldom_passed_by_texts_of_unequal_length(num_texts: int, before: float) -> None:
    """A long text that differs little skews the sample downwards; its upper end was then that of a light tail (before)."""
    draws = [of_unequal_texts(seed, num_texts, 1.2) for seed in range(1000)]
    true = sum(sums.sum() for sums, _ in draws) / sum(length.sum() for _, length in draws)
    ends = [skewed_ends(*draw, np.zeros(num_texts, np.intp))[1] for draw in draws]
    assert np.mean(np.array(ends) < true) < 0.025 + 2 * np.sqrt(0.025 * 0.975 / 1000) < before


def test_where_values_have_no_highest_the_upper_end_is_no_nearer_than_a_normal_tail() -> None:
    values, index = texts(2)
    result, bounded = skewed_mean(-values, index), skewed_mean(-values, index, most=0.0)
    sizes = np.bincount(index)
    sums = np.bincount(index, weights=-values + values.mean())
    error = np.sqrt(30 / 29 * ((sums - sums.mean()) ** 2).sum()) / len(values)
    degrees = sizes.sum() ** 2 / (sizes**2).sum() - 1
    assert result.high == pytest.approx(-values.mean() + error * stats.t.isf(0.025 / (1 + 150 / degrees), degrees))
    assert (result.low, result.high > bounded.high) == (bounded.low, True)


def test_ratio_of_paired_sums() -> None:
    """Its ends are the ratios at which the wider interval of numerator - r denominator begins to hold 0."""
    rng = np.random.default_rng(5)
    b = rng.lognormal(size=60)
    a = 0.5 * b * rng.lognormal(sigma=0.2, size=60)
    interval = skewed_ratio(a, b)
    assert interval is not None
    assert interval.value == a.sum() / b.sum() and interval.low < interval.value < interval.high < 1
    ones, stratum = np.ones(60), np.zeros(60, np.intp)
    for end in (interval.low, interval.high):
        ends = [*skewed_ends(a - end * b, ones, stratum), *(-x for x in skewed_ends(end * b - a, ones, stratum))]
        assert min(abs(x) for x in (min(ends), max(ends))) < 1e-9
    same = skewed_ratio(b, b)
    assert same is not None and (same.low, same.value, same.high) == pytest.approx((1, 1, 1))
    nothing = skewed_ratio(np.zeros(60), b)
    assert nothing is not None and nothing.value == nothing.low == 0 and nothing.high < 1e-9


def test_ratio_to_next_to_nothing_has_no_end() -> None:
    lost = np.zeros(30)
    lost[0] = 1.0
    assert skewed_ratio(np.ones(30), lost) is None
    assert skewed_ratio(np.ones(30), np.zeros(30)) is None
    assert skewed_ratio([1.0], [1.0]) is None
