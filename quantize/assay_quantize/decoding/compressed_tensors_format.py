"""compressed-tensors (llm-compressor, AutoRound's `llm_compressor` export, Red Hat's releases): config groups, one scheme each.

    pack-quantized        weight_packed I32 [O, ceil(I * bits / 32)], weight_scale [O, G], weight_shape [2];
                          asymmetric: weight_zero_point I32 [ceil(O * bits / 32), G];
                          with actorder, before version 0.18: weight_g_idx [I]
    int-, float-, naive-  weight I8 or F8_E4M3 [O, I], weight_scale per tensor, row, group or block; asymmetric:
    quantized             weight_zero_point I8 in the shape of the scales
    mxfp8-quantized       weight F8_E4M3 [O, I], weight_scale U8 [O, I/32]
    nvfp4-pack-quantized  weight_packed U8 [O, I/2], weight_scale F8_E4M3 [O, I/16], weight_global_scale F32 [1], which divides
    mxfp4-pack-quantized  weight_packed U8 [O, I/2], weight_scale U8 [O, I/32]

The group of a module is the first that targets it (vLLM's rule: by name, then by class) among those whose codes it has: the
list `ignore` is not asked.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, NamedTuple

from assay.errors import CheckpointError
from assay.foreign_text import shown
from assay.quantities import and_more
from assay_quantize.decoding.parts import EXPONENTS, FLOATS, FP8, needed, of_shape, scale_part, whole
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

PACKED, NVFP4, MXFP4, MXFP8 = "pack-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"
PLAIN_CODES = ("int-quantized", "float-quantized", "naive-quantized")
FORMATS = (PACKED, *PLAIN_CODES, NVFP4, MXFP4, MXFP8)
REFUSED_KEYS = {
    "sparsity_config": "weights stored without their zeros (sparse-24-bitmask, marlin-24) are not read",
    "transform_config": "weights stored rotated (SpinQuant, QuIP), to be rotated back while serving, are not read",
}
CLASSES = ("Linear", "Embedding", "ParallelLMHead", "VocabParallelEmbedding")
"""Targets that are names of classes."""


class Numbers(NamedTuple):
    """What a config group says of weights."""

    kind: str
    num_bits: int
    symmetric: bool
    strategy: str
    group_size: int | None
    block: tuple[int, int] | None
    actorder: bool


class Group(NamedTuple):
    """name: in config.json. format: one of FORMATS. targets: as declared: names of modules, patterns after `re:`, classes."""

    name: str
    targets: tuple[str, ...]
    names: frozenset[str]
    patterns: tuple[re.Pattern[str], ...]
    has_class: bool
    format: str
    weights: Numbers
    activations: ActivationRule


def method(location: str, declared: Declared) -> Method:
    """Raises CheckpointError: what is declared is malformed, or of a kind that is not read."""
    for key, reason in REFUSED_KEYS.items():
        if declared.get(key):
            raise CheckpointError(f"{location}: config.json: {key}: {reason}")
    groups = _groups(location, declared)
    kv = declared.get("kv_cache_scheme")

    def weight(module: str, tensors: Module) -> StoredWeight:
        return _stored_weight(module, tensors, groups)

    what = ", ".join(sorted({group.format for group in groups}))
    return Method(weight, _kv_rule(location, kv), f"compressed-tensors ({what})")


# ------------------------------------------------------------------------------------------------ config.json
def _groups(location: str, declared: Declared) -> list[Group]:
    stored = declared.get("config_groups")
    if not isinstance(stored, dict):
        raise CheckpointError(f"{location}: config.json: compressed-tensors without config_groups; complete the download")
    made = []
    for name, group in stored.items():
        where = f"{location}: config.json: config group {name}"
        if not isinstance(group, dict):
            raise CheckpointError(f"{where}: must be an object")
        weights, targets = group.get("weights"), group.get("targets")
        if weights is None:
            continue  # of the KV cache or of activations alone
        if not isinstance(weights, dict) or not isinstance(targets, list):
            raise CheckpointError(f"{where}: needs weights and a list of targets")
        numbers = _numbers(where, weights)
        format_ = group.get("format") or declared.get("format")
        if format_ not in FORMATS:
            format_ = _inferred_format(numbers, group)
        rule = activation_rule(where, group.get("input_activations"))
        told = tuple(map(str, targets))
        patterns = tuple(_pattern(where, target) for target in told if target.startswith("re:"))
        made.append(Group(str(name), told, frozenset(told), patterns, any(t in CLASSES for t in told), format_, numbers, rule))
    return made


def _pattern(where: str, target: str) -> re.Pattern[str]:
    try:
        return re.compile(target[3:])
    except re.error as error:
        raise CheckpointError(f"{where}: {shown(target)} is no pattern: {error}") from None


def _numbers(where: str, weights: Mapping[str, Any]) -> Numbers:
    kind, num_bits, group_size = weights.get("type", "int"), weights.get("num_bits", 8), weights.get("group_size")
    block = weights.get("block_structure")
    if isinstance(block, str):  # `128x128` of early versions
        block = [int(part) if part.isdigit() else None for part in block.split("x")]
    if block is not None and (len(block) != 2 or not all(type(n) is int and n > 0 for n in block)):
        raise CheckpointError(f"{where}: block_structure must be [rows, columns]")
    if (kind, num_bits) not in {("float", 4), ("float", 8), *(("int", bits) for bits in range(1, 9))}:
        raise CheckpointError(f"{where}: weights of type {kind} with {num_bits} bits are not read")
    if group_size is not None and type(group_size) is not int:
        raise CheckpointError(f"{where}: group_size must be a number of columns")
    strategy = weights.get("strategy") or ("tensor" if not group_size else "channel" if group_size == -1 else "group")
    return Numbers(
        kind,
        num_bits,
        weights.get("symmetric", True) is not False,
        str(strategy),
        group_size if group_size and group_size > 0 else None,
        None if block is None else (block[0], block[1]),
        bool(weights.get("actorder")),
    )


def _inferred_format(numbers: Numbers, group: Mapping[str, Any]) -> str:
    """As `compressed_tensors.compressors.format.infer_module_format`, for groups that name none."""
    if numbers.kind == "float" and numbers.num_bits == 4:
        return MXFP4 if numbers.group_size == 32 else NVFP4
    if numbers.kind == "float":
        return MXFP8 if numbers.group_size == 32 else "float-quantized"
    return PACKED if group.get("input_activations") is None else "int-quantized"


_FLOAT_NUMBERS = {8: "fp8_e4m3", 4: "fp4_e2m1"}
_GRANULARITY = {"tensor_group": "group"}


def number_name(kind: object, num_bits: object) -> str:
    """`int4`, `fp8_e4m3`."""
    return (
        _FLOAT_NUMBERS.get(num_bits, f"fp{num_bits}") if kind == "float" and isinstance(num_bits, int) else f"{kind}{num_bits}"
    )


def activation_rule(where: str, declared: Any) -> ActivationRule:
    """What `input_activations` of a config group says. CheckpointError: it is no object; `where` names the place."""
    if declared is None:
        return ActivationRule()
    if not isinstance(declared, dict):
        raise CheckpointError(f"{where}: input_activations must be an object")
    strategy = str(declared.get("strategy") or ("token" if declared.get("dynamic") else "tensor"))
    rule = ActivationRule(
        "dynamic" if declared.get("dynamic") else "static",
        number_name(declared.get("type", "int"), declared.get("num_bits", 8)),
        _GRANULARITY.get(strategy, strategy),
        declared.get("group_size"),
        symmetric=declared.get("symmetric", True) is not False,
    )
    if strategy == "tensor_group":
        return rule._replace(scale="input_global_scale", scale_divides=True)
    return rule._replace(scale="input_scale") if rule.kind == "static" else rule


def _kv_rule(location: str, declared: Any) -> KvRule:
    if declared is None:
        return KvRule()
    if not isinstance(declared, dict):
        raise CheckpointError(f"{location}: config.json: kv_cache_scheme must be an object")
    number = number_name(declared.get("type", "int"), declared.get("num_bits", 8))
    strategy = str(declared.get("strategy") or "tensor")
    return KvRule(number, _GRANULARITY.get(strategy, strategy), bool(declared.get("dynamic")))


# ------------------------------------------------------------------------------------------------ a module
def _stored_weight(module: str, tensors: Module, groups: list[Group]) -> StoredWeight:
    """By the first group that targets the module by name, else by class, else the only one; among groups whose codes it has."""
    if not ("weight_packed" in tensors or "weight" in tensors):
        raise NotRead("has scales, but neither weight nor weight_packed")
    fitting = [group for group in groups if _has_codes_of(group, tensors)]
    if not fitting:
        codes = tensors.get("weight_packed") or tensors["weight"]
        formats = ", ".join(f"{group.name} ({group.format})" for group in groups) or "none"
        raise NotRead(f"has {codes.name.rpartition('.')[2]} of dtype {codes.dtype}, which no config group describes: {formats}")
    by_name = (g for g in fitting if module in g.names or any(pattern.match(module) for pattern in g.patterns))
    by_class = (g for g in fitting if g.has_class)
    group = next(by_name, None) or next(by_class, None)
    if group is None and len({(g.format, g.weights, g.activations) for g in fitting}) == 1:
        group = fitting[0]  # targets under other names, a wrapper's prefix: there is nothing else that it could be
    if group is None:
        targets = [target for group in fitting for target in group.targets]
        raise NotRead(f"is quantized, but no target of config.json matches it: {and_more(targets)}")
    return READERS[group.format](module, tensors, group)


def _has_codes_of(group: Group, tensors: Module) -> bool:
    dtype = tensors["weight_packed"].dtype if "weight_packed" in tensors else None
    if group.format == PACKED:
        return dtype == "I32"
    if group.format in (NVFP4, MXFP4):
        return dtype == "U8" and ("weight_global_scale" in tensors) == (group.format == NVFP4)
    plain = tensors.get("weight")
    return dtype is None and plain is not None and plain.dtype in (("I8",) if group.weights.kind == "int" else tuple(FP8))


def _made(
    module: str,
    tensors: Module,
    group: Group,
    shape: tuple[int, int],
    parts: Mapping[str, Part],
    shares: tuple[int, int],
    layout: Layout = "compressed_tensors",
) -> StoredWeight:
    taken = {leaf: header for leaf, header in tensors.items() if leaf in INPUT_LEAVES}
    return StoredWeight(
        f"{module}.weight",
        f"compressed-tensors {group.format}",
        number_name(group.weights.kind, group.weights.num_bits),
        shape,
        layout,
        parts,
        {"format": group.format, "numbers": group.weights},
        shares,
        group.weights.symmetric,
        group.activations,
        taken,
    )


INPUT_LEAVES = ("input_scale", "input_zero_point", "input_global_scale")


def _zero_points(header: Any, scale: Part) -> Part:
    """Zero points in the shape of the scales, whatever rows share one."""
    if math.prod(header.shape) != math.prod(scale.header.shape):
        raise NotRead(f"has weight_zero_point of shape {list(header.shape)}, scales of shape {list(scale.header.shape)}")
    return Part(header._replace(shape=scale.header.shape), scale.axis, scale.per_row)


def _packed(module: str, tensors: Module, group: Group) -> StoredWeight:
    numbers = group.weights
    codes = needed(tensors, "weight_packed", ("I32",), 2)
    scale = needed(tensors, "weight_scale", FLOATS)
    rows, bits = codes.shape[0], numbers.num_bits
    groups = scale.shape[1] if len(scale.shape) == 2 else 1
    columns = codes.shape[1] * 32 // bits
    if numbers.group_size is not None and groups > 1:
        columns = groups * numbers.group_size
    if codes.shape[1] != math.ceil(columns * bits / 32):
        raise NotRead(
            f"has weight_packed of shape {list(codes.shape)} and weight_scale of shape {list(scale.shape)}; with {bits} bits "
            f"and a group_size of {numbers.group_size} they belong to weights of unequal width"
        )
    shape = (rows, columns)
    scales, shares = scale_part(scale, shape, (1, numbers.group_size or columns))
    parts = {"weight_packed": Part(codes), "weight_scale": scales}
    if "weight_shape" in tensors:
        parts["weight_shape"] = of_shape(needed(tensors, "weight_shape", ("I64", "I32")), (2,), None)
    if not numbers.symmetric:
        zero = needed(tensors, "weight_zero_point", ("I32",), 2)
        parts["weight_zero_point"] = of_shape(zero, (math.ceil(rows * bits / 32), groups), 0, Fraction(bits, 32))
    if "weight_g_idx" in tensors:
        index = of_shape(needed(tensors, "weight_g_idx", ("I32", "I64")), (columns,), None)
        return _made(module, tensors, group, shape, parts | {"weight_g_idx": index}, shares, "group_indexed")
    return _made(module, tensors, group, shape, parts, shares)


def _plain_codes(module: str, tensors: Module, group: Group) -> StoredWeight:
    codes = needed(tensors, "weight", ("I8",) if group.weights.kind == "int" else tuple(FP8), 2)
    shape = (codes.shape[0], codes.shape[1])
    block = group.weights.block or (1, group.weights.group_size or shape[1])
    scale, shares = scale_part(needed(tensors, "weight_scale", FLOATS), shape, block)
    parts = {"weight": Part(codes), "weight_scale": scale}
    if not group.weights.symmetric:
        parts["weight_zero_point"] = _zero_points(needed(tensors, "weight_zero_point", ("I8", "F8_E4M3")), scale)
    return _made(module, tensors, group, shape, parts, shares)


def _fp4(module: str, tensors: Module, group: Group) -> StoredWeight:
    codes = needed(tensors, "weight_packed", ("U8",), 2)
    shape = (codes.shape[0], 2 * codes.shape[1])
    size = 16 if group.format == NVFP4 else 32
    dtypes = ("F8_E4M3",) if group.format == NVFP4 else EXPONENTS
    scale = of_shape(needed(tensors, "weight_scale", dtypes), (shape[0], math.ceil(shape[1] / size)))
    parts = {"weight_packed": Part(codes), "weight_scale": scale}
    if group.format == NVFP4:
        parts["weight_global_scale"] = whole(needed(tensors, "weight_global_scale", ("F32",)))
    return _made(module, tensors, group, shape, parts, (1, size), "compressed_fp4")


def _mxfp8(module: str, tensors: Module, group: Group) -> StoredWeight:
    codes = needed(tensors, "weight", ("F8_E4M3",), 2)
    shape = (codes.shape[0], codes.shape[1])
    scale = of_shape(needed(tensors, "weight_scale", EXPONENTS), (shape[0], math.ceil(shape[1] / 32)))
    return _made(module, tensors, group, shape, {"weight": Part(codes), "weight_scale": scale}, (1, 32))


READERS = {PACKED: _packed, NVFP4: _fp4, MXFP4: _fp4, MXFP8: _mxfp8} | dict.fromkeys(PLAIN_CODES, _plain_codes)
"""Format -> what a module's tensors are in it."""
