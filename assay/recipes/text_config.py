"""Where a config.json describes the language model: at its top, or in a part of its own if the model is multimodal.

And the numbers that it has there, which a stranger may have written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from assay.errors import PlanError

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


MAX_COUNT = 100_000
"""More layers or experts than any model has: loops over a config's numbers stay short."""


def count_of(key: str, value: Any) -> int:
    """A number of layers or experts; 0 for what counts nothing. PlanError for one that cannot be."""
    if isinstance(value, list):  # per layer, in some configs
        return max((count_of(key, element) for element in value), default=0)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0 or value > MAX_COUNT:
        if value is None or value is False:
            return 0
        raise PlanError(
            f"config.json: {key} must be a number from 0 to {MAX_COUNT}, got {ascii(value)[:40]}; correct the config"
        )
    return value


MAX_SIZE = 10**9
"""No width, rank or window of a model is larger."""


def size_of(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A width, rank or window in a config. default: where it is missing, null or 0. PlanError: it cannot be, or is missing."""
    value = config.get(key) or default
    if type(value) is not int or not 0 <= value <= MAX_SIZE or (value == 0 and default is None):
        got = ascii(config.get(key))[:40]
        raise PlanError(f"config.json: {key} must be a whole number from 1 to {MAX_SIZE}, got {got}; correct the config")
    return value


def num_hidden_layers(config: Mapping[str, Any]) -> int:
    """Decoder layers without MTP; PlanError if the config does not say."""
    got = text_of(config).get("num_hidden_layers")
    layers = count_of("num_hidden_layers", got)
    if not layers:
        raise PlanError(f"config.json: num_hidden_layers must be a positive number of layers, got {got!r}")
    return layers
