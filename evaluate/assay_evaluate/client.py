"""Puts requests to an OpenAI-compatible server, several at a time, through the journal.

What the journal holds is not asked again. Connection errors, 429 and 5xx are tried again with back-off and, if that does not
help while the server lives, recorded as failed: infrastructure, never a wrong answer. A dead server stops everything with
the tail of its log. No `stop` strings are ever sent: they fire inside thinking.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Protocol, Self

import httpx
import numpy as np

from assay.errors import MeasureError, ServeError
from assay_evaluate.journal import Identity, Journal, Reply, Request, TokenLogprobs
from assay_evaluate.truncation import truncated_by

TRY_AGAIN = frozenset({408, 409, 425, 429, *range(500, 600)})
"""HTTP statuses that say nothing about the request itself."""
MISCONFIGURED = frozenset({401, 403, 404, 405})
"""HTTP statuses that every other request would get as well."""
PROGRESS_EVERY_S = 10.0


class NotMeasured(MeasureError):
    """The server or the model cannot give what one measurement needs: recorded with the reason, the others go on."""


class Endpoint(Protocol):
    """What the client needs of a server (assay_evaluate.serve.Server is one)."""

    @property
    def base_url(self) -> str: ...
    @property
    def model(self) -> str: ...
    @property
    def max_model_len(self) -> int | None: ...
    def check_alive(self) -> None:
        """Raise ServeError, with the tail of the log, if the server is gone."""


class Client:
    """Asks one server on behalf of one checkpoint. Use as a context manager: it closes its connections."""

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
        """concurrency: requests in flight. newest_first: send in reverse order (another batch composition)."""
        self.endpoint = endpoint
        self.journal = journal
        self.who = who
        self.num_sent = 0
        self._concurrency = concurrency
        self._newest_first = newest_first
        self._max_attempts = max_attempts
        self._backoff_s = backoff_s
        self._on_progress = on_progress
        self._stop = threading.Event()
        self._lock = threading.Lock()
        limits = httpx.Limits(max_connections=concurrency + 1, max_keepalive_connections=concurrency + 1)
        timeout = httpx.Timeout(timeout_s, connect=10.0)
        # trust_env=False: a proxy setting of the machine must not come between us and the loopback.
        self._http = httpx.Client(base_url=root_url(endpoint), timeout=timeout, limits=limits, trust_env=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._http.close()

    def ask(self, requests: Sequence[Request]) -> list[Reply]:
        """Replies in the order of `requests`, from the journal where it has them, else from the server.

        Raises MeasureError if the server is gone or refuses everything; replies that came before are in the journal.
        """
        keys = [request.key(self.who) for request in requests]
        replies = {key: reply for key in keys if (reply := self.journal.find(key)) is not None}
        missing = {key: request for key, request in zip(keys, requests, strict=True) if key not in replies}
        if missing:
            order = list(missing.items())
            self._ask_server(order[::-1] if self._newest_first else order, replies, len(requests))
        return [replies[key] for key in keys]

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        """A question about the server itself: sent once, not journaled. MeasureError if it cannot be reached."""
        try:
            return self._http.post(path, json={"model": self.endpoint.model, **body})
        except httpx.TransportError as error:
            self._check_alive()
            raise MeasureError(f"{self._http.base_url}: cannot be reached: {type(error).__name__}: {error}") from None

    def _ask_server(self, missing: list[tuple[str, Request]], replies: dict[str, Reply], num_wanted: int) -> None:
        self._check_alive()
        self._stop.clear()
        queue = iter(missing)
        started = last_line = time.monotonic()
        num_done = num_wanted - len(missing)

        def work() -> None:
            nonlocal last_line, num_done
            for key, request in self._take(queue):
                reply = self._put(key, request)
                with self._lock:
                    replies[key] = reply
                    num_done += 1
                    now = time.monotonic()
                    line = f"{request.task}: {num_done}/{num_wanted}, {now - started:.0f} s"
                    due = now - last_line >= PROGRESS_EVERY_S
                    last_line = now if due else last_line
                if due:
                    self._on_progress(line)

        with ThreadPoolExecutor(min(self._concurrency, len(missing)), "assay-client") as pool:
            futures = [pool.submit(work) for _ in range(min(self._concurrency, len(missing)))]
            try:
                for future in futures:
                    future.result()
            finally:
                self._stop.set()  # after an error or Ctrl-C the others end with the request they have in flight
        task = missing[0][1].task
        self._on_progress(f"{task}: all {num_wanted}, {time.monotonic() - started:.0f} s")

    def _take(self, queue: Iterator[tuple[str, Request]]) -> Iterator[tuple[str, Request]]:
        while not self._stop.is_set():
            with self._lock:
                taken = next(queue, None)
            if taken is None:
                return
            yield taken

    def _put(self, key: str, request: Request) -> Reply:
        """Send one request until it is answered, refused, or out of attempts; journal before and after."""
        reply = Reply(status="failed", error="not sent")
        for attempt in range(self._max_attempts):
            if attempt:
                self._stop.wait(min(30.0, self._backoff_s * 2 ** (attempt - 1)))
                if self._stop.is_set():
                    break
            self.journal.write_request(key, request, self.who)
            with self._lock:
                self.num_sent += 1
            reply = self._send(request)
            if reply.status != "failed":
                break
            self._check_alive()
        self.journal.write_reply(key, reply)
        return reply

    def _send(self, request: Request) -> Reply:
        started = time.monotonic()
        try:
            response = self._http.post(request.path, json={"model": self.endpoint.model, **request.body})
        except httpx.TransportError as error:
            return Reply(status="failed", error=f"{type(error).__name__}: {error}", latency_s=time.monotonic() - started)
        latency_s = time.monotonic() - started
        status = response.status_code
        if status == 200:
            try:
                return read_reply(response.json(), request, latency_s)
            except (json.JSONDecodeError, UnicodeDecodeError, LookupError, TypeError, AttributeError) as error:
                what = f"reply is not what the API promises: {type(error).__name__}: {error}"
                return Reply(status="failed", error=what, http_status=status, latency_s=latency_s)
        message = error_message(response)
        if status in MISCONFIGURED:
            raise MeasureError(f"{self._http.base_url}{request.path.lstrip('/')}: HTTP {status}: {message}")
        kind: Any = "failed" if status in TRY_AGAIN else "refused"
        return Reply(status=kind, error=f"HTTP {status}: {message}", http_status=status, latency_s=latency_s)

    def _check_alive(self) -> None:
        try:
            self.endpoint.check_alive()
        except ServeError as error:
            raise MeasureError(f"the server is gone, what was answered is kept, run again to go on: {error}") from None


def root_url(endpoint: Endpoint) -> str:
    """The server's address without a trailing /v1: `/tokenize` is beside the versioned API, not under it."""
    return endpoint.base_url.rstrip("/").removesuffix("/v1")


