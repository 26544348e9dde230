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
import torch
from compressed_tensors.quantization.utils import calculate_qparams
from numpy.typing import NDArray
from scipy.stats import gamma

from assay_quantize.checkpoint.torch_tensors import TORCH_DTYPES
from assay_quantize.formats.schemes import SCHEMES, compressed_tensors_scheme
from assay_quantize.kernels import quantize_rows
from assay_quantize.kernels.rows import Array
from assay_quantize.verify.calibrated.steps import (
    F32,
    Factor,
    Measured,
    StepRows,
    Weight,
    add_spread,
    as_f32,
    compare,
    count_far,
    ends_of,
    half_ulp,
    inverse_of,
    inverses,
    named_rows,
    rounding,
    slack_of,
)

SMALLEST_SEARCHED = 0.8
"""Least share of the range that `memoryless_mse` of llm-compressor 0.14 tries (`maxshrink` 0.2)."""


def check_scales(weight: Weight, rows: StepRows, parts: dict[str, Array], begin: int, measured: Measured) -> Factor | None:
    """Scales and zero points against the range of their groups. Gives what the rows were divided by, where they were."""
    low, high = rows.low_RG, rows.high_RG
    if weight.is_plain and weight.observer == "minmax" and weight.kind == "corrected":
        _same_scales(weight, low, high, parts, begin, measured)
        return None
    row = SCHEMES[weight.scheme]
    # as `calculate_qparams` has it: 0 is always among the numbers that the codes can say
    range_RG = np.maximum(high, -low).astype(np.float64) / (127.5 if row.weight_dtype == "I8" else 7.5)
    if not row.symmetric:
        range_RG = (np.maximum(high, 0).astype(np.float64) - np.minimum(low, 0)) / 15
    scale_RG = rows.scale_RG.astype(np.float64)
    if weight.kind == "learned":
        over = (np.abs(scale_RG) > range_RG * (7.5 / 8) * (1 + 4 * rounding("BF16"))) & (range_RG > 0)
        if over.any():
            at = np.argwhere(over)[0]
            measured.problem("rows", f"row {begin + at[0]}: the scale of its group {at[1]} is beyond the range of its weights")
        return None
    return _of_range(weight, rows, range_RG, scale_RG, begin, measured)


def _of_range(
    weight: Weight, rows: StepRows, range_RG: Array, scale_RG: Array, begin: int, measured: Measured
) -> Factor | None:  # fmt: skip
    """Scales that follow from weights whose factors are known but for their last bits."""
    group, dtype = rows.group, weight.tensor.logical_dtype
    half_G = np.zeros(range_RG.shape[1])
    is_whole_G: Array = np.ones(range_RG.shape[1], bool)
    if weight.columns is not None:
        half_G = np.nan_to_num(weight.columns.half).reshape(-1, group).max(1)
        is_whole_G = np.asarray(np.isfinite(weight.columns.middle).reshape(-1, group).all(1))
    if not weight.is_divided and SCHEMES[weight.scheme].symmetric:
        _expected(weight, range_RG, scale_RG, half_G, is_whole_G, begin, measured)
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        # of a scale of 0 another number is stored
        is_used = (range_RG > 0) & (scale_RG > 0) & np.isfinite(scale_RG)
        lost = half_ulp(scale_RG, dtype) / scale_RG + rounding(dtype) + 1e-6
        least, most = range_RG * (1 - half_G) * (1 - lost) / scale_RG, range_RG * (1 + half_G) * (1 + lost) / scale_RG
    if weight.observer != "minmax":
        least = least * SMALLEST_SEARCHED
    least = np.where(is_used, least, 0.0)
    most = np.where(is_used & is_whole_G, most, np.inf)  # a column that is not known may have had the largest weight
    low_R, high_R = least.max(1), most.min(1)
    if not weight.is_divided:
        wrong = np.flatnonzero((low_R > 1 + 1e-6) | (high_R < 1 - 1e-6))
        if len(wrong):
            measured.problem("scales", f"{named_rows(wrong + begin)}: scales are not those of the largest weights, scaled")
        return None
    wrong = np.flatnonzero(low_R > high_R * (1 + 1e-6))
    if len(wrong):
        measured.problem("scales", f"{named_rows(wrong + begin)}: scales of its groups are not those of one row, divided")
    # a search leaves too much open
    is_bounded = is_used.any(1) & np.isfinite(high_R) & (weight.observer == "minmax")
    with np.errstate(invalid="ignore"):
        middle = np.where(is_bounded, (low_R + high_R) / 2, np.nan)
        half = np.where(is_bounded, np.abs(high_R - low_R) / 2 / middle, 0.0)
    for row in np.flatnonzero(~is_bounded & is_used.any(1)):
        middle[row], half[row] = _by_codes(weight, rows, int(row))
    return Factor(middle, half)


