"""Headers + config + precision recipe -> what will happen to every tensor. Reads no weights, imports no torch.

Every tensor gets one action (`tensor_plans.py`). What cannot work fails here, before the first byte is written: unknown
tensors, groups that do not divide, an MTP block that is declared and absent, ignore patterns that would not say what was done.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from assay.errors import PlanError
from assay.recipes.families import Classified, classify, family_of, ignore_patterns, names_of, num_hidden_layers
from assay.recipes.mtp import stored_layers
from assay.recipes.precision import ROLES, PrecisionRecipe, layer_numbers
from assay.recipes.runtime_names import fused_members, packed_modules
from assay.records.plan import Plan, TensorPlan
from assay_quantize.checkpoint.checkpoint import Checkpoint
from assay_quantize.checkpoint.headers import TensorHeader
from assay_quantize.checkpoint.source_format import Companions, find_companions
from assay_quantize.formats.schemes import check_shape
from assay_quantize.formats.targets import kept_in_some_layers, targets_by_scheme
from assay_quantize.formats.vllm_rules import MixedSchemes, RuntimeModule, group_of, runtime_modules
from assay_quantize.plan.cache_scales import cache_scales
from assay_quantize.plan.completeness import check_layers, check_mtp
from assay_quantize.plan.tensor_plans import Treatment, action_of, carried_weights, scale_plan, tensor_plan


def make_plan(checkpoint: Checkpoint, recipe: PrecisionRecipe, *, model: str, family: str | None) -> Plan:
    """The plan for one checkpoint and one precision.

    model: its name in records. family: what the model recipe says; None: read from the config. Raises PlanError.
    """
    _check_recipe(recipe)
    found = family_of(checkpoint.config)
    if family is not None and family != found:
        raise PlanError(
            f"{checkpoint.location}: its config.json is of family {found}, the model recipe says {family}; correct the recipe"
        )
    companions = find_companions(checkpoint.location, checkpoint.config, checkpoint.tensors)
    classified = {
        name: classify(found, name, checkpoint.config) for name in checkpoint.tensors if name not in companions.weight_of
    }
    inlined = names_of(found).mtp_layers is None
    mtp_layers = stored_layers(found, checkpoint.config, classified) if inlined else ()
    check_layers(checkpoint.location, found, classified, checkpoint.config)
    if recipe.mtp != "drop":
        check_mtp(checkpoint.location, found, classified, checkpoint.config)
    tensors = _tensor_plans(found, checkpoint, classified, companions, recipe)
    if not any(tensor.scheme is not None for tensor in tensors):
        raise PlanError(f"precision {recipe.name}: nothing in {checkpoint.location} is quantized; name roles under `quantize`")
    plan = Plan(
        model=model,
        precision=recipe.name,
        family=found,
        source=checkpoint.location,
        source_sha256=checkpoint.sha256,
        source_revision=checkpoint.revision,
        source_files=dict(checkpoint.data),
        recipe_sha256=recipe.sha256,
        precision_recipe=recipe.model_dump(mode="json", by_alias=True),
        config=checkpoint.config,
        mtp_layers=mtp_layers,
        ignore=_ignore(found, recipe, checkpoint.config, tensors),
        tensors=tensors,
    )
    check_ignore(plan)
    return plan


def _tensor_plans(
    family: str,
    checkpoint: Checkpoint,
    classified: Mapping[str, Classified],
    companions: Companions,
    recipe: PrecisionRecipe,
) -> tuple[TensorPlan, ...]:
    """The plan of every tensor, in the checkpoint's order."""
    carried = carried_weights(checkpoint, classified, companions, recipe)
    actions = {
        name: action_of(checkpoint.tensors[name], what, recipe, companions.scale_of.get(name), name in carried)
        for name, what in classified.items()
    }
    _check_layers_named(checkpoint, recipe)
    _check_shapes(family, checkpoint, classified, actions)
    beside = {of for of, weight in companions.weight_of.items() if weight in carried and of not in companions.of_activations}
    shard_out = _output_shards(checkpoint, actions, beside)
    plans = []
    for name, header in checkpoint.tensors.items():
        out = shard_out[header.shard]
        if (weight := companions.weight_of.get(name)) is None:
            plans.append(tensor_plan(header, classified[name], actions[name], out, companions.scale_of.get(name)))
        else:
            unused = name in companions.of_activations
            plans.append(scale_plan(header, classified[weight], actions[weight], out, of_activations=unused))
    return (*plans, *cache_scales(recipe, {plan.name: plan for plan in plans}, checkpoint.location))


