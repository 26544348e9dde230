"""The record of a calibration: what text went through the model, and which weights saw enough of it."""

from __future__ import annotations

from typing import Literal

from assay.records.base import Record


class Calibration(Record):
    """What `assay calibrate` made.

    text: the files, or how the text came about. num_tokens: that went through the model. weights: in the file. starved: weight
    -> tokens, of those that saw fewer than `min_tokens` and were left out. tokens_by_expert: least, median and most tokens that
    a routed expert saw; None where there are none. file_sha256: what `importance_sha256` of a plan made with the file will be.
    """

    kind: Literal["calibration"] = "calibration"
    model: str
    source: str
    text: tuple[str, ...]
    num_tokens: int
    length: int
    min_tokens: int
    weights: int
    starved: dict[str, int]
    tokens_by_expert: tuple[int, int, int] | None
    file: str
    file_sha256: str
    seconds: float
