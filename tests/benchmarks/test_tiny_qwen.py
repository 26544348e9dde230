"""examples/tiny_qwen: its plain PyTorch is the architecture that transformers has, and the committed checkpoint is trained."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from assay.recipes.load import load_recipe
from assay.recipes.model import ModelRecipe, is_automatic
from assay.recipes.precision import PrecisionRecipe
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.plan.planner import make_plan

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES / "tiny_qwen"))

import tiny_qwen  # noqa: E402
from data import Chats  # noqa: E402
from export import export, round_to_bf16  # noqa: E402

CHECKPOINT = EXAMPLES / "tiny_qwen" / "checkpoint"
TOKENIZER = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))


def in_transformers(folder: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM  # takes seconds to load

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.slow
@torch.no_grad()
def test_what_is_exported_is_the_model_in_transformers(tmp_path: Path) -> None:
    """Random weights with a router that prefers some experts: the same logits as Qwen3MoeForCausalLM."""
    torch.manual_seed(3)
    model = tiny_qwen.tiny_qwen(896).eval()
    for layer in model.layers:
        layer.mlp.gate_weight.mul_(20)
    round_to_bf16(model)
    export(model, TOKENIZER, tmp_path)
    ids_BT = torch.randint(0, 876, (2, 48))
    ours = model.lm_head(model(ids_BT))
    theirs = in_transformers(tmp_path)(input_ids=ids_BT).logits
    assert ours.std() > 0.1
    torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-3)


@pytest.mark.slow
@torch.no_grad()
def test_the_checkpoint_is_trained() -> None:
    """Rows of a seed that training did not have; a model that knows nothing loses log(896) = 6.8 nats a token."""
    rows = [Chats(TOKENIZER, "eval-test", name="tiny-qwen").row(i, 256) for i in range(8)]
    ids_BT = torch.tensor([ids for ids, _ in rows])
    replies_BT = torch.tensor([weights for _, weights in rows])[:, 1:] >= 1
    logits = in_transformers(CHECKPOINT)(input_ids=ids_BT[:, :-1]).logits
    nll = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids_BT[:, 1:].flatten(), reduction="none")
    assert nll.view(replies_BT.shape)[replies_BT].mean() < 0.5


def test_the_checkpoint_is_what_its_page_says() -> None:
    checkpoint = open_checkpoint(CHECKPOINT)
    num_weights = sum(math.prod(header.shape) for header in checkpoint.tensors.values())
    page = (EXAMPLES / "tiny_qwen" / "README.md").read_text(encoding="utf-8")
    assert f"{num_weights / 1e6:.1f} M parameters" in page and num_weights < 4.5e6
    assert {header.dtype for header in checkpoint.tensors.values()} == {"BF16"}
    said = json.loads((CHECKPOINT / "config.json").read_text(encoding="utf-8"))
    ours = tiny_qwen.TinyQwenConfig(said["vocab_size"]).to_hf()
    assert {name: said[name] for name in ours} == ours
    assert (CHECKPOINT / "tokenizer.json").read_bytes() == (EXAMPLES / "tiny_glm/checkpoint/tokenizer.json").read_bytes()


def test_every_precision_of_its_recipe_plans() -> None:
    recipe = load_recipe(ModelRecipe, "tiny-qwen")
    checkpoint = open_checkpoint(CHECKPOINT)
    names = [name for name in recipe.precisions if not is_automatic(name)]
    for name in names:
        plan = make_plan(checkpoint, load_recipe(PrecisionRecipe, name), model=recipe.name, family=recipe.family)
        quantized = {tensor.role for tensor in plan.tensors if tensor.scheme is not None}
        assert quantized == {"attention", "routed_expert"}, name
    assert len(names) == 4
