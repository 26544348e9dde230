"""Ctrl-C: what had been finished, in one line."""

from __future__ import annotations

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
