"""A candidate of which some parts are the reference's: its weights by role and layer, how inputs are rounded, the KV cache.

What a factor of `assay blame` does to a model is seen by switching it: the candidate's experts in the reference, the
reference's KV cache in the candidate. Every part is decoded from the checkpoint that it is of; the rest of a pass is that of a
screening.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from assay.errors import PlanError
from assay.recipes.families import family_of
from assay.recipes.family_names import classify, split_layer
from assay_quantize.decoding.activations import InputRounding
from assay_quantize.decoding.open_stored import StoredCheckpoint
from assay_quantize.decoding.stored_weight import PLAIN
from assay_quantize.screen.kv_cache import CacheScales
from assay_quantize.screen.layer_model import LayerModel
from assay_quantize.screen.placing import Source


class Place(NamedTuple):
    """Weights that are switched together. layer: None for what is in no decoder layer."""

    role: str
    layer: int | None


@dataclass(frozen=True)
class Switches:
    """What is the candidate's; the rest is the reference's.

    weights: by place. activations: how inputs of weights are rounded. kv_cache: whether keys and values are rounded, and by
    which scales. config: what config.json says of the model's arithmetic.
    """

    weights: frozenset[Place] = frozenset()
    activations: bool = False
    kv_cache: bool = False
    config: bool = False


class MixedModel(LayerModel):
    """fp8_kv_cache: of the candidate's switch. Of `reference` nothing is in memory; it is of the same device and dtype.

    QuantizeError: as of `LayerModel`, or a weight has other shapes in the two.
    """

    def __init__(
        self, stored: StoredCheckpoint, reference: LayerModel, switches: Switches, *, fp8_kv_cache: bool = False
    ) -> None:
        self._reference, self._switches = reference, switches
        is_fp8 = fp8_kv_cache if switches.kv_cache else reference.fp8_kv_cache
        super().__init__(stored, reference.dtype, reference.device, fp8_kv_cache=is_fp8)
        self.budget = reference.budget
        self._own = frozenset(
            name for name, place in self.places.items() if place in switches.weights or name not in self._others
        )

    @property
    def _others(self) -> Mapping[str, list[Source]]:
        return self._reference._sources

    def _config(self) -> Mapping[str, Any]:
        return self.stored.config if self._switches.config else self._reference.stored.config

    @functools.cached_property
    def places(self) -> dict[str, Place]:
        """Parameter or buffer of the model -> where it belongs, by the first stored tensor that makes it up."""
        return {
            name: place_of(self.stored, sources[0].name, name.startswith(f"{self.prefix}."))
            for name, sources in self._sources.items()
        }

    def stored_bytes(self, place: Place) -> int:
        """Of the candidate's weights in a place."""
        return sum(_bytes_of(self.stored, name) for name in self._names_in(place))

    def num_weights(self, place: Place) -> int:
        """Elements of the candidate's weights in a place, whatever they are stored as."""
        return sum(math.prod(_shape_of(self.stored, name)) for name in self._names_in(place))

    def _names_in(self, place: Place) -> set[str]:
        return self._stored_names[place]

    @functools.cached_property
    def _stored_names(self) -> dict[Place, set[str]]:
        names: dict[Place, set[str]] = defaultdict(set)
        for name, place in self.places.items():
            names[place] |= {source.name for source in self._sources[name]}
        return names

    def differing(self) -> set[Place]:
        """Places of which the two checkpoints store other weights. Reads what both store without codes."""
        places: set[Place] = set()
        for name, place in self.places.items():
            if place not in places and self._differs(name):
                places.add(place)
        return places

    def _differs(self, name: str) -> bool:
        if name not in self._others:
            return False
        own, others = self._sources[name], self._others[name]
        if [source.name for source in own] != [source.name for source in others]:
            return True
        for source in own:
            formats = {_format(stored, source.name) for stored in (self.stored, self._reference.stored)}
            if formats != {PLAIN} or not torch.equal(
                self._read(source.name).float(), self._reference._read(source.name).float()
            ):
                return True
        return False

    def rounds_otherwise(self) -> bool:
        """Whether the two round inputs of some weight by other rules or scales."""
        for name in self._sources:
            if name in self._others:
                own = [self._rule(self, source.name) for source in self._sources[name]]
                if own != [self._rule(self._reference, source.name) for source in self._others[name]]:
                    return True
        return False

    def caches_otherwise(self) -> bool:
        """Whether the two divide keys or values of some layer by other scales."""
        layers = range(self.num_layers)
        return any(super(MixedModel, self)._cache_scales(n) != self._reference._cache_scales(n) for n in layers)

    @staticmethod
    def _rule(model: LayerModel, name: str) -> InputRounding | None:
        if name in model.stored.others:
            return None
        rounding = model._rounding(name)
        return None if rounding.rule.kind == "none" else rounding

    # -------------------------------------------------------------------------------------------- switching
    def _weights(self, name: str, hollow: Tensor, experts: range | None = None) -> Tensor:
        if name not in self._own:
            return self._reference._weights(name, hollow, experts)
        return super()._weights(name, hollow, experts)

    def _roundings(self, name: str, value: Tensor, experts: range | None = None) -> dict[int, InputRounding]:
        if not self._switches.activations and name in self._others:
            return self._reference._roundings(name, value, experts)
        return super()._roundings(name, value, experts)

    def _cache_scales(self, layer: int) -> CacheScales:
        return super()._cache_scales(layer) if self._switches.kv_cache else self._reference._cache_scales(layer)

    def _embedding_rows(self, begin: int, end: int) -> Tensor:
        if f"{self._embedding}.weight" not in self._own:
            return self._reference._embedding_rows(begin, end)
        return super()._embedding_rows(begin, end)

    def prefetch(self, layer: int, experts: range | None = None, but: Collection[str] = ()) -> None:
        """As of `LayerModel`, of both checkpoints."""
        super().prefetch(layer, experts, {*but, *(self._sources.keys() - self._own)})
        self._reference.prefetch(layer, experts, {*but, *self._own})


def place_of(stored: StoredCheckpoint, name: str, is_in_layer: bool) -> Place:
    """Of a stored tensor. is_in_layer: of the decoder. A name that no family knows is told by the words in it."""
    at = split_layer(name)
    layer = at.layer if at is not None and is_in_layer else None
    try:
        role = classify(family_of(stored.config), name, stored.config).part
    except PlanError:
        role = next((role for word, role in _WORDS if word in name), "other")
    return Place("router" if role == "router_bias" else role, layer)


_WORDS = (
    (".experts.", "routed_expert"), ("shared_expert", "shared_expert"), ("norm", "norm"), ("indexer", "indexer"),
    ("attn", "attention"), ("attention", "attention"), ("router", "router"), ("mlp.gate.", "router"), ("mlp", "dense_mlp"),
    ("embed", "embedding"), ("lm_head", "lm_head"),
)  # fmt: skip
"""Part of a name -> role; the first that fits."""


def _format(stored: StoredCheckpoint, name: str) -> str:
    return PLAIN if name in stored.others else stored.weight(name).format


def _bytes_of(stored: StoredCheckpoint, name: str) -> int:
    return stored.others[name].num_bytes if name in stored.others else stored.weight(name).num_bytes


def _shape_of(stored: StoredCheckpoint, name: str) -> tuple[int, ...]:
    return tuple(stored.others[name].shape if name in stored.others else stored.weight(name).shape)
