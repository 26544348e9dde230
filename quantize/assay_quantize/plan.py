"""Headers + config + precision recipe -> what will happen to every tensor. Reads no weights, imports no torch.

Every tensor gets one action: `keep` (same bytes), `cast` (another float dtype), `quantize`, or `drop` (an MTP block that is not
wanted). What cannot work fails here, before the first byte is written: unknown tensors, groups that do not divide, an
MTP block that is declared and absent, ignore patterns that would not say what was done.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from assay.errors import PlanError
from assay.families import Classified, classify, family_of, ignore_patterns
from assay.recipes import NEEDS_CALIBRATION, ROLES, PrecisionRecipe
from assay.records import Action, OutputTensor, Plan, TensorPlan
from assay_quantize.checkpoint import Checkpoint, TensorHeader
from assay_quantize.completeness import check_layers, check_mtp, mtp_layer_indexes
from assay_quantize.schemes import DTYPE_BYTES, check_shape, output_tensors
from assay_quantize.vllm_rules import FAMILY_RULES, MixedSchemes, is_ignored, runtime_modules

FLOATS = ("BF16", "F16", "F32")
KEEP_DTYPES = {"bf16": "BF16", "fp32": "F32"}


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
    classified = {name: classify(found, name, checkpoint.config) for name in checkpoint.tensors}
    mtp_layers = mtp_layer_indexes(found, classified)
    check_layers(checkpoint.location, found, classified, checkpoint.config)
    if recipe.mtp != "drop":
        check_mtp(checkpoint.location, found, classified, checkpoint.config)
    actions = {
        name: _action(header, classified[name], recipe) for name, header in checkpoint.tensors.items()
    }  # fmt: skip
    _check_shapes(checkpoint, classified, actions, recipe.scheme)
    shard_out = _output_shards(checkpoint, actions)
    tensors = tuple(
        _tensor_plan(header, classified[name], *actions[name], shard_out[header.shard])
        for name, header in checkpoint.tensors.items()
    )
    if not any(tensor.action == "quantize" for tensor in tensors):
        raise PlanError(f"precision {recipe.name}: nothing in {checkpoint.location} is quantized; name roles under `quantize`")
    plan = Plan(
        model=model,
        precision=recipe.name,
        family=found,
        source=checkpoint.location,
        source_sha256=checkpoint.sha256,
        source_revision=checkpoint.revision,
        recipe_sha256=recipe.sha256,
        precision_recipe=recipe.model_dump(mode="json", by_alias=True),
        config=checkpoint.config,
        mtp_layers=mtp_layers,
        ignore=_ignore(found, recipe, mtp_layers, tensors),
        tensors=tensors,
    )
    check_ignore(plan)
    return plan


def _check_recipe(recipe: PrecisionRecipe) -> None:
    why = NEEDS_CALIBRATION.get(recipe.scheme)
    if why is not None or recipe.calibration == "required":
        instead = "nvfp4a16" if recipe.scheme == "nvfp4" else "w4a16, nvfp4a16 or fp8"
        raise PlanError(
            f"precision {recipe.name} needs calibration data{f': {why}' if why else ''}; assay has no calibration yet; "
            f"take {instead} instead, made from the weights alone"
        )
    if "lm_head" in recipe.quantize:
        raise PlanError(
            f"precision {recipe.name}: lm_head cannot be quantized: vLLM's quantization target `Linear` does not cover it; "
            "move it to `keep: {bf16: [...]}`"
        )


# ------------------------------------------------------------------------------------------------ one tensor
def _action(header: TensorHeader, found: Classified, recipe: PrecisionRecipe) -> tuple[Action, str, str | None]:
    """(action, output dtype or source dtype, scheme).

    Inside a kept MTP block everything goes by role `mtp`, but norms and router_bias by their own roles, so that the block
    loses nothing that the layers keep. Inside a quantized one everything goes by its own role, but `mtp_projection`.
    Of a quantized role, what is no quantizable matrix (biases, convolutions) keeps the dtype of the source.
    """
    if found.role == "mtp" and recipe.mtp == "drop":
        return "drop", header.dtype, None
    by_block = found.role == "mtp" and (recipe.mtp == "keep" or found.part == "mtp_projection")
    rule = "mtp" if by_block and found.part not in ("norm", "router_bias") else found.part
    wanted = recipe.kept_dtype(rule)
    if wanted is None and found.linear:
        return "quantize", header.dtype, recipe.scheme
    if wanted is None or wanted == "source" or KEEP_DTYPES[wanted] == header.dtype:
        return "keep", header.dtype, None
    if header.dtype not in FLOATS:
        raise PlanError(
            f"{header.name}: dtype {header.dtype} cannot be cast to {KEEP_DTYPES[wanted]}; keep role {rule} as `source`"
        )
    return "cast", KEEP_DTYPES[wanted], None


def _tensor_plan(
    header: TensorHeader, found: Classified, action: Action, dtype: str, scheme: str | None, shard_out: str | None
) -> TensorPlan:
    outputs: tuple[OutputTensor, ...] = ()
    if scheme is not None:
        outputs = output_tensors(scheme, header.name, header.shape, header.dtype)
    elif action != "drop":
        num_bytes = header.num_bytes // DTYPE_BYTES[header.dtype] * DTYPE_BYTES[dtype]
        outputs = (OutputTensor(header.name, dtype, header.shape, num_bytes),)
    return TensorPlan(
        name=header.name,
        role=found.role,
        part=found.part,
        module=found.module,
        action=action,
        scheme=scheme,
        fused_group=found.fused_group,
        dtype=header.dtype,
        shape=header.shape,
        num_bytes=header.num_bytes,
        shard_in=header.shard,
        shard_out=None if action == "drop" else shard_out,
        outputs=outputs,
    )


def _check_shapes(
    checkpoint: Checkpoint,
    classified: Mapping[str, Classified],
    actions: Mapping[str, tuple[Action, str, str | None]],
    scheme: str,
) -> None:
    """Group sizes divide; members of a fused group agree in action, source dtype and columns.

    In a fused parameter another weight follows every member but the last one, which the order of vLLM's mapping defines.
    """
    groups: dict[str, list[TensorHeader]] = defaultdict(list)
    for name, header in checkpoint.tensors.items():
        group = classified[name].fused_group
        if group is not None:
            groups[group].append(header)
    followed = set()
    for group, members in groups.items():
        how = {(actions[m.name][0], m.dtype if actions[m.name][2] else None, m.shape[-1:]) for m in members}
        if len(how) > 1:
            each = ", ".join(f"{m.name} {actions[m.name][0]} {m.dtype} {list(m.shape)}" for m in members)
            raise PlanError(f"{group}: vLLM loads its members into one parameter, but they disagree: {each}")
        followed |= {member.name for member in members if not _is_last(group, member.name)}
    for name, (_, _, used) in actions.items():
        if used is not None:
            check_shape(scheme, name, checkpoint.tensors[name].shape, merged=name in followed)


_LAST_MEMBERS = {
    "qkv_proj": "v_proj",
    "gate_up_proj": "up_proj",
    "fused_qkv_a_proj": "kv_a_proj_with_mqa",
    "wk_weights_proj": "weights_proj",
}


def _is_last(group: str, name: str) -> bool:
    return name.split(".")[-2] == _LAST_MEMBERS[group.rpartition(".")[2]]


# ------------------------------------------------------------------------------------------------ shards
def _output_shards(
    checkpoint: Checkpoint, actions: Mapping[str, tuple[Action, str, str | None]]
) -> dict[str, str | None]:  # fmt: skip
    """Source shard -> output shard: one for one, renumbered where a dropped block leaves a shard empty (None)."""
    alive = {header.shard for name, header in checkpoint.tensors.items() if actions[name][0] != "drop"}
    kept = sorted(alive, key=lambda shard: (not PurePosixPath(shard).stem.startswith("model"), shard))
    numbers = {shard: f"model-{i + 1:05d}-of-{len(kept):05d}.safetensors" for i, shard in enumerate(kept)}
    return {shard: numbers.get(shard) for shard in checkpoint.shards}


# ------------------------------------------------------------------------------------------------ ignore list
def _ignore(
    family: str, recipe: PrecisionRecipe, mtp_layers: Sequence[int], tensors: Sequence[TensorPlan]
) -> tuple[str, ...]:  # fmt: skip
    """The family's patterns that match a module of this checkpoint; patterns of roles it lacks are dropped."""
    patterns = ignore_patterns(family, recipe.quantize, mtp=recipe.mtp, mtp_layers=mtp_layers)
    modules = sorted({tensor.module for tensor in tensors if tensor.action != "drop"})
    return tuple(p for p in patterns if any(re.match(p.removeprefix("re:"), module) for module in modules))


