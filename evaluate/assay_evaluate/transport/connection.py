"""One kept-alive HTTP connection of one thread, from the standard library: every request to a server goes through here.

A worker that waits for one reply at a time needs no pool: per request this takes a sixth of the CPU time of a shared
`httpx.Client` at 64 in flight.

What the other side may do is bounded: how long connecting, silence within a reply and a whole reply take, and how many bytes it
sends. The standard library bounds single reads only, so that a reply which trickles never ends; here every read gets what is
left of the whole. Redirects are not followed, no compression is asked for or taken, and proxy settings of the machine are not
looked at: a proxy must not come between us and the loopback.
"""

from __future__ import annotations

import email.utils
import functools
import http.client
import io
import json
import re
import select
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, TypeVar
from urllib.parse import urlsplit

from assay.errors import ServeError
from assay.foreign_text import MOST_SHOWN, one_line, shown
from assay_evaluate.transport.errors import BrokenOff, TransportError, UnusableReply
from assay_evaluate.transport.foreign_json import NotJson, error_in, message_in, read_json

T = TypeVar("T")

CONNECT_S = 10.0
MOST_REPLY_BYTES = 64 * 2**20
"""Of a reply as it is sent, headers included, unless the caller expects more."""
PIECE_BYTES = 2**16
SECRET_IN_REPLIES = 12
"""Characters from which a key is searched for in replies, too: a model may well say a shorter one (`EMPTY`) by itself."""
HIDDEN = "[hidden]"
NO_HEADERS: Mapping[str, str] = {}
NO_REPLY_CACHE = re.compile(r"(^|-)(key|control|prefix|kv|prompt|tokens?)(-|$)", re.IGNORECASE)
"""In names of headers about caches: of keys and rules, or of prompts' beginnings, which make no reply an old one."""


@dataclass(frozen=True)
class HttpReply:
    """Status and body of a reply, whatever the status is. `location` and `retry_after_s` of those that are not 200."""

    status: int
    body: bytes
    location: str | None = None
    retry_after_s: float | None = None
    """Seconds after which the server wants to be asked again (Retry-After), as it said; may be negative."""
    cache_header: str | None = None
    """The header, `name: value`, that says that a cache gave the reply. None: none does."""

    @property
    def text(self) -> str:
        return self.body.decode("utf-8", errors="replace")

    def json(self) -> Any:
        """The value in the body. NotJson (a ValueError): there is none."""
        return read_json(self.body)

    @property
    def message(self) -> str:
        """The server's own words about an error, on one line; of a redirect, that it is one."""
        if self.location is None or not 300 <= self.status < 400:
            return message_in(self.body)
        return f"a redirect to {shown(self.location)}, which is not followed; give the address it leads to"


def unmask_error(reply: HttpReply) -> HttpReply:
    """An error that came with status 200 as if it had come with the status that it names, or 500; any other reply as it is."""
    if reply.status != 200:
        return reply
    try:
        data = reply.json()
    except NotJson:
        return reply
    error = error_in(data) if isinstance(data, dict) else None
    return reply if error is None else replace(reply, status=error.status or 500)


def root_url(url: str) -> str:
    """The server's address without a trailing /v1: `/tokenize` is beside the versioned API, not under it."""
    return url.rstrip("/").removesuffix("/v1")


# ---------------------------------------------------------------------------------------------------- what may come in
def _too_large(most_bytes: int) -> UnusableReply:
    return UnusableReply(f"TooLarge: the reply has more than {most_bytes:,} bytes ({most_bytes / 2**20:g} MiB), the most taken")


