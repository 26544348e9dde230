"""What calibrating a layer takes of memory, and all layers of the disk, before anything of them is read."""

from __future__ import annotations

import math
import shutil
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from assay.errors import QuantizeError
from assay.quantities import size
from assay.recipes.family_names import split_layer
from assay.recipes.text_config import count_of, size_of, text_of
from assay.records.plan import Plan, TensorPlan
from assay_quantize.checkpoint.calibrated_layers import parts_of
from assay_quantize.plan.calibrated import calibrated_mtp_layer, method_of
from assay_quantize.storage.resident import available_bytes, resident_bytes

BATCH_TOKENS = 2048
"""Tokens that go through a layer at once. Part of the method: with another number the last bits of sums differ."""
FLOAT_BYTES = 4
EXPERT_INPUTS = ("gate_proj", "up_proj")
"""Weights of a layer's experts that all have one input, since every expert sees every token."""
AT_ONCE_BYTES = 128 << 20
"""Of copies that weights take which are rounded together; part of the method as `BATCH_TOKENS` is."""
SPARE_BYTES = 256 << 20
"""Buffers of the matrix library, interpreter, fragments."""
AUTOROUND_BATCH = 8
"""Sequences that go through a layer at once before and after AutoRound's steps, and at most in one call of a step, whatever the
recipe says (auto-round 0.15, `algorithms/block_runner.py`)."""
IMPORTED_NUMBERS = 16 << 20
"""What auto-round imports when it begins, in bytes / 4."""
MOST_TEXTS_AT_ONCE = 128
CACHE_BYTES = 2 << 30
"""Of keys and values of the texts that a model writes at once."""


def rounding_numbers(tensor: TensorPlan) -> int:
    """What rounding one weight by GPTQ takes: copies of the weight and of its Hessian."""
    rows, columns = tensor.shape
    return 6 * rows * columns + 4 * columns**2


