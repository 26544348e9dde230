"""Puts requests to OpenAI-compatible servers, many at a time: through the journal, or in waves that a ledger keeps.

What the journal holds is not asked again. Connection errors, 429 and 5xx are tried again with back-off, no sooner than the
server wants (Retry-After), and, if that does not help while the server lives, recorded as failed: infrastructure, never a wrong
answer. A server that puts a request off (429, 503) while it answers others is waited for. A dead server stops everything with
the tail of its log. No `stop` strings are ever sent: they fire inside thinking.

A task that gets nothing but replies that are no answers (a page, JSON of another shape, `abort`) is asked no more after a few,
and its other requests fail with that reason; a rerun asks them.

Requests in waves are for those who look at the server: each is sent whether or not it was asked before, and what goes wrong is
what they look for, so only a server that asks for patience (429, 503) is asked again.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from assay.errors import MeasureError, ServeError, UnreachableError
from assay.foreign_text import shown
from assay_evaluate.client.dispatch import AnsweredJob, Dispatcher, Flight, PendingRequest
from assay_evaluate.client.exchanges import (
    GIVE_UP_AFTER,
    Ask,
    Exchange,
    Ledger,
    Slim,
    Tally,
    ask_together,
    exchange_of,
)
from assay_evaluate.client.journal import Identity, Journal, Reply, Request
from assay_evaluate.client.sending import (
    COME_LATER,
    MISCONFIGURED,
    PUT_OFF,
    REQUEST_S,
    TRY_AGAIN,
    Attempts,
    Received,
    Sender,
    UnansweredTasks,
    wait_s,
)
from assay_evaluate.transport.connection import Connection, HttpReply, root_url
from assay_evaluate.transport.errors import TransportError, UnusableReply
from assay_evaluate.transport.foreign_json import MOST_MESSAGE, NotJson, count_in, error_in, object_in

MOST_MISCONFIGURED = 8
"""Replies in a row with such a status after which the address or the key counts as wrong."""
PAGE_ATTEMPTS = 2
"""How often a question about the server is asked that is answered with status 200 and no JSON, or an error in it."""
PROGRESS_EVERY_S = 10.0
IDLE_EVERY_S = 0.05
WINDOW = 64
"""Requests per server and per request in flight that `ask_each` has under way: one long reply must not hold up the others."""


class NotMeasured(MeasureError):
    """The server or the model cannot give what one measurement needs: recorded with the reason, the others go on."""


class Endpoint(Protocol):
    """What the client needs of a server (assay_evaluate.serving.server.Server is one)."""

    @property
    def base_url(self) -> str: ...
    @property
    def base_urls(self) -> Sequence[str]:
        """All servers that share the work, `base_url` first."""

    @property
    def model(self) -> str: ...
    @property
    def max_model_len(self) -> int | None: ...
    @property
    def headers(self) -> Mapping[str, str]:
        """Sent with every request: an authorization, say. Not for records, the journal or messages."""

    def check_alive(self) -> None:
        """Raise ServeError, with the tail of the log, if the server is gone; UnreachableError if it may come back."""


@dataclass(frozen=True)
class Address:
    """An endpoint of which only this much is known. base_url: without /v1."""

    base_url: str
    model: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    max_model_len: int | None = None

    @property
    def base_urls(self) -> tuple[str, ...]:
        return (self.base_url,)

    def check_alive(self) -> None:
        """Nobody watches it: the next request will tell."""


@dataclass(frozen=True)
class ServerAnswer:
    """What a server answered to a question about itself.

    `data`: the reply's JSON object; {} if the status is not 200, or no object came: such an endpoint is not offered.
    """

    status: int
    """Of an error told with status 200, the status that it names, or 500."""
    data: dict[str, Any]
    message: str
    """The server's own words about an error, or what came instead of an object, on one line."""

    @property
    def num_prompt_tokens(self) -> int | None:
        """Of the prompt, as /tokenize counts them or a reply bills them. None: the server does not say, or says 0.

        A prompt has one at least; servers that do not count write zeros.
        """
        return count_in(self.data, "count") or count_in(object_in(self.data, "usage"), "prompt_tokens") or None

    @property
    def tokens(self) -> tuple[int, ...]:
        """As /tokenize gives them; () if it gives none."""
        listed = self.data.get("tokens")
        return tuple(listed) if isinstance(listed, list) and set(map(type, listed)) == {int} else ()


