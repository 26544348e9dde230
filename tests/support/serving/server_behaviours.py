"""What a server may do to one request, and what has to become of it: the table of test_server_behaviours.py.

`answered`: the reply counts. `again`: a failed request, asked again. `once`: a failed request, not worth asking again now; a
rerun asks it. `refused`: refused for good, with the server's reason.
"""

from __future__ import annotations

import gzip
import json
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from raw_server import Part, RawServer, endless, trickle

Outcome = Literal["answered", "again", "once", "refused"]
OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
BAD = "bad"
"""The prompt of the request to which a server misbehaves."""
UNPROMISED = "reply is not what the API promises: "


@dataclass(frozen=True)
class Behaviour:
    """`why`: what the error begins with; of an answered one its text."""

    name: str
    parts: tuple[Part, ...]
    outcome: Outcome
    why: str


class MisbehavingServer(RawServer):
    """Answers every prompt with itself, but for `BAD`, until `is_healed`. Counts what it is asked."""

    def __init__(self, behaviour: Behaviour) -> None:
        super().__init__()
        self.behaviour, self.is_healed = behaviour, False
        self.asked: list[str] = []

    def parts_for(self, head: bytes, body: bytes) -> Sequence[Part]:
        prompt = json.loads(body)["prompt"]
        self.asked.append(prompt)
        if prompt == BAD and not self.is_healed:
            return self.behaviour.parts
        return (http(completion(prompt)),)


def http(body: str | bytes, status: str = "200 OK", *headers: str) -> bytes:
    """A whole reply."""
    content = body if isinstance(body, bytes) else body.encode()
    lines = (f"HTTP/1.1 {status}", f"Content-Length: {len(content)}", "Connection: close", *headers, "", "")
    return "\r\n".join(lines).encode() + content


def completion(text: Any = "four", **more: Any) -> str:
    """A reply of /v1/completions."""
    return json.dumps({"choices": [{"text": text, "finish_reason": "stop"}], **more})


def choice(**fields: Any) -> str:
    return json.dumps({"choices": [fields]})


def reset(client: socket.socket) -> None:
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


def silent(client: socket.socket) -> None:
    client.recv(1)


