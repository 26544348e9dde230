"""Requests that wait for their server: held while it is gone, sent again when it is back.

mini-swe-agent gives up after ten attempts in four minutes, writes an empty patch, and begins the next instance: a queue of 500
drains into empty patches while 744 billion parameters are loaded again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NoReturn

from assay.foreign_text import shown
from assay_evaluate.client.sending import LONGEST_RETRY_AFTER_S
from assay_evaluate.transport.connection import NO_HEADERS, get_once
from assay_evaluate.transport.errors import TransportError


class GaveUp(Exception):
    """The server stayed away too long, or another one came back: nothing that is open may be written down."""


class RequestFailed(Exception):
    """No reply that counts came; the same request may be answered another time."""

    def __init__(self, reason: str, *, is_misconfigured: bool = False, retry_after_s: float | None = None) -> None:
        """is_misconfigured: with a status of a wrong address or key."""
        super().__init__(reason)
        self.is_misconfigured, self.retry_after_s = is_misconfigured, retry_after_s


class RequestRefused(Exception):
    """The server will not answer this request, and says why."""


class ServerGate:
    """Lets requests through while the server answers; holds them all while it does not."""

    def __init__(
        self,
        base_url: str,
        patience_s: float,
        probe_every_s: float,
        tell: Callable[..., None] = lambda event, **more: None,
        headers: Mapping[str, str] = NO_HEADERS,
    ) -> None:
        """headers: sent with the question whether it is up."""
        self.base_url, self.patience_s, self.probe_every_s, self.tell = base_url, patience_s, probe_every_s, tell
        self.gave_up: str | None = None
        self._headers = dict(headers)
        self._lock = threading.Lock()
        self._fingerprint: str | None = None
        self._num_others = 0

    def is_up(self) -> bool:
        """Whether the server answers /health; one without it counts as up when it says so (404, 405)."""
        try:
            return get_once(self.base_url, "/health", total_s=10, headers=self._headers).status in {200, 404, 405}
        except TransportError:
            return False

    def wait_until_up(self, reason: str) -> bool:
        """Return when the server answers; True if it had been away. GaveUp after `patience_s`."""
        with self._lock:  # the first one waits and asks; the others wait for the lock
            if self.gave_up is not None:
                raise GaveUp(self.gave_up)
            if self.is_up():
                return False
            self.tell("paused", why=reason)
            began = time.monotonic()
            while not self.is_up():
                if time.monotonic() - began > self.patience_s:
                    self._give_up(f"{self.base_url} did not come back within {self.patience_s:g} s ({reason})")
                time.sleep(self.probe_every_s)
            self.tell("resumed", seconds=round(time.monotonic() - began, 1))
            return True

    def check_same(self, fingerprint: str | None) -> None:
        """The server calls itself something else than before (vLLM's `system_fingerprint`): RequestFailed the first time, for a
        gateway may have asked another one; GaveUp if the next reply says so, too."""
        if fingerprint is None:
            return
        with self._lock:
            if self._fingerprint in (None, fingerprint):
                self._fingerprint, self._num_others = fingerprint, 0
                return
            self._num_others += 1
            other = f"another server ({shown(fingerprint)}, before {shown(self._fingerprint)})"
            if self._num_others < 2:
                raise RequestFailed(f"the reply is of {other}")
            self._give_up(
                f"{self.base_url} came back as {other}; trajectories of two servers must not be mixed: start the old one "
                "again, or a new run"
            )

    def give_up(self, reason: str) -> NoReturn:
        """GaveUp, and for every request from now on."""
        with self._lock:
            self._give_up(reason)

    def _give_up(self, reason: str) -> NoReturn:
        self.gave_up = reason
        raise GaveUp(reason)


class GatedRetry:
    """In place of mini-swe-agent's ten attempts in four minutes: `for attempt in retry(...)` around every request."""

    def __init__(self, gate: ServerGate, num_attempts: int, backoff_s: float) -> None:
        self.gate, self.num_attempts, self.backoff_s = gate, num_attempts, backoff_s
        self.done = False
        self.failures = 0

    def __iter__(self) -> Iterator[GatedRetry]:
        while not self.done:
            yield self

    def __enter__(self) -> None:
        if self.gate.gave_up is not None:
            raise GaveUp(self.gate.gave_up)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        if error is None:
            self.done = True
            return False
        if not isinstance(error, RequestFailed):
            return False
        if self.gate.wait_until_up(" ".join(str(error).split())[:160]):
            return True  # it had been away: that was no attempt
        self.failures += 1
        if self.failures >= self.num_attempts:
            if error.is_misconfigured:
                self.gate.give_up(
                    f"{self.gate.base_url}: {shown(error)}, {self.failures} times; look at the address and the key"
                )
            return False
        time.sleep(
            max(min(60.0, self.backoff_s * 2 ** (self.failures - 1)), min(error.retry_after_s or 0.0, LONGEST_RETRY_AFTER_S))
        )
        return True
