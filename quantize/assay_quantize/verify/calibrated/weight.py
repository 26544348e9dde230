"""A calibrated weight where it lies, by rows; what was found of one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from assay.records.plan import TensorPlan
from assay_quantize.checkpoint.source_reader import STORAGE, SourceReader
from assay_quantize.formats.schemes import SCHEMES, module_of
from assay_quantize.kernels.rows import Array
from assay_quantize.verify.calibrated.steps import Factor, StepRows, step_rows
from assay_quantize.verify.files import StoredReader, has_rows, rows_of_part

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
        """Only the first of each check is said."""
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
        return made, parts, source

    def slabs(self) -> Iterator[tuple[int, int]]:
        step = max(8, SLAB_ELEMENTS // self.shape[1] // 8 * 8)  # eight rows share a word of zero points
        for begin in range(0, self.shape[0], step):
            yield begin, min(begin + step, self.shape[0])


def rounding(dtype: str) -> float:
    """As far as rounding to a dtype moves a number, relative: half of what the last bit is worth, at the most."""
    return {"BF16": 2.0**-8, "F16": 2.0**-11, "F32": 2.0**-24}[dtype]


def half_ulp(values: NDArray[np.float64], dtype: str) -> NDArray[np.float64]:
    """As far as rounding to a dtype moved what is now `values`."""
    _, exponents = np.frexp(values)
    return np.where(values == 0, 0.0, np.ldexp(rounding(dtype), exponents - 1))


def slack_of(weight: Weight) -> NDArray[np.float64]:
    """By column, relative: as far as a weight in steps may be off. Products and quotients were rounded to its dtype; AutoRound
    computes in BF16, its scales were rounded to it, and so is what it adds."""
    if weight.kind == "learned":
        return np.full(weight.shape[1], 4 * rounding("BF16"))
    if weight.kind == "corrected" and weight.columns is None:
        return np.zeros(weight.shape[1])
    lost = 2 * rounding(weight.tensor.logical_dtype)
    return np.zeros(weight.shape[1]) + lost + (0 if weight.columns is None else np.nan_to_num(weight.columns.half))


def named_rows(numbers: NDArray[np.int64]) -> str:
    return f"row {numbers[0]}" if len(numbers) == 1 else f"row {numbers[0]} and {len(numbers) - 1} more"
