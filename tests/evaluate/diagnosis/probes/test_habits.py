"""Whether a sampled reply with a token of almost no probability is the model's own: some are, of those that hold many."""

from __future__ import annotations

import numpy as np
import pytest

from assay_evaluate.client.exchanges import Ask, Exchange
from assay_evaluate.client.journal import Reply, TokenLogprobs
from assay_evaluate.diagnosis.probes.garble import is_own
from assay_evaluate.diagnosis.probes.probe_session import RescoredReply

NUM_TOKENS = 90
LISTED = np.log(np.array([0.99] + [0.0005] * 18 + [0.0009], np.float32))
"""All but one in ten thousand."""
UNLIKELY_NATS = -16.0


def scored_reply(num_unlikely: int) -> RescoredReply:
    """Of the likeliest token at each place but the first ones, at which tokens stand that are not listed."""
    chosen_P = np.full(NUM_TOKENS, LISTED[0], np.float32)
    chosen_P[:num_unlikely] = UNLIKELY_NATS
    ids_P = np.zeros(NUM_TOKENS, np.int32)
    prefill = TokenLogprobs(
        ids_P, np.tile(np.arange(20, dtype=np.int32), (NUM_TOKENS, 1)), np.tile(LISTED, (NUM_TOKENS, 1)), chosen_P
    )
    return RescoredReply(Exchange(Ask("sampled/0", "/v1/completions", {}), 0, 1, "answered", Reply("answered")), prefill)


@pytest.mark.parametrize(
    ("num_unlikely", "temperature", "is_the_models"),
    [(0, 1.0, True), (1, 1.0, True), (4, 1.0, False), (4, 0.7, False), (0, 1.5, True), (1, 1.5, None), (1, 0.0, False)],
)
def test_whose_unlikely_tokens_are(num_unlikely: int, temperature: float, is_the_models: bool | None) -> None:
    """Of ninety tokens one of one in ten thousand happens in 1 % of replies, four in 3 of 10 billion. At temperature 0 none is
    chosen; above 1 nobody can tell."""
    assert is_own(scored_reply(num_unlikely), temperature) is is_the_models