class _Limited(io.RawIOBase):
    """A socket's bytes. The standard library bounds the time of each read only; here all reads of a reply share it."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._raw = sock.makefile("rb", buffering=0)
        self._timeout_s: float | None = None
        self.start(0.0, 0.0, 0)

    def start(self, total_s: float, silence_s: float, most_bytes: int) -> None:
        """From now on: a request is sent, and its reply read."""
        self._ends_at, self._total_s = time.monotonic() + total_s, total_s
        self._silence_s, self._most_bytes = silence_s, most_bytes
        self._num_bytes = 0
        self.is_over = False
        self._allow(total_s)

    def _allow(self, seconds: float) -> None:
        """The time of the next operation, to 5 %: setting it is a system call."""
        if self._timeout_s is None or not 0.95 * self._timeout_s <= seconds <= self._timeout_s:
            self._timeout_s = seconds
            self._sock.settimeout(seconds)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if self.is_over:
            return 0
        left_s = self._ends_at - time.monotonic()
        if left_s <= 0:
            raise self._late()
        self._allow(min(left_s, self._silence_s) if self._num_bytes else left_s)
        try:
            num_bytes = self._sock.recv_into(buffer)
        except TimeoutError:
            raise self._late() from None
        self._num_bytes += num_bytes
        if self._num_bytes > self._most_bytes:
            raise _too_large(self._most_bytes)
        return num_bytes

    def _late(self) -> TimeoutError:
        if self._num_bytes == 0:
            return TimeoutError(f"no reply within {self._total_s:g} s")
        if self._silence_s < self._ends_at - time.monotonic():
            return TimeoutError(f"the reply stopped for {self._silence_s:g} s")
        return TimeoutError(f"the reply was not complete after {self._total_s:g} s ({self._num_bytes:,} bytes came)")

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Incoming(io.BufferedReader):
    """What `http.client.HTTPResponse` reads: made once for a connection, kept from reply to reply.

    It holds the socket open until `end`: a server that announces the end of the connection may still be sending.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._limited = _Limited(sock)
        super().__init__(self._limited)

    def makefile(self, mode: str) -> _Incoming:
        """As a socket's; the reply closes it when it is read, which means nothing here."""
        return self

    def start(self, total_s: float, silence_s: float, most_bytes: int) -> None:
        """A request begins: for it and its reply there are `total_s`, and `silence_s` between two bytes of the reply."""
        self._limited.start(total_s, silence_s, most_bytes)

    def has_rest(self) -> bool:
        """Whether bytes came after the end of the reply that nobody has read."""
        self._limited.is_over = True
        return bool(self.peek(1))

    def close(self) -> None:
        """Nothing: see `end`."""

    def end(self) -> None:
        """Let go of the socket."""
        super().close()


