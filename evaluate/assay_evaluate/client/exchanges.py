"""Requests that are numbered and kept whole: what came of each, the file they are written to, and how they are sent together.

For those who ask again what was asked before: the journal would answer it from its file. A ledger (JSON lines) of exchanges
makes any event reproducible.
"""

from __future__ import annotations

import heapq
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from assay.atomic_files import naming
from assay_evaluate.client.journal import Reply, Request
from assay_evaluate.client.logprobs import TokenRow
from assay_evaluate.client.sending import Received

ExchangeStatus = Literal["answered", "refused", "failed", "aborted"]


@dataclass(frozen=True)
class Ask:
    """One request. `body` lacks `model`. abort_after: chunks of the streamed reply after which we hang up."""

    id: str
    path: str
    body: dict[str, Any]
    prompt: str = ""
    """The user's words, for detectors that compare a reply with them."""
    logprobs_from: int = 0
    """As in `journal.Request`: prompt log-probabilities are kept from this position on."""
    abort_after: int | None = None

    @cached_property
    def request(self) -> Request:
        """As it is sent."""
        return Request("ask", self.id, 0, self.path, self.body, self.logprobs_from)


@dataclass(frozen=True, eq=False)
class Exchange:
    """One request and what came of it. `slot`: its place in its wave; else the least number free among those in flight."""

    ask: Ask
    slot: int
    concurrency: int
    """Bound of the requests in flight with it."""
    status: ExchangeStatus
    reply: Reply
    rows: tuple[TokenRow, ...] = ()
    """Generated log-probabilities. Empty: none came."""
    routed_experts: str | None = None
    """As it came: base64 of an .npy of [tokens, layers, experts per token]."""
    system_fingerprint: str | None = None
    is_of_another: bool = False
    """Failed: the reply that came belongs to another request."""
    is_broken_off: bool = False
    """Failed: the reply began, and ended before all of it was there."""

    @property
    def id(self) -> str:
        return self.ask.id

    @property
    def is_answered(self) -> bool:
        return self.status == "answered"

    @property
    def is_lost(self) -> bool:
        """Whether no reply came at all."""
        return self.status == "failed" and self.reply.http_status is None

    @property
    def text(self) -> str:
        """Thinking and answer."""
        return (self.reply.reasoning or "") + self.reply.text


class Ledger:
    """Exchanges as JSON lines, appended as they come: what is killed leaves all that were written. For several threads.

    The authorization of a request is in none. OSError, with the path: the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        with naming(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab", buffering=0)

    def close(self) -> None:
        self._file.close()

    def write(self, exchange: Exchange) -> None:
        """What a person needs to send it again, and what came back."""
        ask, reply = exchange.ask, exchange.reply
        fields = {
            "id": ask.id, "path": ask.path, "body": ask.body, "abort_after": ask.abort_after, "slot": exchange.slot,
            "concurrency": exchange.concurrency, "status": exchange.status, "error": reply.error,
            "finish_reason": reply.finish_reason, "text": reply.text, "reasoning": reply.reasoning,
            "token_ids": reply.token_ids, "latency_s": reply.latency_s,
        }  # fmt: skip
        # A lone surrogate, in a prompt say, is no UTF-8; escaped as `\ud800` it is what JSON writes for it.
        line = (json.dumps(fields, ensure_ascii=False) + "\n").encode(errors="backslashreplace")
        with self._lock, naming(self._path):
            while line:  # half of it is written where a disk is almost full
                line = line[self._file.write(line) :]


def exchange_of(ask: Ask, slot: int, concurrency: int, received: Received) -> Exchange:
    """What came of a request, with its place among the others."""
    return Exchange(
        ask, slot, concurrency, received.reply.status, received.reply, received.rows, received.routed_experts,
        received.system_fingerprint, received.is_of_another, received.is_broken_off,
    )  # fmt: skip


Slim = Callable[[Exchange], Exchange]
Send = Callable[[Ask, int, int], Exchange]
"""(request, slot, concurrency) -> what came of it."""

STAGGER_S = 0.002
"""Between the requests of a wave: they arrive together and in order."""
GIVE_UP_AFTER = 8
"""Requests in a row without any reply after which the server counts as gone."""
PROGRESS_EVERY_S = 10.0


class Tally:
    """What was asked so far, and what came of it. For several threads."""

    def __init__(self) -> None:
        self.num_requests = 0
        self.num_failed = 0
        self.errors: Counter[str] = Counter()
        self.exchanges: dict[str, Exchange] = {}
        """By id; of repeats of an id the last."""
        self.system_fingerprint: str | None = None
        self._lost_in_a_row = 0
        self._lock = threading.Lock()

    def count(self, exchange: Exchange) -> bool:
        """Keep an exchange; whether the server still answers anything."""
        with self._lock:
            self.num_requests += 1
            self.exchanges[exchange.id] = exchange
            self.system_fingerprint = self.system_fingerprint or exchange.system_fingerprint
            if exchange.status in ("refused", "failed"):
                self.num_failed += 1
                status = exchange.reply.http_status
                is_status = status is not None and status != 200
                self.errors[f"HTTP {status}" if is_status else str(exchange.reply.error).partition(":")[0]] += 1
            self._lost_in_a_row = self._lost_in_a_row + 1 if exchange.is_lost else 0
            return self._lost_in_a_row < GIVE_UP_AFTER


def ask_together(
    asks: Sequence[Ask],
    concurrency: int,
    send: Send,
    stop: Callable[[], None],
    tell: Callable[[str], None],
    *,
    in_waves: bool = False,
) -> list[Exchange]:
    """What came of every request, in their order; `concurrency` in flight, a new one as soon as one ends.

    stop: called after an error or Ctrl-C: threads that wait to send a request again need not, and are waited for. in_waves:
    `concurrency` at once, and in order; the next ones wait for the last reply of these, and `slot` is the place in the wave.
    """
    if in_waves and len(asks) > concurrency:
        waves = (asks[first : first + concurrency] for first in range(0, len(asks), concurrency))
        return [exchange for wave in waves for exchange in ask_together(wave, concurrency, send, stop, tell)]
    is_wave = len(asks) <= concurrency
    free = list(range(concurrency))
    lock = threading.Lock()

    def ask_one(number: int, ask: Ask) -> Exchange:
        if is_wave:
            return send(ask, number, concurrency)
        with lock:
            slot = heapq.heappop(free)
        try:
            return send(ask, slot, concurrency)
        finally:
            with lock:
                heapq.heappush(free, slot)

    reported = time.monotonic()
    exchanges: list[Exchange] = []
    with ThreadPoolExecutor(max_workers=min(concurrency, max(len(asks), 1))) as pool:
        jobs = []
        try:
            for number, ask in enumerate(asks):
                jobs.append(pool.submit(ask_one, number, ask))
                if number < concurrency:
                    time.sleep(STAGGER_S)
            for number, job in enumerate(jobs):
                exchanges.append(job.result())
                if time.monotonic() - reported > PROGRESS_EVERY_S:
                    reported = time.monotonic()
                    tell(f"{asks[0].id.partition('/')[0]}: {number + 1}/{len(asks)}")
        except BaseException:
            stop()
            for job in jobs:
                job.cancel()
            raise
    return exchanges
