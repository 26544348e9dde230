"""The client against a real HTTP server with scripted replies: resume, retries, death, truncation."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from blank_records import blank_fingerprint
from fake_server import FakeServer, Scripted

from assay.errors import MeasureError
from assay_evaluate.asking.dialect import CHAT, Dialect, count_tokens, learn_dialect, sampling
from assay_evaluate.client.client import Client, NotMeasured
from assay_evaluate.client.journal import Identity, Journal, Reply, Request
from assay_evaluate.client.truncation import truncation_of
from assay_evaluate.divergence.scoring import Scoring, learn_scoring

WHO = Identity("checkpoint", "fingerprint")


def requests(n: int, **extra: Any) -> list[Request]:
    return [
        Request("t", str(i), 0, CHAT, {"messages": [{"role": "user", "content": f"q{i}"}], "max_tokens": 9, **extra})
        for i in range(n)
    ]


def asked(server: FakeServer) -> list[str]:
    return [body["messages"][0]["content"] for path, body in server.requests if path == CHAT]


def test_replies_in_order_of_requests_and_no_more_in_flight_than_allowed(tmp_path: Path) -> None:
    together = threading.Barrier(4, timeout=30)  # opens only if four are in flight at once

    def reply(body: dict[str, Any]) -> Scripted:
        question = body["messages"][0]["content"]
        together.wait()
        return Scripted(f"to {question}", reasoning="hm", delay_s=0.02 * (int(question[1:]) % 3), speculation=(4, 4, 3))

    with (
        FakeServer(reply) as server,
        Journal(tmp_path / "j.db") as journal,
        Client(server, journal, WHO, concurrency=4) as client,
    ):
        replies = client.ask(requests(20))
    assert [r.text for r in replies] == [f"to q{i}" for i in range(20)]
    assert server.most_at_once == 4
    first = replies[0]
    assert (first.reasoning, first.finish_reason, first.prompt_tokens, first.output_tokens) == ("hm", "stop", 7, 7)
    assert first.speculation == {"num_drafts": 4, "num_draft_tokens": 4, "num_accepted_tokens": 3}
    assert all("stop" not in body for _, body in server.requests)


def test_replies_in_reverse_order_are_counted_as_they_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first question is sent last, and answered when progress has counted the other four."""
    monkeypatch.setattr("assay_evaluate.client.client.PROGRESS_EVERY_S", 0.01)
    counted = threading.Event()

    def reply(body: dict[str, Any]) -> Scripted:
        if body["messages"][0]["content"] == "q0":
            assert counted.wait(30), "0 of 5 for as long as the first is not there"
        return Scripted("done")

    def on_progress(line: str) -> None:
        if line.startswith("t: 4/5, "):
            counted.set()

    with (
        FakeServer(reply) as server,
        Journal(tmp_path / "j.db") as journal,
        Client(server, journal, WHO, concurrency=1, newest_first=True, on_progress=on_progress) as client,
    ):
        assert len(client.ask(requests(5))) == 5
    assert counted.is_set()


def test_nothing_is_asked_twice(tmp_path: Path) -> None:
    with FakeServer() as server, Journal(tmp_path / "j.db") as journal:
        for _ in range(2):
            with Client(server, journal, WHO) as client:
                replies = client.ask(requests(10))
        assert [r.text for r in replies] == ["#### 7"] * 10
        assert sorted(asked(server)) == sorted(f"q{i}" for i in range(10))
        with Client(server, journal, Identity("other checkpoint", "fingerprint")) as client:
            client.ask(requests(10))
        with Client(server, journal, WHO) as client:
            client.ask(requests(10, temperature=1.0))
        assert len(asked(server)) == 30


def test_a_reply_that_was_changed_in_the_journal_is_told_and_asked_for_again(tmp_path: Path) -> None:
    told: list[str] = []
    with FakeServer() as server, Journal(tmp_path / "j.db") as journal:
        with Client(server, journal, WHO) as client:
            client.ask(requests(10))
        journal._execute("UPDATE requests SET reply = replace(reply, '#### 7', '#### 8') WHERE item = '3'")
        with Client(server, journal, WHO, on_progress=told.append) as client:
            assert [reply.text for reply in client.ask(requests(10))] == ["#### 7"] * 10
        assert asked(server)[10:] == ["q3"]
    assert told[0] == (f"{tmp_path / 'j.db'}: 1 replies are not as they were written; they are not used, and asked for again")


