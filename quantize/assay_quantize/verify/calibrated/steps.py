"""A calibrated weight in steps: how far each code is from its weight, in units of the scale; kernels in numba.

Rows of a weight are `w_RI` (FP32, as they were before rounding) and `q_RI` (int8: stored codes less their zero point), with a
scale for every `group` columns: `inverse_RG` is its reciprocal, `lows_RG` and `highs_RG` are the least and largest q that its
codes can say. A weight in steps is x = w * inverse, and the distance of its code is d = q - x. Where a code is the last one on
its side and the weight lies beyond it, the distance is explained by that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from assay.records.plan import TensorPlan
from assay_quantize.checkpoint.source_reader import SourceReader
from assay_quantize.formats.schemes import SCHEMES, module_of
from assay_quantize.kernels.bits import bits_of, from_bits, kernel, kernel_view, load, statistic
from assay_quantize.kernels.rows import Array
from assay_quantize.verify.files import StoredReader, has_rows, rows_of_part

F32 = NDArray[np.float32]
I8 = NDArray[np.int8]
u32 = np.uint32

NEAREST = np.float32(0.5 + 1e-4)
"""Steps that the nearest code may be away from its weight, with what FP32 leaves of the last bits."""


class Factor(NamedTuple):
    """What columns (or rows) were multiplied with. middle: NaN where it is not known, and nothing depends on it. half: as far,
    relative to that, it may be off."""

    middle: NDArray[np.float64]
    half: NDArray[np.float64]


class StepRows(NamedTuple):
    """Rows of a weight. zero_RG: what was taken from the codes; 0 where the scheme is symmetric. least, most: codes that there
    are. low_RG, high_RG: least and largest weight of every group, and 0 where all have the other sign."""

    w_RI: F32
    q_RI: I8
    scale_RG: F32
    zero_RG: NDArray[np.int32]
    least: int
    most: int
    low_RG: F32
    high_RG: F32

    @property
    def group(self) -> int:
        return int(self.w_RI.shape[1] // self.scale_RG.shape[1])


def step_rows(parts: Mapping[str, Array], rows: Array, is_symmetric: bool, columns_I: F32 | None) -> StepRows:
    """parts: of these rows, by local name, in storage form. rows: of the source. columns_I: what their columns were multiplied
    with; None: with nothing."""
    num_rows, num_columns = rows.shape
    scale_RG = as_f32(parts["weight_scale"])
    zero_RG = np.zeros(scale_RG.shape, np.int32)
    q_RI = np.empty((num_rows, num_columns), np.int8)
    least, most = -8, 7
    if "weight" in parts:
        q_RI, least, most = np.ascontiguousarray(parts["weight"]), -128, 127
    else:
        if not is_symmetric:
            words = np.repeat(parts["weight_zero_point"].view(np.uint32), 8, axis=0)[:num_rows]
            places = (np.arange(num_rows, dtype=np.uint32) % 8 * 4)[:, None]
            zero_RG = (words >> places & np.uint32(15)).astype(np.int32) - 8
        _unpack(np.ascontiguousarray(parts["weight_packed"]).view(np.uint8), zero_RG, q_RI)
    w_RI, low_RG, high_RG = np.empty(rows.shape, np.float32), np.empty_like(scale_RG), np.empty_like(scale_RG)
    if columns_I is None:
        columns_I = np.ones(num_columns, np.float32)
    _load(kernel_view(rows), columns_I, w_RI, low_RG, high_RG)
    return StepRows(w_RI, q_RI, scale_RG, zero_RG, least, most, low_RG, high_RG)


def as_f32(values: Array) -> F32:
    """Storage form (BF16 as bits) -> FP32, exactly."""
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values.astype(np.float32)


def inverses(scale_RG: F32) -> F32:
    """0 for what is no scale: those are damages of their own."""
    is_scale = np.isfinite(scale_RG) & (scale_RG != 0)
    return np.where(is_scale, 1 / np.where(is_scale, scale_RG, np.float32(1)), np.float32(0)).astype(np.float32)


def inverse_of(rows: StepRows, divisor: Factor | None) -> F32:
    """1 over what a step of each row and group is worth. divisor: of the rows."""
    inverse = inverses(rows.scale_RG)
    return inverse if divisor is None else (inverse / np.nan_to_num(divisor.middle, nan=1.0)[:, None]).astype(np.float32)


def ends_of(rows: StepRows) -> tuple[F32, F32]:
    """The least and the largest q that the codes can say."""
    return (rows.least - rows.zero_RG).astype(np.float32), (rows.most - rows.zero_RG).astype(np.float32)


# ------------------------------------------------------------------------------------------------ kernels
@kernel
def _unpack(packed_RB: Any, zero_RG: Any, q_RI: Any) -> None:
    """Two codes a byte, the first in the low half; 8 is the code of 0."""
    group = q_RI.shape[1] // zero_RG.shape[1]
    for r in range(q_RI.shape[0]):
        pairs_B, packed_B = q_RI[r].view(np.uint16), packed_RB[r]
        for b in range(packed_B.size):
            byte = np.uint16(packed_B[b])
            pairs_B[b] = np.uint16((byte | np.uint16(byte << np.uint16(4))) & np.uint16(0x0F0F))
        for g in range(zero_RG.shape[1]):
            less, q_g = np.int8(np.int32(8) + zero_RG[r, g]), q_RI[r, g * group : (g + 1) * group]
            for i in range(q_g.size):
                q_g[i] = np.int8(q_g[i] - less)


@kernel
def _load(w_OI: Any, columns_I: Any, made_RI: Any, low_RG: Any, high_RG: Any) -> None:
    """As FP32, times columns_I, with the range of every group; not for NaN."""
    group = w_OI.shape[1] // low_RG.shape[1]
    for r in range(w_OI.shape[0]):
        for g in range(low_RG.shape[1]):
            positive, negative = u32(0), u32(0)
            row, made = w_OI[r, g * group : (g + 1) * group], made_RI[r, g * group : (g + 1) * group]
            columns = columns_I[g * group : (g + 1) * group]
            for i in range(row.size):
                w = load(row, i) * columns[i]
                made[i] = w
                # magnitudes of one sign are in order of their bits
                bits = bits_of(w)
                magnitude = u32(bits & u32(0x7FFFFFFF))
                positive = max(positive, magnitude if bits == magnitude else u32(0))
                negative = max(negative, magnitude if bits != magnitude else u32(0))
            low_RG[r, g], high_RG[r, g] = -from_bits(negative), from_bits(positive)


@statistic
def add_spread(w_RI: Any, q_RI: Any, inverse_RG: Any, share_RG: Any, own_2I: Any, shared_2I: Any) -> None:
    """Add |d| and d * d of every column to `own_2I`, and of |d| times the share of its row and group to `shared_2I`."""
    group = w_RI.shape[1] // inverse_RG.shape[1]
    for r in range(w_RI.shape[0]):
        for g in range(inverse_RG.shape[1]):
            inverse, share = inverse_RG[r, g], share_RG[r, g]
            begin, end = g * group, (g + 1) * group
            w_g, q_g = w_RI[r, begin:end], q_RI[r, begin:end]
            own_g, own_squares_g = own_2I[0, begin:end], own_2I[1, begin:end]
            shared_g, shared_squares_g = shared_2I[0, begin:end], shared_2I[1, begin:end]
            for i in range(w_g.size):
                d = abs(np.float32(q_g[i]) - w_g[i] * inverse)
                own_g[i] += d
                own_squares_g[i] += d * d
                shared_g[i] += d * share
                shared_squares_g[i] += d * share * d * share


@statistic
def count_far(
    w_RI: Any, q_RI: Any, inverse_RG: Any, low_RG: Any, high_RG: Any, base: Any, slack_I: Any, slack_R: Any,
    far_R: Any, error_RG: Any, norm_RG: Any, moved_R: Any, towards_R: Any, size_R: Any,
) -> None:  # fmt: skip
    """far_R: codes of each row that are further from their weights than `base` and, for every step of the weight, the slack of
    their column and row. error_RG, norm_RG: sums of d * d and x * x. moved_R: codes that are not the nearest; towards_R: those
    of them that are nearer to zero, less those that are further from it; size_R: sums of |x|."""
    group = w_RI.shape[1] // inverse_RG.shape[1]
    for r in range(w_RI.shape[0]):
        far, moved, towards, size = np.int32(0), np.int32(0), np.int32(0), np.float32(0)
        for g in range(inverse_RG.shape[1]):
            inverse, low, high, slack = inverse_RG[r, g], low_RG[r, g], high_RG[r, g], slack_R[r]
            begin, end = g * group, (g + 1) * group
            w_g, q_g, slack_g = w_RI[r, begin:end], q_RI[r, begin:end], slack_I[begin:end]
            error, norm = np.float32(0), np.float32(0)
            for i in range(w_g.size):
                x, q = w_g[i] * inverse, np.float32(q_g[i])
                d = q - x
                error += d * d
                norm += x * x
                size += abs(x)
                allowed = base + abs(x) * (slack_g[i] + slack)
                above, below = q > low, -q > -high
                far += np.int32(1) if (d > allowed and above) or (-d > allowed and below) else np.int32(0)
                is_more, is_less = d > NEAREST and above, -d > NEAREST and below
                moved += np.int32(1) if is_more or is_less else np.int32(0)
                inwards = is_less if x > np.float32(0) else is_more
                outwards = is_more if x > np.float32(0) else is_less
                towards += np.int32(inwards) - np.int32(outwards)
            error_RG[r, g], norm_RG[r, g] = error, norm
        far_R[r], moved_R[r], towards_R[r], size_R[r] = far, moved, towards, size


@statistic
def compare(
    w_RI: Any, q_RI: Any, inverse_RG: Any, low_RG: Any, high_RG: Any, share_RG: Any, slack_I: Any,
    over_I: Any, over_shared_I: Any, block: Any,
    quotient: Any, far_I: Any, far_R: Any, inner_R: Any, uu_R: Any, xx_I: Any, xq_I: Any, qq_I: Any,
    error_RG: Any, norm_RG: Any, xx_RB: Any, xq_RB: Any, xr_RB: Any, most_RB: Any,
) -> None:  # fmt: skip
    """Sums by row and by column. over_I: 1 / spread of each column; over_shared_I: of |d| times the share of its row and group.

    By column, added to what is there: codes that are not the nearest, and sums of x * x, x * q and q * q. far_R: by row, codes
    that are not the nearest even if their quotient was rounded, by at most `quotient`. inner_R: codes that are neither 0
    nor the first or last. uu_R: the mean of u * u; u is |d| over the spread of its column, by the one or the other, whichever
    is less. By row and group: sums of d * d and x * x. By row and block of columns: sums of x * x, x * q and x * r over the
    square of the spread that u has, r being the nearest code; the largest u.
    """
    group = w_RI.shape[1] // inverse_RG.shape[1]
    for r in range(w_RI.shape[0]):
        far, inner, uu = np.int32(0), np.int32(0), np.float32(0)
        for g in range(inverse_RG.shape[1]):
            inverse, low, high, share = inverse_RG[r, g], low_RG[r, g], high_RG[r, g], share_RG[r, g]
            group_error, group_norm = np.float32(0), np.float32(0)
            for begin in range(g * group, (g + 1) * group, block):
                end = min(begin + block, (g + 1) * group)
                w_b, q_b, slack_b, over_b = w_RI[r, begin:end], q_RI[r, begin:end], slack_I[begin:end], over_I[begin:end]
                over_shared_b, far_b = over_shared_I[begin:end], far_I[begin:end]
                xx_b, xq_b, qq_b = xx_I[begin:end], xq_I[begin:end], qq_I[begin:end]
                error, norm, most = np.float32(0), np.float32(0), u32(0)
                xx, xq, xr = np.float32(0), np.float32(0), np.float32(0)
                for i in range(w_b.size):
                    x, q = w_b[i] * inverse, np.float32(q_b[i])
                    d = q - x
                    error += d * d
                    norm += x * x
                    xx_b[i] += x * x
                    xq_b[i] += x * q
                    qq_b[i] += q * q
                    over = min(over_b[i], share * over_shared_b[i])
                    scaled = x * over * over
                    xx += x * scaled
                    xq += q * scaled
                    xr += min(max(np.rint(x), low), high) * scaled
                    u = abs(d) * over
                    uu += u * u
                    most = max(most, bits_of(u))  # numbers above 0 are in order of their bits
                    allowed = NEAREST + abs(x) * slack_b[i]
                    above, below = q > low, -q > -high
                    inner += np.int32(1) if above and below and q != np.float32(0) else np.int32(0)
                    far_b[i] += np.int32(1) if (d > allowed and above) or (-d > allowed and below) else np.int32(0)
                    allowed += abs(x) * quotient
                    far += np.int32(1) if (d > allowed and above) or (-d > allowed and below) else np.int32(0)
                group_error += error
                group_norm += norm
                at = begin // block
                xx_RB[r, at], xq_RB[r, at], xr_RB[r, at], most_RB[r, at] = xx, xq, xr, from_bits(most)
            error_RG[r, g], norm_RG[r, g] = group_error, group_norm
        far_R[r], inner_R[r], uu_R[r] = far, inner, uu / np.float32(w_RI.shape[1])


Kind = Literal["nearest", "learned", "corrected"]
SLAB_ELEMENTS = 1 << 20
"""5 MB as FP32 and codes: more of them take longer, of fewer Python's part does."""


