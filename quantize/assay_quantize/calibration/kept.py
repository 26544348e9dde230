"""What a calibration has seen so far, on the disk: one that is killed goes on behind it, and ends with the same numbers.

    tokens.npy          int32 [sequences, length], all that will go through; with a budget by expert there is none, and text is
                        drawn again
    text.json           what the tokens were made of; written before them
    seen.safetensors    sums of squares (FP64) by weight; in its metadata counts, largest magnitudes, ranges, sequences done

Sums are added up in the order of the sequences and kept to the last bit, so where it was cut does not show.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import ValidationError

from assay.atomic_files import replacing
from assay.records.calibration import TextTaken
from assay_quantize.calibration.ranges import InputRange, Moments

TOKENS, TEXT, SEEN = "tokens.npy", "text.json", "seen.safetensors"
SAVED_EVERY_S = 60.0


class Kept:
    """The folder of one calibration, named by its caller after what was asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._saved = folder, time.monotonic()
        self._made_by = {
            "torch": torch.__version__,
            "transformers": version("transformers"),
            "threads": torch.get_num_threads(),
        }

    def tokens(self) -> tuple[NDArray[np.int32], TextTaken] | None:
        """None: they were not drawn, or not all of them."""
        try:
            taken = TextTaken.model_validate_json((self._folder / TEXT).read_bytes())
            return np.load(self._folder / TOKENS, allow_pickle=False), taken
        except (OSError, ValueError, ValidationError):
            return None

    def keep_tokens(self, sequences: Sequence[Sequence[int]], taken: TextTaken) -> tuple[NDArray[np.int32], TextTaken]:
        made = np.array(sequences, np.int32)
        self._folder.mkdir(parents=True, exist_ok=True)
        with replacing(self._folder / TEXT) as partial:
            partial.write_text(taken.model_dump_json(), encoding="utf-8")
        with replacing(self._folder / TOKENS) as partial, partial.open("wb") as file:
            np.save(file, made, allow_pickle=False)
        return made, taken

    def load(self, moments: dict[str, Moments], caches: dict[str, tuple[float, float]]) -> int:
        """Put what was seen into both; how many sequences that was. 0: nothing, or seen by other versions."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self._folder / SEEN, framework="pt") as file:
                told = json.loads((file.metadata() or {})["seen"])
                squares = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no mapping
        except (OSError, SafetensorError, KeyError, ValueError):
            return 0
        if told["made_by"] != self._made_by or told["moments"].keys() != squares.keys():
            return 0
        for name, (count, largest, groups) in told["moments"].items():
            moments[name] = Moments(squares[name], count, largest, InputRange(*groups))
        caches.update({name: (key, value) for name, (key, value) in told["caches"].items()})
        return int(told["sequences"])

    def save(self, moments: Mapping[str, Moments], caches: Mapping[str, tuple[float, float]], sequences: int) -> None:
        """At most once a minute: what was seen of so many sequences."""
        if time.monotonic() < self._saved + SAVED_EVERY_S:
            return
        from safetensors.torch import save_file

        told: dict[str, Any] = {
            "made_by": self._made_by,
            "sequences": sequences,
            "moments": {name: [one.num_tokens, one.largest, astuple(one.range)] for name, one in moments.items()},
            "caches": dict(caches),
        }
        self._folder.mkdir(parents=True, exist_ok=True)
        with replacing(self._folder / SEEN) as partial:
            save_file({name: one.squares for name, one in moments.items()}, partial, {"seen": json.dumps(told)})
        self._saved = time.monotonic()