def test_client_killed_midway_asks_only_the_rest(tmp_path: Path) -> None:
    """The progress callback raises, as Ctrl-C would, after some replies; those that were answered stay answered."""
    numbers = itertools.count()

    def reply(body: dict[str, Any]) -> Scripted:
        if next(numbers) == 12:
            raise_in_client.set()
        return Scripted("done", delay_s=0.005)

    raise_in_client = threading.Event()

    class Interrupted(Journal):
        def write_replies(self, replies: Sequence[tuple[str, Reply, int]]) -> None:
            super().write_replies(replies)
            if raise_in_client.is_set():
                raise KeyboardInterrupt

    with FakeServer(reply) as server:
        with Interrupted(tmp_path / "j.db") as journal, Client(server, journal, WHO, concurrency=3) as client:
            with pytest.raises(KeyboardInterrupt):
                client.ask(requests(40))
            answered = journal.count("answered")
        assert 12 <= answered < 20
        raise_in_client.clear()
        before = set(asked(server))
        with Journal(tmp_path / "j.db") as journal, Client(server, journal, WHO, concurrency=3) as client:
            assert [r.text for r in client.ask(requests(40))] == ["done"] * 40
            assert client.num_sent == 40 - answered
        assert len(asked(server)) == len(set(asked(server))) + len(before) - answered


def test_trouble_is_tried_again_with_back_off_then_recorded_as_failed(tmp_path: Path) -> None:
    tries: dict[str, int] = {}

    def reply(body: dict[str, Any]) -> Scripted:
        question = body["messages"][0]["content"]
        tries[question] = tries.get(question, 0) + 1
        if question == "q0":
            return Scripted("broken", status=500)
        if question == "q1":
            return Scripted("slow down", status=429) if tries[question] < 3 else Scripted("at last")
        if question == "q2":
            return Scripted(drop=True) if tries[question] < 2 else Scripted("back again")
        return Scripted("prompt is too long", status=400) if question == "q3" else Scripted("fine")

    with FakeServer(reply) as server, Journal(tmp_path / "j.db") as journal:
        with Client(server, journal, WHO, max_attempts=4, backoff_s=0.01) as client:
            replies = client.ask(requests(5))
        assert tries == {"q0": 4, "q1": 3, "q2": 2, "q3": 1, "q4": 1}
        assert [r.status for r in replies] == ["failed", "answered", "answered", "refused", "answered"]
        assert replies[0].error == "HTTP 500: broken"
        assert replies[3].error == "HTTP 400: prompt is too long"
        assert [r.text for r in replies[1:3]] == ["at last", "back again"]
        tries.clear()
        with Client(server, journal, WHO, max_attempts=2, backoff_s=0.01) as client:
            client.ask(requests(5))
        assert tries == {"q0": 2}  # only what failed


def test_dead_server_stops_with_its_log_and_loses_nothing(tmp_path: Path) -> None:
    numbers = itertools.count()

    def reply(body: dict[str, Any]) -> Scripted:
        if next(numbers) == 5:
            server.die()
        return Scripted("fine")

    with FakeServer(reply) as server, Journal(tmp_path / "j.db") as journal:
        with Client(server, journal, WHO, concurrency=2) as client, pytest.raises(MeasureError, match="Engine core died"):
            client.ask(requests(50))
        assert 4 <= journal.count("answered") <= 5  # one more may have been in flight
        assert journal.count("failed") == 0
        assert len(server.requests) < 50  # what had not been asked yet is not asked any more


@pytest.mark.parametrize("status", [401, 404])
def test_wrong_address_or_model_is_an_error_not_fifty_refusals(tmp_path: Path, status: int) -> None:
    with (
        FakeServer(lambda body: Scripted("no such model", status=status)) as server,
        Journal(tmp_path / "j.db") as journal,
        Client(server, journal, WHO) as client,
        pytest.raises(MeasureError, match=f"HTTP {status}: no such model"),
    ):
        client.ask(requests(50))


def test_another_batch_composition(tmp_path: Path) -> None:
    with (
        FakeServer() as server,
        Journal(tmp_path / "j.db") as journal,
        Client(server, journal, WHO, concurrency=1, newest_first=True) as client,
    ):
        client.ask(requests(5))
    assert asked(server) == ["q4", "q3", "q2", "q1", "q0"]


@pytest.mark.parametrize(
    ("reply", "max_tokens", "max_model_len", "parser", "truncated"),
    [
        (Reply("answered", "4", finish_reason="stop", prompt_tokens=10, output_tokens=5), 100, 200, False, False),
        (Reply("answered", "4", finish_reason="length", prompt_tokens=10, output_tokens=5), 100, 200, False, True),
        (Reply("answered", "4", finish_reason="tool_calls", prompt_tokens=10, output_tokens=100), 100, 200, False, True),
        (Reply("answered", "4", finish_reason="tool_calls", prompt_tokens=150, output_tokens=50), 100, 200, False, True),
        (Reply("answered", "4", finish_reason="tool_calls", prompt_tokens=150, output_tokens=50), 100, None, False, False),
        (Reply("answered", "", "thinking", finish_reason="stop", prompt_tokens=10, output_tokens=5), 100, 200, True, True),
        (Reply("answered", "", "thinking", finish_reason="stop", prompt_tokens=10, output_tokens=5), 100, 200, False, True),
        (Reply("answered", "", finish_reason="stop", prompt_tokens=10, output_tokens=5), 100, 200, False, False),
        (Reply("answered", "", "hm", True, "tool_calls", prompt_tokens=10, output_tokens=5), 100, 200, True, False),
        (Reply("answered", "4", finish_reason="stop"), 100, 200, False, False),
    ],
)  # fmt: skip
def test_truncation_rule(reply: Reply, max_tokens: int, max_model_len: int | None, parser: bool, truncated: bool) -> None:
    by = truncation_of(reply, max_tokens=max_tokens, max_model_len=max_model_len, has_reasoning_parser=parser)
    assert (by is not None) is truncated


