"""What each role of each layer can be stored as, and how many bytes that takes, in all and on one GPU. Arithmetic on headers.

Bytes come from the planner itself, one pass for each scheme: what a mix adds up to is what the plan of its recipe says.
"""

from __future__ import annotations

import functools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from assay.errors import PlanError
from assay.recipes.calibrated.methods import INTEGERS
from assay.recipes.families import classify, family_of, num_hidden_layers
from assay.recipes.model import Serving
from assay.recipes.precision import PrecisionRecipe
from assay.recipes.profile import ProfileRecipe
from assay.records.choice.mix import KEPT
from assay_quantize.checkpoint.checkpoint import Checkpoint
from assay_quantize.checkpoint.source_format import find_companions
from assay_quantize.plan.fits import (
    WORKSPACE_BYTES,
    Misfit,
    Ranks,
    fit_on,
    misfits,
    rank_bytes,
    ranks_of,
    sentence,
    uneven_heads,
)
from assay_quantize.plan.planner import check_shapes_of, tensor_plans_of
from assay_quantize.plan.stored import StoredModel, StoredWeight, is_speculative, stored_weights

Where = tuple[int, str]
"""Layer, role."""


@dataclass(frozen=True)
class StoredPart:
    """One role of one layer. All its weights take one scheme: vLLM loads the experts of a layer, and what it fuses, with one.

    num_bytes, rank_bytes: scheme or `bf16` -> bytes of all its tensors, and of one GPU's part of them (0: no GPU was named).
    refused: scheme -> why the part cannot take it.
    """

    layer: int
    role: str
    num_weights: int
    num_bytes: Mapping[str, int]
    rank_bytes: Mapping[str, int]
    refused: Mapping[str, str]


@dataclass(frozen=True)
class StoredParts:
    """A checkpoint as the parts that are chosen for, and the rest.

    other_bytes: of the rest: embeddings, head, norms, routers, MTP. plain_bytes: of tensors inside the parts that no scheme
    takes (biases). rank_limit: bytes that the weights of one GPU may take, the rest included; None: no GPU was named.
    """

    family: str
    parts: tuple[StoredPart, ...]
    other_bytes: int
    plain_bytes: int
    other_rank_bytes: int = 0
    rank_limit: int | None = None

    @property
    def num_weights(self) -> int:
        return sum(part.num_weights for part in self.parts)


Whole = Callable[[StoredModel], StoredModel]
"""Gives shapes as shipped, which have two experts a layer, the bytes of all of them."""


@dataclass(frozen=True)
class Machine:
    """What a mix must run on: GPUs, sequences in flight and tokens of each. refused: scheme, whether it is of routed experts ->
    why it does not run there as what it is."""

    profile: ProfileRecipe
    serving: Serving
    users: int
    context: int
    refused: Mapping[tuple[str, bool], str]


