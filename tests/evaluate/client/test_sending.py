"""Servers that hold requests up, put them off, lie, or answer what no API promises; and what is written down of it."""

from __future__ import annotations

import itertools
import json
import random
import re
import sqlite3
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from fake_server import FakeServer, Scripted
from raw_server import RawServer, endless, trickle

from assay.errors import MeasureError
from assay_evaluate.client import client as module
from assay_evaluate.client.client import MOST_MISCONFIGURED, Address, Client, ServerAnswer
from assay_evaluate.client.exchanges import Ask, Ledger, exchange_of
from assay_evaluate.client.journal import Identity, Journal, Reply, Request
from assay_evaluate.client.sending import Attempts, Received, Sender, most_reply_bytes, received_of
from assay_evaluate.transport.connection import HttpReply

WHO = Identity("checkpoint", "fingerprint", "suite")
PATH = "/v1/completions"
KEY = "sk-0123456789abcdef"
DEEP = "[" * 100_000 + "]" * 100_000
DIGITS = "9" * 5000


def http(body: str, status: str = "200 OK", *headers: str) -> bytes:
    lines = (f"HTTP/1.1 {status}", f"Content-Length: {len(body.encode())}", *headers, "", "")
    return ("\r\n".join(lines) + body).encode()


def request(item: str = "1", **body: Any) -> Request:
    return Request("t", item, 0, PATH, {"prompt": "1 + 1", **body})


def ask_once(server: RawServer, folder: Path, *, attempts: int = 1, timeout_s: float = 20.0, **body: Any) -> Reply:
    """One reply through the journal, as the journal gives it back."""
    endpoint = Address(server.base_url, "model", {"Authorization": f"Bearer {KEY}"})
    with (
        Journal(folder / "j.db") as journal,
        Client(endpoint, journal, WHO, max_attempts=attempts, backoff_s=0.0, timeout_s=timeout_s) as client,
    ):
        client.ask([request(**body)])
        [kept] = journal.find_all([request(**body).key(WHO)]).values() or [None]
        if kept is None:  # failed replies are asked again, and only counted
            row = journal._execute("SELECT reply FROM requests")[0][0]
            return Reply("failed", error=json.loads(row)["error"])
        return kept


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, float | None]]:
    """(attempt, seconds that the server wants) of each wait; none is waited."""
    seen: list[tuple[int, float | None]] = []

    def wait_s(key: str, attempt: int, backoff_s: float, retry_after_s: float | None = None) -> float:
        seen.append((attempt, retry_after_s))
        return 0.0

    monkeypatch.setattr(module, "wait_s", wait_s)
    return seen


# ------------------------------------------------------------------------------------------------ limits
def test_time_grows_with_the_tokens_of_a_reply() -> None:
    sender = Sender("model", 600.0, {})
    bodies: list[dict[str, Any]] = [
        {},
        {"max_tokens": 100},
        {"max_completion_tokens": 1000},
        {"sampling_params": {"max_tokens": 5}},
    ]
    assert [sender.total_s(body) for body in bodies] == [600.0, 620.0, 800.0, 601.0]


def test_room_for_log_probabilities() -> None:
    mib = 2**20
    assert most_reply_bytes({"prompt": "x" * 10**7, "max_tokens": 10**9}) == 64 * mib
    assert most_reply_bytes({"prompt": [1] * 100, "prompt_logprobs": 5}) == 64 * mib
    assert most_reply_bytes({"prompt": [1] * 2**15, "prompt_logprobs": 127}) == 2**15 * 128 * 256
    assert most_reply_bytes({"token_ids": [1] * 2**15, "sampling_params": {"prompt_logprobs": 127}}) == 2**15 * 128 * 256
    assert most_reply_bytes({"messages": [], "logprobs": True, "top_logprobs": 19, "max_tokens": 2**17}) == 2**17 * 20 * 256
    assert most_reply_bytes({"prompt": "", "logprobs": 19, "max_tokens": 2**17}) == 2**17 * 20 * 256


