"""What the checks of one verification found, and what the slabs of one tensor add up to: fine, or a damage with its numbers."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from assay.records.manifest import relative_error
from assay.records.plan import TensorPlan
from assay.records.verification import Damage
from assay_quantize.formats.schemes import SCHEMES, module_of

if TYPE_CHECKING:
    from assay_quantize.kernels import RowErrors  # numba takes seconds to import


@dataclass
class Findings:
    """damages: what is wrong. checks: name of a check -> how many things it looked at. errors: (role, scheme) -> relative
    error of every quantized weight."""

    damages: list[Damage] = field(default_factory=list)
    checks: Counter[str] = field(default_factory=Counter)
    not_checked: list[str] = field(default_factory=list)
    errors: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))

    def errors_by_role(self) -> dict[str, list[float]]:
        """Role -> errors; a role whose layers have several schemes is listed once for each: `routed_expert (nvfp4a16)`."""
        roles = Counter(role for role, _ in self.errors)
        return {role if roles[role] == 1 else f"{role} ({scheme})": errors for (role, scheme), errors in self.errors.items()}

    def count(self, check: str, number: int = 1) -> None:
        """Note that a check looked at something."""
        self.checks[check] += number

    def is_damaged(self, where: str) -> bool:
        return any(damage.where == where for damage in self.damages)

    def merge(self, other: Findings) -> None:
        self.damages += other.damages
        self.checks += other.checks
        self.not_checked += other.not_checked
        for key, errors in other.errors.items():
            self.errors[key] += errors

    def damage(self, check: str, where: str, what: str) -> None:
        self.damages.append(Damage(check=check, where=where, what=what))


class ScaleCounts(NamedTuple):
    """Scales of a slab that cannot be scales."""

    non_finite: int
    zero: int
    negative: int


@dataclass(frozen=True)
class SlabFindings:
    """What one slab showed.

    differing: output -> bytes that are not those the source gives; None: not compared. problem: why it could not be compared
    at all. misread: which bytes of the source are not those that it was made of. scales: by local name. shape: what
    `weight_shape` says, with the first slab. errors: without a source only the number of weights that are not finite means
    anything. is_tiled: with it a tile of the tensor was compared with the definition; tile_problem: what is wrong with it.
    """

    differing: Counter[str] | None = None
    problem: str | None = None
    misread: str | None = None
    scales: dict[str, ScaleCounts] = field(default_factory=dict)
    shape: tuple[int, ...] | None = None
    errors: RowErrors | None = None
    is_tiled: bool = False
    tile_problem: str | None = None


def judge(
    tensor: TensorPlan,
    slabs: Sequence[SlabFindings],
    findings: Findings,
    *,
    has_source: bool,
    known_error: float | None = None,
) -> None:
    """What the slabs of one tensor, in order, add up to. known_error: relative, where slabs sum up none.

    A tile is a damage only where the slabs are none: then the kernels that made the weight are wrong, and not the file.
    """
    num_damages = len(findings.damages)
    compared = [slab.differing for slab in slabs if slab.differing is not None]
    differing = sum(compared, Counter()) if len(compared) == len(slabs) else None
    problem = next((slab.problem for slab in slabs if slab.problem is not None), None)
    # a scale of zero that the source gives is no damage
    if not _judge_scales(tensor, slabs, findings, is_proven=differing is not None and not differing):
        if (misread := next((slab.misread for slab in slabs if slab.misread is not None), None)) is not None:
            findings.damage("source", tensor.name, misread)
        elif tensor.action == "quantize":
            _judge_quantized(tensor, slabs, problem, differing, findings, has_source=has_source, known_error=known_error)
        elif tensor.action == "add":
            findings.count("static_scales")
            if problem is not None:
                findings.damage("static_scales", tensor.name, problem)
        elif has_source:
            (output,) = tensor.outputs
            findings.count("kept")
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
    if any(slab.is_tiled for slab in slabs):
        findings.count("definition")
        tile_problem = next((slab.tile_problem for slab in slabs if slab.tile_problem is not None), None)
        if tile_problem is not None and len(findings.damages) == num_damages:
            findings.damage("definition", tensor.name, tile_problem)


def _judge_quantized(
    tensor: TensorPlan,
    slabs: Sequence[SlabFindings],
    problem: str | None,
    differing: Counter[str] | None,
    findings: Findings,
    *,
    has_source: bool,
    known_error: float | None,
) -> None:
    """Bytes that are what the source gives are right, however large their error; of others the error decides the report."""
    assert tensor.scheme is not None
    if problem is not None:
        findings.damage("weights", tensor.name, problem)
        return
    shape = next((slab.shape for slab in slabs if slab.shape is not None), None)
    if shape is not None and list(shape) != list(tensor.shape):
        where = f"{module_of(tensor.name)}.weight_shape"
        findings.damage("tensors", where, f"says {list(shape)}, the weight is {list(tensor.shape)}")
        return
    errors = [slab.errors for slab in slabs if slab.errors is not None]
    findings.count("weights")
    if differing is not None:
        findings.count("recomputed")
    if num_non_finite := sum(error.num_non_finite for error in errors):
        what = f"{num_non_finite} of {math.prod(tensor.shape)} dequantized weights are NaN or infinite"
        findings.damage("weights", tensor.name, what)
        return
    if not has_source or (len(errors) < len(slabs) and known_error is None):
        return
    findings.count("error")
    error = relative_error(math.fsum(e.squared_error for e in errors), math.fsum(e.squared_norm for e in errors))
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


def _judge_scales(tensor: TensorPlan, slabs: Sequence[SlabFindings], findings: Findings, *, is_proven: bool) -> bool:
    """Whether scales are damaged. is_proven: all bytes are those that the source gives."""
    totals: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for slab in slabs:
        for part, counts in slab.scales.items():
            totals[part].update(counts._asdict())
    outputs = {output.name.rpartition(".")[2]: output for output in tensor.outputs}
    is_damaged = False
    for part, total in totals.items():
        findings.count("scales")
        fault = next((fault for fault in ScaleCounts._fields if total[fault]), None)
        if fault is not None and not is_proven:
            output = outputs[part]
            adjective = {"non_finite": "NaN or infinite", "zero": "zero", "negative": "negative"}[fault]
            if output.dtype == "U8":
                adjective = "NaN"
            findings.damage("scales", output.name, f"{total[fault]} of {math.prod(output.shape)} scales are {adjective}")
            is_damaged = True
    return is_damaged
