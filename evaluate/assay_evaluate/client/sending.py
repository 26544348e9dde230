"""One request to one server: how long it may take, how large its reply may be, what came, and whether to ask again."""

from __future__ import annotations

import itertools
import json
import random
import re
import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from assay.foreign_text import one_line, shown
from assay_evaluate.client.journal import Reply, Request
from assay_evaluate.client.logprobs import TokenRow, read_rows
from assay_evaluate.client.replies import NotFinished, read_reply
from assay_evaluate.transport.connection import MOST_REPLY_BYTES, Connection, HttpReply
from assay_evaluate.transport.errors import AnothersReply, BrokenOff, TransportError, UnusableReply
from assay_evaluate.transport.foreign_json import (
    MOST_MESSAGE,
    WRONG_SHAPE,
    NotJson,
    ServerError,
    error_in,
    fingerprint_in,
    text_of,
)

COME_LATER = frozenset({408, 409, 425, 429})
"""HTTP statuses with which a server puts a request off."""
MISCONFIGURED = frozenset({301, 302, 303, 307, 308, 401, 402, 403, 404, 405})
"""HTTP statuses of a wrong address or key, or an account without credit. One by itself may be a gateway's hiccup; every request
gets it, or none."""
REFUSED = frozenset(range(400, 500)) - COME_LATER - MISCONFIGURED | {501}
"""HTTP statuses with which a server refuses a request for good."""
TRY_AGAIN = (COME_LATER | frozenset(range(500, 600))) - {501}
"""HTTP statuses of a server that is busy or unwell."""
PUT_OFF = frozenset({429, 503})
"""HTTP statuses of a server that takes no more for now: limits of rate, and of the queue (vLLM's --max-num-queued-reqs)."""
MOST_PUT_OFF = 240
"""How often one request is put off while others are answered, beyond the attempts that any request has: an hour or so."""
LONGEST_BACKOFF_S = 30.0
LONGEST_RETRY_AFTER_S = 120.0
"""However long the server wants to be left alone: it may name a day, or a mistake."""
REQUEST_S = 3600.0
"""Time of a reply that is as short as can be, and of silence within one, where nobody says otherwise."""
SLOWEST_S_PER_TOKEN = 0.2
"""Added to a request's time for each token that it may generate. A reply is made before its first byte is sent."""
BYTES_PER_LOGPROB = 256
"""Room in a reply for one log-probability: its token, as text, as bytes and as JSON names them."""


MOST_NO_ANSWER = 8
"""Replies in a row to the requests of one task that are no answers, after which it is asked no more."""
SHAPE_ATTEMPTS = 3
"""How often one request has had JSON of another shape by then: a gateway that starts, or tires, sends a page, and is waited for
as long as one request is tried; a wrong shape is there to stay."""

NoAnswer = Literal["page", "shape", "unfinished"]
"""What came with status 200: no JSON, JSON of another shape, or a reply that the server did not finish."""

OUR_ID = re.compile(r"assay-[0-9a-f]{16}-[0-9]+")
"""The id that a request is given (X-Request-Id). vLLM repeats it in the reply's own `id`."""


@dataclass(frozen=True, slots=True)
class Received:
    """What came of one request: all that leaves this boundary. Whatever the types of a server's JSON, these are as said."""

    reply: Reply
    rows: tuple[TokenRow, ...] = ()
    """Generated log-probabilities. Empty: none came."""
    routed_experts: str | None = None
    """As it came: base64 of an .npy of [tokens, layers, experts per token]."""
    system_fingerprint: str | None = None
    may_help: bool = False
    """Whether the same request may be answered another time."""
    retry_after_s: float | None = None
    is_of_another: bool = False
    """Failed: the reply that came belongs to another request."""
    no_answer: NoAnswer | None = None
    """Failed with status 200."""
    is_broken_off: bool = False
    """Failed: the reply began, and ended before all of it was there."""
    is_inside_200: bool = False
    """The refusal came with status 200: a router tells what its provider said."""


