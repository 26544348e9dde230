"""How long `assay sensitivity` would take where a model does not fit into memory: an extrapolation, a line for each step.

It runs on cores; GPUs do not count. Rates as in `calibration_time.py` and `hardware_time.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from assay.quantities import size
from assay.recipes.family_names import split_layer
from assay.recipes.text_config import num_hidden_layers, size_of, text_of
from assay.records.plan import Plan
from assay_quantize.calibration.memory import token_state_bytes
from assay_quantize.estimate.calibration_time import (
    PROCESS_BYTES,
    Line,
    TorchRates,
    attention_flops,
    core_rates,
    routed_share,
)
from assay_quantize.estimate.hardware_time import MEASURED, CoreRates, Machine

COMPARED_S = 32e-9
"""Of one core for one weight: made plain again from what a scheme stores, and its error summed in FP64; measured like
`MEASURED_CALIBRATION`, on a matrix of GLM-5's experts."""
Proxy = Literal["kl", "hidden", "weights"]


@dataclass(frozen=True)
class SensitivityEstimate:
    """lines: steps and what was assumed. total_s: the sum of their seconds."""

    machine: str
    proxy: Proxy
    lines: tuple[Line, ...]
    total_s: float
    disk_bytes: int
    memory_bytes: int


def estimate_sensitivity(
    plans: Mapping[str, Plan],
    parts: Sequence[tuple[int, str, int]],
    machine: Machine,
    cores: CoreRates,
    torch_rates: TorchRates,
    *,
    proxy: Proxy,
    tokens: int,
    length: int,
    memory_bytes: int,
    disk_bytes: int,
    mixes: Sequence[Sequence[tuple[str, int]]] = (),
) -> SensitivityEstimate:
    """plans: scheme -> the plan that gives it to every part. parts: (layer, scheme, weights) of every part and scheme that is
    measured. mixes: (scheme, weights) of every part of those that are measured as a whole. memory_bytes: beyond the process;
    disk_bytes: of states. Both are the proxy's own."""
    plan, layers = next(iter(plans.values())), num_hidden_layers(next(iter(plans.values())).config)
    rates = core_rates(torch_rates, machine.cores)
    weights = sum(count for _, _, count in parts)
    times = 2 if proxy == "kl" else 1  # by itself, and with all others
    rounded = [*((scheme, times * count) for _, scheme, count in parts), *(part for mix in mixes for part in mix)]
    round_s = sum(2 * count / MEASURED[scheme][0] / 1e9 for scheme, count in rounded) + weights * COMPARED_S
    each = f"{1e9 * COMPARED_S:.3g} ns a weight to compare, of one core"
    rounding = Line("round", round_s, f"{len(parts)} parts and schemes, {weights:.3g} weights; {each}")
    read = sum(2 * count for _, count in rounded)
    often = "twice" if times == 2 else "once"
    source = Line(
        "source", read / machine.read / 1e9, f"{size(read)} read, each part {often} a scheme, {machine.read:.3g} GB/s"
    )
    if proxy == "weights":
        lines = [source, rounding]
    else:
        lines = [
            Line("tokens", None, f"{tokens:,} in sequences of {length}, of --text or --run"),
            source,
            rounding,
            *_passes(plan, parts, layers, machine, rates, len(plans) + len(mixes), tokens, length, to_the_end=proxy == "kl"),
        ]
    return SensitivityEstimate(
        machine=machine.name,
        proxy=proxy,
        lines=tuple(lines),
        total_s=sum(line.seconds or 0.0 for line in lines),
        disk_bytes=disk_bytes,
        memory_bytes=PROCESS_BYTES + memory_bytes,
    )


def _passes(
    plan: Plan, parts: Sequence[tuple[int, str, int]], layers: int, machine: Machine, rates: TorchRates, wholes: int,
    tokens: int, length: int, *, to_the_end: bool,
) -> list[Line]:  # fmt: skip
    """Through layers, and the states in front of them and behind."""
    behind = layers * wholes + sum(layers - layer for layer, _, _ in parts)
    through = layers + (behind if to_the_end else len(parts))
    share, numbers, stored = routed_share(plan), 0.0, 0
    for tensor in plan.tensors:
        if split_layer(tensor.name) is not None and tensor.role != "mtp":
            stored += tensor.num_bytes
            if len(tensor.shape) == 2:
                numbers += math.prod(tensor.shape) * (share if tensor.part == "routed_expert" else 1)
    flops_a_layer = tokens * (2 * numbers / layers + attention_flops(plan, length))
    moved = through * tokens * token_state_bytes(plan, length)
    rate = f"{rates.product / 1e12:.3g} TFLOP/s"
    lines = [
        Line("layers", stored / machine.read / 1e9, f"{size(stored)} of weights, filled once each, {machine.read:.3g} GB/s"),
        Line(
            "passes",
            through * flops_a_layer / rates.product,
            f"{through:,} through one layer, {through * flops_a_layer:.3g} FLOP in FP32, {rate}",
        ),
        Line("states", moved * (1 / machine.read + 1 / machine.write) / 1e9, f"{size(moved)} read and written"),
    ]
    if to_the_end:
        text = text_of(plan.config)
        flops = 2 * (len(parts) + wholes) * 2.0 * tokens * size_of(text, "hidden_size") * size_of(text, "vocab_size")
        lines.append(Line("head", flops / rates.product, f"{flops:.3g} FLOP: each part's words beside the reference's"))
    return lines
