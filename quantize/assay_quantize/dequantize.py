"""FP8 weights back to BF16: float(w) * scale in FP32, rounded once to BF16 (to nearest, ties to even).

That is how compressed-tensors' `FP8BlockDequantizer` and its `decompress` compute it, bit for bit. One kernel for every
granularity: `block_rows` x `block_columns` weights share a scale; a row of scales for each block of rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

_I32, _F32 = ir.IntType(32), ir.FloatType()


def _bits(number: int) -> Any:
    return ir.Constant(_I32, number)


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
    `out_OI`: a row is read before it is written over. NaN codes become NaN. Releases the GIL.
    """
    _dequantize(stored_OI, scale_BG, block_rows, block_columns, first_row, out_OI)


@intrinsic
def _float_of_e4m3(typing_context: Any, code: Any) -> Any:
    """E4M3 code (uint8) -> float32, without passing through FP32's slow subnormals."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        code_32 = builder.zext(arguments[0], _I32)
        magnitude = builder.and_(code_32, _bits(0x7F))
        sign = builder.shl(builder.and_(code_32, _bits(0x80)), _bits(24))
        placed = builder.shl(magnitude, _bits(20))
        normal = builder.bitcast(builder.add(placed, _bits((127 - 7) << 23)), _F32)
        # exponent 0: 2^-6 * mantissa, made as 2^-6 * (1 + mantissa) - 2^-6
        above = builder.bitcast(builder.add(placed, _bits((127 - 6) << 23)), _F32)
        subnormal = builder.fsub(above, ir.Constant(_F32, 2.0**-6))
        value = builder.select(builder.icmp_unsigned("<", magnitude, _bits(8)), subnormal, normal)
        finite = builder.bitcast(value, _I32)
        bits = builder.select(builder.icmp_unsigned("==", magnitude, _bits(0x7F)), _bits(0x7FC00000), finite)
        return builder.bitcast(builder.or_(bits, sign), _F32)

    return types.float32(types.uint8), generate


@intrinsic
def _bf16_bits(typing_context: Any, value: Any) -> Any:
    """float32 -> bits of the nearest BF16 (uint16), ties to even."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        bits = builder.bitcast(arguments[0], _I32)
        lowest_kept = builder.and_(builder.lshr(bits, _bits(16)), _bits(1))
        rounded = builder.lshr(builder.add(bits, builder.add(lowest_kept, _bits(0x7FFF))), _bits(16))
        is_nan = builder.fcmp_unordered("uno", arguments[0], arguments[0])
        return builder.trunc(builder.select(is_nan, _bits(0x7FC0), rounded), ir.IntType(16))

    return types.uint16(types.float32), generate


@njit(nogil=True, cache=True, fastmath=False)  # type: ignore[untyped-decorator]
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
                out[column] = _bf16_bits(_float_of_e4m3(codes[column]) * scale)  # type: ignore[call-arg]
