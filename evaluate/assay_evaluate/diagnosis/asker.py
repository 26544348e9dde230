"""Requests of the probes: sent together, numbered by slot, hung up on where asked, and kept whole.

Not through the journal: it answers a request that was asked before from its file, and a probe has to ask again. Everything
that was sent and came back is an `Exchange`; a ledger of them (JSON lines) makes any event reproducible.
"""

from __future__ import annotations

import heapq
import http.client
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

from assay.errors import MeasureError
from assay.foreign_text import shown
from assay_evaluate.client.journal import Reply, Request
from assay_evaluate.client.replies import read_reply
from assay_evaluate.serving.external import fingerprint_in
from assay_evaluate.transport.connection import NO_HEADERS, Connection, TransportError

Token = int | str
"""An id where the server tells ids, else the token's text."""
ExchangeStatus = Literal["answered", "refused", "failed", "aborted"]
STAGGER_S = 0.002
"""Between the requests of a wave: they arrive together and in order."""
GIVE_UP_AFTER = 8
"""Transport errors in a row after which the server counts as gone."""


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


class TokenRow(NamedTuple):
    """One generated token: its log-probability, and the likeliest tokens with theirs, best first. NaN: not a number came."""

    token: Token
    logprob: float
    top: tuple[tuple[Token, float], ...]


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

    @property
    def id(self) -> str:
        return self.ask.id

    @property
    def is_answered(self) -> bool:
        return self.status == "answered"

    @property
    def text(self) -> str:
        """Thinking and answer."""
        return (self.reply.reasoning or "") + self.reply.text

    def for_ledger(self) -> dict[str, Any]:
        """What a person needs to send it again, and what came back."""
        return {
            "id": self.id, "path": self.ask.path, "body": self.ask.body, "abort_after": self.ask.abort_after,
            "slot": self.slot, "concurrency": self.concurrency, "status": self.status, "error": self.reply.error,
            "finish_reason": self.reply.finish_reason, "text": self.reply.text, "reasoning": self.reply.reasoning,
            "token_ids": self.reply.token_ids, "latency_s": self.reply.latency_s,
        }  # fmt: skip


Slim = Callable[[Exchange], Exchange]


