"""One calibrated weight against its source, row by row: what its method can have made of it, and what it cannot.

What text decided cannot be made again, but every method leaves a mark that the source shows:

- `nearest` (AWQ, SmoothQuant): each code is the nearest one to its weight, scaled; only the last bits of the scales are not
  known (`smoothed.py`).
- `learned` (AutoRound, arXiv 2309.05516): it moves a weight by half a step at most, and by half of its first learning step
  beyond that, so a code is within a step and 0.5 / iterations of its weight.
- `corrected` (GPTQ, arXiv 2210.17323): one column after the other is rounded to the nearest, and what that costs is taken from
  the columns behind it. With the errors of a row E, each within half a step, and the factor U of the inverse Hessian, which
  all rows have in common, the distances of the row are D = E U. So the first column is exactly rounded to the nearest; and each
  distance is a sum of bounded errors with the same weights in every row of its column. A sum of independent uniform numbers is
  strictly sub-Gaussian: it is k standard deviations away with a probability below 2 exp(-k^2 / 2), 5e-18 for FAR_SPREADS. The
  standard deviation is that of the column, from up to PILOT_ROWS rows. Errors are steps, and steps of a row's groups differ:
  what is far has to be so against the steps of its own group, and against the longest of its row.

The projection of a row, or of a block of a row, on its source (its gain) is 1 but for these distances.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.stats import gamma

from assay_quantize.kernels import quantize_rows
from assay_quantize.kernels.rows import Array
from assay_quantize.verify.calibrated.columns import Columns, check_columns
from assay_quantize.verify.calibrated.scales import check_scales
from assay_quantize.verify.calibrated.steps import (
    F32,
    Factor,
    StepRows,
    add_spread,
    compare,
    count_far,
    ends_of,
    inverse_of,
)
from assay_quantize.verify.calibrated.weight import Measured, Weight, named_rows, rounding, slack_of

FAR_SPREADS = 9.0
"""Spreads of its column that a code may be away."""
LEAST_GAIN = 0.5
"""Of a row, or of a block of BLOCK columns of it, where that is FAR_SPREADS standard deviations below 1."""
MOST_DRIFT = 0.002
"""Of all weights from their codes where scales are known but for their last bits, which are off to either side alike."""
OF_SQUARES = 0.7
"""Of the root of the mean square, what counts."""
LEAST_SPREAD = np.float32(0.25)
"""Of a column, in steps: rounding by itself has 0.29."""
PILOT_ROWS = 512
LEAST_ROWS = 32
"""Of fewer the quartiles say too little."""
LEAST_TIMES = 2.0
"""What of the others' error a row may have, however alike these are."""
UNLIKELY = 1e-15
"""Probability of a row's error beyond what is allowed, where errors follow a gamma distribution."""
BLOCK = 128
GAUSSIAN = math.sqrt(math.pi / 2)
"""Standard deviation over mean magnitude of a normal variable; of a uniform one 1.15."""


def measure(weight: Weight) -> Measured:
    """Look at every row. CheckpointError: a file cannot be read."""
    found = Measured()
    spread = _spread(weight) if weight.kind == "corrected" else None
    columns = Columns(weight.shape[1])
    divisors: list[Factor] = []
    for begin, end in weight.slabs():
        rows, parts, source = weight.rows(begin, end)
        if weight.kind == "nearest" and weight.is_plain and weight.observer == "minmax":
            _rounded(weight, parts, source, begin, found)
            continue
        divisor = check_scales(weight, rows, parts, begin, found)
        if divisor is not None:
            divisors.append(divisor)
        if spread is None:
            _nearest(weight, rows, divisor, begin, found)
        else:
            _corrected(weight, rows, divisor, spread, begin, columns, found)
    if divisors:
        found.divisor = Factor(*(np.concatenate(values) for values in zip(*divisors, strict=True)))
    if spread is not None:
        check_columns(weight, columns, found)
        if not spread.is_sparse:
            _row_errors(np.concatenate(columns.row_errors).astype(np.float64), found)
    if weight.kind == "nearest" and abs(found.drift) > MOST_DRIFT + FAR_SPREADS * found.drift_error:
        found.problem("rows", f"its codes are those of weights {100 * found.drift:+.2f} % from its own, in the mean")
    return found


# ------------------------------------------------------------------------------------------------ codes
def _add_errors(rows: StepRows, error_RG: F32, norm_RG: F32, found: Measured) -> None:
    squares = rows.scale_RG.astype(np.float64) ** 2
    found.squared_error += float((error_RG * squares).sum())
    found.squared_norm += float((norm_RG * squares).sum())


