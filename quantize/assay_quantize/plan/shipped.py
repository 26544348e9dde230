"""Names and shapes of the models that have recipes, without their weights and without the hub: `recipes/shapes/NAME.json`.

A file says of every kind of tensor its dtype, shape and layers; all experts of a layer are alike. So that a model of 60,000
tensors plans in a fraction of a second, two experts of a layer are planned, and the bytes of the stored weights multiplied.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from assay.recipes.base import recipes_dir
from assay.recipes.families import family_of, num_experts
from assay.recipes.family_names import form_of
from assay.recipes.precision import layer_numbers
from assay.recipes.text_config import changing_text, text_of
from assay.safe_files import read_json_object
from assay_quantize.checkpoint.checkpoint import Checkpoint, as_source
from assay_quantize.checkpoint.headers import TensorHeader
from assay_quantize.formats.schemes import DTYPE_BYTES
from assay_quantize.plan.stored import StoredModel

PLANNED_EXPERTS = 2
SHARD_BYTES = 5_300_000_000
"""About what a file of a large release has."""
_EXPERT, _LAYER = "{expert}", "{layer}"
_EXPERT_KEYS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
_SHARD = "shapes"


def shapes_dir() -> Path:
    return recipes_dir() / "shapes"


def has_shapes(model: str) -> bool:
    """Whether the shapes of a model recipe ship with assay."""
    return (shapes_dir() / f"{model}.json").is_file()


@dataclass(frozen=True)
class ShippedModel:
    """source: its hub id. checkpoint: with `PLANNED_EXPERTS` experts a layer, to be planned; `whole` puts the rest into
    what is stored of it."""

    model: str
    source: str
    checkpoint: Checkpoint
    config: dict[str, Any]

    def whole(self, stored: StoredModel) -> StoredModel:
        """The stored model with the bytes of all its experts, and the true config; for sums of bytes only."""
        every = num_experts(stored.family, self.config)
        weights = []
        for weight in stored.weights:
            is_expert = every and form_of(stored.family, weight.name, stored.config).part == "routed_expert"
            weights.append(weight._replace(num_bytes=weight.num_bytes * every // PLANNED_EXPERTS) if is_expert else weight)
        return replace(stored, weights=tuple(weights), config=self.config)


def shipped_model(model: str, *, every_expert: bool = False) -> ShippedModel:
    """The model of a recipe; its file must be there (`has_shapes`). every_expert: all of them are planned, not two a layer, in
    files of about `SHARD_BYTES`, tensors by name: how the release cuts them is not known."""
    data = read_json_object(shapes_dir(), f"{model}.json")
    config = data["config"]
    number = max(1, num_experts(family_of(config), config)) if every_expert else PLANNED_EXPERTS
    named = [
        (name, dtype, tuple(shape), math.prod(shape) * DTYPE_BYTES[dtype])
        for template, (dtype, shape, layers) in data["tensors"].items()
        for name in _names(template, layers, number)
    ]
    tensors: dict[str, TensorHeader] = {}
    shards, shard = {_SHARD: 0}, _SHARD
    for name, dtype, shape, size in sorted(named) if every_expert else named:
        if every_expert and shards[shard] >= SHARD_BYTES:
            shard = f"{_SHARD}-{len(shards):05d}"
            shards[shard] = 0
        tensors[name] = TensorHeader(name, dtype, shape, shard, shards[shard], shards[shard] + size)
        shards[shard] += size
    planned = config if every_expert else _with_experts(config, PLANNED_EXPERTS)
    checkpoint = Checkpoint(f"{data['source']} (shapes as shipped)", None, planned, tensors, shards, (), whole_config=config)
    return ShippedModel(model, data["source"], as_source(checkpoint), config)


def _names(template: str, layers: str, experts: int) -> Iterator[str]:
    """Of `model.layers.{layer}.mlp.experts.{expert}.up_proj.weight` and `3-77`: one for each layer and planned expert."""
    for layer in sorted(layer_numbers(layers)) if layers else ("",):
        for expert in range(experts if _EXPERT in template else 1):
            yield template.replace(_LAYER, str(layer)).replace(_EXPERT, str(expert))


def _with_experts(config: dict[str, Any], count: int) -> dict[str, Any]:
    """The config with another number of experts, where it has any."""
    key = next((key for key in _EXPERT_KEYS if key in text_of(config)), None)
    if key is None:
        return config
    return changing_text(config, lambda text: {**text, key: count})
