"""NVIDIA ModelOpt's exports (nvidia/*-NVFP4, *-FP8): one algorithm, or one for each of `quantized_layers`.

    NVFP4, W4A16_NVFP4          weight U8 [O, I/2], weight_scale F8_E4M3 [O, I/16], weight_scale_2 F32 [], input_scale F32 []
    FP8                         weight F8_E4M3 [O, I], weight_scale F32 [], input_scale F32 []
    FP8_PER_CHANNEL_PER_TOKEN   weight F8_E4M3 [O, I], weight_scale F32 [O]
    FP8_PB_WO                   weight F8_E4M3 [O, I], weight_scale F32 [O/128, I/128] or [O/128, 1, I/128, 1]
    MXFP8                       weight F8_E4M3 [O, I], weight_scale U8 [O, I/32]

Declared in config.json (`quant_method: modelopt`) or in hf_quant_config.json (`quantization`); of both, vLLM reads config.json.
`weight_scale_2` and `input_scale` multiply. Scales of the KV cache lie in `k_proj.k_scale` and `v_proj.v_scale`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from assay.errors import CheckpointError
from assay_quantize.decoding.parts import EXPONENTS, FLOATS, needed, of_shape, scale_part, whole
from assay_quantize.decoding.stored_weight import (
    ActivationRule,
    Declared,
    KvRule,
    Layout,
    Method,
    Module,
    NotRead,
    Part,
    StoredWeight,
)

KV_NUMBERS = {"FP8": "fp8_e4m3", "NVFP4": "fp4_e2m1", "NVFP4_AFFINE": "fp4_e2m1", "INT8": "int8"}


class Algorithm(NamedTuple):
    """codes: dtype of the weight. block: (rows, columns) that share a scale; None: FP4 with groups of 16."""

    codes: str
    activations: ActivationRule
    block: tuple[int, int] | None


ALGORITHMS = {
    "NVFP4": Algorithm("U8", ActivationRule("dynamic", "fp4_e2m1", "group", 16, "input_scale"), None),
    "W4A16_NVFP4": Algorithm("U8", ActivationRule(), None),
    "FP8": Algorithm("F8_E4M3", ActivationRule("static", "fp8_e4m3", "tensor", scale="input_scale"), (128, 128)),
    "FP8_PER_CHANNEL_PER_TOKEN": Algorithm("F8_E4M3", ActivationRule("dynamic", "fp8_e4m3", "token"), (128, 128)),
    "FP8_PB_WO": Algorithm("F8_E4M3", ActivationRule("dynamic", "fp8_e4m3", "group", 128), (128, 128)),
    "FP8_BLOCK_SCALES": Algorithm("F8_E4M3", ActivationRule("dynamic", "fp8_e4m3", "group", 128), (128, 128)),
    "MXFP8": Algorithm("F8_E4M3", ActivationRule("dynamic", "fp8_e4m3", "group", 32), (1, 32)),
}
"""`quant_algo` -> what it stores. What is not here is refused by its name: INT4 AWQ, W4A8, INT8, MXFP4."""
MIXED = "MIXED_PRECISION"


def method(location: str, declared: Declared) -> Method:
    """declared: of config.json or hf_quant_config.json. Raises CheckpointError for an algorithm that is not read."""
    stated: Any = declared.get("quantization", declared)
    if not isinstance(stated, dict):
        raise CheckpointError(f"{location}: hf_quant_config.json: quantization must be an object")
    name = str(stated.get("quant_algo") or "").upper()
    layers = _algorithms_of_layers(location, stated) if name == MIXED else {}
    if name != MIXED:
        _known(location, name)
    weightless = name == "NVFP4" and _quantizes_weights_alone(stated)

    def weight(module: str, tensors: Module) -> StoredWeight:
        algorithm = _of_layer(layers, module) if name == MIXED else name
        if algorithm is None:
            raise NotRead("is quantized, and is not among quantized_layers")
        return _stored_weight(module, tensors, "W4A16_NVFP4" if weightless else algorithm, stated)

    what = f"ModelOpt {name}" if name != MIXED else f"ModelOpt {', '.join(sorted(set(layers.values())))}"
    return Method(weight, _kv_rule(stated), what)


def _known(location: str, name: str) -> str:
    if name not in ALGORITHMS:
        raise CheckpointError(
            f"{location}: ModelOpt's quant_algo {name or 'is missing'}: {', '.join([*ALGORITHMS, MIXED])} are read"
        )
    return name


def _algorithms_of_layers(location: str, stated: Declared) -> dict[str, str]:
    layers = stated.get("quantized_layers")
    if not isinstance(layers, dict) or not layers or not all(isinstance(layer, dict) for layer in layers.values()):
        raise CheckpointError(f"{location}: ModelOpt's {MIXED} needs quantized_layers; complete the download")
    return {str(name): _known(location, str(layer.get("quant_algo") or "").upper()) for name, layer in layers.items()}


def _of_layer(layers: Mapping[str, str], module: str) -> str | None:
    """The algorithm of a module, or of the nearest module around it: all experts of a layer may be one entry."""
    while module:
        if module in layers:
            return layers[module]
        module = module.rpartition(".")[0]
    return None


def _quantizes_weights_alone(stated: Declared) -> bool:
    """vLLM's rule (`ModelOptNvFp4Config._from_config`): NVFP4 whose groups all have no input_activations is W4A16."""
    groups = stated.get("config_groups")
    return (
        isinstance(groups, dict)
        and bool(groups)
        and all(isinstance(group, dict) and group.get("input_activations") is None for group in groups.values())
    )


