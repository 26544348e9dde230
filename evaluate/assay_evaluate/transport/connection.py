"""One kept-alive HTTP connection of one thread, from the standard library.

A worker that waits for one reply at a time needs no pool: per request this takes a sixth of the CPU time of a shared
`httpx.Client` at 64 in flight (benchmarks/client_overhead.py).
"""

from __future__ import annotations

import http.client
import select
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from assay.foreign_text import shown

CONNECT_S = 10.0
NO_HEADERS: Mapping[str, str] = {}


class TransportError(Exception):
    """No whole HTTP reply came: refused, reset, timed out, not HTTP."""


@dataclass(frozen=True)
class HttpReply:
    """Status and body of a reply, whatever the status is."""

    status: int
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode("utf-8", errors="replace")


def root_url(url: str) -> str:
    """The server's address without a trailing /v1: `/tokenize` is beside the versioned API, not under it."""
    return url.rstrip("/").removesuffix("/v1")


class Connection:
    """Posts JSON to one server. Not for several threads. Proxy settings of the machine are not looked at."""

    def __init__(self, base_url: str, *, read_s: float, headers: Mapping[str, str] = NO_HEADERS) -> None:
        """read_s: how long, in seconds, the server may be silent before a request counts as failed. headers: sent with each."""
        self._headers = {"Content-Type": "application/json", **headers}
        parts = urlsplit(base_url)
        self._prefix = parts.path.rstrip("/")
        self._read_s = read_s
        host, port = parts.hostname or "", parts.port
        self._http: http.client.HTTPConnection
        if parts.scheme == "https":
            self._http = http.client.HTTPSConnection(host, port, timeout=CONNECT_S, context=ssl.create_default_context())
        else:
            self._http = http.client.HTTPConnection(host, port, timeout=CONNECT_S)

    def post(self, path: str, body: bytes) -> HttpReply:
        """Send `body` (JSON) to `path`, return what comes back. TransportError if nothing whole does."""
        try:
            if self._was_closed():
                self._http.close()
            if self._http.sock is None:
                self._http.connect()
                assert self._http.sock is not None, "just connected"
                self._http.sock.settimeout(self._read_s)
            self._http.request("POST", self._prefix + path, body, self._headers)
            response = self._http.getresponse()
            return HttpReply(response.status, response.read())
        except (OSError, http.client.HTTPException) as error:
            self._http.close()
            raise TransportError(f"{type(error).__name__}: {shown(str(error).strip())}") from None

    def _was_closed(self) -> bool:
        """Whether the server hung up since the last reply, as they do with idle connections: sending would fail once."""
        sock = self._http.sock
        if sock is None:
            return False
        poll = select.poll()  # not select(): its file numbers end at 1,023
        poll.register(sock, select.POLLIN | select.POLLHUP)
        return bool(poll.poll(0))

    def close(self) -> None:
        self._http.close()
