"""Who sends what, when and to which server: several servers, overlapping tasks, long streams, servers that come back."""

from __future__ import annotations

import dataclasses
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_server import FakeServer, Scripted

from assay.errors import MeasureError, RecipeError, ServeError, UnreachableError
from assay.recipes.address import problem_with
from assay.recipes.load import load_recipe
from assay.recipes.profile import GivenServer, ProfileRecipe
from assay_evaluate.asking.dialect import CHAT, Dialect
from assay_evaluate.asking.session import Session
from assay_evaluate.client.client import WINDOW, Client
from assay_evaluate.client.dispatch import Flight
from assay_evaluate.client.journal import Identity, Journal, Request
from assay_evaluate.client.sending import LONGEST_RETRY_AFTER_S, wait_s
from assay_evaluate.serving.server import Server, join

WHO = Identity("checkpoint", "fingerprint", "suite")


def request(task: str, item: str) -> Request:
    return Request(task, item, 0, CHAT, {"messages": [{"role": "user", "content": f"{task} {item}"}], "max_tokens": 9})


def asked(server: FakeServer) -> list[str]:
    return [body["messages"][0]["content"] for path, body in server.requests if path == CHAT]


@dataclasses.dataclass
class Together:
    """Several scripted servers as one endpoint."""

    servers: tuple[FakeServer, ...]
    model: str = "model"
    max_model_len: int | None = 4096
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def base_urls(self) -> tuple[str, ...]:
        return tuple(f"{server.base_url}/v1" for server in self.servers)

    @property
    def base_url(self) -> str:
        return self.base_urls[0]

    def check_alive(self) -> None:
        for server in self.servers:
            server.check_alive()


# ------------------------------------------------------------------------------------------------ several servers
def test_an_item_and_its_repeats_always_go_to_the_same_server(tmp_path: Path) -> None:
    items = [f"{i}{repeat}" for i in range(60) for repeat in ("", "#1", "#2")]
    seen: list[list[set[str]]] = []
    for run in range(2):  # the second begins anew, with servers of other addresses
        with FakeServer() as one, FakeServer() as other, Journal(tmp_path / f"{run}.db") as journal:
            with Client(Together((one, other)), journal, WHO, concurrency=4) as client:
                replies = client.ask([request("t", item) for item in (items if run == 0 else items[::-1])])
            assert [reply.status for reply in replies] == ["answered"] * 180
            assert sorted(asked(one) + asked(other)) == sorted(f"t {item}" for item in items)
            seen.append([{question.partition("#")[0] for question in asked(server)} for server in (one, other)])
    assert seen[0] == seen[1]
    assert seen[0][0].isdisjoint(seen[0][1])
    assert min(len(share) for share in seen[0]) >= 20  # of sixty


def test_several_servers_of_a_label_serve_as_one(tmp_path: Path) -> None:
    def joined(*servers: FakeServer) -> Server:
        given = GivenServer(urls=tuple(f"{server.base_url}/v1" for server in servers))
        return join(given, label="fp8", checkpoint=tmp_path, profile="two")

    with FakeServer() as one, FakeServer() as other, FakeServer(max_model_len=512) as smaller:
        server = joined(one, other)
        assert server.base_urls == (one.base_url, other.base_url)
        assert (server.model, server.max_model_len, server.fingerprint.server) == ("model", 4096, "external")
        assert server.fingerprint.flags == {"max-model-len": 4096}
        server.check_alive()
        with pytest.raises(
            ServeError, match=r"differ in max_model_len: 4096 and 512; servers that share a suite must be alike"
        ):
            joined(one, smaller)
    with FakeServer() as one, pytest.raises(UnreachableError, match="does not answer"):
        joined(one, other)


@pytest.mark.parametrize(
    ("urls", "message"),
    [
        ("url: http://a, urls: [http://b]", "endpoints.fp8: say either `url` or `urls`"),
        ("checkpoint: a", "endpoints.fp8: say either `url` or `urls`"),
        ("urls: ['http://b', 'http://a', 'http://B:80/v1/']", "endpoints.fp8: `urls` names one server twice"),
        ("url: 'ftp://a'", "endpoints.fp8: 'ftp://a' is no URL of a server; write it as http://HOST:PORT"),
        ("url: 'http://a:x'", "endpoints.fp8: 'http://a:x' is no URL; write it as http://HOST:PORT"),
        (
            "url: 'http://a/?key=1'",
            r"endpoints.fp8: 'http://a/' has something behind its path \(`\?` or `#`\); write it as http://HOST:PORT",
        ),
    ],
)
def test_servers_are_named_in_one_way(tmp_path: Path, urls: str, message: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"schema: 1\nname: mine\nhardware: {{device: cpu}}\nendpoints: {{fp8: {{{urls}}}}}\n")
    with pytest.raises(RecipeError, match=f"mine.yaml: {message}$"):
        load_recipe(ProfileRecipe, str(path))


