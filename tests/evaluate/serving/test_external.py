"""Servers that somebody else runs: what they may answer, and what is said about it."""

from __future__ import annotations

import json

import pytest
from raw_server import RawServer

from assay.errors import ServeError, UnreachableError
from assay_evaluate.serving.external import find_version, get, list_models, sum_metrics

DEEP = "[" * 100_000 + "]" * 100_000
DIGITS = "9" * 5000


def answering(body: str, status: str = "200 OK", *headers: str) -> RawServer:
    """A server that answers every request with this."""
    head = "".join(f"{line}\r\n" for line in (f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers, ""))
    return RawServer((head + body).encode())


@pytest.mark.parametrize(
    "body",
    [
        "<html>Sign in</html>", "", "null", "[]", "{}", '{"data": 7}', '{"data": {"a": 1}}', '{"data": [{}]}', DEEP, DIGITS,
        '{"data": [{"id": 7}]}', '{"data": [{"id": "\\ud800"}]}', '{"data": [{"id": "m", "max_model_len": "long"}]}',
        '{"data": [{"id": "m", "max_model_len": 1e999}]}', f'{{"data": [{{"id": "m", "max_model_len": {DIGITS}}}]}}',
    ],
)  # fmt: skip
def test_what_is_no_list_of_models(body: str) -> None:
    with answering(body) as server, pytest.raises(ServeError) as failed:
        url = server.base_url
        list_models(url, what="the endpoint")
    assert str(failed.value) == (f"{url}/v1/models: no list of models there; give an OpenAI-compatible server")


def test_a_list_of_models() -> None:
    models = [{"id": "a", "max_model_len": 4096}, {"id": "b", "max_model_len": None}, {"id": "c"}]
    with answering(json.dumps({"data": models})) as server:
        assert list_models(server.base_url, what="the endpoint") == models
    with answering('{"data": []}') as server, pytest.raises(ServeError, match="lists no model"):
        list_models(server.base_url, what="the endpoint")


@pytest.mark.parametrize("body", ["<html>", DEEP, DIGITS, "[]", "null", "7", "{}"])
def test_a_version_that_is_not_told(body: str) -> None:
    with answering(body) as server:
        assert find_version(server.base_url, what="the endpoint") is None


@pytest.mark.parametrize(
    ("status", "headers", "body", "said", "may_come_back"),
    [
        (
            "404 Not Found",
            (),
            '{"error": {"message": "no such\\u001b[31m page"}}',
            "404 at URL/x: no such\\u001b[31m page",
            False,
        ),
        ("503 Busy", (), "<html>later</html>", "503 at URL/x: <html>later</html>", True),
        (
            "301 Moved",
            ("Location: https://a/",),
            "",
            "301 at URL/x: a redirect to https://a/, which is not followed; give the",
            False,
        ),
    ],
)
def test_other_statuses(status: str, headers: tuple[str, ...], body: str, said: str, may_come_back: bool) -> None:
    with answering(body, status, *headers) as server:
        url = server.base_url
        with pytest.raises(ServeError) as failed:
            get(url, "/x", what="the endpoint")
    assert str(failed.value).startswith("the endpoint answers " + said.replace("URL", url))
    assert isinstance(failed.value, UnreachableError) == may_come_back


def test_a_server_that_is_not_there() -> None:
    with pytest.raises(UnreachableError) as failed:
        get("http://127.0.0.1:9", "/x", what="the endpoint")
    assert str(failed.value) == (
        "the endpoint does not answer at http://127.0.0.1:9/x (ConnectionRefusedError: [Errno 111] Connection refused); "
        "is it running?"
    )


def test_a_reply_that_cannot_be_used_is_no_server_that_is_away() -> None:
    with answering("{}", "200 OK", "Content-Encoding: gzip") as server, pytest.raises(ServeError) as failed:
        get(server.base_url, "/x", what="the endpoint")
    assert not isinstance(failed.value, UnreachableError)
    assert "/x: Compressed: the reply is compressed (gzip), which was not asked for" in str(failed.value)


def test_metrics_that_are_no_numbers_are_left_out() -> None:
    told = 'a{x="1"} 2\na{x="2"} 3\nb many\nc_bucket{le="1"} 4\n# d 5\n' + DIGITS + " 1\nd 1e3\n"
    assert sum_metrics(told) == {"a": 5.0, "d": 1000.0}
