"""Records of calibrations: what text went through the model, which weights saw enough of it, and what was made of them."""

from __future__ import annotations

from typing import Literal

from assay.records.base import Part, Record


class Nvfp4Inputs(Part):
    """Groups of 16 activations in the range that scheme `nvfp4` gives them; groups of zeros are left out.

    num_cut_off: too large, so that the largest are cut off. num_coarse: so small that their scale has fewer bits. num_zeroed:
    of those, the ones that become 0. largest: the largest magnitude, and the weight it enters. most_zeroed: the largest
    share of a weight's groups, and the weight.
    """

    num_groups: int
    num_cut_off: int
    num_coarse: int
    num_zeroed: int
    largest: float
    largest_at: str
    most_zeroed: float
    most_zeroed_at: str


class Calibration(Record):
    """What `assay calibrate` made.

    text: the files, or how the text came about. num_tokens: that went through the model. weights: in the file. starved: weight
    -> tokens, of those that saw fewer than `min_tokens` and were left out. tokens_by_expert: least, median and most tokens that
    a routed expert saw; None where there are none. nvfp4_inputs: all inputs, in the range of scheme `nvfp4`.
    file_sha256: what `importance_sha256` of a plan made with the file will be.
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
    nvfp4_inputs: Nvfp4Inputs
    file: str
    file_sha256: str
    seconds: float


class CalibratedLayers(Part):
    """Layers whose weights were rounded with the help of text: what their bytes are, and what they were made with.

    method: `gptq` or `awq`. asked_sha256: identity of what was asked for, plan, text and options; who asks the same gets the
    same. text: as in `Calibration`. tokens_sha256: of the token numbers. layers: layer -> digest of its calibrated tensors
    (`checkpoint/calibrated_layers.py`). smoothed: tensors that are not quantized, and are not those of the source either, since
    AWQ moved scales into them. fell_back: weights that were rounded to the nearest, as GPTQ's Hessian could not be inverted.
    """

    method: str
    asked_sha256: str
    text: tuple[str, ...]
    num_tokens: int
    length: int
    tokens_sha256: str
    layers: dict[int, str]
    smoothed: tuple[str, ...] = ()
    fell_back: tuple[str, ...] = ()
    versions: dict[str, str]
    seconds: float
