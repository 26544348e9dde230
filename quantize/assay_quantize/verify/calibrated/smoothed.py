"""Layers that AWQ or SmoothQuant scaled: the scales are not stored, but the source and what is stored say what they were.

Both divide a norm by s and multiply the columns of the linears that read it by s; AWQ divides the rows of an up projection
by t and multiplies the columns of its down projection by t. What is stored was rounded to its dtype, so a stored norm y of n
says that s lies between n / (y + h) and n / (y - h), where h is half of what the last bit of y is worth; each row of a router
(w, stored as y) says that it lies between (y - h) / w and (y + h) / w. All of them together must leave an s for each channel.
With it the weights are known but for their last bits, so their scales and codes are compared as those of any weight that was
rounded to the nearest (`rows.py`). The t of a row is what the scales of its groups say.

A channel that is zero whatever the text (of a norm whose gain is 0, of a row of zeros in an up projection) says nothing of its
scale, and nothing depends on what weights make of it: there it is only looked at that it is still zero.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from assay.quantities import and_more
from assay.recipes.family_names import split_layer
from assay.records.plan import OutputTensor, Plan, TensorPlan
from assay_quantize.checkpoint.source_reader import SourceReader
from assay_quantize.formats.schemes import module_of
from assay_quantize.plan.calibrated import Smoothing, calibrated_mtp_layer, method_of, scalable, smoothings
from assay_quantize.verify.calibrated.steps import Factor, as_f32, half_ulp
from assay_quantize.verify.files import StoredReader
from assay_quantize.verify.findings import Findings

FP32 = 1e-6
"""As far as a product or quotient in FP32, which is rounded afterwards, may be off."""
Values = NDArray[np.float64]


def smoothings_of(plan: Plan, layer: int, tensors: list[TensorPlan]) -> list[Smoothing]:
    """What was scaled in a layer, by names of modules. tensors: its calibrated ones."""
    rounded = {module_of(t.name): t for t in tensors if t.action == "quantize"}
    others = [t for t in _of_layer(plan, layer) if t.module not in rounded or not t.name.endswith(".weight")]
    return smoothings(str(method_of(plan)), rounded.values(), scalable(plan, others))


def _of_layer(plan: Plan, layer: int) -> list[TensorPlan]:
    is_mtp = layer == calibrated_mtp_layer(plan)
    return [t for t in plan.tensors if (at := split_layer(t.name)) and at.layer == layer and (t.role == "mtp") is is_mtp]


def check_norms(
    plan: Plan, layer: int, scaled: list[Smoothing], stored: StoredReader, source: SourceReader, findings: Findings
) -> dict[str, Factor]:
    """Norms and routers of a layer against the source's. Gives module -> what its columns were multiplied with, of all that
    read one of these norms; without those of a norm that is damaged."""
    kept = {t.module: t for t in _of_layer(plan, layer) if t.action != "quantize" and t.name.endswith(".weight")}
    columns: dict[str, Factor] = {}
    for smoothing in scaled:
        if smoothing.smooth not in kept:
            continue
        norm = kept[smoothing.smooth]
        findings.count("smoothed")
        between = _of_norm(norm, stored, source)
        if between is None:
            findings.damage("smoothed", norm.name, "is not the source's, divided by positive scales")
            continue
        low_I, high_I = between
        for router in (kept[name] for name in smoothing.balance if name in kept):
            findings.count("smoothed")
            low_I, high_I = _with_router(router, norm, low_I, high_I, stored, source, findings)
        with np.errstate(invalid="ignore"):
            # a channel for which no scale is left is a damage already; the middle is the nearest that there is
            middle = (low_I + high_I) / 2
            columns |= dict.fromkeys(smoothing.balance, Factor(middle, np.abs(high_I - low_I) / 2 / middle))
    return columns


def _of_norm(norm: TensorPlan, stored: StoredReader, source: SourceReader) -> tuple[Values, Values] | None:
    """Between what the scale of each channel lies: NaN where the norm is 0; None where there can be none."""
    n_I, y_I = _source(source, norm), _stored(stored, norm.outputs[0])
    is_zero = (n_I == 0) & (y_I == 0)
    if not np.where(is_zero, True, (n_I * y_I > 0) & np.isfinite(n_I) & np.isfinite(y_I)).all():
        return None
    h_I = half_ulp(np.abs(y_I), norm.outputs[0].dtype)
    with np.errstate(divide="ignore", invalid="ignore"):
        n_I, y_I = np.abs(n_I), np.abs(y_I)
        low = np.where(is_zero, np.nan, n_I / (y_I + h_I) * (1 - FP32))
        return low, np.where(is_zero, np.nan, n_I / (y_I - h_I) * (1 + FP32))


def _with_router(
    router: TensorPlan, norm: TensorPlan, low_I: Values, high_I: Values, stored: StoredReader, source: SourceReader,
    findings: Findings,
) -> tuple[Values, Values]:  # fmt: skip
    """What the rows of a router leave of it."""
    w_EI, y_EI = _source(source, router), _stored(stored, router.outputs[0])
    h_EI = half_ulp(np.abs(y_EI), router.outputs[0].dtype)
    with np.errstate(divide="ignore", invalid="ignore"):
        sign = np.where(w_EI < 0, -1.0, 1.0)
        size = np.abs(w_EI)
        low_EI = np.where(size > 0, (sign * y_EI - h_EI) / size * (1 - FP32), -np.inf)
        high_EI = np.where(size > 0, (sign * y_EI + h_EI) / size * (1 + FP32), np.inf)
    changed = (w_EI == 0) & (y_EI != 0) & ~np.isnan(low_I)[None, :]
    apart = (low_EI > high_I) | (high_EI < low_I) | changed
    low, high = np.maximum(low_I, low_EI.max(0)), np.minimum(high_I, high_EI.min(0))
    of_norm = apart.sum(0) > np.maximum(1, (size > 0).sum(0) / 2)
    if of_norm.any():
        what = f"{_some('channel', of_norm)}: not the source's, divided by what the rows of {router.name} were multiplied with"
        findings.damage("smoothed", norm.name, what)
        return np.where(of_norm, low_EI.max(0), low), np.where(of_norm, high_EI.min(0), high)
    if apart.any():
        what = f"{_some('row', apart.any(1))}: not the source's, times the scales of {norm.name}"
        findings.damage("smoothed", router.name, what)
        return low_I, high_I
    if (is_empty := low > high).any():
        what = f"{_some('channel', is_empty)}: its rows, and {norm.name}, leave no scale"
        findings.damage("smoothed", router.name, what)
        return low_I, high_I
    return low, high


def _some(what: str, is_wrong: NDArray[np.bool_]) -> str:
    return f"{what} {and_more(np.flatnonzero(is_wrong).tolist())}"


def _source(reader: SourceReader, tensor: TensorPlan) -> Values:
    return as_f32(reader.read_rows(tensor, 0, tensor.shape[0])).astype(np.float64)


def _stored(reader: StoredReader, output: OutputTensor) -> Values:
    return as_f32(reader.read_rows(output.name, 0, output.shape[0])).astype(np.float64)
