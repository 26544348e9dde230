"""What a damage counts as, against scipy's truncated normal distribution."""

from __future__ import annotations

import pytest
from scipy import stats

from assay.records.base import Interval
from assay_quantize.mixing.damage import damage_used, standard_error


def interval(value: float, error: float, level: float = 0.95) -> Interval:
    half = float(stats.norm.ppf((1 + level) / 2)) * error
    return Interval(value=value, low=value - half, high=value + half, n=24, level=level)


@pytest.mark.parametrize("value", [-3.0, -0.5, 0.0, 0.5, 1.0, 4.0])
@pytest.mark.parametrize("level", [0.9, 0.95])
def test_the_mean_of_a_normal_distribution_cut_off_at_zero(value: float, level: float) -> None:
    error = 0.75
    expected = stats.truncnorm.mean(-value / error, float("inf"), loc=value, scale=error)
    assert damage_used(value, interval(value, error, level)) == pytest.approx(expected, rel=1e-6)
    assert standard_error(interval(value, error, level)) == pytest.approx(error)


def test_within_its_error_of_zero_a_damage_is_neither_negative_nor_free() -> None:
    assert damage_used(-0.001, interval(-0.001, 0.001)) > 0.0004
    assert damage_used(0.0, interval(0.0, 0.001)) == pytest.approx(0.001 * (2 / 3.14159265) ** 0.5, rel=1e-6)
    assert damage_used(-40.0, interval(-40.0, 1.0)) >= 0.0


def test_a_clear_damage_stays_as_it_is() -> None:
    assert damage_used(0.01, interval(0.01, 0.0005)) == pytest.approx(0.01, rel=1e-9)


def test_without_an_interval_nothing_is_known_of_the_error() -> None:
    assert (damage_used(0.25, None), damage_used(-0.25, None), standard_error(None)) == (0.25, 0.0, None)
    assert damage_used(0.25, Interval(value=0.25, low=0.25, high=0.25, n=24)) == 0.25