def _check_layers_named(checkpoint: Checkpoint, recipe: PrecisionRecipe) -> None:
    """Every layer under `layers` is one of the model's."""
    count = num_hidden_layers(checkpoint.config)
    for text in recipe.layers:
        if (last := max(layer_numbers(text))) >= count:
            raise PlanError(
                f"precision {recipe.name}: layers.{text}: there is no layer {last}; {checkpoint.location} has layers 0 to "
                f"{count - 1} (the MTP block is quantized by `mtp: quantize`)"
            )


def tensor_plans_of(checkpoint: Checkpoint, recipe: PrecisionRecipe) -> tuple[TensorPlan, ...]:
    """What a plan says of every tensor; shapes must fit. Whether the source is whole, and vLLM's rules, are not looked at."""
    family = family_of(checkpoint.config)
    companions = find_companions(checkpoint.location, checkpoint.config, checkpoint.tensors)
    weights = (name for name in checkpoint.tensors if name not in companions.weight_of)
    classified = {name: classify(family, name, checkpoint.config) for name in weights}
    return _tensor_plans(family, checkpoint, classified, companions, recipe)


def check_shapes_of(checkpoint: Checkpoint, recipe: PrecisionRecipe) -> None:
    """PlanError naming the first weight whose shape does not fit the recipe; nothing else of a plan is looked at."""
    family = family_of(checkpoint.config)
    companions = find_companions(checkpoint.location, checkpoint.config, checkpoint.tensors)
    weights = (name for name in checkpoint.tensors if name not in companions.weight_of)
    classified = {name: classify(family, name, checkpoint.config) for name in weights}
    carried = carried_weights(checkpoint, classified, companions, recipe)
    actions = {
        name: action_of(checkpoint.tensors[name], what, recipe, companions.scale_of.get(name), name in carried)
        for name, what in classified.items()
    }
    _check_shapes(family, checkpoint, classified, actions)


def _check_recipe(recipe: PrecisionRecipe) -> None:
    if "lm_head" in recipe.quantize:
        raise PlanError(
            f"precision {recipe.name}: lm_head cannot be quantized: vLLM's quantization target `Linear` does not cover it; "
            "move it to `keep: {bf16: [...]}`"
        )


# ------------------------------------------------------------------------------------------------ shapes
def _check_shapes(
    family: str,
    checkpoint: Checkpoint,
    classified: Mapping[str, Classified],
    actions: Mapping[str, Treatment],
) -> None:
    """Group sizes divide; members of a fused group agree in action, source dtype and columns.

    In a fused parameter another weight follows every member but the last one (`runtime_names.fused_members`).
    """
    groups: dict[str, list[TensorHeader]] = defaultdict(list)
    for name, found in classified.items():
        if found.fused_group is not None:
            groups[found.fused_group].append(checkpoint.tensors[name])
    followed: set[str] = set()
    fused_of_family = fused_members(family)
    for group, members in groups.items():
        how = {(*_must_agree(actions[m.name]), m.shape[-1:]) for m in members}
        if len(how) > 1:
            each = ", ".join(f"{m.name} {actions[m.name].action} {m.dtype} {list(m.shape)}" for m in members)
            raise PlanError(f"{group}: vLLM loads its members into one parameter, but they disagree: {each}")
        last = fused_of_family[group.rpartition(".")[2]][-1]
        followed |= {member.name for member in members if member.name.split(".")[-2] != last}
    for name, done in actions.items():
        if done.scheme is not None:
            check_shape(done.scheme, name, checkpoint.tensors[name].shape, merged=name in followed)


def _must_agree(done: Treatment) -> tuple[str, str | None, str | None]:
    """What must be alike in a fused parameter: the scheme, and the dtype it starts from; for what stays plain, that it does."""
    if done.scheme is not None:
        return done.action, done.dtype, done.scheme
    return ("drop" if done.action == "drop" else "plain"), None, None


# ------------------------------------------------------------------------------------------------ shards
def _output_shards(
    checkpoint: Checkpoint, actions: Mapping[str, Treatment], kept_beside: Collection[str]
) -> dict[str, str | None]:  # fmt: skip
    """Source shard -> output shard: one for one, renumbered where dropped or consumed tensors leave a shard empty (None).

    kept_beside: scales and shapes that are kept with their weight.
    """
    written = [*(name for name, done in actions.items() if done.action != "drop"), *kept_beside]
    alive = {checkpoint.tensors[name].shard for name in written}
    kept = sorted(alive, key=lambda shard: (not PurePosixPath(shard).stem.startswith("model"), shard))
    numbers = {shard: f"model-{i + 1:05d}-of-{len(kept):05d}.safetensors" for i, shard in enumerate(kept)}
    return {shard: numbers.get(shard) for shard in checkpoint.shards}