@dataclass
class Measured:
    """What the rows of a weight showed.

    problems: (check, what). num_far: codes that cannot be those of rounding to the nearest; under `learned` those more than a
    step away. num_inner: codes that are neither 0 nor the first or last, which another rounding would change. smallest_gain: of
    rows and blocks, with its standard deviations below 1. farthest: in spreads of its column; and where.
    largest_error: of a row, over what is allowed. best_column: the least
    number of codes of one column that are not the nearest. moved, towards, size: as in `count_far`, over all rows. divisor: of
    the rows, as their scales say.
    """

    squared_error: float = 0.0
    squared_norm: float = 0.0
    problems: list[tuple[str, str]] = field(default_factory=list)
    num_far: int = 0
    num_inner: int = 0
    smallest_gain: tuple[float, float] = (1.0, 0.0)
    farthest: tuple[float, str] = (0.0, "")
    largest_error: float = 0.0
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
        """Only the first of each check is kept."""
        if all(check != known for known, _ in self.problems):
            self.problems.append((check, what))


@dataclass(frozen=True)
class Weight:
    """A quantized weight, where it lies and how it was made. reach: steps that a code may be from its weight, where that is
    bounded. observer: of the recipe. columns: what its columns were multiplied
    with before they were rounded; None: nothing. is_divided: its rows were divided, by what only they show."""

    tensor: TensorPlan
    stored: StoredReader
    source: SourceReader
    kind: Kind
    observer: str
    reach: float = 0.5
    columns: Factor | None = None
    is_divided: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.tensor.shape
        return rows, columns

    @property
    def scheme(self) -> str:
        return str(self.tensor.scheme)

    @property
    def is_plain(self) -> bool:
        """It was rounded as it is in the source."""
        return self.columns is None and not self.is_divided

    def rows(self, begin: int, end: int) -> tuple[StepRows, dict[str, Array], Array]:
        """Rows [begin, end), the parts of them, and what the source has, in storage form."""
        parts = {}
        for output in self.tensor.outputs:
            part = output.name.removeprefix(f"{module_of(self.tensor.name)}.")
            if part.startswith("weight") and has_rows(output):
                parts[part] = self.stored.read_rows(output.name, *rows_of_part(self.scheme, part, begin, end))
        source = self.source.read_rows(self.tensor, begin, end)
        known = None
        if self.columns is not None:
            known = np.nan_to_num(self.columns.middle, nan=0.0).astype(np.float32)
        made = step_rows(parts, source, SCHEMES[self.scheme].symmetric, known)
        if self.columns is not None and (unknown := np.isnan(self.columns.middle)).any():
            made.q_RI[:, unknown] = 0  # compared with a weight of 0
        return made, parts, source

    def slabs(self) -> Iterator[tuple[int, int]]:
        step = max(8, SLAB_ELEMENTS // self.shape[1] // 8 * 8)  # eight rows share a word of zero points
        for begin in range(0, self.shape[0], step):
            yield begin, min(begin + step, self.shape[0])


def rounding(dtype: str) -> float:
    """As far as rounding to a dtype moves a number, relative: at most half a unit in the last place."""
    return {"BF16": 2.0**-8, "F16": 2.0**-11, "F32": 2.0**-24}[dtype]


def half_ulp(values: NDArray[np.float64], dtype: str) -> NDArray[np.float64]:
    """As far as rounding to a dtype moved what is now `values`."""
    _, exponents = np.frexp(values)
    return np.where(values == 0, 0.0, np.ldexp(rounding(dtype), exponents - 1))


def slack_of(weight: Weight) -> NDArray[np.float64]:
    """By column, relative: as far as a weight in steps may be off. Products and quotients were rounded to its dtype; AutoRound
    computes in BF16, its scales were rounded to it, and so are its sums."""
    if weight.kind == "learned":
        return np.full(weight.shape[1], 4 * rounding("BF16"))
    if weight.kind == "corrected" and weight.columns is None:
        return np.zeros(weight.shape[1])
    lost = 2 * rounding(weight.tensor.logical_dtype)
    return np.zeros(weight.shape[1]) + lost + (0 if weight.columns is None else np.nan_to_num(weight.columns.half))


def named_rows(numbers: NDArray[np.int64]) -> str:
    return f"row {numbers[0]}" if len(numbers) == 1 else f"row {numbers[0]} and {len(numbers) - 1} more"
