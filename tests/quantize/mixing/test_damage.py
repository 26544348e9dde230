"""What damages count as: never negative, as they are where they are clear, near the line of their kind where they are noise."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from assay.records.base import Interval
from assay_quantize.formats.schemes import SCHEMES
from assay_quantize.kernels import amax_rows, needs_amax, quantize_rows
from assay_quantize.mixing.damage import SPREAD, SQUARED_ERROR, not_negative, shrunken_damages, standard_error


def interval(value: float, error: float, level: float = 0.95) -> Interval:
    half = float(stats.norm.ppf((1 + level) / 2)) * error
    return Interval(value=value, low=value - half, high=value + half, n=24, level=level)


@pytest.mark.parametrize("value", [-3.0, -0.5, 0.0, 0.5, 1.0, 4.0])
def test_the_mean_of_a_normal_distribution_cut_off_at_zero(value: float) -> None:
    error = 0.75
    expected = stats.truncnorm.mean(-value / error, float("inf"), loc=value, scale=error)
    assert not_negative(value, error) == pytest.approx(expected, rel=1e-6)
    assert shrunken_damages({"w4a16": (value, interval(value, error, 0.9))})["w4a16"][0] == pytest.approx(expected, rel=1e-6)


def test_standard_errors_by_level() -> None:
    assert standard_error(interval(1.0, 0.25, 0.9)) == pytest.approx(0.25)
    assert standard_error(None) is None


def test_within_its_error_of_zero_a_damage_is_neither_negative_nor_free() -> None:
    assert not_negative(-0.001, 0.001) > 0.0004
    assert not_negative(0.0, 0.001) == pytest.approx(0.001 * (2 / np.pi) ** 0.5, rel=1e-6)
    assert not_negative(-40.0, 1.0) >= 0.0


def test_without_an_interval_nothing_is_known_of_the_error() -> None:
    assert shrunken_damages({"w4a16": (0.25, None), "w4a16_g32": (-0.25, None)}) == {
        "w4a16": (0.25, None),
        "w4a16_g32": (0.0, None),
    }


def test_clear_figures_stay_and_noise_goes_to_the_line() -> None:
    schemes = ("w4a16", "w4a16_g64", "w4a16_g32", "nvfp4a16")
    values = dict(zip(schemes, (0.010, 0.002, 0.009, 0.004), strict=True))
    clear = shrunken_damages({s: (v, interval(v, 0.001 * v)) for s, v in values.items()})
    assert {s: used for s, (used, _) in clear.items()} == pytest.approx(values, rel=1e-3)
    line = {s: 0.025 * SQUARED_ERROR[s] / sum(SQUARED_ERROR[name] for name in schemes) for s in schemes}
    noise = shrunken_damages({s: (v, interval(v, 0.02)) for s, v in values.items()})
    total = sum(used for used, _ in noise.values())
    assert all(used / total == pytest.approx(line[s] / 0.025, rel=0.05) for s, (used, _) in noise.items())
    assert total > 0.025  # cut off at zero, what is not known cannot be free


def test_a_scheme_in_which_no_rare_event_happened_is_not_believed() -> None:
    """Measured on tiny-glm, layer 2's shared expert: one scheme twenty times better, with the narrowest interval."""
    measured = {"w4a16": (93e-5, 93e-5), "w4a16_g64": (93e-5, 96e-5), "w4a16_g32": (4.8e-5, 1e-5), "nvfp4a16": (83e-5, 105e-5)}
    used = shrunken_damages({scheme: (value, interval(value, error)) for scheme, (value, error) in measured.items()})
    assert used["w4a16_g32"][0] > 40e-5
    assert used["w4a16_g32"][0] < used["w4a16_g64"][0] < used["w4a16"][0]


def test_how_much_is_kept_is_bayes() -> None:
    """Two schemes, equal relative errors r: the posterior mean with a prior around the line of spread SPREAD."""
    r = 0.1
    values = {"w4a16": 0.012, "w4a16_g32": 0.006}
    error = r * 0.009
    used = shrunken_damages({s: (v, interval(v, error)) for s, v in values.items()})
    line = {s: 0.018 * SQUARED_ERROR[s] / (SQUARED_ERROR["w4a16"] + SQUARED_ERROR["w4a16_g32"]) for s in values}
    keeps = (1 / r**2) / (1 / r**2 + 1 / SPREAD**2)
    assert {s: name for s, (name, _) in used.items()} == pytest.approx(
        {s: keeps * values[s] + (1 - keeps) * line[s] for s in values}, rel=1e-6
    )


def test_kinds_are_apart() -> None:
    """FP8 with its activations says nothing of INT4 weights."""
    alone = shrunken_damages({"w4a16": (0.01, interval(0.01, 0.005))})
    shrunken = shrunken_damages({"w4a16": (0.01, interval(0.01, 0.005)), "fp8_block": (0.5, interval(0.5, 0.4))})
    assert shrunken["w4a16"] == alone["w4a16"]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_squared_errors_are_those_of_the_kernels(scheme: str) -> None:
    weights = torch.randn(256, 2048, generator=torch.Generator().manual_seed(0)) * 0.02
    rows = weights.to(torch.bfloat16).view(torch.uint16).numpy()
    more = {"amax": amax_rows(rows, "BF16"), "amax_dtype": "BF16"} if needs_amax(scheme) else {}
    made = quantize_rows(rows, "BF16", scheme, **more)
    assert made.squared_error / made.squared_norm == pytest.approx(SQUARED_ERROR[scheme], rel=0.07)
