"""Puts requests to OpenAI-compatible servers, many at a time, through the journal.

What the journal holds is not asked again. Connection errors, 429 and 5xx are tried again with back-off and, if that does not
help while the server lives, recorded as failed: infrastructure, never a wrong answer. A dead server stops everything with
the tail of its log. No `stop` strings are ever sent: they fire inside thinking.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from types import TracebackType
from typing import Any, Protocol, Self

import httpx

from assay.errors import MeasureError, ServeError, UnreachableError
from assay.foreign_text import shown
from assay_evaluate.client.dispatch import Answered, Dispatcher, Flight, PendingRequest
from assay_evaluate.client.journal import Identity, Journal, Reply, Request
from assay_evaluate.client.replies import read_reply
from assay_evaluate.transport.connection import Connection, TransportError, root_url
from assay_evaluate.transport.foreign_json import message_in

TRY_AGAIN = frozenset({408, 409, 425, 429, *range(500, 600)})
"""HTTP statuses that say nothing about the request itself."""
MISCONFIGURED = frozenset({401, 403, 404, 405})
"""HTTP statuses that every other request would get as well."""
PROGRESS_EVERY_S = 10.0
IDLE_EVERY_S = 0.05
LONGEST_BACKOFF_S = 30.0
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


class Client:
    """Asks the servers of one checkpoint. Use as a context manager: it closes its connections.

    After an error it is of no more use: its threads have ended.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        journal: Journal,
        who: Identity,
        *,
        concurrency: int = 8,
        newest_first: bool = False,
        max_attempts: int = 6,
        backoff_s: float = 0.5,
        timeout_s: float = 3600.0,
        on_progress: Callable[[str], None] = lambda line: None,
    ) -> None:
        """concurrency: requests in flight per server. newest_first: send in reverse order (another batch composition)."""
        self.endpoint = endpoint
        self.journal = journal
        self.who = who
        self.flight = Flight()
        self._urls = [root_url(url) for url in endpoint.base_urls]
        self._model_json = json.dumps(endpoint.model, ensure_ascii=False)
        self._concurrency = concurrency
        self._newest_first = newest_first
        self._max_attempts = max_attempts
        self._backoff_s = backoff_s
        self._timeout_s = timeout_s
        self._on_progress = on_progress
        self._open: dict[str, PendingRequest] = {}
        self._called: str | None = None
        self._dispatcher = Dispatcher(len(self._urls), concurrency, self._write_requests, self._work, self._keep)
        # trust_env=False: a proxy setting of the machine must not come between us and the loopback.
        self._http = httpx.Client(
            base_url=self._urls[0],
            headers=dict(endpoint.headers),
            timeout=httpx.Timeout(timeout_s, connect=10.0),
            trust_env=False,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._dispatcher.stop()
        self._http.close()

    # ------------------------------------------------------------------------------------------------ what others call
    @property
    def num_sent(self) -> int:
        """Requests sent so far, repeats of failed ones among them."""
        return self.flight.num_sent

    @property
    def concurrency(self) -> int:
        """Requests in flight per server."""
        return self._concurrency

    def tell(self, line: str) -> None:
        """A line of progress, for those who ask the server themselves."""
        self._on_progress(line)

    @property
    def is_hungry(self) -> bool:
        """Whether threads will soon have nothing left to send."""
        return self._dispatcher.num_waiting <= 2 * self._concurrency * len(self._urls)

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
        most, is_whole, had_all, num_done, task = WINDOW * self._concurrency * len(self._urls), False, True, 0, ""
        started = last_line = time.monotonic()
        with self._stopped_by_errors():
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
                while (reply := self._wait(job, on_hungry)) is None:
                    if on_hungry is not None and is_whole and self.is_hungry and not on_hungry():
                        on_hungry = None  # nothing is left to come
                    if time.monotonic() - last_line >= PROGRESS_EVERY_S:
                        last_line = time.monotonic()
                        of = f"/{num_done + 1 + len(under_way)}" if is_whole else ""
                        # of newest_first the first reply that is waited for is the last that comes
                        come = num_done + sum(one.reply is not None for one in under_way)
                        self._on_progress(f"{job.request.task}: {come}{of}, {last_line - started:.0f} s")
                num_done, task = num_done + 1, job.request.task
                yield reply
        if not had_all:
            self._on_progress(f"{task}: all {num_done}, {time.monotonic() - started:.0f} s")

    def submit(self, requests: Sequence[Request]) -> list[PendingRequest]:
        """Put what is neither answered nor under way in line; a job for each request, in their order."""
        keys = [request.key(self.who) for request in requests]
        known = {key: PendingRequest(key, request, reply) for key, request, reply in self._known(keys, requests)}
        lanes: list[list[PendingRequest]] = [[] for _ in self._urls]
        for key, request in zip(keys, requests, strict=True):
            if key not in known and key not in self._open:
                self._open[key] = PendingRequest(key, request)
                lanes[self._lane_of(request)].append(self._open[key])
        jobs = [known[key] if key in known else self._open[key] for key in keys]
        if any(lanes):
            self._check_alive(is_patient=True)
        for number, missing in enumerate(lanes):
            if missing:
                self._dispatcher.submit(number, missing[::-1] if self._newest_first else missing)
        return jobs

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        """A question about the server itself: not journaled. MeasureError if it cannot be reached."""
        for attempt in itertools.count(1):
            try:
                return self._http.post(path, json={"model": self.endpoint.model, **body})
            except httpx.TransportError as error:
                is_last = attempt == self._max_attempts
                self._check_alive(is_patient=not is_last)
                if is_last:
                    raise MeasureError(f"{self._http.base_url}: cannot be reached: {type(error).__name__}: {error}") from None
            time.sleep(self._backoff_of(path, attempt))
        raise AssertionError("the last attempt returns or raises")

    # ------------------------------------------------------------------------------------------------ in the caller's thread
    @contextmanager
    def _stopped_by_errors(self) -> Iterator[None]:
        """After an error or Ctrl-C the threads end with the request they have in flight."""
        with ExitStack() as stack:
            stack.callback(self._dispatcher.stop)
            yield
            stack.pop_all()

    def _known(self, keys: Sequence[str], requests: Sequence[Request]) -> Iterator[tuple[str, Request, Reply]]:
        found = self.journal.find_all([key for key in keys if key not in self._open])
        return ((key, request, found[key]) for key, request in zip(keys, requests, strict=True) if key in found)

    def _wait(self, job: PendingRequest, on_hungry: Callable[[], bool] | None) -> Reply | None:
        """The reply, or None after a while, so that the caller can do something else meanwhile."""
        if job.reply is None:
            self._dispatcher.wait(job, PROGRESS_EVERY_S if on_hungry is None else IDLE_EVERY_S)
        if job.reply is not None:
            self._open.pop(job.key, None)
        return job.reply

    def _lane_of(self, request: Request) -> int:
        """Always the same server for an item and its repeats: their prompt may still be in its cache."""
        if len(self._urls) == 1:
            return 0
        item = f"{request.task}\0{request.item.partition('#')[0]}"
        return int.from_bytes(hashlib.sha256(item.encode()).digest()[:8], "big") % len(self._urls)

    # ------------------------------------------------------------------------------------------------ in the threads
    def _write_requests(self, jobs: Sequence[PendingRequest]) -> None:
        self.journal.write_requests([(job.key, job.request) for job in jobs], self.who)

    def _keep(self, answered: Sequence[Answered]) -> None:
        self.journal.write_replies([(one.job.key, one.reply, one.num_attempts) for one in answered])

    def _work(self, lane: int, jobs: Iterator[PendingRequest]) -> Iterator[Answered]:
        with closing(Connection(self._urls[lane], total_s=self._timeout_s, headers=self.endpoint.headers)) as connection:
            for job in jobs:
                yield self._put(connection, job)

    def _put(self, connection: Connection, job: PendingRequest) -> Answered:
        """Send one request until it is answered, refused, or out of attempts."""
        for attempt in itertools.count(1):
            with self.flight.one():
                reply = self._send(connection, job.request)
            if reply.status != "failed":
                break
            is_last = attempt == self._max_attempts
            self._check_alive(is_patient=not is_last)
            if is_last or self._dispatcher.stopped.wait(self._backoff_of(job.key, attempt)):
                break
        return Answered(job, reply, attempt)

    def _send(self, connection: Connection, request: Request) -> Reply:
        body = f'{{"model":{self._model_json},{request.body_json[1:]}'
        started = time.monotonic()
        try:
            response = connection.post(request.path, body.encode())
        except TransportError as error:
            return Reply(status="failed", error=str(error), latency_s=time.monotonic() - started)
        latency_s = time.monotonic() - started
        status = response.status
        if status == 200:
            try:
                data = json.loads(response.body)
                self._check_same(data.get("system_fingerprint"))
                return read_reply(data, request, latency_s)
            except (json.JSONDecodeError, UnicodeDecodeError, LookupError, TypeError, AttributeError) as error:
                what = f"reply is not what the API promises: {type(error).__name__}: {error}"
                return Reply(status="failed", error=what, http_status=status, latency_s=latency_s)
        message = response.message
        if status in MISCONFIGURED:
            raise MeasureError(f"{root_url(self.endpoint.base_url)}{request.path}: HTTP {status}: {message}")
        kind: Any = "failed" if status in TRY_AGAIN else "refused"
        return Reply(status=kind, error=f"HTTP {status}: {message}", http_status=status, latency_s=latency_s)

    def _check_same(self, told: str | None) -> None:
        """MeasureError if the server was started anew in another way while we asked: its replies are of somebody else."""
        if told is None:
            return
        before = self._called = self._called or told  # whoever comes first: all servers must agree
        if told != before:
            raise MeasureError(
                f"the server calls itself {shown(told)}, and before that {shown(before)}: its vLLM, flags or checkpoint changed"
            )

    def _backoff_of(self, key: str, attempt: int) -> float:
        """Seconds to wait after an attempt. The jitter is the request's own: no two come back at the same moment."""
        jitter = random.Random(f"{key}:{attempt}").uniform(0.5, 1.0)
        return jitter * min(LONGEST_BACKOFF_S, self._backoff_s * 2.0 ** (attempt - 1))

    def _check_alive(self, *, is_patient: bool = False) -> None:
        """MeasureError if the server is gone. is_patient: not if it is one that may come back."""
        try:
            self.endpoint.check_alive()
        except UnreachableError as error:
            if not is_patient:
                raise MeasureError(_gone(error)) from None
        except ServeError as error:
            raise MeasureError(_gone(error)) from None


def _gone(error: ServeError) -> str:
    return f"the server is gone, what was answered is kept, run again to go on: {error}"


def error_message(response: httpx.Response) -> str:
    """The server's own words about an error, on one line of at most 300 characters."""
    return message_in(response.text)
