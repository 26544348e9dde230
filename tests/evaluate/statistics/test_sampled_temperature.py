"""The temperature that tokens were drawn at: as a search over the whole distributions finds it, and normal where it is 1."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from scipy import stats

from assay_evaluate.diagnosis.probes.temperature import LIMIT_Z, without_strangers
from assay_evaluate.statistics.sampled_temperature import DrawnTokens, drawn_tokens, together

Floats = npt.NDArray[np.float64]
VOCABULARY = 50


def logprobs_of(draw: np.random.Generator, num_tokens: int, spread: float) -> Floats:
    logits_PV = draw.normal(0, spread, (num_tokens, VOCABULARY))
    return np.asarray(logits_PV - np.log(np.exp(logits_PV).sum(axis=1, keepdims=True)))


def drawn(draw: np.random.Generator, logprobs_PV: Floats, temperature: float, num_listed: int) -> tuple[Floats, DrawnTokens]:
    drawn_P = np.argmax(logprobs_PV / temperature + draw.gumbel(size=logprobs_PV.shape), axis=1)
    top_PK = -np.sort(-logprobs_PV, axis=1)[:, :num_listed]
    chosen_P = logprobs_PV[np.arange(len(logprobs_PV)), drawn_P]
    return chosen_P, drawn_tokens(chosen_P, top_PK)


def log_likelihood(chosen_P: Floats, logprobs_PV: Floats, temperature: float) -> float:
    return float((chosen_P / temperature - np.log(np.exp(logprobs_PV / temperature).sum(axis=1))).sum())


@pytest.mark.parametrize("temperature", [0.6, 0.9, 1.0, 1.3, 2.0])
def test_all_tokens_listed_it_is_the_likeliest_temperature(temperature: float) -> None:
    draw = np.random.default_rng(7)
    logprobs_PV = logprobs_of(draw, 300, 3)
    chosen_P, tokens = drawn(draw, logprobs_PV, temperature, VOCABULARY)
    tried = np.linspace(0.3, 3, 2701)
    nats = np.array([log_likelihood(chosen_P, logprobs_PV, value) for value in tried])
    allowed = tried[nats >= nats.max() - 1.9207]  # half of the chi-square with one degree of freedom, at 95 %
    low, high = tokens.temperature_interval(0.95)
    assert tokens.temperature == pytest.approx(tried[nats.argmax()], abs=1e-3)
    assert (low, high) == pytest.approx((allowed[0], allowed[-1]), abs=2e-3)
    assert low < temperature < high


@pytest.mark.parametrize("num_listed", [1, 4, 20])
def test_a_standard_normal_at_temperature_1_and_far_off_at_others(num_listed: int) -> None:
    """40 tokens of known distributions, 400 times at temperature 1. At 1.3 and 0.7, 2,000 tokens tell."""
    draw = np.random.default_rng(2)

    def z_of(num_tokens: int, temperature: float) -> float:
        return drawn(draw, logprobs_of(draw, num_tokens, 3), temperature, num_listed)[1].standard_errors

    healthy = np.array([z_of(40, 1.0) for _ in range(400)])
    assert abs(healthy.mean()) < 0.2 and 0.85 < healthy.std() < 1.15 and np.abs(healthy).max() < LIMIT_Z
    assert z_of(2000, 1.3) < -LIMIT_Z and z_of(2000, 0.7) > LIMIT_Z


def test_a_single_unlikely_token_among_sure_ones_is_no_alarm() -> None:
    """200 tokens that are sure to 99 %, and eight times one of the others: 1 in 1,000 by the binomial distribution.

    The sum of the log-probabilities lies more than 4 of its standard deviations off.
    """
    top_PK = np.log(np.array([[0.99] + [0.0005] * 19] * 200))
    chosen_P = np.where(np.arange(200) < 8, np.log(0.0005), np.log(0.99))
    tokens = drawn_tokens(chosen_P, top_PK)
    p_PK, value_PK = np.exp(tokens.logp_PK), tokens.values_PK
    mean_P = (p_PK * value_PK).sum(axis=1)
    plain_z = (tokens.nats - mean_P.sum()) / np.sqrt(((p_PK * value_PK**2).sum(axis=1) - mean_P**2).sum())
    least, most = stats.norm.ppf([stats.binom.sf(8, 200, 0.01), stats.binom.sf(7, 200, 0.01)])
    assert plain_z < -LIMIT_Z < least < tokens.standard_errors < most


def replies_at(temperature: float, count: int, seed: int) -> list[DrawnTokens]:
    """Of 90 tokens each, most of them sure, as tiny models and long derivations write them."""
    draw = np.random.default_rng(seed)
    replies = []
    for _ in range(count):
        logprobs_PV = logprobs_of(draw, 90, 8)
        replies.append(drawn(draw, logprobs_PV, temperature, 20)[1])
    return replies


def test_replies_at_a_higher_temperature_are_no_strangers() -> None:
    """Leaving out those that are far off would leave out the evidence."""
    replies = replies_at(1.3, 24, 1)
    assert without_strangers(replies).num_tokens == 24 * 90
    assert without_strangers(replies).standard_errors < -LIMIT_Z


def test_replies_of_another_prompt_are_strangers() -> None:
    """Two of 24 whose every token is one that the model would hardly write."""
    draw = np.random.default_rng(5)
    logprobs_PV = logprobs_of(draw, 90, 8)
    another = drawn_tokens(logprobs_PV.min(axis=1), -np.sort(-logprobs_PV, axis=1)[:, :20])
    replies = [*replies_at(1.0, 22, 1), another, another]
    assert without_strangers(replies).num_tokens == 22 * 90
    assert abs(without_strangers(replies).standard_errors) < 2
    assert together(replies).standard_errors < -LIMIT_Z


def test_the_likeliest_token_every_time_and_the_least_likely() -> None:
    top_PK = np.log(np.array([[0.6, 0.3, 0.1]] * 100))
    coldest, hottest = drawn_tokens(top_PK[:, 0], top_PK), drawn_tokens(top_PK[:, 2], top_PK)
    assert (coldest.temperature, coldest.describe_temperature(0.95)) == (0.05, "0.05 or less")
    assert (hottest.temperature, hottest.describe_temperature(0.95)) == (20.0, "20 or more")
    assert (coldest.temperature_interval(0.95)[0], hottest.temperature_interval(0.95)[1]) == (0.05, 20.0)
    assert coldest.standard_errors > 4 and hottest.standard_errors < -4


def test_nothing_drawn() -> None:
    nothing: Any = together([])
    assert (nothing.num_tokens, nothing.nats, nothing.standard_errors) == (0, 0.0, 0.0)