def error_message(response: httpx.Response) -> str:
    """The server's own words about an error, on one line of at most 300 characters."""
    try:
        data = response.json()
        text = str(data.get("error", data).get("message", data))
    except (json.JSONDecodeError, UnicodeDecodeError, AttributeError):
        text = response.text
    return " ".join(text.split())[:300]


def read_reply(data: dict[str, Any], request: Request, latency_s: float) -> Reply:
    """An API response as a Reply. LookupError or TypeError if it is not shaped as the API promises."""
    choice = data["choices"][0]
    message = choice.get("message", {"content": choice.get("text")})
    usage = data.get("usage") or {}
    prompt_ids = data.get("prompt_token_ids") or choice.get("prompt_token_ids")
    token_ids = choice.get("token_ids")
    logprobs = choice.get("prompt_logprobs")
    return Reply(
        status="answered",
        text=message.get("content") or "",
        reasoning=message.get("reasoning") or message.get("reasoning_content"),
        has_tool_calls=bool(message.get("tool_calls")),
        tool_calls=tuple(message["tool_calls"]) if message.get("tool_calls") else None,
        finish_reason=choice.get("finish_reason"),
        prompt_tokens=usage.get("prompt_tokens"),
        output_tokens=usage.get("completion_tokens"),
        thinking_tokens=(usage.get("completion_tokens_details") or {}).get("reasoning_tokens"),
        # A scoring request carries its own ids; keeping them twice would only swell the journal.
        prompt_token_ids=None if prompt_ids is None or logprobs is not None else tuple(prompt_ids),
        token_ids=None if token_ids is None else tuple(token_ids),
        speculation=_read_speculation(data),
        http_status=200,
        latency_s=latency_s,
        logprobs=None if logprobs is None else _read_logprobs(logprobs, request),
    )


def _read_speculation(data: dict[str, Any]) -> dict[str, int] | None:
    """vLLM's `--per-request-spec-decode-metrics`, when on."""
    stats = (data.get("metrics") or {}).get("speculative_decoding")
    if not stats:
        return None
    return {
        "num_drafts": stats["num_spec_steps"],
        "num_draft_tokens": stats["num_draft_tokens"],
        "num_accepted_tokens": stats["num_accepted_draft_tokens"],
    }


def _read_logprobs(rows: list[dict[str, Any] | None], request: Request) -> TokenLogprobs:
    """vLLM's `prompt_logprobs`: per position, id -> log-probability of the k most likely and of the token that stands there."""
    top_k, first = request.body["prompt_logprobs"], request.logprobs_from
    tokens_P = np.asarray(request.body["prompt"][first:], np.int32)
    p = len(tokens_P)
    ids_PK = np.full((p, top_k), -1, np.int32)
    logprobs_PK = np.full((p, top_k), np.nan, np.float32)
    chosen_P = np.full(p, np.nan, np.float32)
    if len(rows) != len(request.body["prompt"]):
        raise LookupError(f"{len(rows)} rows of prompt_logprobs for {len(request.body['prompt'])} tokens")
    for row, entries in enumerate(rows[first:]):
        if entries is None:
            continue  # nothing predicts the first token
        standing = str(tokens_P[row])
        chosen_P[row] = entries[standing]["logprob"]
        ranked = [
            (-entry["logprob"], entry.get("rank") or 0, int(token_id))
            for token_id, entry in entries.items()
            if len(entries) <= top_k or token_id != standing  # one entry too many: the token is outside the top k
        ]
        ranked.sort()
        ids_PK[row, : len(ranked)] = [token_id for _, _, token_id in ranked]
        logprobs_PK[row, : len(ranked)] = [-negative for negative, _, _ in ranked]
    return TokenLogprobs(tokens_P, ids_PK, logprobs_PK, chosen_P)


def is_truncated(reply: Reply, *, max_tokens: int, max_model_len: int | None, has_reasoning_parser: bool) -> bool:
    """Whether the reply was cut off; `truncation.truncated_by` says by what."""
    found = truncated_by(
        reply, max_tokens=max_tokens, max_model_len=max_model_len, has_reasoning_parser=has_reasoning_parser
    )  # fmt: skip
    return found is not None
