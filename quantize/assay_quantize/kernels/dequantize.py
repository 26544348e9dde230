"""FP8 weights back to BF16: float(w) * scale in FP32, rounded once to BF16 (to nearest, ties to even).

That is how compressed-tensors' `FP8BlockDequantizer` and its `decompress` compute it, bit for bit. One kernel for every
granularity: `block_rows` x `block_columns` weights share a scale; a row of scales for each block of rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from assay_quantize.kernels.bits import e4m3_to_f32, f32_to_bf16, kernel, round_bf16


def dequantize_rows(
    stored_OI: npt.NDArray[np.uint8],
    scale_BG: npt.NDArray[np.float32],
    *,
    block_rows: int,
    block_columns: int,
    first_row: int,
    out_OI: npt.NDArray[np.uint16],
) -> None:
    """BF16 bit patterns of some rows of an FP8 (E4M3) weight, into `out_OI`.

    first_row: number of the first row in the whole weight. scale_BG: the scales of the blocks of rows from that row on, one
    column for each `block_columns` columns (the last may be ragged). `stored_OI` may lie in the end of the memory of
    `out_OI`: a row is read before it is written over. NaN codes become NaN; scales must be finite. Releases the GIL.
    """
    _dequantize(stored_OI, scale_BG, block_rows, block_columns, first_row, out_OI)


@kernel
def _dequantize(stored_OI: Any, scale_BG: Any, block_rows: int, block_columns: int, first_row: int, out_OI: Any) -> None:
    rows, columns = stored_OI.shape
    stored = np.empty(columns, np.uint8)
    first_block = first_row // block_rows
    for row in range(rows):
        stored[:] = stored_OI[row]
        block = (first_row + row) // block_rows - first_block
        for group in range(scale_BG.shape[1]):
            scale = scale_BG[block, group]
            begin, end = group * block_columns, min((group + 1) * block_columns, columns)
            codes, out = stored[begin:end], out_OI[row, begin:end]
            for column in range(end - begin):
                out[column] = f32_to_bf16(round_bf16(e4m3_to_f32(codes[column]) * scale))
