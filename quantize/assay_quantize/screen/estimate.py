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
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from assay_quantize.calibration.one_layer import State
from assay_quantize.screen.compare import LOGIT_BYTES, token_values
from assay_quantize.screen.forward import load_state, save_state
from assay_quantize.screen.layer_model import LayerModel
from assay_quantize.screen.layer_runs import LayerRun, run_all
from assay_quantize.sensitivity.texts import ScoredText

SAMPLED_TEXTS = 3


@dataclass(frozen=True)
class PassCost:
    """Of one checkpoint. flop: of products with weights. kept_bytes: on the disk, when the pass is done; working_bytes: beside
    those, at most, while it runs. fixed_s: whatever the number of texts is; s_per_token: for each token, prompts included;
    layers_s_per_token: of these, in decoder layers. layer_bytes: of weights, the largest layer. num_groups: most groups in
    which the experts of a layer are held; 1: all layers are held whole."""

    num_tokens: int
    read_bytes: int
    flop: float
    kept_bytes: int
    working_bytes: int
    fixed_s: float
    s_per_token: float
    layers_s_per_token: float
    layer_bytes: int
    num_groups: int

    def shared_out(self, num_shares: int) -> PassCost:
        """With so many workers for the layers, each of which reads all of them."""
        saved_s = self.layers_s_per_token * (1 - 1 / num_shares)
        return replace(
            self, read_bytes=self.read_bytes * num_shares, s_per_token=self.s_per_token - saved_s,
            layers_s_per_token=self.layers_s_per_token - saved_s,
        )  # fmt: skip

    @property
    def seconds(self) -> float:
        """Of the pass."""
        return self.fixed_s + self.s_per_token * self.num_tokens


class _Sample(NamedTuple):
    """A few texts through one layer. states: behind it. chosen_bytes: of the experts that their tokens chose. fixed_s: reading
    weights; run_s: everything else. num_groups: in which its experts were held."""

    states: list[State]
    chosen_bytes: int
    fixed_s: float
    run_s: float
    num_groups: int

    @property
    def state_bytes(self) -> int:
        return sum(_bytes_of(state) for state in self.states)

    @property
    def working_bytes(self) -> int:
        """Beside the states in front of it: those behind it, or what groups of experts are called with and add up."""
        hidden_bytes = sum(_bytes_of(state[:1]) for state in self.states)
        called_bytes = hidden_bytes + 6 * self.chosen_bytes  # int64 and FP32 for every int16
        return self.state_bytes if self.num_groups == 1 else hidden_bytes + max(self.state_bytes, called_bytes)


