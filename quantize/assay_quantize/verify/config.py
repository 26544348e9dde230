"""Checks that need no weights: nothing of the source is lost; config.json against the plan and against compressed-tensors.

What a recipe's schemes mean is asked of compressed-tensors' presets, not of `formats/schemes.py`, by which plans are made.
Shared with the planner: which tensors of a source are scales of others, and which names the MTP block has.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme, preset_name_to_scheme
from compressed_tensors.utils.match import match_name
from pydantic import ValidationError

from assay.errors import PlanError
from assay.recipes.families import family_of
from assay.recipes.family_names import names_of
from assay.recipes.mtp import mtp_problems, names_in_block
from assay.recipes.precision import PrecisionRecipe
from assay.recipes.runtime_names import packed_modules
from assay.records.plan import Plan, TensorPlan
from assay_quantize.checkpoint.checkpoint import Checkpoint
from assay_quantize.checkpoint.file_names import CONFIG
from assay_quantize.checkpoint.headers import TensorHeader
from assay_quantize.checkpoint.source_format import find_companions
from assay_quantize.formats.config_groups import config_json
from assay_quantize.formats.schemes import KV_LEAVES, PART_LEAVES, SHARES_GLOBAL_SCALE, module_of
from assay_quantize.formats.targets import targets_by_scheme
from assay_quantize.formats.vllm_rules import MixedSchemes, group_of, runtime_modules
from assay_quantize.verify.files import StoredReader
from assay_quantize.verify.findings import Findings

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

Value = TypeVar("Value", list[Any], dict[str, Any])
Groups = Mapping[str, QuantizationScheme]
"""Name in config.json -> config group."""

_MEANS = ("num_bits", "type", "symmetric", "group_size", "strategy", "block_structure", "dynamic", "scale_dtype")
"""Arguments of weights that say which numbers the codes are."""


def means_scheme(group: QuantizationScheme, scheme: str) -> bool:
    """Whether a group of config.json says what a recipe's scheme means, of weights."""
    preset, group_size = PRESETS[scheme]
    meaning = preset_name_to_scheme(preset, ["Linear"]).weights
    assert meaning is not None
    if preset.startswith("W4A16"):
        strategy = "channel" if group_size is None else "group"
        meaning = QuantizationArgs(**{**meaning.model_dump(), "group_size": group_size, "strategy": strategy})
    return group.weights is not None and all(getattr(group.weights, arg) == getattr(meaning, arg) for arg in _MEANS)


def groups_of(config: Mapping[str, Any]) -> Groups:
    """Name -> config group, as compressed-tensors parses it. ValueError: it refuses one."""
    groups = {}
    for name, group in _value_of(_quantization_of(config), "config_groups", dict).items():
        try:
            groups[name] = QuantizationScheme.model_validate(group)
        except (ValidationError, TypeError, ValueError, KeyError, AttributeError, RuntimeError) as problem:
            raise ValueError(f"config group {name}: {str(problem).splitlines()[0]}") from None
    return groups


def group_for(module: str, groups: Groups) -> QuantizationScheme | None:
    """The config group whose targets match a linear module, by compressed-tensors' matcher; None: none does."""
    linear = torch.nn.Linear.__name__
    return next((g for g in groups.values() if any(t == linear or match_name(module, t) for t in g.targets)), None)


def check_nothing_lost(
    source: Checkpoint, recipe: PrecisionRecipe, stored: Mapping[str, TensorHeader], findings: Findings
) -> None:
    """Every tensor of the source is stored, plain or quantized, and every stored one is of the source.

    Scales of the source may be folded into their weights; the MTP block is absent only where the recipe drops it. Beside the
    source's tensors there are scales of the KV cache, two for every attention with keys outside the MTP block, where the recipe
    has them calibrated.
    """
    companions = find_companions(source.location, source.config, source.tensors)
    absent = companions.weight_of.keys() | companions.of_activations
    mtp_block = set(names_in_block(family_of(source.config), source.config, source.tensors))
    if recipe.mtp == "drop":
        absent |= mtp_block
    for name, header in source.tensors.items():
        findings.count("lost")
        is_stored = name in stored or f"{module_of(name)}.weight_packed" in stored
        if not is_stored and name not in absent and not findings.is_damaged(name):
            findings.damage("lost", name, f"is {header.dtype} {list(header.shape)} in the source, and nothing of it is stored")
    modules = {module_of(name) for name in source.tensors if name.endswith(".weight")}
    cache_scales = set()
    if recipe.kv_cache == "fp8_calibrated":
        keys = (name for name in source.tensors if name.endswith(".k_proj.weight") and name not in mtp_block)
        cache_scales = {f"{name.removesuffix('.k_proj.weight')}.{leaf}" for name in keys for leaf in KV_LEAVES}
    for name in sorted(cache_scales - stored.keys()):
        findings.count("lost")
        if not findings.is_damaged(name):
            findings.damage("lost", name, "is stored nowhere, and the recipe has the scales of the KV cache calibrated")
    for name in stored:
        is_made = name in source.tensors or (name.rpartition(".")[2] in PART_LEAVES and module_of(name) in modules)
        if not is_made and name not in cache_scales and not findings.is_damaged(name):
            findings.damage("lost", name, "is stored, and the source has no tensor that it could be made from")


