"""One request that is numbered and kept whole, what came of it, and the file they are written to.

For those who ask again what was asked before: the journal would answer it from its file. A ledger (JSON lines) of exchanges
makes any event reproducible.
"""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from assay.atomic_files import naming
from assay_evaluate.client.generated_logprobs import TokenRow
from assay_evaluate.client.journal import Reply, Request
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

    def for_ledger(self) -> dict[str, Any]:
        """What a person needs to send it again, and what came back."""
        return {
            "id": self.id, "path": self.ask.path, "body": self.ask.body, "abort_after": self.ask.abort_after,
            "slot": self.slot, "concurrency": self.concurrency, "status": self.status, "error": self.reply.error,
            "finish_reason": self.reply.finish_reason, "text": self.reply.text, "reasoning": self.reply.reasoning,
            "token_ids": self.reply.token_ids, "latency_s": self.reply.latency_s,
        }  # fmt: skip


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
        # A lone surrogate, in a prompt say, is no UTF-8; escaped as `\ud800` it is what JSON writes for it.
        line = (json.dumps(exchange.for_ledger(), ensure_ascii=False) + "\n").encode(errors="backslashreplace")
        with self._lock, naming(self._path):
            while line:  # half of it is written where a disk is almost full
                line = line[self._file.write(line) :]


def exchange_of(ask: Ask, slot: int, concurrency: int, received: Received) -> Exchange:
    """What came of a request, with its place among the others."""
    return Exchange(
        ask, slot, concurrency, received.reply.status, received.reply, received.rows, received.routed_experts,
        received.system_fingerprint, received.is_of_another, received.is_broken_off,
    )  # fmt: skip