class Attempts:
    """How often one request was sent, and whether it is worth sending again.

    A time at which the server put it off, and answered others since the time before, is no attempt: there is a limit to what it
    takes at once, and the request's turn comes. What a router says with status 200 of its provider is one: quotas last.
    """

    def __init__(self, most: int, num_answered: int) -> None:
        """most: attempts. num_answered: requests that this client was answered so far."""
        self._most, self._num_answered, self._num_put_off = most, num_answered, 0
        self.num_sent = 0

    def count(self, received: Received, num_answered: int) -> None:
        """It was sent once more, and this came."""
        self.num_sent += 1
        is_refused = received.reply.http_status in PUT_OFF and not received.is_inside_200
        is_put_off = is_refused and num_answered > self._num_answered
        self._num_put_off += is_put_off and self._num_put_off < MOST_PUT_OFF
        self._num_answered = num_answered

    @property
    def num_attempts(self) -> int:
        return self.num_sent - self._num_put_off

    @property
    def are_over(self) -> bool:
        return self.num_attempts >= self._most

    @property
    def step(self) -> int:
        """By which the back-off grows."""
        return min(self.num_sent, self._most)


class UnansweredTasks:
    """Which tasks get nothing but replies that are no answers: trying all requests often helps none. For several threads."""

    def __init__(self) -> None:
        self._in_a_row: dict[str, int] = {}
        self._over: dict[str, str] = {}
        self._lock = threading.Lock()

    def reason_over(self, task: str) -> str | None:
        """Why the task is asked no more. None: it is."""
        return self._over.get(task)

    def end_row(self, task: str) -> None:
        """It was answered, or refused for good."""
        if self._in_a_row.get(task):
            self._in_a_row[task] = 0

    def count(self, task: str, received: Received, attempt: int, *, is_last: bool) -> None:
        """A request of it failed. is_last: of the attempts at it."""
        if received.no_answer is None:
            return
        with self._lock:
            in_a_row = self._in_a_row[task] = self._in_a_row.get(task, 0) + 1
            is_patient = received.no_answer != "shape" or attempt < SHAPE_ATTEMPTS
            if in_a_row >= MOST_NO_ANSWER and (is_last or not is_patient):
                reason = f"not asked: the last {in_a_row} replies to {task} were no answers: {received.reply.error}"
                self._over.setdefault(task, reason)


class Sender:
    """Puts requests for one model on connections. For any number of threads: it keeps nothing of a request."""

    def __init__(self, model: str, timeout_s: float, headers: Mapping[str, str]) -> None:
        """timeout_s: of a reply that is as short as can be, and of silence within one."""
        self._model_json = json.dumps(model)
        self._timeout_s = timeout_s
        self._headers = headers
        self._nonce, self._numbers = secrets.token_hex(8), itertools.count()

    def connect(self, url: str) -> Connection:
        """A connection for one thread. Nothing is sent yet."""
        return Connection(url, total_s=self._timeout_s, silence_s=self._timeout_s, headers=self._headers)

    def send(self, connection: Connection, request: Request) -> Received:
        """One request and its reply, once. Nothing that a server does is an error."""
        body = self.body_of(request.body_json)
        total_s, most_bytes = self.total_s(request.body), most_reply_bytes(request.body)
        request_id = f"assay-{self._nonce}-{next(self._numbers)}"
        started = time.monotonic()
        try:
            response = connection.ask(request.path, body, total_s=total_s, most_bytes=most_bytes, request_id=request_id)
        except TransportError as error:
            reply = Reply("failed", error=str(error), latency_s=time.monotonic() - started)
            may_help, is_broken_off = not isinstance(error, UnusableReply), isinstance(error, BrokenOff)
            return Received(reply, may_help=may_help, is_broken_off=is_broken_off)
        return received_of(response, request, time.monotonic() - started, request_id)

    def hang_up(self, connection: Connection, request: Request, most_events: int) -> Reply:
        """Read some events of the streamed reply, then close the connection: what an impatient user does."""
        started = time.monotonic()
        body = self.body_of(json.dumps({**request.body, "stream": True}))
        try:
            count = connection.count_events(request.path, body, most_events, total_s=self.total_s(request.body))
        except TransportError as error:
            return Reply("failed", error=str(error), latency_s=time.monotonic() - started)
        return Reply("failed", error=f"hung up after {count} chunks", output_tokens=count)

    def body_of(self, body_json: str) -> bytes:
        """A request's body with the name that the model has at this server. A lone surrogate is sent as JSON escapes it."""
        comma = "" if body_json == "{}" else ","
        return f'{{"model":{self._model_json}{comma}{body_json[1:]}'.encode(errors="backslashreplace")

    def total_s(self, body: Mapping[str, Any]) -> float:
        """How long a request may take in all: a server that dribbles must not hold it for ever, a long reply may take long."""
        sampling = body.get("sampling_params", body)
        max_tokens = sampling.get("max_tokens") or sampling.get("max_completion_tokens") or 0
        return self._timeout_s + SLOWEST_S_PER_TOKEN * max_tokens


