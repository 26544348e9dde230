"""FP8, FP4 and INT4 weights back to BF16: float(w) * scale in FP32, rounded once to BF16 (to nearest, ties to even).

That is how compressed-tensors' `FP8BlockDequantizer` and its `decompress` compute it, bit for bit. FP8 has one kernel for every
granularity: `block_rows` x `block_columns` weights share a scale; a row of scales for each block of rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from assay_quantize.kernels.bits import e4m3_to_f32, f32_to_bf16, kernel, round_bf16

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_VALUES = np.array([sign * value for sign in (1, -1) for value in _MAGNITUDES], np.float32)
"""Of every code; the highest of four bits is the sign."""
INT4_VALUES = np.arange(-8, 8).astype(np.float32)
"""Of every code, to which 8 was added."""


@kernel
def dequantize_codes(packed_OP: Any, scale_OG: Any, values: Any, out_OI: Any) -> None:
    """BF16 bit patterns of rows of a 4-bit weight, into `out_OI`; two codes in a byte, the first in its low half.

    values: of the 16 codes. `packed_OP` may lie in the end of the memory of `out_OI`: a row is read before it is written over.
    Scales must be finite; with those that are powers of two nothing is rounded. Releases the GIL.
    """
    rows, num_bytes = packed_OP.shape
    packed = np.empty(num_bytes, np.uint8)
    group_bytes = num_bytes // scale_OG.shape[1]
    for row in range(rows):
        packed[:] = packed_OP[row]
        for group in range(scale_OG.shape[1]):
            scale = scale_OG[row, group]
            for byte in range(group * group_bytes, (group + 1) * group_bytes):
                out_OI[row, 2 * byte] = f32_to_bf16(round_bf16(values[packed[byte] & 15] * scale))
                out_OI[row, 2 * byte + 1] = f32_to_bf16(round_bf16(values[packed[byte] >> 4] * scale))


@kernel
def dequantize_rows(stored_OI: Any, scale_BG: Any, block_rows: int, block_columns: int, first_row: int, out_OI: Any) -> None:
    """BF16 bit patterns of some rows of an FP8 (E4M3) weight, into `out_OI`.

    first_row: number of the first row in the whole weight. scale_BG: the scales of the blocks of rows from that row on, one
    column for each `block_columns` columns (the last may be ragged). `stored_OI` may lie in the end of the memory of
    `out_OI`: a row is read before it is written over. NaN codes become NaN; scales must be finite. Releases the GIL.
    """
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