@pytest.mark.parametrize(("chat", "tokenize"), [(True, True), (True, False), (False, True), (False, False)])
def test_dialect_and_token_counts(tmp_path: Path, chat: bool, tokenize: bool) -> None:
    with (
        FakeServer(chat_template=chat, tokenize=tokenize) as server,
        Journal(tmp_path / "j.db") as journal,
        Client(server, journal, WHO) as client,
    ):
        dialect = learn_dialect(client, {"enable_thinking": True} if chat else {})
        assert (dialect.is_chat, dialect.can_tokenize) == (chat, tokenize)
        assert count_tokens(client, dialect, "twelve chars") == 12 + (5 if chat else 1)


CATCH_ALL: list[dict[str, Any] | bytes] = [{}, {"status": "ok"}, b"<!DOCTYPE html><p>Welcome", b"", [], {"error": "no route"}]


@pytest.mark.parametrize("answer", CATCH_ALL)
@pytest.mark.parametrize("chat", [True, False])
def test_a_gateway_that_answers_paths_that_it_does_not_know(chat: bool, answer: Any, tmp_path: Path) -> None:
    """What is billed is counted instead, and the token ids endpoint is not offered."""

    class Gateway(FakeServer):
        def _answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any] | bytes] | None:
            return super()._answer(path, body) if path.startswith("/v1/") else (200, answer)

    fingerprint = blank_fingerprint(server="external")
    with (
        Gateway(chat_template=chat) as server,
        Journal(tmp_path / "j.db") as journal,
        Client(server, journal, WHO, max_attempts=1) as client,
    ):
        dialect = learn_dialect(client, {})
        assert (dialect.is_chat, dialect.can_tokenize) == (chat, False)
        assert count_tokens(client, dialect, "twelve chars") == 12 + (5 if chat else 1)
        assert learn_scoring(client, fingerprint) == Scoring("completions", False)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({}, "no completion: {}"),
        (b"<!DOCTYPE html><p>Welcome", "no JSON (Expecting value: line 1 column 1 (char 0)): '<!DOCTYPE html><p>Welcome'"),
        ({"choices": []}, "no completion: {'choices': []}"),
    ],
)
def test_an_address_where_nobody_answers_chats(answer: Any, said: str) -> None:
    class Page(FakeServer):
        def _answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any] | bytes] | None:
            return 200, answer

    with Page() as server, Client(server) as client, pytest.raises(MeasureError) as error:
        learn_dialect(client, {})
    assert (
        str(error.value)
        == f"{server.base_url}/v1/chat/completions: HTTP 200: {said}; give the address of an OpenAI-compatible server"
    )


def test_a_count_of_no_tokens_is_none(tmp_path: Path) -> None:
    """A prompt has one at least; servers that do not count write zeros."""

    class Zeros(FakeServer):
        def _generated(self, *of: Any) -> dict[str, Any]:
            zeros = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
            return {**super()._generated(*of), "usage": zeros}

    with (
        Zeros(tokenize=False) as server,
        Client(server) as client,
        pytest.raises(NotMeasured, match="tokens cannot be counted"),
    ):
        count_tokens(client, learn_dialect(client, {}), "twelve chars")


def test_every_sampling_parameter_is_pinned() -> None:
    messages = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "Well,"}]
    path, body = Dialect(True, True, {"thinking": False}).generation(messages, max_tokens=7, temperature=0.5, seed=3)
    assert path == "/v1/chat/completions"
    assert body == {
        "messages": messages, "max_tokens": 7, "temperature": 0.5, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "seed": 3,
        "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
        "chat_template_kwargs": {"thinking": False}, "add_generation_prompt": False, "continue_final_message": True,
    }  # fmt: skip
    path, body = Dialect(False, True, {}).generation(messages[:1], max_tokens=7, temperature=0.0, seed=3, with_ids=True)
    assert path == "/v1/completions"
    assert body == {"prompt": "1 + 1?\n", "max_tokens": 7, "return_token_ids": True, **sampling(0.0, 3)}
