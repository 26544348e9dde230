"""What every task makes: an item's text as a function of how much filler it holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from assay.errors import MeasureError


class RulerError(MeasureError):
    """An item cannot be made: text or question file, tokenizer, length; or a saved one was changed."""


Match = Literal["all", "any"]
"""How a reply is scored: the share of the expected strings found in it, or whether any of them (the aliases) is."""


@dataclass(frozen=True)
class Draft:
    """An item before it is sized.

    `context` is the long part of `question`; `needles` are the texts in it that hold the answer; `answer_prefix` are the
    words with which the reply begins (style `base` and `prefill`).
    """

    question: str
    answer_prefix: str
    context: str
    expected: tuple[str, ...]
    needles: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)

    def depths(self) -> tuple[float, ...]:
        """Where each needle begins in the context by characters: 0 at the very front, 1 at the very end."""
        return tuple(
            self.context.index(needle) / room if (room := len(self.context) - len(needle)) else 0.0 for needle in self.needles
        )


@dataclass(frozen=True)
class Blueprint:
    """A way to build a `Draft` of any size.

    `build(units, pieces)`: with that many whole units of filler (`least`..`most`), and so many pieces of the next one.
    `num_pieces(units)`: how many pieces the next unit has; 0 where units are not divided. `smaller`: what to try when not even
    `least` fits. `why_not_comparable`: why scores must not be compared with published ones, None if they may.
    """

    build: Callable[[int, int], Draft]
    least: int
    most: int
    match: Match
    why_not_comparable: str | None = None
    num_pieces: Callable[[int], int] = lambda units: 0
    smaller: Blueprint | None = None
