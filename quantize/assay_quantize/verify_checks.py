"""The checks behind `verify`, each a function that adds what it finds: contents, scales, config, ignore list, MTP."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from assay.errors import QuantizeError
from assay.families import NAMES, declared_mtp_layers, num_experts, num_hidden_layers
from assay.records import Plan, TensorPlan
from assay_quantize.checkpoint import Checkpoint, TensorHeader
from assay_quantize.kernels import dequantize_weight, relative_error
from assay_quantize.publish import config_json
from assay_quantize.schemes import SCHEMES, SHARES_GLOBAL_SCALE, module_of
from assay_quantize.shards import bytes_tensor, cast, read_tensor
from assay_quantize.verify import Findings
from assay_quantize.vllm_rules import FAMILY_RULES, MixedSchemes, loads_quantized, matches, runtime_modules


def same_bytes(left: memoryview, right: memoryview) -> bool:
    """Byte equality, at memory speed."""
    if len(left) != len(right):
        return False
    return not len(left) or torch.equal(bytes_tensor(left), bytes_tensor(right))


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


def check_contents(plan: Plan, made: Checkpoint, source: Checkpoint | None, findings: Findings) -> None:
    """Kept tensors byte for byte, quantized ones by scales and dequantized error. Tensors that are not as planned are skipped:
    `check_planned` has named them."""
    for tensor in plan.tensors:
        headers = [made.tensors.get(output.name) for output in tensor.outputs]
        fits = [
            h is not None and (h.dtype, h.shape) == (o.dtype, tuple(o.shape))
            for h, o in zip(headers, tensor.outputs, strict=True)
        ]
        if not tensor.outputs or not all(fits):
            continue
        if tensor.action == "quantize":
            _check_quantized(tensor, made, source, findings)
        elif source is not None:
            _check_kept(tensor, made, source, findings)


def _check_kept(tensor: TensorPlan, made: Checkpoint, source: Checkpoint, findings: Findings) -> None:
    (output,) = tensor.outputs
    findings.look("kept")
    if tensor.action == "keep":
        if same_bytes(made.read(output.name), source.read(tensor.name)):
            return
        want = read_tensor(source, tensor.name)
    else:
        try:
            want = cast(read_tensor(source, tensor.name), output)
        except QuantizeError as problem:
            findings.damage("kept", output.name, str(problem))
            return
    got = read_tensor(made, output.name)
    differ = int((got.reshape(-1).view(torch.uint8) != want.reshape(-1).view(torch.uint8)).sum())
    if differ:
        how = "copied unchanged" if tensor.action == "keep" else f"the source's, cast to {output.dtype}"
        findings.damage("kept", output.name, f"{differ} of {output.num_bytes} bytes differ; it must be {how}")


def _check_quantized(tensor: TensorPlan, made: Checkpoint, source: Checkpoint | None, findings: Findings) -> None:
    assert tensor.scheme is not None
    module = module_of(tensor.name)
    parts = {output.name.removeprefix(f"{module}."): read_tensor(made, output.name) for output in tensor.outputs}
    before = len(findings.damages)
    for part in ("weight_scale", "weight_global_scale"):
        if part in parts:
            findings.look("scales")
            if problem := _scale_problem(parts[part]):
                findings.damage("scales", f"{module}.{part}", problem)
    shape = parts.get("weight_shape")
    if shape is not None and shape.tolist() != list(tensor.shape):
        findings.damage("tensors", f"{module}.weight_shape", f"says {shape.tolist()}, the weight is {list(tensor.shape)}")
    if len(findings.damages) > before:
        return
    findings.look("weights")
    w_OI = dequantize_weight(parts, tensor.scheme, torch.float32)
    if broken := int((~torch.isfinite(w_OI)).sum()):
        findings.damage("weights", tensor.name, f"{broken} of {w_OI.numel()} dequantized weights are NaN or infinite")
    elif source is not None:
        findings.look("error")
        error = relative_error(w_OI, read_tensor(source, tensor.name))
        findings.errors_by_role[tensor.role].append(error)
        bound = SCHEMES[tensor.scheme].max_relative_error
        if not error <= bound:
            findings.damage("error", tensor.name, f"is {error:.3f} away from its source (relative, allowed: {bound}); "
                            "weights of another layer are 1.41 away")  # fmt: skip


def _scale_problem(scale: Tensor) -> str | None:
    if scale.dtype == torch.uint8:  # power-of-two exponents; 255 is NaN
        broken = int((scale == 255).sum())
        return f"{broken} of {scale.numel()} scales are NaN" if broken else None
    values = scale.float()
    for what, wrong in (("NaN or infinite", ~torch.isfinite(values)), ("zero", values == 0), ("negative", values < 0)):
        if count := int(wrong.sum()):
            return f"{count} of {scale.numel()} scales are {what}"
    return None


def check_fused_scales(plan: Plan, made: Checkpoint, findings: Findings) -> None:
    """NVFP4: one global scale per fused group, because vLLM applies the first member's to all."""
    groups: dict[str, dict[str, float]] = defaultdict(dict)
    for tensor in plan.tensors:
        name = f"{module_of(tensor.name)}.weight_global_scale"
        header = made.tensors.get(name)
        if tensor.scheme not in SHARES_GLOBAL_SCALE or tensor.fused_group is None or header is None:
            continue
        if (header.dtype, header.shape) == ("F32", (1,)):
            groups[tensor.fused_group][module_of(tensor.name)] = float(read_tensor(made, name).item())
    for group, scales in groups.items():
        findings.look("fused_scales")
        if len(set(scales.values())) > 1:
            listed = ", ".join(f"{module.rpartition('.')[2]} {scale:g}" for module, scale in scales.items())
            findings.damage("fused_scales", f"{next(iter(scales))}.weight_global_scale", f"members of {group} differ: {listed}")


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


