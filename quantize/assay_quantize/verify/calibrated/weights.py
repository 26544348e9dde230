"""All calibrated weights of a checkpoint against its source, layer by layer, on worker threads."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from assay.records.plan import Plan, TensorPlan
from assay_quantize.checkpoint.source_reader import SourceReader
from assay_quantize.formats.schemes import SCHEMES, module_of
from assay_quantize.plan.calibrated import method_of, scales_inputs
from assay_quantize.plan.slabs import observer_of
from assay_quantize.verify.calibrated.rows import measure
from assay_quantize.verify.calibrated.smoothed import check_norms, smoothings_of
from assay_quantize.verify.calibrated.weight import Kind, Measured, Weight
from assay_quantize.verify.contents import in_order, one_torch_thread
from assay_quantize.verify.files import StoredReader
from assay_quantize.verify.findings import Findings
from assay_quantize.verify.judge import relative_error

KINDS: Mapping[str, Kind] = {
    "gptq": "corrected", "awq": "nearest", "awq+gptq": "corrected", "smoothquant": "nearest", "autoround": "learned",
}  # fmt: skip
"""Method of a recipe -> what it can make of a weight."""
LEAST_CODES = 4096
"""Of fewer that are neither 0 nor at an end, GPTQ may by chance leave each the nearest one."""
_DRAW = random.SystemRandom()


def check_weights(
    plan: Plan,
    layers: Mapping[int, Sequence[TensorPlan]],
    stored: StoredReader,
    source: SourceReader,
    findings: Findings,
    workers: int,
    sample: float | None,
) -> None:
    """layers: the calibrated tensors of each, stored as planned. sample: the share of weights that is looked at; None: all.
    CheckpointError when a file cannot be read."""
    with one_torch_thread():
        for tensor, measured in in_order(_jobs(plan, layers, stored, source, findings, workers, sample), workers):
            _judge(plan, tensor, measured, findings)


def _jobs(
    plan: Plan,
    layers: Mapping[int, Sequence[TensorPlan]],
    stored: StoredReader,
    source: SourceReader,
    findings: Findings,
    workers: int,
    sample: float | None,
) -> Iterator[tuple[TensorPlan, partial[Measured]]]:
    kind, observer, reach = KINDS[str(method_of(plan))], observer_of(plan), 0.5
    if kind == "learned":
        # steps of its signed descent are 1 / iterations, and become shorter on a line that ends at 0: their sum is the most
        reach = 1 + 0.5 / int(plan.precision_recipe["calibration"]["iterations"])
    for layer, tensors in layers.items():
        rounded = {module_of(t.name): t for t in tensors if t.action == "quantize"}
        if not scales_inputs(plan):
            for tensor in _drawn(rounded.values(), sample):
                yield tensor, partial(measure, Weight(tensor, stored, source, kind, observer, reach))
            continue
        found = smoothings_of(plan, layer, list(tensors))
        columns = check_norms(plan, layer, found, stored, source, findings)
        divided = {one.smooth: one.balance[0] for one in found if one.smooth in rounded}

        of_module = {
            module: Weight(tensor, stored, source, kind, observer, reach, columns.get(module), is_divided=module in divided)
            for module, tensor in rounded.items()
        }
        # of an up projection its rows have to be known before its down projection is looked at
        ups = {module: down for module, down in divided.items() if sample is None or _DRAW.random() < sample}
        for up, measured in in_order(((up, partial(measure, of_module[up])) for up in ups), workers):
            _judge(plan, rounded[up], measured, findings)
            if measured.divisor is not None:
                of_module[ups[up]] = replace(of_module[ups[up]], columns=measured.divisor)
        others = [t for module, t in rounded.items() if module not in divided and module not in divided.values()]
        for tensor in [*_drawn(others, sample), *(rounded[down] for down in ups.values())]:
            yield tensor, partial(measure, of_module[module_of(tensor.name)])


def _drawn(tensors: Iterable[TensorPlan], sample: float | None) -> Iterator[TensorPlan]:
    return (tensor for tensor in tensors if sample is None or _DRAW.random() < sample)


def _judge(plan: Plan, tensor: TensorPlan, measured: Measured, findings: Findings) -> None:
    assert tensor.scheme is not None
    findings.look("error")
    findings.look("rows")
    error = relative_error(measured.squared_error, measured.squared_norm)
    findings.errors[tensor.role, tensor.scheme].append(error)
    problems = list(measured.problems)
    if plan.calibrated is not None:
        says_so = module_of(tensor.name) in plan.calibrated.fell_back
        if (what := _fallback_problem(KINDS[str(method_of(plan))], measured, says_so=says_so)) is not None:
            problems.append(("rows", what))
    bound = SCHEMES[tensor.scheme].max_relative_error
    if not error <= bound:
        scaled = ", scaled as the layer's other tensors say" if scales_inputs(plan) else ""
        problems = [("error", f"is {error:.3f} away from its source{scaled} (relative, allowed: {bound}); "
                     "weights of another layer are 1.41 away")]  # fmt: skip
    for check, what in problems:
        findings.damage(check, tensor.name, what)


def _fallback_problem(kind: Kind, measured: Measured, *, says_so: bool) -> str | None:
    """says_so: the record of the calibration says that the weight was rounded to the nearest instead."""
    if kind == "nearest":
        return "its calibration says that it fell back, which its method does not do" if says_so else None
    num_other = measured.num_far if kind == "corrected" else measured.moved
    if says_so and num_other:
        return f"{num_other} codes are not the nearest to their weights; its calibration says that all are (fell_back)"
    if kind == "corrected" and not says_so and not num_other and measured.num_inner >= LEAST_CODES:
        return "every code is the nearest to its weight, and its calibration does not say so (fell_back)"
    return None
