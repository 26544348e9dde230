"""What a recipe's schemes mean, by compressed-tensors' presets; `formats/schemes.py`, by which plans are made, is not asked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme, preset_name_to_scheme
from compressed_tensors.utils.match import match_name
from pydantic import ValidationError

PRESETS: Mapping[str, tuple[str, int | None]] = {
    "w4a16": ("W4A16", 128),
    "w4a16_g64": ("W4A16", 64),
    "w4a16_g32": ("W4A16", 32),
    "w4a16_channel": ("W4A16", None),
    "w4a16_asym": ("W4A16_ASYM", 128),
    "fp8_block": ("FP8_BLOCK", None),
    "fp8_channel": ("FP8_DYNAMIC", None),
    "fp8_static": ("FP8_DYNAMIC", None),
    "nvfp4a16": ("NVFP4A16", 16),
    "nvfp4": ("NVFP4", 16),
    "mxfp4": ("MXFP4", 32),
    "mxfp8": ("MXFP8", 32),
    "w8a8": ("W8A8", None),
}
"""Scheme of a recipe -> compressed-tensors' preset, and the columns that share a scale (None: as the strategy has it)."""

Groups = Mapping[str, QuantizationScheme]
"""Name in config.json -> config group."""

_MEANS = ("num_bits", "type", "symmetric", "group_size", "strategy", "block_structure", "dynamic", "scale_dtype")
"""Arguments of weights that say which numbers the codes are."""


def meaning_of(scheme: str) -> QuantizationArgs:
    """Arguments of the weights of a recipe's scheme."""
    preset, group_size = PRESETS[scheme]
    args = preset_name_to_scheme(preset, ["Linear"]).weights
    assert args is not None
    if preset.startswith("W4A16"):
        strategy = "channel" if group_size is None else "group"
        return QuantizationArgs(**{**args.model_dump(), "group_size": group_size, "strategy": strategy})
    return args


def is_meant(group: QuantizationScheme, scheme: str) -> bool:
    """Whether a group of config.json says what a recipe's scheme means, of weights."""
    wanted = meaning_of(scheme)
    return group.weights is not None and all(getattr(group.weights, arg) == getattr(wanted, arg) for arg in _MEANS)


def groups_of(config: Mapping[str, Any]) -> Groups:
    """Name -> config group, as compressed-tensors parses it. ValueError: it refuses one."""
    quantization = config.get("quantization_config")
    groups = quantization.get("config_groups") if isinstance(quantization, dict) else None
    found = {}
    for name, group in groups.items() if isinstance(groups, dict) else ():
        try:
            found[name] = QuantizationScheme.model_validate(group)
        except (ValidationError, TypeError, ValueError, KeyError, AttributeError, RuntimeError) as problem:
            raise ValueError(f"config group {name}: {str(problem).splitlines()[0]}") from None
    return found


def group_for(module: str, groups: Groups) -> QuantizationScheme | None:
    """The config group whose targets match a linear module, by compressed-tensors' matcher; None: none does."""
    linear = torch.nn.Linear.__name__
    return next((g for g in groups.values() if any(t == linear or match_name(module, t) for t in g.targets)), None)
