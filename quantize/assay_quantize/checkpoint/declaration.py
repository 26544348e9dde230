"""What a checkpoint says of its own quantization: which file counts, the method's name, what is declared with it.

The one place that reads such a declaration; whether it is true is a question to the tensors (`stored.py`). It stands in
config.json (`quantization_config`, `compression_config` of old compressed-tensors, `quantization` of MLX), also in the part
that describes the language model, or in a file beside it. vLLM takes config.json's first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from assay.errors import CheckpointError
from assay.recipes.families import quantization_of

MODELOPT_CONFIG = "hf_quant_config.json"
"""ModelOpt's own file, beside or instead of config.json's quantization_config."""
GPTQ_CONFIGS = ("quantize_config.json", "quant_config.json")
"""GPTQ's and AWQ's."""
READ_BESIDE = (MODELOPT_CONFIG, *GPTQ_CONFIGS)
"""Files that are read where config.json says nothing, in this order."""
FILES = (*READ_BESIDE, "quantization_config.json")
"""Files that only quantized checkpoints have; the last is AutoRound's, which repeats what config.json says."""

_IN_CONFIG = "config.json: quantization_config"
_KEYS = ("compression_config", "quantization")
"""Keys of config.json that declare a quantization, beside every one that has `quantization_config` in its name."""
_MOST_NESTED = 4
"""Levels of config.json that are looked through for declarations."""
_FP8_FORMATS = ("float-quantized", "naive-quantized")
"""compressed-tensors formats in which an FP8 weight keeps its name and shape."""
MXFP4_FORMAT = "mxfp4-pack-quantized"
"""The one of MXFP4, packed."""
DEFAULT_BLOCK = (128, 128)


class Declaration(NamedTuple):
    """method: `quant_method` in lower case, or what the rest means where there is none; else `unknown`. declared: as it
    stands there. where: file and key."""

    method: str
    declared: Mapping[str, Any]
    where: str

    @property
    def stated(self) -> dict[str, Any]:
        """`declared`, with what ModelOpt's file has one level deeper."""
        inner = self.declared.get("quantization")
        return {**self.declared, **inner} if isinstance(inner, dict) else dict(self.declared)


def read_declaration(
    config: Mapping[str, Any], beside: Mapping[str, Mapping[str, Any]] | None = None
) -> Declaration | None:  # fmt: skip
    """What counts of everything that a checkpoint declares; None: it declares nothing.

    beside: name of such a file -> its contents; the first is read where config.json says nothing.
    """
    in_config = [(_IN_CONFIG, quantization_of(config)), ("config.json: compression_config", config.get("compression_config"))]
    for where, declared in in_config:
        if isinstance(declared, dict) and declared:
            return Declaration(_method(declared, where), declared, where)
    for name, contents in (beside or {}).items():
        return Declaration(_method(contents, name), contents, name)
    return None


def _method(declared: Mapping[str, Any], where: str) -> str:
    if any(declared.get(key) for key in ("load_in_4bit", "load_in_8bit")):
        return "bitsandbytes"
    if told := declared.get("quant_method"):
        return str(told).lower()
    if where == MODELOPT_CONFIG or declared.get("quant_algo"):
        return "modelopt"
    if where in GPTQ_CONFIGS:
        return "awq" if "w_bit" in declared or "zero_point" in declared else "gptq"
    if "config_groups" in declared:
        return "compressed-tensors"
    return "mlx" if {"bits", "group_size"} <= declared.keys() else "unknown"


def declarations(config: Mapping[str, Any], level: int = 0) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(key, what it holds) of everything in config.json that declares a quantization, at any depth."""
    for key, value in config.items():
        if not isinstance(value, dict) or not value:
            continue
        if "quantization_config" in key or key in _KEYS:
            yield key, value
        elif level < _MOST_NESTED:
            yield from declarations(value, level + 1)


def declared_quantization(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """`quantization_config` of config.json, as an object; None: there is none."""
    declared = quantization_of(config)
    return declared if isinstance(declared, dict) else None


def groups_of(declared: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """`config_groups`, name -> group; empty where there are none."""
    groups = declared.get("config_groups")
    return (
        {str(name): group if isinstance(group, dict) else {} for name, group in groups.items()}
        if isinstance(groups, dict)
        else {}
    )


def weight_arguments(declared: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What each config group says of weights; an empty object where it says nothing."""
    groups = groups_of(declared).values()
    return [group["weights"] if isinstance(group.get("weights"), dict) else {} for group in groups]


def declares_fp8_by_name(declared: Mapping[str, Any]) -> bool:
    """Whether compressed-tensors is declared in a form in which FP8 weights keep their names and shapes."""
    numbers = [(weights.get("type"), weights.get("num_bits")) for weights in weight_arguments(declared)]
    return declared.get("format") in _FP8_FORMATS and all(number == ("float", 8) for number in numbers)


def declares_int4(config: Mapping[str, Any]) -> bool:
    """Whether config.json says that weights are packed by compressed-tensors as symmetric INT4."""
    declared = declared_quantization(config) or {}
    groups = weight_arguments(declared)
    is_packed = (declared.get("quant_method"), declared.get("format")) == ("compressed-tensors", "pack-quantized")
    return (
        is_packed
        and bool(groups)
        and all(
            (weights.get("type"), weights.get("num_bits"), weights.get("symmetric")) == ("int", 4, True)
            and not weights.get("actorder")
            and weights.get("strategy") in ("group", "channel")
            for weights in groups
        )
    )


def declares_mxfp4(config: Mapping[str, Any]) -> bool:
    """Whether config.json says that weights, and weights alone, are packed by compressed-tensors as MXFP4 (Kimi-K3)."""
    declared = declared_quantization(config) or {}
    groups = groups_of(declared).values()
    is_packed = (declared.get("quant_method"), declared.get("format")) == ("compressed-tensors", MXFP4_FORMAT)
    return (
        is_packed
        and bool(groups)
        and all(
            (weights.get("type"), weights.get("num_bits"), weights.get("group_size"), weights.get("symmetric"))
            == ("float", 4, 32, True)
            for weights in weight_arguments(declared)
        )
        and all(group.get("input_activations") is None for group in groups)
    )


def declared_blocks(declared: Mapping[str, Any]) -> list[Any]:
    """Everything that is said of blocks of weights that share a scale, whether or not it makes sense."""
    told = [declared.get("weight_block_size"), *(weights.get("block_structure") for weights in weight_arguments(declared))]
    return [block for block in told if block is not None]


def is_block(block: Any) -> bool:
    """Whether it is [rows, columns]."""
    return isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)


def declared_block(location: str, config: Mapping[str, Any]) -> tuple[int, int]:
    """(rows, columns) of weights that share a scale, where scales are per block; 128 x 128 unless config.json differs."""
    block_size = next((block for block in declared_blocks(declared_quantization(config) or {}) if block), None)
    if block_size is None:
        return DEFAULT_BLOCK
    if not is_block(block_size):
        got = ascii(block_size)[:60]
        raise CheckpointError(f"{location}: config.json: weight_block_size must be [rows, columns], got {got}")
    return block_size[0], block_size[1]