def _expected(
    weight: Weight, range_RG: Array, scale_RG: Array, half_G: Array, is_whole_G: Array, begin: int, measured: Measured
) -> None:  # fmt: skip
    """Symmetric scales of weights whose factors are known but for their last bits: rounding keeps the order of numbers, so they
    are between what the least and the largest of the factors give."""
    dtype, half_range = weight.tensor.logical_dtype, 127.5 if SCHEMES[weight.scheme].weight_dtype == "I8" else 7.5

    def rounded(values: Array) -> Array:
        made: Array = torch.from_numpy(values).to(TORCH_DTYPES[dtype]).double().numpy()
        return made

    off = half_G + 1e-6
    low, high = (rounded(rounded(range_RG * half_range * (1 + sign * off)) / half_range) for sign in (-1, 1))
    if weight.observer != "minmax":
        low = low * (SMALLEST_SEARCHED - 2 * rounding(dtype))
    wrong_RG = ((scale_RG < low) | ((scale_RG > high) & is_whole_G)) & (range_RG > 0) & (high > 0)
    if (wrong := wrong_RG.any(1)).any():
        what = f"{int(wrong_RG.sum())} scales are not those of the largest weights{'' if weight.is_plain else ', scaled'}"
        measured.problem("scales", f"{named_rows(np.flatnonzero(wrong) + begin)}: {what}")


def _by_codes(weight: Weight, rows: StepRows, row: int) -> tuple[float, float]:
    """What a row was divided by, where its scales do not say it. Of nearest codes each leaves a range, and all together one; of
    corrected ones it is what makes the row's projection on its source 1. (NaN, 0): they do not say it."""
    x = (rows.w_RI[row] * np.repeat(inverses(rows.scale_RG[row]), rows.group)).astype(np.float64)
    q, low, high = rows.q_RI[row].astype(np.float64), *(np.repeat(ends[row], rows.group) for ends in ends_of(rows))
    product = float(x @ q)
    if product <= 0:
        return math.nan, 0.0
    if weight.kind == "corrected":
        return float(x @ x) / product, 2 / math.sqrt(float(x @ x))
    size, sign, slack = np.abs(x), np.sign(x), slack_of(weight)
    inner, outer = np.where(x > 0, low, -high), np.where(x > 0, high, -low)
    with np.errstate(divide="ignore", invalid="ignore"):
        least = np.where((size > 0) & (q * sign > inner), (q * sign - 0.51) / size * (1 - slack), 0.0).max(initial=0.0)
        most = np.where((size > 0) & (q * sign < outer), (q * sign + 0.51) / size * (1 + slack), np.inf).min(initial=np.inf)
    if not (0 < most < math.inf and least <= most):
        return float(x @ x) / product, 0.0  # its codes will be far from their weights
    return 2 / (least + most), (most - least) / (most + least)


