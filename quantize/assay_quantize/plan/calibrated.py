"""What a calibration decides in a plan: weights that text rounds, and scales that do not change while a checkpoint is served.

Calibrated weights are those that are rounded to integers, in decoder layers. The MTP block is one of these layers only where
the recipe asks (`calibration: {mtp: true}`): transformers does not build it. Everything else is made from the source as in any
other precision.

Static scales, of activations and of the KV cache, come from a calibration file.

All weights that vLLM gives one scale have the same one, of the largest magnitude among them:

- members of a fused parameter (q, k and v; gate and up). vLLM takes the largest `input_scale`, which is right for all, but the
  largest `input_global_scale`, a divisor, which is the narrowest range (`CompressedTensorsW4A4Fp4`);
- all experts of a layer: some of vLLM's kernels know one range for all of them (`prepare_nvfp4_moe_layer_for_fi_or_cutlass`
  takes the largest). So an expert that no token reached has the range of its peers.

The largest magnitude times the recipe's `headroom` is what still fits. The arithmetic is FP32, one operation after the other,
so that the same file gives the same bytes everywhere.

To get the weight of `kv_b_proj` (MLA) back, vLLM sends the identity through the quantized layer, and computes decode steps with
what comes out (`get_and_maybe_dequant_weights`). Its scales are therefore such that 1 is rounded to 1; by others the weight
would be up to 1/16 too large or small there as a whole, or cut off.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from assay.errors import PlanError
from assay.recipes.calibrated.methods import CALIBRATES, SCALED_BY
from assay.recipes.family_names import split_layer
from assay.recipes.precision import PrecisionRecipe
from assay.records.plan import OutputTensor, Plan, TensorPlan
from assay_quantize.checkpoint.importance import INPUT_AMAX, K_AMAX, V_AMAX, Importance
from assay_quantize.formats.schemes import INPUT_AMAX as NVFP4_AMAX
from assay_quantize.formats.schemes import SCHEMES, module_of

if TYPE_CHECKING:
    import numpy as np


def is_calibrated(plan: Plan) -> bool:
    """Whether the precision's weights are calibrated."""
    return bool(plan.precision_recipe.get("calibration", "none") != "none")


def method_of(plan: Plan) -> str | None:
    """None: weights are rounded without text."""
    return str(plan.precision_recipe["calibration"]["method"]) if is_calibrated(plan) else None


def scales_inputs(plan: Plan) -> bool:
    """Whether weights are scaled before they are rounded."""
    return method_of(plan) in SCALED_BY


def calibrated_mtp_layer(plan: Plan) -> int | None:
    """The layer of the MTP block, where it is calibrated. PlanError: it is none that follows the decoder layers."""
    if not is_calibrated(plan) or not plan.precision_recipe["calibration"].get("mtp"):
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
        scaled = {layer: smoothings(method, tensors, scalable(plan, others[layer])) for layer, tensors in rounded.items()}
        if method == "smoothquant" and not any(scaled.values()):
            raise PlanError(
                f"precision {plan.precision}: calibration by smoothquant has nothing to scale in {plan.source}: no norm whose "
                "weight is a factor is read by quantized weights alone; take `calibration: none`"
            )
        for layer, tensors in rounded.items():
            changed = {module for smoothing in scaled[layer] for module in (smoothing.smooth, *smoothing.balance)}
            rounded[layer] = tensors + [t for t in others[layer] if t.module in changed and t.name.endswith(".weight")]
    return dict(sorted(rounded.items()))


def signed_weights(plan: Plan) -> frozenset[str]:
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
        for smoothing in smoothings(str(method_of(plan)), rounded.values(), others):
            balanced = [rounded[name] for name in smoothing.balance if name in rounded]
            odd = next((tensor for tensor in balanced if tensor.scheme != balanced[0].scheme), None)
            if odd is not None:
                raise PlanError(
                    f"precision {plan.precision}: AWQ scales {balanced[0].module} ({balanced[0].scheme}) and {odd.module} "
                    f"({odd.scheme}) together, as both read {smoothing.smooth}: give them one scheme, or say `method: gptq`"
                )


def smoothings(method: str, rounded: Iterable[TensorPlan], others: Sequence[TensorPlan]) -> list[Smoothing]:
    """What is scaled in one layer: norms before attention and before the MLP or the experts, where all that reads them is
    known; by AWQ also each up projection before its down projection.

    The mappings are llm-compressor's (`modifiers/transform/awq/mappings.py`, `.../smoothquant/utils.py`) with the shared
    experts, which read the same norm. Of a layer with an indexer the norm before attention stays: other linears read it. Biases
    of what is divided would change as well: an up projection that has one stays.
    """
    modules = {tensor.module: tensor for tensor in rounded}
    kept = {tensor.module: tensor for tensor in others if tensor.name.endswith(".weight")}
    biased = {tensor.module for tensor in others if tensor.name.endswith(".bias")}
    attention = [m for m in modules if ".self_attn." in m and m.rpartition(".")[2] in frozenset.union(*ATTENTION_INPUTS)]
    is_whole = frozenset(m.rpartition(".")[2] for m in attention) in ATTENTION_INPUTS
    if not is_whole or any(tensor.part == "indexer" for tensor in others):
        attention = []
    # gate and up of a dense MLP; or those of all experts, routed and shared, with the router
    mlp = [m for m in modules if ".mlp." in m and m.endswith((".gate_proj", ".up_proj"))]
    read_too = any(".mlp." in m and not m.endswith((".mlp.gate", ".down_proj")) for m in kept)
    mlp = [] if read_too or not mlp else [*(m for m in kept if m.endswith(".mlp.gate")), *mlp]
    scaled: list[Smoothing] = []
    for norm, inputs in (("input_layernorm", attention), ("post_attention_layernorm", mlp)):
        name = next((module for module in kept if module.endswith(f".{norm}")), None)
        if name is not None and inputs:
            scaled.append(Smoothing(name, tuple(inputs)))
    for module in modules if method != "smoothquant" else ():
        down = module.removesuffix("up_proj") + "down_proj"
        if module.endswith(".up_proj") and down in modules and module not in biased:
            scaled.append(Smoothing(module, (down,)))
    return scaled


