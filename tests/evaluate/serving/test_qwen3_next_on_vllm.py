"""Qwen3-Next in small, from the plan to drafts of a real server: its config says nothing of the MTP block that it stores."""

from __future__ import annotations

import json
from pathlib import Path

import hollow
import httpx
import pytest
import torch
from tiny_checkpoints import cut_into_shards, write_shards, write_tokenizer

from assay.recipes.load import load_recipe
from assay.recipes.model import Serving
from assay.recipes.precision import PrecisionRecipe
from assay.recipes.profile import ProfileRecipe
from assay_evaluate.serving.server import ServerSpec, serve
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.engine.quantize import quantize
from assay_quantize.plan.planner import make_plan
from assay_quantize.verify.verify import verify

pytestmark = pytest.mark.serve

SMALL = {
    "num_hidden_layers": 4, "hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128, "vocab_size": 512, "num_experts": 4, "num_experts_per_tok": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 64, "max_position_embeddings": 2048,
    "eos_token_id": 0, "bos_token_id": 0,
}  # fmt: skip


def make_tiny_qwen3_next(folder: Path) -> Path:
    """The published config with small sizes, random BF16 weights, a tokenizer: complete enough for vLLM."""
    config = {**hollow.QWEN3_NEXT_CONFIG, **SMALL}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    shapes = dict(hollow.qwen3_next_shapes(config))
    tensors = {name: (torch.randn(shape) * 0.05).to(torch.bfloat16) for name, shape in shapes.items()}
    write_shards(folder, cut_into_shards(tensors, 2))
    write_tokenizer(folder, config["vocab_size"])
    return folder


def test_a_quantized_qwen3_next_drafts(tmp_path: Path) -> None:
    """Random weights agree on nothing, so drafts are counted, not accepted ones."""
    source, made = make_tiny_qwen3_next(tmp_path / "source"), tmp_path / "made"
    plan = make_plan(open_checkpoint(source), load_recipe(PrecisionRecipe, "w4a16"), model="tiny", family="qwen3_next")
    quantize(plan, source, made, device="cpu")
    assert verify(made, source=source).damages == ()
    profile = load_recipe(ProfileRecipe, "cpu-emulated")
    # vLLM's gated delta net on CPUs computes in BF16 only
    profile = profile.model_copy(update={"vllm": {**profile.vllm, "dtype": "bfloat16"}})
    spec = ServerSpec(made, profile, Serving(num_speculative_tokens=2), speculate=True, log_path=tmp_path / "server.log")
    request = {"model": spec.served_model_name, "prompt": [5, 6, 7, 8], "max_tokens": 32, "temperature": 0, "ignore_eos": True}
    with serve(spec) as server:
        assert server.fingerprint.speculation == {"method": "mtp", "num_speculative_tokens": 2}
        reply = httpx.post(f"{server.base_url}/v1/completions", json=request, timeout=300).json()
    drafted = reply["metrics"]["speculative_decoding"]
    assert drafted["num_draft_tokens"] == 2 * drafted["num_spec_steps"] > 20
    assert "Qwen3NextMTP" in (tmp_path / "server.log").read_text()
