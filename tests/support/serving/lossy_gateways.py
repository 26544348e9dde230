"""Gateways that lose, cut or change some replies, as functions of a chat reply, and as a proxy in front of a real server.

The kinds are those of public reports on gateways, proxies, filters and caches.
"""

from __future__ import annotations

import copy
import http.client
import itertools
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Body = dict[str, Any]
Change = Callable[[Body, Body], bool]
"""(request, reply, changed in place) -> whether it was changed."""


def message_of(reply: Body) -> Body:
    """Of the chat API."""
    message: Body = reply["choices"][0]["message"]
    return message


def edited(edit: Callable[[str], str]) -> Change:
    """The text alone."""

    def change(body: Body, reply: Body) -> bool:
        before = message_of(reply)["content"]
        message_of(reply)["content"] = edit(before)
        return bool(message_of(reply)["content"] != before)

    return change


def in_the_middle(edit: Callable[[str], str]) -> Change:
    return edited(lambda text: text[: len(text) // 2] + edit(text[len(text) // 2 :]))


Decode = Callable[[list[int]], str]


def ends_early(finish: str, decode: Decode | None = None) -> Change:
    """Text, ids, log-probabilities and count end after two thirds. decode: ids to text; None: a letter each."""

    def change(body: Body, reply: Body) -> bool:
        choice = reply["choices"][0]
        count = reply["usage"]["completion_tokens"] * 2 // 3
        if count < 8:
            return False
        if "token_ids" in choice:
            choice["token_ids"] = choice["token_ids"][:count]
        message_of(reply)["content"] = decode(choice["token_ids"]) if decode else message_of(reply)["content"][:count]
        reply["usage"]["completion_tokens"] = count
        if choice.get("logprobs"):
            choice["logprobs"]["content"] = choice["logprobs"]["content"][:count]
        choice["finish_reason"] = finish
        return True

    return change


def token_lost(decode: Decode | None = None) -> Change:
    """One in the middle, from text, ids, log-probabilities and count alike: nothing in the reply contradicts it."""

    def change(body: Body, reply: Body) -> bool:
        choice = reply["choices"][0]
        at = reply["usage"]["completion_tokens"] // 2
        if at < 4:
            return False
        reply["usage"]["completion_tokens"] -= 1
        for some in (choice.get("token_ids"), (choice.get("logprobs") or {}).get("content")):
            if some:
                del some[at]
        text = message_of(reply)["content"]
        message_of(reply)["content"] = decode(choice["token_ids"]) if decode else text[:at] + text[at + 1 :]
        return True

    return change


def finish_renamed(body: Body, reply: Body) -> bool:
    choice = reply["choices"][0]
    is_cut = choice["finish_reason"] == "length"
    choice["finish_reason"] = "stop" if is_cut else choice["finish_reason"]
    return bool(is_cut)


def more_billed(body: Body, reply: Body) -> bool:
    reply["usage"]["completion_tokens"] += 7
    return True


def rows_swapped(body: Body, reply: Body) -> bool:
    rows = (reply["choices"][0].get("logprobs") or {}).get("content")
    if not rows or len(rows) < 8:
        return False
    one, other = rows[4], rows[5]
    for name in ("logprob", "top_logprobs"):
        one[name], other[name] = other[name], one[name]
    return True


class Gateway:
    """Changes one reply of so many."""

    def __init__(self, change: Change, every: int) -> None:
        self.change, self.every, self.hits, self.due = change, every, 0, 0
        self.numbers, self.lock = itertools.count(), threading.Lock()

    def __call__(self, body: Body, answered: tuple[int, Any]) -> tuple[int, Any]:
        status, reply = answered
        is_kept = status == 200 and "messages" in body and body["max_tokens"] > 2 and not body.get("stream")
        if is_kept and "tools" not in body:
            with self.lock:
                self.due += next(self.numbers) % self.every == self.every // 2
                if self.due and self.change(body, reply):  # one that it cannot change is passed, and the next is changed
                    self.due, self.hits = self.due - 1, self.hits + 1
        return status, reply


class Swapping(Gateway):
    """Answers one request of so many with what came for the one before, prompt ids corrected."""

    def __init__(self, every: int) -> None:
        super().__init__(self.swap, every)
        self.last: Body | None = None

    def __call__(self, body: Body, answered: tuple[int, Any]) -> tuple[int, Any]:
        status, reply = super().__call__(body, answered)
        if status == 200 and "messages" in body and body["max_tokens"] > 2:
            self.last = copy.deepcopy(reply)
        return status, reply

    def swap(self, body: Body, reply: Body) -> bool:
        if self.last is None or self.last["choices"][0]["message"] == message_of(reply):
            return False
        ids = reply.get("prompt_token_ids")
        reply |= copy.deepcopy(self.last)
        if ids is not None:
            reply["prompt_token_ids"] = ids
        return True


class BreaksOff:
    """Bodies of which the last third is lost: of so many one, or the first ones alone."""

    def __init__(self, every: int, *, most: int = 10**9, announces_whole: bool = True) -> None:
        """announces_whole: the length is told as it was, and the connection ends early; else the new length is told."""
        self.every, self.most, self.announces_whole, self.hits = every, most, announces_whole, 0
        self._numbers, self._lock = itertools.count(1), threading.Lock()

    def __call__(self, payload: bytes) -> tuple[bytes, int]:
        """What is sent, and the length that is announced."""
        with self._lock:
            if next(self._numbers) % self.every or self.hits == self.most:
                return payload, len(payload)
            self.hits += 1
        sent = payload[: len(payload) * 2 // 3]
        return sent, len(payload if self.announces_whole else sent)


def kinds(decode: Decode | None = None) -> dict[str, tuple[Change, float]]:
    """What a gateway does to a reply, and to which share of them. decode: ids to text, of a real server."""
    return _KINDS | {
        "text, ids and counts end early, `stop`": (ends_early("stop", decode), 0.02),
        "text, ids and counts end early, `length`": (ends_early("length", decode), 0.02),
        "a token lost from all": (token_lost(decode), 0.02),
    }


_KINDS: dict[str, tuple[Change, float]] = {
    "last third of the text lost": (edited(lambda text: text[: len(text) * 2 // 3]), 0.02),
    "text empty": (edited(lambda text: ""), 0.02),
    "last letter lost": (edited(lambda text: text[:-1]), 0.02),
    "three letters lost": (in_the_middle(lambda text: text[3:]), 0.02),
    "eight letters twice": (in_the_middle(lambda text: text[:8] + text), 0.02),
    "a digit changed": (edited(lambda text: _next_digit(text)), 0.02),
    "a letter that looks alike": (edited(lambda text: text.replace("e", "\u0435", 1)), 0.02),
    "line ends turned to spaces": (edited(lambda text: text.replace("\n", " ")), 1.0),
    "white space at the ends cut": (edited(str.strip), 1.0),
    "full stops spelt out": (edited(lambda text: text.replace(".", "&#46;")), 1.0),
    "`length` turned to `stop`": (finish_renamed, 0.1),
    "seven tokens more billed": (more_billed, 0.02),
    "log-probabilities of two tokens exchanged": (rows_swapped, 0.02),
}


def _next_digit(text: str) -> str:
    at = next((at for at in range(len(text) - 1, -1, -1) if text[at] in "0123456789"), None)
    return text if at is None else f"{text[:at]}{(int(text[at]) + 1) % 10}{text[at + 1 :]}"


@contextmanager
def proxied(
    up: str,
    gateway: Gateway,
    asked: Callable[[Body], Body] = lambda body: body,
    breaks_off: Callable[[bytes], tuple[bytes, int]] = lambda data: (data, len(data)),
) -> Iterator[str]:
    """The address of a proxy before `up` (http://host:port).

    asked: what becomes of requests that generate; breaks_off: what is sent of a chat reply, and the length that is announced.
    """
    host = up.removeprefix("http://")

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def pass_on(self) -> None:
            raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            body = json.loads(raw) if raw else {}
            is_chat = self.path.endswith("/chat/completions")
            if is_chat and body.get("max_tokens", 0) > 2:
                body = asked(body)
                raw = json.dumps(body).encode()
            connection = http.client.HTTPConnection(host, timeout=600)
            left_out = {"host", "connection", "content-length"}
            headers = {name: value for name, value in self.headers.items() if name.lower() not in left_out}
            connection.request(self.command, self.path, raw or None, headers)
            response = connection.getresponse()
            data = response.read()
            if is_chat and response.status == 200 and not body.get("stream"):
                data = json.dumps(gateway(body, (200, json.loads(data)))[1]).encode()
            connection.close()
            sent, num_announced = breaks_off(data) if is_chat else (data, len(data))
            self.close_connection = len(sent) < num_announced
            self.send_response(response.status)
            self.send_header("Content-Type", response.getheader("Content-Type") or "application/json")
            self.send_header("Content-Length", str(num_announced))
            self.end_headers()
            self.wfile.write(sent)

        do_GET = do_POST = pass_on

        def log_message(self, format: str, *args: Any) -> None:
            """Quiet."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 256

        def handle_error(self, request: Any, client_address: Any) -> None:
            """Clients hang up."""

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