def test_a_reply_that_trickles_is_a_failed_one(tmp_path: Path) -> None:
    with RawServer(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n", trickle(b" ", 0.02)) as server:
        reply = ask_once(server, tmp_path, timeout_s=0.3)
    assert reply.status == "failed" and str(reply.error).startswith("TimeoutError: the reply was not complete after 0.3 s")


def test_a_reply_that_is_too_large_is_not_asked_for_again(tmp_path: Path, waits: list[Any]) -> None:
    with RawServer(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n", endless(b" " * 65536)) as server:
        reply = ask_once(server, tmp_path, attempts=6)
    assert reply.error == "TooLarge: the reply has more than 67,108,864 bytes (64 MiB), the most taken"
    assert (waits, len(server.heads)) == ([], 1)


# ------------------------------------------------------------------------------------------------ asked again
@pytest.mark.parametrize("status", [408, 409, 425, 429, 500, 502, 503, 504])
def test_statuses_after_which_a_request_is_asked_again(status: int, tmp_path: Path, waits: list[Any]) -> None:
    replies = iter([Scripted("busy", status=status), Scripted("busy", status=status), Scripted("four")])
    with (
        FakeServer(lambda body: next(replies)) as server,
        Journal(tmp_path / "j.db") as journal,
        Client(server, journal, WHO) as client,
    ):
        assert [reply.text for reply in client.ask([request()])] == ["four"]
    assert waits == [(1, None), (2, None)]


def test_a_server_says_when_to_come_again(tmp_path: Path, waits: list[Any]) -> None:
    with RawServer(http("busy", "429 Too Many Requests", "Retry-After: 7", "Connection: close")) as server:
        assert ask_once(server, tmp_path, attempts=3).error == "HTTP 429: busy"
        assert waits == [(1, 7.0), (2, 7.0)] and len(server.heads) == 3
        with Client(Address(server.base_url, "model"), max_attempts=3) as client:
            told = client.post("/tokenize", {})
            assert (told.status, told.data, told.message) == (429, {}, "busy")
            assert waits[2:] == [(1, 7.0), (2, 7.0)]
            exchange = client.exchange(Ask("x", PATH, {}))
        assert (exchange.status, exchange.reply.error, waits[4:]) == ("failed", "HTTP 429: busy", [(1, 7.0), (2, 7.0)])


@pytest.mark.parametrize(("status", "num_put_off"), [(503, 8), (429, 8), (503, 1000)])
def test_a_server_that_takes_no_more_for_now_is_waited_for_while_it_answers_others(
    status: int, num_put_off: int, tmp_path: Path, waits: list[Any]
) -> None:
    """vLLM's --max-num-queued-reqs (503), limits of rate (429). Where nothing else is answered, attempts are few as ever."""
    may_answer, has_come = threading.Semaphore(0), threading.Semaphore(0)
    """One other question is answered each time that the first is put off: its thread asks the next one after that."""
    tries, num_others = itertools.count(1), itertools.count()

    def reply(body: dict[str, Any]) -> Scripted:
        if body["prompt"] != "0":
            if next(num_others):
                has_come.release()
            assert may_answer.acquire(timeout=20)
            return Scripted("four")
        number = next(tries)
        may_answer.release()
        if number < 9:
            assert has_come.acquire(timeout=20)
        return Scripted("come later", status=status) if number <= num_put_off else Scripted("at last")

    asked = [Request("t", str(n), 0, PATH, {"prompt": str(n)}) for n in range(10)]
    with (
        FakeServer(reply) as server,
        Journal(tmp_path / "j.db") as journal,
        Client(server, journal, WHO, concurrency=2, max_attempts=2) as client,
    ):
        first, *replies = client.ask(asked)
    assert [one.text for one in replies] == ["four"] * 9
    if num_put_off == 8:
        assert (first.text, waits) == ("at last", [(min(number, 2), None) for number in range(1, 9)])
    else:
        assert (first.status, first.error) == ("failed", "HTTP 503: come later")
        assert next(tries) - 1 in {10, 11}  # the last other answer may be counted before the ninth try, or after it


@pytest.mark.parametrize("is_inside_200", [False, True])
def test_what_a_router_says_of_its_provider_is_an_attempt(is_inside_200: bool) -> None:
    """inspect_ai #1534: a quota inside status 200, for some questions for good; the others were answered meanwhile."""
    attempts = Attempts(2, 0)
    for num_answered in (1, 2):
        attempts.count(Received(Reply("failed", http_status=429), is_inside_200=is_inside_200), num_answered)
    assert (attempts.num_sent, attempts.are_over) == (2, is_inside_200)


def test_a_probe_waits_for_its_turn_too(waits: list[Any]) -> None:
    """vLLM with --max-num-queued-reqs 1: of two requests at once one is put off, again and again."""
    is_first_in, may_answer = threading.Event(), threading.Event()
    tries = itertools.count(1)

    def reply(body: dict[str, Any]) -> Scripted:
        if body["prompt"] == "a":
            is_first_in.set()
            assert may_answer.wait(20)
            return Scripted("four")
        assert is_first_in.wait(20)
        if next(tries) < 5:
            return Scripted("The engine is currently busy", status=503)
        may_answer.set()
        return Scripted("at last")

    with FakeServer(reply) as server, Client(server) as client:
        found = client.ask_together([Ask("a", PATH, {"prompt": "a"}), Ask("b", PATH, {"prompt": "b"})], 2)
    assert [one.reply.text for one in found] == ["four", "at last"]
    assert (waits, dict(client.tally.errors)) == ([(number, None) for number in range(1, 5)], {})


def test_what_goes_wrong_is_not_asked_again_in_waves(waits: list[Any]) -> None:
    """A probe looks for it."""
    with RawServer(http("{}", "500 Internal Server Error")) as server, Client(Address(server.base_url, "model")) as client:
        found = client.ask_together([Ask("a", PATH, {}), Ask("b", PATH, {})], 2)
        assert [one.status for one in found] == ["failed", "failed"]
        assert (len(server.heads), waits, dict(client.tally.errors)) == (2, [], {"HTTP 500": 2})
    with (
        Client(Address("http://127.0.0.1:9", "model")) as client,
        pytest.raises(MeasureError, match="8 requests in a row had no"),
    ):
        client.ask_together([Ask(str(n), PATH, {}) for n in range(9)], 1)
    assert waits == []


def test_an_error_ends_the_waiting_of_the_other_requests() -> None:
    """A server asks one request for two minutes of patience and is gone for the others: nobody waits that long."""
    put_off = threading.Event()

    def reply(body: dict[str, Any]) -> Scripted:
        if body["prompt"] == "put off":
            put_off.set()
            return Scripted("later", status=429)
        assert put_off.wait(20)
        return Scripted(drop=True)

    asks = [Ask("0", PATH, {"prompt": "put off"}), *(Ask(str(n), PATH, {"prompt": "x"}) for n in range(1, 9))]
    with FakeServer(reply) as server, Client(server, backoff_s=240.0) as client:  # the first wait is 15 to 30 s
        with pytest.raises(MeasureError, match="8 requests in a row had no reply"):
            client.ask_together(asks, 2)
        assert client._over.is_set() and len(server.requests) == 9


@pytest.mark.parametrize(
    ("status", "headers", "said"),
    [
        ("401 Unauthorized", (), "HTTP 401: Incorrect API key: [hidden]"),
        ("404 Not Found", (), "HTTP 404: Incorrect API key: [hidden]"),
        (
            "308 Moved",
            ("Location: https://a/v1",),
            "HTTP 308: a redirect to https://a/v1, which is not followed; give the address it",
        ),
    ],
)
def test_what_every_request_gets_stops(status: str, headers: tuple[str, ...], said: str, tmp_path: Path) -> None:
    """At the eighth in a row: one by itself may be a gateway's hiccup."""
    body = json.dumps({"error": {"message": f"Incorrect API key: {KEY}"}})
    with RawServer(http(body, status, *headers)) as server, pytest.raises(MeasureError) as stopped:
        ask_once(server, tmp_path, attempts=20)
    assert len(server.heads) == MOST_MISCONFIGURED
    assert str(stopped.value).startswith("http://127.0.0.1:") and f"/v1/completions: {said}" in str(stopped.value)
    assert KEY not in str(stopped.value)


# ------------------------------------------------------------------------------------------------ replies of any shape
def reply_with(choice: Any = None, **more: Any) -> str:
    return json.dumps({"choices": [{"text": "four", "finish_reason": "stop"} if choice is None else choice], **more})


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (
            "<!DOCTYPE html><p>Sign in",
            "NotJson: no JSON (Expecting value: line 1 column 1 (char 0)): '<!DOCTYPE html><p>Sign in'",
        ),
        (DEEP, "NotJson: no readable JSON: nested too deeply"),
        (DIGITS, "NotJson: no JSON (Exceeds the limit"),
        ("null", "TypeError: NoneType in place of an object"),
        ("[]", "TypeError: list in place of an object"),
        ('{"choices": []}', "IndexError: "),
        (reply_with({"text": ["four"]}), "TypeError: list in place of text"),
        (reply_with({"text": "four", "finish_reason": 7}), "TypeError: int in place of text"),
        (reply_with(usage={"prompt_tokens": 2**70}), "TypeError: int in place of a count"),
        (reply_with(usage={"completion_tokens": "many"}), "TypeError: str in place of a count"),
        (reply_with(usage={"more": json.loads("[" * 300 + "]" * 300)}), "ValueError: nested deeper than 16 levels"),
        (reply_with({"text": "four", "token_ids": [1, "2"]}), "TypeError: token ids that are no list of counts"),
        (reply_with({"text": "four", "token_ids": [-1]}), "TypeError: token ids that are no list of counts"),
        (reply_with({"message": {"content": "", "tool_calls": "call"}}), "TypeError: tool calls that are no list of objects"),
        (reply_with(metrics={"speculative_decoding": {"num_spec_steps": None}}), "TypeError: null in place of a count"),
    ],
)
def test_replies_that_the_api_does_not_promise(body: str, why: str, tmp_path: Path) -> None:
    with RawServer(http(body)) as server:
        reply = ask_once(server, tmp_path)
    assert str(reply.error).startswith(f"reply is not what the API promises: {why}")


