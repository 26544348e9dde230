"""Ctrl-C: what the command had finished, in one line, and exit 130."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from typer.core import TyperGroup


class Interrupted(BaseException):
    """KeyboardInterrupt, with a line that says what is kept. typer ends on KeyboardInterrupt without a word."""


class Commands(TyperGroup):
    """The group of all commands; an interrupt reaches `main` as `Interrupted`."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise Interrupted("") from None


@contextmanager
def says_what_is_kept(kept: Callable[[], str]) -> Iterator[None]:
    """kept: the line, asked when the interrupt has come."""
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(kept()) from None
