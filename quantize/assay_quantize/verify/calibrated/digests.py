"""Calibrated weights against the record of their calibration, and against the source.

What text decided cannot be made again from the source. Of these weights it is known what their method can have made of them
(`weights.py`), and that each layer is the one that was calibrated, by the digest that the calibration left in the manifest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from assay.records.calibration import CalibratedLayers
from assay.records.manifest import MANIFEST
from assay.records.plan import OutputTensor, Plan, TensorPlan
from assay_quantize.checkpoint.calibrated_layers import PIECE_BYTES, layer_digest, parts_of
from assay_quantize.checkpoint.checkpoint import Checkpoint
from assay_quantize.checkpoint.headers import TensorHeader
from assay_quantize.checkpoint.source_reader import SourceReader
from assay_quantize.formats.schemes import module_of
from assay_quantize.plan.calibrated import calibrated_tensors
from assay_quantize.verify.calibrated.weights import check_weights
from assay_quantize.verify.contents import in_order
from assay_quantize.verify.files import StoredReader
from assay_quantize.verify.findings import Findings


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
    wanted = calibrated_tensors(plan)
    if not wanted:
        return
    if plan.calibrated is None:
        findings.damage("calibrated", MANIFEST, "its recipe calibrates weights, but it has no record of calibrated layers")
        return
    count = sum(tensor.action == "quantize" for tensors in wanted.values() for tensor in tensors)
    known = "what their method can have made of each row" if source is not None else "whether they decompress"
    findings.not_checked.append(
        f"codes of {count:,} calibrated weights, each by itself: the text decides them; looked at were the digests of their "
        f"layers, and {known}"
    )
    _check_record(plan, wanted, plan.calibrated, findings)
    if stored is None:
        return
    whole = {layer: tensors for layer, tensors in wanted.items() if _is_whole(tensors, stored)}
    reader = StoredReader(folder, stored)
    try:
        jobs = ((layer, partial(_digest, reader, tensors)) for layer, tensors in whole.items())
        for layer, found in in_order(jobs, workers):
            findings.look("calibrated")
            if found != (said := plan.calibrated.layers.get(layer)):
                findings.damage(
                    "calibrated",
                    f"layer {layer}",
                    f"its calibrated weights have digest {found[:12]}...; its calibration left {str(said)[:12]}...",
                )
        if source is not None:
            with SourceReader(source) as original:
                check_weights(plan, whole, reader, original, findings, workers, sample)
    finally:
        reader.close()


def _check_record(
    plan: Plan, wanted: Mapping[int, Sequence[TensorPlan]], record: CalibratedLayers, findings: Findings
) -> None:  # fmt: skip
    """What the record of a calibration says of itself against the recipe and the plan."""
    asked = plan.precision_recipe["calibration"]
    rounded = {module_of(t.name) for tensors in wanted.values() for t in tensors if t.action == "quantize"}
    smoothed = sorted(t.name for tensors in wanted.values() for t in tensors if t.action != "quantize")
    most = max(1, int(asked["tokens"]) // int(asked["length"])) * int(asked["length"])
    for is_wrong, what in (
        (record.method != asked["method"], f"says method {record.method}; its recipe has {asked['method']}"),
        (record.length != asked["length"], f"says sequences of {record.length} tokens; its recipe has {asked['length']}"),
        (
            not 0 < record.num_tokens <= most or record.num_tokens % max(1, record.length) != 0,
            f"says {record.num_tokens} tokens; its recipe allows {most}, in sequences of {asked['length']}",
        ),
        (
            sorted(record.layers) != sorted(wanted),
            f"has layers {shown_layers(record.layers)}; planned are {shown_layers(wanted)}",
        ),
        (sorted(record.smoothed) != smoothed, "says of other tensors than planned that they were scaled"),
        (not rounded.issuperset(record.fell_back), "says of weights that are not calibrated that they fell back"),
    ):
        findings.look("manifest")
        if is_wrong:
            findings.damage("manifest", MANIFEST, f"its record of calibrated layers {what}")


def shown_layers(layers: Iterable[int]) -> str:
    """A few numbers of layers."""
    numbers = sorted(layers)
    return ", ".join(map(str, numbers)) if len(numbers) <= 8 else f"{numbers[0]} to {numbers[-1]}, {len(numbers)} in all"


def _is_whole(tensors: Sequence[TensorPlan], stored: Mapping[str, TensorHeader]) -> bool:
    outputs = [output for tensor in tensors for output in parts_of(tensor)]
    return all(
        (header := stored.get(output.name)) is not None and (header.dtype, header.shape) == (output.dtype, tuple(output.shape))
        for output in outputs
    )


def _digest(reader: StoredReader, tensors: Sequence[TensorPlan]) -> str:
    def read(output: OutputTensor, take: Callable[[Any], None]) -> None:
        for begin in range(0, output.num_bytes, PIECE_BYTES):
            end = min(begin + PIECE_BYTES, output.num_bytes)
            take(reader.read(output.name, begin, end, np.empty(end - begin, np.uint8)).data)

    return layer_digest((output for tensor in tensors for output in parts_of(tensor)), read)
