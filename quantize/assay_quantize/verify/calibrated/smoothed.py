"""Layers that AWQ or SmoothQuant scaled: the scales are not stored, but the source and what is stored say what they were.

Both divide a norm by s and multiply the columns of the linears that read it by s; AWQ divides the rows of an up projection
by t and multiplies the columns of its down projection by t. So s is the source's norm over the stored one; the t of a row is
fitted to the stored up projection; and with them undone each weight must be as near to the source's as any that was rounded to
its bits. The router is not rounded: its columns times s, in the dtype in which it is stored.

A channel that is zero whatever the text (of a norm whose gain is 0, of a row of zeros in an up projection) says nothing of its
scale, and nothing depends on what weights make of it: there it is only looked at that it is still zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from compressed_tensors.compressors import BaseCompressor
from torch import Tensor

from assay.recipes.families import split_layer
from assay.records.plan import OutputTensor, Plan, TensorPlan
from assay_quantize.checkpoint.source_reader import SourceReader
from assay_quantize.checkpoint.torch_tensors import TORCH_DTYPES
from assay_quantize.formats.schemes import SCHEMES, compressed_tensors_scheme, module_of
from assay_quantize.plan.calibrated import calibrated_mtp_layer, method_of, scalable, smoothings
from assay_quantize.verify.files import StoredReader
from assay_quantize.verify.findings import Findings
from assay_quantize.verify.judge import relative_error

MOST_OFF = 0.02
"""A norm or a router that is only rounded to BF16 is nearer than that."""
MOST_SCALE_OFF = 0.1
"""So far the scales that a weight shows may be from those of its norm or its up projection, in the median of the channels by
their squares: beside one of far larger weights, others are rounded to zero."""


def check_smoothed(
    plan: Plan, layer: int, tensors: list[TensorPlan], stored: StoredReader, source: SourceReader, findings: Findings
) -> None:
    """Every calibrated tensor of a layer against the source's. All of them must be stored as planned."""
    rounded = {module_of(t.name): t for t in tensors if t.action == "quantize"}
    is_mtp, method = layer == calibrated_mtp_layer(plan), str(method_of(plan))
    others = [t for t in plan.tensors if (at := split_layer(t.name)) and at.layer == layer and (t.role == "mtp") is is_mtp]
    kept = {t.module: t for t in others if t.action != "quantize" and t.name.endswith(".weight")}
    columns: dict[str, Tensor] = {}
    """Module -> scales of its columns; NaN: they are not known, and not needed."""
    with torch.no_grad():
        kept_too = [t for t in others if t.module not in rounded or not t.name.endswith(".weight")]
        found = smoothings(method, rounded.values(), scalable(plan, kept_too))
        for one in found:
            if one.smooth not in kept:
                continue
            norm = kept[one.smooth]
            want_I, made_I = _source(source, norm), _plain(stored, norm.outputs[0]).double()
            is_zero_I = (want_I == 0) & (made_I == 0)
            scale_I = (want_I / made_I).masked_fill(is_zero_I, torch.nan)
            findings.look("smoothed")
            if not bool((torch.isfinite(scale_I) & (scale_I > 0) | is_zero_I).all()):
                findings.damage("smoothed", norm.name, "is not the source's, divided by positive scales")
                continue
            columns |= dict.fromkeys(one.balance, scale_I)
            for name in one.balance:
                if name in kept:
                    router = kept[name]
                    off = _off(*_known(_plain(stored, router.outputs[0]).double(), _source(source, router) * scale_I))
                    findings.look("smoothed")
                    if not off <= MOST_OFF:
                        what = f"is {off:.3f} away from the source's, times the scales of {norm.name}"
                        findings.damage("smoothed", router.name, what)
        downs = {one.smooth: one.balance[0] for one in found if one.smooth in rounded}
        for up, down in downs.items():
            made, want = _weight(stored, rounded[up]), _source(source, rounded[up])
            made, want = _known(made, want * columns[up] if up in columns else want)
            squares_O, products_O = (want * want).sum(1), (want * made).sum(1)
            # 0 / 0, a row of zeros, is NaN; where the stored one points elsewhere, its distance will be large
            columns[down] = squares_O / products_O.maximum(1e-30 * squares_O)
        for module, tensor in rounded.items():
            want = _source(source, tensor)
            want = want * columns[module] if module in columns else want
            want = want / columns[downs[module]].nan_to_num(1.0)[:, None] if module in downs else want
            _judge(tensor, *_known(_weight(stored, tensor), want), findings)


def _known(made: Tensor, want: Tensor) -> tuple[Tensor, Tensor]:
    """Both without the columns whose scales are not known."""
    is_known_I = ~want.isnan().any(0)
    return (made, want) if bool(is_known_I.all()) else (made[:, is_known_I], want[:, is_known_I])


def _judge(tensor: TensorPlan, made: Tensor, want: Tensor, findings: Findings) -> None:
    assert tensor.scheme is not None
    findings.look("smoothed")
    error = _off(made, want)
    findings.errors[tensor.role, tensor.scheme].append(error)
    if not error <= SCHEMES[tensor.scheme].max_relative_error:
        what = f"is {error:.3f} away from its source, scaled as the layer's other tensors say (relative)"
        findings.damage("error", tensor.name, what)
        return
    _check_columns(tensor, made, want, findings)


def check_columns(tensors: list[TensorPlan], stored: StoredReader, source: SourceReader, findings: Findings) -> None:
    """Of weights that were not scaled, and whose scales do not follow from the source alone: that they point along it."""
    with torch.no_grad():
        for tensor in tensors:
            if tensor.action == "quantize":
                findings.look("smoothed")
                _check_columns(tensor, _weight(stored, tensor), _source(source, tensor), findings)


def _check_columns(tensor: TensorPlan, made: Tensor, want: Tensor, findings: Findings) -> None:
    squares_I = (want * want).sum(0)
    off_I = ((made * want).sum(0) / squares_I - 1).abs()
    off = _median(off_I[squares_I > 0], squares_I[squares_I > 0])
    if not off <= MOST_SCALE_OFF:
        findings.damage("smoothed", tensor.name, f"its columns are off by {off:.3f} from the layer's scales, in the median")


def _median(values: Tensor, weights: Tensor) -> float:
    """Of no values: 0."""
    if not len(values):
        return 0.0
    order = values.argsort()
    reached = weights[order].cumsum(0)
    return float(values[order[int((reached < reached[-1] / 2).sum())]])


def _off(made: Tensor, want: Tensor) -> float:
    return relative_error(float((made - want).square().sum()), float(want.square().sum()))


def _source(reader: SourceReader, tensor: TensorPlan) -> Tensor:
    rows = reader.read_rows(tensor, 0, tensor.shape[0])
    return torch.from_numpy(rows).view(TORCH_DTYPES[tensor.logical_dtype]).double()


def _plain(reader: StoredReader, output: OutputTensor) -> Tensor:
    raw = reader.read(output.name, 0, output.num_bytes, np.empty(output.num_bytes, np.uint8))
    return torch.from_numpy(raw).view(TORCH_DTYPES[output.dtype]).reshape(output.shape)


def _weight(reader: StoredReader, tensor: TensorPlan) -> Tensor:
    scheme: Any = compressed_tensors_scheme(str(tensor.scheme))
    prefix = module_of(tensor.name)
    parts: Mapping[str, Tensor] = {o.name.removeprefix(f"{prefix}."): _plain(reader, o) for o in tensor.outputs}
    made: Tensor = BaseCompressor.get_value_from_registry(str(scheme.format.value)).decompress(dict(parts), scheme)["weight"]
    return made.double()
