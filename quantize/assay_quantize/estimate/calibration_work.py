"""What calibrating a plan layer by layer has to do: bytes and floating point operations, from names, shapes and the recipe.

Nothing here depends on a machine. Multiplying and adding counts as two operations. Counts of the factorization are LAPACK's:
potrf c^3/3, potri 2c^3/3, and potrf once more, for each weight, whoever shares its Hessian (`factorize_hessian` of
llm-compressor). Of the columns of a weight, `GptqCalibration.block_size` at a time are gone through one by one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from assay.recipes.calibrated.methods import AutoRoundCalibration, AwqCalibration, AwqGptqCalibration, GptqCalibration
from assay.recipes.families import count_of, num_experts, num_hidden_layers, size_of, split_layer, text_of
from assay.recipes.precision import PrecisionRecipe
from assay.records.plan import Plan, TensorPlan
from assay_quantize.calibration.memory import (
    BATCH_TOKENS,
    autoround_numbers,
    hessian_numbers,
    layer_bytes,
    token_state_bytes,
    weights_at_once,
)
from assay_quantize.checkpoint.calibrated_layers import parts_of
from assay_quantize.plan.calibrated import calibrated_mtp_layer, calibrated_tensors, scalable, smoothings

FLOAT_BYTES = 4
Layers = Mapping[int, Sequence[TensorPlan]]


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
        at = split_layer(tensor.name)
        if (
            at is not None
            and at.layer in every
            and (tensor.role != "mtp" or at.layer == mtp)
            and tensor.action not in ("drop", "consume")
        ):
            every[at.layer].append(tensor)
    changed = calibrated_tensors(plan)  # by AWQ and SmoothQuant norms and routers, too
    rounded: Layers = {layer: [one for one in tensors if one.action == "quantize"] for layer, tensors in changed.items()}
    layers: Layers = {layer: changed.get(layer, ()) for layer in every}
    batch = max(1, BATCH_TOKENS // length)
    share = routed_share(plan)
    linears = [tensor for tensors in every.values() for tensor in tensors if len(tensor.shape) == 2]
    of_all = float(sum(math.prod(tensor.shape) for tensor in linears if tensor.part != "routed_expert"))
    of_experts = float(sum(math.prod(tensor.shape) for tensor in linears if tensor.part == "routed_expert"))
    scores = attention_flops(plan, length) * len(every) * tokens
    is_gptq = isinstance(options, GptqCalibration | AwqGptqCalibration)
    gptq = [one for tensors in rounded.values() for one in tensors] if is_gptq else []
    steps = _steps(rounded) if gptq else Counter[tuple[int, int]]()
    shapes = Counter((tensor.shape[0], tensor.shape[1]) for tensor in gptq)
    scaled = {layer: scalable(plan, tensors) for layer, tensors in every.items()}
    search = (
        _search(rounded, scaled, options, tokens, share, scores / len(every))
        if isinstance(options, AwqCalibration | AwqGptqCalibration)
        else (0.0, 0.0)
    )
    everywhere, routed = 2 * tokens * (of_all + of_experts) + scores, 2 * tokens * (of_all + of_experts * share) + scores
    iterations, part, shape = 0, 0.0, (sequences, length)
    if isinstance(options, AutoRoundCalibration):
        iterations, part = options.iterations, min(options.batch, sequences) / sequences
    return CalibrationWork(
        method=options.method,
        tokens=tokens,
        length=length,
        layers=len(every),
        read=sum(tensor.num_bytes for tensors in every.values() for tensor in tensors),
        prepared=sum(FLOAT_BYTES * math.prod(tensor.shape) for tensors in every.values() for tensor in tensors),
        watched=routed if iterations else (2 if isinstance(options, AwqGptqCalibration) else 1) * everywhere,
        passed_on=2 * routed if iterations else routed,  # of the untouched layer, and of the tuned one
        hessians=2.0 * tokens * _hessian_numbers(rounded) if gptq else 0.0,
        factorized=sum(count * 4 / 3 * columns**3 for (_, columns), count in shapes.items()),
        weights=len(gptq),
        columns=sum(count * columns for (_, columns), count in steps.items()),
        column_numbers=float(sum(count * rows * columns for (rows, columns), count in shapes.items())),
        updates=float(sum(count * rows * columns**2 for (rows, columns), count in shapes.items())),
        searched=search[0],
        searched_numbers=search[1],
        steps=iterations,
        tuned=3 * iterations * part * routed,  # a gradient takes twice what the outputs take
        tuned_numbers=float(iterations * sum(math.prod(one.shape) for tensors in rounded.values() for one in tensors)),
        tuned_weights=iterations * sum(map(len, rounded.values())),
        state_bytes=tokens * token_state_bytes(plan, length) * (2 if iterations else 1),
        written=sum(output.num_bytes for tensors in changed.values() for tensor in tensors for output in parts_of(tensor)),
        layer_bytes=layer_bytes(plan, layers, shape, batch),
        gpu_layer_bytes=layer_bytes(plan, layers, shape, batch, gpu=True),
        beside_bytes=FLOAT_BYTES * max((autoround_numbers(plan, some, shape, 0).beside for some in rounded.values()), default=0)
        if iterations
        else 0,
        embedding_bytes=min(tokens, size_of(text_of(plan.config), "vocab_size"))
        * size_of(text_of(plan.config), "hidden_size")
        * 4,
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


def _hessian_numbers(rounded: Layers) -> float:
    return float(sum(hessian_numbers(tensors) for tensors in rounded.values()))


def _steps(rounded: Layers) -> Counter[tuple[int, int]]:
    """Shape -> how many times its columns are gone through: weights of one shape and layer are rounded some at once."""
    steps: Counter[tuple[int, int]] = Counter()
    for tensors in rounded.values():
        at_once = weights_at_once(tensors)
        for (rows, columns), count in Counter((t.shape[0], t.shape[1]) for t in tensors).items():
            steps[rows, columns] += -(-count // at_once)
    return steps


def _search(
    rounded: Layers, every: Layers, options: AwqCalibration | AwqGptqCalibration, tokens: int, share: float, scores: float
) -> tuple[float, float]:
    """AWQ: each candidate runs what reads the scaled inputs once more, the experts with their real routing, after rounding it.

    (operations, numbers that are rounded for it)."""
    flops = numbers = 0.0
    runs = options.grid + 1
    for layer, tensors in rounded.items():
        weights = [tensor for tensor in tensors if tensor.action == "quantize"]
        kept = [t for t in every[layer] if not any(t.name == one.name for one in weights)]
        sizes = {tensor.module: float(math.prod(tensor.shape)) for tensor in every[layer] if len(tensor.shape) == 2}
        for one in smoothings(options.method, weights, kept):
            balanced = [module for module in one.balance if module in sizes]
            numbers += options.grid * sum(sizes[module] for module in balanced)
            if len(balanced) == 1 and balanced[0].endswith("down_proj"):
                flops += runs * 2 * tokens * sizes[balanced[0]]
            elif any(".self_attn." in module for module in balanced):
                flops += runs * (2 * tokens * sum(v for m, v in sizes.items() if ".self_attn." in m) + scores)
            else:
                mlp = sum(v * (share if ".experts." in m else 1) for m, v in sizes.items() if ".mlp." in m)
                flops += runs * 2 * tokens * mlp
    return flops, numbers
