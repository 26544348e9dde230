"""GPTQ, AWQ and AutoRound's own format: integers packed into `qweight`, with `qzeros` and `scales`.

    GPTQ      qweight I32 [I * bits / 32, O], qzeros I32 [G, O * bits / 32], scales F16 [G, O], g_idx I32 [I]
    AWQ GEMM  qweight I32 [I, O/8], qzeros I32 [G, O/8], scales F16 [G, O], with rows of the weight in another order in a word

GPTQ: w[o, i] = (q - zero) * scale of group g_idx[i]. In `checkpoint_format: gptq` (v1, and where nothing is said) what is
stored is one less than the zero; in `gptq_v2` it is the zero. AutoRound's `packing_format: auto_round:auto_gptq` is v1 without
g_idx, its `auto_round` and `auto_round:gptqmodel` are v2. Modules differ by AutoRound's `extra_config` and GPTQModel's
`dynamic`.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, NamedTuple

from assay.errors import CheckpointError
from assay_quantize.decoding.parts import FLOATS, needed, of_shape
from assay_quantize.decoding.stored_weight import Declared, KvRule, Method, Module, NotRead, Part, StoredWeight

BITS = (2, 3, 4, 8)
AWQ_BITS = (4,)
ZERO_OFFSETS = {"gptq": 1, "gptq_v2": 0}
"""`checkpoint_format` -> what is added to stored zero points. Marlin's, `bitblas`, `qqq` and others are other layouts."""

AUTOROUND = {"auto_round:auto_gptq": 1, "auto_round:gptqmodel": 0, "auto_round": 0, "auto_round:auto_awq": None}
"""`packing_format` -> what is added to stored zero points (auto_round 0.15.1: qlinear_torch_zp.py, qlinear_torch.py); None:
AWQ."""


class Words(NamedTuple):
    """What config.json says of one module. group: columns that share a scale; None: all of them."""

    bits: int
    group: int | None
    symmetric: bool


def gptq(location: str, declared: Declared) -> Method:
    """`quant_method: gptq`. Raises CheckpointError for a checkpoint_format or bits that are not read."""
    format_ = str(declared.get("checkpoint_format") or "gptq")
    if format_ not in ZERO_OFFSETS:
        raise CheckpointError(
            f"{location}: config.json: GPTQ's checkpoint_format {format_}: {', '.join(ZERO_OFFSETS)} are read"
        )
    general = _words(location, declared, BITS)
    dynamic = declared.get("dynamic") or {}
    if not isinstance(dynamic, dict):
        raise CheckpointError(f"{location}: config.json: GPTQ's dynamic must be an object")
    rules = _rules({str(key).removeprefix("+:"): value for key, value in dynamic.items() if not str(key).startswith("-:")})

    def weight(module: str, tensors: Module) -> StoredWeight:
        stated = next((stated for pattern, stated in rules if pattern.match(module)), None)
        words = _override(location, general, stated, BITS)
        return _gptq_weight(module, tensors, words, "GPTQ" if ZERO_OFFSETS[format_] else "GPTQ v2", ZERO_OFFSETS[format_])

    return Method(weight, KvRule(), f"GPTQ ({format_})")


def awq(location: str, declared: Declared) -> Method:
    """`quant_method: awq`. Raises CheckpointError for a version or bits that are not read."""
    version = str(declared.get("version") or "gemm").lower()
    if version != "gemm":
        raise CheckpointError(f"{location}: config.json: AWQ version {version} is not read, only gemm")
    stated = {**declared, "bits": declared.get("bits", declared.get("w_bit")), "sym": not declared.get("zero_point", True)}
    words = _words(location, {**stated, "group_size": declared.get("group_size", declared.get("q_group_size"))}, AWQ_BITS)

    def weight(module: str, tensors: Module) -> StoredWeight:
        return _awq_weight(module, tensors, words, "AWQ GEMM")

    return Method(weight, KvRule(), "AWQ (gemm)")


def autoround(location: str, declared: Declared) -> Method:
    """`quant_method: auto-round` with integers. Raises CheckpointError for a packing that is not read, by its name."""
    packing, data_type = str(declared.get("packing_format") or "auto_round:auto_gptq"), str(declared.get("data_type") or "int")
    activations, rotation = declared.get("act_bits") or 16, declared.get("rotation_config")
    if packing not in AUTOROUND or data_type != "int" or activations != 16 or rotation:
        what = (
            f"packing_format {packing}, data_type {data_type}, act_bits {activations}{', rotation_config' if rotation else ''}"
        )
        raise CheckpointError(
            f"{location}: config.json: AutoRound's {what}: integers in {', '.join(AUTOROUND)} are read, with act_bits 16"
        )
    zero_offset = AUTOROUND[packing]
    allowed = AWQ_BITS if zero_offset is None else BITS
    general = _words(location, declared, allowed)
    extra = declared.get("extra_config") or {}
    if not isinstance(extra, dict):
        raise CheckpointError(f"{location}: config.json: AutoRound's extra_config must be an object")
    # as vLLM: a key with none of these is a name
    rules = _rules({key: stated for key, stated in extra.items() if set(key) & set(r"*+?^$()[]{}|\\")})

    def weight(module: str, tensors: Module) -> StoredWeight:
        stated = extra.get(module) or next((stated for pattern, stated in rules if pattern.search(module)), None)
        words = _override(location, general, stated, allowed)
        if zero_offset is None:
            return _awq_weight(module, tensors, words, "AutoRound AWQ")
        return _gptq_weight(module, tensors, words, "AutoRound GPTQ", zero_offset)

    return Method(weight, KvRule(), f"AutoRound ({packing})")