def _rounded(weight: Weight, parts: dict[str, Array], source: Array, begin: int, found: Measured) -> None:
    """Nothing was done to the weight but rounding: byte for byte."""
    made = quantize_rows(source, weight.tensor.logical_dtype, weight.scheme)
    found.squared_error += made.squared_error
    found.squared_norm += made.squared_norm
    for part, expected in made.parts.items():
        if (differ := parts[part] != expected).any():
            at = np.flatnonzero(differ.any(1))
            what = f"{named_rows(at + begin)}: {int(differ.sum())} values of its {part} are not what rounding the source gives"
            found.problem("recomputed", what)


def _nearest(weight: Weight, rows: StepRows, divisor: Factor | None, begin: int, found: Measured) -> None:
    count = len(rows.w_RI)
    error, norm = np.empty_like(rows.scale_RG), np.empty_like(rows.scale_RG)
    far, moved, towards, size = (
        np.empty(count, np.int32),
        np.empty(count, np.int32),
        np.empty(count, np.int32),
        np.empty(count, np.float32),
    )
    what = "more than a step from" if weight.kind == "learned" else "not the nearest to"
    slack_R = np.zeros(count) if divisor is None else divisor.half
    count_far(
        rows.w_RI, rows.q_RI, inverse_of(rows, divisor), *ends_of(rows), np.float32(weight.reach + 0.01),
        slack_of(weight).astype(np.float32), slack_R.astype(np.float32), far, error, norm,
        moved, towards, size,
    )  # fmt: skip
    _add_errors(rows, error, norm, found)
    found.num_far += int(far.sum())
    found.moved += int(moved.sum())
    found.towards += int(towards.sum())
    found.size += float(size.sum())
    if len(at := np.flatnonzero(far)):
        found.problem(
            "rows", f"{named_rows(at + begin)}: {int(far[at[0]])} of {weight.shape[1]} codes are {what} their weights"
        )


class _Spread(NamedTuple):
    """Standard deviation of a column's distances, in steps of their groups, and of the longest group of their rows. is_sparse:
    most weights are zeros. How many errors a row passes on differs with how many weights it has: then only whole rows, and
    columns, are judged."""

    own_I: F32
    shared_I: F32
    is_sparse: bool


def _share(rows: StepRows) -> F32:
    """Steps of a group over the longest of its row."""
    sizes = np.abs(rows.scale_RG)
    most = sizes.max(1, keepdims=True)
    return np.where(most > 0, sizes / np.where(most > 0, most, 1), np.float32(1)).astype(np.float32)


