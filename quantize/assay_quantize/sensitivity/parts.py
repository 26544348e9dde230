"""The parts of a checkpoint, what each weighs in each scheme, and the recipe of any mix of them. Headers only, no torch.

A part is one role of one decoder layer, or the whole MTP block: the finest that vLLM loads with schemes of its own, since the
experts of a layer and the members of a fused projection share one, and that a precision recipe can say.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from assay.errors import PlanError
from assay.recipes.families import family_of
from assay.recipes.family_names import Classified, classify
from assay.recipes.precision import ROLES, PrecisionRecipe
from assay.recipes.runtime_names import fused_members
from assay.recipes.text_config import num_hidden_layers
from assay.records.diagnosis.sensitivity import LeftOut
from assay.records.plan import Plan, Role, TensorPlan
from assay_quantize.checkpoint.checkpoint import Checkpoint
from assay_quantize.checkpoint.source_format import find_companions
from assay_quantize.formats.schemes import check_shape
from assay_quantize.plan.planner import make_plan

TRIED: tuple[Role, ...] = ("attention", "dense_mlp", "shared_expert", "routed_expert")
"""Roles that vLLM loads quantized, and every shipped recipe quantizes or names as kept. Indexers are kept by all of them."""


class Key(NamedTuple):
    """layer: None for the MTP block, whose role is `mtp`."""

    layer: int | None
    role: Role

    def __str__(self) -> str:
        return self.role if self.layer is None else f"layer {self.layer} {self.role}"


@dataclass(frozen=True)
class Layout:
    """The parts of a checkpoint.

    tensors: key -> everything that belongs to the part, quantizable or not. weights: of those, the names of what a scheme
    rounds. sizes: key -> scheme, or `bf16`, -> bytes of all its tensors. plans: scheme -> the plan that gives it to every part
    that it fits. other_bytes: of tensors that belong to no part; the same in every plan.
    """

    checkpoint: Checkpoint
    family: str
    observer: str
    num_layers: int
    tensors: Mapping[Key, tuple[str, ...]]
    weights: Mapping[Key, tuple[str, ...]]
    num_weights: Mapping[Key, int]
    sizes: Mapping[Key, Mapping[str, int]]
    plans: Mapping[str, Plan]
    left_out: tuple[LeftOut, ...]
    other_bytes: int
    all_weights: int
    mixes: Mapping[str, Mapping[Key, str]] = field(default_factory=dict)
    """Name -> scheme of each part that is not kept: mixes that are measured as a whole, beside each scheme."""

    def wholes(self) -> dict[str, Mapping[Key, str]]:
        """What is measured with all its parts quantized at once: each scheme in every part that it fits, and `mixes`."""
        uniform: dict[str, Mapping[Key, str]] = {
            scheme: {key: scheme for key, sizes in self.sizes.items() if key.role != "mtp" and scheme in sizes}
            for scheme in self.plans
        }
        return uniform | dict(self.mixes)

    def pairs(self) -> list[tuple[Key, str]]:
        """Every part with every scheme that fits it, MTP left out: by layer, then role, then scheme."""
        return [(key, scheme) for key in self.sizes if key.role != "mtp" for scheme in self.plans if scheme in self.sizes[key]]

    def recipe(self, name: str, chosen: Mapping[Key, str]) -> PrecisionRecipe:
        """The recipe that gives each part its scheme and keeps all others; `mtp` is kept unless it is named."""
        return mix_recipe(name, chosen, self.sizes, observer=self.observer)


def find_parts(checkpoint: Checkpoint, schemes: Sequence[str], *, model: str, observer: str = "minmax") -> Layout:
    """The parts, with the plan of each scheme. Raises PlanError: no part takes any of the schemes."""
    family = family_of(checkpoint.config)
    companions = find_companions(checkpoint.location, checkpoint.config, checkpoint.tensors)
    classified = {
        name: classify(family, name, checkpoint.config) for name in checkpoint.tensors if name not in companions.weight_of
    }
    of_weight = {name: name for name in classified} | dict(companions.weight_of)
    tensors: dict[Key, list[str]] = defaultdict(list)
    for name in checkpoint.tensors:
        if (key := _key(classified[of_weight[name]])) is not None:
            tensors[key].append(name)
    tensors = {key: tensors[key] for key in sorted(tensors, key=_place)}
    roundable = {name for name, tensor in classified.items() if tensor.linear and tensor.part in TRIED}
    weights = {key: tuple(name for name in names if name in roundable) for key, names in tensors.items()}
    tensors = {key: names for key, names in tensors.items() if weights[key]}
    left_out: list[LeftOut] = []
    plans: dict[str, Plan] = {}
    sizes: dict[Key, dict[str, int]] = {key: {} for key in tensors}
    for scheme in schemes:
        misfits = {key: reason for key in tensors if (reason := _misfit(checkpoint, family, classified, weights[key], scheme))}
        left_out += [LeftOut(layer=key.layer, role=key.role, scheme=scheme, why=reason) for key, reason in misfits.items()]
        fitting = {key: scheme for key in tensors if key not in misfits}
        if not [key for key in fitting if key.role != "mtp"]:
            continue
        recipe = mix_recipe(f"uniform-{scheme.replace('_', '-')}", fitting, tensors, observer=observer)
        plans[scheme] = make_plan(checkpoint, recipe, model=model, family=family)
        for key, size in part_bytes(plans[scheme], tensors).items():
            if key in fitting:
                sizes[key][scheme] = size
    if not plans:
        raise PlanError(f"{checkpoint.location}: no part takes {', '.join(schemes)}: {left_out[0].why if left_out else ''}")
    first_scheme, first = next(iter(plans.items()))
    for key, size in _kept_bytes(checkpoint, first, tensors, first_scheme, model, observer).items():
        sizes[key]["bf16"] = size
    inside = {name for names in tensors.values() for name in names}
    numbers = {name: math.prod(checkpoint.tensors[name].shape) for name in classified}
    return Layout(
        checkpoint=checkpoint,
        family=family,
        observer=observer,
        num_layers=num_hidden_layers(checkpoint.config),
        tensors={key: tuple(names) for key, names in tensors.items()},
        weights=weights,
        num_weights={key: sum(numbers.get(name, 0) for name in names) for key, names in tensors.items()},
        sizes=sizes,
        plans=plans,
        left_out=tuple(left_out),
        other_bytes=sum(_size(tensor) for tensor in first.tensors if tensor.name not in inside),
        all_weights=sum(numbers.values()),
    )


def part_bytes(plan: Plan, tensors: Mapping[Key, Collection[str]]) -> dict[Key, int]:
    """Bytes of each part's tensors in a plan."""
    size_of = {tensor.name: _size(tensor) for tensor in plan.tensors}
    return {key: sum(size_of[name] for name in names) for key, names in tensors.items()}


