"""What a calibration keeps on the disk while it works, so that a killed one goes on, with the same bytes.

    calibration.jsonl           one line about the run, then one for every layer that is finished
    tokens.npy                  int32 [sequences, length]
    text.json                   what the tokens were made of; written before them
    layer-00003.safetensors     a finished layer (`checkpoint/calibrated_layers.py`)
    state-00004-0.npy           what goes into the next layer: hidden states [sequences, length, columns], in FP32; `-1` and
                                so on for what some models pass on beside them

A layer counts once its line is there; files are renamed to their names when they are whole. Of states only the last is kept.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib import format as npy
from numpy.typing import NDArray
from pydantic import ValidationError
from safetensors.torch import save_file
from torch import Tensor

from assay.atomic_files import naming, replacing
from assay.errors import QuantizeError
from assay.records.base import sha256_of_file
from assay.records.calibration import TextTaken
from assay.records.plan import TensorPlan
from assay_quantize.checkpoint.calibrated_layers import CalibratedFiles, layer_digest, layer_file, parts_of
from assay_quantize.checkpoint.shard_files import fsync_folder

JOURNAL = "calibration.jsonl"
TOKENS = "tokens.npy"
TEXT = "text.json"


class WorkFolder:
    """The folder of one calibration, locked against a second process. finished: layer -> its line, from the first without
    gaps."""

    def __init__(self, path: Path, journal: Any, finished: dict[int, dict[str, Any]]) -> None:
        self.path, self._journal, self.finished = path, journal, finished

    # -------------------------------------------------------------------------------------------- tokens
    def tokens(self) -> NDArray[np.int32] | None:
        """None: they were not written yet."""
        path = self.path / TOKENS
        return np.load(path, allow_pickle=False) if path.is_file() else None

    def text(self) -> TextTaken:
        """What they were made of; nothing is known of tokens from before it was kept."""
        path = self.path / TEXT
        try:
            return TextTaken.model_validate_json(path.read_bytes()) if path.is_file() else TextTaken()
        except ValidationError:
            raise QuantizeError(f"{path}: is damaged; delete {self.path} and run again") from None

    def keep_tokens(self, sequences: Sequence[Sequence[int]], taken: TextTaken) -> NDArray[np.int32]:
        made = np.array(sequences, np.int32)
        with replacing(self.path / TEXT) as partial:
            partial.write_text(taken.model_dump_json(), encoding="utf-8")
        with replacing(self.path / TOKENS) as partial, partial.open("wb") as file:
            np.save(file, made, allow_pickle=False)
        return made

    # -------------------------------------------------------------------------------------------- layers
    def add(self, layer: int, line: Mapping[str, Any]) -> None:
        """A layer is finished: its file and the states behind it are there."""
        with naming(self.path / JOURNAL):
            self._journal.write((json.dumps({"layer": layer, **line}) + "\n").encode())
            os.fsync(self._journal.fileno())
        self.finished[layer] = dict(line)
        for old in self.path.glob("state-*.npy"):
            if int(old.name.split("-")[1]) <= layer:
                old.unlink()

    def write_layer(self, layer: int, tensors: Sequence[TensorPlan], values: Mapping[str, Tensor]) -> str:
        """The file of a layer; returns its digest."""
        outputs = [output for tensor in tensors for output in parts_of(tensor)]
        kept = {output.name: values[output.name] for output in outputs}
        with replacing(self.path / layer_file(layer)) as partial:
            save_file(kept, partial)
        return layer_digest(outputs, lambda output, take: take(_bytes(kept[output.name])))

    def read_digest(self, layer: int, tensors: Sequence[TensorPlan]) -> str:
        """The digest of a layer's file, as it lies there."""
        files = CalibratedFiles(self.path, [layer])
        try:
            return files.digest(tensors)
        finally:
            files.close()

    # -------------------------------------------------------------------------------------------- states
    def state_path(self, layer: int, part: int) -> Path:
        return self.path / f"state-{layer:05d}-{part}.npy"

    def read_state(self, layer: int, begin: int, end: int) -> tuple[Tensor, ...] | None:
        """What goes into a layer, for sequences [begin, end); None: it is the first, and gets embedded tokens."""
        parts: list[Tensor] = []
        while (path := self.state_path(layer, len(parts))).is_file():
            with path.open("rb") as file:
                shape, dtype, start = _header(file)
                per_row = int(np.prod(shape[1:])) * dtype.itemsize
                flat = np.empty((end - begin) * per_row, np.uint8)
                file.seek(start + begin * per_row)
                if file.readinto(flat.data) != flat.nbytes:
                    raise QuantizeError(f"{path}: is cut off; delete {self.path} and run again")
                parts.append(torch.from_numpy(flat.view(dtype).reshape(end - begin, *shape[1:])))
        return tuple(parts) or None

    @contextmanager
    def writing_state(self, layer: int, sequences: int) -> Iterator[StateWriter]:
        """What goes into a layer, batch after batch."""
        writer = StateWriter(self, layer, sequences)
        try:
            yield writer
            writer.finish()
        finally:
            writer.close()

    def state_hashes(self, layer: int) -> list[str]:
        paths: list[Path] = []
        while (path := self.state_path(layer, len(paths))).is_file():
            paths.append(path)
        return [sha256_of_file(path) for path in paths]


