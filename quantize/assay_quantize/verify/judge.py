"""What the slabs of one tensor add up to: fine, or a damage with its numbers."""

from __future__ import annotations

import math
from collections import Counter

from assay.records.manifest import ERROR_DIGITS
from assay.records.plan import TensorPlan
from assay_quantize.formats.schemes import SCHEMES, module_of
from assay_quantize.verify.definition import TileFound
from assay_quantize.verify.findings import Findings
from assay_quantize.verify.slabs import ScaleCounts, SlabFindings


def judge(
    tensor: TensorPlan,
    slabs: list[SlabFindings],
    tile: TileFound | None,
    findings: Findings,
    *,
    has_source: bool,
    known_error: float | None = None,
) -> None:
    """What the slabs of one tensor, in order, and its tile add up to. known_error: relative, where slabs sum up none.

    A tile is a damage only where the slabs are none: then the kernels that made the weight are wrong, and not the file.
    """
    count = len(findings.damages)
    _judge_slabs(tensor, slabs, findings, has_source=has_source, known_error=known_error)
    if tile is not None:
        findings.look("definition")
        if tile.problem is not None and len(findings.damages) == count:
            findings.damage("definition", tensor.name, tile.problem)


def _judge_slabs(
    tensor: TensorPlan, slabs: list[SlabFindings], findings: Findings, *, has_source: bool, known_error: float | None
) -> None:  # fmt: skip
    compared = [slab.differing for slab in slabs if slab.differing is not None]
    differing = sum(compared, Counter()) if len(compared) == len(slabs) else None
    # a scale of zero that the source gives is no damage
    if _scales_are_damaged(tensor, slabs, findings, is_proven=differing is not None and not differing):
        return
    problem = next((slab.problem for slab in slabs if slab.problem is not None), None)
    misread = next((slab.misread for slab in slabs if slab.misread is not None), None)
    if misread is not None:
        findings.damage("source", tensor.name, misread)
        return
    if tensor.action == "add":
        findings.look("static_scales")
        if problem is not None:
            findings.damage("static_scales", tensor.name, problem)
        return
    if tensor.action != "quantize":
        if has_source:
            _judge_kept(tensor, problem, differing, findings)
        return
    if problem is not None:
        findings.damage("weights", tensor.name, problem)
        return
    shape = next((slab.shape for slab in slabs if slab.shape is not None), None)
    if shape is not None and list(shape) != list(tensor.shape):
        where = f"{module_of(tensor.name)}.weight_shape"
        findings.damage("tensors", where, f"says {list(shape)}, the weight is {list(tensor.shape)}")
        return
    _judge_quantized(tensor, slabs, differing, findings, has_source=has_source, known_error=known_error)


def _judge_kept(tensor: TensorPlan, problem: str | None, differing: Counter[str] | None, findings: Findings) -> None:
    (output,) = tensor.outputs
    findings.look("kept")
    if problem is not None:
        findings.damage("kept", output.name, problem)
    elif differing:
        how = {
            "keep": "copied unchanged",
            "cast": f"the source's, cast to {output.dtype}",
            "dequantize": f"the source's, dequantized to {output.dtype}",
        }[tensor.action]
        what = f"{differing[output.name]} of {output.num_bytes} bytes differ; it must be {how}"
        findings.damage("kept", output.name, what)


def _judge_quantized(
    tensor: TensorPlan,
    slabs: list[SlabFindings],
    differing: Counter[str] | None,
    findings: Findings,
    *,
    has_source: bool,
    known_error: float | None,
) -> None:
    """Bytes that are all the source's are right, however far they are from it; others are said to be as wrong as they are."""
    assert tensor.scheme is not None
    errors = [slab.errors for slab in slabs if slab.errors is not None]
    findings.look("weights")
    if differing is not None:
        findings.look("recomputed")
    if broken := sum(error.num_non_finite for error in errors):
        count = math.prod(tensor.shape)
        findings.damage("weights", tensor.name, f"{broken} of {count} dequantized weights are NaN or infinite")
        return
    if not has_source:
        return
    if len(errors) < len(slabs) and known_error is None:
        return
    findings.look("error")
    squared_error = math.fsum(error.squared_error for error in errors)
    error = relative_error(squared_error, math.fsum(error.squared_norm for error in errors))
    if known_error is not None and len(errors) < len(slabs):
        error = known_error
    bound = SCHEMES[tensor.scheme].max_relative_error
    findings.errors[tensor.role, tensor.scheme].append(error)
    is_proven = differing is not None and not differing
    if not is_proven and not error <= bound:
        findings.damage("error", tensor.name, f"is {error:.3f} away from its source (relative, allowed: {bound}); "
                        "weights of another layer are 1.41 away")  # fmt: skip
    elif differing:
        sizes = {output.name: output.num_bytes for output in tensor.outputs}
        what = ", ".join(f"{count} of {sizes[name]} bytes of {name}" for name, count in sorted(differing.items()))
        findings.damage("recomputed", tensor.name, f"{what} are not what scheme {tensor.scheme} makes of the source")


def relative_error(squared_error: float, squared_norm: float) -> float:
    """||dequantized - w|| / ||w|| (Frobenius), of ERROR_DIGITS digits; 0 when both are zero, infinity when only w is."""
    if squared_norm == 0:
        return 0.0 if squared_error == 0 else math.inf
    return float(f"{math.sqrt(squared_error / squared_norm):.{ERROR_DIGITS}g}")


def _scales_are_damaged(tensor: TensorPlan, slabs: list[SlabFindings], findings: Findings, *, is_proven: bool) -> bool:
    """is_proven: all bytes are those that the source gives."""
    totals: dict[str, Counter[str]] = {}
    for slab in slabs:
        for part, counts in slab.scales.items():
            totals.setdefault(part, Counter()).update(counts._asdict())
    sizes = {output.name.rpartition(".")[2]: output for output in tensor.outputs}
    damaged = False
    for part, total in totals.items():
        findings.look("scales")
        wrong = next((kind for kind in ScaleCounts._fields if total[kind]), None)
        if wrong is not None and not is_proven:
            kind = {"non_finite": "NaN or infinite", "zero": "zero", "negative": "negative"}[wrong]
            if sizes[part].dtype == "U8":
                kind = "NaN"
            count = math.prod(sizes[part].shape)
            findings.damage("scales", sizes[part].name, f"{total[wrong]} of {count} scales are {kind}")
            damaged = True
    return damaged
