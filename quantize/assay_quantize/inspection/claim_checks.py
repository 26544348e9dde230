"""What vLLM 0.32 does not take, whatever the weights are: methods, numbers of a claim, layouts of experts and activations.

One function for each defect. The rules are those of vLLM's configuration classes (model_executor/layers/quantization) and of
its loader of experts (fused_moe/routed_experts.py).
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from assay.foreign_text import shown
from assay_quantize.checkpoint.declaration import declared_blocks, is_block, weight_arguments
from assay_quantize.inspection.defect import Place
from assay_quantize.inspection.structure_checks import activation_scales
from assay_quantize.inspection.subject import Subject

Claim = Mapping[str, Any]

_DEPRECATED = ("fbgemm_fp8", "fp_quant")
_OWN_LOADERS = frozenset({"llama4"})
"""Families whose class in vLLM reads stacked experts by itself."""
_STACK = re.compile(r".+\.experts\.(?:gate_up_proj|gate_proj|up_proj|down_proj|w13|w2)(?P<behind>.*)")
_BEHIND_STACK = frozenset(
    {"", "_packed", "_scale", "_scale_inv", "_scale_2", "_global_scale", "_zero_point", "_shape", "_g_idx"}
)
"""What may stand behind `experts.gate_up_proj`: with `w13_weight` in front of it, the name of a parameter."""
_STACK_DIMENSIONS = 3
"""[experts, rows, columns]: vLLM takes a tensor with fewer for that of one expert."""


def method_not_served(subject: Subject) -> Iterator[Place]:
    declared = subject.declared
    if declared.is_served:
        return
    if (told := declared.quantization.get("quant_method")) is not None:
        how = "takes only with --allow-deprecated-quantization" if told in _DEPRECATED else "does not have"
        yield Place(declared.where, f"quant_method is {shown(told, 40)}, which vLLM 0.32 {how}")
        return
    forms = Counter(weight.form for weight in subject.stored.weights.values() if weight.is_quantized)
    layout = ", ".join(f"{count:,} weights are stored as {form}" for form, count in forms.most_common(3))
    yield Place(declared.where, f"names no quant_method; {layout or 'no weight is stored in a form that is known here'}")


def claim_refused(subject: Subject) -> Iterator[Place]:
    rule = _REFUSED.get(subject.declared.method or "")
    if rule is not None and subject.declared.is_served:
        for what in rule(subject.declared.quantization):
            yield Place(subject.declared.where, what)


def _gptq(claim: Claim) -> Iterator[str]:
    bits, sym = claim.get("bits"), claim.get("sym")
    if type(bits) is int and type(sym) is bool and (bits, sym) not in ((4, True), (8, True)):
        yield f"has bits {bits} and sym {str(sym).lower()}; vLLM takes symmetric weights of 4 and 8 bits"
    if claim.get("desc_act") and claim.get("group_size") != -1:
        yield "has desc_act true, with groups; vLLM no longer reads columns in the order of their activations"
    if (told := claim.get("checkpoint_format")) not in (None, "gptq", "gptq_v2") or claim.get("is_marlin_format"):
        yield f"has checkpoint_format {shown(told, 30)}; vLLM looks for qweight, qzeros and scales"


def _awq(claim: Claim) -> Iterator[str]:
    bits = claim.get("bits", claim.get("w_bit"))
    if type(bits) is int and bits != 4:
        yield f"has {bits} bits; vLLM takes 4"
    version = str(claim.get("version", "gemm")).lower()
    if version in ("gemv", "gemv_fast", "marlin"):
        yield f"has version {version}; vLLM reads the layout of gemm"


def _autoround(claim: Claim) -> Iterator[str]:
    kind, packing = str(claim.get("data_type", "int")), claim.get("packing_format")
    if kind not in ("int", "fp", "fp8") and "mx_fp" not in kind:
        yield f"has data_type {shown(kind, 30)}; vLLM takes int, fp and mx_fp"
    packings = ("auto_round:auto_gptq", "auto_round:auto_awq")
    if kind == "int" and packing is not None and packing not in packings:
        yield f"has packing_format {shown(packing, 40)}; vLLM takes {' and '.join(packings)}"


def _modelopt(claim: Claim) -> Iterator[str]:
    algorithm = str(claim.get("quant_algo") or "none").upper()
    if algorithm not in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4", "W4A16_NVFP4", "MXFP8", "MIXED_PRECISION"):
        yield f"has quant_algo {shown(algorithm, 40)}, which vLLM's ModelOpt classes do not have"


def _compressed_tensors(claim: Claim) -> Iterator[str]:
    for weights in weight_arguments(claim):
        if (order := weights.get("actorder")) in ("group", "dynamic", True):
            yield f"has actorder {str(order).lower()}; vLLM no longer reads columns in the order of their activations"
    if (sparsity := claim.get("sparsity_config")) and isinstance(sparsity, dict) and sparsity.get("format") != "dense":
        yield f"has a sparsity_config ({shown(sparsity.get('format'), 30)}), which vLLM no longer takes"
    cache = claim.get("kv_cache_scheme")
    if isinstance(cache, dict) and cache and (cache.get("type"), cache.get("num_bits")) != ("float", 8):
        yield f"has a kv_cache_scheme of {shown(cache.get('num_bits'), 10)}-bit {shown(cache.get('type'), 10)}; vLLM takes FP8"
    elif isinstance(cache, dict) and cache and cache.get("symmetric") is False:
        yield "has an asymmetric kv_cache_scheme; vLLM takes symmetric ones"


def _fp8(claim: Claim) -> Iterator[str]:
    scheme, blocks = claim.get("activation_scheme"), declared_blocks(claim)
    if scheme is not None and scheme not in ("static", "dynamic"):
        yield f"has activation_scheme {shown(scheme, 30)}; vLLM takes static and dynamic"
    elif scheme == "static" and blocks:
        yield "has static activations and weight_block_size; vLLM takes blocks with dynamic ones"
    if any(not is_block(block) for block in blocks):
        yield f"has weight_block_size {shown(blocks[0], 40)}; vLLM takes [rows, columns]"


_REFUSED: Mapping[str, Callable[[Claim], Iterator[str]]] = {
    "gptq": _gptq, "awq": _awq, "auto-round": _autoround, "modelopt": _modelopt, "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
}  # fmt: skip
"""Method -> what of its claim vLLM's configuration class refuses."""


