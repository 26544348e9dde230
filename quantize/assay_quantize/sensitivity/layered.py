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

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from assay.atomic_files import naming
from assay.callbacks import Say
from assay.errors import QuantizeError
from assay.quantities import size
from assay.recipes.families import size_of, split_layer, text_of
from assay.records.base import write_text_atomically
from assay.records.diagnosis.sensitivity import WorstTensor
from assay.records.plan import Plan
from assay_quantize.calibration.memory import SPARE_BYTES
from assay_quantize.calibration.quiet import quiet
from assay_quantize.checkpoint.source_reader import SourceReader
from assay_quantize.sensitivity.direct import Found, Kept, identity, part_name, places
from assay_quantize.sensitivity.parts import Key, Layout
from assay_quantize.sensitivity.rounded import Rounder, RoundInputs, input_args
from assay_quantize.sensitivity.running import HEAD_POSITIONS, other_experts
from assay_quantize.sensitivity.texts import Batch, ScoredText, batched
from assay_quantize.sensitivity.weights import relative_error
from assay_quantize.storage.resident import resident_bytes

BATCH_TOKENS = 2048
REFERENCE = "reference"
HIDDEN = "hidden.json"
Pair = tuple[Key, str]


class Layered:
    """All parts of a checkpoint on some texts. keep: folder of what is found and of the states."""

    def __init__(
        self, layout: Layout, rounder: Rounder, reader: SourceReader, texts: Sequence[ScoredText], keep: Path, say: Say
    ) -> None:
        """Raises QuantizeError: transformers builds no such model, or calls its tensors otherwise."""
        from assay_quantize.calibration.skeleton import Skeleton

        assert layout.checkpoint.folder is not None
        self._layout, self._rounder, self._reader, self._say = layout, rounder, reader, say
        self._batches = batched(texts, BATCH_TOKENS)
        self._places = places(self._batches, texts)
        self._plan = next(iter(layout.plans.values()))
        self._kept = Kept(keep / f"{identity(layout, texts, rounder.calibration_sha256)}-by-layer", len(self._places))
        with quiet():
            self._skeleton = Skeleton(layout.checkpoint.folder, self._plan, torch.float32)
        self.hidden: dict[Pair, float] = {}
        """Of each part whose layer was run: squared error of the states behind it over their squared norm, mean over tokens."""
        self.weights: dict[Pair, tuple[float, tuple[WorstTensor, ...]]] = {}
        """Of the same: what proxy `weights` says (`weights.relative_error`)."""
        self._others: dict[str, dict[int, float]] = {}
        """Stream -> layer -> tokens with other experts."""

    def run(self, *, to_the_end: bool) -> None:
        """Every layer. to_the_end: streams go on behind their own layer, for `found`. Goes on where a killed run stopped.

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
        self._finish()

    def found(self) -> Iterator[tuple[Key | None, str, Found]]:
        """Of every part and scheme; key None: of a whole of the layout, by its name."""
        for key, scheme in self._all():
            found = self._kept.load(part_name(key, scheme))
            assert found is not None, "`run` went to the end"
            yield key, scheme, found

    def _all(self) -> list[tuple[Key | None, str]]:
        return [*((None, whole) for whole in self._layout.wholes()), *self._layout.pairs()]

    # -------------------------------------------------------------------------------------------- one layer
    def _layer(self, layer: int, before: Path | None, to_the_end: bool) -> Path:
        """The states behind a layer, from those in front of it; these go once those are whole."""
        assert self._kept.folder is not None
        after = self._kept.folder / f"after-{layer:05d}"
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
            mine = [pair for pair in self._layout.pairs() if pair[0].layer == layer]
            if to_the_end:
                for key, scheme in self._layout.pairs():
                    if key.layer is not None and key.layer < layer:
                        name = part_name(key, scheme)
                        self._note(name, layer, chosen, self._through(layer, whole, name, before, partial))
                for one, every in self._layout.wholes().items():
                    name = part_name(None, one)
                    with self._rounded(layer, whole, {key: scheme for key, scheme in every.items() if key.layer == layer}):
                        source = before if layer else None
                        self._note(name, layer, chosen, self._through(layer, whole, name, source, partial))
            for key, scheme in mine:
                name = part_name(key, scheme)
                with self._rounded(layer, whole, {key: scheme}, compared=(key, scheme)):
                    seen = self._through(layer, whole, name, before, partial, entering=REFERENCE)
                self._note(name, layer, chosen, seen)
                self.hidden[key, scheme] = self._difference(partial, name)
                if not to_the_end:
                    self._forget(partial, name)
        shutil.rmtree(after, ignore_errors=True)  # of a run for other schemes, or damaged
        with naming(partial):
            (partial / "told.json").write_text(json.dumps(self._told()), encoding="utf-8")
            os.replace(partial, after)
        if before is not None:
            shutil.rmtree(before)
        return after

    def _through(
        self, layer: int, whole: nn.Module, name: str, before: Path | None, after: Path, *, entering: str | None = None
    ) -> dict[int, Tensor]:
        """A stream through the layer that is filled. entering: whose states it is given; None: its own. Returns the experts
        that its tokens chose, by batch."""
        from assay_quantize.calibration.methods.method import plain_forward

        chosen: dict[int, Tensor] = {}
        for number, batch in enumerate(self._batches):
            state = None if before is None else _load(before, entering or name, number)
            with plain_forward(self._skeleton.model), _experts_into(whole, batch, number, chosen):
                made = self._skeleton.run(layer, batch.ids_BT, state)
            _save(after, name, number, made)
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

    def _note(self, name: str, layer: int, reference: Mapping[int, Tensor], seen: Mapping[int, Tensor]) -> None:
        if reference and reference.keys() == seen.keys():
            whole = ({layer: torch.cat([one[number] for number in sorted(one)])} for one in (reference, seen))
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
            if self._kept.load(name) is not None:
                continue
            other_NH = self._scored(folder, name)
            parts = []
            for begin in range(0, len(reference_NH), HEAD_POSITIONS):
                sides = (side[begin : begin + HEAD_POSITIONS] for side in (reference_NH, other_NH))
                ln_p, ln_q = (head(side).double().log_softmax(-1) for side in sides)
                parts.append((ln_p.exp() * (ln_p - ln_q)).sum(-1).clamp_min(0).float())
            kl_N = torch.cat(parts).numpy()
            if not np.isfinite(kl_N).all():
                raise QuantizeError(
                    f"{self._layout.checkpoint.location}: a part gives infinite divergence; leave its scheme out"
                )
            self._kept.save(name, Found(kl_N[self._places], self._others.get(name, {})))

    def _scored(self, folder: Path, name: str) -> Tensor:
        return torch.cat([_load(folder, name, number)[0][b.scored_BT] for number, b in enumerate(self._batches)])

    # -------------------------------------------------------------------------------------------- what is kept
    def _resumed(self, to_the_end: bool) -> tuple[Path | None, int]:
        """The states behind the last layer that is done, and the next layer."""
        assert self._kept.folder is not None
        for path in sorted(self._kept.folder.glob("after-*"), reverse=True):
            told = _told_in(path)
            if told is None:
                continue
            done = {*self._layout.pairs()} & {(Key(at, role), scheme) for at, role, scheme, *_ in told["parts"]}
            wanted = {pair for pair in self._layout.pairs() if pair[0].layer is not None and pair[0].layer <= _layer_of(path)}
            streams = [part_name(*one) for one in (*((None, s) for s in self._layout.wholes()), *wanted)] if to_the_end else []
            if not wanted <= done or not all(self._are_whole(path, name) for name in (REFERENCE, *streams)):
                continue  # of a run for other schemes, or for `hidden`; or what a crash has left
            self._take(told["parts"])
            self._others = {name: {int(at): share for at, share in one.items()} for name, one in told["others"].items()}
            return path, _layer_of(path) + 1
        return None, 0

    def _are_whole(self, folder: Path, name: str) -> bool:
        """Whether the states of a stream are there, to their last byte."""
        for number, batch in enumerate(self._batches):
            try:
                state = np.load(folder / _file(name, number, 0), mmap_mode="r", allow_pickle=False)
            except (OSError, ValueError):
                return False
            if state.shape[: batch.ids_BT.dim()] != tuple(batch.ids_BT.shape):
                return False
        return True

    def _forget(self, folder: Path, name: str) -> None:
        for path in folder.glob(f"{name}.*"):
            path.unlink()

    def _finish(self) -> None:
        """After the last layer nobody needs the states."""
        assert self._kept.folder is not None
        self._kept.folder.mkdir(parents=True, exist_ok=True)
        write_text_atomically(self._kept.folder / HIDDEN, json.dumps(self._told()["parts"]))
        for path in self._kept.folder.glob("*after-*"):
            shutil.rmtree(path)

    def _is_done(self, to_the_end: bool) -> bool:
        assert self._kept.folder is not None
        path = self._kept.folder / HIDDEN
        if not path.is_file() or (to_the_end and any(self._kept.load(part_name(*one)) is None for one in self._all())):
            return False
        self._take(json.loads(path.read_text(encoding="utf-8")))
        return all(pair in self.hidden for pair in self._layout.pairs())

    def _told(self) -> dict[str, Any]:
        rows = []
        for pair, value in self.hidden.items():
            error, worst = self.weights[pair]
            rows.append([pair[0].layer, pair[0].role, pair[1], value, error, [[one.name, one.share] for one in worst]])
        return {"parts": rows, "others": self._others}

    def _take(self, rows: list[Any]) -> None:
        """Of schemes that are asked for now."""
        for layer, role, scheme, value, error, worst in rows:
            pair = Key(layer, role), scheme
            self.hidden[pair] = value
            self.weights[pair] = error, tuple(WorstTensor(name=name, share=share) for name, share in worst)

    def _check_disk(self, to_the_end: bool) -> None:
        assert self._kept.folder is not None
        self._kept.folder.mkdir(parents=True, exist_ok=True)
        tokens = sum(batch.ids_BT.numel() for batch in self._batches)
        longest = max(batch.ids_BT.shape[1] for batch in self._batches)
        needed = states_bytes(self._layout, tokens, longest, to_the_end=to_the_end)
        free = shutil.disk_usage(self._kept.folder).free
        if needed > free:
            raise QuantizeError(
                f"{self._kept.folder}: states take up to {size(needed)}, {size(free)} are free on its disk; fewer --tokens or "
                "--schemes, or --proxy hidden, which keeps two states"
            )


def _told_in(folder: Path) -> dict[str, Any] | None:
    """None: nothing that can be read."""
    try:
        told = json.loads((folder / "told.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return told if isinstance(told, dict) and told.keys() == {"parts", "others"} else None


def _layer_of(path: Path) -> int:
    return int(path.name.removeprefix("after-"))


def _file(name: str, batch: int, part: int) -> str:
    return f"{name}.{batch:05d}-{part}.npy"


def _save(folder: Path, name: str, batch: int, state: Sequence[Tensor]) -> None:
    for part, tensor in enumerate(state):
        with naming(folder / _file(name, batch, part)):
            np.save(folder / _file(name, batch, part), tensor.detach().cpu().numpy(), allow_pickle=False)


def _load(folder: Path, name: str, batch: int) -> tuple[Tensor, ...]:
    parts: list[Tensor] = []
    while (path := folder / _file(name, batch, len(parts))).is_file():
        parts.append(torch.from_numpy(np.load(path, allow_pickle=False)))
    return tuple(parts)


@contextmanager
def _experts_into(whole: nn.Module, batch: Batch, number: int, into: dict[int, Tensor]) -> Iterator[None]:
    """The experts of each real token, sorted, that the layer's module of experts is given."""
    from llmcompressor.modeling.moe.linear_experts import LinearExperts2D

    real = batch.real_BT.reshape(-1)

    def keep(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)]
        chosen = next((one for one in given if not one.is_floating_point() and one.dim() == 2), None)
        if chosen is not None and len(chosen) == len(real):
            into[number] = chosen[real].sort(-1).values.to(torch.int16).clone()

    handles: list[Callable[[], None]] = [
        module.register_forward_pre_hook(keep, with_kwargs=True).remove
        for module in whole.modules()
        if isinstance(module, LinearExperts2D)
    ]
    try:
        yield
    finally:
        for remove in handles:
            remove()


