"""What a pass is expected to read, compute and leave on the disk; what it takes is measured in benchmarks/screen/."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_families import deepseek_v3, glm4_moe, glm_moe_dsa, make_tiny, qwen3_moe, qwen3_next
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.decoding.open_stored import open_stored
from assay_quantize.screen.estimate import estimate_pass
from assay_quantize.screen.forward import run_pass
from assay_quantize.screen.layer_model import LayerModel
from assay_quantize.sensitivity.texts import ScoredText


@pytest.mark.parametrize(
    "config", [qwen3_moe(), deepseek_v3(), glm_moe_dsa(), qwen3_next()], ids=lambda config: str(config["model_type"])
)
def test_layers_that_hand_on_more_than_hidden_states(tmp_path: Path, config: dict[str, Any]) -> None:
    folder = make_tiny(tmp_path / "source", config)
    stored = open_stored(open_checkpoint(folder, allow_quantized=True))
    texts = [ScoredText(tuple(range(7, 7 + length))) for length in (20, 40)]
    cost = estimate_pass(LayerModel(stored), texts, tmp_path, has_draft=True)
    states = run_pass(LayerModel(stored), texts, tmp_path / "pass", "x", lambda _line: None)
    behind = [part for number in range(len(texts)) for part in states.state(number)]
    chosen = [states.experts(layer, number) for layer in range(states.num_layers) for number in range(len(texts))]
    kept = [*behind, *(each for each in chosen if each is not None)]
    assert cost.kept_bytes == pytest.approx(sum(part.numel() * part.element_size() for part in kept), rel=0.01)
    assert cost.seconds > 0


def test_bytes_states_and_operations(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "source", glm4_moe())
    draw = np.random.default_rng(0)
    texts = [ScoredText(tuple(map(int, draw.integers(7, 800, 20 + 9 * number))), 1) for number in range(4)]
    stored = open_stored(open_checkpoint(folder, allow_quantized=True))
    cost = estimate_pass(LayerModel(stored), texts, tmp_path, has_draft=False)
    tensors = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
    block = f"model.layers.{LayerModel(stored).num_layers}."
    assert cost.read_bytes == sum(t.numel() * t.element_size() for name, t in tensors.items() if not name.startswith(block))

    states = run_pass(LayerModel(stored), texts, tmp_path / "pass", "x", lambda _line: None)
    num_tokens = sum(len(text.ids) for text in texts)
    behind = [states.state(number)[0] for number in range(len(texts))]
    behind_bytes = sum(state.numel() * state.element_size() for state in behind)
    chosen_bytes = 2 * 2 * 2 * num_tokens  # two layers, two experts, int16
    assert (cost.kept_bytes, cost.working_bytes) == (behind_bytes + chosen_bytes, behind_bytes)
    layers = LayerModel(stored)
    assert (cost.layer_bytes, cost.num_groups) == (max(layers.parts(number).whole_bytes for number in range(3)), 1)
    assert cost.fixed_s > 0 and cost.s_per_token > 0
    assert cost.seconds == cost.fixed_s + num_tokens * cost.s_per_token
    assert {path.name for path in tmp_path.iterdir()} == {"source", "pass"}

    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager").eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        for text in texts:
            whole(input_ids=torch.tensor([text.ids]), use_cache=False)
    operations = counter.get_flop_counts()["Global"]
    products = sum(flop for operation, flop in operations.items() if str(operation) in ("aten.mm", "aten.addmm"))
    assert products > 0.5 * sum(operations.values())
    assert cost.flop == pytest.approx(products, rel=0.02)