def stored_parts(
    checkpoint: Checkpoint, base: PrecisionRecipe, schemes: Sequence[str], *, whole: Whole, machine: Machine | None
) -> StoredParts:
    """Every layer of every role that `base` quantizes, in the order of layers.

    PlanError: the GPUs cannot share the model's heads, or hold what is not chosen for.
    """
    family = family_of(checkpoint.config)
    weights = _quantizable(checkpoint, family, frozenset(base.quantize))
    places = {name: where for where, names in weights.items() for name in names}
    problems = _shape_problems(checkpoint, base, schemes, weights)
    plain = _stored(checkpoint, uniform(base, None, _layers(checkpoint)), family, whole)
    by_scheme = {KEPT: plain}
    for scheme in schemes:
        kept = [where for where in weights if (where, scheme) in problems]
        by_scheme[scheme] = _stored(checkpoint, uniform(base, scheme, kept), family, whole)
    of_part = {scheme: _by_part(model, places) for scheme, model in by_scheme.items()}
    rest = replace(plain, weights=tuple(one for one in plain.weights if one.name not in places))
    inside = _by_part(rest, _plain_places(rest, checkpoint, frozenset(base.quantize)))
    ranks = None if machine is None else ranks_of(machine.profile)
    if machine is not None and ranks is not None and (heads := uneven_heads(plain.config, ranks)):
        raise PlanError(f"--hardware {machine.profile.name}: {sentence(heads)}; no choice of schemes changes that")
    parts = []
    for where in sorted(weights):
        also = inside.get(where, ())
        found = {scheme: (*of_part[scheme][where], *also) for scheme in by_scheme if (where, scheme) not in problems}
        refused = {scheme: problems[where, scheme] for scheme in schemes if (where, scheme) in problems}
        if machine is not None and ranks is not None:
            refused |= _refused_there(where[1], plain, found, machine, ranks)
        parts.append(
            StoredPart(
                *where,
                num_weights=sum(one.num_bytes for one in of_part[KEPT][where]) // 2,
                num_bytes={scheme: sum(one.num_bytes for one in stored) for scheme, stored in found.items()},
                rank_bytes={scheme: _on_rank(plain, stored, ranks) for scheme, stored in found.items()},
                refused=refused,
            )
        )
    plain_bytes = sum(one.num_bytes for stored in inside.values() for one in stored)
    outside = sum(one.num_bytes for one in rest.weights) - plain_bytes
    if machine is None or ranks is None or machine.profile.usable_bytes is None:
        return StoredParts(family, tuple(parts), outside, plain_bytes)
    limit, other = _limit(plain, rest, inside, machine, ranks)
    return StoredParts(family, tuple(parts), outside, plain_bytes, other, limit)


def uniform(base: PrecisionRecipe, scheme: str | None, kept: Iterable[int | Where]) -> PrecisionRecipe:
    """`base` with one scheme for all roles that it quantizes, and 16 bits in some layers.

    scheme: None: the base's own, which an MTP block that is quantized has; else that block is kept.
    """
    layers: dict[str, dict[str, str]] = defaultdict(dict)
    for where in kept:
        layer, roles = (where, list(base.quantize)) if isinstance(where, int) else (where[0], [where[1]])
        layers[str(layer)].update(dict.fromkeys(roles, KEPT))
    data = base.model_dump(mode="json", by_alias=True) | {
        "scheme": None,
        "quantize": {role: scheme or base.scheme_of(role, None) for role in base.quantize},
        "layers": dict(layers),
    }
    if scheme is not None and base.mtp == "quantize":
        data["mtp"] = "keep"
    if scheme not in (None, *INTEGERS):
        data["calibration"] = "none"  # there would be nothing to calibrate
    return PrecisionRecipe.model_validate(data)


# ------------------------------------------------------------------------------------------------ names
def _layers(checkpoint: Checkpoint) -> range:
    return range(num_hidden_layers(checkpoint.config))


def _quantizable(checkpoint: Checkpoint, family: str, roles: frozenset[str]) -> dict[Where, list[str]]:
    """Layer and role -> its weights that a scheme can take."""
    found: dict[Where, list[str]] = defaultdict(list)
    companions = find_companions(checkpoint.location, checkpoint.config, checkpoint.tensors)
    for name in checkpoint.tensors:
        if name in companions.weight_of:
            continue
        what = classify(family, name, checkpoint.config)
        if what.linear and what.role in roles and what.layer is not None:
            found[what.layer, what.role].append(name)
    return dict(found)


def _plain_places(rest: StoredModel, checkpoint: Checkpoint, roles: frozenset[str]) -> dict[str, Where]:
    """Tensors of chosen roles and layers that no scheme takes."""
    classified = {one.name: classify(rest.family, one.name, checkpoint.config) for one in rest.weights}
    return {n: (c.layer, c.role) for n, c in classified.items() if c.role in roles and c.layer is not None}


