"""What a calibration keeps on the disk while it works, so that a killed one goes on, with the same bytes.

    calibration.jsonl           one line about the run, then one for every layer that is finished
    tokens.npy                  int32 [sequences, length]
    text.json                   what the tokens were made of, and their SHA-256; written before them
    layer-00003.safetensors     a finished layer (`checkpoint/calibrated_layers.py`)
    state-00004-0.npy           what goes into the next layer: hidden states [sequences, length, columns], in FP32; `-1` and
                                so on for what some models pass on beside them; behind all of these, under AutoRound, the
                                same of the tuned model

A layer counts once its line is there; files are renamed to their names when they are whole. Of states only the last is kept.
What is there counts as long as it has the digest that was written of it: what is damaged is made again, and what comes behind
it, too.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib import format as npy
from pydantic import ValidationError
from safetensors.torch import save_file
from torch import Tensor

from assay.atomic_files import naming, replacing
from assay.errors import AssayError, QuantizeError
from assay.foreign_text import shown
from assay.records.base import Part, sha256_of_file
from assay.records.plan import TensorPlan
from assay_quantize.calibration.progress import Drawn
from assay_quantize.checkpoint.calibrated_layers import CalibratedFiles, layer_digest, layer_file, parts_of
from assay_quantize.checkpoint.shard_files import fsync_folder, partial_path

JOURNAL = "calibration.jsonl"
_STATE = re.compile(r"state-(\d+)-(\d+)\.npy")


class Finished(Part):
    """A layer's line. digest: of its file; empty: it has none. states: SHA-256 of the files of what goes into the next layer.
    fell_back: weights that GPTQ could only round to the nearest. tokens_sha256: of the tokens that went through."""

    layer: int
    digest: str
    states: tuple[str, ...]
    fell_back: tuple[str, ...]
    seconds: float
    tokens_sha256: str


class WorkFolder:
    """The folder of one calibration, locked against a second process. finished: layer -> its line, from the first without
    gaps; known once it is told of the tokens (`begin`)."""

    def __init__(self, path: Path, journal: Any, lines: Sequence[Finished]) -> None:
        self.path, self._journal, self._lines = path, journal, lines
        self.finished: dict[int, Finished] = {}

    def begin(self, tokens: Drawn, layers: Mapping[int, Sequence[TensorPlan]]) -> None:
        """Find out which layers are finished, with these tokens. layers: all of the model in order, with what is calibrated.

        Those whose files are those that were written, up to the first that is not; states behind the last are as well."""
        lines = {line.layer: line for line in self._lines if line.tokens_sha256 == tokens.sha256}
        finished: dict[int, Finished] = {}
        for layer, tensors in layers.items():
            line = lines.get(layer)
            if line is None or (tensors and self._digest_of_file(layer, tensors) != line.digest):
                break
            finished[layer] = line
        states: dict[str, str] = {}
        if finished and len(finished) < len(layers):
            last = next(reversed(finished))
            states = {self.state_path(last + 1, part).name: sha256 for part, sha256 in enumerate(finished[last].states)}
            paths = {self.path / name: sha256 for name, sha256 in states.items()}
            if not all(path.is_file() and sha256_of_file(path) == sha256 for path, sha256 in paths.items()):
                finished, states = {}, {}  # the next layer's inputs are gone: from the beginning
        for path in self.path.glob("state-*.npy"):
            if path.name not in states:
                path.unlink()
        self.finished = finished

    # -------------------------------------------------------------------------------------------- layers
    def add(self, line: Finished) -> None:
        """A layer is finished: its file and the states behind it are there."""
        with naming(self.path / JOURNAL):
            self._journal.write((line.model_dump_json() + "\n").encode())
            os.fsync(self._journal.fileno())
        self.finished[line.layer] = line
        for old in self.path.glob("state-*.npy"):
            if (match := _STATE.fullmatch(old.name)) and int(match[1]) <= line.layer:
                old.unlink()

    def write_layer(self, layer: int, tensors: Sequence[TensorPlan], values: Mapping[str, Tensor]) -> str:
        """The file of a layer; returns its digest."""
        outputs = [output for tensor in tensors for output in parts_of(tensor)]
        kept = {output.name: values[output.name] for output in outputs}
        with replacing(self.path / layer_file(layer)) as partial:
            save_file(kept, partial)
        return layer_digest(
            outputs, lambda output, take: take(kept[output.name].contiguous().view(-1).view(torch.uint8).numpy().data)
        )

    def _digest_of_file(self, layer: int, tensors: Sequence[TensorPlan]) -> str | None:
        """The digest of a layer's file, as it lies there. None: it is not there, or damaged."""
        try:
            with closing(CalibratedFiles(self.path, [layer])) as files:
                return files.digest(tensors)
        except AssayError:
            return None

    # -------------------------------------------------------------------------------------------- states
    def state_path(self, layer: int, part: int) -> Path:
        return self.path / f"state-{layer:05d}-{part}.npy"

    def read_state(self, layer: int, begin: int, end: int) -> tuple[Tensor, ...] | None:
        """What goes into a layer, for sequences [begin, end); None: it is the first, and gets embedded tokens."""
        parts: list[Tensor] = []
        while (path := self.state_path(layer, len(parts))).is_file():
            with path.open("rb") as file:
                npy.read_magic(file)
                shape, _, dtype = npy.read_array_header_1_0(file)
                start = file.tell()
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

    def state_hashes(self, layer: int) -> tuple[str, ...]:
        paths: list[Path] = []
        while (path := self.state_path(layer, len(paths))).is_file():
            paths.append(path)
        return tuple(map(sha256_of_file, paths))


