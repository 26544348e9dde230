"""Headers + config + precision recipe -> what will happen to every tensor. Reads no weights, imports no torch.

Every tensor gets one action (`tensor_plans.py`). What cannot work fails here, before the first byte is written: a source that
is not whole, unknown tensors, groups that do not divide, ignore patterns that would not say what was done.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from assay.errors import PlanError
from assay.quantities import and_more
from assay.recipes.calibrated.texts import without_folders
from assay.recipes.families import family_of, num_experts
from assay.recipes.family_names import Classified, classify, ignore_patterns, names_of, recorded_family, split_layer
from assay.recipes.load import load_recipe
from assay.recipes.mtp import draft_not_kept, mtp_problems, stored_layers
from assay.recipes.precision import ROLES, PrecisionRecipe, layer_numbers
from assay.recipes.runtime_names import fused_members, packed_modules
from assay.recipes.text_config import num_hidden_layers, text_of
from assay.records.base import sha256_of
from assay.records.plan import Plan, TensorPlan
from assay_quantize.checkpoint.checkpoint import Checkpoint
from assay_quantize.checkpoint.headers import TensorHeader
from assay_quantize.checkpoint.source_format import Companions, find_companions
from assay_quantize.formats.schemes import check_shape
from assay_quantize.formats.targets import kept_in_some_layers, targets_by_scheme
from assay_quantize.formats.vllm_rules import MixedSchemes, group_of, runtime_modules
from assay_quantize.plan.agreement import check_shapes_declared, rule_of_experts
from assay_quantize.plan.tensor_plans import (
    FLOATS,
    Treatment,
    action_of,
    cache_scales,
    carried_tables,
    carried_weights,
    scale_plan,
    tensor_plan,
)


def make_plan(checkpoint: Checkpoint, recipe: PrecisionRecipe, *, model: str, family: str | None) -> Plan:
    """The plan for one checkpoint and one precision.

    model: its name in records. family: what the model recipe says; None: read from the config. Raises PlanError.
    """
    if "lm_head" in recipe.quantize:
        raise PlanError(
            f"precision {recipe.name}: lm_head cannot be quantized: vLLM's quantization target `Linear` does not cover it; "
            "move it to `keep: {bf16: [...]}`"
        )
    source = _classify(checkpoint)
    if family is not None and names_of(family).name != source.family:
        raise PlanError(
            f"{checkpoint.location}: its config.json is of family {source.family}, the model recipe says {family}; correct the "
            "recipe"
        )
    inlined = names_of(source.family).mtp_layers is None
    mtp_layers = stored_layers(source.family, checkpoint.config, source.classified) if inlined else ()
    _check_layers(source)
    if recipe.mtp != "drop" and (draft := draft_not_kept(source.family, source.classified)) is not None:
        name, kind = draft
        raise PlanError(f"{checkpoint.location}: {name} is of {kind}, which is not kept; leave it out with `--mtp drop`")
    # vLLM loads a checkpoint that lacks MTP experts without a word and then drafts at 0 % acceptance
    problems = [] if recipe.mtp == "drop" else list(mtp_problems(source.family, checkpoint.config, source.classified))
    if problems:
        first, also = problems[0], f" (and {len(problems) - 1} more like this)" if len(problems) > 1 else ""
        raise PlanError(f"{checkpoint.location}: {first.where} {first.what}{also}; {first.mend}")
    tensors = _tensor_plans(source, recipe)
    declared = checkpoint.whole_config or checkpoint.config
    check_shapes_declared(checkpoint.location, source.family, declared, source.classified, checkpoint.tensors)
    _check_some_experts(source, recipe)
    _check_schemes_of_experts(source, recipe, tensors)
    if not any(tensor.scheme is not None for tensor in tensors):
        raise PlanError(f"precision {recipe.name}: nothing in {checkpoint.location} is quantized; name roles under `quantize`")
    plan = Plan(
        model=model,
        precision=recipe.name,
        family=source.family,
        own_family=recorded_family(source.family),
        source=checkpoint.location,
        source_sha256=checkpoint.sha256,
        source_revision=checkpoint.revision,
        source_files=dict(checkpoint.data),
        recipe_sha256=recipe.sha256,
        precision_recipe=recipe.model_dump(mode="json", by_alias=True),
        config=checkpoint.config,
        mtp_layers=mtp_layers,
        ignore=_ignore(source.family, recipe, checkpoint.config, tensors),
        tensors=tensors,
    )
    check_ignore(plan)
    return plan


class _Source(NamedTuple):
    """companions: which tensors are scales of others. classified: all the others."""

    checkpoint: Checkpoint
    family: str
    companions: Companions
    classified: dict[str, Classified]


def _classify(checkpoint: Checkpoint) -> _Source:
    family = family_of(checkpoint.config)
    companions = find_companions(checkpoint.location, checkpoint.config, checkpoint.tensors)
    weights = (name for name in checkpoint.tensors if name not in companions.weight_of)
    return _Source(checkpoint, family, companions, {name: classify(family, name, checkpoint.config) for name in weights})


def _actions(source: _Source, recipe: PrecisionRecipe) -> dict[str, Treatment]:
    """What happens to every tensor but scales. PlanError: a shape does not fit."""
    tensors, companions = source.checkpoint.tensors, source.companions
    carried = carried_weights(source.checkpoint, source.classified, companions, recipe)
    carried |= carried_tables(source.family, companions)
    actions = {
        name: action_of(tensors[name], what, recipe, companions.scale_of.get(name), name in carried)
        for name, what in source.classified.items()
    }
    _check_shapes(source, actions)
    return actions


def _tensor_plans(source: _Source, recipe: PrecisionRecipe) -> tuple[TensorPlan, ...]:
    """The plan of every tensor, in the checkpoint's order."""
    checkpoint, companions = source.checkpoint, source.companions
    count = num_hidden_layers(checkpoint.config)
    for text in recipe.layers:
        if (last := max(layer_numbers(text))) >= count:
            raise PlanError(
                f"precision {recipe.name}: layers.{text}: there is no layer {last}; {checkpoint.location} has layers 0 to "
                f"{count - 1} (the MTP block is quantized by `mtp: quantize`)"
            )
    actions = _actions(source, recipe)
    # scales and shapes that are kept with their weight
    kept_beside = (
        name
        for name, weight in companions.weight_of.items()
        if actions[weight].action == "keep" and name not in companions.of_activations
    )
    # source shard -> output shard: one for one, renumbered where dropped or consumed tensors leave a shard empty (None)
    written = [*(name for name, treatment in actions.items() if treatment.action != "drop"), *kept_beside]
    kept = sorted(
        {checkpoint.tensors[name].shard for name in written},
        key=lambda shard: (not PurePosixPath(shard).stem.startswith("model"), shard),
    )
    shard_out = {shard: f"model-{i + 1:05d}-of-{len(kept):05d}.safetensors" for i, shard in enumerate(kept)}
    plans = []
    for name, header in checkpoint.tensors.items():
        out = shard_out.get(header.shard)
        if (weight := companions.weight_of.get(name)) is None:
            plans.append(tensor_plan(header, source.classified[name], actions[name], out, companions.scale_of.get(name)))
        else:
            unused = name in companions.of_activations
            plans.append(scale_plan(header, source.classified[weight], actions[weight], out, of_activations=unused))
    added = cache_scales(recipe, {plan.name: plan for plan in plans}, checkpoint.location)
    again = {plan.name for plan in added}  # scales of its own KV cache, which a source may have
    return (*(plan for plan in plans if plan.name not in again), *added)


