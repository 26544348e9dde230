"""Bits of a checkpoint's weights, as its config.json says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from assay.recipes.families import quantization_of
from assay_evaluate.serving.vllm_command import read_config

BY_NAME = {"fp8": 8, "mxfp8": 8, "int8": 8, "nvfp4": 4, "mxfp4": 4, "fp4": 4, "int4": 4}
"""Part of the name of a method or of an algorithm (ModelOpt: `quant_algo: NVFP4`) -> bits."""
UNQUANTIZED = 16


def weight_bits(checkpoint: Path) -> int | None:
    """Fewest bits of any quantized weights; 16: none is quantized. None: the config does not say in a way that is known here.

    Known are compressed-tensors (`config_groups`), ModelOpt (`quant_algo`, `quantized_layers`), AWQ, GPTQ and AutoRound
    (`bits`), and methods whose name says it (fp8, mxfp4).
    """
    declared = quantization_of(read_config(checkpoint))
    if declared is None:
        return UNQUANTIZED
    return min(_bits(declared), default=None) if isinstance(declared, Mapping) else None


def _bits(declared: Mapping[str, Any]) -> Iterator[int]:
    groups = declared.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping) and isinstance(weights.get("num_bits"), int):
            yield weights["num_bits"]
    for key in ("bits", "w_bit", "weight_bits"):
        if isinstance(declared.get(key), int):
            yield declared[key]
    layers = declared.get("quantized_layers")
    names = [declared.get("quant_algo"), declared.get("quant_method")]
    names += (
        [layer.get("quant_algo") for layer in layers.values() if isinstance(layer, Mapping)]
        if isinstance(layers, Mapping)
        else []
    )
    for name in names:
        if isinstance(name, str):
            yield from [bits for part, bits in BY_NAME.items() if part in name.lower()]
