"""Scales of a calibrated weight against the range of its weights; what its rows were divided by, where only scales say it."""

from __future__ import annotations

import math

import numpy as np
import torch
from compressed_tensors.quantization.utils import calculate_qparams

from assay_quantize.checkpoint.torch_tensors import TORCH_DTYPES
from assay_quantize.formats.schemes import SCHEMES, compressed_tensors_scheme
from assay_quantize.kernels.rows import Array
from assay_quantize.verify.calibrated.steps import F32, Factor, StepRows, as_f32, ends_of, inverses
from assay_quantize.verify.calibrated.weight import Measured, Weight, half_ulp, named_rows, rounding, slack_of

SMALLEST_SEARCHED = 0.8
"""Least share of the range that `memoryless_mse` of llm-compressor 0.14 tries (`maxshrink` 0.2)."""


def check_scales(weight: Weight, rows: StepRows, parts: dict[str, Array], begin: int, found: Measured) -> Factor | None:
    """Scales and zero points against the range of their groups. Gives what the rows were divided by, where they were."""
    low, high = rows.low_RG, rows.high_RG
    if weight.is_plain and weight.observer == "minmax" and weight.kind == "corrected":
        _same_scales(weight, low, high, parts, begin, found)
        return None
    row = SCHEMES[weight.scheme]
    # as `calculate_qparams` has it: 0 is always among the numbers that the codes can say
    range_RG = np.maximum(high, -low).astype(np.float64) / (127.5 if row.weight_dtype == "I8" else 7.5)
    if not row.symmetric:
        range_RG = (np.maximum(high, 0).astype(np.float64) - np.minimum(low, 0)) / 15
    scale_RG = rows.scale_RG.astype(np.float64)
    if weight.kind == "learned":
        over = (np.abs(scale_RG) > range_RG * (7.5 / 8) * (1 + 4 * rounding("BF16"))) & (range_RG > 0)
        if over.any():
            at = np.argwhere(over)[0]
            found.problem("rows", f"row {begin + at[0]}: the scale of its group {at[1]} is beyond the range of its weights")
        return None
    return _of_range(weight, rows, range_RG, scale_RG, begin, found)


def _of_range(
    weight: Weight, rows: StepRows, range_RG: Array, scale_RG: Array, begin: int, found: Measured
) -> Factor | None:  # fmt: skip
    """Scales that follow from weights whose factors are known but for their last bits."""
    group, dtype = rows.group, weight.tensor.logical_dtype
    half_G = np.zeros(range_RG.shape[1])
    is_whole_G: Array = np.ones(range_RG.shape[1], bool)
    if weight.columns is not None:
        half_G = np.nan_to_num(weight.columns.half).reshape(-1, group).max(1)
        is_whole_G = np.asarray(np.isfinite(weight.columns.middle).reshape(-1, group).all(1))
    if not weight.is_divided and SCHEMES[weight.scheme].symmetric:
        _expected(weight, range_RG, scale_RG, half_G, is_whole_G, begin, found)
        return None
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
            found.problem("scales", f"{named_rows(wrong + begin)}: scales are not those of the largest weights, scaled")
        return None
    wrong = np.flatnonzero(low_R > high_R * (1 + 1e-6))
    if len(wrong):
        found.problem("scales", f"{named_rows(wrong + begin)}: scales of its groups are not those of one row, divided")
    # a search leaves too much open
    is_found = is_used.any(1) & np.isfinite(high_R) & (weight.observer == "minmax")
    with np.errstate(invalid="ignore"):
        middle = np.where(is_found, (low_R + high_R) / 2, np.nan)
        half = np.where(is_found, np.abs(high_R - low_R) / 2 / middle, 0.0)
    for row in np.flatnonzero(~is_found & is_used.any(1)):
        middle[row], half[row] = _by_codes(weight, rows, int(row))
    return Factor(middle, half)