def _same_scales(weight: Weight, low: F32, high: F32, parts: dict[str, Array], begin: int, measured: Measured) -> None:
    """By compressed-tensors, byte for byte."""
    scheme = compressed_tensors_scheme(weight.scheme).weights
    assert scheme is not None
    dtype = TORCH_DTYPES[weight.tensor.logical_dtype]
    scale, zero = calculate_qparams(torch.from_numpy(low).to(dtype), torch.from_numpy(high).to(dtype), scheme)
    made: dict[str, tuple[Array, Array]] = {"weight_scale": (as_f32(parts["weight_scale"]), scale.float().numpy())}
    if "weight_zero_point" in parts:
        words = np.repeat(parts["weight_zero_point"].view(np.uint32), 8, axis=0)[: len(low)]
        places = (np.arange(len(low), dtype=np.uint32) % 8 * 4)[:, None]
        made["weight_zero_point"] = ((words >> places & np.uint32(15)).astype(np.int64) - 8, zero.to(torch.int64).numpy())
    for part, (stored, expected) in made.items():
        if (differ := stored != expected).any():
            rows = np.flatnonzero(differ.any(1)) + begin
            what = f"{named_rows(rows)}: {int(differ.sum())} values of its {part} are not those of the source's weights"
            measured.problem("weights", what)


LEAST_CORRELATION, CLEARLY = 0.7, 0.3
"""A column whose correlation with its own is below LEAST_CORRELATION is compared with all others: it is another's where that is
CLEARLY more."""
MOST_COMPARED = 256
"""Columns of a weight that are compared with all others, the least alike of them."""
CERTAIN = 9.0
"""Standard deviations, as of a code that cannot be explained."""


class Columns:
    """Sums by column over all rows."""

    def __init__(self, count: int) -> None:
        self.far = np.zeros(count, np.int32)
        self.row_errors: list[F32] = []
        """Of each slab: mean squared distance of each row, in spreads."""
        self.xx, self.xq, self.qq = (np.zeros(count) for _ in range(3))


def check_columns(weight: Weight, columns: Columns, measured: Measured) -> None:
    """Each column is its own, and one of them is rounded to the nearest."""
    has_weight = columns.xx > 0
    measured.best_column = int(columns.far[has_weight].min(initial=np.iinfo(np.int32).max)) if has_weight.any() else 0
    if measured.best_column:
        measured.problem(
            "columns",
            f"no column is rounded to the nearest, as the first one of GPTQ is: {measured.best_column} of {weight.shape[0]} "
            "codes of the best one are not",
        )
    rows = weight.shape[0]
    empty = np.flatnonzero((columns.xx > rows) & (columns.qq < columns.xx / 4))
    if len(empty) and (lost := _lost(weight, empty)) is not None:
        measured.problem("columns", f"column {lost}: its codes are zeros, its weights are not")
    with np.errstate(divide="ignore", invalid="ignore"):
        own = np.where((columns.xx > 0) & (columns.qq > 0), columns.xq / np.sqrt(columns.xx * columns.qq), 1.0)
    unlike = np.flatnonzero((own < LEAST_CORRELATION) & (columns.qq >= rows / 2))
    if len(unlike):
        _exchanged(weight, columns, own, unlike[np.argsort(own[unlike])][:MOST_COMPARED], measured)


def _lost(weight: Weight, empty: NDArray[np.int64]) -> int | None:
    """The first of these columns whose weights differ in size: equal ones may all have been corrected to zero."""
    total, squares = np.zeros(len(empty)), np.zeros(len(empty))
    for begin, end in weight.slabs():
        size = np.abs(_steps(weight, begin, end)[1][:, empty]).astype(np.float64)
        total, squares = total + size.sum(0), squares + (size * size).sum(0)
    mean, square = total / weight.shape[0], squares / weight.shape[0]
    varied = np.flatnonzero(square - mean * mean > square / 20)
    return int(empty[varied[0]]) if len(varied) else None


def _steps(weight: Weight, begin: int, end: int) -> tuple[StepRows, F32]:
    rows, parts, _ = weight.rows(begin, end)
    divisor = check_scales(weight, rows, parts, 0, Measured()) if weight.is_divided else None
    return rows, rows.w_RI * np.repeat(inverse_of(rows, divisor), rows.group, 1)


