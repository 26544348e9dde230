"""Families in small, from the source to vLLM itself. DeepSeek-V3: an FP8 release, latent attention, grouped routing, and a
draft without a head. Qwen3-Next: its config says nothing of the MTP block that it stores.

What vLLM says of DeepSeek-V3 in W4A16 is compared with `DeepseekV3ForCausalLM` of transformers in FP32 with the same weights,
dequantized by compressed-tensors and PyTorch.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tiny_families
import torch
from one_process import ask_in_one_process
from quantized_checkpoints import dense_weight
from safetensors.torch import save_file
from tiny_checkpoints import read_shards
from tiny_families import make_tiny, make_tiny_deepseek_v3
from transformers import AutoModelForCausalLM

from assay.recipes.load import load_recipe
from assay.recipes.model import Serving
from assay.recipes.precision import PrecisionRecipe
from assay.recipes.profile import ProfileRecipe
from assay.records.plan import Plan
from assay_evaluate.serving.server import ServerSpec
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.engine.quantize import quantize
from assay_quantize.formats.schemes import compressed_tensors_scheme
from assay_quantize.plan.planner import make_plan
from assay_quantize.verify.verify import verify

MTP = "model.layers.3."
PROMPTS = [[5, 60, 700, 33, 21, 8, 400, 77], list(range(300, 340)), [7, 7, 7, 850, 12, 90]]
NUM_TOKENS = 48
NEAREST = 0.002
"""The most by which a log-probability of vLLM may differ from that of transformers, in nats, and by which a token that vLLM
chose may be less likely than the likeliest."""


@dataclass(frozen=True)
class Made:
    """A release, and what was quantized from it."""

    release: Path
    plans: dict[str, Plan]
    folders: dict[str, Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("deepseek")
    release = make_tiny_deepseek_v3(folder / "release")
    plans, folders = {}, {name: folder / name for name in ("fp8", "w4a16", "nvfp4a16")}
    for name, out in folders.items():
        plans[name] = make_plan(open_checkpoint(release), load_recipe(PrecisionRecipe, name), model="tiny", family=None)
        quantize(plans[name], release, out)
    return Made(release, plans, folders)


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for tensors in read_shards(folder).values() for name, tensor in tensors.items()}


# ------------------------------------------------------------------------------------------------ without a server
@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp8", "w4a16", "nvfp4a16"])
def test_an_fp8_release_without_a_draft_head_is_quantized_and_verified(made: Made, precision: str) -> None:
    plan, tensors = made.plans[precision], stored(made.folders[precision])
    assert (plan.mtp_layers, verify(made.folders[precision], source=made.release).damages) == ((3,), ())
    in_draft = {name.removeprefix(MTP): tensor for name, tensor in tensors.items() if name.startswith(MTP)}
    assert not {"embed_tokens.weight", "shared_head.head.weight"} & in_draft.keys()
    assert {tensor.dtype for tensor in in_draft.values()} == {torch.bfloat16, torch.float32}  # F32: the router's bias
    assert sum(".experts." in name for name in in_draft) == 8 * 3


def test_fp8_blocks_are_carried_over_bit_for_bit(made: Made) -> None:
    """Those of `kv_a_proj_with_mqa` too, whose 576 rows end in half a block."""
    before, after = stored(made.release), stored(made.folders["fp8"])
    carried = [tensor for tensor in made.plans["fp8"].tensors if tensor.scheme is not None]
    assert {tensor.action for tensor in carried} == {"keep"}
    assert "model.layers.1.self_attn.kv_a_proj_with_mqa" in {tensor.module for tensor in carried}
    for tensor in carried:
        assert torch.equal(after[tensor.name].view(torch.uint8), before[tensor.name].view(torch.uint8))
        assert torch.equal(after[f"{tensor.module}.weight_scale"], before[f"{tensor.module}.weight_scale_inv"])


# ------------------------------------------------------------------------------------------------ served
@pytest.fixture(scope="module")
def qwen3_next(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen")
    source = make_tiny(folder / "source", tiny_families.qwen3_next(), shards=2)
    plan = make_plan(open_checkpoint(source), load_recipe(PrecisionRecipe, "w4a16"), model="tiny", family="qwen3_next")
    quantize(plan, source, folder / "made")
    assert verify(folder / "made", source=source).damages == ()
    return folder / "made"


def spec_of(checkpoint: Path, num_tokens: int, **flags: Any) -> ServerSpec:
    profile = load_recipe(ProfileRecipe, "cpu-emulated")
    profile = profile.model_copy(update={"vllm": {**profile.vllm, **flags}})
    return ServerSpec(
        checkpoint, profile, Serving(num_speculative_tokens=num_tokens), speculate=True, log_path=checkpoint / "log"
    )


@pytest.fixture(scope="module")
def served(made: Made, qwen3_next: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What one process says of each: FP8 is the reference of a run."""
    specs = {precision: spec_of(made.folders[precision], 1) for precision in ("w4a16", "fp8")}
    specs["qwen3-next"] = spec_of(qwen3_next, 2, dtype="bfloat16")  # vLLM's gated delta net on CPUs computes in BF16 only
    return ask_in_one_process(specs, PROMPTS, tmp_path_factory.mktemp("asked"), num_tokens=NUM_TOKENS)