def tensor_plans_of(checkpoint: Checkpoint, recipe: PrecisionRecipe) -> tuple[TensorPlan, ...]:
    """What a plan says of every tensor; shapes must fit. Whether the source is whole, and vLLM's rules, are not looked at."""
    return _tensor_plans(_classify(checkpoint), recipe)


def check_shapes_of(checkpoint: Checkpoint, recipe: PrecisionRecipe) -> None:
    """PlanError naming the first weight whose shape does not fit the recipe; nothing else of a plan is looked at."""
    _actions(_classify(checkpoint), recipe)


# ------------------------------------------------------------------------------------------------ whether the source is whole
_KINDS: tuple[str | tuple[str, ...], ...] = (
    "linear_attn.", "self_attn.", "self_attn.indexer.", "self_attn.attention_sink_bias",
    ("mixer.in_proj.", "mixer.out_proj.", "mixer.conv1d.", "mixer.A_log", "mixer.D", "mixer.dt_bias"),
    "attn.compressor.", "attn.indexer.", "ffn.gate.tid2eid",
    ("mixer.q_proj.", "mixer.k_proj.", "mixer.v_proj.", "mixer.o_proj."),
)  # fmt: skip


def _check_layers(source: _Source) -> None:
    """Every decoder layer is there, has all experts, and has the tensors that the other layers of its kind have.

    Kinds are told apart by what they contain: experts or a dense MLP, full or linear attention, an indexer or none, sinks of a
    sliding window, a compressor, experts chosen by token; where a layer is one mixer, by what is in it.
    """
    where, config = source.checkpoint.location, source.checkpoint.config
    family, classified = source.family, source.classified
    layers: dict[int, list[str]] = defaultdict(list)
    for name, what in classified.items():
        if what.role != "mtp" and what.layer is not None:
            layers[what.layer].append(name)
    declared = num_hidden_layers(config)
    missing = sorted(set(range(declared)) - set(layers))
    if missing:
        raise PlanError(
            f"{where}: config.json declares {declared} layers, but there is no tensor of layer "
            f"{and_more(missing)}; complete the download"
        )
    kinds: dict[tuple[bool, ...], dict[int, set[str]]] = defaultdict(dict)
    told_by = (*_KINDS, *names_of(family).kinds)
    for layer, names in sorted(layers.items()):
        rest = {place.rest for name in names if classified[name].expert is None and (place := split_layer(name)) is not None}
        _check_experts(source, names, layer)
        has_experts = any(classified[name].expert is not None for name in names)
        kinds[(has_experts, *(any(r.startswith(p) for r in rest) for p in told_by))][layer] = rest
    for of_kind in kinds.values():
        union = set().union(*of_kind.values())
        for layer, rest in of_kind.items():
            if lacking := sorted(union - rest):
                other = next(number for number, names in of_kind.items() if lacking[0] in names)
                raise PlanError(f"{where}: layer {layer} has no {lacking[0]}, which layer {other} has; complete the download")
    outside = names_of(family).outside
    needed = [name for name, form in outside.items() if form.part in ("embedding", "norm")]
    if any(name not in classified for name in needed):
        raise PlanError(f"{where}: {' or '.join(needed)} is not there; complete the download")
    heads = [name for name, form in outside.items() if form.part == "lm_head" and name not in classified]
    if heads and not (config.get("tie_word_embeddings") or text_of(config).get("tie_word_embeddings")):
        raise PlanError(f"{where}: {heads[0]} is not there, and tie_word_embeddings is not set; complete the download")