class StateWriter:
    """Files of states, appended to; they have their names only once all is there."""

    def __init__(self, folder: WorkFolder, layer: int, sequences: int) -> None:
        self._folder, self._layer, self._sequences = folder, layer, sequences
        self._files: list[Any] = []

    def append(self, state: Sequence[Tensor]) -> None:
        for part, tensor in enumerate(state):
            value = tensor.detach().to("cpu").contiguous().numpy()
            if part == len(self._files):
                file = _partial(self._folder.state_path(self._layer, part)).open("wb")
                npy.write_array_header_1_0(
                    file,
                    {"descr": npy.dtype_to_descr(value.dtype), "fortran_order": False,
                     "shape": (self._sequences, *value.shape[1:])},
                )  # fmt: skip
                self._files.append(file)
            with naming(self._folder.state_path(self._layer, part)):
                self._files[part].write(value.data)

    def finish(self) -> None:
        for part, file in enumerate(self._files):
            file.flush()
            os.fsync(file.fileno())
            path = self._folder.state_path(self._layer, part)
            os.replace(_partial(path), path)
        fsync_folder(self._folder.path)

    def close(self) -> None:
        for file in self._files:
            file.close()


@contextmanager
def opened(path: Path, begin: Mapping[str, Any], layers: Mapping[int, Sequence[TensorPlan]]) -> Iterator[WorkFolder]:
    """The folder of a calibration that is described by `begin`; goes on with what is finished there.

    layers: all layers of the model in order, with their calibrated tensors. Raises QuantizeError: it was begun otherwise, or
    another process is at work there.
    """
    path.mkdir(parents=True, exist_ok=True)
    with (path / JOURNAL).open("a+b", buffering=0) as journal:
        try:
            fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise QuantizeError(f"{path}: another process is calibrating there; wait for it, or end it") from None
        for leftover in path.glob(".*.partial"):
            leftover.unlink()
        journal.seek(0)
        text = journal.read().decode(errors="replace")
        lines = [line for line in map(_parsed, text.split("\n")) if line is not None]
        if not lines:
            journal.truncate(0)
            journal.write((json.dumps(dict(begin)) + "\n").encode())
            os.fsync(journal.fileno())
            fsync_folder(path)
        elif lines[0] != begin:
            key = next(key for key in begin if lines[0].get(key) != begin[key])
            raise QuantizeError(
                f"{path}: begun with {key} {lines[0].get(key)}, now it is {begin[key]}; delete the folder to begin anew"
            )
        elif not text.endswith("\n"):
            journal.write(b"\n")
        folder = WorkFolder(path, journal, {})
        folder.finished = _finished(folder, {int(line["layer"]): line for line in lines[1:] if "layer" in line}, layers)
        yield folder


def _finished(
    folder: WorkFolder, lines: Mapping[int, dict[str, Any]], layers: Mapping[int, Sequence[TensorPlan]]
) -> dict[int, dict[str, Any]]:
    """Layers whose files are those that were written, up to the first that is not; states behind the last are as well."""
    found: dict[int, dict[str, Any]] = {}
    for layer, tensors in layers.items():
        line = lines.get(layer)
        if line is None:
            break
        if tensors and (
            not (folder.path / layer_file(layer)).is_file() or folder.read_digest(layer, tensors) != line["digest"]
        ):
            break
        found[layer] = line
    if found and len(found) < len(layers):
        last = next(reversed(found))
        if folder.state_hashes(last + 1) != found[last]["states"]:
            return {}  # its inputs are gone: from the beginning
    return found


def _parsed(line: str) -> dict[str, Any] | None:
    """None: a line that is torn."""
    try:
        found = json.loads(line)
    except json.JSONDecodeError:
        return None
    return found if isinstance(found, dict) else None


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")


def _header(file: Any) -> tuple[tuple[int, ...], Any, int]:
    npy.read_magic(file)
    shape, _, dtype = npy.read_array_header_1_0(file)
    return shape, dtype, file.tell()


def _bytes(tensor: Tensor) -> memoryview:
    view: memoryview = tensor.contiguous().view(-1).view(torch.uint8).numpy().data
    return view
