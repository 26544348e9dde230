"""What the slabs of one tensor add up to: fine, or a damage with its numbers."""

from __future__ import annotations

import math
from collections import Counter

from assay.records.plan import TensorPlan
from assay_quantize.formats.schemes import SCHEMES, module_of
from assay_quantize.verify.findings import Findings
from assay_quantize.verify.slabs import ScaleCounts, SlabFindings


def judge(tensor: TensorPlan, slabs: list[SlabFindings], findings: Findings, *, has_source: bool) -> None:
    """What the slabs of one tensor, in order, add up to."""
    if _scales_are_damaged(tensor, slabs, findings):
        return
    if tensor.action != "quantize":
        if has_source:
            _judge_kept(tensor, slabs, findings)
        return
    problem = next((slab.problem for slab in slabs if slab.problem is not None), None)
    if problem is not None:
        findings.damage("weights", tensor.name, problem)
        return
    shape = slabs[0].shape
    if shape is not None and list(shape) != list(tensor.shape):
        where = f"{module_of(tensor.name)}.weight_shape"
        findings.damage("tensors", where, f"says {list(shape)}, the weight is {list(tensor.shape)}")
        return
    _judge_quantized(tensor, slabs, findings, has_source=has_source)


def _judge_kept(tensor: TensorPlan, slabs: list[SlabFindings], findings: Findings) -> None:
    (output,) = tensor.outputs
    findings.look("kept")
    problem = next((slab.problem for slab in slabs if slab.problem is not None), None)
    if problem is not None:
        findings.damage("kept", output.name, problem)
    elif differ := sum(slab.differing_bytes for slab in slabs):
        how = {
            "keep": "copied unchanged",
            "cast": f"the source's, cast to {output.dtype}",
            "dequantize": f"the source's, dequantized to {output.dtype}",
        }[tensor.action]
        findings.damage("kept", output.name, f"{differ} of {output.num_bytes} bytes differ; it must be {how}")


def _judge_quantized(tensor: TensorPlan, slabs: list[SlabFindings], findings: Findings, *, has_source: bool) -> None:
    assert tensor.scheme is not None
    errors = [slab.errors for slab in slabs if slab.errors is not None]
    findings.look("weights")
    if broken := sum(error.num_non_finite for error in errors):
        count = math.prod(tensor.shape)
        findings.damage("weights", tensor.name, f"{broken} of {count} dequantized weights are NaN or infinite")
    elif has_source:
        findings.look("error")
        squared_error = math.fsum(error.squared_error for error in errors)
        error = relative_error(squared_error, math.fsum(error.squared_norm for error in errors))
        bound = SCHEMES[tensor.scheme].max_relative_error
        findings.errors[tensor.role, tensor.scheme].append(error)
        if not error <= bound:
            findings.damage("error", tensor.name, f"is {error:.3f} away from its source (relative, allowed: {bound}); "
                            "weights of another layer are 1.41 away")  # fmt: skip


def relative_error(squared_error: float, squared_norm: float) -> float:
    """||dequantized - w|| / ||w|| (Frobenius); 0 when both are zero, infinity when only w is."""
    if squared_norm == 0:
        return 0.0 if squared_error == 0 else math.inf
    return math.sqrt(squared_error / squared_norm)


def _scales_are_damaged(tensor: TensorPlan, slabs: list[SlabFindings], findings: Findings) -> bool:
    totals: dict[str, Counter[str]] = {}
    for slab in slabs:
        for part, counts in slab.scales.items():
            totals.setdefault(part, Counter()).update(counts._asdict())
    sizes = {output.name.rpartition(".")[2]: output for output in tensor.outputs}
    damaged = False
    for part, total in totals.items():
        findings.look("scales")
        wrong = next((kind for kind in ScaleCounts._fields if total[kind]), None)
        if wrong is not None:
            kind = {"non_finite": "NaN or infinite", "zero": "zero", "negative": "negative"}[wrong]
            if sizes[part].dtype == "U8":
                kind = "NaN"
            count = math.prod(sizes[part].shape)
            findings.damage("scales", sizes[part].name, f"{total[wrong]} of {count} scales are {kind}")
            damaged = True
    return damaged