def _check_experts(source: _Source, names: list[str], layer: int) -> None:
    """All experts 0..n-1 with all their projections, or none at all."""
    where, experts = source.checkpoint.location, num_experts(source.family, source.checkpoint.config)
    projections: dict[int, set[str]] = defaultdict(set)
    for name in names:
        expert = source.classified[name].expert
        if expert is not None:
            projections[expert].add(name.split(".")[-2])
    if not projections:
        return
    if beyond := sorted(projections.keys() - set(range(experts))):
        raise PlanError(
            f"{where}: layer {layer} has expert {beyond[0]}, config.json declares {experts} experts; correct the config"
        )
    for expert in range(experts):
        if lacking := [p for p in names_of(source.family).projections if p not in projections.get(expert, set())]:
            raise PlanError(
                f"{where}: layer {layer} has no {lacking[0]} of expert {expert}; {len(projections)} of {experts} experts are "
                "there; complete the download"
            )


def _check_some_experts(source: _Source, recipe: PrecisionRecipe) -> None:
    """Experts to be quantized are there by the family's names, unless config.json says that no layer has any."""
    if "routed_expert" not in recipe.quantize or any(
        what.part == "routed_expert" and what.linear for what in source.classified.values()
    ):
        return
    names = names_of(source.family)
    known = f"{names.layers}.LAYER.{names.experts}.EXPERT.{names.projections[0]}.weight" if names.projections else "none"
    stacked = [f"{name} {list(h.shape)}" for name, h in source.checkpoint.tensors.items() if len(h.shape) == 3]
    if (rule := rule_of_experts(source.checkpoint.config)) is not None and not rule[1] and not stacked:
        return
    stored = f"; stored in three dimensions, as experts of a layer may be: {and_more(stacked)}" if stacked else ""
    raise PlanError(
        f"{source.checkpoint.location}: precision {recipe.name} quantizes routed experts, and no tensor is one by the names of "
        f"family {source.family} ({known}){stored}; a checkpoint with all its experts in 16 bits is not made: name them in the "
        "family's file, or leave routed_expert out of `quantize`"
    )


