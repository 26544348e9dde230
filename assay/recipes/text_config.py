"""Where a config.json describes the language model: at its top, or in a part of its own if the model is multimodal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

_WRAPPED = ("thinker_config", "text_config", "llm_config")
"""Keys under which a multimodal model describes its language model. Qwen3-Omni has one inside the other."""


def _wrapped_under(config: Mapping[str, Any]) -> str | None:
    """The key of the part in which the language model is described; None: it is described right here."""
    return next((key for key in _WRAPPED if isinstance(config.get(key), dict)), None)


def text_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config.json that describes the language model: `text_config` of a multimodal model, else all of it."""
    while (key := _wrapped_under(config)) is not None:
        config = config[key]
    return config


def changing_text(config: Mapping[str, Any], change: Callable[[Mapping[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    """`config` with `change` made to the part that describes the language model."""
    key = _wrapped_under(config)
    return change(config) if key is None else {**config, key: changing_text(config[key], change)}