class Asker:
    """Sends requests to one server. Use as a context manager: it closes the ledger."""

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        timeout_s: float = 600.0,
        ledger: Path | None = None,
        headers: Mapping[str, str] = NO_HEADERS,
        on_progress: Callable[[str], None] = lambda line: None,
    ) -> None:
        """base_url without /v1. timeout_s: silence after which a request failed. ledger: JSON lines, appended. headers: sent
        with every request, and written down nowhere.
        """
        self._headers = headers
        self.base_url, self.model = base_url, model
        self.num_requests = 0
        self.num_failed = 0
        self.errors: Counter[str] = Counter()
        self.exchanges: dict[str, Exchange] = {}
        """By id; of repeats of an id the last."""
        self.system_fingerprint: str | None = None
        self._timeout_s, self._on_progress = timeout_s, on_progress
        self._lock = threading.Lock()
        self._failed_in_a_row = 0
        if ledger is not None:
            ledger.parent.mkdir(parents=True, exist_ok=True)
        self._ledger = None if ledger is None else ledger.open("a", encoding="utf-8")

    def __enter__(self) -> Asker:
        return self

    def __exit__(self, *error: object) -> None:
        if self._ledger is not None:
            self._ledger.close()

    def ask(self, asks: Sequence[Ask], concurrency: int, *, in_waves: bool = False, slim: Slim | None = None) -> list[Exchange]:
        """What came of every request, in their order; `concurrency` in flight, a new one as soon as one ends.

        in_waves: all of a wave are sent at once and in order, and the next wave waits for the last reply of this one, so
        that `slot` is the place in the wave. slim: what is kept of an exchange, of scans of thousands. MeasureError if the
        server is gone.
        """
        if in_waves and len(asks) > concurrency:
            waves = [asks[first : first + concurrency] for first in range(0, len(asks), concurrency)]
            return [exchange for wave in waves for exchange in self._together(wave, concurrency, slim)]
        return self._together(asks, concurrency, slim)

    def _together(self, asks: Sequence[Ask], concurrency: int, slim: Slim | None) -> list[Exchange]:
        is_wave = len(asks) <= concurrency
        free = list(range(concurrency))
        told = time.monotonic()

        def one(number: int, ask: Ask) -> Exchange:
            if is_wave:
                return self._exchange(ask, number, concurrency, slim)
            with self._lock:
                slot = heapq.heappop(free)
            try:
                return self._exchange(ask, slot, concurrency, slim)
            finally:
                with self._lock:
                    heapq.heappush(free, slot)

        with ThreadPoolExecutor(max_workers=min(concurrency, max(len(asks), 1))) as pool:
            jobs = []
            for number, ask in enumerate(asks):
                jobs.append(pool.submit(one, number, ask))
                if number < concurrency:
                    time.sleep(STAGGER_S)
            found = []
            try:
                for number, job in enumerate(jobs):
                    found.append(job.result())
                    if time.monotonic() - told > 10:
                        told = time.monotonic()
                        self._on_progress(f"{asks[0].id.partition('/')[0]}: {number + 1}/{len(asks)}")
            except BaseException:
                for job in jobs:
                    job.cancel()
                raise
        return found

    def _exchange(self, ask: Ask, slot: int, concurrency: int, slim: Slim | None) -> Exchange:
        exchange = self.send(ask, slot, concurrency)
        if slim is not None:
            exchange = slim(exchange)
        with self._lock:
            self.num_requests += 1
            self.exchanges[ask.id] = exchange
            self.system_fingerprint = self.system_fingerprint or exchange.system_fingerprint
            if exchange.status in ("refused", "failed"):
                self.num_failed += 1
                status = exchange.reply.http_status
                self.errors[f"HTTP {status}" if status else str(exchange.reply.error).partition(":")[0]] += 1
            is_lost = exchange.status == "failed" and exchange.reply.http_status is None
            self._failed_in_a_row = self._failed_in_a_row + 1 if is_lost else 0
            is_gone = self._failed_in_a_row >= GIVE_UP_AFTER
            if self._ledger is not None:
                self._ledger.write(json.dumps(exchange.for_ledger(), ensure_ascii=False) + "\n")
        if is_gone:
            raise MeasureError(
                f"{self.base_url}: {GIVE_UP_AFTER} requests in a row had no reply ({exchange.reply.error}); is it running?"
            )
        return exchange

    def send(self, ask: Ask, slot: int = 0, concurrency: int = 1) -> Exchange:
        """One request, now, from this thread; not counted and not kept."""
        body = json.dumps({"model": self.model, **ask.body}, ensure_ascii=False).encode()
        if ask.abort_after is not None:
            return self._hang_up(ask, slot, concurrency)
        started = time.monotonic()
        connection = Connection(self.base_url, total_s=self._timeout_s, headers=self._headers)
        try:
            response = connection.post(ask.path, body)
        except TransportError as error:
            return Exchange(ask, slot, concurrency, "failed", Reply("failed", error=str(error)))
        finally:
            connection.close()
        latency_s = time.monotonic() - started
        if response.status != 200:
            kind: Literal["refused", "failed"] = "failed" if response.status >= 500 else "refused"
            said = f"HTTP {response.status}: {response.message}"
            return Exchange(ask, slot, concurrency, kind, Reply(kind, error=said, http_status=response.status))
        try:
            data = json.loads(response.body)
            request = Request("probe", ask.id, 0, ask.path, ask.body, ask.logprobs_from)
            reply = read_reply(data, request, latency_s)
            rows = read_rows(data["choices"][0])
        except (json.JSONDecodeError, UnicodeDecodeError, LookupError, TypeError, AttributeError) as error:
            what = f"reply is not what the API promises: {type(error).__name__}: {error}"
            return Exchange(ask, slot, concurrency, "failed", Reply("failed", error=what, http_status=200))
        return Exchange(
            ask, slot, concurrency, "answered", reply, rows,
            data["choices"][0].get("routed_experts"), fingerprint_in(data),
        )  # fmt: skip

    def _hang_up(self, ask: Ask, slot: int, concurrency: int) -> Exchange:
        """Read a few chunks of a streamed reply, then close the connection: what an impatient user does."""
        parts = urlsplit(self.base_url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=self._timeout_s)
        body = json.dumps({"model": self.model, **ask.body, "stream": True}, ensure_ascii=False).encode()
        num_chunks = 0
        try:
            headers = {"Content-Type": "application/json", **self._headers}
            connection.request("POST", parts.path.rstrip("/") + ask.path, body, headers)
            response = connection.getresponse()
            while num_chunks < (ask.abort_after or 0) and (line := response.readline()):
                num_chunks += line.startswith(b"data:")
        except (OSError, http.client.HTTPException) as error:
            return Exchange(ask, slot, concurrency, "failed", Reply("failed", error=f"{type(error).__name__}: {shown(error)}"))
        finally:
            connection.close()
        reply = Reply("failed", error=f"hung up after {num_chunks} chunks", output_tokens=num_chunks)
        return Exchange(ask, slot, concurrency, "aborted", reply)


def read_rows(choice: dict[str, Any]) -> tuple[TokenRow, ...]:
    """Generated log-probabilities of a choice, of the chat or the completions API; empty if there are none."""
    told = choice.get("logprobs")
    if not told:
        return ()
    if told.get("content") is not None:
        return tuple(
            _row(row["token"], row["logprob"], ((other["token"], other["logprob"]) for other in row["top_logprobs"]))
            for row in told["content"]
        )
    tops = told.get("top_logprobs") or [None] * len(told["tokens"])
    return tuple(
        _row(token, logprob, (top or {}).items())
        for token, logprob, top in zip(told["tokens"], told["token_logprobs"], tops, strict=True)
    )


def _row(token: str, logprob: float | None, top: Iterable[tuple[str, float | None]]) -> TokenRow:
    """The likeliest best first; what is not a number comes last. Equal ones keep the server's order."""
    found = [(_token(other), _number(value)) for other, value in top]
    ranked = sorted(found, key=lambda one: -one[1] if one[1] == one[1] else float("inf"))
    return TokenRow(_token(token), _number(logprob), tuple(ranked))


def _token(told: str) -> Token:
    """`token_id:42` -> 42 (vLLM's return_tokens_as_token_ids)."""
    return int(told.removeprefix("token_id:")) if told.startswith("token_id:") else told


def _number(value: float | None) -> float:
    return float("nan") if value is None else float(value)