def most_reply_bytes(body: Mapping[str, Any]) -> int:
    """Bytes that a reply may have: more than usual if log-probabilities of many tokens were asked for."""
    sampling = body.get("sampling_params", body)
    of_prompt, of_reply = sampling.get("prompt_logprobs") or 0, body.get("top_logprobs") or int(body.get("logprobs") or 0)
    if not of_prompt and not of_reply:
        return MOST_REPLY_BYTES
    prompt = body.get("token_ids") or body.get("prompt") or ()
    rows = len(prompt) * (1 + of_prompt) + (sampling.get("max_tokens") or 0) * (1 + of_reply)
    return max(MOST_REPLY_BYTES, BYTES_PER_LOGPROB * rows)


def wait_s(key: str, attempt: int, backoff_s: float, retry_after_s: float | None = None) -> float:
    """Seconds to wait after an attempt. The jitter is the request's own: no two come back at the same moment."""
    jitter = random.Random(f"{key}:{attempt}").uniform(0.5, 1.0)
    own_s = jitter * min(LONGEST_BACKOFF_S, backoff_s * 2.0 ** (attempt - 1))
    return max(own_s, min(retry_after_s or 0.0, LONGEST_RETRY_AFTER_S))


def received_of(response: HttpReply, request: Request, latency_s: float, request_id: str = "") -> Received:
    """What a reply means for the request that it answers. request_id: what the request was sent under."""
    status = response.status
    if status != 200:
        may_help = status not in REFUSED
        explanation = f"HTTP {status}: {response.message}"
        reply = Reply("failed" if may_help else "refused", error=explanation, http_status=status, latency_s=latency_s)
        return Received(reply, may_help=may_help, retry_after_s=response.retry_after_s)
    try:
        data = response.json()
        if not isinstance(data, dict):
            raise TypeError(f"{type(data).__name__} in place of an object")
        # Servers that choose ids of their own are believed.
        named = OUR_ID.search(data["id"]) if isinstance(data.get("id"), str) else None
        if named is not None and named.group() != request_id:
            raise AnothersReply(f"it answers request {named.group()}, not {request_id}")
        if (refusal := error_in(data)) is not None:
            return _refusal(refusal, latency_s, response.retry_after_s)
        choice = data["choices"][0]
        reply = read_reply(data, request, latency_s)
        if response.cache_header is not None:
            reply = replace(reply, cache_header=response.cache_header)
        return Received(reply, read_rows(choice), text_of(choice.get("routed_experts")), fingerprint_in(data))
    except NotFinished as error:
        reply = Reply("failed", error=str(error), http_status=status, latency_s=latency_s, finish_reason=shown(error.word, 40))
        return Received(reply, may_help=True, no_answer="unfinished")
    except WRONG_SHAPE as error:
        is_of_another, is_page = isinstance(error, AnothersReply), isinstance(error, NotJson)
        what = f"reply is not what the API promises: {type(error).__name__}: {shown(error, 400)}"
        if not is_of_another and not is_page:  # whose message has it
            what += f"; received {shown(' '.join(response.body[:400].decode(errors='replace').split()), 100)}"
        reply = Reply("failed", error=what, http_status=status, latency_s=latency_s)
        no_answer: NoAnswer | None = None if is_of_another else "page" if is_page else "shape"
        is_broken_off = is_page and response.body.lstrip().startswith(b"{")
        return Received(reply, may_help=True, is_of_another=is_of_another, no_answer=no_answer, is_broken_off=is_broken_off)


def _refusal(refusal: ServerError, latency_s: float, retry_after_s: float | None) -> Received:
    """An error that came with status 200, as if it had come with the status that it names."""
    may_help = refusal.status not in REFUSED
    code = "" if refusal.status is None else f" ({refusal.status})"
    words = one_line(" ".join(refusal.message[: 8 * MOST_MESSAGE].split()))[:MOST_MESSAGE]
    reply = Reply(
        "failed" if may_help else "refused", error=f"HTTP 200 with an error in it{code}: {words}",
        http_status=refusal.status or 200, latency_s=latency_s,
    )  # fmt: skip
    return Received(reply, may_help=may_help, retry_after_s=retry_after_s, is_inside_200=True)