# ------------------------------------------------------------------------------------------------ what it takes
def needed_bytes(plan: Plan, longest: int) -> int:
    """Memory beyond that of the process: the largest layer in FP32 with one weight being rounded and a batch, or the head."""
    layers: dict[int, int] = {}
    widest = largest = 0
    for tensor in plan.tensors:
        at = split_layer(tensor.name)
        if at is not None and tensor.role != "mtp":
            layers[at.layer] = layers.get(at.layer, 0) + math.prod(tensor.shape)
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


def check_memory(plan: Plan, longest: int, free_bytes: int, said: str) -> None:
    """QuantizeError: not even one layer at a time fits; says what does. free_bytes: what `said` leaves beside this process."""
    needed = needed_bytes(plan, longest)
    if needed > free_bytes:
        raise QuantizeError(
            f"{said}: one layer at a time takes {size(needed)}, {size(free_bytes)} are left; at least "
            f"{size(needed + resident_bytes())} are needed in all, or --proxy weights, which needs the memory of one weight"
        )


def states_bytes(layout: Layout, num_tokens: int, longest: int, *, to_the_end: bool) -> int:
    """The most that states take on the disk: those in front of a layer and those behind it, for each stream."""
    text = text_of(layout.checkpoint.config)
    each = num_tokens * (4 * size_of(text, "hidden_size") + 8 * min(longest, size_of(text, "index_topk", 0)))
    return 2 * each * ((1 + len(layout.pairs()) + len(layout.wholes())) if to_the_end else 2)
