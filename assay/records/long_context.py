"""Long context in a gate report: losses by length, by length and depth, and by part of a task; and effective lengths."""

from __future__ import annotations

from typing import Literal

from assay.records.base import Interval, Part

LengthStatus = Literal["within", "beyond", "open", "reference cannot", "not measured", "not reached"]
"""Of one length by itself: the loss is within the margin, or certainly beyond it, or neither is shown. reference cannot: it is
hardly ever right there, or cut off. not measured: too many replies are missing. not reached: a shorter length is one of these
two. What is claimed of all lengths together is `EffectiveLength.effective_tokens`."""


class CellLoss(Part):
    """Paired items of one cell. `reference`, `candidate`: share right; `drop`: reference minus candidate, + is a loss."""

    subtask: str | None
    """RULER's task, or the number of tools. None: all of the task's items."""
    length_tokens: int
    depth: float | None
    """Of what was asked for: 0 the front, 1 the end, in quarters. None: all items, whatever their depth."""
    num_pairs: int
    reference: float
    candidate: float
    drop: Interval


class LongContext(Part):
    """One task of several lengths or depths on one candidate, beside the reference."""

    candidate: str
    task: str
    by_subtask: tuple[CellLoss, ...]
    """Part of the task x length. Empty: the task has one part."""
    by_length: tuple[CellLoss, ...]
    by_depth: tuple[CellLoss, ...]
    """Length x depth. Empty: no item has a depth."""


class AtLength(Part):
    """One length in the sequence of tests. What compares is None where nothing was answered by both sides."""

    length_tokens: int
    status: LengthStatus
    num_pairs: int
    reference: float | None
    candidate: float | None
    drop: Interval | None
    p_within: float | None
    """One-sided, of a loss of the margin or more, each cut-off reply of the candidate counted as wrong."""
    p_beyond: float | None
    """One-sided, of a loss of the margin or less; adjusted by Holm over the lengths that the verdict is about."""
    why_not: str | None = None
    """Why it was not judged."""


class EffectiveLength(Part):
    """Up to which length a candidate stays within a margin of the reference: tested from the shortest length on."""

    candidate: str
    tasks: tuple[str, ...]
    max_drop: float
    at_least_tokens: int | None
    """What the gate asks for. None: as far as the reference can."""
    lengths: tuple[AtLength, ...]
    effective_tokens: int | None
    """Longest length up to which every one is within the margin. None: not even the shortest is shown to be."""
    reference_tokens: int | None
    """Longest length up to which the reference itself can do the task. None: none."""
