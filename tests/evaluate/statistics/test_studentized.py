"""The interval of a mean KL over texts: against a plain bootstrap-t, by simulation, and where there is little to resample."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from assay.records.base import Interval
from assay_evaluate.statistics import cluster_bootstrap_mean, studentized_mean
from assay_evaluate.statistics.studentized import LONG_TAIL, resample_weights

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks" / "verdicts"))

from divergence_coverage import POPULATIONS, Coverage, coverage


def texts(seed: int, num_texts: int = 30) -> tuple[np.ndarray, np.ndarray]:
    """Skewed values of texts of different lengths that differ among themselves, and each one's text."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(5, 60, num_texts)
    return rng.exponential(np.repeat(rng.lognormal(size=num_texts), sizes)), np.repeat(np.arange(num_texts), sizes)


def test_interval_is_that_of_a_plain_bootstrap_t() -> None:
    """Values are put together text by text, and mean and error are computed from the values themselves."""
    values, index = texts(1)
    found = studentized_mean(values, index, num_resamples=300, seed=5)
    apart = [values[index == text] for text in range(30)]

    def mean_and_error(chosen: list[np.ndarray]) -> tuple[float, float]:
        mean, count = np.concatenate(chosen).mean(), sum(map(len, chosen))
        return mean, np.sqrt(sum((one - mean).sum() ** 2 for one in chosen) * 30 / 29) / count

    mean, error = mean_and_error(apart)
    t = []
    for row in np.concatenate(list(resample_weights(30, 300, 5))):
        assert row.sum() == 30
        again, its_error = mean_and_error([one for one, times in zip(apart, row, strict=True) for _ in range(int(times))])
        t.append((again - mean) / its_error)
    from_low, from_high = np.quantile(t, [1 - 0.025, 0.025 * LONG_TAIL])
    expected = (mean, mean - from_low * error, mean - from_high * error)
    assert (found.value, found.low, found.high) == pytest.approx(expected, rel=1e-9)
    assert (found.n, found.level) == (30, 0.95)
    assert studentized_mean(values, index, num_resamples=300, seed=5) == found


def test_mirrored_values_have_the_mirrored_interval() -> None:
    """The longer tail may be on either side: agreement is skewed downwards, KL upwards."""
    values, index = texts(2)
    up, down = studentized_mean(values, index), studentized_mean(-values, index)
    assert (down.value, down.low, down.high) == pytest.approx((-up.value, -up.high, -up.low))
    assert up.high - up.value > up.value - up.low


def test_ends_stay_inside_what_the_mean_can_be() -> None:
    shares = np.ones(200)
    shares[:3] = 0
    found = studentized_mean(shares, np.repeat(np.arange(20), 10), least=0.0, most=1.0)
    assert (found.value, found.high) == (pytest.approx(0.985), 1.0) and 0.9 < found.low < 0.985
    assert studentized_mean(shares, np.repeat(np.arange(20), 10)).high > 1


def test_few_texts_with_any_drift_at_all() -> None:
    """Resamples without these texts have no error of their own. The interval is no narrower than Student's t has it."""
    values = np.zeros(720)
    values[5] = 1e-3  # one text of 72
    found = studentized_mean(values, np.repeat(np.arange(72), 10), least=0.0)
    assert found.low == 0 and found.high == pytest.approx((1 + 1.994) * found.value, rel=1e-3)
    assert studentized_mean(np.zeros(40), np.repeat(np.arange(20), 2)) == Interval(value=0.0, low=0.0, high=0.0, n=20)


@pytest.mark.parametrize(
    ("values", "clusters", "words"),
    [([1.0, 2.0], [0, 0], "1 cluster: an interval needs at least two"), ([1.0, np.nan], [0, 1], "values must be finite")],
)
def test_what_has_no_interval_is_refused(values: list[float], clusters: list[int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        studentized_mean(values, clusters)


def test_many_texts_are_resampled_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pieces together are the resamples asked for; the ends move by the draw only."""
    values, index = texts(3, num_texts=100)
    whole = studentized_mean(values, index)
    monkeypatch.setattr("assay_evaluate.statistics.studentized.MOST_AT_ONCE", 30_000)
    assert [len(piece) for piece in resample_weights(100, 2000, 0)] == [300] * 6 + [200]
    pieces = studentized_mean(values, index)
    assert (pieces.low, pieces.high) == pytest.approx((whole.low, whole.high), rel=0.08)


@pytest.mark.slow
@pytest.mark.parametrize("population", POPULATIONS, ids=lambda one: one.name)
@pytest.mark.parametrize("num_texts", [20, 48])
def test_coverage_by_simulation(population: object, num_texts: int) -> None:
    """benchmarks/verdicts/divergence_coverage.md has the figures; 300 draws know a share of 95 % to 2.5 points."""
    found: dict[str, Coverage] = coverage(population, num_texts, 300, ("bootstrap-t", "BCa"))  # type: ignore[arg-type]
    ours, before = found["bootstrap-t"], found["BCa"]
    assert 0.91 <= ours.holds <= 1
    assert ours.above <= 0.075 and ours.below <= 0.055
    assert ours.above < before.above, "BCa misses upward more often"


def test_one_text_more_or_less_is_what_is_resampled() -> None:
    """Not the positions: as independent values the interval would be several times too narrow."""
    values, index = texts(4)
    by_text, by_value = studentized_mean(values, index), studentized_mean(values, np.arange(len(values)))
    assert by_text.high - by_text.low > 3 * (by_value.high - by_value.low)
    bca = cluster_bootstrap_mean(values, index)
    assert by_text.value == bca.value and by_text.high > bca.high
