"""What in a candidate differs from its reference, as factors to switch: weights by role, activations, KV cache, config."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from assay.records.diagnosis.blame import CauseKind

if TYPE_CHECKING:
    from assay_quantize.screen.mixed_model import MixedModel, Place, Switches

ROLE_WORDS = {
    "routed_expert": "weights of routed experts", "shared_expert": "weights of shared experts",
    "dense_mlp": "weights of dense MLPs", "attention": "weights of attention", "indexer": "weights of indexers",
    "router": "routers", "norm": "norms", "embedding": "embedding", "lm_head": "output head", "other": "other weights",
}  # fmt: skip
MERGED_FIRST = ("other", "norm", "indexer", "embedding", "router", "lm_head", "shared_expert", "dense_mlp")
"""Roles that are one factor where there are too many, in this order: what checkpoints keep comes first."""
MERGED = "rest"


@dataclass(frozen=True)
class Factor:
    """name: unique; what: in words. places: of weights. is_part: they are some of the factor of that name."""

    kind: CauseKind
    name: str
    what: str
    places: frozenset[Place] = frozenset()
    is_part: bool = False

    def within(self, places: Iterable[Place]) -> Factor:
        """Of some of its places."""
        chosen = frozenset(places)
        return replace(self, places=chosen, is_part=self.is_part or chosen != self.places)


def weight_factors(places: Iterable[Place], most: int) -> list[Factor]:
    """By role, `most` at most; at least one."""
    by_role: dict[str, set[Place]] = defaultdict(set)
    for place in places:
        by_role[place.role].add(place)
    merged: set[Place] = set()
    for role in MERGED_FIRST:
        if len(by_role) + bool(merged) > most and role in by_role:
            merged |= by_role.pop(role)
    factors = [
        Factor("weights", role, ROLE_WORDS.get(role, f"weights of role {role}"), frozenset(by_role[role]))
        for role in sorted(by_role, key=[*ROLE_WORDS, *sorted(by_role)].index)
    ]
    if merged:
        roles = ", ".join(sorted({ROLE_WORDS.get(place.role, place.role) for place in merged}))
        factors.append(Factor("weights", MERGED, roles, frozenset(merged)))
    return factors


def factors_of(nothing: MixedModel, everything: MixedModel, config_differences: Sequence[str], most: int) -> list[Factor]:
    """In which the candidate differs; none: it computes what its reference does. nothing, everything: with no and all switches.

    Reads weights that both store without codes.
    """
    others: list[Factor] = []
    if nothing.rounds_otherwise():
        others.append(Factor("activations", "activations", "rounding of activations"))
    caches = [model.fp8_kv_cache for model in (nothing, everything)]
    if caches[0] != caches[1] or (all(caches) and nothing.caches_otherwise()):
        others.append(Factor("kv_cache", "kv_cache", "FP8 KV cache" if caches[1] else "KV cache in 16 bits"))
    if config_differences:
        others.append(Factor("config", "config", f"config.json: {'; '.join(config_differences)}"))
    return [*weight_factors(nothing.differing(), most - len(others)), *others]


def switches_of(factors: Iterable[Factor]) -> Switches:
    """With these the candidate's, the rest the reference's."""
    from assay_quantize.screen.mixed_model import Switches

    chosen = list(factors)
    kinds = {factor.kind for factor in chosen}
    return Switches(
        frozenset().union(*(factor.places for factor in chosen)), "activations" in kinds, "kv_cache" in kinds, "config" in kinds
    )
