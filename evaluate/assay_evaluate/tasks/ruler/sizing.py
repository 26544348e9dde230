"""How much filler fits: few exact counts, since at 1M tokens counting is the cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

PROBE_UNITS = 16
"""So much is counted first, to learn what a unit costs."""
PROBE_SHARE = 0.04
"""Share of the room that is counted next: a better price per unit, still cheap."""
SLACK = 0.003
"""Share of the room that may stay empty once more than a unit would fit; spares counts where units are many."""


@dataclass(frozen=True)
class Fitted:
    """The most units that fit, and the tokens of all."""

    units: int
    num_tokens: int


def largest_fitting(
    count: Callable[[int], int], room_tokens: int, first: int, last: int, slack: float = SLACK
) -> Fitted | None:
    """The largest number of units in first..last whose count stays within the room; None if even `first` does not.

    Binary search in which the middle is foretold from the tokens per unit seen so far; plain halving after ten steps. `count`
    should grow with its argument. Ends at the unit, or when less than `slack` of the room (but at least a unit) is empty.
    A pure function of its arguments: the same item is found in whatever company it is made.
    """
    low = Fitted(first, count(first))
    if low.num_tokens > room_tokens:
        return None
    high, high_tokens = last + 1, 0  # the first number known, or declared, not to fit
    per_unit = 0.0
    for step in range(200):
        left = room_tokens - low.num_tokens
        if high - low.units == 1 or (per_unit and per_unit <= left <= slack * room_tokens):
            return low
        if step == 0:
            units = first + PROBE_UNITS
        elif step < 10 and per_unit:
            units = low.units + _guess(left, per_unit, room_tokens, is_early=low.num_tokens < PROBE_SHARE * room_tokens)
        else:
            units = (low.units + high) // 2
        units = min(max(units, low.units + 1), high - 1)
        num_tokens = count(units)
        if num_tokens <= room_tokens:
            per_unit = (num_tokens - low.num_tokens) / (units - low.units) or per_unit
            low = Fitted(units, num_tokens)
        else:
            high, high_tokens = units, num_tokens
            per_unit = (high_tokens - low.num_tokens) / (high - low.units)
    raise AssertionError("200 steps of a binary search")


def _guess(left: int, per_unit: float, room_tokens: int, *, is_early: bool) -> int:
    """Units that should fill what is left, aiming at the middle of the slack; first only at the second probe."""
    if is_early and left > 2 * PROBE_SHARE * room_tokens:
        return int(PROBE_SHARE * room_tokens / per_unit)
    return int(max(left - SLACK * room_tokens / 2, per_unit) / per_unit)