def _check_schemes_of_experts(source: _Source, recipe: PrecisionRecipe, tensors: Sequence[TensorPlan]) -> None:
    """Experts get a scheme of which vLLM loads everything, where the family says which these are; MXFP4 nothing else, where it
    says so."""
    known = names_of(source.family).expert_schemes
    experts = (t for t in tensors if known and source.classified[t.name].expert is not None and t.name.endswith(".weight"))
    if (other := next((tensor for tensor in experts if tensor.scheme not in known), None)) is not None:
        how = "in 16 bits, one by one" if other.scheme is None else f"as {other.scheme}"
        raise PlanError(
            f"precision {recipe.name}: {other.name} would be stored {how}, and vLLM 0.32 does not load experts of family "
            f"{source.family} so; their schemes are {', '.join(known)}: take w4a16-g32 or w4a16-experts-g32"
        )
    if names_of(source.family).mxfp4_experts_alone:
        beside = (t for t in tensors if t.scheme == "mxfp4" and t.part != "routed_expert")
        if (other := next(beside, None)) is not None:
            raise PlanError(
                f"precision {recipe.name}: {other.name} would be stored as mxfp4, and of family {source.family} vLLM 0.32 "
                "reads that of routed_expert alone; keep the others in 16 bits, or take another scheme"
            )


# ------------------------------------------------------------------------------------------------ shapes
def _check_shapes(source: _Source, actions: Mapping[str, Treatment]) -> None:
    """Group sizes divide; members of a fused group agree in action, source dtype and columns.

    In a fused parameter another weight follows every member but the last one (`runtime_names.fused_members`).
    """
    tensors = source.checkpoint.tensors
    groups: dict[str, list[TensorHeader]] = defaultdict(list)
    for name, what in source.classified.items():
        if what.fused_group is not None:
            groups[what.fused_group].append(tensors[name])
    followed: set[str] = set()
    fused_of_family = fused_members(source.family)
    for group, members in groups.items():
        if len({(*_must_agree(actions[m.name]), m.shape[-1:]) for m in members}) > 1:
            each = ", ".join(f"{m.name} {actions[m.name].action} {m.dtype} {list(m.shape)}" for m in members)
            dtypes = sorted({member.dtype for member in members} & set(FLOATS))
            is_dtype = len({(actions[m.name].action, actions[m.name].scheme, m.shape[-1:]) for m in members}) == 1
            mend = f"; store all of them as {' or '.join(dtypes)} (load_file, Tensor.to and save_file of safetensors.torch)"
            problem = "vLLM loads its members into one parameter, but they disagree"
            raise PlanError(f"{group}: {problem}: {each}{mend if is_dtype else ''}")
        last = fused_of_family[group.rpartition(".")[2]][-1]
        followed |= {member.name for member in members if member.name.split(".")[-2] != last}
    for name, treatment in actions.items():
        if treatment.scheme is not None:
            check_shape(treatment.scheme, name, tensors[name].shape, merged=name in followed)


def _must_agree(treatment: Treatment) -> tuple[str, str | None, str | None]:
    """What must be equal in a fused parameter: the scheme, and the dtype it starts from; for what stays plain, that it does."""
    if treatment.scheme is not None:
        return treatment.action, treatment.dtype, treatment.scheme
    return ("drop" if treatment.action == "drop" else "plain"), None, None


# ------------------------------------------------------------------------------------------------ ignore list
def _ignore(family: str, recipe: PrecisionRecipe, config: Mapping[str, Any], tensors: Sequence[TensorPlan]) -> tuple[str, ...]:
    """The family's patterns that match a module of this checkpoint, by its name here or in vLLM; the others are dropped."""
    rename, stored = names_of(family).runtime_namer(config), {t.module for t in tensors if t.action != "drop"}
    numbers = stored_layers(family, config, stored)
    if names_of(family).mtp_runtime_layers is not None:
        numbers = tuple(num_hidden_layers(config) + number for number in numbers)
    patterns = ignore_patterns(family, recipe.quantize, mtp=recipe.mtp, mtp_layers=numbers)
    modules = sorted(stored | set(map(rename, stored)))
    matching = tuple(p for p in patterns if any(re.match(p.removeprefix("re:"), module) for module in modules))
    return matching + kept_in_some_layers(tensors, rename, tuple(recipe.quantize))


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
            hits = [pattern for pattern in plan.ignore if re.match(pattern.removeprefix("re:"), tensor.module)]
            raise PlanError(f"{tensor.module}: {verb}: {', '.join(hits) if hits else 'no pattern matches'}")
    fused = packed_modules(plan.family)
    by_scheme = targets_by_scheme(plan.tensors, names_of(plan.family).runtime_namer(plan.config))
    targets = {target: scheme for scheme, patterns in by_scheme.items() for target in patterns}
    for runtime in runtime_modules(plan.family, scheme_of, plan.config):
        if runtime.kind == "plain":
            continue
        # the members of one parameter of vLLM, all experts of a layer among them, have one scheme
        first = runtime.members[0]
        other = next((member for member in runtime.members if scheme_of[member] != scheme_of[first]), None)
        if other is not None:
            each = ", ".join(f"{member} is {scheme_of[member] or 'kept'}" for member in (first, other))
            raise PlanError(f"vLLM loads the weights of {runtime.name} with one scheme, but {each}; give both the same scheme")
        try:
            expected = group_of(runtime, plan.ignore, targets, fused)
        except MixedSchemes as error:
            raise PlanError(str(error)) from None
        if expected != scheme_of[first]:
            raise PlanError(
                f"{first} is {scheme_of[first] or 'kept'}, but vLLM would load {runtime.name} as "
                f"{expected or 'unquantized'}: {', '.join((*plan.ignore, *targets))}"
            )


