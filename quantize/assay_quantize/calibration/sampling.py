"""How many texts a model writes at once."""

from __future__ import annotations

from typing import Any

MOST_AT_ONCE = 128
CACHE_BYTES = 2 << 30


def texts_at_once(model: Any, length: int) -> int:
    """As many as keep their keys and values within CACHE_BYTES, when each is `length` tokens long; one at least.

    The number depends on the model and the length alone: on any machine the same seed gives the same texts. transformers caches
    keys and values of every head, also where a model (MLA) could keep them compressed.
    """
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    if getattr(config, "kv_lora_rank", None):
        values = heads * (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim)
    else:
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        values = 2 * (getattr(config, "num_key_value_heads", None) or heads) * head_dim
    of_a_text = config.num_hidden_layers * values * model.dtype.itemsize * length
    at_once = MOST_AT_ONCE
    while at_once > 1 and at_once * of_a_text > CACHE_BYTES:
        at_once //= 2
    return at_once
