"""What each role of each layer can be stored as, and how many bytes that takes, in all and on one GPU. Arithmetic on headers.

Bytes come from the planner itself, one pass for each scheme: what a mix adds up to is what the plan of its recipe says.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from assay.errors import PlanError
from assay.recipes.calibrated.methods import INTEGERS
from assay.recipes.families import family_of
from assay.recipes.family_names import classify
from assay.recipes.model import Serving
from assay.recipes.precision import PrecisionRecipe
from assay.recipes.profile import ProfileRecipe
from assay.recipes.text_config import num_hidden_layers
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

Place = tuple[int, str]
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
    family, roles = family_of(checkpoint.config), frozenset(base.quantize)
    companions = find_companions(checkpoint.location, checkpoint.config, checkpoint.tensors)
    weights: dict[Place, list[str]] = defaultdict(list)  # those that a scheme can take
    for name in checkpoint.tensors:
        if name not in companions.weight_of:
            tensor = classify(family, name, checkpoint.config)
            if tensor.linear and tensor.role in roles and tensor.layer is not None:
                weights[tensor.layer, tensor.role].append(name)
    places = {name: place for place, names in weights.items() for name in names}
    problems = _shape_problems(checkpoint, base, schemes, weights, companions.scale_of)

    def stored_by(recipe: PrecisionRecipe) -> StoredModel:
        tensors = stored_weights(tensor_plans_of(checkpoint, recipe))
        return whole(StoredModel(recipe.name, family, checkpoint.config, tensors, kv_cache=recipe.kv_cache or "auto"))

    plain = stored_by(_uniform_recipe(base, None, range(num_hidden_layers(checkpoint.config))))
    of_part = {KEPT: _by_part(plain, places)}
    for scheme in schemes:
        kept = [place for place in weights if (place, scheme) in problems]
        of_part[scheme] = _by_part(stored_by(_uniform_recipe(base, scheme, kept)), places)
    rest = replace(plain, weights=tuple(weight for weight in plain.weights if weight.name not in places))
    classified = {weight.name: classify(family, weight.name, checkpoint.config) for weight in rest.weights}
    plain_places = {n: (c.layer, c.role) for n, c in classified.items() if c.role in roles and c.layer is not None}
    inside = _by_part(rest, plain_places)  # tensors of chosen roles and layers that no scheme takes
    ranks = None if machine is None else ranks_of(machine.profile)
    if machine is not None and ranks is not None and (heads := uneven_heads(plain.config, ranks)):
        raise PlanError(f"--profile {machine.profile.name}: {sentence(heads)}; no choice of schemes changes that")
    parts = []
    for place in sorted(weights):
        beside = inside.get(place, ())
        options = {
            scheme: (*by_place[place], *beside) for scheme, by_place in of_part.items() if (place, scheme) not in problems
        }
        models = {scheme: replace(plain, weights=stored) for scheme, stored in options.items()}
        refused = {scheme: problems[place, scheme] for scheme in schemes if (place, scheme) in problems}
        if machine is not None and ranks is not None:  # what does not run there, or whose groups its ranks would cut
            for scheme, model in models.items():
                cut = [misfit for misfit in misfits(model, ranks) if isinstance(misfit, Misfit)]
                if cut:
                    refused[scheme] = _of_any_layer(sentence(cut))
                elif (reason := machine.refused.get((scheme, place[1] == "routed_expert"))) is not None:
                    refused[scheme] = reason
        parts.append(
            StoredPart(
                *place,
                num_weights=_num_bytes(of_part[KEPT][place]) // 2,
                num_bytes={scheme: _num_bytes(stored) for scheme, stored in options.items()},
                rank_bytes={scheme: 0 if ranks is None else rank_bytes(model, ranks) for scheme, model in models.items()},
                refused=refused,
            )
        )
    plain_bytes = sum(map(_num_bytes, inside.values()))
    outside = _num_bytes(rest.weights) - plain_bytes
    if machine is None or ranks is None or machine.profile.usable_bytes is None:
        return StoredParts(family, tuple(parts), outside, plain_bytes)
    limit, other = _limit(plain, rest, inside, machine, ranks)
    return StoredParts(family, tuple(parts), outside, plain_bytes, other, limit)


def _uniform_recipe(base: PrecisionRecipe, scheme: str | None, kept: Iterable[int | Place]) -> PrecisionRecipe:
    """`base` with one scheme for all roles that it quantizes, and 16 bits in some layers.

    scheme: None: the base's own, which an MTP block that is quantized has; else that block is kept.
    """
    layers: dict[str, dict[str, str]] = defaultdict(dict)
    for place in kept:
        layer, roles = (place, list(base.quantize)) if isinstance(place, int) else (place[0], [place[1]])
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


# ------------------------------------------------------------------------------------------------ shapes
def _shape_problems(
    checkpoint: Checkpoint,
    base: PrecisionRecipe,
    schemes: Sequence[str],
    weights: Mapping[Place, Sequence[str]],
    scale_of: Mapping[str, str],
) -> dict[tuple[Place, str], str]:
    """(part, scheme) -> why its shapes do not allow it. Layers and experts with the same shapes are looked at once."""
    recipes = {scheme: _uniform_recipe(base, scheme, ()) for scheme in schemes}
    reasons: dict[Any, dict[str, str]] = {}  # of each combination of role and shapes, by scheme
    problems: dict[tuple[Place, str], str] = {}
    for place, names in weights.items():
        shapes = {
            (name.split(".")[-2], checkpoint.tensors[name].shape, checkpoint.tensors[name].dtype): name for name in names[::-1]
        }
        key = (place[1], tuple(sorted(shapes, key=str)))
        if key not in reasons:
            reasons[key] = {}
            members = [name for weight in shapes.values() for name in (weight, scale_of.get(weight)) if name]
            subset = replace(checkpoint, tensors={name: checkpoint.tensors[name] for name in members})
            for scheme, recipe in recipes.items():
                try:
                    check_shapes_of(subset, recipe)
                except PlanError as error:
                    reasons[key][scheme] = _of_any_layer(str(error).partition("; ")[0])
        problems |= {(place, scheme): reason for scheme, reason in reasons[key].items()}
    return problems


def _of_any_layer(message: str) -> str:
    """`layers.3.mlp.experts.0.up_proj` as `layers.*.mlp.experts.*.up_proj`: equal layers share a reason."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", message)


