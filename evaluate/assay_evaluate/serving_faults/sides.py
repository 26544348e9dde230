"""Two sides of one task, as the rules look at them, and what a rule finds."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from assay.records.measurement import ItemResult, TaskResult
from assay.records.served.evidence import AskedTwice
from assay.records.serving import Signature

LEAST_SHARE = 0.005
"""Of a task's replies: so few that are at fault move a score by no more than half a point, and are let be."""
SHORT_TOKENS = 64
"""Of a reply that batches hardly change within."""


@dataclass(frozen=True)
class Repeated:
    """A server's replies at temperature 0 in two passes, in other batches."""

    num_compared: int
    num_different: int
    num_short: int = 0
    """Of those compared, with at most `SHORT_TOKENS` in either reply."""
    num_turned: int = 0
    """Of the short ones, right in one pass and wrong in the other."""


@dataclass(frozen=True)
class Side:
    """One task on one checkpoint, and what its measurement says of the server."""

    label: str
    task: TaskResult
    signature: Signature | None = None
    asked_twice: tuple[AskedTwice, ...] = ()
    repeated: Repeated | None = None
    """Of the reference, against its repeat. None: of any other, or there is none."""
    uncounted_tokens: int = 0
    """Least that any prompt of the measurement was billed below its count: what this server never bills."""
    is_repeat: bool = False
    """The reference's second pass."""

    @functools.cached_property
    def answered(self) -> list[ItemResult]:
        """Replies that came."""
        return [item for item in self.task.items if item.correct is not None]

    @functools.cached_property
    def by_key(self) -> dict[tuple[str, int], ItemResult]:
        return {(item.item, item.sample): item for item in self.answered}


@dataclass(frozen=True)
class Pair:
    """Reference and candidate of one task."""

    reference: Side
    candidate: Side

    @functools.cached_property
    def matched(self) -> list[tuple[ItemResult, ItemResult]]:
        """Replies of the two sides to the same question: reference, candidate."""
        replies = self.candidate.by_key
        return [(reply, replies[key]) for key, reply in self.reference.by_key.items() if key in replies]


@dataclass(frozen=True)
class Finding:
    """Something that no weights do: a clause that names the side, with its numbers."""

    side: Literal["reference", "candidate", "both"]
    clause: str
    num: int
    """Replies (or questions) at fault."""
    of: int


Fault = tuple[int, int, str]
"""(replies or questions of one side at fault, of how many, the clause)."""


def each_side(find_faults: Callable[[Side, Side], Iterator[Fault]]) -> Callable[[Pair], Iterator[Finding]]:
    """A rule that looks at each side by itself, with the other beside it."""

    @functools.wraps(find_faults)
    def find(pair: Pair) -> Iterator[Finding]:
        for num, of, clause in find_faults(pair.reference, pair.candidate):
            yield Finding("reference", clause, num, of)
        for num, of, clause in find_faults(pair.candidate, pair.reference):
            yield Finding("candidate", clause, num, of)

    return find


def is_too_many(num: int, of: int, *, share: float = LEAST_SHARE, least: int = 1) -> bool:
    """At least `least`, and more than the share."""
    return num >= least and num > share * of


def count_of(num: int, of: int) -> str:
    """`all 120`, `12 of 120`: how many, before a noun."""
    return f"all {of}" if num == of else f"{num} of {of}"
