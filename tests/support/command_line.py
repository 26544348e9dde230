"""The type of the fixture `run`, which calls the command line."""

from __future__ import annotations

from collections.abc import Callable

Run = Callable[..., tuple[int, str, str]]