def mix_recipe(name: str, chosen: Mapping[Key, str], known: Collection[Key], *, observer: str = "minmax") -> PrecisionRecipe:
    """A precision recipe of some parts' schemes (never `bf16`); all other parts of `known` are kept in 16 bits.

    The MTP block takes what its roles take elsewhere, as recipes have it: its own scheme must be that of all quantized roles
    that have no other. AssertionError: it is not.
    """
    quantize: dict[str, str] = {}
    layers: dict[str, dict[str, str]] = defaultdict(dict)
    of_mtp = next((scheme for key, scheme in chosen.items() if key.role == "mtp"), None)
    roles = [role for role in TRIED if any(key.role == role for key in chosen)]
    if of_mtp is not None:
        roles = [role for role in TRIED if role in roles or any(key.role == role for key in known)]
    for role in roles:
        schemes = {key.layer: chosen.get(key, "bf16") for key in known if key.role == role}
        counts = Counter(scheme for scheme in schemes.values() if scheme != "bf16")
        quantize[role] = of_mtp if of_mtp is not None else counts.most_common(1)[0][0]
        for layer, scheme in schemes.items():
            if scheme != quantize[role]:
                layers[str(layer)][role] = scheme
    kept = [role for role in ROLES if role not in {*quantize, "norm", "router_bias"}]
    return PrecisionRecipe.model_validate(
        {
            "schema": 1,
            "name": name,
            "description": "A mix whose parts are measured one by one.",
            "quantize": quantize,
            "layers": {numbers: dict(roles) for numbers, roles in layers.items()},
            "keep": {"source": ["norm"], "bf16": kept, "fp32": ["router_bias"]},
            "mtp": "keep" if of_mtp is None else "quantize",
            "observer": observer,
        }
    )


# ------------------------------------------------------------------------------------------------ what is what
def _key(tensor: Classified) -> Key | None:
    if tensor.role == "mtp":
        return Key(None, "mtp")
    if tensor.role in TRIED and tensor.layer is not None:
        return Key(tensor.layer, tensor.role)
    return None


def _place(key: Key) -> tuple[float, int]:
    return (float("inf") if key.layer is None else key.layer, ROLES.index(key.role))


def _misfit(
    checkpoint: Checkpoint, family: str, classified: Mapping[str, Classified], names: Sequence[str], scheme: str
) -> str | None:
    """Why a part cannot take a scheme. As the planner's: in a fused parameter a weight follows every member but the last."""
    members = fused_members(family)
    for name in names:
        group = classified[name].fused_group
        merged = group is not None and name.split(".")[-2] != members[group.rpartition(".")[2]][-1]
        try:
            check_shape(scheme, name, checkpoint.tensors[name].shape, merged=merged)
        except PlanError as problem:
            return str(problem)
    return None


def _kept_bytes(
    checkpoint: Checkpoint, plan: Plan, tensors: Mapping[Key, Collection[str]], scheme: str, model: str, observer: str
) -> dict[Key, int]:
    """Bytes of each part where it is kept, from plans that quantize another role only."""
    fitting = {key for key, size in part_bytes(plan, tensors).items() if key.role != "mtp" and size}
    fitting = {key for key in fitting if any(t.scheme for t in plan.tensors if t.name in set(tensors[key]))}
    first = min(fitting, key=_place)
    num_bytes: dict[Key, int] = {}
    for alone in (first, next((key for key in sorted(fitting, key=_place) if key != first), first)):
        recipe = mix_recipe("one-part", {alone: scheme}, tensors, observer=observer)
        sizes = part_bytes(make_plan(checkpoint, recipe, model=model, family=plan.family), tensors)
        num_bytes |= {key: size for key, size in sizes.items() if key != alone}
    if first not in num_bytes:  # the only part there is
        num_bytes[first] = sum(2 * math.prod(checkpoint.tensors[name].shape) for name in tensors[first])
    return num_bytes


def _size(tensor: TensorPlan) -> int:
    return sum(output.num_bytes for output in tensor.outputs)
