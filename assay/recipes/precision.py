"""Precision recipes: what to quantize, by role, with which scheme, and what to keep."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import BeforeValidator, Field, TypeAdapter, WrapValidator

from assay.recipes.base import Recipe
from assay.recipes.calibrated.methods import CALIBRATES, Calibrated, parsed
from assay.recipes.calibrated.texts import text_beside, without_folders
from assay.recipes.defaults import EXTENDS
from assay.records.base import sha256_of
from assay.records.plan import Role

ROLES: tuple[str, ...] = get_args(Role)

SchemeName = Literal[
    "w4a16", "w4a16_g64", "w4a16_g32", "w4a16_channel", "w4a16_asym", "fp8_block", "fp8_channel", "fp8_static", "nvfp4a16",
    "nvfp4", "mxfp4", "mxfp8", "w8a8",
]  # fmt: skip

STATIC_SCHEMES = frozenset({"nvfp4", "fp8_static"})
"""Schemes that store a scale of activations beside each weight."""

_BY_ROLE: TypeAdapter[dict[Role, SchemeName]] = TypeAdapter(dict[Role, SchemeName])
_ONE_SCHEME: TypeAdapter[tuple[Role, ...]] = TypeAdapter(tuple[Role, ...])
_LAYERS = re.compile(r"\d{1,5}(-\d{1,5})?(, *\d{1,5}(-\d{1,5})?)*")


def _quantize(value: Any, _: object) -> Any:
    """A union would put the names of its branches into every error."""
    return (_BY_ROLE if isinstance(value, Mapping) else _ONE_SCHEME).validate_python(value)


def _as_text(value: Any) -> Any:
    """Keys as text: YAML reads `3:` as a number."""
    return {str(key): each for key, each in value.items()} if isinstance(value, Mapping) else value


HOW_TO_MIX = (
    "to mix schemes, give each role its own, `quantize: {attention: fp8_block, routed_expert: w4a16, ...}`, and say under "
    '`layers` what differs in single layers: `layers: {"0-2, 77": {routed_expert: fp8_block, attention: bf16}}`'
)

EVERY_EXPERT = "counted by `assay calibrate` alone: with gptq and awq each expert sees all `tokens`; leave it out"

TAKEN_NAMES = frozenset({"bf16", "fp16", "fp32", "source", "reference"}) | {
    "measurements", "probes", "levers", "locate", "logs", "report", "calibration", "automatic"
}  # fmt: skip
"""Labels of checkpoints that were not made by assay, and folders of a run."""


class PrecisionRecipe(Recipe):
    """What is quantized, with which scheme, and what is kept: by role, and by layer where layers differ."""

    loader_keys = (EXTENDS,)
    explained: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("rules", "overrides", "schemes", "scheme", "layers"), HOW_TO_MIX),
        "calibration.tokens_per_expert": EVERY_EXPERT,
    }
    scheme: SchemeName | None = None
    """Of every role, where `quantize` is a list."""
    quantize: Annotated[tuple[Role, ...] | dict[Role, SchemeName], WrapValidator(_quantize)]
    """Roles that all take `scheme`, or role -> scheme."""
    layers: Annotated[dict[str, dict[Role, SchemeName | Literal["bf16"]]], BeforeValidator(_as_text)] = Field(
        default_factory=dict, exclude_if=lambda layers: not layers
    )
    """Layers that differ, as `0-2, 77` -> role -> its scheme there, or `bf16`: kept. The MTP block is none of them."""
    kv_cache: Literal["fp8", "fp8_calibrated"] | None = Field(default=None, exclude_if=lambda dtype: dtype is None)
    """fp8: the checkpoint asks to be served with its KV cache in E4M3, with scales of 1. fp8_calibrated: with a scale for keys
    and one for values in every layer, from a calibration file. None: it does not say."""
    activations: Literal["constant", "calibrated"] = Field(default="constant", exclude_if=lambda how: how == "constant")
    """Of scheme `nvfp4`. constant: one range for all, that of E2M1 and E4M3. calibrated: the largest magnitude that a
    calibration file has for the weights that vLLM gives one scale. Scheme `fp8_static` is always calibrated."""
    headroom: float = Field(default=1.0, ge=1, le=1024, exclude_if=lambda factor: factor == 1)
    """Of scales that are calibrated: the largest magnitude that was seen, times this, still fits."""
    keep: dict[Literal["source", "bf16", "fp32"], tuple[Role, ...]]
    """dtype -> roles. `source`: whatever dtype the source has. A role is named once, in `quantize` or here."""
    mtp: Literal["keep", "quantize", "drop"] = "keep"
    """keep: in the dtype role `mtp` has under `keep`. quantize: inside the block like outside, `eh_proj` exempt.
    drop: the block is removed and the config rewritten."""
    calibration: Annotated[Literal["none"] | Calibrated, WrapValidator(parsed)] = "none"
    """none: every scheme is computed from the weights alone. Else how text that goes through the model changes what weights of
    the method's schemes become; other schemes, and without `mtp: true` the MTP block, are rounded without."""
    observer: Literal["minmax", "mse"] = "minmax"
    """How scales are found. minmax: from the largest weight of the group. mse: searched for the least squared error, weighted
    by what a calibration file says of each input channel where one is given."""

    def found_from(self, folder: Path) -> Self:
        if self.calibration == "none" or not self.calibration.text:
            return self
        text = tuple(text_beside(folder, path) for path in self.calibration.text)
        return self.model_copy(update={"calibration": self.calibration.model_copy(update={"text": text})})

    @property
    def sha256(self) -> str:
        """As of every recipe; of files with text their names alone: what is in them is part of a calibration's identity."""
        return sha256_of(without_folders(self.model_dump(mode="json")))

    def _contradictions(self) -> Iterator[str]:
        """A name of its own; each role is named once; what vLLM loads only unquantized is kept; router_bias stays exact."""
        if self.name in TAKEN_NAMES or self.name.endswith(("-repeat", ".json")):
            yield (
                f"name {self.name!r} already means something in a run's folder, where the precision is a label and a folder; "
                "give the recipe and its file another name"
            )
        yield from self._contradictions_of_schemes()
        yield from self._contradictions_of_scales()
        named = [*self.quantize, *(role for roles in self.keep.values() for role in roles)]
        for twice in sorted({role for role in named if named.count(role) > 1}):
            yield f"role {twice} is named twice; name each role once, under `quantize` or one `keep` dtype"
        missing = [role for role in ROLES if role not in named]
        if missing:
            roles, each = ("roles", "are named nowhere; put each") if missing[1:] else ("role", "is named nowhere; put it")
            yield f"{roles} {', '.join(missing)} {each} under `quantize` or under `keep: {{bf16: [...]}}`"
        for never in sorted({"norm", "router", "router_bias", "embedding", "mtp"} & set(self.quantize)):
            hint = "say `mtp: quantize`" if never == "mtp" else "vLLM loads it only unquantized; move it to `keep`"
            yield f"role {never} cannot be under `quantize`: {hint}"
        yield from self._contradictions_of_calibration()
        if "router_bias" in self.keep.get("bf16", ()):
            yield "router_bias must be kept in fp32: in BF16 it changes the chosen experts of most tokens"

    def _contradictions_of_calibration(self) -> Iterator[str]:
        """It has weights to calibrate."""
        if self.calibration == "none" or isinstance(self.quantize, dict) is (self.scheme is not None):
            return  # not calibrated, or said already
        method = self.calibration.method
        if not set(CALIBRATES[method]) & set(self.schemes):
            which = ", ".join(CALIBRATES[method])
            yield f"calibration by {method} is for schemes {which}; name one of them, or say `calibration: none`"
        if self.calibration.mtp and self.mtp != "quantize":
            yield "calibration: mtp calibrates an MTP block that is quantized; say `mtp: quantize`, or leave it out"

    def _contradictions_of_schemes(self) -> Iterator[str]:
        """Every quantized role has one scheme; `layers` names layers, and each role of a layer once."""
        example = "`quantize: {routed_expert: nvfp4a16, attention: fp8_block}`"
        if isinstance(self.quantize, dict) and self.scheme is not None:
            yield "`quantize` gives each role its scheme: leave `scheme` out, or list the roles that all take it"
        if not isinstance(self.quantize, dict) and self.scheme is None:
            yield f"`quantize` lists roles: say under `scheme` what all of them take, or give each its own, as in {example}"
        earlier: set[tuple[int, str]] = set()
        for text, roles in self.layers.items():
            if _LAYERS.fullmatch(text) is None or any(first > last for first, last in _ranges(text)):
                yield f"layers: {text!r} names no layers; write numbers and ranges, counted from 0: `0-2, 77`"
                continue
            for role in sorted(set(roles) - set(self.quantize)):
                yield f"layers.{text}: role {role} is quantized nowhere else; only roles under `quantize` can differ by layer"
            here = {(layer, role) for layer in layer_numbers(text) for role in roles}
            for layer, role in sorted(here & earlier)[:1]:
                yield f"layers: role {role} of layer {layer} is named twice; name it once"
            earlier |= here

    def _contradictions_of_scales(self) -> Iterator[str]:
        """What is calibrated has something to calibrate; vLLM can load it."""
        if not self.quantize or (isinstance(self.quantize, dict) is (self.scheme is not None)):
            return  # said already
        if self.activations == "calibrated" and not STATIC_SCHEMES & set(self.schemes):
            known = ", ".join(sorted(STATIC_SCHEMES))
            yield f"activations: calibrated needs a scheme that stores scales of activations: {known}"
        if self.headroom != 1 and not self.needs_calibration:
            yield "headroom is of scales that are calibrated, and nothing is; leave it out, or say `activations: calibrated`"
        of_layers = {role for roles in self.layers.values() for role, scheme in roles.items() if scheme == "fp8_static"}
        static = of_layers | {role for role in self.quantize if self._scheme(role) == "fp8_static"}
        if "routed_expert" in static:
            yield (
                "role routed_expert cannot have scheme fp8_static: vLLM takes static inputs of experts only with one scale for "
                "a whole weight; give it fp8_block or nvfp4"
            )

    @property
    def needs_calibration(self) -> bool:
        """Whether scales come from a calibration file."""
        static = self.activations == "calibrated" or "fp8_static" in self.schemes
        return static or self.kv_cache == "fp8_calibrated"

    @property
    def schemes(self) -> tuple[str, ...]:
        """Every scheme that the recipe names, sorted."""
        of_layers = {scheme for roles in self.layers.values() for scheme in roles.values() if scheme != "bf16"}
        return tuple(sorted({*map(self._scheme, self.quantize), *of_layers}))

    def _scheme(self, role: str) -> str:
        scheme = self.quantize[role] if isinstance(self.quantize, dict) else self.scheme  # type: ignore[index]
        assert scheme is not None
        return scheme

    def scheme_of(self, role: str, layer: int | None) -> str | None:
        """The scheme that `role` takes in a layer; None: it is kept there. layer: None in the MTP block and outside layers."""
        if role not in self.quantize:
            return None
        for text, roles in self.layers.items():
            if layer is not None and role in roles and layer in layer_numbers(text):
                scheme = roles[role]
                return None if scheme == "bf16" else scheme
        return self._scheme(role)

    def kept_dtype(self, role: str, layer: int | None = None) -> Literal["source", "bf16", "fp32"] | None:
        """The dtype `role` is kept in, or None if it is quantized. layer: as for `scheme_of`."""
        if role in self.quantize:
            return "bf16" if self.scheme_of(role, layer) is None else None
        for dtype, roles in self.keep.items():
            if role in roles:
                return dtype
        return None


@functools.cache
def layer_numbers(text: str) -> frozenset[int]:
    """`0-2, 77` -> {0, 1, 2, 77}."""
    return frozenset(number for first, last in _ranges(text) for number in range(first, last + 1))


def _ranges(text: str) -> list[tuple[int, int]]:
    ends = [[int(end) for end in part.split("-")] for part in text.split(",")]
    return [(first, last[0] if last else first) for first, *last in ends]
