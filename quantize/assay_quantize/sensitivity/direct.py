"""Proxy `kl`: each part rounded by itself in the model, and the divergence of what it says from the unquantized model's.

The model is whole in memory, in transformers, and is begun anew at any of its layers: with one part of layer L changed,
everything before it is what it was. So the hidden states that enter L are kept (of one layer at a time), and only layers from L
on are run: half the work on average. Earlier layers are told to hand on what they get, which leaves masks, positions and caches
to the model's own code.

The divergence of a part is kept at once, in a file of its own: a run that is killed goes on behind the last one. The folder is
named after all that the numbers depend on. The same machine, versions and number of threads give the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from assay.atomic_files import replacing
from assay.callbacks import Say
from assay.errors import QuantizeError
from assay.quantities import and_more
from assay.records.base import sha256_of
from assay_quantize.calibration.calibrate import in_order
from assay_quantize.calibration.inputs import names_of
from assay_quantize.calibration.quiet import loading
from assay_quantize.checkpoint.fused_experts import FUSED_PARTS
from assay_quantize.sensitivity.parts import Key, Layout
from assay_quantize.sensitivity.rounded import Rounder, RoundInputs, input_args
from assay_quantize.sensitivity.texts import Batch, ScoredText, texts_sha256

HEAD_POSITIONS = 1024
"""Positions whose logits are held at once."""


# ------------------------------------------------------------------------------------------------ the model
@dataclass(frozen=True)
class PassOutput:
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
        experts = ((number, _experts_of(layer)) for number, layer in enumerate(self.layers))
        self._experts = {number: module for number, module in experts if module is not None}
        self._entering: list[Tensor | None] = [None] * len(batches)
        self.layer = 0
        """The layer whose inputs are kept."""

    @torch.no_grad()
    def advance(self) -> None:
        """Run the layer whose inputs are kept by itself: then those of the next one are."""
        for number, batch in enumerate(self.batches):
            outputs: list[Tensor] = []
            handle = self.layers[self.layer].register_forward_hook(lambda _, __, output: outputs.append(output))  # noqa: B023
            try:
                with self._only(range(self.layer, self.layer + 1)), self._entered(number):
                    self._run(batch)
            finally:
                handle.remove()
            self._entering[number] = outputs[0]
        self.layer += 1

    @torch.no_grad()
    def run(self) -> PassOutput:
        """From the layer whose inputs are kept to the end."""
        states: list[Tensor] = []
        experts: dict[int, list[Tensor]] = {}
        for number, batch in enumerate(self.batches):
            chosen: dict[int, Tensor] = {}
            with self._only(range(self.layer, len(self.layers))), self._entered(number), self._choices(batch, chosen):
                last = self._run(batch).last_hidden_state
            states.append(last[batch.scored_BT].float())
            for layer, experts_of_tokens in chosen.items():
                experts.setdefault(layer, []).append(experts_of_tokens)
        return PassOutput(torch.cat(states), {layer: torch.cat(batches) for layer, batches in experts.items()})

    def kl(self, reference_NH: Tensor, candidate_NH: Tensor) -> Tensor:
        """Of the model's own head."""
        return kl_of(self.model.get_output_embeddings(), reference_NH, candidate_NH)

    def _run(self, batch: Batch) -> Any:
        with loading(f"{self.model.name_or_path}: transformers cannot run it"):
            return self.model.base_model(input_ids=batch.ids_BT, use_cache=False)

    @contextmanager
    def _only(self, active: range) -> Iterator[None]:
        """All other layers hand on what they get."""
        skipped = [layer for number, layer in enumerate(self.layers) if number not in active]
        for layer in skipped:
            layer.forward = lambda hidden_states, *_, **__: hidden_states
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
        with ExitStack() as hooks:
            for layer, module in self._experts.items():
                if layer >= self.layer:
                    hooks.callback(keep_experts(module, batch, partial(into.__setitem__, layer)))
            yield