def _exchanged(
    weight: Weight, columns: Columns, own: NDArray[np.float64], unlike: NDArray[np.int64], measured: Measured
) -> None:  # fmt: skip
    count, width = weight.shape[0], weight.shape[1]
    products, of_q, of_x = np.zeros((len(unlike), width)), np.zeros(len(unlike)), np.zeros(width)
    for begin, end in weight.slabs():
        rows, x = _steps(weight, begin, end)
        q = rows.q_RI[:, unlike].astype(np.float32)
        products, of_q, of_x = products + q.T @ x, of_q + q.sum(0), of_x + x.sum(0)
    with np.errstate(divide="ignore", invalid="ignore"):
        # about their means: columns of equal rows are all alike
        varied = np.sqrt(np.maximum(columns.qq[unlike] - of_q**2 / count, 0))[:, None]
        varied = varied * np.sqrt(np.maximum(columns.xx - of_x**2 / count, 0))[None, :]
        # what rounding loses of a weight below half a step is the weight itself, and others are corrected for it
        covariances = products - of_q[:, None] * of_x[None, :] / count
        correlations = np.where((varied > 1e-3) & (columns.xx >= count), covariances / varied, 0.0)
    own = own.copy()
    own[unlike] = correlations[np.arange(len(unlike)), unlike]
    best = np.abs(correlations).argmax(1)
    value = correlations[np.arange(len(unlike)), best]
    gap = np.arctanh(np.clip(np.abs(value), 0, 1 - 1e-9)) - np.arctanh(np.clip(own[unlike], -1 + 1e-9, 1 - 1e-9))
    is_another = np.abs(value) > np.maximum(own[unlike], 0) + CLEARLY
    is_turned = (value < -CLEARLY) & (best == unlike)
    wrong = (is_another | is_turned) & (gap * math.sqrt(max(0, count - 3) / 2) > CERTAIN)
    if len(at := np.flatnonzero(wrong)):
        column, other = int(unlike[at[0]]), int(best[at[0]])
        what = "turned round" if column == other else f"those of column {other}"
        measured.problem("columns", f"column {column}: its codes are {what} (correlation {abs(value[at[0]]):.2f})")


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
    measured = Measured()
    spread = _spread(weight) if weight.kind == "corrected" else None
    columns = Columns(weight.shape[1])
    divisors: list[Factor] = []
    for begin, end in weight.slabs():
        rows, parts, source = weight.rows(begin, end)
        if weight.kind == "nearest" and weight.is_plain and weight.observer == "minmax":
            _rounded(weight, parts, source, begin, measured)
            continue
        divisor = check_scales(weight, rows, parts, begin, measured)
        if divisor is not None:
            divisors.append(divisor)
        if spread is None:
            _nearest(weight, rows, divisor, begin, measured)
        else:
            _corrected(weight, rows, divisor, spread, begin, columns, measured)
    if divisors:
        measured.divisor = Factor(*(np.concatenate(values) for values in zip(*divisors, strict=True)))
    if spread is not None:
        check_columns(weight, columns, measured)
        if not spread.is_sparse:
            _row_errors(np.concatenate(columns.row_errors).astype(np.float64), measured)
    if weight.kind == "nearest" and abs(measured.drift) > MOST_DRIFT + FAR_SPREADS * measured.drift_error:
        measured.problem("rows", f"its codes are those of weights {100 * measured.drift:+.2f} % from its own, in the mean")
    return measured


# ------------------------------------------------------------------------------------------------ codes
def _add_errors(rows: StepRows, error_RG: F32, norm_RG: F32, measured: Measured) -> None:
    squares = rows.scale_RG.astype(np.float64) ** 2
    measured.squared_error += float((error_RG * squares).sum())
    measured.squared_norm += float((norm_RG * squares).sum())


