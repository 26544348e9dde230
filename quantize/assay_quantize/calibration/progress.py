"""What calibrations keep on the disk: the tokens that were drawn, for each kind; and what one of inputs has measured so far.
One that is killed goes on behind it, and ends with the same numbers.

    tokens.npy          int32 [sequences, length], all that will go through; with a budget by expert there is none, and text is
                        drawn again
    text.json           what the tokens were made of, and their SHA-256; written before them
    seen.safetensors    sums of squares (FP64) by weight; in its metadata counts, largest magnitudes, ranges, sequences done

Sums are added up in the order of the sequences and kept to the last bit, so where it was cut does not show. What is there has
its hash beside it: a damaged file counts as one that is not there.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import astuple
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import ValidationError, model_validator
from torch import Tensor

from assay.atomic_files import replacing
from assay.records.base import Part, sha256_of
from assay.records.calibration import TextTaken
from assay_quantize.calibration.inputs import InputRange, Moments

TOKENS, TEXT, MEASURED = "tokens.npy", "text.json", "seen.safetensors"
SAVED_EVERY_S = 60.0


class Drawn(NamedTuple):
    """tokens: int32 [sequences, length]. sha256: of their numbers, row after row."""

    tokens: NDArray[np.int32]
    taken: TextTaken
    sha256: str


class _TokensRecord(Part):
    """text.json. sha256: of the rest."""

    tokens_sha256: str
    shape: tuple[int, int]
    taken: TextTaken
    sha256: str

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if self.sha256 != self.sha256_of_rest():
            raise ValueError("sha256 is another")
        return self

    def sha256_of_rest(self) -> str:
        return sha256_of(self.model_dump(mode="json", exclude={"sha256"}))


def save_tokens(folder: Path, sequences: Any, taken: TextTaken) -> Drawn:
    """Tokens of a calibration, [sequences, length], into its folder."""
    drawn = Drawn(tokens := np.array(sequences, np.int32), taken, hashlib.sha256(tokens.tobytes()).hexdigest())
    record = _TokensRecord.model_construct(tokens_sha256=drawn.sha256, shape=tokens.shape, taken=taken, sha256="")
    with replacing(folder / TEXT) as partial:
        partial.write_text(record.model_copy(update={"sha256": record.sha256_of_rest()}).model_dump_json(), encoding="utf-8")
    with replacing(folder / TOKENS) as partial, partial.open("wb") as file:
        np.save(file, tokens, allow_pickle=False)
    return drawn


def load_tokens(folder: Path) -> Drawn | None:
    """None: tokens were not drawn, or not all of them, or they are not those that were."""
    try:
        record = _TokensRecord.model_validate_json((folder / TEXT).read_bytes())
        tokens = np.load(folder / TOKENS, allow_pickle=False)
    except (OSError, EOFError, ValueError):  # ValidationError is a ValueError
        return None
    is_same = (tokens.dtype, tokens.shape) == (np.int32, record.shape)
    is_same = is_same and hashlib.sha256(tokens.tobytes()).hexdigest() == record.tokens_sha256
    return Drawn(tokens, record.taken, record.tokens_sha256) if is_same else None


class _Measured(Part):
    """Metadata of seen.safetensors. moments: weight -> tokens, largest, range. sha256: of the rest and of the sums."""

    made_by: dict[str, str | int]
    sequences: int
    moments: dict[str, tuple[int, float, tuple[int, int, int, int, float]]]
    caches: dict[str, tuple[float, float]]
    sha256: str = ""

    def sha256_with(self, squares: Mapping[str, Tensor]) -> str:
        digest = hashlib.sha256(sha256_of(self.model_dump(mode="json", exclude={"sha256"})).encode())
        for name in sorted(squares):
            digest.update(squares[name].numpy().tobytes())
        return digest.hexdigest()


class CalibrationProgress:
    """The folder of one calibration, named by its caller after what was asked for. device: where the model runs."""

    def __init__(self, folder: Path, device: str) -> None:
        self.folder, self._saved = folder, time.monotonic()
        self._made_by: dict[str, str | int] = {
            "torch": torch.__version__,
            "transformers": version("transformers"),
            "threads": torch.get_num_threads(),
            "device": device,
        }

    def load(self, moments: dict[str, Moments], caches: dict[str, tuple[float, float]]) -> int:
        """Put what was measured into both; of how many sequences that was. 0: nothing, or by other versions."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self.folder / MEASURED, framework="pt") as file:
                record = _Measured.model_validate_json((file.metadata() or {})["seen"])
                squares = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no mapping
        except (OSError, SafetensorError, KeyError, ValidationError):
            return 0
        is_whole = record.moments.keys() == squares.keys() and record.sha256 == record.sha256_with(squares)
        if record.made_by != self._made_by or not is_whole:
            return 0
        for name, (count, largest, groups) in record.moments.items():
            moments[name] = Moments(squares[name], count, largest, InputRange(*groups))
        caches.update(record.caches)
        return record.sequences

    def save(self, moments: Mapping[str, Moments], caches: Mapping[str, tuple[float, float]], sequences: int) -> None:
        """At most once a minute: what was measured of so many sequences."""
        if time.monotonic() < self._saved + SAVED_EVERY_S:
            return
        from safetensors.torch import save_file

        squares = {name: of_weight.squares for name, of_weight in moments.items()}
        record = _Measured(
            made_by=self._made_by,
            sequences=sequences,
            moments={name: (weight.num_tokens, weight.largest, astuple(weight.range)) for name, weight in moments.items()},
            caches=dict(caches),
        )
        record = record.model_copy(update={"sha256": record.sha256_with(squares)})
        self.folder.mkdir(parents=True, exist_ok=True)
        with replacing(self.folder / MEASURED) as partial:
            save_file(squares, partial, {"seen": record.model_dump_json()})
        self._saved = time.monotonic()