def _shape_problems(
    checkpoint: Checkpoint, base: PrecisionRecipe, schemes: Sequence[str], weights: Mapping[Where, Sequence[str]]
) -> dict[tuple[Where, str], str]:
    """(part, scheme) -> why its shapes do not allow it. Layers and experts with the same shapes are looked at once."""
    companions = find_companions(checkpoint.location, checkpoint.config, checkpoint.tensors)
    recipes = {scheme: uniform(base, scheme, ()) for scheme in schemes}

    @functools.cache
    def problem(scheme: str, names: tuple[str, ...], alike: Any) -> str | None:
        subset = {each: checkpoint.tensors[each] for name in names for each in (name, companions.scale_of.get(name)) if each}
        try:
            check_shapes_of(replace(checkpoint, tensors=subset), recipes[scheme])
        except PlanError as error:
            return _of_any_layer(str(error).partition("; ")[0])
        return None

    firsts: dict[Any, tuple[str, ...]] = {}
    found = {}
    for where, names in weights.items():
        shapes = {
            (name.split(".")[-2], checkpoint.tensors[name].shape, checkpoint.tensors[name].dtype): name for name in names[::-1]
        }
        alike = (where[1], tuple(sorted(shapes, key=str)))
        examples = firsts.setdefault(alike, tuple(shapes.values()))
        for scheme in schemes:
            if (why := problem(scheme, examples, alike)) is not None:
                found[where, scheme] = why
    return found


def _of_any_layer(said: str) -> str:
    """`layers.3.mlp.experts.0.up_proj` as `layers.*.mlp.experts.*.up_proj`: layers that are alike share a reason."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", said)


# ------------------------------------------------------------------------------------------------ bytes
def _stored(checkpoint: Checkpoint, recipe: PrecisionRecipe, family: str, whole: Whole) -> StoredModel:
    tensors = tensor_plans_of(checkpoint, recipe)
    kv_cache = recipe.kv_cache or "auto"
    return whole(StoredModel(recipe.name, family, checkpoint.config, stored_weights(tensors), kv_cache=kv_cache))


def _by_part(model: StoredModel, places: Mapping[str, Where]) -> dict[Where, tuple[StoredWeight, ...]]:
    found: dict[Where, list[StoredWeight]] = defaultdict(list)
    for one in model.weights:
        if (where := places.get(one.name)) is not None:
            found[where].append(one)
    return {where: tuple(stored) for where, stored in found.items()}


def _on_rank(model: StoredModel, stored: tuple[StoredWeight, ...], ranks: Ranks | None) -> int:
    return 0 if ranks is None else rank_bytes(replace(model, weights=stored), ranks)


def _refused_there(
    role: str, model: StoredModel, found: Mapping[str, tuple[StoredWeight, ...]], machine: Machine, ranks: Ranks
) -> dict[str, str]:
    """Schemes that do not run on the machine, or whose groups its ranks would cut."""
    asked = {scheme: machine.refused.get((scheme, role == "routed_expert")) for scheme in found}
    refused = {scheme: why for scheme, why in asked.items() if why is not None}
    for scheme, stored in found.items():
        wrong = [one for one in misfits(replace(model, weights=stored), ranks) if isinstance(one, Misfit)]
        if wrong:
            refused[scheme] = _of_any_layer(sentence(wrong))
    return refused


def _limit(
    plain: StoredModel, rest: StoredModel, inside: Mapping[Where, tuple[StoredWeight, ...]], machine: Machine, ranks: Ranks
) -> tuple[int, int]:
    """(bytes of one GPU's weights beside which all users' KV cache fits, those of them that are not chosen for)."""
    profile, drafting = machine.profile, is_speculative(machine.profile, machine.serving)
    fit = fit_on(plain, profile, machine.serving)
    limit = fit.usable_bytes - WORKSPACE_BYTES - machine.users * fit.kv_bytes(machine.context)
    of_parts = {one.name for stored in inside.values() for one in stored}
    outside = replace(rest, weights=tuple(one for one in rest.weights if one.name not in of_parts)).served(drafting)
    other = rank_bytes(outside, ranks)
    if limit < other:
        left, needed = f"{max(0, limit) / 2**30:.1f}", f"{math.ceil(10 * other / 2**30) / 10:.1f}"
        raise PlanError(
            f"--hardware {profile.name}: {machine.users} users at {machine.context:,} tokens leave {left} GiB of each GPU for "
            f"weights, and what no scheme takes needs {needed}; ask for fewer users (--users) or a shorter context (--context)"
        )
    return limit, other
