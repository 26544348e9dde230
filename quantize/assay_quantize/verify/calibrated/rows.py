"""One calibrated weight against its source, row by row: what its method can have made of it, and what it cannot.

What text decided cannot be made again, but every method leaves a mark that the source shows:

- `nearest` (AWQ, SmoothQuant): each code is the nearest one to its weight, scaled; only the last bits of the scales are not
  known (`smoothed.py`).
- `learned` (AutoRound, arXiv 2309.05516): it moves a weight by half a step at most, so a code is within one step of its weight.
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
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
import torch
from compressed_tensors.quantization.utils import calculate_qparams
from numpy.typing import NDArray

from assay.records.plan import TensorPlan
from assay_quantize.checkpoint.source_reader import STORAGE, SourceReader
from assay_quantize.formats.schemes import SCHEMES, compressed_tensors_scheme, module_of
from assay_quantize.kernels.rows import Array
from assay_quantize.verify.calibrated.steps import (
    F32,
    StepRows,
    add_spread,
    as_f32,
    compare,
    count_far,
    extents,
    inverses,
    step_rows,
)
from assay_quantize.verify.files import StoredReader, has_rows, rows_of_part

Kind = Literal["nearest", "learned", "corrected"]

FAR_SPREADS = 9.0
"""Spreads of its column that a code may be away."""
LEAST_GAIN = 0.5
"""Of a row, or of a block of BLOCK columns of it, where that is FAR_SPREADS standard deviations below 1."""
MOST_DRIFT = 0.002
"""Of all weights from their codes where scales are known but for their last bits, which are off to either side alike."""
PILOT_ROWS = 512
BLOCK = 128
SLAB_ELEMENTS = 1 << 18
"""FP32 and codes of them stay in the second cache."""
GAUSSIAN = math.sqrt(math.pi / 2)
"""Standard deviation over mean magnitude of a normal variable; of a uniform one 1.15."""
LEARNED = 1.0
SMALLEST_SEARCHED = 0.8
"""Least share of the range that `memoryless_mse` of llm-compressor 0.14 tries (`maxshrink` 0.2)."""
ALIKE, CLEARLY = 0.7, 0.3
"""A column whose correlation with its own is below ALIKE is held against all others: it is another's where that is CLEARLY
more."""
MOST_COMPARED = 256


class Factor(NamedTuple):
    """What columns (or rows) were multiplied with. middle: NaN where it is not known, and nothing depends on it. half: as far,
    relative to that, it may be off."""

    middle: NDArray[np.float64]
    half: NDArray[np.float64]


@dataclass
class Measured:
    """What the rows of a weight showed.

    problems: (check, what). far: nearest codes that are none, of all; under `learned` those more than a step away. smallest_gain:
    of rows and blocks with its standard deviations below 1; farthest: in spreads of its column, and where. best_column: the
    least number of such codes in a column that has any weight. divisor: of the rows, as their scales say.
    """

    squared_error: float = 0.0
    squared_norm: float = 0.0
    problems: list[tuple[str, str]] = field(default_factory=list)
    num_far: int = 0
    smallest_gain: tuple[float, float] = (1.0, 0.0)
    farthest: tuple[float, str] = (0.0, "")
    best_column: int = 0
    moved: int = 0
    towards: int = 0
    size: float = 0.0
    divisor: Factor | None = None

    @property
    def drift(self) -> float:
        """By how much all weights would have to be larger for as many codes to be moved away from zero as towards it: of
        weights with these scales, that many of them pass a boundary between two codes."""
        return -self.towards / self.size if self.size else 0.0

    @property
    def drift_error(self) -> float:
        """Standard deviation of the drift of codes that are moved either way alike."""
        return math.sqrt(self.moved) / self.size if self.size else 0.0

    def problem(self, check: str, what: str) -> None:
        """Only the first of each check is said."""
        if all(check != known for known, _ in self.problems):
            self.problems.append((check, what))


@dataclass(frozen=True)
class Weight:
    """A quantized weight, where it lies and how it was made. observer: of the recipe. columns: what its columns were multiplied
    with before they were rounded; None: nothing. is_divided: its rows were divided, by what only they show."""

    tensor: TensorPlan
    stored: StoredReader
    source: SourceReader
    kind: Kind
    observer: str
    columns: Factor | None = None
    is_divided: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.tensor.shape
        return rows, columns

    @property
    def scheme(self) -> str:
        return str(self.tensor.scheme)

    def rows(self, begin: int, end: int) -> tuple[StepRows, dict[str, Array]]:
        """Rows [begin, end), and the parts of them."""
        parts = {}
        for output in self.tensor.outputs:
            part = output.name.removeprefix(f"{module_of(self.tensor.name)}.")
            if part.startswith("weight") and has_rows(output):
                first, last = rows_of_part(self.scheme, part, begin, end)
                per_row = output.num_bytes // output.shape[0]
                size = (last - first) * per_row
                raw = self.stored.read(output.name, first * per_row, last * per_row, np.empty(size, np.uint8))
                parts[part] = raw.view(STORAGE[output.dtype]).reshape(last - first, *output.shape[1:])
        source = self.source.read_rows(self.tensor, begin, end)
        known = None
        if self.columns is not None:
            known = np.nan_to_num(self.columns.middle, nan=0.0).astype(np.float32)
        made = step_rows(parts, source, SCHEMES[self.scheme].symmetric, known)
        if self.columns is not None and (unknown := np.isnan(self.columns.middle)).any():
            made.q_RI[:, unknown] = 0  # compared with a weight of 0
        return made, parts

    def slabs(self) -> Iterator[tuple[int, int]]:
        step = max(8, SLAB_ELEMENTS // self.shape[1] // 8 * 8)
        for begin in range(0, self.shape[0], step):
            yield begin, min(begin + step, self.shape[0])


def measure(weight: Weight) -> Measured:
    """Look at every row. CheckpointError: a file cannot be read."""
    found = Measured()
    spread = _spread(weight) if weight.kind == "corrected" else None
    columns = _Columns(weight.shape[1])
    divisors: list[Factor] = []
    for begin, end in weight.slabs():
        rows, parts = weight.rows(begin, end)
        divisor = _scales(weight, rows, parts, begin, found)
        if divisor is not None:
            divisors.append(divisor)
        if spread is None:
            _nearest(weight, rows, divisor, begin, found)
        else:
            _corrected(weight, rows, divisor, spread, begin, columns, found)
    if divisors:
        found.divisor = Factor(*(np.concatenate(values) for values in zip(*divisors, strict=True)))
    if spread is not None:
        _columns(weight, columns, found)
    if weight.kind == "nearest" and abs(found.drift) > MOST_DRIFT + FAR_SPREADS * found.drift_error:
        found.problem("rows", f"its codes are those of weights {100 * found.drift:+.2f} % from its own, in the mean")
    return found


# ------------------------------------------------------------------------------------------------ scales
def rounding(dtype: str) -> float:
    """As far as rounding to a dtype moves a number, relative: half of what the last bit is worth, at the most."""
    return {"BF16": 2.0**-8, "F16": 2.0**-11, "F32": 2.0**-24}[dtype]


def half_ulp(values: NDArray[np.float64], dtype: str) -> NDArray[np.float64]:
    """As far as rounding to a dtype moved what is now `values`."""
    _, exponents = np.frexp(values)
    return np.where(values == 0, 0.0, np.ldexp(rounding(dtype), exponents - 1))


def _slack(weight: Weight) -> NDArray[np.float64]:
    """By column, relative: as far as a weight in steps may be off. Products and quotients were rounded to its dtype."""
    if weight.kind == "learned":
        return np.full(weight.shape[1], 2 * rounding(weight.tensor.logical_dtype))
    if weight.kind == "corrected" and weight.columns is None:
        return np.zeros(weight.shape[1])
    lost = 2 * rounding(weight.tensor.logical_dtype)
    return np.zeros(weight.shape[1]) + lost + (0 if weight.columns is None else np.nan_to_num(weight.columns.half))


def _scales(weight: Weight, rows: StepRows, parts: dict[str, Array], begin: int, found: Measured) -> Factor | None:
    """Scales and zero points against the range of their groups. Gives what the rows were divided by, where they were."""
    low, high = np.empty_like(rows.scale_RG), np.empty_like(rows.scale_RG)
    extents(rows.w_RI, low, high)
    if weight.columns is None and not weight.is_divided and weight.observer == "minmax" and weight.kind == "corrected":
        _same_scales(weight, low, high, parts, begin, found)
        return None
    row = SCHEMES[weight.scheme]
    range_RG = np.maximum(high, -low).astype(np.float64) / (127.5 if row.weight_dtype == "I8" else 7.5)
    if not row.symmetric:
        range_RG = (np.maximum(high, 0).astype(np.float64) - np.minimum(low, 0)) / 15
    scale_RG = rows.scale_RG.astype(np.float64)
    if weight.kind == "learned":
        if (over := np.abs(scale_RG) > range_RG * (7.5 / 8) * (1 + 4 * rounding("BF16")))[range_RG > 0].any():
            at = np.argwhere(over & (range_RG > 0))[0]
            found.problem("rows", f"row {begin + at[0]}: the scale of its group {at[1]} is beyond the range of its weights")
        return None
    return _range(weight, rows, range_RG, scale_RG, low, begin, found)


def _range(
    weight: Weight, rows: StepRows, range_RG: Array, scale_RG: Array, low_RG: F32, begin: int, found: Measured
) -> Factor | None:  # fmt: skip
    """Scales that follow from weights whose factors are known but for their last bits."""
    group, dtype = rows.group, weight.tensor.logical_dtype
    half_G = np.zeros(range_RG.shape[1])
    is_whole_G = np.ones(range_RG.shape[1], bool)
    if weight.columns is not None:
        half_G = np.nan_to_num(weight.columns.half).reshape(-1, group).max(1)
        is_whole_G = ~np.isnan(weight.columns.middle).reshape(-1, group).any(1)
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
            found.problem("scales", f"{_rows(wrong + begin)}: scales are not those of the largest weights, scaled")
        return None
    wrong = np.flatnonzero(low_R > high_R * (1 + 1e-6))
    if len(wrong):
        found.problem("scales", f"{_rows(wrong + begin)}: scales of its groups are not those of one row, divided")
    is_found = is_used.any(1) & np.isfinite(high_R)
    with np.errstate(invalid="ignore"):
        middle = np.where(is_found, (low_R + high_R) / 2, np.nan)
        half = np.where(is_found, np.abs(high_R - low_R) / 2 / middle, 0.0)
    return Factor(middle, half)


def _same_scales(weight: Weight, low: F32, high: F32, parts: dict[str, Array], begin: int, found: Measured) -> None:
    """By compressed-tensors, byte for byte."""
    scheme = compressed_tensors_scheme(weight.scheme).weights
    assert scheme is not None
    dtype = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}[weight.tensor.logical_dtype]
    scale, zero = calculate_qparams(torch.from_numpy(low).to(dtype), torch.from_numpy(high).to(dtype), scheme)
    made = {"weight_scale": (as_f32(parts["weight_scale"]), scale.float().numpy())}
    if "weight_zero_point" in parts:
        words = np.repeat(parts["weight_zero_point"].view(np.uint32), 8, axis=0)[: len(low)]
        places = (np.arange(len(low), dtype=np.uint32) % 8 * 4)[:, None]
        made["weight_zero_point"] = ((words >> places & np.uint32(15)).astype(np.int64) - 8, zero.to(torch.int64).numpy())
    for part, (stored, expected) in made.items():
        if (differ := stored != expected).any():
            rows = np.flatnonzero(differ.any(1)) + begin
            what = f"{_rows(rows)}: {int(differ.sum())} values of its {part} are not those of the source's weights"
            found.problem("weights", what)


def _rows(numbers: NDArray[np.int64]) -> str:
    return f"row {numbers[0]}" if len(numbers) == 1 else f"row {numbers[0]} and {len(numbers) - 1} more"


# ------------------------------------------------------------------------------------------------ codes
def _inverse(rows: StepRows, divisor: Factor | None) -> F32:
    inverse = inverses(rows.scale_RG)
    if divisor is None:
        return inverse
    return (inverse / np.nan_to_num(divisor.middle, nan=1.0)[:, None]).astype(np.float32)


def _ends(rows: StepRows) -> tuple[F32, F32]:
    """The least and the largest q that the codes can say."""
    return (rows.least - rows.zero_RG).astype(np.float32), (rows.most - rows.zero_RG).astype(np.float32)


def _add_errors(rows: StepRows, error_RG: F32, norm_RG: F32, found: Measured) -> None:
    squares = rows.scale_RG.astype(np.float64) ** 2
    found.squared_error += float((error_RG * squares).sum())
    found.squared_norm += float((norm_RG * squares).sum())


def _nearest(weight: Weight, rows: StepRows, divisor: Factor | None, begin: int, found: Measured) -> None:
    count = len(rows.w_RI)
    error, norm = np.empty_like(rows.scale_RG), np.empty_like(rows.scale_RG)
    far, moved, towards, size = (
        np.empty(count, np.int32),
        np.empty(count, np.int32),
        np.empty(count, np.int32),
        np.empty(count, np.float32),
    )
    base, what = (LEARNED, "more than a step from") if weight.kind == "learned" else (0.5, "not the nearest to")
    slack_R = np.zeros(count) if divisor is None else divisor.half
    count_far(
        rows.w_RI, rows.q_RI, _inverse(rows, divisor), *_ends(rows), np.float32(base + 0.01),
        _slack(weight).astype(np.float32), slack_R.astype(np.float32), far, error, norm,
        moved, towards, size,
    )  # fmt: skip
    _add_errors(rows, error, norm, found)
    found.num_far += int(far.sum())
    found.moved += int(moved.sum())
    found.towards += int(towards.sum())
    found.size += float(size.sum())
    if len(at := np.flatnonzero(far)):
        found.problem("rows", f"{_rows(at + begin)}: {int(far[at[0]])} of {weight.shape[1]} codes are {what} their weights")


class _Spread(NamedTuple):
    """Standard deviation of a column's distances, in steps of their groups, and of the longest group of their rows."""

    own_I: F32
    shared_I: F32


