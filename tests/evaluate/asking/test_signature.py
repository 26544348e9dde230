"""Why a server has no signature: NaN is said of numbers that were NaN, and of nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from fake_server import FakeServer

from assay_evaluate.asking import signature
from assay_evaluate.asking.signature import take_signature
from assay_evaluate.client.client import NotMeasured

NAN_REFUSED = (400, {"error": {"message": "Out of range float values are not JSON compliant: nan"}})
SEE = "; see `assay diagnose probe`"


class Signs(FakeServer):
    """Answers the completions API; `change` is made to each choice."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self.change = change
        self.num_asked = 0

    def _answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any] | bytes] | None:
        self.num_asked += 1
        return self.change(self.num_asked)


def choice(logprob: float | None, top: float | None, token: int = 5) -> tuple[int, dict[str, Any]]:
    rows = [None, {str(token): {"logprob": logprob, "rank": 1}}]
    logprobs = {"tokens": ["token_id:7"], "token_logprobs": [top], "top_logprobs": [{"token_id:7": top}]}
    return 200, {"choices": [{"text": "x", "finish_reason": "length", "prompt_logprobs": rows, "logprobs": logprobs}]}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda n: choice(float("nan"), float("nan")), f"its log-probabilities are no numbers (NaN or infinite){SEE}"),
        (lambda n: choice(float("-inf"), float("nan")), f"its log-probabilities are no numbers (NaN or infinite){SEE}"),
        (lambda n: choice(None, None), "it gives null in place of log-probabilities"),
        (lambda n: choice(-1.0, -1.0, token=n), f"asked twice, it gives log-probabilities of other tokens of a prompt{SEE}"),
        (
            lambda n: NAN_REFUSED,
            "its log-probabilities are no numbers (HTTP 400: Out of range float values are not JSON compliant: nan)" + SEE,
        ),
        (
            lambda n: (400, {"error": {"message": "logprobs are off"}}),
            "it gives no log-probabilities (HTTP 400: logprobs are off); start vLLM without --max-logprobs 0",
        ),
        (
            lambda n: (200, {"error": {"message": "no logprobs here", "code": 400}}),
            "it gives no log-probabilities (HTTP 400: no logprobs here); start vLLM without --max-logprobs 0",
        ),
        (
            lambda n: (200, {"choices": [{"text": "x"}]}),
            "it gives no log-probabilities (no log-probabilities in its replies); start vLLM without --max-logprobs 0",
        ),
        (
            lambda n: (200, {}),
            "it gives no log-probabilities (no log-probabilities in its replies); start vLLM without --max-logprobs 0",
        ),
    ],
)
def test_why_there_is_none(change: Any, why: str) -> None:
    with Signs(change) as server, pytest.raises(NotMeasured) as error:
        take_signature(server)
    assert str(error.value) == why


def test_an_error_with_status_200_is_waited_for_as_its_code_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signature, "PAUSES_S", (0.0, 0.0))
    busy = (200, {"error": {"message": "busy", "code": 503}})
    with Signs(lambda n: busy if n in {1, 4} else choice(-1.0, -1.0)) as server:
        assert take_signature(server).noise == 0.0
