"""Requests that wait for their server: held while it is gone, sent again when it is back.

mini-swe-agent gives up after ten attempts in four minutes, writes an empty patch, and begins the next instance: a queue of 500
drains into empty patches while 744 billion parameters are loaded again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping

from assay.foreign_text import shown
from assay_evaluate.tasks.swebench.exits import SERVER_EXITS
from assay_evaluate.transport.connection import NO_HEADERS, get_once
from assay_evaluate.transport.errors import TransportError


class GaveUp(Exception):
    """The server stayed away too long, or another one came back: nothing that is open may be written down."""


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

    def is_up(self) -> bool:
        """Whether the server answers /health; one without it counts as up when it says so (404, 405)."""
        try:
            return get_once(self.base_url, "/health", total_s=10, headers=self._headers).status in {200, 404, 405}
        except TransportError:
            return False

    def wait_until_up(self, why: str) -> bool:
        """Return when the server answers; True if it had been away. GaveUp after `patience_s`."""
        with self._lock:  # the first one waits and asks; the others wait for the lock
            if self.gave_up is not None:
                raise GaveUp(self.gave_up)
            if self.is_up():
                return False
            self.tell("paused", why=why)
            began = time.monotonic()
            while not self.is_up():
                if time.monotonic() - began > self.patience_s:
                    self.gave_up = f"{self.base_url} did not come back within {self.patience_s:g} s ({why})"
                    raise GaveUp(self.gave_up)
                time.sleep(self.probe_every_s)
            self.tell("resumed", seconds=round(time.monotonic() - began, 1))
            return True

    def check_same(self, fingerprint: str | None) -> None:
        """GaveUp if the server calls itself something else than before (vLLM's `system_fingerprint`)."""
        if fingerprint is None:
            return
        with self._lock:
            if self._fingerprint not in (None, fingerprint):
                self.gave_up = (
                    f"{self.base_url} came back as another server ({shown(fingerprint)}, before {shown(self._fingerprint)}); "
                    "trajectories of two servers must not be mixed: start the old one again, or a new run"
                )
                raise GaveUp(self.gave_up)
            self._fingerprint = fingerprint


class GatedRetry:
    """In place of mini-swe-agent's ten attempts in four minutes: `for attempt in retry(...)` around every request."""

    def __init__(self, gate: ServerGate, num_attempts: int, backoff_s: float, abort: tuple[type[BaseException], ...]) -> None:
        self.gate, self.num_attempts, self.backoff_s, self.abort = gate, num_attempts, backoff_s, abort
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
        name = type(error).__name__
        if isinstance(error, self.abort) or name not in SERVER_EXITS:
            return False
        if self.gate.wait_until_up(f"{name}: {' '.join(str(error).split())[:160]}"):
            return True  # it had been away: that was no attempt
        self.failures += 1
        if self.failures >= self.num_attempts:
            return False
        time.sleep(min(60.0, self.backoff_s * 2 ** (self.failures - 1)))
        return True
