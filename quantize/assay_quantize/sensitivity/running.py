"""The model in transformers, whole in memory, begun anew at any of its layers.

With one part of layer L changed, everything before it is what it was. So the hidden states that enter L are kept (of one layer
at a time), and only layers from L on are run: half the work on average. Earlier layers are told to hand on what they get, which
leaves masks, positions and caches to the model's own code.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from assay.errors import QuantizeError
from assay_quantize.calibration.calibrate import names_of
from assay_quantize.calibration.quiet import loading
from assay_quantize.checkpoint.fused_experts import FUSED_PARTS
from assay_quantize.sensitivity.texts import Batch

HEAD_POSITIONS = 1024
"""Positions whose logits are held at once."""


@dataclass(frozen=True)
class Passed:
    """What one pass over all batches gave. states_NH: last hidden states at scored places, batch after batch, FP32. experts:
    layer -> chosen experts of each real token, sorted, int16 [tokens, k]; of layers that were run."""

    states_NH: Tensor
    experts: dict[int, Tensor]


class Runner:
    """model: of `calibration.load_model`. batches: what it reads."""

    def __init__(self, model: Any, batches: Sequence[Batch]) -> None:
        self.model, self.batches = model, batches
        self.layers = _layers_of(model)
        self.addresses = names_of(model)
        self.views = _views(model)
        self._experts = {at: found for at, layer in enumerate(self.layers) if (found := _experts_of(layer)) is not None}
        self._entering: list[Tensor | None] = [None] * len(batches)
        self.layer = 0
        """The layer whose inputs are kept."""

    @torch.no_grad()
    def advance(self) -> None:
        """Run the layer whose inputs are kept by itself: then those of the next one are."""
        for number, batch in enumerate(self.batches):
            left: list[Tensor] = []
            with self._only(range(self.layer, self.layer + 1)), self._entered(number), _leaving(self.layers[self.layer], left):
                self._run(batch)
            self._entering[number] = left[0]
        self.layer += 1

    @torch.no_grad()
    def run(self) -> Passed:
        """From the layer whose inputs are kept to the end."""
        states: list[Tensor] = []
        experts: dict[int, list[Tensor]] = {}
        for number, batch in enumerate(self.batches):
            chosen: dict[int, Tensor] = {}
            with self._only(range(self.layer, len(self.layers))), self._entered(number), self._choices(batch, chosen):
                last = self._run(batch).last_hidden_state
            states.append(last[batch.scored_BT].float())
            for layer, one in chosen.items():
                experts.setdefault(layer, []).append(one)
        return Passed(torch.cat(states), {layer: torch.cat(found) for layer, found in experts.items()})

    @torch.no_grad()
    def kl(self, reference: Tensor, other: Tensor) -> Tensor:
        """KL(reference || other) of the full vocabulary at each place, FP32 [N], from last hidden states [N, H]."""
        head = self.model.get_output_embeddings()
        found = []
        for begin in range(0, len(reference), HEAD_POSITIONS):
            ln_p, ln_q = (head(side[begin : begin + HEAD_POSITIONS]).double().log_softmax(-1) for side in (reference, other))
            found.append((ln_p.exp() * (ln_p - ln_q)).sum(-1).clamp_min(0).float())  # below zero is rounding
        return torch.cat(found)

    def _run(self, batch: Batch) -> Any:
        with loading(f"{self.model.name_or_path}: transformers cannot run it"):
            return self.model.base_model(input_ids=batch.ids_BT, use_cache=False)

    @contextmanager
    def _only(self, active: range) -> Iterator[None]:
        """All other layers hand on what they get."""
        skipped = [layer for at, layer in enumerate(self.layers) if at not in active]
        for layer in skipped:
            layer.forward = _hand_on
        try:
            yield
        finally:
            for layer in skipped:
                del layer.forward  # that of its class again

    @contextmanager
    def _entered(self, number: int) -> Iterator[None]:
        """The layer whose inputs are kept gets them, whatever comes."""
        kept = self._entering[number]
        if kept is None:  # layer 0: what the embedding gives
            yield
            return

        def replaced(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return ((kept, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": kept})

        handle = self.layers[self.layer].register_forward_pre_hook(replaced, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    @contextmanager
    def _choices(self, batch: Batch, into: dict[int, Tensor]) -> Iterator[None]:
        real = batch.real_BT.reshape(-1)
        with ExitStack() as hooks:
            for layer, module in self._experts.items():
                if layer < self.layer:
                    continue

                def keep(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], layer: int = layer) -> None:
                    given = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)]
                    chosen = next((one for one in given if not one.is_floating_point() and one.dim() == 2), None)
                    if chosen is not None and len(chosen) == len(real):
                        into[layer] = chosen[real].sort(-1).values.to(torch.int16).clone()

                hooks.callback(module.register_forward_pre_hook(keep, with_kwargs=True).remove)
            yield


def other_experts(reference: dict[int, Tensor], other: dict[int, Tensor]) -> dict[int, float]:
    """Layer -> share of tokens whose set of chosen experts differs."""
    return {
        layer: float((chosen != reference[layer]).any(-1).double().mean())
        for layer, chosen in other.items()
        if layer in reference
    }


def _hand_on(hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
    return hidden_states


@contextmanager
def _leaving(layer: nn.Module, into: list[Tensor]) -> Iterator[None]:
    handle = layer.register_forward_hook(lambda _, __, output: into.append(output))
    try:
        yield
    finally:
        handle.remove()


def _layers_of(model: Any) -> nn.ModuleList:
    """The decoder layers. QuantizeError: none are found, or they do not hand on a plain tensor of hidden states."""
    count = model.config.num_hidden_layers
    found = [one for name, one in model.named_modules() if isinstance(one, nn.ModuleList) and name.endswith("layers")]
    layers = next((one for one in found if len(one) == count), None)
    if layers is None:
        raise QuantizeError(f"{type(model).__name__}: no list of its {count} layers is found; use --proxy fisher or weights")
    return layers


def _experts_of(layer: nn.Module) -> nn.Module | None:
    """The module that is given every token's experts."""
    for module in layer.modules():
        if any(parameter.dim() == 3 and name in FUSED_PARTS for name, parameter in module.named_parameters(recurse=False)):
            return module
    return None


def _views(model: nn.Module) -> dict[str, Tensor]:
    """Name of a weight in the checkpoint -> where it lies in the model."""
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        prefix, _, leaf = name.rpartition(".")
        if parameter.dim() == 2:
            found[name] = parameter.data
        elif parameter.dim() == 3 and leaf in FUSED_PARTS:
            for expert, weight in enumerate(parameter.data):
                parts = FUSED_PARTS[leaf]
                for part, rows in zip(parts, weight.chunk(len(parts)), strict=True):
                    found[f"{prefix}.{expert}.{part}.weight"] = rows
    return found