WEIRD: list[Any] = [None, [], {}, "", 7, -1, 2.5, 2**70, 1e999, True, "\ud800", "x" * 999, [None], [{}], ["a"], {"a": [[1]]}]


def mutated(value: Any, draw: random.Random) -> Any:
    """A JSON value, of which parts are gone or are something else."""
    if draw.random() < 0.06:
        return draw.choice(WEIRD)
    if isinstance(value, dict):
        return {name: mutated(inner, draw) for name, inner in value.items() if draw.random() > 0.02}
    return [mutated(inner, draw) for inner in value] if isinstance(value, list) else value


def test_whatever_a_server_answers_can_be_kept(tmp_path: Path) -> None:
    """The reply is answered or failed, and both journal and ledger take it."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    row = {"token": "token_id:1", "logprob": -1.0, "top_logprobs": [{"token": "token_id:1", "logprob": -1.0}]}
    whole = {
        "choices": [
            {
                "message": {"content": "四", "reasoning": "hm", "tool_calls": [call]}, "finish_reason": "stop",
                "token_ids": [1, 2], "logprobs": {"content": [row, row]}, "routed_experts": "AAAA",
                "prompt_logprobs": [None, {"1": {"logprob": -1.0, "rank": 1}}],
            }
        ],
        "usage": {"prompt_tokens": 2, "completion_tokens": 2, "completion_tokens_details": {"reasoning_tokens": 1}},
        "prompt_token_ids": [0, 1], "system_fingerprint": "vllm",
        "metrics": {"speculative_decoding": {"num_spec_steps": 1, "num_draft_tokens": 1, "num_accepted_draft_tokens": 1}},
    }  # fmt: skip
    draw = random.Random("eval-mutants")
    statuses: Counter[str] = Counter()
    with Journal(tmp_path / "j.db") as journal, closing(Ledger(tmp_path / "ledger.jsonl")) as ledger:
        for number in range(400):
            ask = Ask(str(number), PATH, {"prompt": [0, 1], "prompt_logprobs": 1, "max_tokens": 1})
            received = received_of(HttpReply(200, json.dumps(mutated(whole, draw)).encode()), ask.request, 0.0)
            journal.write_requests([(ask.id, ask.request)], WHO)
            journal.write_replies([(ask.id, received.reply, 1)])
            exchange = exchange_of(ask, 0, 1, received)
            ledger.write(exchange)
            statuses[exchange.status] += 1
        assert journal.count("answered") + journal.count("failed") == 400
    assert set(statuses) == {"answered", "failed"} and min(statuses.values()) > 40, statuses
    assert len((tmp_path / "ledger.jsonl").read_text(encoding="utf-8").splitlines()) == 400


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ("<html>Sign in", 200, "no JSON (Expecting value: line 1 column 1 (char 0)): '<html>Sign in'"),
        ("[]", 200, "no JSON object: []"),
        ('{"error": {"message": "no such route", "code": 404}}', 404, "no such route"),
        ('{"detail": "Not Found"}', 500, "Not Found"),
    ],
)
def test_a_question_about_the_server_that_is_answered_with_something_else(body: str, status: int, message: str) -> None:
    """Whoever asks finds nothing in it: the endpoint is not offered."""
    with RawServer(http(body)) as server, Client(Address(server.base_url, "model"), max_attempts=1) as client:
        assert client.post("/tokenize", {}) == ServerAnswer(status, {}, message)


def test_lone_surrogates_are_written_down_everywhere(tmp_path: Path) -> None:
    """JSON can hold them, UTF-8 cannot: neither journal nor ledger ends with one."""
    logprobs = {"tokens": ["\ud800"], "token_logprobs": [-1.0], "top_logprobs": [{"\ud800": -1.0}]}
    choice = {"text": "a\ud800b\U0001f600", "finish_reason": "stop", "logprobs": logprobs}
    with RawServer(http(reply_with(choice, usage={"\ud800": 1}))) as server:
        kept = ask_once(server, tmp_path, user="\ud800")
        with Client(Address(server.base_url, "model"), ledger=tmp_path / "ledger.jsonl") as client:
            [exchange] = client.ask_together([Ask("x", PATH, {"prompt": "\ud800"})], 1)
    assert (kept.text, kept.usage) == ("a\ufffdb\U0001f600", {"\ufffd": 1})
    assert (exchange.text, exchange.rows[0].token) == (kept.text, "\ufffd")
    line = json.loads((tmp_path / "ledger.jsonl").read_text(encoding="utf-8"))
    assert (line["body"], line["text"]) == ({"prompt": "\ud800"}, kept.text)


def test_ledger_lines(tmp_path: Path) -> None:
    """All that is needed to send a request again, and what came back: of answered, refused, failed and aborted ones."""
    with (
        FakeServer(lambda body: Scripted("四", status=422 if "n" in body else 200)) as server,
        Client(server, ledger=tmp_path / "new" / "ledger.jsonl") as client,
    ):
        client.ask_together([Ask("a", PATH, {"prompt": "1"}), Ask("b", PATH, {"prompt": "1", "n": 2})], 1)
        client.ask_together([Ask("c", PATH, {"prompt": "1"}, abort_after=2)], 4)
    text = (tmp_path / "new" / "ledger.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    assert "四" in text
    assert [line.pop("latency_s") is not None for line in lines] == [True, True, False]
    plain = {
        "path": PATH, "body": {"prompt": "1"}, "abort_after": None, "slot": 0, "concurrency": 1, "status": "answered",
        "error": None, "finish_reason": "stop", "text": "四", "reasoning": None, "token_ids": None,
    }  # fmt: skip
    other = {"finish_reason": None, "text": ""}
    aborted = {"abort_after": 2, "concurrency": 4, "status": "aborted", "error": "hung up after 0 chunks"}
    assert lines == [
        {"id": "a"} | plain,
        {"id": "b"} | plain | other | {"body": {"prompt": "1", "n": 2}, "status": "refused", "error": "HTTP 422: 四"},
        {"id": "c"} | plain | other | aborted,
    ]


@pytest.mark.parametrize("field", ["id", "choices"])
def test_a_reply_that_names_another_request_is_a_failed_one(field: str, tmp_path: Path) -> None:
    """vLLM repeats X-Request-Id in the reply's `id`. A gateway that mixes replies up is found, wherever they come."""
    body = reply_with(id="cmpl-assay-0123456789abcdef-7") if field == "id" else reply_with({"text": "assay-0123456789abcdef-7"})
    with RawServer(http(body)) as server:
        reply = ask_once(server, tmp_path)
        with Client(Address(server.base_url, "model")) as client:
            [exchange] = client.ask_together([Ask("x", PATH, {})], 1)
    ids = [re.search(r"X-Request-Id: (assay-[0-9a-f]{16}-0)\r\n", head) for head in server.heads]
    assert len({found.group(1) for found in ids if found}) == 2
    if field == "choices":  # a model may say so
        assert (reply.status, exchange.is_of_another) == ("answered", False)
        return
    assert exchange.is_of_another and exchange.status == reply.status == "failed"
    said = "reply is not what the API promises: AnothersReply: it answers request assay-0123456789abcdef-7, not assay-"
    assert str(reply.error).startswith(said)


