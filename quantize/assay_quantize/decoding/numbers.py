"""Codes to numbers: the arithmetic that several formats share. Everything in torch, results in FP32.

A code times a scale of 16 bits is exact in FP32; with FP32 scales, or two scales, it is rounded once or twice. Who serves in
BF16 rounds once more. Shapes: codes [rows, I], scales [blocks of rows, blocks of columns].
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""OCP MX: magnitudes of FP4; the highest of four bits is the sign."""
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Place in a word of AutoAWQ at which column 0, 1, ... lies (`awq/utils/packing_utils.py: AWQ_REVERSE_ORDER`, autoawq
0.2.9)."""


@functools.cache
def _e2m1_pairs() -> Tensor:
    """FP32 [256, 2]: the values of both codes of every byte."""
    values = torch.tensor([*E2M1, *(-value for value in E2M1)])
    byte = torch.arange(256)
    return torch.stack((values[byte & 15], values[byte >> 4]), dim=1)


def e2m1_values(packed: Tensor) -> Tensor:
    """FP32 [rows, 2n] of bytes [rows, n] that hold two FP4 codes each, the first in the low half."""
    codes = packed.reshape(-1).view(torch.uint8).int()
    return _e2m1_pairs().index_select(0, codes).view(packed.shape[0], -1)


def word_values(words: Tensor, num_bits: int) -> Tensor:
    """Codes [..., n * 32 / num_bits] (int32, >= 0) of int32 words [..., n], the first in the lowest bits; num_bits divides
    32."""
    shifts = torch.arange(0, 32, num_bits, dtype=torch.int32)
    return ((words.unsqueeze(-1) >> shifts) & ((1 << num_bits) - 1)).flatten(-2)


def packed_along_rows(words: Tensor, num_bits: int) -> Tensor:
    """Codes [n * 32 / num_bits, columns] of int32 words [n, columns] packed along the first dimension, as GPTQ packs them.

    Without gaps: 32 codes of 3 bits take 3 words, and a code may lie in two of them; n is then a multiple of 3.
    """
    if 32 % num_bits == 0:
        return word_values(words.t(), num_bits).t()
    starts = torch.arange(32) * num_bits
    word, shift = starts // 32, (starts % 32).view(1, 32, 1)
    groups = words.reshape(-1, num_bits, words.shape[-1]).long() & 0xFFFFFFFF
    # the last code of a group ends with its last word: what is clamped there is never taken
    next_word = groups[:, (word + 1).clamp(max=num_bits - 1)] << (32 - shift)
    codes = (groups[:, word] >> shift) | torch.where(shift + num_bits > 32, next_word, 0)
    made: Tensor = (codes & ((1 << num_bits) - 1)).flatten(0, 1).int()
    return made


def e8m0_values(exponents: Tensor) -> Tensor:
    """FP32 of exponents with bias 127 (uint8 or F8_E8M0): powers of two, 255 is NaN."""
    return exponents.view(torch.float8_e8m0fnu).float()


def float_scale(scale: Tensor) -> Tensor:
    """Scales in FP32, whatever they are stored in: bytes are exponents."""
    if scale.dtype in (torch.uint8, torch.float8_e8m0fnu):
        return e8m0_values(scale)
    return scale.float()


def times_scale(values_OI: Tensor, scale_BG: Tensor, shares: tuple[int, int]) -> Tensor:
    """FP32 values times the scale of their block, in place where `values_OI` is FP32.

    scale_BG: FP32, of the blocks that the rows lie in, from a block's first row on. shares: (rows, columns) of a block; the
    last ones may be ragged.
    """
    values_OI = values_OI.float()
    rows, columns = values_OI.shape
    if shares[0] != 1:
        scale_BG = scale_BG.repeat_interleave(min(shares[0], rows), 0)[:rows]
    if scale_BG.shape[1] == 1:
        return values_OI.mul_(scale_BG)
    if columns % shares[1] == 0:
        return values_OI.view(rows, -1, shares[1]).mul_(scale_BG.unsqueeze(-1)).view(rows, columns)
    return values_OI.mul_(scale_BG.repeat_interleave(shares[1], 1)[:, :columns])
