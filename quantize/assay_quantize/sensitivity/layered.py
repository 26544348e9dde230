"""Proxies `kl` and `hidden` of a model that does not fit into memory: one decoder layer at a time, states on the disk.

    reference:   layer 0 -> layer 1 -> layer 2 -> ... -> head
    part of 0:   rounded -> layer 1 -> layer 2 -> ... -> head      each part in each scheme is a stream of its own,
    part of 1:              rounded -> layer 2 -> ... -> head      begun where the reference enters its layer

A layer is filled once; the streams of all parts before it go through it, then its own parts are rounded one after the other and
their streams begin. Behind the last layer every stream goes through the head beside the reference. These are the numbers that
`direct.py` gives, with as many passes through layers; what it keeps in memory lies here on the disk: a state for each stream.
Proxy `hidden` is what a stream differs by behind its own layer, and goes no further: parts need one layer each.
"""

from __future__ import annotations

import functools
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from assay.atomic_files import naming
from assay.callbacks import Say
from assay.errors import QuantizeError
from assay.quantities import size
from assay.recipes.family_names import split_layer
from assay.recipes.text_config import size_of, text_of
from assay.records.base import write_text_atomically
from assay.records.diagnosis.sensitivity import WorstTensor
from assay.records.plan import Plan
from assay_quantize.calibration.memory import SPARE_BYTES
from assay_quantize.calibration.quiet import quiet
from assay_quantize.checkpoint.source_reader import SourceReader
from assay_quantize.sensitivity.direct import (
    HEAD_POSITIONS,
    Divergence,
    DivergenceStore,
    check_finite,
    identity,
    keep_experts,
    kl_of,
    other_experts,
    part_name,
    positions_in_pass,
)
from assay_quantize.sensitivity.parts import Key, Layout
from assay_quantize.sensitivity.rounded import Rounder, RoundInputs, input_args, relative_error
from assay_quantize.sensitivity.texts import ScoredText, batched
from assay_quantize.storage.resident import resident_bytes

BATCH_TOKENS = 2048
REFERENCE = "reference"
HIDDEN = "hidden.json"
Pair = tuple[Key, str]


