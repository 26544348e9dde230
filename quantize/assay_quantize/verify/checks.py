"""The checks behind `verify` that need no weights: what is stored, fused scales, config, ignore list, MTP."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from compressed_tensors.utils.match import match_name

from assay.recipes.families import names_of
from assay.recipes.runtime_names import packed_modules
from assay.records.plan import Plan, TensorPlan
from assay_quantize.checkpoint.headers import TensorHeader
from assay_quantize.formats.config_groups import config_json
from assay_quantize.formats.schemes import SHARES_GLOBAL_SCALE, module_of
from assay_quantize.formats.targets import targets_by_scheme
from assay_quantize.formats.vllm_rules import MixedSchemes, group_of, runtime_modules
from assay_quantize.verify.files import StoredReader
from assay_quantize.verify.findings import Findings


# ------------------------------------------------------------------------------------------------ tensors
def check_planned(plan: Plan, stored: Mapping[str, TensorHeader], findings: Findings, *, shards: bool) -> None:
    """Every planned output is stored, as planned, and nothing else is. shards: also in the planned file."""
    planned = set()
    for tensor in plan.tensors:
        check = "router_bias" if tensor.part == "router_bias" else "tensors"
        for output in tensor.outputs:
            planned.add(output.name)
            findings.look(check)
            header = stored.get(output.name)
            want = f"{output.dtype} {list(output.shape)}"
            if header is None:
                findings.damage(check, output.name, f"is in no shard; planned: {want} in {tensor.shard_out}")
            elif (header.dtype, header.shape) != (output.dtype, tuple(output.shape)):
                findings.damage(check, output.name, f"is {header.dtype} {list(header.shape)}; planned: {want}")
            elif shards and header.shard != tensor.shard_out:
                findings.damage(check, output.name, f"is in {header.shard}; planned: {tensor.shard_out}")
    for name in stored:
        if name not in planned:
            findings.damage("tensors", name, f"is in {stored[name].shard}, but nothing in the plan makes it")


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
        findings.look("fused_scales")
        if len(set(scales.values())) > 1:
            listed = ", ".join(f"{name.split('.')[-2]} {scale:g}" for name, scale in scales.items())
            findings.damage("fused_scales", next(iter(scales)), f"members of {group} differ: {listed}")


# ------------------------------------------------------------------------------------------------ config
def check_config(plan: Plan, config: Mapping[str, Any], findings: Findings) -> None:
    """config.json says what the plan says; only `ignore` may be worded in another way (`check_ignore` judges it)."""
    want = config_json(plan)
    for key in sorted({*want, *config} - {"quantization_config"}):
        findings.look("config")
        if config.get(key) != want.get(key):
            findings.damage("config", f"config.json: {key}", f"is {config.get(key)!r}; expected {want.get(key)!r}")
    quantization = config.get("quantization_config")
    if not isinstance(quantization, dict):
        findings.damage("config", "config.json: quantization_config", "is missing: a loader would take packed weights as plain")
        return
    expected = want["quantization_config"]
    for key in sorted({*expected, *quantization} - {"ignore", "version"}):
        findings.look("config")
        if quantization.get(key) != expected.get(key):
            got, planned = quantization.get(key), expected.get(key)
            findings.damage("config", f"config.json: quantization_config.{key}", f"is {got!r}; expected {planned!r}")
        elif key == "config_groups" and list(quantization[key]) != list(expected[key]):
            stored_order, planned_order = ", ".join(quantization[key]), ", ".join(expected[key])
            what = f"are in the order {stored_order}; expected {planned_order}: loaders take the first that fits"
            findings.damage("config", f"config.json: quantization_config.{key}", what)


def check_ignore(plan: Plan, config: Mapping[str, Any], findings: Findings) -> None:
    """The ignore list: by compressed-tensors' matcher every unquantized linear is in it and no quantized one; by vLLM's rules,
    which the planner replays as well, fused members agree."""
    quantization = config.get("quantization_config")
    quantization = quantization if isinstance(quantization, dict) else {}
    ignore = [pattern for pattern in _list_in(quantization, "ignore") if isinstance(pattern, str)]
    groups = quantization.get("config_groups")
    listed = groups.items() if isinstance(groups, dict) else ()
    targets = {str(t): str(name) for name, g in listed if isinstance(g, dict) for t in _list_in(g, "targets")}
    matrices = [t for t in plan.tensors if t.outputs and len(t.shape) == 2 and t.name.endswith(".weight")]
    try:
        _check_modules(matrices, ignore, findings)
        _check_runtime(plan, matrices, ignore, targets, findings)
    except re.error as problem:
        findings.damage("ignore", "config.json: quantization_config.ignore", f"{problem.pattern!r} is no pattern: {problem}")


def _list_in(data: Mapping[str, Any], key: str) -> list[Any]:
    """The list under `key`; empty where something else stands there, which `check_config` finds."""
    found = data.get(key)
    return found if isinstance(found, list) else []


def _check_modules(matrices: Iterable[TensorPlan], ignore: list[str], findings: Findings) -> None:
    for tensor in matrices:
        if tensor.part == "embedding":
            continue  # not a Linear: no config group targets it
        findings.look("ignore")
        covered = next((pattern for pattern in ignore if match_name(tensor.module, pattern)), None)
        if tensor.scheme is not None and covered is not None:
            findings.damage("ignore", tensor.module, f"is quantized, but the ignore list covers it: {covered!r}")
        elif tensor.scheme is None and covered is None:
            what = "is stored unquantized, but nothing in the ignore list covers it: a loader would look for packed weights"
            findings.damage("ignore", tensor.module, what)


def _check_runtime(
    plan: Plan, matrices: list[TensorPlan], ignore: list[str], targets: Mapping[str, str], findings: Findings
) -> None:  # fmt: skip
    scheme_of = {tensor.module: tensor.scheme for tensor in matrices}
    fused = packed_modules(plan.family)
    schemes = dict(enumerate(targets_by_scheme(plan.tensors, names_of(plan.family).runtime_namer(plan.config))))
    in_group = {f"group_{number}": scheme for number, scheme in schemes.items()}
    for module in runtime_modules(plan.family, scheme_of, plan.config):
        findings.look("runtime")
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
        expects, have = None if group is None else in_group.get(group, group), stored.pop()
        if expects != have:
            what = f"vLLM expects {expects or 'plain'} weights for it, stored are {have or 'plain'} ones"
            findings.damage("runtime", module.name, what)