# ---------------------------------------------------------------------------------------------------- one connection
class Connection:
    """Speaks to one server. Not for several threads."""

    def __init__(
        self, base_url: str, *, total_s: float, silence_s: float | None = None, headers: Mapping[str, str] = NO_HEADERS
    ) -> None:
        """total_s: from sending a request to the last byte of its reply, unless a request says otherwise. silence_s: between
        two bytes of a reply, once it has begun; None: total_s. headers: sent with each request, and in no message: what a
        server says of them is hidden. ServeError: `base_url` is no address.
        """
        secure, host, port, self._prefix = _address(base_url)
        self._total_s, self._silence_s = total_s, silence_s
        self._headers = dict(headers)
        self._post_headers = {"Content-Type": "application/json", **headers}
        self._secrets = _spellings(headers)
        self._incoming: _Incoming | None = None
        self._poll = select.poll()
        self._http: http.client.HTTPConnection
        if secure:
            self._http = http.client.HTTPSConnection(host, port, timeout=CONNECT_S, context=_certificates())
        else:
            self._http = http.client.HTTPConnection(host, port, timeout=CONNECT_S)
        self._http.response_class = self._response  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Connection({self._http.host}:{self._http.port})"

    def ask(
        self,
        path: str,
        body: bytes | None = None,
        *,
        total_s: float | None = None,
        most_bytes: int = MOST_REPLY_BYTES,
        request_id: str | None = None,
    ) -> HttpReply:
        """What comes back for a POST of `body` (JSON), for a GET without one. TransportError if nothing whole does.

        request_id: sent as X-Request-Id.
        """
        read = functools.partial(_content, most_bytes=most_bytes)
        response, content = self._exchange(path, body, total_s, most_bytes, read, request_id)
        wait = cache = None
        for name, value in response.headers.raw_items():  # `get` looks through all of them each time, `items` copies values
            lowered = name.lower()
            if lowered == "retry-after":
                wait = wait or value
            elif cache is None and "cache" in lowered and _is_cache_hit(lowered, value):
                cache = f"{name}: {value}"
        retry_after_s = None if wait is None else _seconds(wait)
        if response.status == 200:  # it may hold an error that names another
            shown_header = None if cache is None else shown(self._hide_text(cache))
            return HttpReply(200, self._hide(content, SECRET_IN_REPLIES), None, retry_after_s, shown_header)
        location = response.headers.get("Location")
        location = None if location is None else self._hide_text(location)
        return HttpReply(response.status, self._hide(content), location, retry_after_s)

    def count_events(self, path: str, body: bytes, most: int, *, total_s: float | None = None) -> int:
        """Read up to `most` events of a streamed reply, then hang up, as an impatient user does; how many came."""

        def count(response: http.client.HTTPResponse) -> int:
            num_events = 0
            while num_events < most and (line := response.readline(PIECE_BYTES)):
                num_events += line.startswith(b"data:")
            self.close()
            return num_events

        return self._exchange(path, body, total_s, MOST_REPLY_BYTES, count)[1]

    def close(self) -> None:
        """Hang up. The next request opens a new connection."""
        self._http.close()
        if self._incoming is not None:
            self._incoming.end()
            self._incoming = None

    # ------------------------------------------------------------------------------------------------ one exchange
    def _exchange(
        self,
        path: str,
        body: bytes | None,
        total_s: float | None,
        most_bytes: int,
        read: Callable[[http.client.HTTPResponse], T],
        request_id: str | None = None,
    ) -> tuple[http.client.HTTPResponse, T]:
        """Send a request; the head of its reply, and what `read` makes of the rest. TransportError: whatever goes wrong."""
        whole_s = self._total_s if total_s is None else total_s
        try:
            incoming = self._open()
            incoming.start(whole_s, self._silence_s or whole_s, most_bytes)
            headers = self._headers if body is None else self._post_headers
            if request_id is not None:
                headers = {**headers, "X-Request-Id": request_id}
            self._http.request("GET" if body is None else "POST", self._prefix + path, body, headers)
            response = self._http.getresponse()
            content = read(response)
            if self._http.sock is None or incoming.has_rest():  # which would be taken for the beginning of the next reply
                self.close()
            return response, content
        except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: of a chunk's size below 0
            self.close()
            kind = BrokenOff if isinstance(error, http.client.IncompleteRead) else TransportError
            # hidden before it is cut: half a key is one as well
            raise kind(f"{type(error).__name__}: {shown(self._hide_text(str(error).strip()))}") from None
        except UnusableReply as error:
            self.close()
            raise UnusableReply(shown(self._hide_text(str(error)), 2 * MOST_SHOWN)) from None
        except BaseException:
            self.close()
            raise

    def _open(self) -> _Incoming:
        if self._incoming is not None and self._poll.poll(0):
            self.close()  # the server hung up since the last reply, as they do with idle connections: sending would fail once
        if self._incoming is None:
            self._connect()
            self._incoming = _Incoming(self._http.sock)
            self._poll = select.poll()  # not select(): its file numbers end at 1,023
            self._poll.register(self._http.sock, select.POLLIN | select.POLLHUP)
        return self._incoming

    def _connect(self) -> None:
        try:
            self._http.connect()
        except TimeoutError:
            raise TimeoutError(f"no connection within {CONNECT_S:g} s") from None
        # A host that vanishes while it thinks, for hours if it likes, is noticed after some minutes.
        self._http.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 20), ("TCP_KEEPCNT", 6)):
            if hasattr(socket, option):
                self._http.sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

    def _response(self, sock: socket.socket, **how: Any) -> http.client.HTTPResponse:
        return http.client.HTTPResponse(self._incoming, **how)  # type: ignore[arg-type]

    # ------------------------------------------------------------------------------------------------ secrets
    def _hide(self, body: bytes, least: int = 1) -> bytes:
        for secret in self._secrets:
            if len(secret) >= least:
                body = body.replace(secret.encode(), HIDDEN.encode())
        return body

    def _hide_text(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, HIDDEN)
        return text


