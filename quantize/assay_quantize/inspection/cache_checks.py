"""Scales of the KV cache: whether every layer has them, and whether vLLM takes them as they are.

One function for each defect.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from assay.recipes.family_names import split_layer
from assay_quantize.checkpoint.source_format import KEY_PROJECTIONS
from assay_quantize.inspection.defect import Place
from assay_quantize.inspection.subject import Subject

_BOTH = "kv_scale"
"""Of old checkpoints: one scale of keys and values; vLLM takes it for both."""


def _scales(subject: Subject) -> dict[int, dict[str, str]]:
    """Layer -> `k_scale`, `v_scale` -> the tensor; outside the MTP block."""
    by_layer: dict[int, dict[str, str]] = {}
    for name in subject.stored.others:
        module, _, leaf = name.rpartition(".")
        at = split_layer(name)
        if at is not None and leaf in ("k_scale", "v_scale", _BOTH) and not subject.is_in_mtp(module):
            by_layer.setdefault(at.layer, {})[leaf] = name
    return by_layer


def _attention_layers(subject: Subject) -> Mapping[int, str]:
    """Layers with a KV cache -> a module of each; outside the MTP block."""
    layers: dict[int, str] = {}
    for module in subject.stored.weights:
        parent, _, leaf = module.rpartition(".")
        at = split_layer(f"{module}.")
        if at is not None and leaf in KEY_PROJECTIONS and parent.endswith("attn") and not subject.is_in_mtp(module):
            layers.setdefault(at.layer, parent)
    return layers


def cache_scale_alone(subject: Subject) -> Iterator[Place]:
    """vLLM's `BaseKVCacheMethod` takes a lone scale for that of keys; compressed-tensors has a method of its own."""
    if subject.declared.method == "compressed-tensors":
        return
    for _, scales in sorted(_scales(subject).items()):
        if "v_scale" in scales and "k_scale" not in scales and _BOTH not in scales:
            yield Place(scales["v_scale"], "there is a scale of the values, and none of the keys")


def cache_scales_missing(subject: Subject) -> Iterator[Place]:
    scales = _scales(subject)
    if not scales:
        return
    for layer, module in sorted(_attention_layers(subject).items()):
        of_layer = scales.get(layer, {})
        lacking = [leaf for leaf in ("k_scale", "v_scale") if leaf not in of_layer]
        is_told = lacking == ["k_scale"] and subject.declared.method != "compressed-tensors"  # by `cache_scale_alone`
        if lacking and _BOTH not in of_layer and not is_told:
            yield Place(module, f"has no {' and no '.join(lacking)}; {len(scales):,} layers have scales")


def cache_scale_shape(subject: Subject) -> Iterator[Place]:
    scheme = subject.declared.quantization.get("kv_cache_scheme")
    if isinstance(scheme, dict) and scheme.get("strategy") == "attn_head":
        return
    for _, scales in sorted(_scales(subject).items()):
        for name in scales.values():
            if math.prod(shape := subject.stored.others[name].shape) != 1:
                yield Place(name, f"is {list(shape)}; one number for a layer is taken")