class StateWriter:
    """Files of states, appended to; they have their names only once all is there."""

    def __init__(self, folder: WorkFolder, layer: int, sequences: int) -> None:
        self._folder, self._layer, self._sequences = folder, layer, sequences
        self._files: list[Any] = []

    def append(self, state: Sequence[Tensor], *, is_tuned: bool = False) -> None:
        """is_tuned: the state of the tuned model, whose parts are behind as many of the untouched one, which are there."""
        for part, tensor in enumerate(state, len(state) if is_tuned else 0):
            value = tensor.detach().to("cpu").contiguous().numpy()
            if part == len(self._files):
                file = partial_path(self._folder.state_path(self._layer, part)).open("wb")
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
            os.replace(partial_path(path), path)
        fsync_folder(self._folder.path)

    def close(self) -> None:
        for file in self._files:
            file.close()


@contextmanager
def opened(path: Path, begin: Mapping[str, Any]) -> Iterator[WorkFolder]:
    """The folder of a calibration that is described by `begin`; it goes on with what is finished there.

    Raises QuantizeError: it was begun otherwise, or another process is at work there.
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
        lines = [line for line in text.split("\n") if line]
        before = next(filter(None, map(_parsed, lines)), None)
        if before is None:
            journal.truncate(0)
            journal.write((json.dumps(dict(begin)) + "\n").encode())
            os.fsync(journal.fileno())
            fsync_folder(path)
        elif before != begin:
            begun_on, remedy = before.get("device"), "delete the folder to begin anew"
            if begun_on in ("cpu", "cuda") and {**before, "device": begin["device"]} == begin:
                remedy = f"say --device {begun_on} to go on, or {remedy}"
            raise QuantizeError(f"{path}: begun with {_difference(before, begin)}; {remedy}")
        elif not text.endswith("\n"):
            journal.write(b"\n")
        yield WorkFolder(path, journal, [line for line in map(_finished, lines) if line is not None])


def _difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The first key, of a mapping the first key in it, that is not the same: `threads 2, now it is 1`."""
    if "asked_sha256" in before and before["asked_sha256"] != now.get("asked_sha256"):
        was, is_now = (shown(begin.get("asked_sha256"), 12) for begin in (before, now))
        return f"another recipe or text (asked_sha256 {was}, now it is {is_now})"
    key = next(key for key in (*now, *before) if before.get(key) != now.get(key))
    old, new = before.get(key), now.get(key)
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        return f"{key} {_difference(old, new)}"
    return f"{key} {shown(old)}, now it is {shown(new)}"


def _parsed(line: str) -> dict[str, Any] | None:
    """None: a line that is torn."""
    try:
        data = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def _finished(line: str) -> Finished | None:
    """None: it is about no layer, or torn."""
    try:
        return Finished.model_validate_json(line)
    except ValidationError:
        return None