def _share(rows: StepRows) -> F32:
    """Steps of a group over the longest of its row."""
    sizes = np.abs(rows.scale_RG)
    most = sizes.max(1, keepdims=True)
    return np.where(most > 0, sizes / np.where(most > 0, most, 1), np.float32(1)).astype(np.float32)


def _spread(weight: Weight) -> _Spread:
    num_rows, columns = weight.shape
    own, shared, count = np.zeros(columns, np.float32), np.zeros(columns, np.float32), 0
    slabs = list(weight.slabs())
    needed = -(-PILOT_ROWS // (slabs[0][1] - slabs[0][0]))
    for number in sorted({round(at) for at in np.linspace(0, len(slabs) - 1, min(needed, len(slabs)))}):
        rows, parts = weight.rows(*slabs[number])
        divisor = _scales(weight, rows, parts, 0, Measured()) if weight.is_divided else None
        add_spread(rows.w_RI, rows.q_RI, _inverse(rows, divisor), _share(rows), own, shared)
        count += len(rows.w_RI)
    least = np.float32(1e-6)
    return _Spread(np.maximum(own * (GAUSSIAN / count), least), np.maximum(shared * (GAUSSIAN / count), least))


class _Columns:
    """Sums by column over all rows."""

    def __init__(self, count: int) -> None:
        self.far = np.zeros(count, np.int32)
        self.xx, self.xq, self.qq = (np.zeros(count) for _ in range(3))


def _corrected(
    weight: Weight, rows: StepRows, divisor: Factor | None, spread: _Spread, begin: int, columns: _Columns, found: Measured
) -> None:  # fmt: skip
    count, block = len(rows.w_RI), min(BLOCK, rows.group)
    blocks = rows.scale_RG.shape[1] * -(-rows.group // block)
    error, norm = np.empty_like(rows.scale_RG), np.empty_like(rows.scale_RG)
    xx, xq, most = (np.empty((count, blocks), np.float32) for _ in range(3))
    of_columns = [np.zeros(weight.shape[1], np.float32) for _ in range(3)]
    far = np.empty(count, np.int32)
    slack = _slack(weight) + (0 if divisor is None else float(np.nanmax(divisor.half, initial=0)))
    compare(
        rows.w_RI, rows.q_RI, _inverse(rows, divisor), *_ends(rows), _share(rows), slack.astype(np.float32),
        1 / spread.own_I, 1 / spread.shared_I, block, np.float32(2 * rounding(weight.tensor.logical_dtype)), columns.far, far,
        *of_columns, error, norm, xx, xq, most,
    )  # fmt: skip
    found.num_far += int(far.sum())
    _add_errors(rows, error, norm, found)
    columns.xx += of_columns[0]
    columns.xq += of_columns[1]
    columns.qq += of_columns[2]
    at = np.unravel_index(int(most.argmax()), most.shape)
    if most[at] > found.farthest[0]:
        found.farthest = float(most[at]), f"row {begin + at[0]}, columns {at[1] * block} to {(at[1] + 1) * block - 1}"
    if len(rare := np.flatnonzero((most > FAR_SPREADS).any(1))):
        what = f"a code is {most[rare[0]].max():.0f} standard deviations of its column from its weight"
        found.problem("rows", f"{_rows(rare + begin)}: {what}")
    for gain, below, where in _gains(xx, xq, begin, block):
        if gain < found.smallest_gain[0]:
            found.smallest_gain = gain, below
        if gain < LEAST_GAIN and below > FAR_SPREADS:
            found.problem("rows", f"{where}: its projection on its source is {gain:.2f} of it, where 1 is expected")


def _gains(xx_RB: F32, xq_RB: F32, begin: int, block: int) -> Iterator[tuple[float, float, str]]:
    """The worst row and the worst block: gain, standard deviations below 1, where."""
    with np.errstate(divide="ignore", invalid="ignore"):
        for of_row in (True, False):
            xx = xx_RB.sum(1, keepdims=True) if of_row else xx_RB
            gain = np.where(xx > 0, (xq_RB.sum(1, keepdims=True) if of_row else xq_RB) / xx, 1.0)
            below = (1 - gain) * np.sqrt(xx)
            bad = np.where(below > FAR_SPREADS, gain, np.inf)
            row, at = np.unravel_index(int((bad if np.isfinite(bad).any() else gain).argmin()), gain.shape)
            where = f"row {begin + row}" if of_row else f"row {begin + row}, columns {at * block} to {(at + 1) * block - 1}"
            yield float(gain[row, at]), float(below[row, at]), where


# ------------------------------------------------------------------------------------------------ columns
def _columns(weight: Weight, columns: _Columns, found: Measured) -> None:
    """Each column is its own, and one of them is rounded to the nearest."""
    has_weight = columns.xx > 0
    found.best_column = int(columns.far[has_weight].min(initial=np.iinfo(np.int32).max)) if has_weight.any() else 0
    if found.best_column:
        found.problem(
            "columns",
            f"no column is rounded to the nearest, as the first one of GPTQ is: {found.best_column} of {weight.shape[0]} codes "
            "of the best one are not",
        )
    rows = weight.shape[0]
    empty = np.flatnonzero((columns.xx > rows) & (columns.qq < columns.xx / 4))
    if len(empty):
        found.problem("columns", f"column {empty[0]}: its codes are zeros, its weights are not")
    with np.errstate(divide="ignore", invalid="ignore"):
        own = np.where((columns.xx > 0) & (columns.qq > 0), columns.xq / np.sqrt(columns.xx * columns.qq), 1.0)
    unlike = np.flatnonzero((own < ALIKE) & (columns.qq >= 8))
    if len(unlike):
        _exchanged(weight, columns, own, unlike[np.argsort(own[unlike])][:MOST_COMPARED], found)


def _exchanged(
    weight: Weight, columns: _Columns, own: NDArray[np.float64], unlike: NDArray[np.int64], found: Measured
) -> None:  # fmt: skip
    products = np.zeros((len(unlike), weight.shape[1]))
    for begin, end in weight.slabs():
        rows, parts = weight.rows(begin, end)
        divisor = _scales(weight, rows, parts, 0, Measured()) if weight.is_divided else None
        x = rows.w_RI * np.repeat(_inverse(rows, divisor), rows.group, 1)
        products += rows.q_RI[:, unlike].astype(np.float32).T @ x
    with np.errstate(divide="ignore", invalid="ignore"):
        alike = np.nan_to_num(products / np.sqrt(columns.qq[unlike][:, None] * columns.xx[None, :]))
    best = np.abs(alike).argmax(1)
    value = alike[np.arange(len(unlike)), best]
    gap = np.arctanh(np.clip(np.abs(value), 0, 1 - 1e-9)) - np.arctanh(np.clip(own[unlike], -1 + 1e-9, 1 - 1e-9))
    wrong = (np.abs(value) > np.maximum(own[unlike], 0) + CLEARLY) & (
        gap * math.sqrt(max(0, weight.shape[0] - 3) / 2) > FAR_SPREADS
    )
    wrong |= (value < -CLEARLY) & (best == unlike) & (gap * math.sqrt(max(0, weight.shape[0] - 3) / 2) > FAR_SPREADS)
    if len(at := np.flatnonzero(wrong)):
        column, other = int(unlike[at[0]]), int(best[at[0]])
        what = "turned round" if column == other else f"those of column {other}"
        found.problem("columns", f"column {column}: its codes are {what} (correlation {abs(value[at[0]]):.2f})")
