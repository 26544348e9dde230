"""How long calibrating a plan layer by layer would take on some machine, with what disk and memory: an extrapolation.

The work is `calibration_work`'s, exact. What a core does was measured on one core of one machine (`MEASURED_CALIBRATION`), or
is measured here and now (`--hardware this`). What a GPU does is a share of what its maker publishes, which was measured on one
H200. The steps follow each other: reading, copying and computing are added up, as the code does them.
"""

from __future__ import annotations

from dataclasses import dataclass

from assay.quantities import size
from assay.records.plan import Plan
from assay_quantize.calibration.memory import BATCH_TOKENS, SPARE_BYTES
from assay_quantize.estimate.calibration_work import CalibrationWork, calibration_work, routed_share
from assay_quantize.estimate.hardware_time import SCALING, CoreRates, Gpu, Machine

PROCESS_BYTES = 700 << 20
"""torch, transformers, llm-compressor and a plan of 60,000 tensors."""


@dataclass(frozen=True)
class TorchRates:
    """What the device does, in operations per second: products of FP32 matrices; factorized Hessians; weights that are gone
    through column by column, a step's own time apart; weights that AWQ rounds for a candidate, and AutoRound in a step. bus: GB
    per second to a GPU; None: the device is the CPU. weight_s, tuned_weight_s: what each weight takes whatever its size, once
    and in each step of AutoRound; counted for GPUs."""

    product: float
    factor: float
    column_s: float
    column_number_s: float
    searched_number_s: float
    tuned_number_s: float
    bus: float | None
    source: str
    weight_s: float = 0.0
    tuned_weight_s: float = 0.0


MEASURED_CALIBRATION = TorchRates(
    product=88e9,
    factor=45e9,
    column_s=58e-6,
    column_number_s=53e-9,
    searched_number_s=2e-9,
    tuned_number_s=22e-9,
    bus=None,
    source="one core of a two-core virtual machine, AMD EPYC (Zen 4, AVX-512), 2026-11-25, CPU time; matrices of GLM-5's "
    "experts; how other cores compare is not known",
)
"""By `measure_torch.measured_torch`."""

PRODUCT_SHARE, FACTOR_SHARE, BUS_SHARE, MEMORY_PASSES = 0.73, 0.17, 0.13, 110
"""Measured on one H200 (decision 189) as shares of what is published, and taken for every GPU: of its FP32 rate in products
and in factorizations of one Hessian after the other, and of its bus for copies from memory that is not pinned; how often a
weight passes through memory while its columns are rounded."""
SEARCH_PASSES = 25
"""The same for a candidate of AWQ."""
TUNE_PASSES = 40
"""The same for a step of AutoRound, by a count of its operations and their gradients; on one H100 weights of two million
numbers were bound by `TUNE_S`."""
COLUMN_S, FACTOR_S, WEIGHT_S, TUNE_S = 2.7e-6, 3.9e-3, 4e-3, 2.8e-3
"""Measured there as well, whatever the size of a weight: seconds of a column's step (llm-compressor has a Triton kernel for
blocks of 128); of the starts of three factorizations; of what else one core does for a weight (hooks, packing, copies). The
last on one H100 (decision 199): of the kernels that AutoRound starts for a weight in a step."""


@dataclass(frozen=True)
class Line:
    """One step or assumption. seconds: None: it takes none, or it is not a step."""

    name: str
    seconds: float | None
    text: str


@dataclass(frozen=True)
class CalibrationEstimate:
    """Before the engine writes the checkpoint. device_bytes: of the GPU; None: the CPU computes, and host_bytes has it all.

    lines: the steps and what was assumed, one each; total_s: the sum of their seconds."""

    machine: str
    device: str
    work: CalibrationWork
    rates: TorchRates
    lines: tuple[Line, ...]
    total_s: float
    disk_bytes: int
    device_bytes: int | None
    host_bytes: int
    problem: str | None


def gpu_rates(gpu: Gpu) -> TorchRates:
    """Shares of what is published."""
    product = PRODUCT_SHARE * gpu.fp32 * 1e12
    return TorchRates(
        product=product,
        factor=FACTOR_SHARE * gpu.fp32 * 1e12,
        column_s=COLUMN_S,
        column_number_s=MEMORY_PASSES * 4 / (gpu.memory * 1e12),
        searched_number_s=SEARCH_PASSES * 4 / (gpu.memory * 1e12),
        tuned_number_s=TUNE_PASSES * 4 / (gpu.memory * 1e12),
        bus=BUS_SHARE * gpu.bus,
        source=f"{gpu.source}: {gpu.fp32:g} TFLOP/s in FP32, {gpu.memory:g} TB/s, {gpu.bus:g} GB/s to the host; as measured on "
        f"one H200, {PRODUCT_SHARE:g} of it in products, {FACTOR_SHARE:g} in factorizations, {BUS_SHARE:g} of the bus",
        weight_s=FACTOR_S + WEIGHT_S,
        tuned_weight_s=TUNE_S,
    )


def core_rates(one: TorchRates, cores: int) -> TorchRates:
    """Of `cores` cores: products and factorizations are shared among them, steps of columns are not."""
    times = cores * (SCALING if cores > 1 else 1.0)
    return TorchRates(
        product=one.product * times,
        factor=one.factor * times,
        column_s=one.column_s,
        column_number_s=one.column_number_s,
        searched_number_s=one.searched_number_s,
        tuned_number_s=one.tuned_number_s / times,
        bus=None,
        source=one.source,
    )


