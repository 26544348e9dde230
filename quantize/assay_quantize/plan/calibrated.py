"""Which tensors of a plan a calibration changes: weights that are rounded to integers, in decoder layers.

The MTP block is one of these layers only where the recipe asks (`calibration: {mtp: true}`): transformers does not build it.
What is not named here is made from the source as in any other precision.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from assay.errors import PlanError
from assay.recipes.calibrated.methods import CALIBRATES, SCALED_BY
from assay.recipes.families import split_layer
from assay.records.plan import Plan, TensorPlan


def is_asked(plan: Plan) -> bool:
    """Whether the precision's weights are calibrated."""
    return bool(plan.precision_recipe.get("calibration", "none") != "none")


def method_of(plan: Plan) -> str | None:
    """None: weights are rounded without text."""
    return str(plan.precision_recipe["calibration"]["method"]) if is_asked(plan) else None


def scales_inputs(plan: Plan) -> bool:
    """Whether weights are scaled before they are rounded."""
    return method_of(plan) in SCALED_BY


def calibrated_mtp_layer(plan: Plan) -> int | None:
    """The layer of the MTP block, where it is calibrated. PlanError: it is none that follows the decoder layers."""
    if not is_asked(plan) or not plan.precision_recipe["calibration"].get("mtp"):
        return None
    block = [tensor for tensor in plan.tensors if tensor.role == "mtp"]
    if block and len(plan.mtp_layers) != 1:
        raise PlanError(
            f"precision {plan.precision}: calibration.mtp is for an MTP block of one layer behind the decoder layers, as "
            f"GLM-4.5 and DeepSeek-V3 have it; {plan.source} has {len(plan.mtp_layers)} such layers: leave it out"
        )
    return plan.mtp_layers[0] if block else None


class Smoothing(NamedTuple):
    """By the names of modules: what is divided, and the linears that read its output, which are multiplied in turn."""

    smooth: str
    balance: tuple[str, ...]


ATTENTION_INPUTS = (frozenset({"q_proj", "k_proj", "v_proj"}), frozenset({"q_a_proj", "kv_a_proj_with_mqa"}))
"""Linears that read the norm before attention, where they are all that do."""


OFFSET_NORMS = frozenset({"qwen3_next", "qwen3_5_moe", "step3p5"})
"""Families whose norms multiply by 1 + weight (`GemmaRMSNorm` in vLLM): the weight divided is not what comes out divided."""


def scalable(plan: Plan, tensors: Iterable[TensorPlan]) -> list[TensorPlan]:
    """`tensors` without norms that cannot be scaled."""
    return [tensor for tensor in tensors if plan.family not in OFFSET_NORMS or tensor.role != "norm"]


def calibrated_tensors(plan: Plan) -> dict[int, list[TensorPlan]]:
    """Layer -> its tensors that a calibration makes, layers in order: weights that are rounded, what is scaled besides.

    PlanError: the method does nothing but scale, and nothing can be scaled.
    """
    rounded: defaultdict[int, list[TensorPlan]] = defaultdict(list)
    others: defaultdict[int, list[TensorPlan]] = defaultdict(list)
    method, mtp = method_of(plan), calibrated_mtp_layer(plan)
    if method is None:
        return {}
    for tensor in plan.tensors:
        at = split_layer(tensor.name)
        if at is not None and (tensor.role != "mtp" or at.layer == mtp):
            is_rounded = tensor.action == "quantize" and tensor.scheme in CALIBRATES[method]
            (rounded if is_rounded else others)[at.layer].append(tensor)
    if method in SCALED_BY:
        found = {layer: smoothings(method, tensors, scalable(plan, others[layer])) for layer, tensors in rounded.items()}
        if method == "smoothquant" and not any(found.values()):
            raise PlanError(
                f"precision {plan.precision}: calibration by smoothquant has nothing to scale in {plan.source}: no norm whose "
                "weight is a factor is read by quantized weights alone; take `calibration: none`"
            )
        for layer, tensors in rounded.items():
            changed = {module for one in found[layer] for module in (one.smooth, *one.balance)}
            rounded[layer] = tensors + [t for t in others[layer] if t.module in changed and t.name.endswith(".weight")]
    return dict(sorted(rounded.items()))


def with_signed_scales(plan: Plan) -> frozenset[str]:
    """Weights whose scales may be negative: AutoRound uses all sixteen codes, -8 for the largest weight of a group, and turns
    the group round where that one is positive (auto-round 0.15, `data_type/int.py`, `quant_tensor_sym`)."""
    if method_of(plan) != "autoround":
        return frozenset()
    return frozenset(tensor.name for tensors in calibrated_tensors(plan).values() for tensor in tensors)


def check_scaled(plan: Plan) -> None:
    """PlanError: AWQ is to find one scale for weights of different schemes.

    llm-compressor's search rounds all weights that read one norm as the last of them is rounded (0.14,
    `AWQModifier._compute_best_scale`): that ends in an error, or with scales that were found for another scheme.
    """
    if SCALED_BY.get(str(method_of(plan))) != "AWQ":
        return
    for tensors in calibrated_tensors(plan).values():
        rounded = {tensor.module: tensor for tensor in tensors if tensor.action == "quantize"}
        others = [tensor for tensor in tensors if tensor.action != "quantize"]
        for one in smoothings(str(method_of(plan)), rounded.values(), others):
            balanced = [rounded[name] for name in one.balance if name in rounded]
            odd = next((tensor for tensor in balanced if tensor.scheme != balanced[0].scheme), None)
            if odd is not None:
                raise PlanError(
                    f"precision {plan.precision}: AWQ scales {balanced[0].module} ({balanced[0].scheme}) and {odd.module} "
                    f"({odd.scheme}) together, as both read {one.smooth}: give them one scheme, or say `method: gptq`"
                )


def smoothings(method: str, rounded: Iterable[TensorPlan], others: Sequence[TensorPlan]) -> list[Smoothing]:
    """What is scaled in one layer: norms before attention and before the MLP or the experts, where all that reads them is
    known; by AWQ each up projection before its down projection, too.

    The mappings are llm-compressor's (`modifiers/transform/awq/mappings.py`, `.../smoothquant/utils.py`) with the shared
    experts, which read the same norm. Of a layer with an indexer the norm before attention stays: other linears read it. Biases
    of what is divided would change as well: an up projection that has one stays.
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
    for module in modules if method != "smoothquant" else ():
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
