"""One request that is numbered and kept whole, what came of it, and the file they are written to.

For those who ask again what was asked before: the journal would answer it from its file. A ledger (JSON lines) of exchanges
makes any event reproducible.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

from assay_evaluate.client.journal import Reply, Request
from assay_evaluate.transport.foreign_json import fingerprint_in, text_of

Token = int | str
"""An id where the server tells ids, else the token's text."""
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
    """Exchanges as JSON lines, appended as they come. For several threads. The authorization of a request is in none."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        # A lone surrogate, in a prompt say, is no UTF-8; escaped as `\ud800` it is what JSON writes for it.
        self._file = path.open("a", encoding="utf-8", errors="backslashreplace")

    def close(self) -> None:
        self._file.close()

    def write(self, exchange: Exchange) -> None:
        line = json.dumps(exchange.for_ledger(), ensure_ascii=False)
        with self._lock:
            self._file.write(line + "\n")


def exchange_of(ask: Ask, slot: int, concurrency: int, reply: Reply, data: dict[str, Any] | None) -> Exchange:
    """An exchange with what is read of a reply beyond `Reply`. data: the reply's JSON; None: it could not be read."""
    if data is None:
        return Exchange(ask, slot, concurrency, reply.status, reply)
    try:
        choice = data["choices"][0]
        experts = text_of(choice.get("routed_experts"))
        return Exchange(ask, slot, concurrency, "answered", reply, read_rows(choice), experts, fingerprint_in(data))
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        what = f"reply is not what the API promises: {type(error).__name__}: {error}"
        return Exchange(ask, slot, concurrency, "failed", Reply("failed", error=what, http_status=200))


# ------------------------------------------------------------------------------------------------ generated log-probabilities
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
    text = text_of(told) or ""
    return int(text.removeprefix("token_id:")) if text.startswith("token_id:") else text


def _number(value: float | None) -> float:
    return float("nan") if value is None else float(value)