def _rounded(weight: Weight, parts: dict[str, Array], source: Array, begin: int, measured: Measured) -> None:
    """Nothing was done to the weight but rounding: byte for byte."""
    made = quantize_rows(source, weight.tensor.logical_dtype, weight.scheme)
    measured.squared_error += made.squared_error
    measured.squared_norm += made.squared_norm
    for part, expected in made.parts.items():
        if (differ := parts[part] != expected).any():
            at = np.flatnonzero(differ.any(1))
            what = f"{named_rows(at + begin)}: {int(differ.sum())} values of its {part} are not what rounding the source gives"
            measured.problem("recomputed", what)


def _nearest(weight: Weight, rows: StepRows, divisor: Factor | None, begin: int, measured: Measured) -> None:
    count = len(rows.w_RI)
    error, norm = np.empty_like(rows.scale_RG), np.empty_like(rows.scale_RG)
    far, moved, towards = (np.empty(count, np.int32) for _ in range(3))
    size = np.empty(count, np.float32)
    what = "more than a step from" if weight.kind == "learned" else "not the nearest to"
    slack_R = np.zeros(count) if divisor is None else divisor.half
    count_far(
        rows.w_RI, rows.q_RI, inverse_of(rows, divisor), *ends_of(rows), np.float32(weight.reach + 0.01),
        slack_of(weight).astype(np.float32), slack_R.astype(np.float32), far, error, norm,
        moved, towards, size,
    )  # fmt: skip
    _add_errors(rows, error, norm, measured)
    measured.num_far += int(far.sum())
    measured.moved += int(moved.sum())
    measured.towards += int(towards.sum())
    measured.size += float(size.sum())
    if len(at := np.flatnonzero(far)):
        measured.problem(
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
    # at least what rounding by itself moves a weight
    least = np.maximum(LEAST_SPREAD * shares / counts, np.float32(1e-6))
    own_I, shared_I = np.maximum(_deviation(own / counts), LEAST_SPREAD), np.maximum(_deviation(shared / counts), least)
    return _Spread(own_I, shared_I, is_sparse=num_zeros > num_weights / 2)


def _deviation(means_2I: F32) -> F32:
    """Standard deviation by the mean magnitude, which a few damaged rows hardly change; of columns whose distances are mostly
    small and sometimes large (of sparse weights) it is nearer by the mean square. means_2I: both."""
    made: F32 = np.maximum(np.float32(GAUSSIAN) * means_2I[0], np.float32(OF_SQUARES) * np.sqrt(means_2I[1]))
    return made


def _corrected(
    weight: Weight, rows: StepRows, divisor: Factor | None, spread: _Spread, begin: int, columns: Columns, measured: Measured
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
    measured.num_far += int(far.sum())
    measured.num_inner += int(inner.sum())
    columns.row_errors.append(uu)
    _add_errors(rows, error, norm, measured)
    columns.xx += of_columns[0]
    columns.xq += of_columns[1]
    columns.qq += of_columns[2]
    at = np.unravel_index(int(most.argmax()), most.shape)
    if most[at] > measured.farthest[0] and not spread.is_sparse:
        measured.farthest = float(most[at]), f"row {begin + at[0]}, columns {at[1] * block} to {(at[1] + 1) * block - 1}"
    rare = np.flatnonzero((most > FAR_SPREADS).any(1))
    if len(rare) and not spread.is_sparse:
        what = f"a code is {most[rare[0]].max():.0f} standard deviations of its column from its weight"
        measured.problem("rows", f"{named_rows(rare + begin)}: {what}")
    for gain, below, where in _gains(xx, xq, xr, begin, block, blocks_too=not spread.is_sparse):
        if gain < measured.smallest_gain[0]:
            measured.smallest_gain = gain, below
        if gain < LEAST_GAIN and below > FAR_SPREADS:
            measured.problem("rows", f"{where}: its projection on its source is {gain:.2f} of it, where 1 is expected")


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


def _row_errors(error_R: NDArray[np.float64], measured: Measured) -> None:
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
    measured.largest_error = float(error_R[row] / allowed)
    if measured.largest_error > 1:
        times, most = error_R[row] / middle, allowed / middle
        what = f"row {row}: its squared error is {times:.1f} times that of others, where {most:.1f} can be explained"
        measured.problem("rows", what)