def check_targets(
    recipe: PrecisionRecipe, config: Mapping[str, Any], stored: Mapping[str, TensorHeader], findings: Findings
) -> Groups | None:
    """config.json, read by compressed-tensors, has a group that means a scheme of the recipe for every module that is stored
    quantized, and does not ignore it; a module of which `weight_scale` is stored is quantized.

    Returns its groups; None: they are damaged.
    """
    num_damages = len(findings.damages)
    try:
        groups = groups_of(config)
        ignore = ignored_by(config)
        for module in [module_of(name) for name in stored if name.rpartition(".")[2] == "weight_scale"]:
            findings.count("targets")
            covered = next((pattern for pattern in ignore if match_name(module, pattern)), None)
            if covered is not None:
                findings.damage("targets", module, f"is stored quantized, and compressed-tensors ignores it by {covered!r}")
            elif group_for(module, groups) is None:
                findings.damage("targets", module, "is stored quantized, and compressed-tensors finds no config group for it")
    except (ValueError, re.error) as problem:
        findings.damage("targets", "config.json: quantization_config", str(problem))
        return None
    schemes = [scheme for scheme in recipe.schemes if scheme in PRESETS]
    for name, group in groups.items():
        findings.count("targets")
        if not any(means_scheme(group, scheme) for scheme in schemes):
            what = f"means none of the recipe's schemes ({', '.join(schemes)}) to compressed-tensors"
            findings.damage("targets", f"config.json: quantization_config.config_groups.{name}", what)
    return groups if len(findings.damages) == num_damages else None


def ignored_by(config: Mapping[str, Any]) -> list[str]:
    """The ignore list of config.json; what is no text in it is left out."""
    return [pattern for pattern in _value_of(_quantization_of(config), "ignore", list) if isinstance(pattern, str)]


def _quantization_of(config: Mapping[str, Any]) -> dict[str, Any]:
    return _value_of(config, "quantization_config", dict)


def _value_of(data: Mapping[str, Any], key: str, kind: type[Value]) -> Value:
    """The value under `key`; empty where it is of another type, which `check_config` finds."""
    value = data.get(key)
    return value if isinstance(value, kind) else kind()


def check_fused_scales(plan: Plan, folder: Path, stored: Mapping[str, TensorHeader], findings: Findings) -> None:
    """One global scale per fused group: vLLM applies one to all members."""
    reader, buffer = StoredReader(folder, stored), np.empty(4, np.uint8)
    groups: dict[str, dict[str, float]] = defaultdict(dict)
    for tensor in plan.tensors:
        header = stored.get(f"{module_of(tensor.name)}.weight_global_scale")
        if tensor.scheme not in SHARES_GLOBAL_SCALE or tensor.fused_group is None or header is None:
            continue
        if header.dtype == "F32" and header.shape == (1,):
            groups[tensor.fused_group][header.name] = float(reader.read(header.name, 0, 4, buffer).view(np.float32)[0])
    reader.close()
    for group, scales in groups.items():
        findings.count("fused_scales")
        if len(set(scales.values())) > 1:
            listed = ", ".join(f"{name.split('.')[-2]} {scale:g}" for name, scale in scales.items())
            findings.damage("fused_scales", next(iter(scales)), f"members of {group} differ: {listed}")