@pytest.mark.serve
@pytest.mark.parametrize("precision", ["w4a16", "fp8"])
def test_drafts_are_made_and_accepted_without_a_head_of_their_own(served: dict[str, dict[str, Any]], precision: str) -> None:
    said = served[precision]
    assert said["drafted"] > 60 and said["accepted"] > 0.5 * said["drafted"]
    log = "\n".join(said["said"])
    assert f"DeepSeekMTP: 1 parameters are neither stored nor used, first {MTP}shared_head.head.weight" in log
    assert "assay-strict: DeepSeekMTP: every parameter in use came from the checkpoint" in log


@pytest.mark.serve
def test_a_quantized_qwen3_next_drafts(served: dict[str, dict[str, Any]]) -> None:
    """Random weights agree on nothing, so drafts are counted, not accepted ones."""
    said = served["qwen3-next"]
    assert said["drafted"] == 2 * said["drafts"] > 20
    assert any(line.startswith("assay-strict: Qwen3NextMTP: every parameter") for line in said["said"])


@pytest.mark.serve
def test_vllm_computes_what_transformers_computes(made: Made, served: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    """Not FP8, which rounds activations too: transformers does not."""
    replies, folder, plan = served["w4a16"]["replies"], made.folders["w4a16"], made.plans["w4a16"]
    own = distances(replies, oracle(folder, plan, tmp_path / "own"))
    assert max(own) < NEAREST, own
    changed = distances(replies, oracle(folder, plan, tmp_path / "no bias", routed_freely=True))
    assert min(changed) > 4 * max(own), "routing changes too little here: the comparison would prove nothing"


def oracle(folder: Path, plan: Plan, out: Path, *, routed_freely: bool = False) -> torch.nn.Module:
    """transformers' model in FP32 with the dequantized weights of a checkpoint. routed_freely: without the router's bias."""
    tensors, dense = stored(folder), {}
    schemes = {tensor.module: tensor.scheme for tensor in plan.tensors if tensor.scheme is not None}
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        module, _, part = name.rpartition(".")
        if module in schemes:
            parts.setdefault(module, {})[part] = tensor
        elif not name.startswith(MTP):
            dense[name] = tensor.float() * (0 if routed_freely and name.endswith("e_score_correction_bias") else 1)
    for module, of_module in parts.items():
        dense[f"{module}.weight"] = dense_weight(of_module, compressed_tensors_scheme(schemes[module])).float()
    out.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in dense.items()}, out / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({key: config[key] for key in config if key != "quantization_config"}))
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    shutil.rmtree(out)
    return model


def distances(replies: list[dict[str, Any]], model: torch.nn.Module) -> tuple[float, float]:
    """(largest difference of a log-probability, largest lag of a chosen token behind the likeliest), in nats."""
    differences, lags = [], []
    for prompt, reply in zip(PROMPTS, replies, strict=True):
        tokens, tops = reply["tokens"], reply["prompt"]
        assert len(tokens) == NUM_TOKENS
        with torch.no_grad():
            logprobs_TV = torch.log_softmax(model(torch.tensor([[*prompt, *tokens]])).logits[0], -1)
        pairs = zip(logprobs_TV[: len(tops)], tops, strict=True)
        differences += [abs(value - float(of_V[int(token)])) for of_V, top in pairs for token, value in top.items()]
        behind_TV = logprobs_TV[len(prompt) - 1 : -1]
        lags += (behind_TV.max(-1).values - behind_TV[torch.arange(len(tokens)), torch.tensor(tokens)]).tolist()
    return max(differences), max(lags)
