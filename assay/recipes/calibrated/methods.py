"""Methods by which text changes what weights are rounded to, with their options; and the schemes that each is for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from assay.errors import did_you_mean
from assay.recipes.base import Section
from assay.recipes.calibrated.texts import MAX_LENGTH, TextNames


class OnText(Section):
    """What all methods have. tokens: of the text that goes through the model; every expert sees all of them, but for AutoRound.
    length: of its sequences. seed: of text that the model writes itself. text: where it comes from, as `--text` says it; empty:
    what the command or the model's recipe says. mtp: the MTP block is calibrated as well, under `mtp: quantize`; else it is
    rounded without."""

    tokens: int = Field(default=65_536, ge=1)
    length: int = Field(default=512, ge=8, le=MAX_LENGTH)
    seed: int = Field(default=0, ge=0)
    text: TextNames = Field(default=(), exclude_if=lambda text: not text)
    mtp: bool = Field(default=False, exclude_if=lambda asked: not asked)


class _Corrected(Section):
    """Options of GPTQ. block_size: columns whose errors are passed on together. dampening: added to the diagonal of the
    Hessian, as a share of its mean. activation_order: static: columns with the largest inputs first, groups as they are
    stored."""

    block_size: int = Field(default=128, ge=1)
    dampening: float = Field(default=0.01, gt=0, le=1)
    activation_order: Literal["static", "none"] = "static"


class _Scaled(Section):
    """Options of AWQ. grid: candidates of the search for scales. duo_scaling: scales from weights and inputs; false: from
    inputs alone."""

    tokens: int = Field(default=16_384, ge=1)
    grid: int = Field(default=20, ge=3)
    duo_scaling: bool = True


class GptqCalibration(_Corrected, OnText):
    """Weights rounded by GPTQ (arXiv 2210.17323), through llm-compressor; INT4 only."""

    method: Literal["gptq"]


class AwqCalibration(_Scaled, OnText):
    """Inputs scaled by AWQ (arXiv 2306.00978), through llm-compressor, before weights are rounded; INT4 only.

    tokens: fewer than for GPTQ, as the search keeps inputs in memory.
    """

    method: Literal["awq"]


class AwqGptqCalibration(_Scaled, _Corrected, OnText):
    """AWQ's scales first, then the scaled weights rounded by GPTQ; with the options of both. Each layer is watched twice."""

    method: Literal["awq+gptq"]


class SmoothQuantCalibration(OnText):
    """Inputs scaled by SmoothQuant (arXiv 2211.10438), through llm-compressor, so that they lose less in INT8; W8A8 only.

    strength: how much of the range goes from inputs to weights; 0: nothing that depends on the inputs.
    """

    method: Literal["smoothquant"]
    strength: float = Field(default=0.5, ge=0, le=1)


class AutoRoundCalibration(OnText):
    """Rounding and clipping learned by AutoRound (arXiv 2309.05516), through llm-compressor; symmetric INT4 only. It has its
    own scales, whatever `observer` is. An expert learns from the tokens that are routed to it, and no other.

    iterations: steps of its signed gradient descent for each layer. batch: sequences of one step.
    """

    method: Literal["autoround"]
    iterations: int = Field(default=200, ge=1)
    batch: int = Field(default=8, ge=1)


Calibrated = GptqCalibration | AwqCalibration | AwqGptqCalibration | SmoothQuantCalibration | AutoRoundCalibration
METHODS: dict[str, type[Calibrated]] = {
    "gptq": GptqCalibration, "awq": AwqCalibration, "awq+gptq": AwqGptqCalibration, "smoothquant": SmoothQuantCalibration,
    "autoround": AutoRoundCalibration,
}  # fmt: skip
SYMMETRIC = ("w4a16", "w4a16_g64", "w4a16_g32", "w4a16_channel")
INTEGERS = (*SYMMETRIC, "w4a16_asym")
CALIBRATES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(METHODS, INTEGERS), "smoothquant": ("w8a8",), "autoround": SYMMETRIC,
}  # fmt: skip
"""Method -> schemes whose weights it changes."""
SCALED_BY = {"awq": "AWQ", "awq+gptq": "AWQ", "smoothquant": "SmoothQuant"}
"""Method -> what scales weights before they are rounded, and puts the inverse into norms, routers or other weights."""


def parsed(value: Any, _: object) -> Any:
    """A union would put the names of its branches into every error."""
    if not isinstance(value, Mapping):
        if isinstance(value, Calibrated) or value == "none":
            return value
        raise ValueError("say `none`, or a method and its options: `calibration: {method: gptq, tokens: 65536}`")
    if value.get("method") not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)} (got {str(value.get('method'))[:40]!r})")
    kind = METHODS[value["method"]]
    # of a union, keys of all methods would be named as allowed; of `tokens_per_expert` the recipe says why there is none
    unknown = next((str(key) for key in value if key not in (*kind.model_fields, "tokens_per_expert")), None)
    if unknown is not None:
        raise ValueError(
            f"unknown key {unknown[:40]!r}; {did_you_mean(unknown, kind.model_fields)}method {value['method']} takes "
            f"{', '.join(kind.model_fields)}"
        )
    return kind.model_validate(value)