def stacked_scales_unread(subject: Subject) -> Iterator[Place]:
    """Experts of a layer in one quantized tensor, with scales whose names or shapes vLLM's loader of experts does not map."""
    if subject.family is None or subject.family in _OWN_LOADERS:
        return
    unread: dict[str, list[str]] = defaultdict(list)
    for module, weight in subject.stored.weights.items():
        for part in weight.parts.values() if weight.is_stacked and weight.is_quantized and not weight.of_expert_0 else ():
            match = _STACK.fullmatch(part.name)
            if match is not None and (match["behind"] not in _BEHIND_STACK or len(part.shape) != _STACK_DIMENSIONS):
                unread[module].append(f"{part.name.rpartition('.')[2]} {list(part.shape)}")
    for module, names in unread.items():
        yield Place(module, f"its experts are one tensor; vLLM has no parameter for {', '.join(sorted(names))}")


def scaled_activation(subject: Subject) -> Iterator[Place]:
    counted: dict[str, list[str]] = defaultdict(list)
    for name in sorted(activation_scales(subject)):
        counted[re.sub(r"\.experts\.\d+\.", ".experts.*.", name)].append(name)
    for names in counted.values():
        more = f" and {len(names) - 1:,} more" if len(names) > 1 else ""
        yield Place(names[0], f"scales what an activation function gives{more}; vLLM's MLPs and experts have no such parameter")