def _expected(
    weight: Weight, range_RG: Array, scale_RG: Array, half_G: Array, is_whole_G: Array, begin: int, found: Measured
) -> None:  # fmt: skip
    """Symmetric scales of weights whose factors are known but for their last bits: rounding keeps the order of numbers, so they
    are between what the least and the largest of the factors give."""
    dtype, half_range = weight.tensor.logical_dtype, 127.5 if SCHEMES[weight.scheme].weight_dtype == "I8" else 7.5

    def rounded(values: Array) -> Array:
        made: Array = torch.from_numpy(values).to(TORCH_DTYPES[dtype]).double().numpy()
        return made

    off = half_G + 1e-6
    low, high = (rounded(rounded(range_RG * half_range * (1 + sign * off)) / half_range) for sign in (-1, 1))
    if weight.observer != "minmax":
        low = low * (SMALLEST_SEARCHED - 2 * rounding(dtype))
    wrong_RG = ((scale_RG < low) | ((scale_RG > high) & is_whole_G)) & (range_RG > 0) & (high > 0)
    if (wrong := wrong_RG.any(1)).any():
        what = f"{int(wrong_RG.sum())} scales are not those of the largest weights{'' if weight.is_plain else ', scaled'}"
        found.problem("scales", f"{named_rows(np.flatnonzero(wrong) + begin)}: {what}")


def _by_codes(weight: Weight, rows: StepRows, row: int) -> tuple[float, float]:
    """What a row was divided by, where its scales do not say it. Of nearest codes each leaves a range, and all together one; of
    corrected ones it is what makes the row's projection on its source 1. (NaN, 0): they do not say it."""
    x = (rows.w_RI[row] * np.repeat(inverses(rows.scale_RG[row]), rows.group)).astype(np.float64)
    q, low, high = rows.q_RI[row].astype(np.float64), *(np.repeat(ends[row], rows.group) for ends in ends_of(rows))
    product = float(x @ q)
    if product <= 0:
        return math.nan, 0.0
    if weight.kind == "corrected":
        return float(x @ x) / product, 2 / math.sqrt(float(x @ x))
    size, sign, slack = np.abs(x), np.sign(x), slack_of(weight)
    inner, outer = np.where(x > 0, low, -high), np.where(x > 0, high, -low)
    with np.errstate(divide="ignore", invalid="ignore"):
        least = np.where((size > 0) & (q * sign > inner), (q * sign - 0.51) / size * (1 - slack), 0.0).max(initial=0.0)
        most = np.where((size > 0) & (q * sign < outer), (q * sign + 0.51) / size * (1 + slack), np.inf).min(initial=np.inf)
    if not (0 < most < math.inf and least <= most):
        return float(x @ x) / product, 0.0  # its codes will be far from their weights
    return 2 / (least + most), (most - least) / (most + least)


def _same_scales(weight: Weight, low: F32, high: F32, parts: dict[str, Array], begin: int, found: Measured) -> None:
    """By compressed-tensors, byte for byte."""
    scheme = compressed_tensors_scheme(weight.scheme).weights
    assert scheme is not None
    dtype = TORCH_DTYPES[weight.tensor.logical_dtype]
    scale, zero = calculate_qparams(torch.from_numpy(low).to(dtype), torch.from_numpy(high).to(dtype), scheme)
    made: dict[str, tuple[Array, Array]] = {"weight_scale": (as_f32(parts["weight_scale"]), scale.float().numpy())}
    if "weight_zero_point" in parts:
        words = np.repeat(parts["weight_zero_point"].view(np.uint32), 8, axis=0)[: len(low)]
        places = (np.arange(len(low), dtype=np.uint32) % 8 * 4)[:, None]
        made["weight_zero_point"] = ((words >> places & np.uint32(15)).astype(np.int64) - 8, zero.to(torch.int64).numpy())
    for part, (stored, expected) in made.items():
        if (differ := stored != expected).any():
            rows = np.flatnonzero(differ.any(1)) + begin
            what = f"{named_rows(rows)}: {int(differ.sum())} values of its {part} are not those of the source's weights"
            found.problem("weights", what)
