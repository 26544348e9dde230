"""What workers tell of their activations, and servers whose workers tell something else."""

from __future__ import annotations

import json

import pytest
from raw_server import RawServer

from assay.errors import MeasureError, ServeError
from assay_evaluate.diagnosis.locate.reading import WatchedServer, read_weights


def answering(body: str, status: str = "200 OK") -> RawServer:
    return RawServer(f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())


def point(**more: object) -> dict[str, object]:
    plain = {"name": "w", "kind": "weight", "partial": False, "num_tokens": 1, "max_abs": 1.0, "mean": 0.0, "rms": 0.5}
    return {**plain, "non_finite": 0, "sketch": "", "input": "", "chosen": "", "top_k": 0, "rows": "", **more}


def test_ranks_in_order_and_the_key_sent() -> None:
    reported = {"results": [{"rank": rank, "points": [point(rms=rank / 2)]} for rank in (1, 0)]}
    with answering(json.dumps(reported)) as server:
        watched = WatchedServer(server.base_url, "model", {"Authorization": "Bearer sk-1234567890"})
        result = read_weights(watched)
    assert [(rank, points["w"].rms) for rank, points in result.items()] == [(0, 0.0), (1, 0.5)]
    assert "Authorization: Bearer sk-1234567890" in server.heads[0] and "sk-" not in repr(watched)


@pytest.mark.parametrize(
    "body",
    ["<html>", "[" * 100_000, "{}", '{"results": 7}', '{"results": [7]}', '{"results": [{"rank": 0, "points": [{}]}]}',
     json.dumps({"results": [{"rank": 0, "points": [point(sketch="AAA")]}]})],
)  # fmt: skip
def test_workers_that_answer_something_else(body: str) -> None:
    with answering(body) as server, pytest.raises(MeasureError, match="the answer of weigh_parameters is not"):
        read_weights(WatchedServer(server.base_url, "model"))


def test_a_prompt_that_is_refused_or_answered_with_html() -> None:
    refusal = answering('{"error": {"message": "too long"}}', "400 Bad Request")
    with refusal as server, pytest.raises(MeasureError, match=r"^http://127.0.0.1:\d+: HTTP 400 to a prompt: too long$"):
        WatchedServer(server.base_url, "model").prefill("x")
    with answering("<html>") as server, pytest.raises(MeasureError, match="the answer of /v1/completions is not what"):
        WatchedServer(server.base_url, "model").prefill("x")
    with pytest.raises(ServeError, match=r"/v1/completions: no reply \(ConnectionRefusedError.*is the server running\?$"):
        WatchedServer("http://127.0.0.1:9", "model").prefill("x")