class Client:
    """Asks the servers of one checkpoint. Use as a context manager: it closes its connections.

    After an error it is of no more use: its threads have ended.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        journal: Journal | None = None,
        who: Identity | None = None,
        *,
        ledger: Path | None = None,
        concurrency: int = 8,
        newest_first: bool = False,
        max_attempts: int = 6,
        backoff_s: float = 0.5,
        timeout_s: float = REQUEST_S,
        on_progress: Callable[[str], None] = lambda line: None,
    ) -> None:
        """journal, who: where replies are kept and whose they are, for `ask`, `ask_each` and `submit`. ledger: JSON lines of
        what is asked together, appended. concurrency: requests in flight per server, of those through the journal.
        newest_first: send them in reverse order (another batch composition). timeout_s: of a short reply, and of silence
        within one; a longer one gets more by the tokens that it may have.
        """
        self.endpoint = endpoint
        self.tally = Tally()
        self._journal, self._who = journal, who
        self.flight = Flight()
        self._urls = [root_url(url) for url in endpoint.base_urls]
        self._sender = Sender(endpoint.model, timeout_s, endpoint.headers)
        self.concurrency = concurrency
        self.tell = on_progress
        self._newest_first = newest_first
        self._max_attempts = max_attempts
        self._backoff_s = backoff_s
        self._open: dict[str, PendingRequest] = {}
        self._called: str | None = None
        self._misconfigured_in_a_row = 0
        self._num_answered = 0
        """Grows with every answer; of two at once one may not be counted, which does not matter."""
        self._unanswered = UnansweredTasks()
        self._num_changed = 0 if journal is None else journal.num_changed
        self._dispatcher = Dispatcher(
            len(self._urls),
            concurrency,
            lambda jobs: self.journal.write_requests([(job.key, job.request) for job in jobs], self.who),
            self._work,
            lambda answers: self.journal.write_replies([(a.job.key, a.reply, a.num_attempts) for a in answers]),
        )
        self._about = self._sender.connect(self._urls[0])
        self._about_lock = threading.Lock()
        self._over = threading.Event()
        self._ledger = None if ledger is None else Ledger(ledger)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._dispatcher.stop()
        self._report_changed()
        self._about.close()
        if self._ledger is not None:
            self._ledger.close()

    # ------------------------------------------------------------------------------------------------ what others call
    @property
    def journal(self) -> Journal:
        """Where replies are kept."""
        assert self._journal is not None, "made without a journal"
        return self._journal

    @property
    def who(self) -> Identity:
        """Whose replies they are."""
        assert self._who is not None, "made without an identity"
        return self._who

    def ask(self, requests: Sequence[Request], on_hungry: Callable[[], bool] | None = None) -> list[Reply]:
        """Replies in the order of `requests`, from the journal where it has them, else from the servers.

        on_hungry: called while waiting, in the caller's thread, when threads run out of work; it may `submit` requests that
        will be asked for later, and says whether it did. Raises MeasureError if a server is gone or refuses everything;
        replies that came before are in the journal.
        """
        return list(self.ask_each(requests, on_hungry))

    def ask_each(self, requests: Iterable[Request], on_hungry: Callable[[], bool] | None = None) -> Iterator[Reply]:
        """Like `ask`, one reply at a time: memory does not grow with the number of requests. Not to be left half-read."""
        coming = iter(requests)
        under_way: deque[PendingRequest] = deque()
        at_once = self.concurrency * len(self._urls)
        most, is_whole, had_all, num_done, task = WINDOW * at_once, False, True, 0, ""
        started = last_line = time.monotonic()
        with ExitStack() as stack:
            # After an error or Ctrl-C the threads end with the request they have in flight.
            stack.callback(self._dispatcher.stop)
            while True:
                if not is_whole and len(under_way) <= most // 2:
                    room = most - len(under_way)
                    more = self.submit(list(itertools.islice(coming, room)))
                    under_way.extend(more)
                    is_whole = len(more) < room
                    had_all = had_all and all(job.reply is not None for job in more)
                if not under_way:
                    break
                job = under_way.popleft()
                pause_s = PROGRESS_EVERY_S if on_hungry is None else IDLE_EVERY_S
                while (reply := job.reply or self._dispatcher.wait(job, pause_s)) is None:
                    is_hungry = is_whole and self._dispatcher.num_waiting <= 2 * at_once
                    if on_hungry is not None and is_hungry and not on_hungry():
                        on_hungry, pause_s = None, PROGRESS_EVERY_S  # nothing is left to come
                    if time.monotonic() - last_line >= PROGRESS_EVERY_S:
                        last_line = time.monotonic()
                        of = f"/{num_done + 1 + len(under_way)}" if is_whole else ""
                        # of newest_first the first reply that is waited for is the last that comes
                        come = num_done + sum(pending.reply is not None for pending in under_way)
                        self.tell(f"{job.request.task}: {come}{of}, {last_line - started:.0f} s")
                self._open.pop(job.key, None)
                num_done, task = num_done + 1, job.request.task
                yield reply
            stack.pop_all()
        if not had_all:
            self.tell(f"{task}: all {num_done}, {time.monotonic() - started:.0f} s")

    def submit(self, requests: Sequence[Request]) -> list[PendingRequest]:
        """Put what is neither answered nor under way in line; a job for each request, in their order."""
        keys = [request.key(self.who) for request in requests]
        replies = self.journal.find_all([key for key in keys if key not in self._open])
        self._report_changed()
        lanes: list[list[PendingRequest]] = [[] for _ in self._urls]
        for key, request in zip(keys, requests, strict=True):
            if key not in replies and key not in self._open:
                self._open[key] = PendingRequest(key, request)
                lanes[0 if len(lanes) == 1 else lane_of(request, len(lanes))].append(self._open[key])
        jobs = [
            PendingRequest(key, request, replies[key]) if key in replies else self._open[key]
            for key, request in zip(keys, requests, strict=True)
        ]
        if any(lanes):
            self._check_alive(is_patient=True)
        for number, missing in enumerate(lanes):
            if missing:
                self._dispatcher.submit(number, missing[::-1] if self._newest_first else missing)
        return jobs

    def post(self, path: str, body: dict[str, Any]) -> ServerAnswer:
        """A question about the server itself: not journaled. MeasureError: no reply that can be used comes.

        The caller looks at what comes with status 200: gateways answer paths that they do not know with {} or a page.
        """
        url = f"{self._urls[0]}{path}"
        sent, total_s = self._sender.body_of(json.dumps(body)), self._sender.total_s(body)
        for attempt in itertools.count(1):
            is_last = attempt == self._max_attempts
            waits_s = None
            try:
                with self._about_lock:
                    reply = self._about.ask(path, sent, total_s=total_s)
                answer, may_help = _read_answer(reply)
                if is_last or not may_help or (reply.status == 200 and attempt == PAGE_ATTEMPTS):
                    return answer
                waits_s = reply.retry_after_s
            except UnusableReply as error:
                raise MeasureError(f"{url}: {error}") from None
            except TransportError as error:
                self._check_alive(is_patient=not is_last)
                if is_last:
                    raise MeasureError(f"{self._urls[0]}: cannot be reached: {error}") from None
            time.sleep(wait_s(path, attempt, self._backoff_s, waits_s))
        raise AssertionError("the last attempt returns or raises")

    def exchange(self, ask: Ask, slot: int = 0, concurrency: int = 1) -> Exchange:
        """One request, now, from this thread, and as often as the server puts it off; neither counted nor kept."""
        if ask.abort_after is not None:
            with closing(self._sender.connect(self._urls[0])) as connection:
                reply = self._sender.hang_up(connection, ask.request, ask.abort_after)
            return Exchange(ask, slot, concurrency, "failed" if reply.output_tokens is None else "aborted", reply)
        attempts = Attempts(self._max_attempts, self._num_answered)
        while True:
            # Each on a connection of its own: one that the server closes while idle would count as a failure.
            with closing(self._sender.connect(self._urls[0])) as connection:
                received = self._sender.send(connection, ask.request)
            attempts.count(received, self._num_answered)
            self._num_answered += received.reply.status == "answered"
            if received.reply.http_status not in COME_LATER | PUT_OFF or attempts.are_over:
                break
            if self._over.wait(wait_s(ask.id, attempts.step, self._backoff_s, received.retry_after_s)):
                break
        return exchange_of(ask, slot, concurrency, received)

    def ask_together(
        self, asks: Sequence[Ask], concurrency: int, *, in_waves: bool = False, slim: Slim | None = None
    ) -> list[Exchange]:
        """What came of every request, in their order; `concurrency` in flight, a new one as soon as one ends.

        in_waves: all of a wave are sent at once and in order, and the next wave waits for the last reply of this one, so
        that `slot` is the place in the wave. slim: what is kept of an exchange, of scans of thousands. All are counted in
        `tally`. MeasureError if the server is gone.
        """

        def send(ask: Ask, slot: int, concurrency: int) -> Exchange:
            exchange = self.exchange(ask, slot, concurrency)
            exchange = exchange if slim is None else slim(exchange)
            is_there = self.tally.count(exchange)
            if self._ledger is not None:
                self._ledger.write(exchange)
            if not is_there:
                self._over.set()  # requests that wait to be sent again need not
                none = f"{GIVE_UP_AFTER} requests in a row had no reply ({exchange.reply.error})"
                raise MeasureError(f"{self._urls[0]}: {none}; is it running?")
            return exchange

        return ask_together(asks, concurrency, send, self._over.set, self.tell, in_waves=in_waves)

    # ------------------------------------------------------------------------------------------------ in the caller's thread
    def _report_changed(self) -> None:
        num_changed = 0 if self._journal is None else self._journal.num_changed
        if num_changed > self._num_changed:
            what = f"{self.journal.path}: {num_changed - self._num_changed} replies are not as they were written"
            self.tell(f"{what}; they are not used, and asked for again")
            self._num_changed = num_changed

    # ------------------------------------------------------------------------------------------------ in the threads
    def _work(self, lane: int, jobs: Iterator[PendingRequest]) -> Iterator[AnsweredJob]:
        with closing(self._sender.connect(self._urls[lane])) as connection:
            for job in jobs:
                yield self._put(connection, job)

    def _put(self, connection: Connection, job: PendingRequest) -> AnsweredJob:
        """Send one request until it is answered, refused, or out of attempts."""
        task = job.request.task
        if (reason := self._unanswered.reason_over(task)) is not None:
            return AnsweredJob(job, Reply("failed", error=reason), 0)
        attempts = Attempts(self._max_attempts, self._num_answered)
        while True:
            with self.flight:
                received = self._sender.send(connection, job.request)
            self._check_server(job.request, received)
            if received.reply.status != "failed":
                self._num_answered += received.reply.status == "answered"
                self._unanswered.end_row(task)
                return AnsweredJob(job, received.reply, attempts.num_sent + 1)
            attempts.count(received, self._num_answered)
            is_last = attempts.are_over or not received.may_help
            self._unanswered.count(task, received, attempts.num_attempts, is_last=is_last)
            self._check_alive(is_patient=not is_last)
            if is_last:
                break
            if self._dispatcher.stopped.wait(wait_s(job.key, attempts.step, self._backoff_s, received.retry_after_s)):
                break
            if self._unanswered.reason_over(task) is not None:
                break
        return AnsweredJob(job, received.reply, attempts.num_sent)

    def _check_server(self, request: Request, received: Received) -> None:
        """MeasureError: the address or key is wrong, or another server answers than before."""
        if (status := received.reply.http_status) is not None:
            self._misconfigured_in_a_row = self._misconfigured_in_a_row + 1 if status in MISCONFIGURED else 0
        if self._misconfigured_in_a_row >= MOST_MISCONFIGURED:
            raise MeasureError(f"{self._urls[0]}{request.path}: {received.reply.error}")
        fingerprint = received.system_fingerprint
        if fingerprint is not None:
            before = self._called = self._called or fingerprint  # whoever comes first: all servers must agree
            if fingerprint != before:  # started anew in another way while we asked: its replies are of somebody else
                raise MeasureError(
                    f"the server calls itself {fingerprint}, and before that {before}: its vLLM, flags or checkpoint changed, "
                    "or several servers answer at this address; give the address of one"
                )

    def _check_alive(self, *, is_patient: bool = False) -> None:
        """MeasureError if the server is gone. is_patient: not if it is one that may come back."""
        try:
            self.endpoint.check_alive()
        except ServeError as error:
            if not is_patient or not isinstance(error, UnreachableError):
                raise MeasureError(f"the server is gone, what was answered is kept, run again to go on: {error}") from None


def lane_of(request: Request, num_lanes: int) -> int:
    """Always the same server for an item and its repeats: their prompt may still be in its cache."""
    item = f"{request.task}\0{request.item.partition('#')[0]}"
    return int.from_bytes(hashlib.sha256(item.encode()).digest()[:8], "big") % num_lanes


def _read_answer(reply: HttpReply) -> tuple[ServerAnswer, bool]:
    """What was answered, and whether another may come if it is asked again."""
    if reply.status != 200:
        return ServerAnswer(reply.status, {}, reply.message), reply.status in TRY_AGAIN
    try:
        data = reply.json()
    except NotJson as error:
        return ServerAnswer(200, {}, str(error)), True
    if not isinstance(data, dict):
        return ServerAnswer(200, {}, f"no JSON object: {shown(data, 100)}"), False
    if (refusal := error_in(data)) is not None:
        return ServerAnswer(refusal.status or 500, {}, shown(refusal.message, MOST_MESSAGE)), refusal.status in TRY_AGAIN
    return ServerAnswer(200, data, ""), False
