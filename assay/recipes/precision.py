"""Precision recipes: what to quantize, by role, with which scheme, and what to keep."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import AfterValidator, BeforeValidator, Field, TypeAdapter, WrapValidator

from assay.recipes.base import Recipe, Section
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


_ELSEWHERE = re.compile(r"own(@.*)?|hub:.*")
"""Sources that are no files."""


def _listed(value: Any) -> Any:
    """One source needs no list."""
    return [value] if isinstance(value, str) else value


def _not_empty(value: tuple[str, ...]) -> tuple[str, ...]:
    if not all(one.strip() for one in value):
        raise ValueError("names nothing; say files, hub:OWNER/NAME, own or MIX.yaml, each with @WEIGHT if it has one")
    return value


TextNames = Annotated[tuple[str, ...], BeforeValidator(_listed), AfterValidator(_not_empty)]
"""`SOURCE[@WEIGHT]`, as `--text` takes them."""


def text_beside(folder: Path, named: str) -> str:
    """The source that a recipe in `folder` calls `named`: a file is relative to `folder`."""
    return named if _ELSEWHERE.fullmatch(named) else str(folder / named)


def without_folders(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """A precision's content with files of text by their names: the same recipe, from whichever folder it is named."""
    made, calibration = dict(recipe), recipe.get("calibration")
    if isinstance(calibration, Mapping) and calibration.get("text"):
        names = [one if _ELSEWHERE.fullmatch(one) else Path(one).name for one in calibration["text"]]
        made["calibration"] = {**calibration, "text": names}
    return made


def _quantize(value: Any, _: object) -> Any:
    """A union would put the names of its branches into every error."""
    return (_BY_ROLE if isinstance(value, Mapping) else _ONE_SCHEME).validate_python(value)


class GptqCalibration(Section):
    """Weights rounded by GPTQ (arXiv 2210.17323), through llm-compressor; INT4 only.

    tokens: of the text that goes through the model, which every expert sees. length: of its sequences. seed: of text that the
    model writes itself. text: where it comes from, as `--text` says it; empty: what the command or the model's recipe says.
    block_size: columns whose errors are passed on together. dampening: added to the diagonal of the Hessian, as a share of
    its mean. activation_order: static: columns with the largest inputs first, groups as they are stored.
    """

    method: Literal["gptq"]
    tokens: int = Field(default=65_536, ge=1)
    length: int = Field(default=512, ge=8)
    seed: int = Field(default=0, ge=0)
    text: TextNames = Field(default=(), exclude_if=lambda text: not text)
    block_size: int = Field(default=128, ge=1)
    dampening: float = Field(default=0.01, gt=0, le=1)
    activation_order: Literal["static", "none"] = "static"


class AwqCalibration(Section):
    """Inputs scaled by AWQ (arXiv 2306.00978), through llm-compressor, before weights are rounded; INT4 only.

    tokens, length, seed, text: as for GPTQ; the search keeps inputs in memory, so fewer tokens.
    grid: candidates of the search for scales. duo_scaling: scales from weights and inputs; false: from inputs alone.
    """

    method: Literal["awq"]
    tokens: int = Field(default=16_384, ge=1)
    length: int = Field(default=512, ge=8)
    seed: int = Field(default=0, ge=0)
    text: TextNames = Field(default=(), exclude_if=lambda text: not text)
    grid: int = Field(default=20, ge=3)
    duo_scaling: bool = True


Calibrated = GptqCalibration | AwqCalibration
_METHODS: dict[str, type[GptqCalibration] | type[AwqCalibration]] = {"gptq": GptqCalibration, "awq": AwqCalibration}
INTEGERS = ("w4a16", "w4a16_g64", "w4a16_g32", "w4a16_channel", "w4a16_asym")
"""Schemes whose weights can be calibrated."""


def _calibration(value: Any, _: object) -> Any:
    """As `_quantize`: one error for what was meant."""
    if not isinstance(value, Mapping):
        if isinstance(value, Calibrated) or value == "none":
            return value
        raise ValueError("say `none`, or a method and its options: `calibration: {method: gptq, tokens: 65536}`")
    if value.get("method") not in _METHODS:
        raise ValueError(f"method must be one of {', '.join(_METHODS)} (got {str(value.get('method'))[:40]!r})")
    return _METHODS[value["method"]].model_validate(value)


def _as_text(value: Any) -> Any:
    """Keys as text: YAML reads `3:` as a number."""
    return {str(key): each for key, each in value.items()} if isinstance(value, Mapping) else value


HOW_TO_MIX = (
    "to mix schemes, give each role its own, `quantize: {attention: fp8_block, routed_expert: w4a16, ...}`, and say under "
    '`layers` what differs in single layers: `layers: {"0-2, 77": {routed_expert: fp8_block, attention: bf16}}`'
)

EVERY_EXPERT = "with gptq and awq every expert sees every token: `tokens` is what each of them sees; leave it out"

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
    calibration: Annotated[Literal["none"] | GptqCalibration | AwqCalibration, WrapValidator(_calibration)] = "none"
    """none: every scheme is computed from the weights alone. Else how text that goes through the model changes what INT4
    weights are rounded to; other schemes and the MTP block are rounded without."""
    observer: Literal["minmax", "mse"] = "minmax"
    """How scales are found. minmax: from the largest weight of the group. mse: searched for the least squared error, weighted
    by what a calibration file says of each input channel where one is given."""

    def found_from(self, folder: Path) -> Self:
        if self.calibration == "none" or not self.calibration.text:
            return self
        text = tuple(text_beside(folder, one) for one in self.calibration.text)
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
        if self.calibration != "none" and not set(INTEGERS) & set(self.schemes):
            yield f"calibration is for INT4 schemes ({', '.join(INTEGERS)}); name one of them, or say `calibration: none`"
        if "router_bias" in self.keep.get("bf16", ()):
            yield "router_bias must be kept in fp32: in BF16 it changes the chosen experts of most tokens"

    def _contradictions_of_schemes(self) -> Iterator[str]:
        """Every quantized role has one scheme; `layers` names layers, and each role of a layer once."""
        example = "`quantize: {routed_expert: nvfp4a16, attention: fp8_block}`"
        if isinstance(self.quantize, dict) and self.scheme is not None:
            yield "`quantize` gives each role its scheme: leave `scheme` out, or list the roles that all take it"
        if not isinstance(self.quantize, dict) and self.scheme is None:
            yield f"`quantize` lists roles: say under `scheme` what all of them take, or give each its own, as in {example}"
        seen: set[tuple[int, str]] = set()
        for text, roles in self.layers.items():
            if _LAYERS.fullmatch(text) is None or any(first > last for first, last in _ranges(text)):
                yield f"layers: {text!r} names no layers; write numbers and ranges, counted from 0: `0-2, 77`"
                continue
            for role in sorted(set(roles) - set(self.quantize)):
                yield f"layers.{text}: role {role} is quantized nowhere else; only roles under `quantize` can differ by layer"
            here = {(layer, role) for layer in layer_numbers(text) for role in roles}
            for layer, role in sorted(here & seen)[:1]:
                yield f"layers: role {role} of layer {layer} is named twice; name it once"
            seen |= here

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
                there = roles[role]
                return None if there == "bf16" else there
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