def estimate_pass(model: LayerModel, texts: Sequence[ScoredText], folder: Path, *, has_draft: bool) -> PassCost:
    """model: without weights. texts: one that also runs as two copies at once is there three times. folder: where states will
    lie. has_draft: its MTP block is run, too, which takes about as long as the last layer and two heads. QuantizeError as of
    the pass itself."""
    model.check_room_for_heads()
    sampled = _of_all_lengths(texts)
    model.use_embedding(torch.cat([torch.tensor(text.ids) for text in sampled]))
    num_tokens = sum(len(text.ids) for text in texts)
    share = num_tokens / sum(len(text.ids) for text in sampled)
    kinds = Counter(_kind(model.layer(number)) for number in range(model.num_layers))
    first_of = {_kind(model.layer(number)): number for number in reversed(range(model.num_layers))}
    last_kind = _kind(model.layer(model.num_layers - 1))
    layer_bytes = max(model.parts(number).whole_bytes for number in first_of.values())
    samples: list[_Sample] = []
    fixed_s, run_s, flop, chosen_bytes = 0.0, 0.0, 0.0, 0
    for kind, number in sorted(first_of.items(), key=lambda entry: entry[1]):
        active, outside_experts = _active_weights(model, model.layer(number))
        sample = _sample(model, number, sampled, samples[0].states if samples else None, folder)
        times = kinds[kind] + (has_draft and kind == last_kind)
        flop += kinds[kind] * 2 * (active + (outside_experts if sample.num_groups > 1 else 0)) * num_tokens
        fixed_s += times * sample.fixed_s
        run_s += times * sample.run_s
        chosen_bytes += kinds[kind] * sample.chosen_bytes
        samples.append(sample)
    begin = time.perf_counter()
    with model.head() as logits:
        fixed_s += time.perf_counter() - begin
        ids_1T, state = torch.tensor([sampled[-1].ids]), samples[-1].states[-1]
        num_in_vocabulary = logits(ids_1T, torch.tensor([0]), state).shape[-1]
        places = torch.arange(min(max(1, LOGIT_BYTES // (4 * num_in_vocabulary)), ids_1T.shape[1]))
        begin = time.perf_counter()
        logits_PV = logits(ids_1T, places, state)[0]
        logits_s = (time.perf_counter() - begin) / len(places)
        token_values(logits_PV[:1], logits_PV[:1], ids_1T[0, :1])  # the first call of a kernel takes longer
        begin = time.perf_counter()
        token_values(logits_PV, logits_PV, ids_1T[0, places])
        values_s = (time.perf_counter() - begin) / len(places)
        flop += 2 * num_in_vocabulary * state[0].shape[-1] * num_tokens
    scored = sum(text.num_scored for text in texts) / num_tokens
    layers_s_per_token = run_s * share / num_tokens
    return PassCost(
        num_tokens=num_tokens,
        read_bytes=_read_bytes(model),
        flop=flop,
        kept_bytes=int(share * (samples[-1].state_bytes + chosen_bytes)),
        working_bytes=int(share * max(sample.working_bytes for sample in samples)),
        fixed_s=fixed_s,
        s_per_token=layers_s_per_token + scored * ((4 if has_draft else 2) * logits_s + values_s),
        layers_s_per_token=layers_s_per_token,
        layer_bytes=layer_bytes,
        num_groups=max(sample.num_groups for sample in samples),
    )


def _sample(model: LayerModel, layer: int, texts: Sequence[ScoredText], given: Sequence[State] | None, folder: Path) -> _Sample:
    """given: states in front of the layer; None: it is the first."""
    begin = time.perf_counter()
    loaded = model.load(layer)
    fixed_s = time.perf_counter() - begin
    sequences = [torch.tensor([text.ids]) for text in (texts[0], *texts)]  # the first call of a kernel takes longer
    states: list[State] = []
    chosen_bytes = warm_s = 0.0
    with tempfile.TemporaryDirectory(dir=folder) as place:

        def keep(number: int, ran: LayerRun) -> None:
            nonlocal chosen_bytes, warm_s
            save_state(Path(place), number, ran.state)
            state = load_state(Path(place), number)
            if number == 0:
                warm_s = time.perf_counter()
                return
            states.append(state)
            chosen_bytes += 0 if ran.chosen_experts is None else _bytes_of((ran.chosen_experts,))

        begin = time.perf_counter()
        waited_s = run_all(
            model, layer, loaded, sequences, lambda number: None if given is None else given[max(0, number - 1)], keep,
            Path(place) / "groups",
        )  # fmt: skip
        end = time.perf_counter()
    num_groups = max(1, len(loaded.groups.experts))
    in_groups_s = (end - begin - waited_s) * len(texts) / len(sequences)
    return _Sample(states, int(chosen_bytes), fixed_s + waited_s, end - warm_s if num_groups == 1 else in_groups_s, num_groups)


def _bytes_of(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.element_size() * tensor.numel() for tensor in tensors)


def _of_all_lengths(texts: Sequence[ScoredText]) -> list[ScoredText]:
    by_length = sorted(texts, key=lambda text: len(text.ids))
    count = min(SAMPLED_TEXTS, len(by_length))
    return [by_length[(2 * number + 1) * len(by_length) // (2 * count)] for number in range(count)]


def _kind(layer: nn.Module) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Layers whose parameters have the same names and shapes take the same time."""
    return tuple((name, tuple(tensor.shape)) for name, tensor in layer.state_dict().items())


def _active_weights(model: LayerModel, layer: nn.Module) -> tuple[float, int]:
    """That one token meets, of experts the share that it is sent to; and how many of them are no expert's."""
    config: Any = model.base.config
    num_experts = next(
        (int(getattr(config, key)) for key in ("n_routed_experts", "num_experts", "num_local_experts") if hasattr(config, key)),
        1,
    )
    share = int(getattr(config, "num_experts_per_tok", num_experts)) / max(num_experts, 1)
    in_experts = outside = 0
    for name, tensor in layer.state_dict().items():
        if ".experts." in f".{name}" and tensor.dim() == 3:
            in_experts += tensor.numel()
        elif tensor.dim() > 1:
            outside += tensor.numel()
    return share * in_experts + outside, outside


def _read_bytes(model: LayerModel) -> int:
    names = model.source_names()
    weights = sum(weight.num_bytes for weight in model.stored.weights if weight.name in names)
    return weights + sum(header.num_bytes for name, header in model.stored.others.items() if name in names)
