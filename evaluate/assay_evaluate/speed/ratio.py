"""What repeats say of a point, and how two like points compare. Unlike rows have no ratio.

Intervals are over repeats. Of one row: Student's t. Of a ratio: Welch's t on the logarithms of the repeats, so that it is an
interval of the ratio of geometric means, and cannot reach below zero. One repeat has no interval.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

from scipy import stats

from assay.errors import MeasureError
from assay.records.base import Interval
from assay.records.speed import SpeedRepeat, SpeedRow

Quantity = Callable[[SpeedRepeat], float | None]
LEVEL = 0.95
NOT_STATED = "not stated"
"""Prompts of an imported row that does not say what was asked."""
FIELDS = ("prompts", "origin", "hardware", "number of GPUs", "parallelism", "engine", "speculation", "concurrency")
"""What `SpeedRow.like` holds, in its order."""


class Estimate(NamedTuple):
    """A mean, or a ratio, over `n` repeats; low and high are None with one repeat."""

    value: float
    low: float | None
    high: float | None
    n: int

    @property
    def interval(self) -> Interval | None:
        return (
            None
            if self.low is None or self.high is None
            else Interval(value=self.value, low=self.low, high=self.high, n=self.n)
        )


def output_tokens_s(repeat: SpeedRepeat) -> float | None:
    return repeat.output_tokens_s


def ttft_s(repeat: SpeedRepeat) -> float | None:
    """The median."""
    return None if repeat.ttft_s is None else repeat.ttft_s.p50


def tpot_s(repeat: SpeedRepeat) -> float | None:
    """The mean."""
    return None if repeat.tpot_s is None else repeat.tpot_s.mean


def mean_of(row: SpeedRow, quantity: Quantity) -> Estimate | None:
    """Mean over the repeats that have the quantity, with Student's t interval. None: none has it."""
    values = [value for repeat in row.repeats if (value := quantity(repeat)) is not None]
    if not values:
        return None
    mean = statistics.fmean(values)
    if len(values) == 1:
        return Estimate(mean, None, None, 1)
    half = float(stats.t.ppf((1 + LEVEL) / 2, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))
    return Estimate(mean, mean - half, mean + half, len(values))


def why_unlike(one: SpeedRow, other: SpeedRow) -> str | None:
    """One line that says why two rows have no ratio; None: they have one."""
    for row in (one, other):
        if row.speculation is None and not row.emulated:
            return f"of {row.checkpoint} nobody states whether it drafted, so it is compared with none"
        if row.why_not_chosen is not None:
            return f"{row.checkpoint} {row.why_not_chosen}"
    if one.speculation != other.speculation:
        return f"{one.checkpoint} drafted {_drafts(one)}, {other.checkpoint} {_drafts(other)}"
    if one.prompts == other.prompts == NOT_STATED and one.source != other.source:
        return f"of {one.checkpoint} and {other.checkpoint} nobody states what they were asked"
    for name, ours, theirs in zip(FIELDS, one.like, other.like, strict=True):
        if ours != theirs:
            return f"{one.checkpoint} and {other.checkpoint} differ in {name}: {_shown(ours)} against {_shown(theirs)}"
    known = one.kernels and other.kernels and one.checkpoint == other.checkpoint
    if known and set(one.kernels) != set(other.kernels):
        return f"{one.checkpoint} was served by other kernels"
    return None


def ratio(one: SpeedRow, other: SpeedRow, quantity: Quantity = output_tokens_s) -> Estimate:
    """`one` over `other`, with Welch's interval. MeasureError: they are unlike, or one does not have the quantity."""
    if (why := why_unlike(one, other)) is not None:
        raise MeasureError(f"no ratio: {why}")
    ours, theirs = _logs(one, quantity), _logs(other, quantity)
    value = math.exp(statistics.fmean(ours) - statistics.fmean(theirs))
    n = min(len(ours), len(theirs))
    if n < 2:
        return Estimate(value, None, None, n)
    errors = [statistics.variance(side) / len(side) for side in (ours, theirs)]
    if (total := sum(errors)) == 0:
        return Estimate(value, value, value, n)
    freedom = total**2 / sum(error**2 / (len(side) - 1) for error, side in zip(errors, (ours, theirs), strict=True))
    half = float(stats.t.ppf((1 + LEVEL) / 2, freedom)) * math.sqrt(total)
    return Estimate(value, value * math.exp(-half), value * math.exp(half), n)


def _logs(row: SpeedRow, quantity: Quantity) -> list[float]:
    values = [value for repeat in row.repeats if (value := quantity(repeat)) is not None]
    if not values or min(values) <= 0:
        raise MeasureError(f"no ratio: {row.checkpoint} at {row.concurrency} in flight does not have this quantity")
    return [math.log(value) for value in values]


def _drafts(row: SpeedRow) -> str:
    return f"{row.speculation} tokens a step" if row.speculation else "nothing"


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(f"{name} {ranks}" for name, ranks in value) or "not stated"
    return "not stated" if value is None else str(value)


def pairs(rows: Sequence[SpeedRow], reference: str) -> list[tuple[SpeedRow, SpeedRow, Estimate]]:
    """(row, the reference's row like it, ratio of tokens/s) for every row of another checkpoint that has one."""
    found = []
    for row in rows:
        for base in rows:
            if base.checkpoint == reference != row.checkpoint and base.source == row.source and why_unlike(row, base) is None:
                found.append((row, base, ratio(row, base)))
    return found