def weights_at_once(tensors: Sequence[TensorPlan]) -> int:
    """Weights of one shape that GPTQ rounds together: it goes column by column, and of small weights the calls take longest.

    From 16 on llm-compressor factorizes Hessians together, by another routine with other last bits.
    """
    most = max(map(rounding_numbers, tensors), default=1)
    return max(1, min(15, AT_ONCE_BYTES // (FLOAT_BYTES * most)))


def layer_bytes(
    plan: Plan, layers: Mapping[int, Sequence[TensorPlan]], shape: tuple[int, ...], batch: int, *, gpu: bool = False
) -> int:
    """The most that a layer takes: weights in FP32 and once more as they are stored, Hessians, what one weight's rounding
    needs, and the activations of a batch. shape: sequences and their length. batch: sequences at once. gpu: of a GPU's memory,
    where AutoRound has some of it in the memory of the CPU."""
    weights: defaultdict[int, int] = defaultdict(int)
    mtp, config = calibrated_mtp_layer(plan), text_of(plan.config)
    for tensor in plan.tensors:
        place = split_layer(tensor.name)
        if place is not None and place.layer in layers and (tensor.role != "mtp" or place.layer == mtp):
            weights[place.layer] += math.prod(tensor.shape)
    if mtp is not None:  # what makes its inputs: the embeddings of all tokens, eh_proj
        hidden = size_of(config, "hidden_size", 1)
        weights[mtp - 1] += hidden * (min(math.prod(shape), size_of(config, "vocab_size", 1)) + 2 * hidden)
    method = method_of(plan)
    heads, tokens = size_of(config, "num_attention_heads", 1), batch * shape[1]
    most = 0
    for layer, tensors in layers.items():
        widest = max((max(t.shape) for t in tensors), default=size_of(config, "hidden_size", 1))
        rounded = [t for t in tensors if t.action == "quantize"]
        packed = sum(output.num_bytes for t in tensors for output in t.outputs)
        if method == "autoround":
            tuning = autoround_numbers(plan, rounded, shape, widest)
            most = max(most, FLOAT_BYTES * (weights[layer] + (tuning.gpu if gpu else tuning.cpu)) + packed)
            continue
        rounding = max(map(rounding_numbers, rounded), default=0) * weights_at_once(rounded)
        scores = 3 * batch * heads * shape[1] ** 2
        moving = max(rounding, scores + 12 * tokens * widest)
        statistics = hessian_numbers(rounded) if method in ("gptq", "awq+gptq") else 0
        if method in ("awq", "awq+gptq"):  # one after the other
            statistics = max(statistics, awq_numbers(rounded, math.prod(shape)))
        most = max(most, FLOAT_BYTES * (weights[layer] + statistics + moving) + packed)
    return most


class AutoRoundNumbers(NamedTuple):
    """gpu, beside: on a GPU, and of the machine's memory at the same time. cpu: where the CPU does it all."""

    gpu: int
    beside: int
    cpu: int


def autoround_numbers(plan: Plan, tensors: Sequence[TensorPlan], shape: tuple[int, ...], widest: int) -> AutoRoundNumbers:
    """What AutoRound takes beside the weights.

    For each weight offsets, their gradients, and what each call of a step keeps for these; for each token of a step activations
    with their gradients; in the memory of a CPU also the best offsets so far, all inputs and outputs of the layer with their
    masks, and what glibc keeps between two steps. Measured (decision 199): 0.8 of this on a GPU, 0.3 to 0.9 on a CPU.
    """
    sequences, length = shape
    config = text_of(plan.config)
    batch = min(sequences, int(plan.precision_recipe["calibration"]["batch"]))
    calls, step = -(-batch // AUTOROUND_BATCH), min(sequences, max(AUTOROUND_BATCH, batch))
    chosen = count_of("num_experts_per_tok", config.get("num_experts_per_tok")) + 1
    heads = size_of(config, "num_attention_heads", 1)
    weights, scores = sum(math.prod(tensor.shape) for tensor in tensors), 3 * step * heads * length**2
    moved = step * length * widest * chosen
    kept = 4 * sequences * length * size_of(config, "hidden_size", 1) + 2 * sequences * length**2 + IMPORTED_NUMBERS
    return AutoRoundNumbers(
        gpu=5 * (1 + calls) * weights // 2 + 6 * moved + scores,
        beside=2 * weights + kept,
        cpu=(13 + 3 * calls) * weights + 24 * moved + scores + kept,
    )


def awq_numbers(tensors: Sequence[TensorPlan], tokens: int) -> int:
    """Inputs that AWQ keeps until a layer is done: of attention and MLP, and of every down projection; with the outputs of the
    widest twice, and copies of the weights that are scaled together."""
    width = max((min(t.shape) for t in tensors), default=0)
    down = sum(t.shape[1] for t in tensors if t.module.endswith(".down_proj"))
    hidden = max((t.shape[1] for t in tensors if t.module.endswith((".up_proj", ".q_proj"))), default=width)
    return tokens * (4 * hidden + down) + sum(math.prod(t.shape) for t in tensors)


def hessian_numbers(tensors: Sequence[TensorPlan]) -> int:
    """Of a layer's Hessians, one for each input."""
    inputs: dict[str, int] = {}
    for tensor in tensors:
        _, _, leaf = tensor.module.rpartition(".")
        if tensor.part == "routed_expert" and leaf in EXPERT_INPUTS:
            inputs["experts"] = tensor.shape[1]
        elif tensor.fused_group is not None:
            inputs[tensor.fused_group] = tensor.shape[1]
        else:
            inputs[tensor.name] = tensor.shape[1]
    return sum(columns**2 for columns in inputs.values())


def check_memory(
    plan: Plan,
    layers: Mapping[int, Sequence[TensorPlan]],
    shape: tuple[int, ...],
    batch: int,
    memory_bytes: int | None,
    source: Path,
) -> None:
    """QuantizeError: a layer does not fit; says how much would do. memory_bytes None: what the machine has free."""
    needed = layer_bytes(plan, layers, shape, batch) + SPARE_BYTES
    if memory_bytes is not None:
        free, where = memory_bytes - resident_bytes(), f"--memory {size(memory_bytes)}"
    else:
        free, where = available_bytes(), "this machine"
    if needed > free:
        raise QuantizeError(
            f"{source}: calibrating its largest layer takes {size(needed)}, of {where} {size(max(0, free))} are left; at least "
            f"{size(needed + resident_bytes())} are needed in all, or a precision without `calibration`"
        )


def check_gpu_memory(
    plan: Plan, layers: Mapping[int, Sequence[TensorPlan]], shape: tuple[int, ...], batch: int, free_bytes: int, source: Path
) -> None:
    """QuantizeError: a layer does not fit into what a GPU has free."""
    needed = layer_bytes(plan, layers, shape, batch, gpu=True) + SPARE_BYTES
    if needed > free_bytes:
        raise QuantizeError(
            f"{source}: calibrating its largest layer takes {size(needed)} of the GPU's memory, {size(free_bytes)} are free; "
            "say --device cpu, or take a precision without `calibration`"
        )


def token_state_bytes(plan: Plan, length: int) -> int:
    """Of one token, what goes from layer to layer: hidden states, and the indexes that DSA hands on."""
    text = text_of(plan.config)
    return FLOAT_BYTES * size_of(text, "hidden_size") + 8 * min(length, size_of(text, "index_topk", 0))


def check_disk(
    plan: Plan, layers: Mapping[int, Sequence[TensorPlan]], shape: tuple[int, ...], folder: Path, done: Collection[int] = ()
) -> None:
    """QuantizeError: the disk of `folder` has no room for the layers that are not done yet, and for the states in front of one
    and behind it."""
    states = 2 * math.prod(shape) * token_state_bytes(plan, shape[1]) * (2 if method_of(plan) == "autoround" else 1)
    left = [tensor for layer, tensors in layers.items() if layer not in done for tensor in tensors]
    written = sum(output.num_bytes for tensor in left for output in parts_of(tensor))
    on_disk = sum(path.stat().st_size for path in folder.glob("state-*.npy"))
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    missing = max(0, states - on_disk) + written + 4 * math.prod(shape) - free
    if len(done) < len(layers) and missing > 0:
        raise QuantizeError(
            f"{folder}: calibrating keeps {size(states)} of states between layers there and {size(written)} of layers, and "
            f"{size(free)} are free; free {size(missing)}, put the checkpoint on another disk (--out, --runs), or take fewer "
            "`tokens` in the precision's `calibration`"
        )


def texts_at_once(model: Any, length: int) -> int:
    """How many texts of `length` tokens a model writes at once: as many as keep keys and values within CACHE_BYTES, or one.

    The number depends on the model and the length alone: on any machine the same seed gives the same texts. transformers caches
    keys and values of every head, also where a model (MLA) could keep them compressed.
    """
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    if getattr(config, "kv_lora_rank", None):
        values = heads * (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim)
    else:
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        values = 2 * (getattr(config, "num_key_value_heads", None) or heads) * head_dim
    of_a_text = config.num_hidden_layers * values * model.dtype.itemsize * length
    at_once = MOST_TEXTS_AT_ONCE
    while at_once > 1 and at_once * of_a_text > CACHE_BYTES:
        at_once //= 2
    return at_once
