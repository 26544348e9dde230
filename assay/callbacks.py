"""What long work calls while it goes on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

Say = Callable[[str], None]
"""`say(line)`: one line for whoever waits."""

Progress = Callable[[str, int], None]
"""`progress(what, num_bytes)`: a piece of a tensor or file is done; `num_bytes` of all there are."""

Track = Callable[[str, int], AbstractContextManager[Progress]]
"""`track(label, total_bytes)`: work over bytes begins; what it gives is told of each piece."""


def say_nothing(line: str) -> None:
    """A `Say` for callers that do not watch."""


def track_nothing(label: str, total_bytes: int) -> AbstractContextManager[Progress]:
    """A `Track` for callers that do not watch."""
    return nullcontext(lambda what, num_bytes: None)
