"""Which family a model is of, by its config.json; and what that says of experts and quantization.

What a family calls its tensors is in `family_names.py`. Imports neither torch nor vllm.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from assay.errors import PlanError
from assay.recipes.family_names import families_with, names_of
from assay.recipes.text_config import changing_text, count_of, text_of

_NOT_IN_MXFP4 = {
    "GptOssForCausalLM": (
        "cannot be quantized again: it is published with its experts in MXFP4, 4.25 bits a weight, and vLLM 0.32 takes no "
        "smaller form of them; serve it as it is (docs/decisions/families.md)"
    ),
}
"""Architectures that are published in MXFP4 and have a family only in 16 bits, with the reason."""


def family_of(config: Mapping[str, Any]) -> str:
    """The family of a model, from `architectures` and `model_type` of its config.json.

    Raises PlanError: dense model, a release that is not quantized (with the reason), or an architecture that is not known.
    """
    architectures = config.get("architectures") or []
    architecture = str(architectures[0]) if isinstance(architectures, list) and architectures else None
    model_type = config.get("model_type")
    if architecture is None and model_type is None:
        raise PlanError("config.json: names neither `architectures` nor `model_type`; take the one of the model's release")
    what = architecture or f"model_type {model_type!r}"
    declared = quantization_of(config)
    is_mxfp4 = isinstance(declared, dict) and declared.get("quant_method") == "mxfp4"
    if is_mxfp4 and (reason := _NOT_IN_MXFP4.get(what)):
        raise PlanError(f"config.json: {what} {reason}")
    families = (
        names.name
        for names in families_with(architecture or str(model_type))
        if (model_type in names.model_types if architecture is None else architecture in names.architectures)
    )
    family = next(families, None)
    if family is not None and num_experts(family, config) > 0:
        return family
    if not any(count_of(key, text_of(config).get(key)) for key in EXPERT_COUNT_KEYS):
        raise PlanError(f"config.json: {without_experts(what, config)}; assay is for mixture-of-experts (docs/families.md)")
    if family is not None:
        text, keys = text_of(config), " or ".join(names_of(family).num_experts_keys)
        own = next(key for key in EXPERT_COUNT_KEYS if count_of(key, text.get(key)))
        raise PlanError(
            f"config.json: {what} is of family {family}, whose number of experts is {keys}; this one has {own}: write it as "
            f"{names_of(family).num_experts_keys[0]}, or take the config.json of the model's release"
        )
    raise PlanError(
        f"config.json: architecture {what} is not known; `assay family` drafts a family of what vLLM serves "
        "(docs/families.md has the supported ones)"
    )


def without_experts(what: str, config: Mapping[str, Any]) -> str:
    """What is said of a config.json that has none of `EXPERT_COUNT_KEYS`: not every such model is dense."""
    keys = ", ".join(EXPERT_COUNT_KEYS)
    if (key := _key_of_experts(config)) is not None:
        return f"{what} has none of {keys}, and {key} is not read as a number of experts"
    if re.search("moe|mixture|expert", what, re.IGNORECASE):
        return f"{what} declares no experts (none of {keys}): is it the config.json of the model's release?"
    return f"{what} is a dense model (it declares no experts)"


def _key_of_experts(config: Mapping[str, Any], depth: int = 4) -> str | None:
    """The first key of a config, nested or not, that speaks of experts; None: none does."""
    for key, value in config.items():
        if value and re.search("expert|moe", key, re.IGNORECASE):
            return key
        if isinstance(value, dict) and depth and (inside := _key_of_experts(value, depth - 1)) is not None:
            return f"{key}.{inside}"
    return None


def quantization_of(config: Mapping[str, Any]) -> Any:
    """`quantization_config` of a config.json, which some multimodal models have with their language model; None: none."""
    return config.get("quantization_config") or text_of(config).get("quantization_config")


def unquantized(config: Mapping[str, Any]) -> dict[str, Any]:
    """`config` without a `quantization_config`, there and where it describes the language model."""

    def without(part: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in part.items() if key != "quantization_config"}

    return without(changing_text(config, without))


EXPERT_COUNT_KEYS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts", "num_moe_experts")


def num_experts(family: str, config: Mapping[str, Any]) -> int:
    """Routed experts per MoE layer; 0 if the config does not say."""
    text = text_of(config)
    return next((n for key in names_of(family).num_experts_keys if (n := count_of(key, text.get(key)))), 0)
