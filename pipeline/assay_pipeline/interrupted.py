"""Ctrl-C: what had been finished, in one line. SIGTERM: an exception, so that what was begun is cleaned up."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Interrupted(BaseException):
    """KeyboardInterrupt, with a line that says what is kept. typer ends on KeyboardInterrupt without a word."""


@contextmanager
def interruptible(kept: Callable[[], str]) -> Iterator[None]:
    """Turn Ctrl-C into Interrupted. kept: gives the line that says what is kept, called when the interrupt has come."""
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(kept()) from None


@contextmanager
def terminable() -> Iterator[None]:
    """Turn SIGTERM into SystemExit, with the exit status that a shell gives it. Outside the main thread nothing is changed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
