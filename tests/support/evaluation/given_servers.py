"""Scripted servers that run already, one for each label, and the profile that names them.

with given_servers("fp8", "w4a16") as servers:
    Path("here.yaml").write_text(servers.profile())
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from fake_server import VOCABULARY, FakeServer, plain_logits


@dataclass(frozen=True)
class GivenServers:
    """All alike but for their logits: no two have the same weights."""

    by_label: dict[str, FakeServer]

    @property
    def requests(self) -> list[tuple[str, dict[str, Any]]]:
        return [request for one in self.by_label.values() for request in one.requests]

    def count(self, path: str) -> int:
        """Requests received on `path`."""
        return sum(one.count(path) for one in self.by_label.values())

    def change(self, **attributes: Any) -> None:
        """Set attributes of all of them."""
        for one in self.by_label.values():
            vars(one).update(attributes)

    def profile(self, name: str = "here") -> str:
        endpoints = ", ".join(f"{label}: {{url: '{one.base_url}'}}" for label, one in self.by_label.items())
        return f"schema: 1\nname: {name}\nhardware: {{device: cpu}}\nendpoints: {{{endpoints}}}\n"


@contextmanager
def given_servers(*labels: str, **options: Any) -> Iterator[GivenServers]:
    """options: those of every FakeServer."""
    with ExitStack() as stack:
        made = (FakeServer(logits=functools.partial(scaled_logits, 1 + n / 10), **options) for n in range(len(labels)))
        yield GivenServers({label: stack.enter_context(one) for label, one in zip(labels, made, strict=True)})


def scaled_logits(factor: float, last: int) -> list[float]:
    """Logits of other weights."""
    return [factor * value for value in plain_logits(last)]


def sampled_text(prompt: str, factor: float, num_tokens: int) -> str:
    """A text that a server with these logits writes after the prompt at temperature 1; the same for the same prompt."""
    drawn, last, letters = random.Random(prompt), ord(prompt[-1]) % VOCABULARY, []
    for _ in range(num_tokens):
        weights = [math.exp(value) for value in scaled_logits(factor, last)]
        last = drawn.choices(range(VOCABULARY), weights)[0]
        letters.append(chr(last))
    return "".join(letters)
