"""vLLM's rules for "is this module quantized?", replayed in pure Python: what a config.json really says at run time.

vLLM (0.32, `quantization/compressed_tensors/utils.py` and `quantization/utils/config_utils.py`) names modules its own way:
q/k/v become `qkv_proj`, gate/up `gate_up_proj`, the experts of a layer one module judged by expert 0 alone, the MTP head
`model.layers.N.head`. A pattern `re:X` matches by `re.match`, so anchored in front only: `re:model.layers.1` also hits
`model.layers.10`. Some modules never get a quantization config (`eh_proj`, most routers): their weights must be plain.
Nothing here imports vllm; a test compares every answer with vLLM's own functions.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from assay.recipes.family import Form
from assay.recipes.family_names import asked_of_vllm, form_of, names_of
from assay.recipes.runtime_names import packed_modules
from assay.recipes.text_config import text_of

ModuleKind = Literal["linear", "experts", "lm_head", "embedding", "plain"]

_EXPERT = re.compile(r"(?P<experts>.+)\.\d+\.\w+")


class RuntimeModule(NamedTuple):
    """One module of vLLM. `members`: the checkpoint's modules loaded into it; `judged_by`: names the patterns see."""

    name: str
    kind: ModuleKind
    judged_by: tuple[str, ...]
    members: tuple[str, ...]


class MixedSchemes(ValueError):
    """Members of one fused module disagree: vLLM refuses to start."""


def matches(name: str, pattern: str) -> bool:
    """vLLM's `is_equal_or_regex_match`: exact, or `re.match` (a prefix match) after `re:`."""
    return re.match(pattern[3:], name) is not None if pattern.startswith("re:") else pattern == name


def is_ignored(name: str, ignore: Sequence[str], fused: Mapping[str, Sequence[str]]) -> bool:
    """vLLM's `should_ignore_layer` for a runtime name. Raises MixedSchemes where vLLM raises ValueError."""
    if any(matches(name, pattern) for pattern in ignore):
        return True
    last = name.rpartition(".")[2]
    if last not in fused:
        return False
    # str.replace, like vLLM: every occurrence of the fused name, not only the last component
    ignored = [any(matches(name.replace(last, part), pattern) for pattern in ignore) for part in fused[last]]
    if any(ignored) and not all(ignored):
        parts = ", ".join(part for part, is_part in zip(fused[last], ignored, strict=True) if is_part)
        raise MixedSchemes(f"the ignore list covers only {parts} of {name}; vLLM refuses to start")
    return all(ignored)


def runtime_modules(family: str, modules: Iterable[str], config: Mapping[str, Any]) -> tuple[RuntimeModule, ...]:
    """vLLM's modules for the checkpoint's modules that hold a 2-D weight, in the order first met.

    config: the model's config.json (MLA fuses q_a and kv_a only when `q_lora_rank` is set).
    """
    fused, names = set(packed_modules(family)), names_of(family)
    rename = names.runtime_namer(config)
    if text_of(config).get("q_lora_rank") is None:
        fused.discard("fused_qkv_a_proj")
    members: dict[tuple[str, ModuleKind], list[str]] = {}
    for module in modules:
        form = form_of(family, f"{module}.weight", config)
        members.setdefault(_runtime_name(rename(module), form, fused), []).append(module)
    leaves = asked_of_vllm("experts.{expert}", names.projections)
    return tuple(
        RuntimeModule(name, kind, tuple(f"{name}.0.{leaf}" for leaf in leaves) if kind == "experts" else (name,), tuple(parts))
        for (name, kind), parts in members.items()
    )


def _runtime_name(module: str, form: Form, fused: Collection[str]) -> tuple[str, ModuleKind]:
    if form.part == "routed_expert" and (expert := _EXPERT.fullmatch(module)):
        return expert["experts"], "experts"
    if form.part == "lm_head":
        return module, "lm_head"
    if form.part == "embedding":
        return module, "embedding"
    if form.kind == "bare":
        return module, "plain"
    if form.fused in fused:
        return f"{module.rpartition('.')[0]}.{form.fused}", "linear"
    return module, "linear"


def group_of(
    module: RuntimeModule, ignore: Sequence[str], targets: Mapping[str, str], fused: Mapping[str, Sequence[str]]
) -> str | None:
    """The config group by which vLLM loads `module`; None: it expects plain weights.

    targets: of all config groups, in their order -> the group. `Linear` is a class name and covers linears and experts, but
    neither embeddings nor output heads, which need a target of their own name. Of a fused module vLLM asks only whether every
    member has a target, and takes that of the first. Raises MixedSchemes where vLLM would refuse to start.
    """
    if module.kind == "plain":
        return None
    ignored = {name: is_ignored(name, ignore, fused) for name in module.judged_by}
    groups = {name: None if ignored[name] else _group_of_name(name, module.kind, targets, fused) for name in module.judged_by}
    if len(set(groups.values())) > 1 and any(ignored.values()):
        raise MixedSchemes(f"the ignore list covers only some projections of {module.name}; vLLM refuses to start")
    if len(set(groups.values())) > 1:
        listed = ", ".join(f"{name} by {group}" for name, group in groups.items())
        raise MixedSchemes(
            f"the projections of {module.name} must have one scheme, config_groups says {listed}; vLLM refuses to start"
        )
    return groups[module.judged_by[0]]


def _group_of_name(
    name: str, kind: ModuleKind, targets: Mapping[str, str], fused: Mapping[str, Sequence[str]]
) -> str | None:  # fmt: skip
    """vLLM's `find_matched_target`: by name, then by the names of all members, then by class."""
    by_name = next((group for target, group in targets.items() if matches(name, target)), None)
    if by_name is not None:
        return by_name
    last = next((fused_name for fused_name in fused if name.endswith(fused_name)), None)
    if last is not None:
        members = [name.replace(last, part) for part in fused[last]]
        groups = [next((g for t, g in targets.items() if matches(member, t)), None) for member in members]
        if None not in groups:
            return groups[0]
    return targets.get("Linear") if kind in ("linear", "experts") else None
