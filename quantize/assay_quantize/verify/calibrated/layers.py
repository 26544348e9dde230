"""Calibrated weights against the record of their calibration, and against the source, layer by layer.

What text decided cannot be made again from the source. Of these weights it is known what their method can have made of them
(`rows.py`), and that each layer is the one that was calibrated, by the digest that the calibration left in the manifest.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from assay.records.calibration import CalibratedLayers
from assay.records.manifest import MANIFEST, relative_error
from assay.records.plan import OutputTensor, Plan, TensorPlan
from assay_quantize.checkpoint.calibrated_layers import PIECE_BYTES, layer_digest, parts_of
from assay_quantize.checkpoint.checkpoint import Checkpoint
from assay_quantize.checkpoint.headers import TensorHeader
from assay_quantize.checkpoint.source_reader import SourceReader
from assay_quantize.formats.schemes import SCHEMES, module_of
from assay_quantize.plan.calibrated import calibrated_tensors, method_of, scales_inputs
from assay_quantize.plan.slabs import observer_of
from assay_quantize.verify.calibrated.rows import measure
from assay_quantize.verify.calibrated.smoothed import check_norms, smoothings_of
from assay_quantize.verify.calibrated.steps import Kind, Measured, Weight
from assay_quantize.verify.contents import in_order, one_torch_thread
from assay_quantize.verify.files import StoredReader
from assay_quantize.verify.findings import Findings
from assay_quantize.verify.headers import is_stored_as


def check_calibrated(
    plan: Plan,
    folder: Path,
    stored: Mapping[str, TensorHeader] | None,
    source: Checkpoint | None,
    findings: Findings,
    workers: int,
    sample: float | None = None,
) -> None:
    """Every calibrated layer has the digest that the manifest gives; what was scaled is the source's, scaled. stored: None:
    contents were not asked for.

    A layer of which a tensor is missing or is not as planned is passed over: that is a damage already.
    """
    layers = calibrated_tensors(plan)
    if not layers:
        return
    if plan.calibrated is None:
        findings.damage("calibrated", MANIFEST, "its recipe calibrates weights, but it has no record of calibrated layers")
        return
    count = sum(tensor.action == "quantize" for tensors in layers.values() for tensor in tensors)
    known = "what their method can have made of each row" if source is not None else "whether they decompress"
    findings.not_checked.append(
        f"codes of {count:,} calibrated weights, each by itself: the text decides them; looked at were the digests of their "
        f"layers, and {known}"
    )
    _check_record(plan, layers, plan.calibrated, findings)
    if stored is None:
        return
    whole = {
        layer: tensors
        for layer, tensors in layers.items()
        if all(is_stored_as(output, stored.get(output.name)) for tensor in tensors for output in parts_of(tensor))
    }
    reader = StoredReader(folder, stored)
    try:
        jobs = ((layer, partial(_digest, reader, tensors)) for layer, tensors in whole.items())
        for layer, digest in in_order(jobs, workers):
            findings.count("calibrated")
            if digest != (recorded := plan.calibrated.layers.get(layer)):
                what = f"its calibrated weights have digest {digest[:12]}...; its calibration left {str(recorded)[:12]}..."
                findings.damage("calibrated", f"layer {layer}", what)
        if source is not None:
            with SourceReader(source) as original, one_torch_thread():
                jobs_of_rows = _jobs(plan, whole, reader, original, findings, workers, sample)
                for tensor, measured in in_order(jobs_of_rows, workers):
                    _judge(plan, tensor, measured, findings)
    finally:
        reader.close()


def _check_record(
    plan: Plan, layers: Mapping[int, Sequence[TensorPlan]], record: CalibratedLayers, findings: Findings
) -> None:  # fmt: skip
    """What the record of a calibration says of itself against the recipe and the plan."""
    recipe = plan.precision_recipe["calibration"]
    rounded = {module_of(t.name) for tensors in layers.values() for t in tensors if t.action == "quantize"}
    smoothed = sorted(t.name for tensors in layers.values() for t in tensors if t.action != "quantize")
    most = max(1, int(recipe["tokens"]) // int(recipe["length"])) * int(recipe["length"])
    for is_wrong, what in (
        (record.method != recipe["method"], f"says method {record.method}; its recipe has {recipe['method']}"),
        (record.length != recipe["length"], f"says sequences of {record.length} tokens; its recipe has {recipe['length']}"),
        (
            not 0 < record.num_tokens <= most or record.num_tokens % max(1, record.length) != 0,
            f"says {record.num_tokens} tokens; its recipe allows {most}, in sequences of {recipe['length']}",
        ),
        (
            sorted(record.layers) != sorted(layers),
            f"has layers {shown_layers(record.layers)}; planned are {shown_layers(layers)}",
        ),
        (sorted(record.smoothed) != smoothed, "says of other tensors than planned that they were scaled"),
        (not rounded.issuperset(record.fell_back), "says of weights that are not calibrated that they fell back"),
    ):
        findings.count("manifest")
        if is_wrong:
            findings.damage("manifest", MANIFEST, f"its record of calibrated layers {what}")


def shown_layers(layers: Iterable[int]) -> str:
    """A few numbers of layers."""
    numbers = sorted(layers)
    return ", ".join(map(str, numbers)) if len(numbers) <= 8 else f"{numbers[0]} to {numbers[-1]}, {len(numbers)} in all"


def _digest(reader: StoredReader, tensors: Sequence[TensorPlan]) -> str:
    def read(output: OutputTensor, take: Callable[[Any], None]) -> None:
        for begin in range(0, output.num_bytes, PIECE_BYTES):
            end = min(begin + PIECE_BYTES, output.num_bytes)
            take(reader.read(output.name, begin, end, np.empty(end - begin, np.uint8)).data)

    return layer_digest((output for tensor in tensors for output in parts_of(tensor)), read)


KINDS: Mapping[str, Kind] = {
    "gptq": "corrected", "awq": "nearest", "awq+gptq": "corrected", "smoothquant": "nearest", "autoround": "learned",
}  # fmt: skip
"""Method of a recipe -> what it can make of a weight."""
LEAST_CODES = 4096
"""Of fewer that are neither 0 nor at an end, GPTQ may by chance leave each the nearest one."""
_DRAW = random.SystemRandom()


def _jobs(
    plan: Plan,
    layers: Mapping[int, Sequence[TensorPlan]],
    stored: StoredReader,
    source: SourceReader,
    findings: Findings,
    workers: int,
    sample: float | None,
) -> Iterator[tuple[TensorPlan, partial[Measured]]]:
    """layers: the calibrated tensors of each, stored as planned. sample: the share of weights that is looked at; None: all."""
    kind, observer, reach = KINDS[str(method_of(plan))], observer_of(plan), 0.5
    if kind == "learned":
        # steps of its signed descent are 1 / iterations, and become shorter on a line that ends at 0: their sum is the most
        reach = 1 + 0.5 / int(plan.precision_recipe["calibration"]["iterations"])
    for layer, tensors in layers.items():
        rounded = {module_of(t.name): t for t in tensors if t.action == "quantize"}
        if not scales_inputs(plan):
            for tensor in _sampled(rounded.values(), sample):
                yield tensor, partial(measure, Weight(tensor, stored, source, kind, observer, reach))
            continue
        scaled = smoothings_of(plan, layer, list(tensors))
        columns = check_norms(plan, layer, scaled, stored, source, findings)
        divided = {smoothing.smooth: smoothing.balance[0] for smoothing in scaled if smoothing.smooth in rounded}
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
        for tensor in [*_sampled(others, sample), *(rounded[down] for down in ups.values())]:
            yield tensor, partial(measure, of_module[module_of(tensor.name)])


def _sampled(tensors: Iterable[TensorPlan], sample: float | None) -> Iterator[TensorPlan]:
    return (tensor for tensor in tensors if sample is None or _DRAW.random() < sample)


def _judge(plan: Plan, tensor: TensorPlan, measured: Measured, findings: Findings) -> None:
    assert tensor.scheme is not None
    findings.count("error")
    findings.count("rows")
    error = relative_error(measured.squared_error, measured.squared_norm)
    findings.errors[tensor.role, tensor.scheme].append(error)
    problems = list(measured.problems)
    if plan.calibrated is not None:
        fell_back = module_of(tensor.name) in plan.calibrated.fell_back
        if (what := _fallback_problem(KINDS[str(method_of(plan))], measured, fell_back=fell_back)) is not None:
            problems.append(("rows", what))
    bound = SCHEMES[tensor.scheme].max_relative_error
    if not error <= bound:
        scaled = ", scaled as the layer's other tensors say" if scales_inputs(plan) else ""
        problems = [("error", f"is {error:.3f} away from its source{scaled} (relative, allowed: {bound}); "
                     "weights of another layer are 1.41 away")]  # fmt: skip
    for check, what in problems:
        findings.damage(check, tensor.name, what)


def _fallback_problem(kind: Kind, measured: Measured, *, fell_back: bool) -> str | None:
    """fell_back: the record of the calibration says that the weight was rounded to the nearest instead."""
    if kind == "nearest":
        return "its calibration says that it fell back, which its method does not do" if fell_back else None
    num_other = measured.num_far if kind == "corrected" else measured.moved
    if fell_back and num_other:
        return f"{num_other} codes are not the nearest to their weights; its calibration says that all are (fell_back)"
    if kind == "corrected" and not fell_back and not num_other and measured.num_inner >= LEAST_CODES:
        return "every code is the nearest to its weight, and its calibration does not say so (fell_back)"
    return None
