"""What long work calls while it goes on."""

from __future__ import annotations

from collections.abc import Callable

Say = Callable[[str], None]
"""`say(line)`: one line for whoever waits."""

Progress = Callable[[str, int], None]
"""`progress(what, num_bytes)`: a piece of a tensor or file is done; `num_bytes` of all there are."""
