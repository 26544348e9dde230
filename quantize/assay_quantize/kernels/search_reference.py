"""Scale search (`observer: mse`): the definition, in torch. search_fused.py must choose the same scales, bit for bit.

For every set of weights that share a scale, a few candidate scales are tried and the one with the smallest error is kept; at a
tie the first. The first candidate is the min-max scale, so the error is never larger than that one's.

    candidates   float scales (INT4, INT8, FP8): the min-max scale times each of the factors in search_grids.py, rounded to its
                 dtype; for asymmetric INT4 both ends of the range times each, then scale and zero point as usual. Scales that
                 are codes (NVFP4's E4M3, MX's exponents): the code plus each of the offsets. A candidate that is not a
                 positive finite number is replaced by the first; a min-max scale that overflows stays.
    error        sum of (dequantized - w)^2 * u, with what would be stored and read back, every rounding included
    u            without channel weights 1, for integers w^2; with them the channel's weight, for integers times w^2 + the mean
                 of w^2 over all that share the scale (a sum as below, over their number)
    sum          in FP32, over chunks of 128 columns (or the group), as a tree: neighbours are added, then neighbours of these
                 sums, and so on (`fold`); first over the chunks, then over the columns of a chunk; zeros where no weight is

Why w^2 for integers: their grid is even, so one far outlier makes the error of all others large and the plain error is smallest
where the outlier is clipped. But the model needs just these: on tiny-glm the plain search lowers the weight error and raises
the KL, nearly all of it in the down projections of a few experts, whose largest weights are 12 times the root mean square and
meet the largest activations (the "super weights" of arXiv 2411.07191). ggml weighs INT4 by w^2, too (`make_qx_quants`,
rmse_type 1). FP4 has fine steps near zero, coarse ones far out and groups of 16: there the plain error is better. FP8 gains
little either way. Where channel weights say which inputs are large, w^2 need not stand in for it alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from compressed_tensors.compressors.mx_utils import compress_mx_scale, decompress_mx_scale
from compressed_tensors.quantization import QuantizationArgs, QuantizationType
from torch import Tensor

from assay_quantize.formats.schemes import SCHEMES
from assay_quantize.kernels.search_grids import CHUNK, FP8_FACTORS, INT_FACTORS, MX_OFFSETS, NVFP4_OFFSETS

Stored = Callable[[Tensor, Tensor | None], Tensor]
"""`stored(scale, zero_point)` -> the weight as it is read back, w_OI."""
FromRange = Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]
"""`from_range(low, high)` -> min-max scale and zero point of weights between them."""

SQUARED = (QuantizationType.INT,)
"""Types of codes whose errors are weighted by w^2."""


def search_scales(
    w_OI: Tensor,
    low: Tensor,
    high: Tensor,
    scheme: str,
    args: QuantizationArgs,
    from_range: FromRange,
    stored: Stored,
    importance_I: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """The best (scale, zero point) of every group, block or row, in the dtypes `from_range` returns.

    w_OI: finite. low, high: the ranges. from_range, stored: the scheme's min-max arithmetic, there and back.
    importance_I: FP32 [I], finite, >= 0. Not finite errors (weights beyond 1e19) lose, so the min-max scale stays.
    """
    wide = w_OI.float()
    u_OI = torch.ones_like(wide) if importance_I is None else importance_I.to(wide).expand_as(wide)
    if args.type in SQUARED:
        u_OI = u_OI * (wide * wide + (0 if importance_I is None else _mean_square(wide, scheme)))
    best_scale, best_zero = from_range(low, high)
    least = torch.full_like(best_scale, torch.nan, dtype=torch.float32)
    for number, (scale, zero) in enumerate(_candidates(low, high, scheme, args, from_range)):
        difference = stored(scale, zero).float() - wide
        error = _error_of_scales((difference * difference) * u_OI, scheme).reshape(scale.shape)
        better = error < least if number else torch.ones_like(error, dtype=torch.bool)
        least = torch.where(better, error, least)
        best_scale = torch.where(better, scale, best_scale)
        if zero is not None and best_zero is not None:
            best_zero = torch.where(better, zero, best_zero)
    return best_scale, best_zero


def _candidates(
    low: Tensor, high: Tensor, scheme: str, args: QuantizationArgs, from_range: FromRange
) -> Iterator[tuple[Tensor, Tensor | None]]:
    first, zero = from_range(low, high)
    yield first, zero
    layout = SCHEMES[scheme].layout
    if layout == "nvfp4":
        code = first.to(torch.float8_e4m3fn).view(torch.uint8).int()
        for offset in NVFP4_OFFSETS:
            yield (code + offset).clamp(1, 126).to(torch.uint8).view(torch.float8_e4m3fn).to(first.dtype), zero
    elif layout in ("mxfp4", "mxfp8"):
        code = compress_mx_scale(first, torch.uint8).int()
        for offset in MX_OFFSETS:
            scale = decompress_mx_scale((code + offset).clamp(0, 254).to(torch.uint8)).to(first.dtype)
            yield torch.where(torch.isfinite(first), scale, first), zero
    else:
        for factor in torch.tensor(INT_FACTORS if args.type == QuantizationType.INT else FP8_FACTORS):
            if zero is None:
                scale = (first.float() * factor).to(first.dtype)
                yield torch.where((scale > 0) & torch.isfinite(scale), scale, first), None
            else:
                scale, moved = from_range((low.float() * factor).to(low.dtype), (high.float() * factor).to(high.dtype))
                assert moved is not None
                usable = torch.isfinite(first)
                yield torch.where(usable, scale, first), torch.where(usable, moved, zero)


def fold(x: Tensor) -> Tensor:
    """The sum over the last dimension as a tree of neighbours, in the tensor's dtype: ((x0+x1) + (x2+x3)) + ..."""
    size = 1 << (x.shape[-1] - 1).bit_length()
    x = torch.nn.functional.pad(x, (0, size - x.shape[-1]))
    while x.shape[-1] > 1:
        x = x[..., 0::2] + x[..., 1::2]
    return x[..., 0]


def _mean_square(w_OI: Tensor, scheme: str) -> Tensor:
    """Mean of w^2 over all weights that share a scale (of a group or a row), for each weight."""
    sums_RC = _error_of_scales(w_OI * w_OI, scheme)
    width = w_OI.shape[1] // sums_RC.shape[1]
    return (sums_RC / width).repeat_interleave(width, 1)


def _error_of_scales(e_OI: Tensor, scheme: str) -> Tensor:
    """Sums of the elements' errors, [rows of scales, columns of scales]."""
    row = SCHEMES[scheme]
    rows, columns = e_OI.shape
    if row.group_size is not None and row.block_rows == 1:
        e_RGCL = e_OI.reshape(rows, -1, row.group_size)[:, :, None] if row.group_size <= CHUNK else None
        assert e_RGCL is not None, f"{scheme}: groups of more than {CHUNK}"
        return fold(fold(e_RGCL.transpose(-1, -2)))
    height = row.block_rows
    padded = torch.nn.functional.pad(e_OI, (0, -columns % CHUNK, 0, -rows % height))
    e_RHCL = padded.reshape(padded.shape[0] // height, height, -1, CHUNK)
    if row.group_size is None:  # the chunks of a row
        return fold(fold(e_RHCL.reshape(e_RHCL.shape[0], 1, -1, CHUNK).transpose(-1, -2)))
    return fold(fold(e_RHCL.permute(0, 2, 3, 1)))  # the rows of a block