def check_ignore(plan: Plan, config: Mapping[str, Any], findings: Findings) -> None:
    """The ignore list, by vLLM's own rules: every unquantized linear is in it, no quantized one, fused members agree."""
    quantization = config.get("quantization_config")
    quantization = quantization if isinstance(quantization, dict) else {}
    ignore = [pattern for pattern in quantization.get("ignore") or [] if isinstance(pattern, str)]
    groups = quantization.get("config_groups")
    listed = groups.values() if isinstance(groups, dict) else ()
    targets = [t for group in listed if isinstance(group, dict) for t in group.get("targets") or []]
    matrices = [t for t in plan.tensors if t.outputs and len(t.shape) == 2 and t.name.endswith(".weight")]
    try:
        _check_modules(matrices, ignore, findings)
        _check_runtime(plan, matrices, ignore, targets, findings)
    except re.error as problem:
        findings.damage("ignore", "config.json: quantization_config.ignore", f"{problem.pattern!r} is no pattern: {problem}")


def _check_modules(matrices: Iterable[TensorPlan], ignore: list[str], findings: Findings) -> None:
    for tensor in matrices:
        if tensor.part == "embedding":
            continue  # not a Linear: no config group targets it
        findings.look("ignore")
        covered = next((pattern for pattern in ignore if matches(tensor.module, pattern)), None)
        if tensor.action == "quantize" and covered is not None:
            findings.damage("ignore", tensor.module, f"is quantized, but the ignore list covers it: {covered!r}")
        elif tensor.action != "quantize" and covered is None:
            what = "is stored unquantized, but nothing in the ignore list covers it: a loader would look for packed weights"
            findings.damage("ignore", tensor.module, what)


def _check_runtime(plan: Plan, matrices: list[TensorPlan], ignore: list[str], targets: list[str], findings: Findings) -> None:
    is_quantized = {tensor.module: tensor.action == "quantize" for tensor in matrices}
    fused = FAMILY_RULES[plan.family].fused
    for module in runtime_modules(plan.family, is_quantized, plan.config):
        findings.look("runtime")
        stored = {is_quantized[member] for member in module.members}
        if len(stored) > 1:
            findings.damage(
                "runtime", module.name, "some of its members are quantized and some are not; vLLM loads them as one"
            )
            continue
        try:
            expects = loads_quantized(module, ignore, targets, fused)
        except MixedSchemes as problem:
            findings.damage("runtime", module.name, str(problem))
            continue
        if expects != stored.pop():
            want, have = ("packed", "plain") if expects else ("plain", "packed")
            findings.damage("runtime", module.name, f"vLLM expects {want} weights for it, stored are {have} ones")


# ------------------------------------------------------------------------------------------------ MTP
def check_mtp(family: str, config: Mapping[str, Any], stored: Iterable[str], findings: Findings) -> None:
    """The MTP block is whole, or absent and declared so; judged from config and names alone.

    stored: names as the source has them (`weight`, not `weight_packed`). vLLM loads a block with missing experts without a
    word and drafts noise, and it shares a missing head or embedding from the model.
    """
    layers = num_hidden_layers(config)
    by_layer: dict[str, set[str]] = defaultdict(set)
    for name in stored:
        prefix, _, rest = _split_layer(name)
        by_layer[prefix].add(rest)
    declared = declared_mtp_layers(config)
    inlined = not NAMES[family].mtp
    root = "model.layers" if inlined else "mtp.layers"
    first = layers if inlined else 0
    present = sorted(int(p.rpartition(".")[2]) for p in by_layer if p.startswith(f"{root}.") and _number(p) >= first)
    count = len(present) if declared is None else declared
    for layer in present:
        if layer >= first + count:
            what = f"holds an MTP block, but config.json declares {count} MTP layers"
            findings.damage("mtp", f"{root}.{layer}", what)
    main = [rests for p, rests in by_layer.items() if p.startswith("model.layers.") and _number(p) < layers]
    for layer in range(first, first + count):
        _check_mtp_block(family, config, f"{root}.{layer}", by_layer, main, findings)


def _check_mtp_block(
    family: str,
    config: Mapping[str, Any],
    prefix: str,
    by_layer: Mapping[str, set[str]],
    main: list[set[str]],
    findings: Findings,
) -> None:
    have = by_layer.get(prefix, set())
    if not have:
        findings.damage("mtp", prefix, "is declared in config.json (MTP), but no shard holds any tensor of it")
        return
    wanted: set[str] = set()
    moe = [rests for rests in main if "mlp.experts.0.gate_proj.weight" in rests]
    if moe:  # the decoder layer most like it: attention kinds differ between layers in some families
        wanted |= min(moe, key=lambda rests: len(rests - have))
    for expert in range(num_experts(family, config)):
        wanted |= {f"mlp.experts.{expert}.{p}_proj.weight" for p in ("gate", "up", "down")}
    required = NAMES[family].mtp_required
    inlined = not NAMES[family].mtp
    wanted |= set(required) if inlined else set()
    missing = [f"{prefix}.{rest}" for rest in sorted(wanted - have)]
    if not inlined:
        missing += sorted(set(required) - by_layer.get("", set()))
    findings.look("mtp", len(wanted))
    for name in missing:
        findings.damage("mtp", name, "is missing from the MTP block: vLLM would load it and draft noise")


def _split_layer(name: str) -> tuple[str, str, str]:
    found = re.match(r"((?:model|mtp)\.layers\.\d+)\.(.+)", name)
    return (found[1], ".", found[2]) if found else ("", "", name)


def _number(prefix: str) -> int:
    return int(prefix.rpartition(".")[2])
