"""Columns of a weight that GPTQ rounded: each is its own, and one of them is rounded to the nearest."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from assay_quantize.verify.calibrated.scales import check_scales
from assay_quantize.verify.calibrated.steps import F32, StepRows, inverse_of
from assay_quantize.verify.calibrated.weight import Measured, Weight

ALIKE, CLEARLY = 0.7, 0.3
"""A column whose correlation with its own is below ALIKE is held against all others: it is another's where that is CLEARLY
more."""
MOST_COMPARED = 256
"""Columns of a weight that are held against all others, the least alike of them."""
CERTAIN = 9.0
"""Standard deviations, as of a code that cannot be explained."""


class Columns:
    """Sums by column over all rows."""

    def __init__(self, count: int) -> None:
        self.far = np.zeros(count, np.int32)
        self.row_errors: list[F32] = []
        """Of each slab: mean squared distance of each row, in spreads."""
        self.xx, self.xq, self.qq = (np.zeros(count) for _ in range(3))


def check_columns(weight: Weight, columns: Columns, found: Measured) -> None:
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
    if len(empty) and (lost := _lost(weight, empty)) is not None:
        found.problem("columns", f"column {lost}: its codes are zeros, its weights are not")
    with np.errstate(divide="ignore", invalid="ignore"):
        own = np.where((columns.xx > 0) & (columns.qq > 0), columns.xq / np.sqrt(columns.xx * columns.qq), 1.0)
    unlike = np.flatnonzero((own < ALIKE) & (columns.qq >= rows / 2))
    if len(unlike):
        _exchanged(weight, columns, own, unlike[np.argsort(own[unlike])][:MOST_COMPARED], found)


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
    weight: Weight, columns: Columns, own: NDArray[np.float64], unlike: NDArray[np.int64], found: Measured
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
        alike = np.where(
            (varied > 1e-3) & (columns.xx >= count), (products - of_q[:, None] * of_x[None, :] / count) / varied, 0.0
        )
    own = own.copy()
    own[unlike] = alike[np.arange(len(unlike)), unlike]
    best = np.abs(alike).argmax(1)
    value = alike[np.arange(len(unlike)), best]
    gap = np.arctanh(np.clip(np.abs(value), 0, 1 - 1e-9)) - np.arctanh(np.clip(own[unlike], -1 + 1e-9, 1 - 1e-9))
    wrong = (np.abs(value) > np.maximum(own[unlike], 0) + CLEARLY) & (
        gap * math.sqrt(max(0, weight.shape[0] - 3) / 2) > CERTAIN
    )
    wrong |= (value < -CLEARLY) & (best == unlike) & (gap * math.sqrt(max(0, weight.shape[0] - 3) / 2) > CERTAIN)
    if len(at := np.flatnonzero(wrong)):
        column, other = int(unlike[at[0]]), int(best[at[0]])
        what = "turned round" if column == other else f"those of column {other}"
        found.problem("columns", f"column {column}: its codes are {what} (correlation {abs(value[at[0]]):.2f})")
