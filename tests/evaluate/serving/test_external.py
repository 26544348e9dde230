"""Servers that somebody else runs: what they may answer, and what is said about it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fake_server import FakeServer
from raw_server import RawServer

from assay.errors import ServeError, UnreachableError
from assay_evaluate.serving import external
from assay_evaluate.serving.external import External, ListedModel, find_version, get, identify_server, list_models, sum_metrics

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
    models = [{"id": "a", "max_model_len": 4096}, {"id": "b", "max_model_len": None, "parent": "a"}, {"id": "c", "root": "/c"}]
    expected = [
        ListedModel("a", None, 4096, is_adapter=False),
        ListedModel("b", None, None, is_adapter=True),
        ListedModel("c", "/c", None, is_adapter=False),
    ]
    with answering(json.dumps({"data": models})) as server:
        assert list_models(server.base_url, what="the endpoint") == expected
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


# ------------------------------------------------------------------------------------------------ who it is
class Telling(FakeServer):
    """A server with a list of models of its own, whose /version and completions are `busy` so many times."""

    models: tuple[dict[str, object], ...] = ({"id": "m", "root": "/w4a16", "max_model_len": 64},)
    system_fingerprint = "vllm-0.32.0-tp1"
    busy = 0

    def tell(self, path: str) -> tuple[int, dict[str, Any]]:
        if path == "/version" and self.is_busy():
            return 503, {"error": {"message": "later"}}
        return (200, {"data": list(self.models)}) if path == "/v1/models" else super().tell(path)

    def _answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any] | bytes] | None:
        return (429, {"error": {"message": "later"}}) if self.is_busy() else super()._answer(path, body)

    def is_busy(self) -> bool:
        self.busy -= 1
        return self.busy >= 0


def meet(server: FakeServer) -> External:
    return identify_server(server.base_url, label="w4a16", checkpoint=None, profile="given")


def test_a_server_that_is_busy_for_a_moment_is_no_other_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replies are kept under what it says of itself: taken for silence, all would be asked again."""
    monkeypatch.setattr(external, "PAUSES_S", (0.0, 0.0))
    with Telling() as server:
        met = meet(server)
        assert (met.fingerprint.versions, met.fingerprint.system_fingerprint) == ({"vllm": "0"}, "vllm-0.32.0-tp1")
        server.busy = 2
        assert meet(server) == met
        monkeypatch.setattr(external, "find_version", lambda *_, **__: "0")
        server.busy = 2
        assert meet(server) == met
        server.busy = 9
        with pytest.raises(UnreachableError, match=r"/v1/completions: no reply \(HTTP 429: later\); run again when"):
            meet(server)


def test_several_models_at_one_address_are_refused() -> None:
    first = {"id": "m", "root": "/w4a16", "max_model_len": 64}
    with Telling() as server:
        server.models = (first, {**first, "id": "alias"}, {"id": "lora", "root": "/lora", "parent": "m"})
        assert (meet(server).model, meet(server).root) == ("m", "/w4a16")
        server.models = (first, {"id": "fp8", "root": None, "max_model_len": 64})
        with pytest.raises(ServeError, match=r"^w4a16: http\S+ lists several models \(/w4a16, fp8\), and nothing says which"):
            meet(server)


def test_a_root_that_is_no_unicode() -> None:
    with Telling() as server:
        server.models = ({"id": "m", "root": "/a\ud800b", "max_model_len": 64},)
        assert meet(server).root == "/a\ufffdb"
