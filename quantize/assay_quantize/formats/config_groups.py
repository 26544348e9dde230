"""`quantization_config` of config.json, written without importing compressed-tensors (which takes torch, seconds and 400 MiB).

A test compares every scheme with what compressed-tensors itself writes; vLLM and transformers read it with that package.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from assay.errors import PlanError
from assay.recipes.families import unquantized
from assay.recipes.family_names import names_of
from assay.recipes.mtp import declared_layers, declaring_none
from assay.records.plan import Plan
from assay_quantize.formats.schemes import SCHEMES, Scheme
from assay_quantize.formats.targets import targets_by_scheme

_PER_TOKEN = {"group_size": None, "strategy": "token", "dynamic": True}
ACTIVATIONS: Mapping[str, Mapping[str, Any] | None] = {
    "W4A16": None,
    "W4A16_ASYM": None,
    "FP8_BLOCK": {"group_size": 128, "strategy": "group", "block_structure": None, "dynamic": True},
    "FP8_DYNAMIC": _PER_TOKEN,
    "NVFP4A16": None,
    "NVFP4": {"dynamic": "local", "observer": "static_minmax"},
    "MXFP4": {"dynamic": True},
    "MXFP8": {"dynamic": True},
    "W8A8": _PER_TOKEN,
}
"""Preset -> how activations are rounded at run time, where that differs from the weights; None: they stay in 16 bits."""

STATIC: Mapping[str, Any] = {"group_size": None, "strategy": "tensor", "dynamic": False, "observer": "static_minmax"}
"""Of schemes with an `input_scale`."""

_FP8_CACHE: Mapping[str, Any] = {
    "num_bits": 8, "type": "float", "symmetric": True, "group_size": None, "strategy": "tensor", "block_structure": None,
    "dynamic": False, "actorder": None, "scale_dtype": None, "zp_dtype": None, "observer": None, "observer_kwargs": {},
}  # fmt: skip
KV_CACHE: Mapping[str | None, Mapping[str, Any] | None] = {None: None, "fp8": _FP8_CACHE, "fp8_calibrated": _FP8_CACHE}
"""`kv_cache` of a recipe -> `kv_cache_scheme`. Of `fp8` no scales are stored: vLLM takes 1, as ModelOpt's `fp8_cast` means."""

MIXED = "mixed-precision"
"""`format` of a checkpoint whose groups have formats of their own, as compressed-tensors calls it."""

_SCALE_DTYPES = {"nvfp4": "torch.float8_e4m3fn", "mxfp4": "torch.uint8", "mxfp8": "torch.uint8"}


def quantization_config(plan: Plan) -> dict[str, Any]:
    """`quantization_config` for the new checkpoint's config.json, as vLLM and transformers read it.

    One group for each scheme (`targets.py`); everything unquantized is in `ignore`, as patterns that vLLM matches at run time.
    Raises PlanError when nothing is quantized.
    """
    targets = targets_by_scheme(plan.tensors, names_of(plan.family).runtime_namer(plan.config))
    if not targets:
        raise PlanError(f"precision {plan.precision}: nothing in {plan.source} is quantized; name roles under `quantize`")
    formats = {SCHEMES[scheme].format for scheme in targets}
    return {
        "version": version("compressed-tensors"),
        "transform_config": {},
        "config_groups": {f"group_{i}": _group(SCHEMES[scheme], targets[scheme]) for i, scheme in enumerate(targets)},
        "quant_method": "compressed-tensors",
        "kv_cache_scheme": KV_CACHE[plan.precision_recipe.get("kv_cache")],
        "format": formats.pop() if len(formats) == 1 else MIXED,
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "ignore": list(plan.ignore),
    }


def _group(row: Scheme, targets: Sequence[str]) -> dict[str, Any]:
    """One entry of `config_groups`."""
    weights = _weights(row)
    activations = STATIC if row.input_scale else ACTIVATIONS[row.preset]
    return {
        "targets": list(targets),
        "weights": weights,
        "input_activations": None if activations is None else {**weights, **activations},
        "output_activations": None,
        "format": row.format,
    }


def _weights(row: Scheme) -> dict[str, Any]:
    """Arguments of the weights, every field that compressed-tensors writes, in its order."""
    if row.layout == "nvfp4":
        strategy = "tensor_group"
    elif row.block_rows > 1:
        strategy = "block"
    elif row.group_size is None:
        strategy = "channel"
    else:
        strategy = "group"
    return {
        "num_bits": 4 if row.layout in ("int4", "nvfp4", "mxfp4") else 8,
        "type": "int" if row.format in ("pack-quantized", "int-quantized") else "float",
        "symmetric": row.symmetric,
        "group_size": None if strategy == "block" else row.group_size,
        "strategy": strategy,
        "block_structure": [row.block_rows, row.group_size] if strategy == "block" else None,
        "dynamic": False,
        "actorder": None,
        "scale_dtype": _SCALE_DTYPES.get(row.layout),
        "zp_dtype": None if row.symmetric else "torch.int8",
        "observer": None,
        "observer_kwargs": {},
    }


def config_json(plan: Plan) -> dict[str, Any]:
    """The new checkpoint's config: the source's, with `quantization_config`, weights that were joined said to be apart, and no
    MTP layers if none are kept.

    A block may be declared and not be there: tools that fine-tune save a model without it, and its config as it was.
    """
    config = unquantized(plan.config)
    if plan.drops_mtp or (declared_layers(plan.config) and not plan.keeps_mtp):
        config = declaring_none(config)
    config |= {key: value for key, value in names_of(plan.family).apart.items() if key in config}
    config["quantization_config"] = quantization_config(plan)
    return config