# ------------------------------------------------------------------------------------------------ config
def check_config(plan: Plan, config: Mapping[str, Any], findings: Findings) -> None:
    """config.json says what the plan says; only `ignore` may be worded in another way (`check_ignore` judges it)."""
    planned = config_json(plan)
    for key in sorted({*planned, *config} - {"quantization_config"}):
        findings.count("config")
        if config.get(key) != planned.get(key):
            findings.damage("config", f"config.json: {key}", f"is {config.get(key)!r}; expected {planned.get(key)!r}")
    quantization = config.get("quantization_config")
    if not isinstance(quantization, dict):
        findings.damage("config", "config.json: quantization_config", "is missing: a loader would take packed weights as plain")
        return
    expected = planned["quantization_config"]
    for key in sorted({*expected, *quantization} - {"ignore", "version"}):
        findings.count("config")
        if quantization.get(key) != expected.get(key):
            what = f"is {quantization.get(key)!r}; expected {expected.get(key)!r}"
            findings.damage("config", f"config.json: quantization_config.{key}", what)
        elif key == "config_groups" and list(quantization[key]) != list(expected[key]):
            stored_order, planned_order = ", ".join(quantization[key]), ", ".join(expected[key])
            what = f"are in the order {stored_order}; expected {planned_order}: loaders take the first that fits"
            findings.damage("config", f"config.json: quantization_config.{key}", what)


def check_ignore(plan: Plan, config: Mapping[str, Any], findings: Findings) -> None:
    """The ignore list: by compressed-tensors' matcher every unquantized linear is in it and no quantized one; by vLLM's rules,
    which the planner replays as well, fused members agree."""
    ignore = ignored_by(config)
    groups = _value_of(_quantization_of(config), "config_groups", dict).items()
    targets = {str(t): str(name) for name, g in groups if isinstance(g, dict) for t in _value_of(g, "targets", list)}
    matrices = [t for t in plan.tensors if t.outputs and len(t.shape) == 2 and t.name.endswith(".weight")]
    try:
        for tensor in matrices:
            if tensor.part == "embedding":
                continue  # not a Linear: no config group targets it
            findings.count("ignore")
            covered = next((pattern for pattern in ignore if match_name(tensor.module, pattern)), None)
            if tensor.scheme is not None and covered is not None:
                findings.damage("ignore", tensor.module, f"is quantized, but the ignore list covers it: {covered!r}")
            elif tensor.scheme is None and covered is None:
                what = "is stored unquantized, but nothing in the ignore list covers it: a loader would look for packed weights"
                findings.damage("ignore", tensor.module, what)
        _check_runtime(plan, matrices, ignore, targets, findings)
    except re.error as problem:
        findings.damage("ignore", "config.json: quantization_config.ignore", f"{problem.pattern!r} is no pattern: {problem}")


def _check_runtime(
    plan: Plan, matrices: list[TensorPlan], ignore: list[str], targets: Mapping[str, str], findings: Findings
) -> None:  # fmt: skip
    scheme_of = {tensor.module: tensor.scheme for tensor in matrices}
    fused = packed_modules(plan.family)
    schemes = enumerate(targets_by_scheme(plan.tensors, names_of(plan.family).runtime_namer(plan.config)))
    scheme_of_group = {f"group_{number}": scheme for number, scheme in schemes}
    for module in runtime_modules(plan.family, scheme_of, plan.config):
        findings.count("runtime")
        stored = {scheme_of[member] for member in module.members}
        if len(stored) > 1:
            what = ", ".join(sorted(scheme or "unquantized" for scheme in stored))
            findings.damage("runtime", module.name, f"its members differ ({what}); vLLM loads them as one")
            continue
        try:
            group = group_of(module, ignore, targets, fused)
        except MixedSchemes as problem:
            findings.damage("runtime", module.name, str(problem))
            continue
        expected, scheme = None if group is None else scheme_of_group.get(group, group), stored.pop()
        if expected != scheme:
            what = f"vLLM expects {expected or 'plain'} weights for it, stored are {scheme or 'plain'} ones"
            findings.damage("runtime", module.name, what)


def check_mtp(config: Mapping[str, Any] | None, stored: Mapping[str, TensorHeader], findings: Findings) -> None:
    """The MTP block is whole, or absent and declared so; judged from config and names alone."""
    if config is None:
        return
    scales = (PART_LEAVES - {"weight_packed"}) | set(KV_LEAVES)  # the block's own cache has none
    names = {re.sub(r"\.weight_packed$", ".weight", name) for name in stored if name.rpartition(".")[2] not in scales}
    try:
        family = family_of(config)
        if block := names_in_block(family, config, names):
            findings.count("mtp", len(block))
        for problem in mtp_problems(family, config, names):
            findings.damage("mtp", problem.where, problem.what)
    except PlanError as error:
        findings.damage("config", CONFIG, str(error))
