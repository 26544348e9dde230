"""Given ids against the likeliest of the same server, which no vLLM on a CPU answers: a scripted server does."""

from __future__ import annotations

from typing import Any

import pytest
from fake_server import FakeServer

from assay.errors import MeasureError
from assay.records.preflight.gpu_check import ExactIds
from assay_evaluate.client.client import Client
from assay_evaluate.diagnosis.gpu_check.questions import EXACT_IDS_BOUND, TOP_K, exact_ids

TEXT = (5, 9, 17, 3, 40, 41)


def test_given_ids_have_the_values_of_the_likeliest() -> None:
    with FakeServer(generate=frozenset({"plain", "packed", "exact"})) as server, Client(server) as client:
        result = exact_ids(client, TEXT)
    assert result == ExactIds(num_values=TOP_K * 5, max_difference=0.0, bound=EXACT_IDS_BOUND)


def test_a_row_that_is_off_by_one_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = FakeServer._token_scores

    def shifted(server: FakeServer, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        how = body["sampling_params"]
        if "prompt_logprob_token_ids" in how:
            rows = how["prompt_logprob_token_ids"]
            body = {**body, "sampling_params": {**how, "prompt_logprob_token_ids": [*rows[1:], rows[0]]}}
        return answer(server, body)

    monkeypatch.setattr(FakeServer, "_token_scores", shifted)
    with FakeServer(generate=frozenset({"plain", "packed", "exact"})) as server, Client(server) as client:
        assert exact_ids(client, TEXT).max_difference > 10 * EXACT_IDS_BOUND


def test_a_server_that_does_not_take_them_is_not_measured() -> None:
    with (
        FakeServer(generate=frozenset({"plain", "packed"})) as server,
        Client(server) as client,
        pytest.raises(MeasureError, match="requires the V2 model runner"),
    ):
        exact_ids(client, TEXT)