class Layered:
    """All parts of a checkpoint on some texts. keep: folder of the divergences and of the states."""

    def __init__(
        self, layout: Layout, rounder: Rounder, reader: SourceReader, texts: Sequence[ScoredText], keep: Path, say: Say
    ) -> None:
        """Raises QuantizeError: transformers builds no such model, or calls its tensors otherwise."""
        from assay_quantize.calibration.skeleton import Skeleton

        assert layout.checkpoint.folder is not None
        self._layout, self._rounder, self._reader, self._say = layout, rounder, reader, say
        self._batches = batched(texts, BATCH_TOKENS)
        self._positions = positions_in_pass(self._batches, texts)
        self._plan = next(iter(layout.plans.values()))
        self._folder = keep / f"{identity(layout, texts, rounder.calibration_sha256)}-by-layer"
        self._store = DivergenceStore(self._folder, len(self._positions))
        with quiet():
            self._skeleton = Skeleton(layout.checkpoint.folder, self._plan, torch.float32)
        self.hidden: dict[Pair, float] = {}
        """Of each part whose layer was run: squared error of the states behind it over their squared norm, mean over tokens."""
        self.weights: dict[Pair, tuple[float, tuple[WorstTensor, ...]]] = {}
        """Of the same: what proxy `weights` says (`rounded.relative_error`)."""
        self._others: dict[str, dict[int, float]] = {}
        """Stream -> layer -> tokens with other experts."""

    def run(self, *, to_the_end: bool) -> None:
        """Every layer. to_the_end: streams go on behind their own layer, for `divergences`. Goes on where a killed run stopped.

        QuantizeError: the states do not fit on the disk."""
        if self._is_done(to_the_end):
            return
        folder, begin = self._resumed(to_the_end)
        self._check_disk(to_the_end)
        with quiet(), torch.no_grad():
            for layer in range(begin, self._skeleton.num_layers):
                folder = self._layer(layer, folder, to_the_end)
                self._say(f"layer {layer + 1} of {self._skeleton.num_layers}, {len(self._others) or 1} streams")
            if to_the_end:
                assert folder is not None
                self._judge(folder)
        # after the last layer nobody needs the states
        self._folder.mkdir(parents=True, exist_ok=True)
        write_text_atomically(self._folder / HIDDEN, json.dumps(self._rows()))
        for path in self._folder.glob("*after-*"):
            shutil.rmtree(path)

    def divergences(self) -> Iterator[tuple[Key | None, str, Divergence]]:
        """Of every part and scheme; key None: of a whole of the layout, by its name."""
        for key, scheme in self._all():
            divergence = self._store.load(part_name(key, scheme))
            assert divergence is not None, "`run` went to the end"
            yield key, scheme, divergence

    def _all(self) -> list[tuple[Key | None, str]]:
        return [*((None, whole) for whole in self._layout.wholes()), *self._layout.pairs()]

    # -------------------------------------------------------------------------------------------- one layer
    def _layer(self, layer: int, before: Path | None, to_the_end: bool) -> Path:
        """The states behind a layer, from those in front of it; these go once those are whole."""
        after = self._folder / f"after-{layer:05d}"
        partial = after.with_name(f".{after.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        skeleton = self._skeleton
        if before is None:
            skeleton.use_embedding(self._reader, torch.cat([batch.ids_BT.reshape(-1) for batch in self._batches]))
        elif layer:
            skeleton.pass_embedding()
        with skeleton.filled(layer, self._reader) as whole:
            chosen = self._through(layer, whole, REFERENCE, before, partial)
            if to_the_end:
                for key, scheme in self._layout.pairs():
                    if key.layer is not None and key.layer < layer:
                        name = part_name(key, scheme)
                        self._note(name, layer, chosen, self._through(layer, whole, name, before, partial))
                for whole_name, schemes in self._layout.wholes().items():
                    name = part_name(None, whole_name)
                    with self._rounded(layer, whole, {key: scheme for key, scheme in schemes.items() if key.layer == layer}):
                        source = before if layer else None
                        self._note(name, layer, chosen, self._through(layer, whole, name, source, partial))
            for key, scheme in (pair for pair in self._layout.pairs() if pair[0].layer == layer):
                name = part_name(key, scheme)
                with self._rounded(layer, whole, {key: scheme}, compared=(key, scheme)):
                    own = self._through(layer, whole, name, before, partial, entering=REFERENCE)
                self._note(name, layer, chosen, own)
                self.hidden[key, scheme] = self._difference(partial, name)
                if not to_the_end:
                    for path in partial.glob(f"{name}.*"):
                        path.unlink()
        shutil.rmtree(after, ignore_errors=True)  # of a run for other schemes, or damaged
        with naming(partial):
            (partial / "told.json").write_text(json.dumps({"parts": self._rows(), "others": self._others}), encoding="utf-8")
            os.replace(partial, after)
        if before is not None:
            shutil.rmtree(before)
        return after

    def _through(
        self, layer: int, whole: nn.Module, name: str, before: Path | None, after: Path, *, entering: str | None = None
    ) -> dict[int, Tensor]:
        """A stream through the layer that is filled. entering: whose states it is given; None: its own. Returns the experts
        that its tokens chose, by batch."""
        from llmcompressor.modeling.moe.linear_experts import LinearExperts2D

        from assay_quantize.calibration.methods import plain_forward

        chosen: dict[int, Tensor] = {}
        for number, batch in enumerate(self._batches):
            state = None if before is None else _load(before, entering or name, number)
            with plain_forward(self._skeleton.model), ExitStack() as hooks:
                for module in whole.modules():
                    if isinstance(module, LinearExperts2D):
                        hooks.callback(keep_experts(module, batch, functools.partial(chosen.__setitem__, number)))
                outputs = self._skeleton.run(layer, batch.ids_BT, state)
            for part, tensor in enumerate(outputs):
                path = after / _file(name, number, part)
                with naming(path):
                    np.save(path, tensor.detach().cpu().numpy(), allow_pickle=False)
        return chosen

    @contextmanager
    def _rounded(
        self, layer: int, whole: nn.Module, chosen: Mapping[Key, str], *, compared: Pair | None = None
    ) -> Iterator[None]:
        """Parts of the layer rounded, each in its scheme, and plain again afterwards: read once more, so that no copy is kept.
        compared: the only one, whose `weights` are found on the way."""
        prefix = f"{self._skeleton.prefix}.{layer}."
        parameters = {f"{prefix}{name}": parameter for name, parameter in whole.named_parameters()}
        changed: dict[str, str] = {}

        def copied(key: Key, scheme: str) -> Iterator[tuple[str, Tensor, Tensor]]:
            for name, plain, back in self._rounder.weights(key, scheme):
                if name not in parameters:
                    raise QuantizeError(
                        f"{self._layout.checkpoint.location}: transformers builds no parameter for {name}; use --proxy "
                        "weights, which reads the checkpoint only"
                    )
                changed[name] = scheme
                parameters[name].copy_(back)
                yield name, plain, back

        try:
            if compared is not None:
                self.weights[compared] = relative_error(copied(*compared))
            else:
                for part in chosen.items():
                    for _ in copied(*part):
                        pass
            watched = {parameters[name].data_ptr(): scheme for name, scheme in changed.items()}
            with RoundInputs(watched) if any(map(input_args, chosen.values())) else nullcontext():
                yield
        finally:
            for name in changed:
                parameters[name].copy_(self._skeleton.plain(self._reader, name))

    def _note(self, name: str, layer: int, reference: Mapping[int, Tensor], own: Mapping[int, Tensor]) -> None:
        if reference and reference.keys() == own.keys():
            whole = ({layer: torch.cat([chosen[number] for number in sorted(chosen)])} for chosen in (reference, own))
            self._others.setdefault(name, {}).update(other_experts(*whole))

    def _difference(self, folder: Path, name: str) -> float:
        total = tokens = 0.0
        for number, batch in enumerate(self._batches):
            plain, other = (_load(folder, stream, number)[0][batch.real_BT].double() for stream in (REFERENCE, name))
            total += float(((other - plain).square().sum(-1) / plain.square().sum(-1)).sum())
            tokens += len(plain)
        return total / tokens

    # -------------------------------------------------------------------------------------------- the head
    def _judge(self, folder: Path) -> None:
        """KL of every stream's words from the reference's."""
        head = self._skeleton.head(self._reader)
        reference_NH = self._scored(folder, REFERENCE)
        for key, scheme in self._all():
            name = part_name(key, scheme)
            if self._store.load(name) is not None:
                continue
            kl_N = kl_of(head, reference_NH, self._scored(folder, name)).numpy()
            check_finite(kl_N, self._layout)
            self._store.save(name, Divergence(kl_N[self._positions], self._others.get(name, {})))

    def _scored(self, folder: Path, name: str) -> Tensor:
        return torch.cat([_load(folder, name, number)[0][b.scored_BT] for number, b in enumerate(self._batches)])

    # -------------------------------------------------------------------------------------------- what is kept
    def _resumed(self, to_the_end: bool) -> tuple[Path | None, int]:
        """The states behind the last layer that is done, and the next layer."""
        for path in sorted(self._folder.glob("after-*"), reverse=True):
            try:
                progress = json.loads((path / "told.json").read_text(encoding="utf-8"))
            except (OSError, ValueError, RecursionError):
                continue
            if not isinstance(progress, dict) or progress.keys() != {"parts", "others"}:
                continue
            layer = int(path.name.removeprefix("after-"))
            done = {(Key(number, role), scheme) for number, role, scheme, *_ in progress["parts"]}
            needed = {pair for pair in self._layout.pairs() if pair[0].layer is not None and pair[0].layer <= layer}
            streams = (
                [part_name(*pair) for pair in (*((None, s) for s in self._layout.wholes()), *needed)] if to_the_end else []
            )
            if not needed <= done or not all(self._has_states(path, name) for name in (REFERENCE, *streams)):
                continue  # of a run for other schemes, or for `hidden`; or what a crash has left
            self._take(progress["parts"])
            others = progress["others"]
            self._others = {name: {int(number): share for number, share in of.items()} for name, of in others.items()}
            return path, layer + 1
        return None, 0

    def _has_states(self, folder: Path, name: str) -> bool:
        """Whether the states of a stream are there, to their last byte."""
        for number, batch in enumerate(self._batches):
            try:
                state = np.load(folder / _file(name, number, 0), mmap_mode="r", allow_pickle=False)
            except (OSError, ValueError):
                return False
            if state.shape[: batch.ids_BT.dim()] != tuple(batch.ids_BT.shape):
                return False
        return True

    def _is_done(self, to_the_end: bool) -> bool:
        path = self._folder / HIDDEN
        if not path.is_file() or (to_the_end and any(self._store.load(part_name(*pair)) is None for pair in self._all())):
            return False
        self._take(json.loads(path.read_text(encoding="utf-8")))
        return all(pair in self.hidden for pair in self._layout.pairs())

    def _rows(self) -> list[Any]:
        rows = []
        for (key, scheme), value in self.hidden.items():
            error, worst = self.weights[key, scheme]
            rows.append([key.layer, key.role, scheme, value, error, [[tensor.name, tensor.share] for tensor in worst]])
        return rows

    def _take(self, rows: list[Any]) -> None:
        """Of schemes that are asked for now."""
        for layer, role, scheme, value, error, worst in rows:
            pair = Key(layer, role), scheme
            self.hidden[pair] = value
            self.weights[pair] = error, tuple(WorstTensor(name=name, share=share) for name, share in worst)

    def _check_disk(self, to_the_end: bool) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        tokens = sum(batch.ids_BT.numel() for batch in self._batches)
        longest = max(batch.ids_BT.shape[1] for batch in self._batches)
        needed = states_bytes(self._layout, tokens, longest, to_the_end=to_the_end)
        free = shutil.disk_usage(self._folder).free
        if needed > free:
            raise QuantizeError(
                f"{self._folder}: states take up to {size(needed)}, {size(free)} are free on its disk; fewer --tokens or "
                "--schemes, or --proxy hidden, which keeps two states"
            )


def _file(name: str, batch: int, part: int) -> str:
    return f"{name}.{batch:05d}-{part}.npy"


def _load(folder: Path, name: str, batch: int) -> tuple[Tensor, ...]:
    parts: list[Tensor] = []
    while (path := folder / _file(name, batch, len(parts))).is_file():
        parts.append(torch.from_numpy(np.load(path, allow_pickle=False)))
    return tuple(parts)


# ------------------------------------------------------------------------------------------------ what it takes
def needed_bytes(plan: Plan, longest: int) -> int:
    """Memory beyond that of the process: the largest layer in FP32 with one weight being rounded and a batch, or the head."""
    layers: dict[int, int] = {}
    widest = largest = 0
    for tensor in plan.tensors:
        place = split_layer(tensor.name)
        if place is not None and tensor.role != "mtp":
            layers[place.layer] = layers.get(place.layer, 0) + math.prod(tensor.shape)
            if len(tensor.shape) == 2:
                widest, largest = max(widest, *tensor.shape), max(largest, math.prod(tensor.shape))
    text = text_of(plan.config)
    tokens = max(BATCH_TOKENS, longest)
    scores = 3 * tokens * longest * size_of(text, "num_attention_heads", 1)
    layer = 4 * (max(layers.values(), default=0) + 4 * largest + scores + 12 * tokens * widest)
    words = size_of(text, "vocab_size")
    return max(layer, words * (4 * size_of(text, "hidden_size") + 4 * 8 * HEAD_POSITIONS)) + SPARE_BYTES


def whole_bytes(plan: Plan) -> int:
    """The model in FP32, as proxies that hold it whole need it: MTP apart, and a tenth for activations."""
    return int(1.1 * 4 * sum(math.prod(tensor.shape) for tensor in plan.tensors if tensor.role != "mtp"))


def check_memory(plan: Plan, longest: int, free_bytes: int, limit: str) -> None:
    """QuantizeError: not even one layer at a time fits; says what does. free_bytes: what `limit` leaves beside this process."""
    needed = needed_bytes(plan, longest)
    if needed > free_bytes:
        raise QuantizeError(
            f"{limit}: one layer at a time takes {size(needed)}, {size(free_bytes)} are left; at least "
            f"{size(needed + resident_bytes())} are needed in all, or --proxy weights, which needs the memory of one weight"
        )


def states_bytes(layout: Layout, num_tokens: int, longest: int, *, to_the_end: bool) -> int:
    """The most that states take on the disk: those in front of a layer and those behind it, for each stream."""
    text = text_of(layout.checkpoint.config)
    each = num_tokens * (4 * size_of(text, "hidden_size") + 8 * min(longest, size_of(text, "index_topk", 0)))
    return 2 * each * ((1 + len(layout.pairs()) + len(layout.wholes())) if to_the_end else 2)