# ------------------------------------------------------------------------------------------------ the key
@pytest.fixture
def echo() -> Iterator[RawServer]:
    """A server that repeats the key wherever a server can."""
    said = f"HTTP/1.1 400 Bad {KEY}\r\nX-Key: {KEY}\r\nContent-Length: %d\r\n\r\n"
    body = json.dumps({"error": {"message": f"bad key {KEY}", "key": KEY}})
    with RawServer((said % len(body) + body).encode()) as server:
        yield server


def test_the_key_is_sent_and_written_nowhere(echo: RawServer, tmp_path: Path) -> None:
    endpoint = Address(echo.base_url, "model", {"Authorization": f"Bearer {KEY}"})
    with Journal(tmp_path / "j.db") as journal, Client(endpoint, journal, WHO, ledger=tmp_path / "ledger") as client:
        [reply] = client.ask([request()])
        [exchange] = client.ask_together([Ask("x", PATH, {"prompt": "1"})], 1)
        told = client.post("/tokenize", {})
        seen = repr((endpoint, client, reply, exchange, told, vars(client).get("endpoint")))
    assert all(f"Authorization: Bearer {KEY}\r\n" in head for head in echo.heads) and len(echo.heads) == 3
    assert reply.error == exchange.reply.error == "HTTP 400: bad key [hidden]" and told.message == "bad key [hidden]"
    assert KEY not in seen
    with sqlite3.connect(tmp_path / "j.db") as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    assert not [path for path in tmp_path.iterdir() if KEY.encode() in path.read_bytes()]


def test_a_wrong_key(tmp_path: Path) -> None:
    with FakeServer() as server, Journal(tmp_path / "j.db") as journal:
        server.headers = {"Authorization": f"Bearer {KEY}"}
        with Client(server, journal, WHO) as client:
            assert client.ask([request()])[0].text == "#### 7"
        for wrong in ({"Authorization": f"Bearer {KEY}-not"}, {}):
            endpoint = Address(server.base_url, "model", wrong)
            with (
                Client(endpoint, journal, WHO, max_attempts=20, backoff_s=0.0) as client,
                pytest.raises(MeasureError, match="HTTP 401") as refused,
            ):
                client.ask([request("2")])
            assert KEY not in str(refused.value)