# ------------------------------------------------------------------------------------------------ sums
def bytes_by_role(plan: Plan) -> dict[str, tuple[int, int, int]]:
    """Role -> (number of tensors, bytes in, bytes out), in the order of `assay.recipes.precision.ROLES`, then `other`."""
    sums: dict[str, tuple[int, int, int]] = {}
    for tensor in plan.tensors:
        count, bytes_in, bytes_out = sums.get(tensor.role, (0, 0, 0))
        num_bytes = sum(output.num_bytes for output in tensor.outputs)
        sums[tensor.role] = (count + 1, bytes_in + tensor.num_bytes, bytes_out + num_bytes)
    return {role: sums[role] for role in (*ROLES, "other") if role in sums}


# ------------------------------------------------------------------------------------------------ identity
_IDENTITY = ("family", "source_sha256", "precision_recipe", "config", "mtp_layers", "ignore", "tensors")


def plan_sha256(plan: Plan) -> str:
    """Identity of what a plan does: everything but the names given to model, precision and source folder."""
    fields = {field: getattr(plan, field) for field in _IDENTITY}
    fields["precision_recipe"] = without_folders(plan.precision_recipe)
    if plan.importance_sha256 is not None:
        fields["importance_sha256"] = plan.importance_sha256
    if plan.calibrated is not None:
        fields["calibrated_layers"] = {str(layer): digest for layer, digest in sorted(plan.calibrated.layers.items())}
    return sha256_of(fields)


INSTEAD = {"fp8": ("fp8-channel",), "w4a16": ("w4a16-g64", "w4a16-g32", "w4a16-channel")}
"""Precision -> those that take its place where its blocks or groups do not divide a weight, the nearest first."""


class FittingPrecision(NamedTuple):
    """precision: None: nothing fits. problem: of the one that was requested, if another takes its place."""

    requested: str
    precision: str | None
    problem: str | None

    @property
    def sentence(self) -> str | None:
        """What was chosen and why, without what to do about it; None: what was requested."""
        if self.problem is None:
            return None
        instead = f"precision {self.precision} in place of {self.requested}"
        choice = instead if self.precision else f"precision {self.requested} is left out"
        return f"{choice}: {self.problem.partition('; ')[0]}"


def choose_fitting(checkpoint: Checkpoint, precisions: Sequence[str]) -> list[FittingPrecision]:
    """For each precision itself, or the first that takes its place and fits the shapes. Reads headers only."""
    # the first layer and expert with each shape: the others cannot say more, and a large model has 60,000 tensors
    first: dict[object, str] = {}
    for name, header in checkpoint.tensors.items():
        first.setdefault((re.sub(r"\.\d+\.", ".0.", name), header.shape, header.dtype), name)
    checkpoint = replace(checkpoint, tensors={name: checkpoint.tensors[name] for name in first.values()})
    problems = {name: _shape_problem(checkpoint, name) for name in precisions}
    return [
        FittingPrecision(name, name if problem is None else _instead(checkpoint, name), problem)
        for name, problem in problems.items()
    ]


def _instead(checkpoint: Checkpoint, precision: str) -> str | None:
    others = INSTEAD.get(precision, ())
    return next((other for other in others if _shape_problem(checkpoint, other) is None), None)


def _shape_problem(checkpoint: Checkpoint, precision: str) -> str | None:
    """The first weight that does not fit a shipped precision; None: all do."""
    try:
        check_shapes_of(checkpoint, load_recipe(PrecisionRecipe, precision))
    except PlanError as problem:
        return str(problem)
    return None


def suggesting_fit(problem: PlanError, checkpoint: Checkpoint, precision: str) -> PlanError:
    """`problem`, and the precision that would work, where shapes are the problem."""
    if precision not in INSTEAD or str(problem) != _shape_problem(checkpoint, precision):
        return problem
    other = _instead(checkpoint, precision)
    return problem if other is None else PlanError(f"{problem}; precision {other} fits this checkpoint")
