"""What must be in a checkpoint, judged from names alone, without the plan: nothing of the source is lost, and what is stored
quantized is what compressed-tensors finds quantized by config.json.

Shared with the planner: which tensors of a source are scales of others, and which names the MTP block has.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from compressed_tensors.utils.match import match_name

from assay.recipes.families import family_of
from assay.recipes.mtp import names_in_block
from assay.recipes.precision import PrecisionRecipe
from assay_quantize.checkpoint.checkpoint import Checkpoint
from assay_quantize.checkpoint.headers import TensorHeader
from assay_quantize.checkpoint.source_format import find_companions
from assay_quantize.formats.schemes import INPUT_LEAVES, KV_LEAVES, module_of
from assay_quantize.verify.findings import Findings
from assay_quantize.verify.presets import PRESETS, Groups, group_for, groups_of, is_meant

PARTS = frozenset(
    {"weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_global_scale"} | set(INPUT_LEAVES)
)
"""Local names of what quantizing makes, beside `weight`."""


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
    if recipe.mtp == "drop":
        absent |= set(names_in_block(family_of(source.config), source.config, source.tensors))
    for name, header in source.tensors.items():
        findings.look("lost")
        is_stored = name in stored or f"{module_of(name)}.weight_packed" in stored
        if not is_stored and name not in absent and not findings.is_damaged(name):
            findings.damage("lost", name, f"is {header.dtype} {list(header.shape)} in the source, and nothing of it is stored")
    modules = {module_of(name) for name in source.tensors if name.endswith(".weight")}
    caches = _caches(source, recipe)
    for name in sorted(caches - stored.keys()):
        findings.look("lost")
        if not findings.is_damaged(name):
            findings.damage("lost", name, "is stored nowhere, and the recipe has the scales of the KV cache calibrated")
    for name in stored:
        is_made = name in source.tensors or (name.rpartition(".")[2] in PARTS and module_of(name) in modules)
        if not is_made and name not in caches and not findings.is_damaged(name):
            findings.damage("lost", name, "is stored, and the source has no tensor that it could be made from")


def _caches(source: Checkpoint, recipe: PrecisionRecipe) -> set[str]:
    """Names of the scales of the KV cache."""
    if recipe.kv_cache != "fp8_calibrated":
        return set()
    block = set(names_in_block(family_of(source.config), source.config, source.tensors))
    keys = (name for name in source.tensors if name.endswith(".k_proj.weight") and name not in block)
    return {f"{name.removesuffix('.k_proj.weight')}.{leaf}" for name in keys for leaf in KV_LEAVES}


def check_targets(
    recipe: PrecisionRecipe, config: Mapping[str, Any], stored: Mapping[str, TensorHeader], findings: Findings
) -> Groups | None:
    """config.json, read by compressed-tensors, has a group that means a scheme of the recipe for every module that is stored
    quantized, and does not ignore it; a module of which `weight_scale` is stored is quantized.

    Returns its groups; None: they are damaged.
    """
    count = len(findings.damages)
    try:
        groups = groups_of(config)
        _check_modules(groups, config, stored, findings)
    except (ValueError, re.error) as problem:
        findings.damage("targets", "config.json: quantization_config", str(problem))
        return None
    wanted = [scheme for scheme in recipe.schemes if scheme in PRESETS]
    for name, group in groups.items():
        findings.look("targets")
        if not any(is_meant(group, scheme) for scheme in wanted):
            what = f"means none of the recipe's schemes ({', '.join(wanted)}) to compressed-tensors"
            findings.damage("targets", f"config.json: quantization_config.config_groups.{name}", what)
    return groups if len(findings.damages) == count else None


def _check_modules(
    groups: Groups, config: Mapping[str, Any], stored: Mapping[str, TensorHeader], findings: Findings
) -> None:  # fmt: skip
    ignore = ignored_by(config)
    for name in stored:
        if name.rpartition(".")[2] != "weight_scale":
            continue
        module = module_of(name)
        findings.look("targets")
        covered = next((pattern for pattern in ignore if match_name(module, pattern)), None)
        if covered is not None:
            findings.damage("targets", module, f"is stored quantized, and compressed-tensors ignores it by {covered!r}")
        elif group_for(module, groups) is None:
            findings.damage("targets", module, "is stored quantized, and compressed-tensors finds no config group for it")


def ignored_by(config: Mapping[str, Any]) -> list[str]:
    """The ignore list of config.json; what is no text in it is left out."""
    quantization = config.get("quantization_config")
    listed = quantization.get("ignore") if isinstance(quantization, dict) else None
    return [pattern for pattern in listed if isinstance(pattern, str)] if isinstance(listed, list) else []