# ------------------------------------------------------------------------------------------------ ignore list
def _ignore(family: str, recipe: PrecisionRecipe, config: Mapping[str, Any], tensors: Sequence[TensorPlan]) -> tuple[str, ...]:
    """The family's patterns that match a module of this checkpoint, by its name here or in vLLM; the others are dropped."""
    rename, stored = names_of(family).runtime_namer(config), {t.module for t in tensors if t.action != "drop"}
    numbers = stored_layers(family, config, stored)
    if names_of(family).mtp_runtime_layers is not None:
        numbers = tuple(num_hidden_layers(config) + number for number in numbers)
    patterns = ignore_patterns(family, recipe.quantize, mtp=recipe.mtp, mtp_layers=numbers)
    modules = sorted(stored | set(map(rename, stored)))
    found = tuple(p for p in patterns if any(re.match(p.removeprefix("re:"), module) for module in modules))
    return found + kept_in_some_layers(tensors, rename, tuple(recipe.quantize))


def check_ignore(plan: Plan) -> None:
    """Ignore list and config groups say exactly what was done, also under vLLM's fused names. PlanError names the module."""
    any_pattern = re.compile("|".join(f"(?:{pattern.removeprefix('re:')})" for pattern in plan.ignore) or r"(?!)")
    scheme_of: dict[str, str | None] = {}
    for tensor in plan.tensors:
        if tensor.action == "drop" or len(tensor.shape) < 2 or not tensor.name.endswith(".weight"):
            continue
        scheme_of[tensor.module], quantized = tensor.scheme, tensor.scheme is not None
        if quantized == (any_pattern.match(tensor.module) is not None):
            verb = "quantized, but the ignore list covers it" if quantized else "kept, but the ignore list misses it"
            raise PlanError(f"{tensor.module}: {verb}: {_matching(plan.ignore, tensor.module)}")
    fused = packed_modules(plan.family)
    by_scheme = targets_by_scheme(plan.tensors, names_of(plan.family).runtime_namer(plan.config))
    targets = {target: scheme for scheme, found in by_scheme.items() for target in found}
    for runtime in runtime_modules(plan.family, scheme_of, plan.config):
        if runtime.kind == "plain":
            continue
        _check_agree(runtime, scheme_of)
        try:
            expected = group_of(runtime, plan.ignore, targets, fused)
        except MixedSchemes as error:
            raise PlanError(str(error)) from None
        planned = scheme_of[runtime.members[0]]
        if expected != planned:
            raise PlanError(
                f"{runtime.members[0]} is {planned or 'kept'}, but vLLM would load {runtime.name} as "
                f"{expected or 'unquantized'}: {', '.join((*plan.ignore, *targets))}"
            )


def _check_agree(runtime: RuntimeModule, scheme_of: Mapping[str, str | None]) -> None:
    """The members of one parameter of vLLM, all experts of a layer among them, have one scheme."""
    first = runtime.members[0]
    other = next((member for member in runtime.members if scheme_of[member] != scheme_of[first]), None)
    if other is not None:
        each = ", ".join(f"{member} is {scheme_of[member] or 'kept'}" for member in (first, other))
        raise PlanError(f"vLLM loads the weights of {runtime.name} with one scheme, but {each}; give both the same scheme")


def _matching(patterns: Iterable[str], module: str) -> str:
    hits = [pattern for pattern in patterns if re.match(pattern.removeprefix("re:"), module)]
    return ", ".join(hits) if hits else "no pattern matches"


# ------------------------------------------------------------------------------------------------ sums
def bytes_by_role(plan: Plan) -> dict[str, tuple[int, int, int]]:
    """Role -> (number of tensors, bytes in, bytes out), in the order of `assay.recipes.precision.ROLES`, then `other`."""
    counts: Counter[str] = Counter()
    bytes_in: Counter[str] = Counter()
    bytes_out: Counter[str] = Counter()
    for tensor in plan.tensors:
        counts[tensor.role] += 1
        bytes_in[tensor.role] += tensor.num_bytes
        bytes_out[tensor.role] += sum(output.num_bytes for output in tensor.outputs)
    return {role: (counts[role], bytes_in[role], bytes_out[role]) for role in (*ROLES, "other") if counts[role]}
