"""Replies that cannot be read: a gateway's hiccup is waited out, a server that answers nothing else is not asked on."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from raw_server import Part, RawServer

from assay_evaluate.client.client import Address, Client
from assay_evaluate.client.journal import Identity, Journal, Reply, Request
from assay_evaluate.client.sending import MOST_NO_ANSWER

WHO = Identity("checkpoint", "fingerprint", "suite")
PATH = "/v1/completions"
GOOD = json.dumps({"choices": [{"text": "four", "finish_reason": "stop"}]})
PARTS = json.dumps({"choices": [{"message": {"content": [{"type": "audio", "audio": "x"}]}, "finish_reason": "stop"}]})
ABORTED = json.dumps({"choices": [{"text": "fo", "finish_reason": "abort"}]})
PAGE = "<!DOCTYPE html><p>We will be back"
UNREADABLE = [
    (PARTS, 3, "reply is not what the API promises: TypeError: a content part of kind 'audio'"),
    ("{}", 3, "reply is not what the API promises: KeyError: 'choices'"),
    (json.dumps({"choices": [{"text": 4}]}), 3, "reply is not what the API promises: TypeError: int in place of text"),
    (PAGE, 6, "reply is not what the API promises: NotJson: no JSON (Expecting value: line 1 column 1 (char 0)): "),
    (ABORTED, 6, "HTTP 200 with finish_reason abort: the server did not finish the reply"),
]


class Answers(RawServer):
    """Answers the n-th request with `reply(n)`."""

    def __init__(self, reply: Callable[[int], str]) -> None:
        super().__init__()
        self.reply, self.numbers = reply, itertools.count()

    def parts_for(self, head: bytes, body: bytes) -> tuple[Part, ...]:
        content = self.reply(next(self.numbers)).encode()
        return (b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s" % (len(content), content),)


def requests(task: str, n: int = 60) -> list[Request]:
    return [Request(task, str(i), 0, PATH, {"prompt": str(i)}) for i in range(n)]


def ask(server: RawServer, journal: Journal, *tasks: str, concurrency: int = 8) -> list[list[Reply]]:
    with Client(Address(server.base_url, "m"), journal, WHO, concurrency=concurrency, backoff_s=0.01) as client:
        return [client.ask(requests(task)) for task in tasks]


@pytest.mark.parametrize(("body", "attempts", "why"), UNREADABLE)
def test_a_task_of_nothing_else_is_asked_a_few_times(body: str, attempts: int, why: str, tmp_path: Path) -> None:
    with Answers(lambda n: body) as server, Journal(tmp_path / "j.db") as journal:
        first, second = ask(server, journal, "sums", "needle")
        num_sent = next(server.numbers)
        errors = [str(reply.error) for reply in first]
        assert {reply.status for reply in first + second} == {"failed"}
        assert errors[0].startswith(why)
        told = re.fullmatch(r"not asked: the last \d+ replies to sums were no answers: (.*)", errors[-1])
        assert told is not None and told[1] == errors[0]
        assert 2 * MOST_NO_ANSWER <= num_sent <= 2 * (attempts + 1) * 8  # instead of 720
        server.reply = lambda n: GOOD
        assert {reply.text for replies in ask(server, journal, "sums", "needle") for reply in replies} == {"four"}


@pytest.mark.parametrize("concurrency", [1, 8])
@pytest.mark.parametrize(("body", "attempts", "why"), UNREADABLE)
def test_a_few_among_good_ones_are_asked_again(body: str, attempts: int, why: str, concurrency: int, tmp_path: Path) -> None:
    with Answers(lambda n: body if n % 3 == 0 else GOOD) as server, Journal(tmp_path / "j.db") as journal:
        [replies] = ask(server, journal, "sums", concurrency=concurrency)
    assert {reply.text for reply in replies} == {"four"}


def test_an_outage_at_the_start_is_waited_out(tmp_path: Path) -> None:
    """The page of a gateway that starts comes for as long as the first requests are asked twice more."""
    with Answers(lambda n: PAGE if n < 24 else GOOD) as server, Journal(tmp_path / "j.db") as journal:
        [replies] = ask(server, journal, "sums")
    assert {reply.text for reply in replies} == {"four"}


def test_errors_of_the_server_are_no_unreadable_replies(tmp_path: Path) -> None:
    """They are asked again one by one, as HTTP's own are: each may have another reason."""
    error: dict[str, Any] = {"error": {"message": "out of quota", "code": 429}}
    with Answers(lambda n: json.dumps(error)) as server, Journal(tmp_path / "j.db") as journal:
        with Client(Address(server.base_url, "m"), journal, WHO, max_attempts=2, backoff_s=0.0) as client:
            replies = client.ask(requests("sums", 10))
        assert next(server.numbers) == 20
    assert {reply.error for reply in replies} == {"HTTP 200 with an error in it (429): out of quota"}
