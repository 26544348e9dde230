"""Every sequence through every layer: states go from layer to layer over the disk, and a killed pass goes on with its layer.

Each sequence is run alone, so what others there are changes none of its bits.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from assay.atomic_files import naming, replacing
from assay.callbacks import Say
from assay.records.base import sha256_of, write_text_atomically
from assay_quantize.calibration.one_layer import State
from assay_quantize.calibration.quiet import loading
from assay_quantize.screen.layer_model import LayerModel, LoadedLayer
from assay_quantize.screen.layer_runs import LayerRun, read_ahead, run_all
from assay_quantize.sensitivity.texts import ScoredText, texts_sha256

PASS_RECORD = "pass.json"
_BEHIND, _EXPERTS, _GROUPS = "behind", "experts", "groups"


class States(Protocol):
    """What passes left of some texts, by their numbers."""

    @property
    def num_layers(self) -> int: ...

    def state(self, sequence: int) -> State:
        """Behind the last layer."""

    def experts(self, layer: int, sequence: int) -> Tensor | None:
        """int16 [T, k], sorted, of every token; None: the layer chooses none."""


@dataclass(frozen=True)
class ChosenStates:
    """Texts of one pass or several. places: of each text a pass and its number there."""

    num_layers: int
    places: tuple[tuple[States, int], ...]

    def state(self, sequence: int) -> State:
        states, number = self.places[sequence]
        return states.state(number)

    def experts(self, layer: int, sequence: int) -> Tensor | None:
        states, number = self.places[sequence]
        return states.experts(layer, number)


@dataclass(frozen=True)
class ScreenPass:
    """A finished pass. folder: of the states behind the last layer, and of the experts that tokens chose in each layer."""

    folder: Path
    num_layers: int

    first: int = 0
    """Sequence that is number 0 of this pass."""

    def state(self, sequence: int) -> State:
        """Behind the last layer, of one text: of the first copy where there are two."""
        parts = load_state(states_folder(self.folder, self.num_layers - 1), self.first + sequence)
        return tuple(part[:1] for part in parts)

    def linked(self, folder: Path, num_sequences: int) -> None:
        """Hard links in `folder` to the files of this pass, of states those of the first `num_sequences`."""
        behind = states_folder(self.folder, self.num_layers - 1)
        for path in (*sorted(behind.iterdir())[:num_sequences], *sorted(self.folder.glob(f"{_EXPERTS}-*.safetensors"))):
            link = folder / path.relative_to(self.folder)
            link.parent.mkdir(parents=True, exist_ok=True)
            os.link(path, link)

    def experts(self, layer: int, sequence: int) -> Tensor | None:
        """int16 [T, k], sorted, of every token; None: the layer chooses none."""
        from safetensors import safe_open

        path = experts_file(self.folder, layer)
        if not path.is_file():
            return None
        with safe_open(path, "pt") as file:
            chosen: Tensor = file.get_tensor(str(self.first + sequence))
        return chosen


def states_folder(folder: Path, layer: int) -> Path:
    """Of the states behind `layer`, in the folder of a pass."""
    return folder / f"{_BEHIND}-{layer:05d}"


def groups_folder(folder: Path, layer: int) -> Path:
    """Of what groups of experts of `layer` made so far, in the folder of a pass."""
    return folder / f"{_GROUPS}-{layer:05d}"


def num_layers_done(folder: Path) -> int:
    """How many layers all texts of a pass are through."""
    return max((int(path.name.rpartition("-")[2]) for path in folder.glob(f"{_BEHIND}-*")), default=-1) + 1


def experts_file(folder: Path, layer: int) -> Path:
    """Of the experts that tokens chose in `layer`, in the folder of a pass; of layers that choose none there is none."""
    return folder / f"{_EXPERTS}-{layer:05d}.safetensors"


def device_name(device: str) -> str:
    """The device, its kind, and on a CPU the number of threads: the order of additions depends on them."""
    if device != "cpu":
        return f"{device}, {torch.cuda.get_device_name(device)}"
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace") if Path("/proc/cpuinfo").is_file() else ""
    named = re.search(r"^model name\s*:\s*(.+)$", lines, re.MULTILINE)
    parts = ["cpu", named[1].strip() if named else "", torch.backends.cpu.get_cpu_capability()]
    return ", ".join(filter(None, [*parts, f"{torch.get_num_threads()} threads"]))


def pass_identity(checkpoint_sha256: str, texts: Sequence[ScoredText], model: LayerModel) -> str:
    """What the bits of a pass depend on: weights, tokens, arithmetic, device, versions."""
    import transformers

    parts = [
        checkpoint_sha256,
        texts_sha256(texts),
        str(model.dtype),
        device_name(model.device),
        torch.__version__,
        transformers.__version__,
        *(["FP8 KV cache"] if model.fp8_kv_cache else []),
    ]
    return sha256_of(parts)


def begin_pass(folder: Path, identity: str) -> None:
    """Have `folder` be that of a pass; of another identity it is emptied first."""
    record = folder / PASS_RECORD
    record_text = json.dumps({"identity": identity})
    if not record.is_file() or record.read_bytes() != record_text.encode():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        write_text_atomically(record, record_text)


def run_pass(
    model: LayerModel,
    texts: Sequence[ScoredText],
    folder: Path,
    identity: str,
    say: Say,
    *,
    num_doubled: int = 0,
    outlives_node: bool = False,
) -> ScreenPass:
    """States of all texts behind the last layer, in `folder`. A folder of another identity is emptied first.

    num_doubled: the first so many texts run once more, as two copies at once; their states come behind those of all texts.
    outlives_node: another machine goes on from a finished layer if this one is lost.

    QuantizeError: the checkpoint is damaged, or transformers cannot run the model.
    """
    from safetensors.torch import save_file

    begin_pass(folder, identity)
    begin = min(num_layers_done(folder), model.num_layers)  # behind the last are states of drafts
    _remove_all_but(folder, begin)
    sequences = [torch.tensor([text.ids]) for text in texts]
    sequences += [torch.tensor([text.ids, text.ids]) for text in texts[:num_doubled]]
    model.use_embedding(torch.cat([ids.reshape(-1) for ids in sequences]))
    for layer, loaded in _loaded(model, begin):
        before = states_folder(folder, layer - 1) if layer else None
        experts: dict[str, Tensor] = {}
        with whole_folder(states_folder(folder, layer), flushed=outlives_node) as behind:

            def given(number: int, before: Path | None = before) -> State | None:
                return None if before is None else load_state(before, number)

            def keep(number: int, ran: LayerRun, behind: Path = behind, experts: dict[str, Tensor] = experts) -> None:
                save_state(behind, number, ran.state)
                if ran.chosen_experts is not None:
                    experts[str(number)] = ran.chosen_experts

            run_all(model, layer, loaded, sequences, given, keep, groups_folder(folder, layer))
            if experts:
                with replacing(experts_file(folder, layer)) as partial:
                    save_file(experts, partial)
        _remove_all_but(folder, layer + 1)
        model.release(layer)
        say(f"layer {layer + 1} of {model.num_layers}")
    return ScreenPass(folder, model.num_layers)


def _remove_all_but(folder: Path, layer: int) -> None:
    """Keep what `layer` goes on from: the states behind the one before, and what its groups of experts made."""
    for path in folder.glob(f"{_BEHIND}-*"):
        if path != states_folder(folder, layer - 1):
            shutil.rmtree(path)
    for path in folder.glob(f"{_GROUPS}-*"):
        if path != groups_folder(folder, layer):
            shutil.rmtree(path)


def _loaded(model: LayerModel, begin: int) -> Iterator[tuple[int, LoadedLayer]]:
    """Every layer from `begin` on, read while the one before it runs, where there is room for both."""

    def has_room_beside(loaded: LoadedLayer, following: int) -> bool:
        return not loaded.groups.experts and model.has_room_for(following)  # groups take all the room there is

    layers = range(begin, model.num_layers)
    prefetch = model.prefetch if model.device == "cpu" else None
    yield from zip(layers, read_ahead(layers, model.load, has_room_beside, prefetch), strict=True)


# ------------------------------------------------------------------------------------------------ files
@contextmanager
def whole_folder(folder: Path, *, flushed: bool = False) -> Iterator[Path]:
    """A folder that has its name once everything is in it. flushed: and has left this machine's memory."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    yield partial
    if flushed:
        for path in partial.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    with naming(folder):
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(partial, folder)


def state_file(folder: Path, sequence: int) -> Path:
    """Of one sequence, in a folder of states."""
    return folder / f"{sequence:06d}.safetensors"


def save_state(folder: Path, sequence: int, state: State) -> None:
    """As `ScreenPass.state` reads it."""
    from safetensors.torch import save_file

    path = state_file(folder, sequence)
    with naming(path):
        save_file({str(number): part.cpu().contiguous() for number, part in enumerate(state)}, path)


def load_state(folder: Path, sequence: int) -> State:
    """What `save_state` wrote."""
    from safetensors.torch import load_file

    path = state_file(folder, sequence)
    with loading(f"{path}: cannot be read"):
        parts = load_file(path)
    return tuple(parts[str(number)] for number in range(len(parts)))
