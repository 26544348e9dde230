"""Graded damages of a small model's weights, so that `meaning.py` has candidates that lose from nothing to everything.

    noise-S          Gaussian noise of S root mean squares of each matrix on the routed experts of every layer
    attention-S      the same on the projections of attention
    layer-2-bits     the routed experts of layer 2 rounded to four levels a row
    routers-2-bits   the routers of every layer rounded to four levels a row
    long-range       of `planted_checkpoints.py`: attention scores fall over hundreds of tokens; for models whose queries
                     have a bias

All noise is seeded: the same source gives the same bytes. The block of the MTP head is left as it is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "verdicts"))  # python is run with PYTHONSAFEPATH
from planted_checkpoints import MTP_BLOCK, Tensors, favour_the_near, write_edited

Edit = Callable[[Tensors, Tokenizer], Tensors]
LAYER = 2


def of_experts(tensors: Tensors, layer: int | None = None) -> Iterator[str]:
    """Names of the matrices of routed experts, of one layer or of all."""
    of_layer = "" if layer is None else f".layers.{layer}."
    yield from (name for name in sorted(tensors) if ".mlp.experts." in name and of_layer in name and MTP_BLOCK not in name)


def of_attention(tensors: Tensors) -> Iterator[str]:
    """Names of the matrices of attention."""
    yield from (
        name for name in sorted(tensors) if name.endswith("_proj.weight") and ".self_attn." in name and MTP_BLOCK not in name
    )


def of_routers(tensors: Tensors) -> Iterator[str]:
    """Names of the matrices that choose experts."""
    yield from (name for name in sorted(tensors) if name.endswith(".mlp.gate.weight") and MTP_BLOCK not in name)


def noisy(names: Callable[[Tensors], Iterator[str]], size: float) -> Edit:
    """size: standard deviation, in root mean squares of each matrix."""

    def edit(tensors: Tensors, tokenizer: Tokenizer) -> Tensors:
        generator, changed = torch.Generator().manual_seed(1), {}
        for name in names(tensors):
            w_OI = tensors[name].float()
            noise_OI = torch.randn(w_OI.shape, generator=generator)
            changed[name] = (w_OI + size * w_OI.square().mean().sqrt() * noise_OI).to(tensors[name].dtype)
        return changed

    return edit


def of_four_levels(names: Callable[[Tensors], Iterator[str]]) -> Edit:
    """Rounds to -1.5, -0.5, 0.5 and 1.5 steps, of a row whose largest value lies at 1.5."""

    def edit(tensors: Tensors, tokenizer: Tokenizer) -> Tensors:
        changed = {}
        for name in names(tensors):
            w_OI = tensors[name].float()
            step_O1 = w_OI.abs().amax(1, keepdim=True).clamp_min(1e-30) / 1.5
            rounded_OI = ((w_OI / step_O1).floor() + 0.5).clamp(-1.5, 1.5) * step_O1
            changed[name] = rounded_OI.to(tensors[name].dtype)
        return changed

    return edit


NOISE: Mapping[str, Edit] = {f"noise-{size:g}": noisy(of_experts, size) for size in (0.4, 0.8, 1.6, 3.2)}
DAMAGES: Mapping[str, Edit] = {
    **NOISE,
    "attention-0.4": noisy(of_attention, 0.4),
    "layer-2-bits": of_four_levels(lambda tensors: of_experts(tensors, LAYER)),
    "routers-2-bits": of_four_levels(of_routers),
    "long-range": favour_the_near,
}
"""Name -> from all tensors of the source and its tokenizer, the tensors that are different."""


def make(source: Path, out: Path, name: str) -> None:
    """The source's files with a damage, or with none if `name` is none of `DAMAGES`; `out` must not exist."""
    write_edited(source, out, name, DAMAGES.get(name, lambda tensors, tokenizer: {}))