# ------------------------------------------------------------------------------------------------ config.json
def _words(location: str, declared: Mapping[str, Any], allowed: tuple[int, ...]) -> Words:
    bits, group = declared.get("bits"), declared.get("group_size", -1)
    if bits not in allowed:
        raise CheckpointError(f"{location}: config.json: {bits} bits are not read; {', '.join(map(str, allowed))} are")
    if type(group) is not int or group == 0:
        raise CheckpointError(f"{location}: config.json: group_size must be a number of columns, or -1 for all")
    return Words(int(bits), group if group > 0 else None, declared.get("sym", True) is not False)


def _override(location: str, words: Words, stated: Any, allowed: tuple[int, ...]) -> Words:
    """What is said of a module, where something is."""
    if not isinstance(stated, dict):
        return words
    filled = {"bits": words.bits, "group_size": words.group or -1, "sym": words.symmetric}
    filled |= {key: value for key, value in stated.items() if key in filled and value is not None}
    if filled["bits"] not in allowed:
        raise NotRead(f"has {filled['bits']} bits by config.json; {', '.join(map(str, allowed))} are read")
    return _words(location, filled, allowed)


def _rules(stated: Mapping[str, Any]) -> list[tuple[re.Pattern[str], Any]]:
    """Patterns with what is said of modules that they match; what is no pattern matches nothing, as in vLLM."""
    made = []
    for key, value in stated.items():
        with contextlib.suppress(re.error):
            made.append((re.compile(key), value))
    return made


# ------------------------------------------------------------------------------------------------ a module
def _gptq_weight(module: str, tensors: Module, words: Words, format_: str, zero_offset: int) -> StoredWeight:
    codes = needed(tensors, "qweight", ("I32",), 2)
    bits, rows = words.bits, codes.shape[1]
    if codes.shape[0] * 32 % (bits * 32 if bits == 3 else bits):
        raise NotRead(f"has qweight of shape {list(codes.shape)}, which {bits} bits do not fill")
    columns = codes.shape[0] * 32 // bits
    groups = math.ceil(columns / words.group) if words.group else 1
    per_row = Fraction(bits, 32)
    parts = {
        "qweight": Part(codes, 1),
        "scales": of_shape(needed(tensors, "scales", FLOATS, 2), (groups, rows), 1),
        "qzeros": of_shape(needed(tensors, "qzeros", ("I32",), 2), (groups, math.ceil(rows * per_row)), 1, per_row),
    }
    if "g_idx" in tensors:
        parts["g_idx"] = of_shape(needed(tensors, "g_idx", ("I32", "I64")), (columns,), None)
    arguments = {"bits": bits, "zero_offset": zero_offset, "group": words.group or columns}
    return StoredWeight(
        f"{module}.weight",
        format_,
        f"int{bits}",
        (rows, columns),
        "gptq",
        parts,
        arguments,
        (1, words.group or columns),
        words.symmetric,
    )


def _awq_weight(module: str, tensors: Module, words: Words, format_: str) -> StoredWeight:
    codes = needed(tensors, "qweight", ("I32",), 2)
    in_word = 32 // words.bits
    columns, rows = codes.shape[0], codes.shape[1] * in_word
    group = words.group or columns
    if columns % group:
        raise NotRead(f"has {columns} columns, which groups of {group} do not divide")
    per_row = Fraction(1, in_word)
    parts = {
        "qweight": Part(codes, 1, per_row),
        "scales": of_shape(needed(tensors, "scales", FLOATS, 2), (columns // group, rows), 1),
    }
    if "qzeros" in tensors or not words.symmetric:
        parts["qzeros"] = of_shape(needed(tensors, "qzeros", ("I32",), 2), (columns // group, codes.shape[1]), 1, per_row)
    arguments = {"bits": words.bits, "group": group}
    return StoredWeight(
        f"{module}.weight", format_, f"int{words.bits}", (rows, columns), "awq", parts, arguments, (1, group), words.symmetric
    )
