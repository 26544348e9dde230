"""Which tensors of a plan a calibration changes: weights that are rounded to integers, in decoder layers.

The MTP block is none of these layers: transformers does not build it, so no text goes through it. What is not named here
is made from the source as in any other precision.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from assay.recipes.families import split_layer
from assay.records.plan import Plan, TensorPlan
from assay_quantize.formats.schemes import SCHEMES


def is_asked(plan: Plan) -> bool:
    """Whether the precision's weights are calibrated."""
    return bool(plan.precision_recipe.get("calibration", "none") != "none")


def is_calibrated(plan: Plan, tensor: TensorPlan) -> bool:
    """Whether a calibration, and not the weight alone, says what the tensor becomes."""
    return (
        is_asked(plan)
        and tensor.action == "quantize"
        and tensor.role != "mtp"
        and tensor.scheme is not None
        and SCHEMES[tensor.scheme].layout == "int4"
        and split_layer(tensor.name) is not None
    )


class Smoothing(NamedTuple):
    """By the names of modules: what AWQ divides, and the linears that read its output, which are multiplied in turn."""

    smooth: str
    balance: tuple[str, ...]


ATTENTION_INPUTS = (frozenset({"q_proj", "k_proj", "v_proj"}), frozenset({"q_a_proj", "kv_a_proj_with_mqa"}))
"""Linears that read the norm before attention, where they are all that do."""


def calibrated_tensors(plan: Plan) -> dict[int, list[TensorPlan]]:
    """Layer -> its tensors that a calibration makes, layers in order: weights that are rounded, what AWQ changes besides."""
    rounded: defaultdict[int, list[TensorPlan]] = defaultdict(list)
    others: defaultdict[int, list[TensorPlan]] = defaultdict(list)
    for tensor in plan.tensors:
        at = split_layer(tensor.name)
        if at is not None and tensor.role != "mtp":
            (rounded if is_calibrated(plan, tensor) else others)[at.layer].append(tensor)
    if is_asked(plan) and plan.precision_recipe["calibration"]["method"] == "awq":
        for layer, tensors in rounded.items():
            changed = {m for one in smoothings(tensors, others[layer]) for m in (one.smooth, *one.balance)}
            rounded[layer] = tensors + [t for t in others[layer] if t.module in changed and t.name.endswith(".weight")]
    return dict(sorted(rounded.items()))


def smoothings(rounded: Iterable[TensorPlan], others: Sequence[TensorPlan]) -> list[Smoothing]:
    """What AWQ scales in one layer: norms before attention and before the MLP or the experts, where all that reads them is
    known, and each up projection before its down projection.

    The mappings are llm-compressor's (`modifiers/transform/awq/mappings.py`) with the shared experts, which read the same norm.
    Of a layer with an indexer the norm before attention stays: other linears read it. Biases of what is divided would change as
    well: an up projection that has one stays.
    """
    modules = {tensor.module: tensor for tensor in rounded}
    kept = {tensor.module: tensor for tensor in others if tensor.name.endswith(".weight")}
    biased = {tensor.module for tensor in others if tensor.name.endswith(".bias")}
    found: list[Smoothing] = []
    for norm, inputs in (
        ("input_layernorm", _of_attention(modules, others)),
        ("post_attention_layernorm", _of_mlp(modules, kept)),
    ):
        name = next((module for module in kept if module.endswith(f".{norm}")), None)
        if name is not None and inputs:
            found.append(Smoothing(name, inputs))
    for module in modules:
        down = module.removesuffix("up_proj") + "down_proj"
        if module.endswith(".up_proj") and down in modules and module not in biased:
            found.append(Smoothing(module, (down,)))
    return found


def _of_attention(modules: Iterable[str], others: Sequence[TensorPlan]) -> tuple[str, ...]:
    inputs = [m for m in modules if ".self_attn." in m and m.rpartition(".")[2] in frozenset.union(*ATTENTION_INPUTS)]
    is_whole = frozenset(m.rpartition(".")[2] for m in inputs) in ATTENTION_INPUTS
    return tuple(inputs) if is_whole and not any(t.part == "indexer" for t in others) else ()


def _of_mlp(modules: Iterable[str], kept: Iterable[str]) -> tuple[str, ...]:
    """gate and up of a dense MLP; or those of all experts, routed and shared, with the router."""
    inputs = [m for m in modules if ".mlp." in m and m.endswith((".gate_proj", ".up_proj"))]
    router = [m for m in kept if m.endswith(".mlp.gate")]
    read_too = [m for m in kept if ".mlp." in m and not m.endswith((".mlp.gate", ".down_proj"))]
    return () if read_too or not inputs else (*router, *inputs)
