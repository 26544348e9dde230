"""One layer at a time is bit for bit what transformers computes that holds the whole model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_families import deepseek_v3, glm4_moe, glm_moe_dsa, make_tiny, qwen3_moe, qwen3_next

from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.decoding.open_stored import open_stored
from assay_quantize.screen.layer_model import LayerModel, State, text_config

LENGTH = 40


def whole_model(folder: Path, dtype: torch.dtype, tokens: torch.Tensor) -> tuple[list[State], torch.Tensor]:
    """(states behind every layer, logits) of transformers' from_pretrained."""
    from transformers import AutoModelForCausalLM

    config = text_config(json.loads((folder / "config.json").read_text()))
    model = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=dtype, experts_implementation="eager").eval()
    states: list[State] = []
    for layer in model.base_model.layers:
        layer.register_forward_hook(
            lambda _module, _args, output: states.append(output if isinstance(output, tuple) else (output,))
        )
    with torch.no_grad():
        logits = model(input_ids=tokens, use_cache=False).logits
    return states, logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "config", [glm4_moe(), qwen3_moe(), deepseek_v3(), glm_moe_dsa(), qwen3_next()], ids=lambda config: str(config["model_type"])
)
def test_states_and_logits_are_those_of_the_whole_model(tmp_path: Path, config: dict[str, Any], dtype: torch.dtype) -> None:
    folder = make_tiny(tmp_path / "model", config)
    tokens = torch.randint(7, 800, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    expected_states, expected_logits = whole_model(folder, dtype, tokens)
    with open_stored(open_checkpoint(folder, allow_quantized=True)) as stored:
        model, state = LayerModel(stored, dtype), None
        model.use_embedding(tokens)
        for layer in range(model.num_layers):
            with model.filled(layer):
                state = model.run(layer, tokens, state)
            assert len(state) == len(expected_states[layer]) == (2 if "index_topk" in config else 1)
            assert all(torch.equal(part, expected) for part, expected in zip(state, expected_states[layer], strict=True))
            assert not any(parameter.device.type != "meta" for parameter in model.model.model.layers.parameters())
        assert state is not None
        with model.head() as logits:
            positions = torch.arange(LENGTH)
            assert torch.equal(logits(tokens, positions, state), expected_logits)
            assert torch.equal(logits(tokens, positions[7:19], state), expected_logits[:, 7:19])