# ------------------------------------------------------------------------------------------------ bytes
def _by_part(model: StoredModel, places: Mapping[str, Place]) -> dict[Place, tuple[StoredWeight, ...]]:
    weights: dict[Place, list[StoredWeight]] = defaultdict(list)
    for weight in model.weights:
        if (place := places.get(weight.name)) is not None:
            weights[place].append(weight)
    return {place: tuple(stored) for place, stored in weights.items()}


def _num_bytes(weights: Iterable[StoredWeight]) -> int:
    return sum(weight.num_bytes for weight in weights)


def _limit(
    plain: StoredModel, rest: StoredModel, inside: Mapping[Place, tuple[StoredWeight, ...]], machine: Machine, ranks: Ranks
) -> tuple[int, int]:
    """(bytes of one GPU's weights beside which all users' KV cache fits, those of them that are not chosen for)."""
    profile, drafting = machine.profile, is_speculative(machine.profile, machine.serving)
    fit = fit_on(plain, profile, machine.serving)
    limit = fit.usable_bytes - WORKSPACE_BYTES - machine.users * fit.kv_bytes(machine.context)
    of_parts = {weight.name for stored in inside.values() for weight in stored}
    outside = replace(rest, weights=tuple(weight for weight in rest.weights if weight.name not in of_parts)).served(drafting)
    other = rank_bytes(outside, ranks)
    if limit < other:
        left, needed = f"{max(0, limit) / 2**30:.1f}", f"{math.ceil(10 * other / 2**30) / 10:.1f}"
        raise PlanError(
            f"--profile {profile.name}: {machine.users} users at {machine.context:,} tokens leave {left} GiB of each GPU for "
            f"weights, and what no scheme takes needs {needed}; ask for fewer users (--users) or a shorter context (--context)"
        )
    return limit, other
