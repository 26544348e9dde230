"""Requests waiting for their turn, threads that send them, and how busy that kept the servers.

One lane per server, each with its own threads; first come, first served, so that the requests of a task that is put in line
early follow the last ones of the task before without a gap.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType

from assay_evaluate.client.journal import Reply, Request

WRITE_AHEAD = 64
"""Requests noted in the journal in one transaction, before the first of them is sent."""
MOST_UNWRITTEN = 64
"""Replies that may wait for the transaction before theirs to end; more make their threads wait, too."""


@dataclass(eq=False, slots=True)
class PendingRequest:
    """One request on its way. `reply` is set when it is final for this session."""

    key: str
    request: Request
    reply: Reply | None = None
    is_written: bool = False
    is_awaited: bool = False


@dataclass(frozen=True, slots=True)
class AnsweredJob:
    """A job, what came back for it, and how often it was sent for that."""

    job: PendingRequest
    reply: Reply
    num_attempts: int


class Flight:
    """How long at least one request was in flight, and how many were on average. Times in seconds.

    `with flight:` while a request is with a server; for any number of threads.
    """

    def __init__(self) -> None:
        self.num_sent = 0
        self._lock = threading.Lock()
        self._started = self._changed = time.monotonic()
        self._now = 0
        self._busy_s = self._request_s = 0.0

    def __enter__(self) -> None:
        self._count(1)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._count(-1)

    def _count(self, change: int) -> None:
        with self._lock:
            now = time.monotonic()
            since_s = now - self._changed
            self._busy_s += since_s if self._now else 0.0
            self._request_s += since_s * self._now
            self._now += change
            self.num_sent += change > 0
            self._changed = now

    def shares(self) -> tuple[float, float] | None:
        """(share of the time since this was made with a request in flight, mean number in flight); None: nothing was sent."""
        self._count(0)
        with self._lock:
            whole_s = self._changed - self._started
            return (self._busy_s / whole_s, self._request_s / whole_s) if self._request_s else None


@dataclass(eq=False)
class _Lane:
    queue: deque[PendingRequest] = field(default_factory=deque)
    changed: threading.Condition = field(default_factory=threading.Condition)
    num_workers: int = 0


class Dispatcher:
    """Hands jobs to threads: `concurrency` per lane at most, started when there is work."""

    def __init__(
        self,
        num_lanes: int,
        concurrency: int,
        write: Callable[[Sequence[PendingRequest]], None],
        work: Callable[[int, Iterator[PendingRequest]], Iterator[AnsweredJob]],
        keep: Callable[[Sequence[AnsweredJob]], None],
    ) -> None:
        """write: note requests before they are sent. work(lane, jobs): take jobs as they come, give each with its reply.

        keep: note replies; nobody sees one before it is noted.
        """
        self.stopped = threading.Event()
        self._concurrency = concurrency
        self._write, self._work, self._keep = write, work, keep
        self._lanes = [_Lane() for _ in range(num_lanes)]
        self._pool = ThreadPoolExecutor(num_lanes * concurrency, "assay-client")
        self._answered = threading.Condition()
        self._unwritten: list[AnsweredJob] = []
        self._keep_lock = threading.Lock()
        self._error: BaseException | None = None

    @property
    def num_waiting(self) -> int:
        """Jobs no thread has taken yet."""
        return sum(len(lane.queue) for lane in self._lanes)

    def submit(self, number: int, jobs: Sequence[PendingRequest]) -> None:
        """Put jobs at the end of a lane."""
        if self._error is not None:
            raise self._error
        assert not self.stopped.is_set(), "asked after the end"
        lane = self._lanes[number]
        with lane.changed:
            lane.queue.extend(jobs)
            for _ in range(min(len(jobs), self._concurrency - lane.num_workers)):
                lane.num_workers += 1
                self._pool.submit(self._run, number).add_done_callback(self._ended)
            lane.changed.notify(len(jobs))

    def wait(self, job: PendingRequest, timeout_s: float | None) -> Reply | None:
        """The job's reply; None if it did not come in time. Raises what stopped the threads, if something did."""
        with self._answered:
            job.is_awaited = True
            self._answered.wait_for(lambda: job.reply is not None or self._error is not None, timeout_s)
            if job.reply is None and self._error is not None:
                raise self._error
            return job.reply

    def stop(self) -> None:
        """Let every thread end with the request it has in flight; return when they have."""
        self.stopped.set()
        for lane in self._lanes:
            with lane.changed:
                lane.queue.clear()
                lane.changed.notify_all()
        self._pool.shutdown()

    def _run(self, number: int) -> None:
        for answered in self._work(number, self._take(self._lanes[number])):
            self._finish(answered)

    def _finish(self, answered: AnsweredJob) -> None:
        """Have the reply noted, then handed out. What arrives while one thread notes replies, it notes next, all at once.

        A transaction costs more than a row: with many requests in flight most threads only leave their reply and go on.
        """
        with self._answered:
            self._unwritten.append(answered)
            must_wait = len(self._unwritten) >= MOST_UNWRITTEN
        while self._keep_lock.acquire(blocking=must_wait):
            try:
                while self._unwritten:
                    with self._answered:
                        answers, self._unwritten = self._unwritten, []
                    self._keep(answers)
                    with self._answered:
                        for answer in answers:
                            answer.job.reply = answer.reply
                        if any(answer.job.is_awaited for answer in answers):
                            self._answered.notify_all()
            finally:
                self._keep_lock.release()
            must_wait = False
            if not self._unwritten:  # else one came after the last look, and its thread found the lock taken
                return

    def _take(self, lane: _Lane) -> Iterator[PendingRequest]:
        while True:
            with lane.changed:
                while not lane.queue and not self.stopped.is_set():
                    lane.changed.wait()
                if self.stopped.is_set():
                    return
                if not lane.queue[0].is_written:
                    ahead = list(itertools.islice(lane.queue, WRITE_AHEAD))
                    self._write(ahead)
                    for pending in ahead:
                        pending.is_written = True
                job = lane.queue.popleft()
            yield job

    def _ended(self, worker: Future[None]) -> None:
        """A thread that ends with an error ends them all; whoever waits gets the error."""
        error = worker.exception()
        if error is None:
            return
        with self._answered:
            self._error = self._error or error
            self.stopped.set()
            self._answered.notify_all()
        for lane in self._lanes:
            with lane.changed:
                lane.changed.notify_all()
