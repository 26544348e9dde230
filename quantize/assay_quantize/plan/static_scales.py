"""Scales that do not change while a checkpoint is served: of activations, and of the KV cache; from a calibration file.

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
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from assay.errors import PlanError
from assay.recipes.precision import PrecisionRecipe
from assay.records.plan import OutputTensor, Plan, TensorPlan
from assay_quantize.checkpoint.importance import INPUT_AMAX, K_AMAX, V_AMAX, Importance
from assay_quantize.formats.schemes import INPUT_AMAX as NVFP4_AMAX
from assay_quantize.formats.schemes import SCHEMES, module_of

FP4_MAX, FP8_MAX = 6.0, 448.0
_ABSORBED = ".kv_b_proj"
"""The module whose weight vLLM reads back through its quantized inputs."""
_ONE_AS_FP8 = (-8, 9)
"""Powers of two by which 1 can be divided and still be an E4M3 number: 2^8 the largest, 2^-9 the smallest."""
_EXPERT = re.compile(r"\bexperts\.\d+\.")


class _Wanted(NamedTuple):
    """A scale of the new checkpoint. seen: what the calibration file has about it. group: whose scales are equal."""

    output: OutputTensor
    seen: str
    group: str


def static_scales(plan: Plan, file: Importance) -> dict[str, float]:
    """Name of a stored scale -> its value, an FP32 number. Raises PlanError: the file has nothing about some of them."""
    headroom = np.float32(plan.precision_recipe.get("headroom", 1.0))
    groups: dict[str, list[_Wanted]] = defaultdict(list)
    for one in _wanted(plan):
        groups[one.group].append(one)
    found: dict[str, float] = {}
    for group, members in groups.items():
        amax = max((file.largest(one.seen) or 0.0 for one in members), default=0.0)
        if amax == 0:
            raise PlanError(
                f"{file.path}: nothing entered {members[0].seen.rpartition('.')[0]} in the calibration, nor what shares its "
                f"scale ({group}); calibrate with more text, or keep it in 16 bits"
                + (_MTP if "mtp" in _roles(plan, members) else "")
            )
        for one in members:
            found[one.output.name] = float(_scale(one.output.name, np.float32(amax) * headroom))
    return found


_MTP = " (transformers builds no MTP block: say `mtp: keep`)"


def _roles(plan: Plan, members: list[_Wanted]) -> set[str]:
    names = {one.output.name for one in members}
    return {tensor.role for tensor in plan.tensors if any(output.name in names for output in tensor.outputs)}


def _scale(name: str, amax: np.float32) -> np.float32:
    """E4M3's and NVFP4's scales multiply what is stored; `input_global_scale` divides it (decision 088)."""
    if name.endswith(".input_global_scale"):
        divisor = np.float32(NVFP4_AMAX) / amax
        return _keeping_one(divisor) if _is_absorbed(name) else divisor
    step = amax / np.float32(FP8_MAX)
    return _power_above(step) if _is_absorbed(name) else step


def _is_absorbed(name: str) -> bool:
    return module_of(name).endswith(_ABSORBED)


def _power_above(step: np.float32) -> np.float32:
    """The smallest power of two that is not below `step`, and by which 1 is an E4M3 number."""
    fraction, exponent = math.frexp(float(step))
    exponent -= fraction == 0.5
    least, most = _ONE_AS_FP8
    return np.float32(2.0 ** min(max(exponent, least), most))


def _keeping_one(divisor: np.float32) -> np.float32:
    """The largest `input_global_scale` that is not above `divisor` and leaves 1 as it is.

    6 times a power of two, which is then the scale of a group whose largest number is 1: an E4M3 number.
    """
    _, exponent = math.frexp(float(divisor) / FP4_MAX)
    least, most = _ONE_AS_FP8
    return np.float32(FP4_MAX * 2.0 ** min(max(exponent - 1, -most), -least))


def _wanted(plan: Plan) -> Iterator[_Wanted]:
    calibrated = plan.precision_recipe.get("activations", "constant") == "calibrated"
    for tensor in plan.tensors:
        for output in tensor.outputs:
            leaf = output.name.rpartition(".")[2]
            if leaf == "input_scale" or (leaf == "input_global_scale" and calibrated):
                together = tensor.fused_group or tensor.module
                yield _Wanted(output, f"{tensor.module}.{INPUT_AMAX}", _EXPERT.sub("experts.*.", together))
            elif tensor.action == "add":
                seen = K_AMAX if leaf == "k_scale" else V_AMAX
                yield _Wanted(output, f"{tensor.module}.{seen}", output.name)


def constant_scale(tensor: TensorPlan, name: str) -> float | None:
    """The scale of activations that scheme and recipe give without data; None: `name` is none."""
    if tensor.scheme is None or not name.endswith(".input_global_scale"):
        return None
    constant = SCHEMES[tensor.scheme].input_global_scale
    return float(_keeping_one(np.float32(constant))) if constant is not None and _is_absorbed(name) else constant


def needs_calibration(plan: Plan) -> bool:
    """Whether some of the plan's scales come from a calibration file."""
    return PrecisionRecipe.model_validate(plan.precision_recipe).needs_calibration


def without_calibration(plan: Plan) -> str:
    """What is said where no file was given."""
    return (
        f"precision {plan.precision}: its scales of activations or of the KV cache come from a calibration file, and none was "
        "given; make one with `assay calibrate TARGET --out FILE`, then say --importance FILE"
    )
