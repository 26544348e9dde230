"""How long calibrating a plan layer by layer would take on some machine, with what disk and memory: an extrapolation.

The work is exact: bytes and floating point operations, from names, shapes and the recipe; multiplying and adding counts as two.
Counts of the factorization are LAPACK's: potrf c^3/3, potri 2c^3/3, and potrf once more, for each weight, whoever shares its
Hessian (`factorize_hessian` of llm-compressor). Of the columns of a weight, `GptqCalibration.block_size` at a time are gone
through one by one.

What a core does was measured on one core of one machine (`MEASURED_CALIBRATION`), or is measured here and now
(`--hardware this`). What a GPU does is a share of what its maker publishes, which was measured on one H200. The steps follow
each other: reading, copying and computing are added up, as the code does them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from assay.quantities import size
from assay.recipes.calibrated.methods import AutoRoundCalibration, AwqCalibration, AwqGptqCalibration, GptqCalibration
from assay.recipes.families import num_experts
from assay.recipes.family_names import split_layer
from assay.recipes.precision import PrecisionRecipe
from assay.recipes.text_config import count_of, num_hidden_layers, size_of, text_of
from assay.records.plan import Plan, TensorPlan
from assay_quantize.calibration.memory import (
    BATCH_TOKENS,
    FLOAT_BYTES,
    SPARE_BYTES,
    autoround_numbers,
    hessian_numbers,
    layer_bytes,
    token_state_bytes,
    weights_at_once,
)
from assay_quantize.checkpoint.calibrated_layers import parts_of
from assay_quantize.estimate.hardware_time import SCALING, CoreRates, Gpu, Machine
from assay_quantize.plan.calibrated import calibrated_mtp_layer, calibrated_tensors, scalable, smoothings

Layers = Mapping[int, Sequence[TensorPlan]]


# ------------------------------------------------------------------------------------------------ the work
@dataclass(frozen=True)
class CalibrationWork:
    """Of all layers together, MTP apart.

    tokens: in sequences of `length`. read: bytes of the source, as stored; prepared: of its weights in FP32, handed to the
    device. watched: operations of the pass in which every expert sees every token; passed_on: of the one with the real routing.
    hessians, factorized: of GPTQ, which rounds so many weights. columns: steps of one column for `at_once` weights;
    column_numbers: weights that these steps touch; searched: operations of AWQ's search, and of the copies it rounds,
    searched_numbers. steps: of AutoRound in each layer; tuned: operations of them all, tuned_numbers: numbers of weights that
    they round, tuned_weights: how often they round one. state_bytes: what goes from layer to layer. written: files of layers.
    layer_bytes: the most that one layer takes while it is calibrated; gpu_layer_bytes, beside_bytes: of a GPU's memory, and of
    the machine's at the same time, the weights apart.
    """

    method: str
    tokens: int
    length: int
    layers: int
    read: int
    prepared: int
    watched: float
    passed_on: float
    hessians: float
    factorized: float
    weights: int
    columns: int
    column_numbers: float
    updates: float
    searched: float
    searched_numbers: float
    steps: int
    tuned: float
    tuned_numbers: float
    tuned_weights: int
    state_bytes: int
    written: int
    layer_bytes: int
    gpu_layer_bytes: int
    beside_bytes: int
    embedding_bytes: int

    @property
    def disk_bytes(self) -> int:
        """Beside the checkpoint: files of all layers, tokens, and the states in front of a layer and behind it."""
        return self.written + 2 * self.state_bytes + 4 * self.tokens


def calibration_work(plan: Plan) -> CalibrationWork:
    """What `calibrate_layers` does with a plan whose precision is calibrated."""
    options = PrecisionRecipe.model_validate(plan.precision_recipe).calibration
    assert options != "none", "the precision is calibrated"
    length = options.length
    sequences = max(1, options.tokens // length)
    tokens = sequences * length
    mtp = calibrated_mtp_layer(plan)
    every: dict[int, list[TensorPlan]] = {layer: [] for layer in range(num_hidden_layers(plan.config))}
    every |= {} if mtp is None else {mtp: []}
    for tensor in plan.tensors:
        place = split_layer(tensor.name)
        if place is None or place.layer not in every or tensor.action in ("drop", "consume"):
            continue
        if tensor.role != "mtp" or place.layer == mtp:
            every[place.layer].append(tensor)
    changed = calibrated_tensors(plan)  # by AWQ and SmoothQuant norms and routers, too
    rounded: Layers = {layer: [t for t in tensors if t.action == "quantize"] for layer, tensors in changed.items()}
    layers: Layers = {layer: changed.get(layer, ()) for layer in every}
    batch = max(1, BATCH_TOKENS // length)
    share = routed_share(plan)
    linears = [tensor for tensors in every.values() for tensor in tensors if len(tensor.shape) == 2]
    of_all = float(sum(math.prod(tensor.shape) for tensor in linears if tensor.part != "routed_expert"))
    of_experts = float(sum(math.prod(tensor.shape) for tensor in linears if tensor.part == "routed_expert"))
    scores = attention_flops(plan, length) * len(every) * tokens
    is_gptq = isinstance(options, GptqCalibration | AwqGptqCalibration)
    gptq = [tensor for tensors in rounded.values() for tensor in tensors] if is_gptq else []
    steps: Counter[tuple[int, int]] = Counter()  # shape -> how many times columns are gone through, several weights at once
    for tensors in rounded.values() if is_gptq else ():
        at_once = weights_at_once(tensors)
        for weight_shape, count in Counter((t.shape[0], t.shape[1]) for t in tensors).items():
            steps[weight_shape] += -(-count // at_once)
    shapes = Counter((tensor.shape[0], tensor.shape[1]) for tensor in gptq)
    scaled = {layer: scalable(plan, tensors) for layer, tensors in every.items()}
    search = (
        _search(rounded, scaled, options, tokens, share, scores / len(every))
        if isinstance(options, AwqCalibration | AwqGptqCalibration)
        else (0.0, 0.0)
    )
    everywhere, routed = 2 * tokens * (of_all + of_experts) + scores, 2 * tokens * (of_all + of_experts * share) + scores
    iterations, part, beside, shape = 0, 0.0, 0, (sequences, length)
    if isinstance(options, AutoRoundCalibration):
        iterations, part = options.iterations, min(options.batch, sequences) / sequences
        beside = max((autoround_numbers(plan, tensors, shape, 0).beside for tensors in rounded.values()), default=0)
    text = text_of(plan.config)
    return CalibrationWork(
        method=options.method,
        tokens=tokens,
        length=length,
        layers=len(every),
        read=sum(tensor.num_bytes for tensors in every.values() for tensor in tensors),
        prepared=sum(FLOAT_BYTES * math.prod(tensor.shape) for tensors in every.values() for tensor in tensors),
        watched=routed if iterations else (2 if isinstance(options, AwqGptqCalibration) else 1) * everywhere,
        passed_on=2 * routed if iterations else routed,  # of the untouched layer, and of the tuned one
        hessians=2.0 * tokens * sum(map(hessian_numbers, rounded.values())) if gptq else 0.0,
        factorized=sum(count * 4 / 3 * columns**3 for (_, columns), count in shapes.items()),
        weights=len(gptq),
        columns=sum(count * columns for (_, columns), count in steps.items()),
        column_numbers=float(sum(count * rows * columns for (rows, columns), count in shapes.items())),
        updates=float(sum(count * rows * columns**2 for (rows, columns), count in shapes.items())),
        searched=search[0],
        searched_numbers=search[1],
        steps=iterations,
        tuned=3 * iterations * part * routed,  # a gradient takes twice what the outputs take
        tuned_numbers=float(iterations * sum(math.prod(t.shape) for tensors in rounded.values() for t in tensors)),
        tuned_weights=iterations * sum(map(len, rounded.values())),
        state_bytes=tokens * token_state_bytes(plan, length) * (2 if iterations else 1),
        written=sum(output.num_bytes for tensors in changed.values() for tensor in tensors for output in parts_of(tensor)),
        layer_bytes=layer_bytes(plan, layers, shape, batch),
        gpu_layer_bytes=layer_bytes(plan, layers, shape, batch, gpu=True),
        beside_bytes=FLOAT_BYTES * beside,
        embedding_bytes=FLOAT_BYTES * min(tokens, size_of(text, "vocab_size")) * size_of(text, "hidden_size"),
    )


def routed_share(plan: Plan) -> float:
    """Of the routed experts, those that a token is given; 1 where there are none."""
    text = text_of(plan.config)
    chosen, experts = count_of("num_experts_per_tok", text.get("num_experts_per_tok")), num_experts(plan.family, plan.config)
    return min(1.0, chosen / experts) if chosen and experts else 1.0


def attention_flops(plan: Plan, length: int) -> float:
    """Of the scores and the sum of values for one token of one layer; all `length` tokens are multiplied, masked or not."""
    text = text_of(plan.config)
    heads = size_of(text, "num_attention_heads", 1)
    width = size_of(text, "head_dim", max(1, size_of(text, "hidden_size") // heads))
    if "kv_lora_rank" in text:  # latent attention: keys and values have widths of their own
        keys, values = size_of(text, "qk_nope_head_dim") + size_of(text, "qk_rope_head_dim"), size_of(text, "v_head_dim")
        return 2.0 * length * heads * (keys + values)
    return 4.0 * length * heads * width


def _search(
    rounded: Layers, every: Layers, options: AwqCalibration | AwqGptqCalibration, tokens: int, share: float, scores: float
) -> tuple[float, float]:
    """AWQ: each candidate runs what reads the scaled inputs once more, the experts with their real routing, after rounding it.

    (operations, numbers that are rounded for it)."""
    flops = numbers = 0.0
    runs = options.grid + 1
    for layer, weights in rounded.items():
        names = {weight.name for weight in weights}
        kept = [tensor for tensor in every[layer] if tensor.name not in names]
        sizes = {tensor.module: float(math.prod(tensor.shape)) for tensor in every[layer] if len(tensor.shape) == 2}
        for smoothing in smoothings(options.method, weights, kept):
            balanced = [module for module in smoothing.balance if module in sizes]
            numbers += options.grid * sum(sizes[module] for module in balanced)
            if len(balanced) == 1 and balanced[0].endswith("down_proj"):
                flops += runs * 2 * tokens * sizes[balanced[0]]
            elif any(".self_attn." in module for module in balanced):
                flops += runs * (2 * tokens * sum(v for m, v in sizes.items() if ".self_attn." in m) + scores)
            else:
                mlp = sum(v * (share if ".experts." in m else 1) for m, v in sizes.items() if ".mlp." in m)
                flops += runs * 2 * tokens * mlp
    return flops, numbers


# ------------------------------------------------------------------------------------------------ the time
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
"""By `measure_machine.measured_torch`."""

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
    return TorchRates(
        product=PRODUCT_SHARE * gpu.fp32 * 1e12,
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


def core_rates(core: TorchRates, cores: int) -> TorchRates:
    """Of `cores` cores: products and factorizations are shared among them, steps of columns are not."""
    times = cores * (SCALING if cores > 1 else 1.0)
    return replace(core, product=core.product * times, factor=core.factor * times, tuned_number_s=core.tuned_number_s / times)


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
