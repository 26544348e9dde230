"""Precision recipes: what to quantize, by role, and what to keep."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, get_args

from assay.recipes.base import Recipe
from assay.recipes.defaults import EXTENDS
from assay.records.plan import Role

ROLES: tuple[str, ...] = get_args(Role)

SchemeName = Literal[
    "w4a16", "w4a16_g32", "w4a16_channel", "w4a16_asym", "fp8_block", "fp8_channel", "nvfp4a16", "mxfp4", "mxfp8", "w8a8",
]  # fmt: skip


ONE_SCHEME = (
    "mixed precision is not supported: a recipe has one scheme, for all roles and layers; each role is either quantized "
    "(`quantize: [ROLE, ...]`) or kept (`keep: {bf16: [ROLE, ...]}`)"
)


class PrecisionRecipe(Recipe):
    """What is quantized and what is kept, by role: one scheme, the same for every layer."""

    loader_keys = (EXTENDS,)
    explained = dict.fromkeys(("rules", "layers", "overrides", "schemes", "scheme", "quantize"), ONE_SCHEME)
    scheme: SchemeName
    quantize: tuple[Role, ...]
    keep: dict[Literal["source", "bf16", "fp32"], tuple[Role, ...]]
    """dtype -> roles. `source`: whatever dtype the source has. A role is named once, in `quantize` or here."""
    mtp: Literal["keep", "quantize", "drop"] = "keep"
    """keep: in the dtype role `mtp` has under `keep`. quantize: inside the block like outside, `eh_proj` exempt.
    drop: the block is removed and the config rewritten."""
    calibration: Literal["none"] = "none"
    """The only value: every scheme is computed from the weights alone. The field stays because it is part of `sha256`."""
    observer: Literal["minmax", "mse"] = "minmax"
    """How scales are found. minmax: from the largest weight of the group. mse: searched for the least squared error, weighted
    by what a calibration file says of each input channel where one is given."""

    def _contradictions(self) -> Iterator[str]:
        """Each role is named once; what vLLM loads only unquantized is kept; router_bias stays exact."""
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
        if "router_bias" in self.keep.get("bf16", ()):
            yield "router_bias must be kept in fp32: in BF16 it changes the chosen experts of most tokens"

    def kept_dtype(self, role: str) -> Literal["source", "bf16", "fp32"] | None:
        """The dtype `role` is kept in, or None if it is quantized."""
        for dtype, roles in self.keep.items():
            if role in roles:
                return dtype
        return None