# ---------------------------------------------------------------------------------------------------- small things
def _content(response: http.client.HTTPResponse, most_bytes: int) -> bytes:
    encoding = response.headers.get("Content-Encoding")
    if encoding is not None and encoding.strip().lower() != "identity":
        raise UnusableReply(f"Compressed: the reply is compressed ({encoding}), which was not asked for")
    if (response.length or 0) > most_bytes:
        raise _too_large(most_bytes)
    body = response.read(PIECE_BYTES)  # not all it announces: that may be any number
    if not response.isclosed() and body:
        whole = bytearray(body)  # one block, which the system has back: pieces would stay with the thread's heap
        while not response.isclosed() and (piece := response.read(PIECE_BYTES)):
            whole += piece
        body = bytes(whole)
    if response.length:
        raise http.client.IncompleteRead(b"", response.length)
    return body


def _address(base_url: str) -> tuple[bool, str, int | None, str]:
    """(whether it is https, host, port, path before every path). ServeError: it is no address."""
    try:
        if not base_url.isascii() or not base_url.isprintable() or " " in base_url:
            raise ValueError("it holds a blank or a character that no URL may hold")
        parts = urlsplit(base_url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ValueError("it has no http:// or https://, or no host")
        if parts.username is not None:
            raise ValueError("it holds a user or a password")
        if parts.query or parts.fragment:
            raise ValueError("it has something behind its path (`?` or `#`)")
        return parts.scheme == "https", parts.hostname, parts.port, parts.path.rstrip("/")
    except ValueError as error:
        address = shown(re.split(r"[?#]", base_url.rpartition("@")[2])[0])  # what may be a password is not shown
        raise ServeError(f"{address}: is no address of a server ({one_line(str(error))}); give http://HOST:PORT") from None


@functools.cache
def _certificates() -> ssl.SSLContext:
    return ssl.create_default_context()


def _is_cache_hit(name: str, value: str) -> bool:
    """`cf-aig-cache-status: HIT`, `x-vsr-cache-hit: true`, `Cache-Status: name; hit` (RFC 9211) and their like.

    name: in small letters.
    """
    if NO_REPLY_CACHE.search(name):
        return False
    is_flag = name.endswith("hit") and value.strip().lower() in {"true", "1", "yes"}
    return is_flag or re.search(r"\bhit\b", value, re.IGNORECASE) is not None


def _spellings(headers: Mapping[str, str]) -> tuple[str, ...]:
    """How the keys in `headers` may be spelt by a server that repeats them: plain, and as JSON writes them; longest first."""
    keys = [value.rpartition(" ")[2] for value in headers.values()]
    spellings = {form for key in keys for form in (key, json.dumps(key)[1:-1], key.replace("/", "\\/")) if form}
    return tuple(sorted(spellings, key=len, reverse=True))


def _seconds(wait: str) -> float | None:
    """What Retry-After says, a number or a date, in seconds from now. None: neither."""
    try:
        return (
            float(int(wait)) if wait.strip().isdecimal() else email.utils.parsedate_to_datetime(wait).timestamp() - time.time()
        )
    except (ValueError, TypeError, IndexError, OverflowError):
        return None


# ---------------------------------------------------------------------------------------------------- one request
def get_once(base_url: str, path: str, *, total_s: float, headers: Mapping[str, str] = NO_HEADERS) -> HttpReply:
    """One GET on a connection of its own. TransportError if nothing whole comes."""
    with closing(Connection(base_url, total_s=total_s, headers=headers)) as connection:
        return connection.ask(path)


def post_once(
    base_url: str,
    path: str,
    data: Any,
    *,
    total_s: float,
    headers: Mapping[str, str] = NO_HEADERS,
    most_bytes: int = MOST_REPLY_BYTES,
) -> HttpReply:
    """`data` as JSON in one POST on a connection of its own. TransportError if nothing whole comes."""
    with closing(Connection(base_url, total_s=total_s, headers=headers)) as connection:
        return connection.ask(path, json.dumps(data).encode(), most_bytes=most_bytes)
