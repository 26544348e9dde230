"""Wrong answers whose thinking had stated the right one: of every task of a run, each checkpoint beside the reference."""

from __future__ import annotations

from typing import Literal

from assay.records.base import Interval, Part, Record

REACHED_NAME = "reached.json"
RULE = 1
"""Which statements count; another rule has another number."""


class Reached(Part):
    """One task on one checkpoint. Counts are of replies."""

    label: str
    task: str
    num_wrong: int
    """Wrong answers that were looked at."""
    num_unknown: int
    """Wrong answers that were not: the right answer, or the reply's text, is not known."""
    num_cut: int
    """Of `num_wrong`, those that were cut off."""
    num_reached: int
    """Of `num_wrong`, those whose working states the right answer: the thinking, or what stands before the final answer."""
    num_reached_cut: int
    """Of `num_cut`, the same."""
    read_share: float | None = None
    """Of up to a hundred right replies, those that state the right answer by the same rule. None: fewer than ten were there, or
    nothing is wrong."""
    share: Interval | None
    """`num_reached` of `num_wrong`; n counts items, or clusters of them. None: `not_measured`, or nothing is wrong."""
    chance: float | None
    """Mean share of other items' right answers that the same working states: what chance alone reaches. None: as above."""
    beyond_chance: Interval | None
    """Mean over items of reached minus chance. None: as above, or fewer than two items."""
    lost_more: Interval | None = None
    """Of all questions that both sides answered, those that this side reached and lost, minus the reference's; + is a loss.
    None: this is the reference, or either side was not measured."""
    lost_more_by_chance: float | None = None
    """How much of `lost_more` chance alone makes."""
    not_measured: str | None = None
    """Why it was not, in one clause."""


class ReachedAndLost(Record):
    """`reached.json`: from measurements and stored replies, without asking anybody."""

    kind: Literal["reached_and_lost"] = "reached_and_lost"
    rule: int = RULE
    level: float
    replies_read: bool
    """False: there was no journal that can be read."""
    measurements: dict[str, str]
    """Label -> SHA-256 of the file of its measurement."""
    tasks: tuple[Reached, ...]