FP4_MAX, FP8_MAX = 6.0, 448.0
_ABSORBED = ".kv_b_proj"
"""The module whose weight vLLM reads back through its quantized inputs."""
_ONE_AS_FP8 = (-8, 9)
"""Powers of two by which 1 can be divided and still be an E4M3 number: 2^8 the largest, 2^-9 the smallest."""
_EXPERT = re.compile(r"\bexperts\.\d+\.")


class _Scale(NamedTuple):
    """A scale of the new checkpoint. amax_name: what the calibration file has about it. group: whose scales are equal."""

    output: OutputTensor
    amax_name: str
    group: str


def static_scales(plan: Plan, file: Importance) -> dict[str, float]:
    """Name of a stored scale -> its value, an FP32 number. Raises PlanError: the file has nothing about some of them."""
    import numpy as np

    headroom = np.float32(plan.precision_recipe.get("headroom", 1.0))
    groups: dict[str, list[_Scale]] = defaultdict(list)
    for scale in _scales(plan):
        groups[scale.group].append(scale)
    values: dict[str, float] = {}
    for group, members in groups.items():
        amax = max((file.largest(scale.amax_name) or 0.0 for scale in members), default=0.0)
        names = {scale.output.name for scale in members}
        if amax == 0:
            is_mtp = any(t.role == "mtp" and any(output.name in names for output in t.outputs) for t in plan.tensors)
            raise PlanError(
                f"{file.path}: nothing entered {members[0].amax_name.rpartition('.')[0]} in the calibration, nor what shares "
                f"its scale ({group}); calibrate with more text, or keep it in 16 bits"
                + (" (transformers builds no MTP block: say `mtp: keep`)" if is_mtp else "")
            )
        values |= {name: float(_scale(name, np.float32(amax) * headroom)) for name in sorted(names)}
    return values


def _scale(name: str, amax: np.float32) -> np.float32:
    """E4M3's and NVFP4's scales multiply what is stored; `input_global_scale` divides it (decision 088)."""
    import numpy as np

    if name.endswith(".input_global_scale"):
        divisor = np.float32(NVFP4_AMAX) / amax
        return _keeping_one(divisor) if _is_absorbed(name) else divisor
    step = amax / np.float32(FP8_MAX)
    if not _is_absorbed(name):
        return step
    # the smallest power of two that is not below the step, and by which 1 is an E4M3 number
    fraction, exponent = math.frexp(float(step))
    exponent -= fraction == 0.5
    least, most = _ONE_AS_FP8
    return np.float32(2.0 ** min(max(exponent, least), most))


def _is_absorbed(name: str) -> bool:
    return module_of(name).endswith(_ABSORBED)


def _keeping_one(divisor: np.float32) -> np.float32:
    """The largest `input_global_scale` that is not above `divisor` and leaves 1 as it is.

    6 times a power of two, which is then the scale of a group whose largest number is 1: an E4M3 number.
    """
    import numpy as np

    _, exponent = math.frexp(float(divisor) / FP4_MAX)
    least, most = _ONE_AS_FP8
    return np.float32(FP4_MAX * 2.0 ** min(max(exponent - 1, -most), -least))


def _scales(plan: Plan) -> Iterator[_Scale]:
    calibrated = plan.precision_recipe.get("activations", "constant") == "calibrated"
    for tensor in plan.tensors:
        for output in tensor.outputs:
            leaf = output.name.rpartition(".")[2]
            if leaf == "input_scale" or (leaf == "input_global_scale" and calibrated):
                group = _EXPERT.sub("experts.*.", tensor.fused_group or tensor.module)
                yield _Scale(output, f"{tensor.module}.{INPUT_AMAX}", group)
            elif tensor.action == "add":
                amax_leaf = K_AMAX if leaf == "k_scale" else V_AMAX
                yield _Scale(output, f"{tensor.module}.{amax_leaf}", output.name)


def constant_scale(tensor: TensorPlan, name: str) -> float | None:
    """The scale of activations that scheme and recipe give without data; None: `name` is none."""
    import numpy as np

    if tensor.scheme is None or not name.endswith(".input_global_scale"):
        return None
    constant = SCHEMES[tensor.scheme].input_global_scale
    return float(_keeping_one(np.float32(constant))) if constant is not None and _is_absorbed(name) else constant


def needs_calibration(plan: Plan) -> bool:
    """Whether some of the plan's scales come from a calibration file."""
    return PrecisionRecipe.model_validate(plan.precision_recipe).needs_calibration


def missing_calibration(plan: Plan) -> str:
    """The error where no file was given."""
    return (
        f"precision {plan.precision}: its scales of activations or of the KV cache come from a calibration file, and none was "
        "given; make one with `assay calibrate TARGET --out FILE`, then say --importance FILE"
    )
