"""The manifest: what did happen to every shard. It is written last."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from assay.records.base import Part, Record, sha256_of
from assay.records.calibration import CalibratedLayers

ERROR_DIGITS = 6
"""Significant digits of a weight's relative error, in records of the engine and of `verify` alike: in the order in which sums
are made, the last bits differ."""


def relative_error(squared_error: float, squared_norm: float) -> float:
    """||dequantized - w|| / ||w|| (Frobenius), of ERROR_DIGITS digits; 0 when both are zero, infinity when only w is."""
    if squared_norm == 0:
        return 0.0 if squared_error == 0 else math.inf
    return float(f"{math.sqrt(squared_error / squared_norm):.{ERROR_DIGITS}g}")


class ShardRecord(Part):
    """One finished shard: its hash while written, and the weight error of what was quantized in it."""

    name: str
    num_bytes: int
    sha256: str
    relative_error: dict[str, float]
    """Per quantized tensor: ||dequantized - source|| / ||source|| (Frobenius)."""
    not_finite: dict[str, int] = Field(default_factory=dict)
    """Tensor that was copied or cast -> how many of its values are NaN or infinite. Only with `--allow-not-finite`."""
    seconds: float


class Manifest(Record):
    """What did happen; written last, by rename: without it there is no checkpoint."""

    kind: Literal["manifest"] = "manifest"
    model: str
    precision: str
    source: str
    source_sha256: str
    source_revision: str | None = None
    """Commit of a source on the hub; None for a folder."""
    source_files: dict[str, str]
    """As in `Plan`: which data this was made from."""
    recipe_sha256: str
    plan_sha256: str
    importance_sha256: str | None = None
    """Of the channel weights that the scale search used. None: it used none."""
    own_family: dict[str, Any] | None = Field(default=None, exclude_if=lambda family: family is None)
    """The family, where it is one of the user's own (`--family FILE`): whoever reads this record knows it without its file.
    None, and not in the file: it ships with assay."""
    calibrated: CalibratedLayers | None = None
    """Layers whose weights were calibrated. None: there are none."""
    precision_recipe: dict[str, Any]
    shards: tuple[ShardRecord, ...]
    files: dict[str, str]
    """Every other file of the folder (config, index, tokenizer...) -> SHA-256."""
    bytes_in: int
    bytes_out: int
    versions: dict[str, str]
    seconds: float

    @property
    def checkpoint_sha256(self) -> str:
        """Identity of the checkpoint: its shards and files, not when or how fast it was made."""
        return sha256_of({"shards": {s.name: s.sha256 for s in self.shards}, "files": self.files})


MANIFEST = "assay_manifest.json"
"""Name of a checkpoint's manifest in its folder."""


def load_manifest(folder: Path) -> Manifest | None:
    """The manifest of a checkpoint folder; None: it has none, so assay did not make it, or did not finish it.

    AssayError when what is there is not a manifest.
    """
    path = folder / MANIFEST
    return Manifest.load(path) if path.is_file() else None
