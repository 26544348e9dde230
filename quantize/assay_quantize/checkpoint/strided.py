"""Weights that lie in a file with gaps: rows that are columns of what is stored, every other row of it, or some rows of each
rank's share.

An expert of Llama 4 is stored as [inputs, 2 x width]: a row of its gate projection is a column there. No loader takes single
experts so: what is read is the weight [width, inputs].
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # plans are made without it
    import numpy.typing as npt

CHUNK_BYTES = 1 << 20
"""Read at once where gaps are read along with what is wanted."""
_LARGEST_GAP = 4
"""Where less than one value of so many is wanted, every stored row is read by itself."""

ReadInto = Callable[[memoryview, int], None]
"""(where to, offset in the file)."""


class Strides(NamedTuple):
    """From one row of a weight to the next, and from one column to the next, in values; both are 1 or more."""

    row: int
    column: int

    def extent(self, shape: tuple[int, ...]) -> int:
        """Values from the first to the last of a weight of this shape, those between them included."""
        columns = shape[1] if len(shape) > 1 else 1
        return (shape[0] - 1) * self.row + (columns - 1) * self.column + 1


class Pieces(NamedTuple):
    """Some rows of each rank's share of a tensor that was stored for ranks, one share behind the other.

    rows: of the weight in each share. step: stored rows from one share to the next. first: row of a share at which those of
    the weight begin. shared: rows of a share for which one row is stored: of scales of blocks; the last block of a share may be
    cut short.
    """

    rows: int
    step: int
    first: int
    shared: int = 1

    def stored_rows(self, begin: int, end: int) -> list[int]:
        """Of rows [begin, end) of the weight: which stored row each of them is, or has."""
        return [row // self.rows * self.step + (self.first + row % self.rows) // self.shared for row in range(begin, end)]


def _read_pieces(
    read: ReadInto, offset: int, pieces: Pieces, shape: tuple[int, ...], dtype: type[Any], begin: int, end: int
) -> npt.NDArray[Any]:
    """As `read_strided`, of a weight of 2 dimensions. offset: of the first stored row."""
    import numpy as np

    row_bytes = shape[1] * np.dtype(dtype).itemsize
    rows_OI: npt.NDArray[Any] = np.empty((end - begin, shape[1]), dtype)
    row = begin
    while row < end:
        stop = min(end, (row // pieces.rows + 1) * pieces.rows)
        stored_rows = np.array(pieces.stored_rows(row, stop))
        first = int(stored_rows[0])
        stored = np.empty((int(stored_rows[-1]) + 1 - first, shape[1]), dtype)
        read(stored.reshape(-1).view(np.uint8).data, offset + first * row_bytes)
        rows_OI[row - begin : stop - begin] = stored[stored_rows - first]
        row = stop
    return rows_OI


def read_strided(
    read: ReadInto, offset: int, strides: Strides | Pieces, shape: tuple[int, ...], dtype: type[Any], begin: int, end: int
) -> npt.NDArray[Any]:
    """Rows [begin, end) of a weight of 1 or 2 dimensions. offset: of its first value. dtype: of numpy, of the right size."""
    import numpy as np

    if isinstance(strides, Pieces):
        return _read_pieces(read, offset, strides, shape, dtype, begin, end)
    size, columns = np.dtype(dtype).itemsize, math.prod(shape[1:])
    rows_OI: npt.NDArray[Any] = np.empty((end - begin, columns), dtype)
    by_rows = strides.row >= strides.column
    outer, inner = (strides.row, strides.column) if by_rows else (strides.column, strides.row)
    num_outer, num_inner = rows_OI.shape if by_rows else rows_OI.shape[::-1]
    first = offset + begin * strides.row * size
    span = (num_inner - 1) * inner + 1
    at_once = max(1, CHUNK_BYTES // (outer * size)) if span * _LARGEST_GAP >= outer else 1
    for done in range(0, num_outer, at_once):
        count = min(at_once, num_outer - done)
        stored = np.empty((count - 1) * outer + span, dtype)
        read(stored.view(np.uint8).data, first + done * outer * size)
        values = np.lib.stride_tricks.as_strided(stored, (count, num_inner), (outer * size, inner * size))
        if by_rows:
            rows_OI[done : done + count] = values
        else:
            rows_OI[:, done : done + count] = values.T
    return rows_OI.reshape(end - begin, *shape[1:])
