"""A weighted sum of tasks: against the normal interval, its own parts, and draws whose truth is known."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
from scipy import stats

from assay.records.base import Interval
from assay_evaluate.statistics.clustered import ClusteredMean, clustered_values_needed
from assay_evaluate.statistics.paired import paired_difference
from assay_evaluate.statistics.proportions import p_at_least, p_at_most, weighted_sum


def normal(value: float, error: float, level: float = 0.95) -> Interval:
    half = float(stats.norm.ppf(0.5 + level / 2)) * error
    return Interval(value=value, low=value - half, high=value + half, n=100, level=level)


def test_normal_parts_give_the_normal_interval() -> None:
    interval = weighted_sum([normal(0.1, 0.02), normal(-0.05, 0.04), normal(0.0, 0.01)], [1.0, 0.5, 2.0])
    error = math.sqrt(0.02**2 + 0.02**2 + 0.02**2)
    half = float(stats.norm.ppf(0.975)) * error
    assert interval.value == pytest.approx(0.075)
    assert (interval.high - interval.value, interval.value - interval.low) == (pytest.approx(half), pytest.approx(half))
    assert (interval.n, interval.level) == (3, 0.95)
    assert p_at_least(interval, 0.12) == pytest.approx(stats.norm.cdf((0.075 - 0.12) / error))
    assert p_at_most(interval, 0.0) == pytest.approx(stats.norm.sf(0.075 / error))


def test_one_part_keeps_its_interval_and_its_p_values_meet_its_ends() -> None:
    part = paired_difference(7, 1, 80)
    interval = weighted_sum([part], [1.0])
    assert (interval.low, interval.high) == (pytest.approx(part.low), pytest.approx(part.high))
    assert p_at_least(interval, part.high) == pytest.approx(0.025)
    assert p_at_most(interval, part.low) == pytest.approx(0.025)


def test_a_point_is_certain() -> None:
    point = Interval(value=0.2, low=0.2, high=0.2, n=5)
    assert [p_at_least(point, 0.3), p_at_least(point, 0.2), p_at_most(point, 0.1), p_at_most(point, 0.2)] == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("parts", "weights", "said"),
    [
        ([], [], "no part"),
        ([normal(0, 1), normal(0, 1, 0.9)], [1.0, 1.0], "no common interval"),
        ([normal(0, 1)], [0.0], "above 0"),
        ([normal(0, 1)], [1.0, 1.0], "zip"),
    ],
)
def test_what_cannot_be_summed(parts: list[Interval], weights: list[float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        weighted_sum(parts, weights)


@pytest.mark.slow
def test_it_covers_the_mean_use_of_unlike_margins() -> None:
    """Tasks with many discordant pairs and with hardly any, each truly losing half of its margin."""
    tasks = [(400, 0.03, 0.016), (500, 0.03, 0.04), (60, 0.15, 0.15), (198, 0.05, 0.12), (1319, 0.01, 0.03)]
    rng, num_draws, above, below = np.random.default_rng(1), 2000, 0, 0
    difference = functools.cache(paired_difference)  # most tables are drawn many times
    for _ in range(num_draws):
        parts = []
        for n, margin, rate in tasks:
            loss = margin / 2
            b, c, _ = rng.multinomial(n, [(rate + loss) / 2, (rate - loss) / 2, 1 - rate])
            parts.append(difference(int(b), int(c), n))
        interval = weighted_sum(parts, [1 / (len(tasks) * margin) for _, margin, _ in tasks])
        above, below = above + (interval.low > 0.5), below + (interval.high < 0.5)
    assert below / num_draws <= 0.03  # a false PASS
    assert 0.935 <= 1 - (above + below) / num_draws <= 0.97


@pytest.mark.parametrize("loss", [0.05, 0.06])
def test_no_number_of_clusters_makes_a_loss_of_the_margin_pass(loss: float) -> None:
    mean = ClusteredMean(value=loss, standard_error=0.02, degrees=11.0, num_clusters=12)
    with pytest.raises(ValueError, match=r"is not below the margin 0\.05: no number of values makes it pass"):
        clustered_values_needed(mean, 500, 0.05, loss=loss)
