"""How many texts a model writes at once: within a memory that is counted by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from assay_quantize.calibration.memory import texts_at_once


def model(dtype: torch.dtype = torch.bfloat16, **config: Any) -> Any:
    text = SimpleNamespace(**config)
    return SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: text), dtype=dtype)


GROUPED = {"num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128, "hidden_size": 2048}
MLA = {
    "num_hidden_layers": 78, "num_attention_heads": 64, "num_key_value_heads": 64, "head_dim": 64, "hidden_size": 6144,
    "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "dtype", "length", "count"),
    [
        (GROUPED, torch.bfloat16, 128, 128),  # 24 x 2 x 4 x 128 values = 49,152 B a token: 6.3 MB a text
        (GROUPED, torch.bfloat16, 2048, 16),  # 101 MB a text: 21 in 2 GiB, and a power of two
        (GROUPED, torch.float32, 2048, 8),
        (GROUPED | {"head_dim": None, "num_key_value_heads": None}, torch.bfloat16, 2048, 4),  # 2 x 2048 values: 403 MB a text
        (MLA, torch.bfloat16, 100, 4),  # 78 x 64 x 512 values = 5.1 MB a token: 0.5 GB a text, the cache of GLM-5
        (MLA, torch.bfloat16, 2048, 1),
    ],
)
def test_keys_and_values_stay_within_two_gib(config: dict[str, Any], dtype: torch.dtype, length: int, count: int) -> None:
    assert texts_at_once(model(dtype, **config), length) == count
