"""What repeats say of a point, and how two like points compare. Unlike rows have no ratio.

A value is the geometric mean over starts of the server of the geometric means of their repeats (`SpeedRow.tokens_s`). Intervals
are on logarithms, so that they cannot reach below zero, and hold what differs from start to start as well (`noise.py`). One
repeat has no interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from assay.errors import MeasureError
from assay.records.base import Interval
from assay.records.speed import SpeedRepeat, SpeedRow
from assay_evaluate.speed.noise import Noise, Quantity, Sample, noise_of_rows, sample_of
from assay_evaluate.speed.rows import NOT_STATED

LEVEL = 0.95
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
        if self.low is None or self.high is None:
            return None
        return Interval(value=self.value, low=self.low, high=self.high, n=self.n)


def output_tokens_s(repeat: SpeedRepeat) -> float | None:
    return repeat.output_tokens_s


def ttft_s(repeat: SpeedRepeat) -> float | None:
    """The median."""
    return None if repeat.ttft_s is None else repeat.ttft_s.p50 or None


def tpot_s(repeat: SpeedRepeat) -> float | None:
    """The mean. Of an earlier record that has 0: None."""
    return None if repeat.tpot_s is None else repeat.tpot_s.mean or None


def end_to_end_s(repeat: SpeedRepeat) -> float | None:
    """The mean."""
    return None if repeat.end_to_end_s is None else repeat.end_to_end_s.mean or None


def mean_of(row: SpeedRow, quantity: Quantity, noise: Noise | None = None) -> Estimate | None:
    """Geometric mean over the repeats that have the quantity, and its interval. None: none has it.

    noise: of the rows that it stands among; None: of this row alone.
    """
    sample = sample_of(row, quantity)
    if sample is None:
        return None
    if sample.num_repeats == 1:
        return Estimate(math.exp(sample.mean), None, None, 1)
    known = noise_of_rows([row], quantity) if noise is None else noise
    half = known.quantile(LEVEL) * known.error(sample)
    value, low, high = (math.exp(sample.mean + side * half) for side in (0, -1, 1))
    return Estimate(value, low, high, sample.num_repeats)


def why_unlike(first: SpeedRow, other: SpeedRow) -> str | None:
    """One line that says why two rows have no ratio; None: they have one."""
    for row in (first, other):
        if row.speculation is None and not row.emulated:
            return f"of {row.checkpoint} nobody states whether it drafted, so it is compared with none"
        if row.why_not_chosen is not None:
            return f"{row.checkpoint} {row.why_not_chosen}"
    if first.speculation != other.speculation:
        return f"{first.checkpoint} drafted {_drafts(first)}, {other.checkpoint} {_drafts(other)}"
    if first.prompts == other.prompts == NOT_STATED and first.source != other.source:
        return f"of {first.checkpoint} and {other.checkpoint} nobody states what they were asked"
    for name, value, other_value in zip(FIELDS, first.like, other.like, strict=True):
        if value != other_value:
            return f"{first.checkpoint} and {other.checkpoint} differ in {name}: {_shown(value)} against {_shown(other_value)}"
    known = first.kernels and other.kernels and first.checkpoint == other.checkpoint
    if known and set(first.kernels) != set(other.kernels):
        return f"{first.checkpoint} was served by other kernels"
    return None


def ratio(
    row: SpeedRow, other: SpeedRow, quantity: Quantity = output_tokens_s, noise: Noise | None = None
) -> Estimate:  # fmt: skip
    """`row` over `other`, with the interval of the difference of logarithms. noise: as `mean_of` has it.

    MeasureError: they are unlike, or one does not have the quantity.
    """
    if (reason := why_unlike(row, other)) is not None:
        raise MeasureError(f"no ratio: {reason}")
    sample, other_sample = _sample(row, quantity), _sample(other, quantity)
    value = math.exp(sample.mean - other_sample.mean)
    n = min(sample.num_repeats, other_sample.num_repeats)
    if n < 2:
        return Estimate(value, None, None, n)
    known = noise_of_rows([row, other], quantity) if noise is None else noise
    half = known.quantile(LEVEL) * math.hypot(known.error(sample), known.error(other_sample))
    return Estimate(value, value * math.exp(-half), value * math.exp(half), n)


def is_ahead(row: SpeedRow, other: SpeedRow, noise: Noise) -> bool:
    """Whether `row` writes more tokens a second than `other` beyond their noise, at 95 %, also where each has one repeat."""
    sample, other_sample = _sample(row, output_tokens_s), _sample(other, output_tokens_s)
    return sample.mean - other_sample.mean > noise.quantile(LEVEL) * math.hypot(noise.error(sample), noise.error(other_sample))


def _sample(row: SpeedRow, quantity: Quantity) -> Sample:
    sample = sample_of(row, quantity)
    if sample is None:
        raise MeasureError(f"no ratio: {row.checkpoint} at {row.concurrency} in flight does not have this quantity")
    return sample


def _drafts(row: SpeedRow) -> str:
    return f"{row.speculation} tokens a step" if row.speculation else "nothing"


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(f"{name} {ranks}" for name, ranks in value) or "not stated"
    return "not stated" if value is None else str(value)


def pairs(rows: Sequence[SpeedRow], reference: str) -> list[tuple[SpeedRow, SpeedRow, Estimate]]:
    """(row, the reference's row like it, ratio of tokens/s) for every row of another checkpoint that has one."""
    pairs_of_rows = []
    noise = noise_of_rows(rows, output_tokens_s)
    for row in rows:
        for base in rows:
            if base.checkpoint == reference != row.checkpoint and base.source == row.source and why_unlike(row, base) is None:
                pairs_of_rows.append((row, base, ratio(row, base, output_tokens_s, noise)))
    return pairs_of_rows