def _kv_rule(stated: Declared) -> KvRule:
    scheme, algorithm = stated.get("kv_cache_scheme"), stated.get("kv_cache_quant_algo")
    if isinstance(scheme, dict) and (scheme.get("type"), scheme.get("num_bits")) == ("float", 8):
        algorithm = "FP8"
    if algorithm is None:
        return KvRule()
    number = KV_NUMBERS.get(str(algorithm).upper(), str(algorithm).lower())
    return KvRule(number, "tensor" if number != "fp4_e2m1" else "group")


def _stored_weight(module: str, tensors: Module, name: str, stated: Declared) -> StoredWeight:
    algorithm = ALGORITHMS[name]
    codes = needed(tensors, "weight", (algorithm.codes,), 2)
    layout: Layout = "scaled"
    scale_leaf = next((leaf for leaf in ("weight_scale", "weight_scale_inv") if leaf in tensors), "weight_scale")
    if algorithm.block is None:
        shape, group = (codes.shape[0], 2 * codes.shape[1]), stated.get("group_size") or 16
        if type(group) is not int or group < 1 or shape[1] % group:
            raise NotRead(f"has {shape[1]} columns, which groups of {group} do not divide")
        scale = of_shape(needed(tensors, "weight_scale", ("F8_E4M3",)), (shape[0], shape[1] // group))
        shares, layout = (1, group), "nvfp4"
    elif name == "MXFP8":
        shape = (codes.shape[0], codes.shape[1])
        scale = of_shape(needed(tensors, scale_leaf, EXPONENTS), (shape[0], math.ceil(shape[1] / 32)))
        shares = algorithm.block
    else:
        shape = (codes.shape[0], codes.shape[1])
        scale, shares = scale_part(needed(tensors, scale_leaf, FLOATS), shape, algorithm.block)
    parts = {"weight": Part(codes), "weight_scale": scale}
    if layout == "nvfp4":
        parts["weight_scale_2"] = whole(needed(tensors, "weight_scale_2", ("F32",)))
    beside = {leaf: tensors[leaf] for leaf in ("input_scale",) if leaf in tensors}
    number = "fp4_e2m1" if algorithm.block is None else "fp8_e4m3"
    return StoredWeight(
        f"{module}.weight", f"ModelOpt {name}", number, shape, layout, parts, {}, shares, True, algorithm.activations, beside
    )
