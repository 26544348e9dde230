"""What a pass will take, before it is made: bytes to read, operations, states on the disk, seconds.

Seconds come from this machine and this checkpoint: one layer of each kind is filled, as the pass will fill it, and a few texts
run through it; a few places go through the head. That costs the share of the pass that those layers are.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from assay_quantize.screen.compare import token_values
from assay_quantize.screen.forward import load_state, save_state
from assay_quantize.screen.layer_model import LayerModel, State
from assay_quantize.sensitivity.texts import ScoredText

SAMPLED_TEXTS = 3
SAMPLED_PLACES = 8


@dataclass(frozen=True)
class PassCost:
    """Of one checkpoint. flop: of products with weights. state_bytes: of one layer, for all texts. fixed_s: whatever the
    number of texts is; s_per_token: for each token, prompts included; layers_s_per_token: of these, in decoder layers."""

    read_bytes: int
    flop: float
    state_bytes: int
    fixed_s: float
    s_per_token: float
    layers_s_per_token: float

    def shared_out(self, num_shares: int) -> PassCost:
        """With so many workers for the layers, each of which reads all of them."""
        saved_s = self.layers_s_per_token * (1 - 1 / num_shares)
        return replace(
            self, read_bytes=self.read_bytes * num_shares, s_per_token=self.s_per_token - saved_s,
            layers_s_per_token=self.layers_s_per_token - saved_s,
        )  # fmt: skip

    def seconds(self, num_tokens: int) -> float:
        """Of a pass over so many tokens, prompts included."""
        return self.fixed_s + self.s_per_token * num_tokens


def estimate_pass(model: LayerModel, texts: Sequence[ScoredText], folder: Path, *, has_draft: bool) -> PassCost:
    """model: without weights. folder: where states will lie. has_draft: its MTP block is run, too, which takes about as long as
    the last layer and two heads. QuantizeError as of the pass itself."""
    num_tokens = sum(len(text.ids) for text in texts)
    sampled = _of_all_lengths(texts)
    sampled_tokens = sum(len(text.ids) for text in sampled)
    model.use_embedding(torch.cat([torch.tensor(text.ids) for text in sampled]))
    kinds = Counter(_kind(model.layer(number)) for number in range(model.num_layers))
    first_of = {_kind(model.layer(number)): number for number in reversed(range(model.num_layers))}
    last_kind = _kind(model.layer(model.num_layers - 1))
    behind_first: list[State] = []
    fixed_s, per_token_s, flop, state_bytes = 0.0, 0.0, 0.0, 0
    with tempfile.TemporaryDirectory(dir=folder) as place:
        for kind, number in sorted(first_of.items(), key=lambda entry: entry[1]):
            flop += kinds[kind] * 2 * _active_weights(model, model.layer(number)) * num_tokens
            times = kinds[kind] + (has_draft and kind == last_kind)
            states: list[State] = []
            model.check_room_for(number)
            begin = time.perf_counter()
            with model.filled(number):
                fixed_s += times * (time.perf_counter() - begin)
                given: list[State | None] = [*behind_first] or [None] * len(sampled)
                model.run(number, torch.tensor([sampled[0].ids]), given[0])  # the first call of a kernel takes longer
                begin = time.perf_counter()
                for index, text in enumerate(sampled):
                    state = model.run(number, torch.tensor([text.ids]), given[index])
                    save_state(Path(place), index, state)
                    states.append(load_state(Path(place), index))
                per_token_s += times * (time.perf_counter() - begin) / sampled_tokens
            behind_first = behind_first or states
            state_bytes = sum(part.element_size() * part.numel() for part in state) * num_tokens // len(sampled[-1].ids)
    begin = time.perf_counter()
    with model.head() as logits:
        fixed_s += time.perf_counter() - begin
        ids_1T = torch.tensor([sampled[-1].ids])
        places = torch.arange(min(SAMPLED_PLACES, ids_1T.shape[1]))
        logits(ids_1T, places, state)
        begin = time.perf_counter()
        ln_p = torch.log_softmax(logits(ids_1T, places, state)[0].double(), dim=-1)
        logits_s = (time.perf_counter() - begin) / len(places)
        token_values(ln_p, ln_p, ids_1T[0, places])
        begin = time.perf_counter()
        token_values(ln_p, ln_p, ids_1T[0, places])
        values_s = (time.perf_counter() - begin) / len(places)
        flop += 2 * ln_p.shape[1] * state[0].shape[-1] * num_tokens
    scored = sum(text.num_scored for text in texts) / num_tokens
    return PassCost(
        _read_bytes(model), flop, state_bytes, fixed_s, per_token_s + scored * ((4 if has_draft else 2) * logits_s + values_s),
        per_token_s,
    )  # fmt: skip


def _of_all_lengths(texts: Sequence[ScoredText]) -> list[ScoredText]:
    by_length = sorted(texts, key=lambda text: len(text.ids))
    count = min(SAMPLED_TEXTS, len(by_length))
    return [by_length[(2 * number + 1) * len(by_length) // (2 * count)] for number in range(count)]


def _kind(layer: nn.Module) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Layers whose parameters have the same names and shapes take the same time."""
    return tuple((name, tuple(tensor.shape)) for name, tensor in layer.state_dict().items())


def _active_weights(model: LayerModel, layer: nn.Module) -> float:
    """That one token meets: of experts the share that it is sent to."""
    config: Any = model.base.config
    num_experts = next(
        (int(getattr(config, key)) for key in ("n_routed_experts", "num_experts", "num_local_experts") if hasattr(config, key)),
        1,
    )
    share = int(getattr(config, "num_experts_per_tok", num_experts)) / max(num_experts, 1)
    active = 0.0
    for name, tensor in layer.state_dict().items():
        if tensor.dim() > 1:
            active += tensor.numel() * (share if ".experts." in f".{name}" and tensor.dim() == 3 else 1.0)
    return active


def _read_bytes(model: LayerModel) -> int:
    names = model.source_names()
    weights = sum(weight.num_bytes for weight in model.stored.weights if weight.name in names)
    return weights + sum(header.num_bytes for name, header in model.stored.others.items() if name in names)