def _rows() -> list[Behaviour]:
    found: list[Behaviour] = []

    def add(outcome: Outcome, name: str, why: str, *parts: Part) -> None:
        found.append(Behaviour(name, parts, outcome, why))

    def status(outcome: Outcome, line: str, *headers: str) -> None:
        add(outcome, f"status {line}", f"HTTP {line[:3]}: ", http("{}", line, *headers))

    def body(outcome: Outcome, name: str, why: str, content: str | bytes) -> None:
        add(outcome, name, why, http(content))

    # ---------------------------------------------------------------------------------------- statuses
    for line in ("301 Moved", "302 Found", "307 Temporary Redirect", "308 Permanent Redirect"):
        status("again", line, "Location: https://elsewhere/v1")
    for line in ("202 Accepted", "204 No Content", "206 Partial Content", "304 Not Modified"):
        add("again", f"status {line}", f"HTTP {line[:3]}: ", http("", line))
    for line in ("401 Unauthorized", "403 Forbidden", "404 Not Found", "405 Method Not Allowed"):
        status("again", line)
    for line in ("408 Timeout", "429 Too Many", "500 Internal", "502 Bad Gateway", "503 Unavailable", "504 Late", "599 Odd"):
        status("again", line)
    for line in ("400 Bad Request", "413 Too Large", "422 Unprocessable", "451 Law", "501 Not Implemented"):
        status("refused", line)
    add("answered", "100 Continue first", "four", b"HTTP/1.1 100 Continue\r\n\r\n" + http(completion()))
    add("again", "a status of four digits", "BadStatusLine", http(completion(), "2000 OK"))
    add("again", "status 999", "HTTP 999: ", http(completion(), "999 ?"))

    # ---------------------------------------------------------------------------------------- no HTTP, no end
    add("again", "SSH", "BadStatusLine", b"SSH-2.0-OpenSSH_9.2\r\n")
    add("again", "TLS", "BadStatusLine", b"\x15\x03\x01\x00\x02\x02\x50\r\n")
    add("again", "hangs up", "RemoteDisconnected")
    add("again", "resets", "ConnectionResetError", reset)
    add("again", "resets in the middle", "ConnectionResetError", OK + b"Content-Length: 9\r\n\r\n{", reset)
    add("again", "silence", "TimeoutError: no reply within 0.4 s", silent)
    late = "TimeoutError: the reply was not complete"
    add("again", "a body in drops", late, OK + b"Content-Length: 999\r\n\r\n", trickle(b" ", 0.02))
    add("again", "headers in drops", late, OK, trickle(b"X: y\r\n", 0.02))
    add("again", "chunks in drops", late, CHUNKED, trickle(b"1\r\nx\r\n", 0.02))
    add("once", "a body without end", "TooLarge", OK + b"\r\n", endless(b" " * 2**20))
    add("once", "chunks without end", "TooLarge", CHUNKED, endless(b"80000\r\n" + b" " * 0x80000 + b"\r\n"))
    add("once", "trailers without end", "TooLarge", CHUNKED + b"0\r\n", endless(b"X: y\r\n" * 99_999))
    add("once", "100 Continue without end", "TooLarge", endless(b"HTTP/1.1 100 Continue\r\n\r\n" * 9_999))
    add("again", "headers without end", "HTTPException: got more than 100 headers", OK, endless(b"X: y\r\n"))
    add("again", "a header without end", "LineTooLong", OK + b"X: ", endless(b"y" * 4096))

    # ---------------------------------------------------------------------------------------- lengths that lie
    whole = completion().encode()
    cut = OK + b"Content-Length: %d\r\n\r\n"
    add("again", "less than announced", "IncompleteRead", cut % (len(whole) + 9), whole)
    add("again", "more than announced", UNPROMISED + "NotJson", cut % (len(whole) - 9), whole)
    add("once", "length 1e15", "TooLarge", cut % 10**15, whole)
    add("once", "length of 20 digits", "TooLarge", cut % (10**20 - 1), whole)
    add("answered", "length -1", "four", cut % -1, whole)
    add("answered", "length that is no number", "four", OK + b"Content-Length: many\r\n\r\n", whole)
    add("answered", "no length, then the end", "four", OK + b"\r\n", whole)
    add("answered", "chunks", "four", CHUNKED, b"%x\r\n%s\r\n0\r\n\r\n" % (len(whole), whole))
    add("again", "a chunk larger than what comes", "IncompleteRead", CHUNKED, b"ffffffffffff\r\n{}")
    add("again", "a chunk of -1", "IncompleteRead", CHUNKED, b"-1\r\n{}")
    add("again", "a chunk of no number", "IncompleteRead", CHUNKED, b"zz\r\n{}")
    add("once", "gzip that nobody asked for", "Compressed", http(gzip.compress(whole), "200 OK", "Content-Encoding: gzip"))

    # ---------------------------------------------------------------------------------------- what is no JSON
    body("again", "an empty body", UNPROMISED + "NotJson", "")
    body("again", "a page to sign in", UNPROMISED + "NotJson", "<!DOCTYPE html><p>Sign in")
    body("again", "JSON nested without end", UNPROMISED + "NotJson: no readable JSON", "[" * 100_000 + "]" * 100_000)
    body("again", "an integer of 5,000 digits", UNPROMISED + "NotJson", "9" * 5000)
    body("again", "no UTF-8", UNPROMISED + "NotJson", completion().encode().replace(b"four", b"\xff\xfe"))
    body("again", "NUL bytes", UNPROMISED + "NotJson", b"\0" * 64)
    body("again", "two values", UNPROMISED + "NotJson", completion() + completion())
    body("again", "a stream", UNPROMISED + "NotJson", "data: " + completion() + "\n\ndata: [DONE]\n\n")
    body("answered", "UTF-8 with a mark", "four", b"\xef\xbb\xbf" + whole)
    body("answered", "UTF-16", "four", completion().encode("utf-16"))

    # ---------------------------------------------------------------------------------------- JSON of another shape
    for name, content in (
        ("null", "null"), ("a list", "[]"), ("a number", "5"), ("no choices", "{}"),
        ("choices that are null", '{"choices": null}'),
        ("choices that are empty", '{"choices": []}'), ("a choice that is a number", '{"choices": [5]}'),
        ("text that is a number", completion(5)), ("text that is a list", completion(["four"])),
        ("a message that is null", choice(message=None)), ("a message that is text", choice(message="four")),
        ("an empty message", choice(message={})), ("an empty choice", choice()),
        ("content that is a number", choice(message={"content": 5})),
        ("content that is an object", choice(message={"content": {"text": "four"}})),
        ("reasoning that is a list", choice(message={"content": "", "reasoning": []}, finish_reason=["stop"])),
        ("tool calls that are text", choice(message={"content": "", "tool_calls": "f()"})),
        ("tool calls that are text in a list", choice(message={"content": "", "tool_calls": ["f()"]})),
        ("finish_reason that is a number", choice(text="four", finish_reason=5)),
        ("token ids that are text", choice(text="four", token_ids=["5"])),
        ("token ids without bound", choice(text="four", token_ids=[2**70])),
        ("usage that is a list", completion(usage=[5])),
        ("counts that are text", completion(usage={"prompt_tokens": "many"})),
        ("counts below 0", completion(usage={"completion_tokens": -1})),
        ("counts of 2^70", completion(usage={"completion_tokens": 2**70})),
        ("counts that are infinite", completion(usage={"completion_tokens": float("inf")})),
        ("speculation that is a list", completion(metrics={"speculative_decoding": [1]})),
        ("a log-probability that overflows", choice(text="four", logprobs={
            "tokens": ["a"], "token_logprobs": [-(10**400)], "top_logprobs": [{}]})),
    ):  # fmt: skip
        body("again", name, UNPROMISED, content)
    body("again", "an error with status 200", "HTTP 200 with an error in it: no", '{"error": {"message": "no"}}')
    full = '{"error": {"message": "prompt is too long", "code": 400}}'
    body("refused", "a refusal with status 200", "HTTP 200 with an error in it (400): prompt is too long", full)
    for word in ("abort", "error", "content_filter", "\ud800"):
        body("again", f"ended by {word!r}", "HTTP 200 with finish_reason", choice(text="fo", finish_reason=word))
    body("answered", "lone surrogates", "a\ufffdb", completion("a\ud800b"))
    body("answered", "fields that nobody knows", "four", completion(extra={"deep": [[[]]]}))
    body("answered", "a message of nothing but its end", "", choice(message={"content": None}, finish_reason="stop"))
    return found


BEHAVIOURS = _rows()