@pytest.mark.parametrize(
    "url",
    [
        "http://me:hunter2@a:8000", "http://me:hunter2 x@a", "http://me:hunter2@a:99999", "http://me:hunter2@",
        "ftp://me:hunter2@a", "http://a?api_key=hunter2", "http://a/#hunter2",
    ],
)  # fmt: skip
def test_what_may_be_a_key_in_an_address_is_not_repeated(url: str) -> None:
    problem = problem_with(url)
    assert problem is not None and "hunter2" not in problem


def test_a_password_in_an_address_is_refused_unseen(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("schema: 1\nname: mine\nhardware: {device: cpu}\nendpoints: {fp8: {url: 'http://me:hunter2@a:8000'}}\n")
    with pytest.raises(RecipeError, match="the URL for a holds a user or password, which records would keep") as caught:
        load_recipe(ProfileRecipe, str(path))
    assert "hunter2" not in str(caught.value)


# ------------------------------------------------------------------------------------------------ never idle
@pytest.mark.parametrize("streams", [False, True])
def test_the_next_task_is_in_line_before_the_last_reply_of_this_one(tmp_path: Path, streams: bool) -> None:
    """The first task's last reply is held back until the second task's request arrives."""
    second_came = threading.Event()

    def reply(body: dict[str, Any]) -> Scripted:
        question = body["messages"][0]["content"]
        if question.startswith("second"):
            second_came.set()
        if question == "first 4":
            assert second_came.wait(20), "the server was left idle"
        return Scripted(f"to {question}", speculation=(2, 2, 1))

    order = []

    def task(name: str, questions: int) -> Callable[[], list[str]]:
        def run() -> list[str]:
            order.append(name)
            asked = [request(name, str(i)) for i in range(questions)]
            return [reply.text for reply in (session.ask_each(iter(asked)) if streams else session.ask(asked))]

        return run

    with (
        FakeServer(reply) as server,
        Journal(tmp_path / "j.db") as journal,
        Client(server, journal, WHO, concurrency=2) as client,
    ):
        session = Session(client, Dialect(True, True, {}), "eval", 0, has_reasoning_parser=False)
        texts = session.ahead.run([task("first", 5), task("second", 3), task("third", 1)])
        shares = client.flight.shares()
    assert texts == [
        [f"to first {i}" for i in range(5)], [f"to second {i}" for i in range(3)], ["to third 0"],
    ]  # fmt: skip
    assert order[:2] == ["first", "second"]  # begun while the first waits
    assert sorted(asked(server)) == sorted([f"first {i}" for i in range(5)] + [f"second {i}" for i in range(3)] + ["third 0"])
    assert session.tally.totals["num_drafts"] == 2 * 9  # nothing is counted twice
    assert shares is not None and 0 < shares[0] <= 1


def test_share_of_time_with_requests_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=100.0, monotonic=lambda: clock.now)
    monkeypatch.setattr("assay_evaluate.client.dispatch.time", clock)
    flight = Flight()
    clock.now += 2  # nothing in flight
    assert flight.shares() is None
    with flight:
        clock.now += 3  # one
        with flight:
            clock.now += 4  # two
    clock.now += 1
    assert flight.num_sent == 2
    assert flight.shares() == (7 / 10, (3 + 2 * 4) / 10)


def test_a_stream_is_answered_in_order_and_never_held_whole(tmp_path: Path) -> None:
    num_made = 0

    def stream() -> Iterator[Request]:
        nonlocal num_made
        for i in range(500):
            num_made += 1
            yield request("t", str(i))

    with (
        FakeServer(lambda body: Scripted(body["messages"][0]["content"])) as server,
        Journal(tmp_path / "j.db") as journal,
        Client(server, journal, WHO, concurrency=2) as client,
    ):
        for number, reply in enumerate(client.ask_each(stream())):
            assert reply.text == f"t {number}"
            assert num_made - number <= WINDOW * 2
        assert (number, num_made, client.flight.num_sent) == (499, 500, 500)
        assert [reply.text for reply in client.ask_each(stream())] == [f"t {i}" for i in range(500)]
        assert client.flight.num_sent == 500


