"""Bits of a checkpoint's weights: the fewest, as its config.json says, and how many have them, by its files' headers."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from assay.errors import CheckpointError, PlanError
from assay.recipes.families import quantization_of
from assay.recipes.family_names import split_layer
from assay.recipes.text_config import num_hidden_layers
from assay.safe_files import open_inside
from assay.safetensors_index import header_entries
from assay_evaluate.serving.vllm_command import read_config

BY_NAME = {"fp8": 8, "mxfp8": 8, "int8": 8, "nvfp4": 4, "mxfp4": 4, "fp4": 4, "int4": 4}
"""Part of the name of a method or of an algorithm (ModelOpt: `quant_algo: NVFP4`) -> bits."""
UNQUANTIZED = 16
STORED = {"F8_E4M3": 8, "F8_E5M2": 8, "I8": 8, "BF16": 16, "F16": 16, "F32": 16}
"""dtype of a weight that is stored one by one -> bits; FP32 counts as unquantized."""
BESIDE = ("scale", "zero", "g_idx", "shape", "bias", "norm")
"""In the last part of a name (`weight_scale`, `qzeros`), or the part before: what is stored beside weights."""


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


def weight_shares(checkpoint: Path, fewest: int | None) -> dict[int, float]:
    """Bits -> share of the weights of the decoder layers, by the headers of the files; {} if these cannot be read.

    fewest: `weight_bits`, which integers packed into 32 bits are taken to have: their header does not say. Embeddings, output
    head and MTP block do not count: a checkpoint is not called 4-bit for them, and drafts change no reply.
    """
    counts: Counter[int] = Counter()
    try:
        layers = num_hidden_layers(read_config(checkpoint))
        for name, dtype, shape in _tensors(checkpoint):
            at = split_layer(name)
            if at is None or at.layer >= layers or at.root.startswith("mtp"):
                continue
            bits, each = _bits_stored(name, dtype, shape, fewest)
            counts[bits] += each * math.prod(shape)
    except (CheckpointError, PlanError, OSError, KeyError, TypeError, ValueError):
        return {}
    total = sum(counts.values())
    return {bits: number / total for bits, number in sorted(counts.items()) if bits and number}


def _tensors(checkpoint: Path) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """(name, dtype, shape) of every tensor of every safetensors file."""
    for path in sorted(checkpoint.glob("*.safetensors")):
        with open_inside(checkpoint, path.name) as file:
            size = os.fstat(file.fileno()).st_size
            entries, _ = header_entries(str(path), size, lambda begin, end: (file.seek(begin), file.read(end - begin))[1])
        for name, entry in entries.items():
            yield name, str(entry["dtype"]), tuple(int(n) for n in entry["shape"])


def _bits_stored(name: str, dtype: str, shape: tuple[int, ...], fewest: int | None) -> tuple[int, int]:
    """(bits of a weight, weights in each element) of a tensor; (0, 0): it holds no weights of a linear layer."""
    if len(shape) < 2 or any(part in end for end in name.rsplit(".", 2)[1:] for part in BESIDE):
        return 0, 0
    if dtype == "U8":
        return 4, 2
    if dtype == "I32":
        bits = fewest if fewest and fewest <= 8 else 4
        return bits, 32 // bits
    return (STORED[dtype], 1) if dtype in STORED else (0, 0)