def kl_of(head: Callable[[Tensor], Tensor], reference_NH: Tensor, candidate_NH: Tensor) -> Tensor:
    """KL(reference || candidate) of the full vocabulary by position, FP32 [N], from last hidden states. head: to logits."""
    parts = []
    with torch.no_grad():
        for begin in range(0, len(reference_NH), HEAD_POSITIONS):
            sides = (states_NH[begin : begin + HEAD_POSITIONS] for states_NH in (reference_NH, candidate_NH))
            ln_p, ln_q = (head(states_NH).double().log_softmax(-1) for states_NH in sides)
            parts.append((ln_p.exp() * (ln_p - ln_q)).sum(-1).clamp_min(0).float())  # below zero is rounding
    return torch.cat(parts)


def keep_experts(module: nn.Module, batch: Batch, keep: Callable[[Tensor], None]) -> Callable[[], None]:
    """Whenever a layer's module of experts is given a batch, hand the experts of each real token, sorted, to `keep`. Returns
    what ends it."""
    real = batch.real_BT.reshape(-1)

    def hook(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        chosen = next((tensor for tensor in tensors if not tensor.is_floating_point() and tensor.dim() == 2), None)
        if chosen is not None and len(chosen) == len(real):
            keep(chosen[real].sort(-1).values.to(torch.int16).clone())

    return module.register_forward_pre_hook(hook, with_kwargs=True).remove


def other_experts(reference: dict[int, Tensor], other: dict[int, Tensor]) -> dict[int, float]:
    """Layer -> share of tokens whose set of chosen experts differs."""
    return {
        layer: float((chosen != reference[layer]).any(-1).double().mean())
        for layer, chosen in other.items()
        if layer in reference
    }


def _layers_of(model: Any) -> nn.ModuleList:
    """The decoder layers. QuantizeError: none are found, or they do not hand on a plain tensor of hidden states."""
    count = model.config.num_hidden_layers
    lists = (module for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and name.endswith("layers"))
    layers = next((modules for modules in lists if len(modules) == count), None)
    if layers is None:
        raise QuantizeError(f"{type(model).__name__}: no list of its {count} layers is found; use --proxy weights")
    return layers


def _experts_of(layer: nn.Module) -> nn.Module | None:
    """The module that is given every token's experts."""
    for module in layer.modules():
        if any(parameter.dim() == 3 and name in FUSED_PARTS for name, parameter in module.named_parameters(recurse=False)):
            return module
    return None


def _views(model: nn.Module) -> dict[str, Tensor]:
    """Name of a weight in the checkpoint -> where it lies in the model."""
    views: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        prefix, _, leaf = name.rpartition(".")
        if parameter.dim() == 2:
            views[name] = parameter.data
        elif parameter.dim() == 3 and leaf in FUSED_PARTS:
            for expert, weight in enumerate(parameter.data):
                parts = FUSED_PARTS[leaf]
                for part, rows in zip(parts, weight.chunk(len(parts)), strict=True):
                    views[f"{prefix}.{expert}.{part}.weight"] = rows
    return views


# ------------------------------------------------------------------------------------------------ parts
@dataclass(frozen=True)
class Divergence:
    """Of one part, or of a whole precision. kl_N: nats at each scored position, text after text in the order of
    `texts`. other_experts: layer -> share of tokens that chose other experts."""

    kl_N: npt.NDArray[np.float32]
    other_experts: dict[int, float]


@dataclass(frozen=True)
class Cost:
    """Estimated from one pass of the unquantized model, before anything is rounded."""

    num_passes: float
    cpu_seconds: float
    bytes_kept: int


def identity(layout: Layout, texts: Sequence[ScoredText], calibration_sha256: str | None = None) -> str:
    """Of what all numbers depend on: the source's data, the texts, how weights are rounded, the versions that compute."""
    import transformers

    made_from = [
        dict(layout.checkpoint.data),
        texts_sha256(texts),
        layout.observer,
        torch.__version__,
        transformers.__version__,
        *([] if calibration_sha256 is None else [calibration_sha256]),
    ]
    return sha256_of(made_from)[:16]


class DivergenceStore:
    """The divergence of each part, a file each. folder: None: nothing is kept."""

    def __init__(self, folder: Path | None, num_positions: int) -> None:
        self.folder, self._num_positions = folder, num_positions

    def load(self, name: str) -> Divergence | None:
        """None: not measured yet, or the file is damaged."""
        from safetensors import SafetensorError, safe_open

        if self.folder is None:
            return None
        try:
            with safe_open(self.folder / f"{name}.safetensors", framework="np") as file:
                metadata = file.metadata() or {}
                kl_N = file.get_tensor("kl")
        except (SafetensorError, OSError):
            return None
        details = metadata.get("found", "")
        if kl_N.shape != (self._num_positions,) or metadata.get("sha256") != _sha256(kl_N, details):
            return None
        experts = json.loads(details)["other_experts"]
        return Divergence(kl_N, {int(layer): float(share) for layer, share in experts.items()})

    def save(self, name: str, divergence: Divergence) -> None:
        from safetensors.numpy import save

        if self.folder is None:
            return
        details, kl_N = json.dumps({"other_experts": divergence.other_experts}, sort_keys=True), divergence.kl_N
        with replacing(self.folder / f"{name}.safetensors") as path:
            path.write_bytes(in_order(save({"kl": kl_N}, {"found": details, "sha256": _sha256(kl_N, details)})))


def _sha256(kl_N: npt.NDArray[np.float32], details: str) -> str:
    return hashlib.sha256(kl_N.tobytes() + details.encode()).hexdigest()


class Direct:
    """All parts of a checkpoint on some texts. keep: folder of their divergences; None: nothing is kept."""

    def __init__(
        self, layout: Layout, rounder: Rounder, runner: Runner, texts: Sequence[ScoredText], keep: Path | None, say: Say
    ) -> None:
        self._layout, self._rounder, self._runner, self._say = layout, rounder, runner, say
        self._positions = positions_in_pass(runner.batches, texts)
        folder = None if keep is None else keep / identity(layout, texts, rounder.calibration_sha256)
        self._store = DivergenceStore(folder, len(self._positions))
        started = os.times()
        self._reference = runner.run()
        ended = os.times()
        self._pass_s = ended.user + ended.system - started.user - started.system
        of_mtp = layout.weights.get(Key(None, "mtp"), ())  # which transformers leaves out by design
        missing = sorted(set().union(*layout.weights.values()) - runner.views.keys() - set(of_mtp))
        if missing:
            raise QuantizeError(
                f"{layout.checkpoint.location}: transformers builds no parameter for {and_more(missing)}; "
                "use --proxy weights, which reads the checkpoint only"
            )

    def cost(self, pairs: Sequence[tuple[Key, str]]) -> Cost:
        """What is not measured yet, in passes of the whole model."""
        layers = len(self._runner.layers)
        left = [key for key, scheme in pairs if self._store.load(part_name(key, scheme)) is None]
        wholes = [name for name in self._layout.wholes() if self._store.load(part_name(None, name)) is None]
        passes = sum(1 - (key.layer or 0) / layers for key in left) + len(wholes) + 1
        return Cost(passes, passes * self._pass_s, 4 * len(self._reference.states_NH) * len(left))

    def noise(self) -> float:
        """KL of the unquantized model against itself, run once more from the middle of its layers. Call it last."""
        if self._runner.layer == 0:
            self._runner.advance()
        return float(self._runner.kl(self._reference.states_NH, self._runner.run().states_NH).double().mean())

    def wholes(self) -> Iterator[tuple[str, Divergence]]:
        """Every scheme in all parts that it fits, and every mix. Call it first: the model is run from its first layer."""
        assert self._runner.layer == 0
        for whole, chosen in self._layout.wholes().items():
            name = part_name(None, whole)
            if (divergence := self._store.load(name)) is None:
                self._say(f"{whole} in every part" if whole in self._layout.plans else "a mix as a whole")
                with self._rounded(chosen):
                    divergence = self._measure()
                self._store.save(name, divergence)
            yield whole, divergence

    def parts(self, pairs: Sequence[tuple[Key, str]]) -> Iterator[tuple[Key, str, Divergence]]:
        """Of each pair, layer after layer: pairs must be sorted by layer."""
        for number, (key, scheme) in enumerate(pairs, 1):
            name = part_name(key, scheme)
            if (divergence := self._store.load(name)) is None:
                assert key.layer is not None and self._runner.layer <= key.layer, "pairs are sorted by layer"
                while self._runner.layer < key.layer:
                    self._runner.advance()
                with self._rounded({key: scheme}):
                    divergence = self._measure()
                self._store.save(name, divergence)
                self._say(f"{number} of {len(pairs)}: {key}, {scheme}: {divergence.kl_N.mean(dtype=np.float64):.3g} nats")
            yield key, scheme, divergence

    # -------------------------------------------------------------------------------------------- one measurement
    @contextmanager
    def _rounded(self, chosen: Mapping[Key, str]) -> Iterator[None]:
        """The parts rounded in the model, each in its scheme, and plain again afterwards."""
        views = self._runner.views
        before: dict[str, Tensor] = {}
        scheme_of: dict[str, str] = {}
        try:
            for key, scheme in chosen.items():
                for name, plain, back in self._rounder.weights(key, scheme):
                    before[name], scheme_of[name] = views[name].clone(), scheme
                    if before[name].shape != plain.shape:
                        raise QuantizeError(
                            f"{name}: transformers builds it as {list(before[name].shape)}, not {list(plain.shape)}"
                        )
                    views[name].copy_(back)
            addresses = self._runner.addresses.items()
            watched = {at: scheme_of[name] for at, names in addresses for name in names if name in scheme_of}
            with RoundInputs(watched) if any(map(input_args, chosen.values())) else nullcontext():
                yield
        finally:
            for name, plain in before.items():
                views[name].copy_(plain)

    def _measure(self) -> Divergence:
        output = self._runner.run()
        kl_N = self._runner.kl(self._reference.states_NH, output.states_NH).cpu().numpy()
        check_finite(kl_N, self._layout)
        return Divergence(kl_N[self._positions], other_experts(self._reference.experts, output.experts))


def check_finite(kl_N: npt.NDArray[np.float32], layout: Layout) -> None:
    if not np.isfinite(kl_N).all():
        raise QuantizeError(f"{layout.checkpoint.location}: a part gives infinite divergence; leave its scheme out")


def part_name(key: Key | None, scheme: str) -> str:
    return f"all-{scheme}" if key is None else f"layer-{key.layer:05d}-{key.role}-{scheme}"


def positions_in_pass(batches: Sequence[Batch], texts: Sequence[ScoredText]) -> npt.NDArray[np.intp]:
    """Where each text's positions stand in a pass, in the order of `texts`: batches are sorted by length."""
    begins = np.zeros(len(texts), np.intp)
    position = 0
    for batch in batches:
        for text in batch.texts:
            begins[text] = position
            position += texts[text].num_scored
    parts = [np.arange(begin, begin + text.num_scored) for begin, text in zip(begins, texts, strict=True)]
    return np.concatenate(parts)


def most_disturbed_router(other_experts: Mapping[int, float]) -> tuple[int, float] | None:
    """(layer, share) of the router that is disturbed most; None where no router was looked at."""
    return max(other_experts.items(), key=lambda item: (item[1], -item[0])) if other_experts else None
