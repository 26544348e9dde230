"""One request to one server: how long it may take, how large its reply may be, what came, and whether to ask again."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from assay.foreign_text import shown
from assay_evaluate.client.journal import Reply, Request
from assay_evaluate.client.replies import read_reply
from assay_evaluate.transport.connection import MOST_REPLY_BYTES, Connection, HttpReply
from assay_evaluate.transport.errors import TransportError, UnusableReply
from assay_evaluate.transport.foreign_json import NotJson

COME_LATER = frozenset({408, 409, 425, 429})
"""HTTP statuses with which a server puts a request off."""
TRY_AGAIN = (COME_LATER | frozenset(range(500, 600))) - {501}
"""HTTP statuses that say nothing about the request itself. 501 does: the server has no such thing."""
LONGEST_BACKOFF_S = 30.0
LONGEST_RETRY_AFTER_S = 120.0
"""However long the server wants to be left alone: it may name a day, or a mistake."""
REQUEST_S = 3600.0
"""Time of a reply that is as short as can be, and of silence within one, where nobody says otherwise."""
SLOWEST_S_PER_TOKEN = 0.2
"""Added to a request's time for each token that it may generate. A reply is made before its first byte is sent."""
BYTES_PER_LOGPROB = 256
"""Room in a reply for one log-probability: its token, as text, as bytes and as JSON names them."""


@dataclass(frozen=True, slots=True)
class Received:
    """What came of one request. `data`: the JSON of a reply that could be read; None: there is none."""

    reply: Reply
    data: dict[str, Any] | None = None
    may_help: bool = False
    """Whether the same request may be answered another time."""
    retry_after_s: float | None = None


class Sender:
    """Puts requests for one model on connections. For any number of threads: it keeps nothing of a request."""

    def __init__(self, model: str, timeout_s: float, headers: Mapping[str, str]) -> None:
        """timeout_s: of a reply that is as short as can be, and of silence within one."""
        self._model_json = json.dumps(model)
        self._timeout_s = timeout_s
        self._headers = headers

    def connect(self, url: str) -> Connection:
        """A connection for one thread. Nothing is sent yet."""
        return Connection(url, total_s=self._timeout_s, silence_s=self._timeout_s, headers=self._headers)

    def send(self, connection: Connection, request: Request) -> Received:
        """One request and its reply, once. Nothing that a server does is an error."""
        body = self.body_of(request.body_json)
        total_s, most_bytes = self.total_s(request.body), most_reply_bytes(request.body)
        started = time.monotonic()
        try:
            response = connection.post(request.path, body, total_s=total_s, most_bytes=most_bytes)
        except TransportError as error:
            reply = Reply("failed", error=str(error), latency_s=time.monotonic() - started)
            return Received(reply, may_help=not isinstance(error, UnusableReply))
        return received_of(response, request, time.monotonic() - started)

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


def received_of(response: HttpReply, request: Request, latency_s: float) -> Received:
    """What a reply means for the request that it answers."""
    status = response.status
    if status != 200:
        may_help = status in TRY_AGAIN
        said = f"HTTP {status}: {response.message}"
        reply = Reply("failed" if may_help else "refused", error=said, http_status=status, latency_s=latency_s)
        return Received(reply, None, may_help, response.retry_after_s)
    try:
        data = response.json()
        return Received(read_reply(data, request, latency_s), data)
    except (NotJson, LookupError, TypeError, ValueError, AttributeError) as error:
        what = f"reply is not what the API promises: {type(error).__name__}: {shown(error, 400)}"
        return Received(Reply("failed", error=what, http_status=status, latency_s=latency_s), may_help=True)