def _spread(weight: Weight) -> _Spread:
    own, shared = (np.zeros((2, weight.shape[1]), np.float32) for _ in range(2))
    counts, shares = (np.zeros(weight.shape[1], np.float32) for _ in range(2))
    num_zeros = num_weights = 0
    slabs = list(weight.slabs())
    needed = -(-PILOT_ROWS // (slabs[0][1] - slabs[0][0]))
    for number in sorted({round(at) for at in np.linspace(0, len(slabs) - 1, min(needed, len(slabs)))}):
        rows, parts, _ = weight.rows(*slabs[number])
        divisor = check_scales(weight, rows, parts, 0, Measured()) if weight.is_divided else None
        add_spread(rows.w_RI, rows.q_RI, inverse_of(rows, divisor), _share(rows), own, shared)
        num_zeros += int((rows.w_RI == 0).sum())
        num_weights += rows.w_RI.size
        is_used = (rows.low_RG < 0) | (rows.high_RG > 0)  # zeros are where they were
        counts += np.repeat(is_used.sum(0), rows.group)
        shares += np.repeat((_share(rows) * is_used).sum(0), rows.group)
    counts = np.maximum(counts, 1)
    # at the least what rounding by itself moves a weight
    least = np.maximum(LEAST_SPREAD * shares / counts, np.float32(1e-6))
    own_I, shared_I = np.maximum(_deviation(own / counts), LEAST_SPREAD), np.maximum(_deviation(shared / counts), least)
    return _Spread(own_I, shared_I, is_sparse=num_zeros > num_weights / 2)


def _deviation(means_2I: F32) -> F32:
    """Standard deviation by the mean magnitude, which a few damaged rows hardly change; of columns whose distances are mostly
    small and sometimes large (of sparse weights) it is nearer by the mean square. means_2I: both."""
    made: F32 = np.maximum(np.float32(GAUSSIAN) * means_2I[0], np.float32(OF_SQUARES) * np.sqrt(means_2I[1]))
    return made


def _corrected(
    weight: Weight, rows: StepRows, divisor: Factor | None, spread: _Spread, begin: int, columns: Columns, found: Measured
) -> None:  # fmt: skip
    count, block = len(rows.w_RI), min(BLOCK, rows.group)
    blocks = rows.scale_RG.shape[1] * -(-rows.group // block)
    error, norm = np.empty_like(rows.scale_RG), np.empty_like(rows.scale_RG)
    xx, xq, xr, most = (np.empty((count, blocks), np.float32) for _ in range(4))
    of_columns = [np.zeros(weight.shape[1], np.float32) for _ in range(3)]
    far, inner, uu = np.empty(count, np.int32), np.empty(count, np.int32), np.empty(count, np.float32)
    slack = slack_of(weight) + (0 if divisor is None else float(np.nanmax(divisor.half, initial=0)))
    compare(
        rows.w_RI, rows.q_RI, inverse_of(rows, divisor), *ends_of(rows), _share(rows), slack.astype(np.float32),
        1 / spread.own_I, 1 / spread.shared_I, block, np.float32(2 * rounding(weight.tensor.logical_dtype)),
        columns.far, far, inner, uu, of_columns[0], of_columns[1], of_columns[2], error, norm, xx, xq, xr, most,
    )  # fmt: skip
    found.num_far += int(far.sum())
    found.num_inner += int(inner.sum())
    columns.row_errors.append(uu)
    _add_errors(rows, error, norm, found)
    columns.xx += of_columns[0]
    columns.xq += of_columns[1]
    columns.qq += of_columns[2]
    at = np.unravel_index(int(most.argmax()), most.shape)
    if most[at] > found.farthest[0] and not spread.is_sparse:
        found.farthest = float(most[at]), f"row {begin + at[0]}, columns {at[1] * block} to {(at[1] + 1) * block - 1}"
    rare = np.flatnonzero((most > FAR_SPREADS).any(1))
    if len(rare) and not spread.is_sparse:
        what = f"a code is {most[rare[0]].max():.0f} standard deviations of its column from its weight"
        found.problem("rows", f"{named_rows(rare + begin)}: {what}")
    for gain, below, where in _gains(xx, xq, xr, begin, block, blocks_too=not spread.is_sparse):
        if gain < found.smallest_gain[0]:
            found.smallest_gain = gain, below
        if gain < LEAST_GAIN and below > FAR_SPREADS:
            found.problem("rows", f"{where}: its projection on its source is {gain:.2f} of it, where 1 is expected")


def _gains(
    xx_RB: F32, xq_RB: F32, xr_RB: F32, begin: int, block: int, *, blocks_too: bool
) -> Iterator[tuple[float, float, str]]:  # fmt: skip
    """The worst row and the worst block: gain, over that of the nearest codes where they have less than 1 (of weights that are
    small beside one of their group most are rounded to 0); standard deviations that it is below; where."""
    with np.errstate(divide="ignore", invalid="ignore"):
        for of_row in (True, False) if blocks_too else (True,):
            xx, xq, xr = (part.sum(1, keepdims=True) if of_row else part for part in (xx_RB, xq_RB, xr_RB))
            expected = np.clip(xr / xx, 0, 1)
            gain = np.where((xx > 0) & (expected > 0), xq / xx / expected, 1.0)
            below = (1 - gain) * expected * np.sqrt(xx)
            bad = np.where(below > FAR_SPREADS, gain, np.inf)
            row, at = np.unravel_index(int((bad if np.isfinite(bad).any() else gain).argmin()), gain.shape)
            where = f"row {begin + row}" if of_row else f"row {begin + row}, columns {at * block} to {(at + 1) * block - 1}"
            yield float(gain[row, at]), float(below[row, at]), where


def _row_errors(error_R: NDArray[np.float64], found: Measured) -> None:
    """A row whose error is beyond what the others have.

    Of distances that have much in common the errors of rows differ more: as sums of squares of so many independent ones, which
    their quartiles tell, they would follow a gamma distribution.
    """
    others = error_R[error_R > 0]  # a row of zeros has none
    if len(others) < LEAST_ROWS:
        return
    low, middle, high = np.quantile(others, (0.25, 0.5, 0.75))
    # quartiles of a normal distribution are 1.35 standard deviations apart; those of few rows are off by some tenths
    freedom = 2 / max((high - low) / 1.35 / middle * 1.5, 1e-3) ** 2
    allowed = middle * max(LEAST_TIMES, float(gamma.isf(UNLIKELY, freedom / 2, scale=2 / freedom)))
    row = int(error_R.argmax())
    found.largest_error = float(error_R[row] / allowed)
    if found.largest_error > 1:
        times, most = error_R[row] / middle, allowed / middle
        what = f"row {row}: its squared error is {times:.1f} times that of others, where {most:.1f} can be explained"
        found.problem("rows", what)
