"""What a server sends on one connection, as far as it is allowed to: so many bytes, in so much time, for each reply."""

from __future__ import annotations

import io
import socket
import time
from typing import Any

from assay_evaluate.transport.errors import UnusableReply


def too_large(most_bytes: int) -> UnusableReply:
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
            raise too_large(self._most_bytes)
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


class Incoming(io.BufferedReader):
    """What `http.client.HTTPResponse` reads: made once for a connection, kept from reply to reply.

    It holds the socket open until `end`: a server that announces the end of the connection may still be sending.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._limited = _Limited(sock)
        super().__init__(self._limited)

    def makefile(self, mode: str) -> Incoming:
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
