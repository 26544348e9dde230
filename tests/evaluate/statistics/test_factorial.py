"""Designs of two levels: what a quadratic form of causes is told apart into, by enumeration."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from assay_evaluate.statistics.factorial import (
    MOST_FACTORS,
    design,
    main_effects,
    mixed_pairs,
    pair_effect,
    share,
    strong_pairs,
)


def quadratic(num_factors: int, num_texts: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """a [F, T] and b [F, F, T], upper triangle."""
    draw = np.random.default_rng(seed)
    b = np.triu(np.ones((num_factors, num_factors)), 1)[:, :, None] * draw.normal(size=(num_factors, num_factors, num_texts))
    return draw.gamma(2.0, size=(num_factors, num_texts)), b


def of(settings_RF: np.ndarray, a_FT: np.ndarray, b_FFT: np.ndarray) -> np.ndarray:
    return np.array(
        [
            a_FT[on].sum(0)
            + sum((b_FFT[f, g] for f, g in itertools.combinations(np.flatnonzero(on), 2)), np.zeros(a_FT.shape[1]))
            for on in settings_RF
        ]
    )


def shapley(factor: int, a_FT: np.ndarray, b_FFT: np.ndarray) -> np.ndarray:
    """By its definition: the mean over all orders of what the factor adds to those before it."""
    others = [number for number in range(len(a_FT)) if number != factor]
    added = np.zeros(a_FT.shape[1])
    for size in range(len(others) + 1):
        for before in itertools.combinations(others, size):
            settings = np.zeros((2, len(a_FT)), bool)
            settings[:, list(before)] = True
            settings[1, factor] = True
            without, with_it = of(settings, a_FT, b_FFT)
            added += (with_it - without) / math.comb(len(others), size) / len(a_FT)
    return added


@pytest.mark.parametrize("num_factors", range(1, MOST_FACTORS + 1))
def test_main_effects_are_shapley_values(num_factors: int) -> None:
    settings = design(num_factors)
    assert len(settings) == {1: 2, 2: 4, 3: 8, 4: 8}.get(num_factors, 16)
    assert not settings[0].any() and settings[-1].all() and (settings.sum(0) == len(settings) / 2).all()
    a, b = quadratic(num_factors, 5, seed=num_factors)
    effects = main_effects(settings, of(settings, a, b))
    for factor in range(num_factors):
        assert np.allclose(effects[factor], shapley(factor, a, b))
    whole = of(settings, a, b)[-1]
    assert np.allclose(effects.sum(0), whole)
    for pairs in mixed_pairs(settings):
        told = pair_effect(settings, of(settings, a, b), *pairs[0])
        assert np.allclose(told, sum(b[f, g] for f, g in pairs))


def test_up_to_three_factors_no_pair_is_mixed_with_another() -> None:
    for num_factors in (2, 3):
        assert all(len(pairs) == 1 for pairs in mixed_pairs(design(num_factors)))
    assert sorted(map(len, mixed_pairs(design(8)))) == [4] * 7
    for wrong in (0, 9):
        with pytest.raises(ValueError, match=f"{wrong} factors: 1 to 8"):
            design(wrong)


def test_shares_and_the_pairs_that_matter() -> None:
    """Two of five causes act together; each has half of that in its share."""
    draw = np.random.default_rng(0)
    length_T = draw.gamma(4.0, 25.0, 40)
    a = np.outer([0.04, 0.01, 0.0, 0.0, 0.001], length_T) * draw.gamma(20, 1 / 20, (5, 40))
    b = np.zeros((5, 5, 40))
    b[0, 1] = 0.03 * length_T * draw.gamma(20, 1 / 20, 40)
    settings = design(5)
    kl = of(settings, a, b)
    whole = kl[-1]
    shares = [share(effect, whole) for effect in main_effects(settings, kl)]
    assert all(interval is not None for interval in shares)
    values = [interval.value for interval in shares if interval is not None]
    assert sum(values) == pytest.approx(1)
    assert values == pytest.approx([0.055 / 0.081, 0.025 / 0.081, 0, 0, 0.001 / 0.081], abs=0.02)
    for interval in shares:
        assert interval is not None and interval.low <= interval.value <= interval.high and interval.n == 40
    assert strong_pairs(settings, kl, values, 0.1) == [(0, 1)]
    assert share(-whole, whole) is not None and share(-whole, whole).value == pytest.approx(-1)  # type: ignore[union-attr]
    assert share(whole, whole - 2 * whole) is None


def test_a_share_holds_its_truth() -> None:
    """Of 400 samples of 40 texts about 95 % have the true share in their interval, on both sides of 0 and of few long texts."""
    draw = np.random.default_rng(1)
    for true_share, shape in ((0.6, 2.0), (-0.2, 2.0), (0.3, 0.3)):
        held = 0
        for _ in range(400):
            length_T = draw.gamma(4.0, 25.0, 40)
            whole_T = length_T * draw.gamma(shape, 0.1 / shape, 40)
            effect_T = whole_T * (true_share + draw.normal(0, 0.2, 40))
            interval = share(effect_T, whole_T)
            assert interval is not None
            held += interval.low <= true_share <= interval.high
        assert 0.91 <= held / 400 <= 0.98
