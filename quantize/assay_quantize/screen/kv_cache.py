"""Keys and values as a server's FP8 cache holds them, in a layer that runs without a cache.

transformers' attention hands what it would cache to `past_key_values.update`: keys, normed and rotated, and values; latent
attention (MLA) expands the latent and the rotated part of the keys by `expand_kv`. vLLM 0.32 caches the same
(`reshape_and_cache_flash`, `concat_and_cache_mla`): divided by the scale of the layer, which is 1 where the checkpoint stores
none, rounded to E4M3. Sparse MLA has a format of its own (`fp8_ds_mla`): the latent in tiles of 128 with a scale each, and the
rotated part in 16 bits. Queries stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from assay_quantize.decoding.stored_weight import KvRule

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
TILE = 128
"""Values of a latent that share a scale in `fp8_ds_mla`."""


class CacheScales(NamedTuple):
    """What the keys and values of one layer are divided by."""

    key: float = 1.0
    value: float = 1.0


def is_computed(rule: KvRule) -> bool:
    """Whether a cache of this rule is: FP8 with one scale for a layer's keys and one for its values."""
    return rule.number == "fp8_e4m3" and rule.granularity in (None, "tensor") and not rule.dynamic


def is_fp8(rule: KvRule, kv_cache_dtype: str) -> bool:
    """Whether the cache is FP8: by `--kv-cache-dtype`, or with `auto` by the checkpoint's own rule."""
    return kv_cache_dtype == "fp8" or is_computed(rule)


def as_cached(x: Tensor, scale: float) -> Tensor:
    """What is read back of `x`, in its dtype."""
    rounded: Tensor = (x.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    made: Tensor = (rounded.float() * scale).to(x.dtype)
    return made


def in_tiles(x: Tensor) -> Tensor:
    """What is read back of a latent [..., L] in tiles of `TILE`."""
    tiles = x.float().reshape(*x.shape[:-1], -1, min(TILE, x.shape[-1]))
    scale = (tiles.abs().amax(-1, keepdim=True) / FP8_MAX).clamp_min(torch.finfo(torch.float32).tiny)
    rounded: Tensor = (tiles / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    made: Tensor = (rounded.float() * scale).flatten(-2).to(x.dtype)
    return made


class _Cache:
    """What a layer's attention takes for a cache that was empty."""

    def __init__(self, scales: CacheScales) -> None:
        self._scales = scales

    def update(self, keys: Tensor, values: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        return as_cached(keys, self._scales.key), as_cached(values, self._scales.value)


@contextmanager
def fp8_cache(layer: nn.Module, scales: CacheScales) -> Iterator[None]:
    """The attention of `layer` reads its keys and values back from such a cache. A layer without `self_attn` has none."""
    attention: Any = getattr(layer, "self_attn", None)
    if attention is None:
        yield
    elif hasattr(attention, "kv_lora_rank"):
        expand, is_sparse = attention.expand_kv, hasattr(attention, "indexer")

        def expand_cached(latent: Tensor, rotated: Tensor) -> Any:
            if is_sparse:
                return expand(in_tiles(latent), rotated)
            return expand(as_cached(latent, scales.key), as_cached(rotated, scales.key))

        attention.expand_kv = expand_cached
        try:
            yield
        finally:
            del attention.expand_kv
    else:

        def give(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            return args, {**kwargs, "past_key_values": _Cache(scales)}

        handle = attention.register_forward_pre_hook(give, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()