def test_same_request_twice_at_once_is_sent_once(tmp_path: Path) -> None:
    with FakeServer() as server, Journal(tmp_path / "j.db") as journal, Client(server, journal, WHO) as client:
        assert [reply.text for reply in client.ask([request("t", "a"), request("t", "b"), request("t", "a")])] == ["#### 7"] * 3
        assert sorted(asked(server)) == ["t a", "t b"]


# ------------------------------------------------------------------------------------------------ written first, tried again
def test_every_request_is_in_the_journal_before_the_server_sees_it(tmp_path: Path) -> None:
    found = []

    def reply(body: dict[str, Any]) -> Scripted:
        item = body["messages"][0]["content"].removeprefix("t ")
        with sqlite3.connect(tmp_path / "j.db") as other:  # as another process would see it
            found.append(other.execute("SELECT status, suite FROM requests WHERE item = ?", (item,)).fetchall())
        return Scripted("fine")

    with FakeServer(reply) as server, Journal(tmp_path / "j.db") as journal, Client(server, journal, WHO) as client:
        client.ask([request("t", str(i)) for i in range(100)])
        rows = journal._execute("SELECT status, num_attempts FROM requests")
    assert found == [[("asked", "suite")]] * 100
    assert rows == [("answered", 1)] * 100


@dataclasses.dataclass
class ComesBack(Together):
    """Unreachable for the first checks."""

    checks_until_back: int = 0

    def check_alive(self) -> None:
        self.checks_until_back -= 1
        if self.checks_until_back >= 0:
            raise UnreachableError("the server of `base_url` does not answer")


@pytest.mark.parametrize(("checks", "comes_back"), [(3, True), (1000, False)])
def test_a_server_of_somebody_else_may_come_back(tmp_path: Path, checks: int, comes_back: bool) -> None:
    num_dropped = 0

    def reply(body: dict[str, Any]) -> Scripted:
        nonlocal num_dropped
        num_dropped += 1
        return Scripted(drop=True) if num_dropped < checks else Scripted("back")

    with (
        FakeServer(reply) as server,
        Journal(tmp_path / "j.db") as journal,
        Client(ComesBack((server,), checks_until_back=checks), journal, WHO, max_attempts=4, backoff_s=0.01) as client,
    ):
        if comes_back:
            assert [(one.status, one.text) for one in client.ask([request("t", "0")])] == [("answered", "back")]
            assert journal._execute("SELECT num_attempts FROM requests") == [(3,)]
        else:
            with pytest.raises(MeasureError, match="the server is gone, what was answered is kept, run again"):
                client.ask([request("t", "0")])
            assert (len(asked(server)), journal.count("asked"), journal.count("failed")) == (4, 1, 0)


def test_a_server_started_anew_in_another_way_is_noticed(tmp_path: Path) -> None:
    class Changes(FakeServer):
        def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]] | None:
            answered = super().answer(path, body)
            return answered and (200, answered[1] | {"system_fingerprint": "vllm-a" if len(self.requests) < 4 else "vllm-b"})

    with (
        Changes() as server,
        Journal(tmp_path / "j.db") as journal,
        Client(server, journal, WHO, concurrency=1) as client,
        pytest.raises(MeasureError) as raised,
    ):
        client.ask([request("t", str(i)) for i in range(9)])
    assert str(raised.value) == (
        "the server calls itself vllm-b, and before that vllm-a: its vLLM, flags or checkpoint changed, or several servers "
        "answer at this address; give the address of one"
    )
    with Journal(tmp_path / "j.db") as journal:
        assert (journal.count("answered"), journal.count("asked")) == (3, 6)


def test_back_off_doubles_with_a_jitter_of_its_own_for_each_request() -> None:
    waits_s = [[wait_s(key, attempt, 0.5) for attempt in range(1, 9)] for key in ("a", "b")]
    assert waits_s == [[wait_s(key, attempt, 0.5) for attempt in range(1, 9)] for key in ("a", "b")]
    for ours in waits_s:
        longest = [0.5, 1, 2, 4, 8, 16, 30, 30]
        assert all(most / 2 <= wait <= most for wait, most in zip(ours, longest, strict=True)), ours
    assert all(a != b for a, b in zip(*waits_s, strict=True))


@pytest.mark.parametrize(("wanted_s", "waited_s"), [(None, 0), (-5.0, 0), (0.0, 0), (7.0, 7.0), (1e9, LONGEST_RETRY_AFTER_S)])
def test_a_server_is_left_alone_as_long_as_it_wants_within_reason(wanted_s: float | None, waited_s: float) -> None:
    assert wait_s("a", 1, 0.5, wanted_s) == max(waited_s, wait_s("a", 1, 0.5))