def check_ignore(plan: Plan) -> None:
    """The ignore list says exactly what was done, by name and under vLLM's fused names. PlanError names the module."""
    any_pattern = re.compile("|".join(f"(?:{pattern.removeprefix('re:')})" for pattern in plan.ignore) or r"(?!)")
    quantized_of: dict[str, bool] = {}
    for tensor in plan.tensors:
        if tensor.action == "drop" or len(tensor.shape) < 2:
            continue
        quantized_of[tensor.module] = quantized = tensor.action == "quantize"
        if quantized == (any_pattern.match(tensor.module) is not None):
            verb = "quantized, but the ignore list covers it" if quantized else "kept, but the ignore list misses it"
            raise PlanError(f"{tensor.module}: {verb}: {_matching(plan.ignore, tensor.module)}")
    fused = FAMILY_RULES[plan.family].fused
    for runtime in runtime_modules(plan.family, quantized_of, plan.config):
        if runtime.kind == "plain":
            continue
        try:
            ignored = {is_ignored(name, plan.ignore, fused) for name in runtime.judged_by}
        except MixedSchemes as error:
            raise PlanError(str(error)) from None
        wrong = next((m for m in runtime.members if ignored != {not quantized_of[m]}), None)
        if wrong is not None:
            what = "quantized" if quantized_of[wrong] else "kept"
            raise PlanError(f"{wrong} is {what}, but vLLM would load {runtime.name} otherwise: {', '.join(plan.ignore)}")


def _matching(patterns: Iterable[str], module: str) -> str:
    hits = [pattern for pattern in patterns if re.match(pattern.removeprefix("re:"), module)]
    return ", ".join(hits) if hits else "no pattern matches"


# ------------------------------------------------------------------------------------------------ sums
def bytes_by_role(plan: Plan) -> dict[str, tuple[int, int, int]]:
    """Role -> (number of tensors, bytes in, bytes out), in the order of `assay.recipes.ROLES`."""
    counts: Counter[str] = Counter()
    bytes_in: Counter[str] = Counter()
    bytes_out: Counter[str] = Counter()
    for tensor in plan.tensors:
        counts[tensor.role] += 1
        bytes_in[tensor.role] += tensor.num_bytes
        bytes_out[tensor.role] += sum(output.num_bytes for output in tensor.outputs)
    return {role: (counts[role], bytes_in[role], bytes_out[role]) for role in ROLES if counts[role]}


def recipe_of(plan: Plan) -> PrecisionRecipe:
    """The precision recipe a plan was made with."""
    data: dict[str, Any] = plan.precision_recipe
    return PrecisionRecipe.model_validate(data)