def estimate_calibration(
    plan: Plan, machine: Machine, cores: CoreRates, torch_rates: TorchRates, *, gpu: bool
) -> CalibrationEstimate:
    """What calibrating takes on `machine`. cores: of its cores, for hashing and copying. torch_rates: of one core. gpu: whether
    its GPU computes."""
    work = calibration_work(plan)
    device = machine.gpu if gpu else None
    rates = core_rates(torch_rates, machine.cores) if device is None else gpu_rates(device)
    lines = _lines(plan, work, machine, cores, rates)
    on_device = (work.layer_bytes if device is None else work.gpu_layer_bytes) + SPARE_BYTES
    on_host = on_device if device is None else work.written // max(1, work.layers) + work.beside_bytes
    host_bytes = PROCESS_BYTES + work.embedding_bytes + on_host
    problem = None
    if device is not None and on_device > device.memory_bytes:
        problem = f"a layer takes {size(on_device)}, the GPU has {size(device.memory_bytes)}: fewer tokens, or on the CPU"
    return CalibrationEstimate(
        machine=machine.name,
        device=f"{machine.cores} cores" if device is None else f"one {device.name}",
        work=work,
        rates=rates,
        lines=tuple(lines),
        total_s=sum(line.seconds or 0.0 for line in lines),
        disk_bytes=work.disk_bytes,
        device_bytes=None if device is None else on_device,
        host_bytes=host_bytes,
        problem=problem,
    )


def _lines(plan: Plan, work: CalibrationWork, machine: Machine, cores: CoreRates, rates: TorchRates) -> list[Line]:
    """In the order in which a layer takes them."""
    product, factor = (f"{rate / 1e12:.3g} TFLOP/s" for rate in (rates.product, rates.factor))
    at_once = "one at a time" if work.steps else f"{BATCH_TOKENS:,} at once"
    in_batches = f"{work.tokens:,} in sequences of {work.length}, {at_once}, through {work.layers} layers"
    lines = [
        Line("tokens", None, f"{in_batches}; of --text: text of its own needs the whole model in memory"),
        _moved("source", work.read, machine.read, "read once"),
        _moved("weights", work.prepared, cores.copy_in, "made in FP32 by one core"),
    ]
    if rates.bus is not None:
        lines.append(_moved("to the GPU", work.prepared // 2, rates.bus, "in 16 bits"))
    routed = f"the real routing, {routed_share(plan):.1%} of the experts' weights a token"
    every = f"{_flops(work.watched)}: {routed if work.steps else 'every expert sees every token'}; FP32, {product}"
    lines.append(Line("watch", work.watched / rates.product, every))
    if work.searched:
        search_s = work.searched / rates.product + work.searched_numbers * rates.searched_number_s
        numbers = f"{work.searched_numbers:.3g} weights rounded for candidates, {1e9 * rates.searched_number_s:.3g} ns each"
        lines.append(Line("search", search_s, f"{_flops(work.searched)}, {numbers}"))
    if work.steps:
        tune_s = work.tuned / rates.product + work.tuned_numbers * rates.tuned_number_s
        tune_s += work.tuned_weights * rates.tuned_weight_s
        numbers = f"{work.tuned_numbers:.3g} numbers rounded, {1e9 * rates.tuned_number_s:.3g} ns each"
        if rates.tuned_weight_s:
            numbers += f", {work.tuned_weights:,} times a weight, {1e3 * rates.tuned_weight_s:.3g} ms each"
        lines.append(Line("tune", tune_s, f"{work.steps} steps a layer: {_flops(work.tuned)}, {numbers}"))
    if work.columns:
        round_s = work.columns * rates.column_s + work.column_numbers * rates.column_number_s
        each = f"{1e6 * rates.column_s:.3g} us a step, {1e9 * rates.column_number_s:.3g} ns a weight"
        who = ", of one core" if rates.bus is None else ""
        thrice = f"{_flops(work.factorized)}: three factorizations for each weight, {factor}"
        lines += [
            Line("Hessians", work.hessians / rates.product, f"{_flops(work.hessians)}: one for each different input"),
            Line("factorize", work.factorized / rates.factor, thrice),
            Line("round", round_s, f"{work.columns:,} steps of a column, {work.column_numbers:.3g} weights; {each}{who}"),
            Line("update", work.updates / rates.product, f"{_flops(work.updates)}: errors passed on to the blocks behind"),
        ]
        if rates.weight_s:
            each = f"{work.weights:,} weights, {1e3 * rates.weight_s:.3g} ms each: starts of kernels, hooks, packing"
            lines.append(Line("dispatch", work.weights * rates.weight_s, each))
    state_s = work.layers * work.state_bytes * (2 / machine.read + 1 / machine.write + 1 / cores.sha256) / 1e9
    layer_s = work.written * (1 / machine.write + 1 / cores.sha256) / 1e9
    return [
        *lines,
        Line("pass on", work.passed_on / rates.product, f"{_flops(work.passed_on)}: {routed}"),
        Line("states", state_s, f"{size(work.state_bytes)} written, hashed and read twice for each layer"),
        Line("layers", layer_s, f"{size(work.written)} written and hashed"),
    ]


def _moved(name: str, num_bytes: int, rate: float, how: str) -> Line:
    return Line(name, num_bytes / rate / 1e9, f"{size(num_bytes)} {how}, {rate:.3g} GB/s")


def _flops(count: float) -> str:
    return f"{count:.3g} FLOP"
