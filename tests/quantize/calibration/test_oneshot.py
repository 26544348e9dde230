"""Layers calibrated one by one are those of llm-compressor's own `oneshot`, on the same sequences in the same order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from calibrating import LENGTH, SEQUENCES, layer_tensors, load_all, plan_of
from safetensors.torch import load_file
from tiny_checkpoints import make_tiny_glm4_moe

from assay.recipes.precision import GptqCalibration, PrecisionRecipe
from assay_quantize.calibration.layerwise import calibrate_layers
from assay_quantize.calibration.text import Text
from assay_quantize.calibration.work_folder import TOKENS
from assay_quantize.engine.quantize import quantize

pytestmark = pytest.mark.slow


def by_oneshot(
    folder: Path, tokens: torch.Tensor, modifiers: list[Any], monkeypatch: pytest.MonkeyPatch
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Codes and scales that llm-compressor's own `oneshot` gives the whole model, on the same sequences in the same order; and
    its weights that are not quantized."""
    from compressed_tensors.compressors import BaseCompressor
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modeling.moe.linearize import linearize_moe
    from llmcompressor.pipelines.cache import IntermediatesCache
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(IntermediatesCache, "pin_memory", lambda *args: None)  # AWQ pins for copies to a GPU
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    linearize_moe(model)
    data = Dataset.from_dict({"input_ids": tokens.tolist(), "attention_mask": torch.ones_like(tokens).tolist()})
    oneshot(model=model, dataset=data, recipe=modifiers, num_calibration_samples=len(tokens), max_seq_length=tokens.shape[1],
            shuffle_calibration_samples=False)  # fmt: skip
    made = {}
    for name, module in model.named_modules():
        if (scheme := getattr(module, "quantization_scheme", None)) is not None:
            given = {"weight": module.weight.data, "weight_scale": module.weight_scale.data}
            parts = BaseCompressor.get_value_from_registry("pack-quantized").compress(given, scheme)
            made |= {f"{name}.{part}": parts[part] for part in ("weight_packed", "weight_scale")}
        elif (weight := getattr(module, "weight", None)) is not None:
            made[f"{name}.weight"] = weight.data
    return made


def gptq_of(options: GptqCalibration) -> Any:
    from llmcompressor.modifiers.gptq import GPTQModifier

    return GPTQModifier(
        scheme="W4A16", targets=["Linear"], ignore=["lm_head"], block_size=options.block_size,
        dampening_frac=options.dampening, actorder=options.activation_order,
    )  # fmt: skip


def awq_of(num_layers: int, experts: int) -> Any:
    """AWQ with the mappings that a GLM-4-MoE of which the first layer is dense needs, written out."""
    from llmcompressor.modifiers.transform.awq import AWQMapping, AWQModifier

    mappings = []
    for layer in range(num_layers):
        at = f"model.layers.{layer}"
        mlps = [f"{at}.mlp.experts.{n}" for n in range(experts)] + [f"{at}.mlp.shared_experts"] if layer else [f"{at}.mlp"]
        readers = [f"{mlp}.{part}_proj" for mlp in mlps for part in ("gate", "up")]
        mappings += [
            AWQMapping(f"{at}.input_layernorm", [f"{at}.self_attn.{part}_proj" for part in "qkv"]),
            AWQMapping(f"{at}.post_attention_layernorm", [f"{at}.mlp.gate", *readers] if layer else readers),
            *(AWQMapping(f"{mlp}.up_proj", [f"{mlp}.down_proj"]) for mlp in mlps),
        ]
    return AWQModifier(mappings=mappings, offload_device=None)


def of_both(
    folder: Path, precision: str, words: Path, work: Path, modifiers: Any, monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:  # fmt: skip
    """What we make of a model, and what `oneshot` does. modifiers: of the options of the recipe."""
    plan = plan_of(folder, precision)
    calibrate_layers(plan, folder, work, Text((words,)), batch_tokens=LENGTH)  # oneshot's batch is one sequence
    tokens = torch.from_numpy(np.load(work / TOKENS)).long()
    assert tokens.shape == (SEQUENCES, LENGTH)
    options = PrecisionRecipe.model_validate(plan.precision_recipe).calibration
    return layer_tensors(work), by_oneshot(folder, tokens, modifiers(options), monkeypatch)


@pytest.mark.usefixtures("one_thread")
def test_layers_are_those_of_oneshot(tmp_path: Path, words: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_tiny_glm4_moe(tmp_path / "model", dtype="fp32")  # so that both run in the dtype of the weights
    made = of_both(folder, "w4a16-gptq", words, tmp_path / "work", lambda options: [gptq_of(options)], monkeypatch)
    got, expected = made
    expected = {name: value for name, value in expected.items() if not name.endswith(".weight")}
    assert got.keys() == expected.keys() and len(got) == 2 * (3 * 4 + 3 + 2 * 5 * 3)
    differing = [name for name in got if not torch.equal(got[name], expected[name])]
    assert differing == []
    packed = [name for name in got if name.endswith("weight_packed")]
    plain = quantize(plan_of(folder, "w4a16"), folder, tmp_path / "plain")
    rounded = {n: t for shard in plain.shards for n, t in load_file(tmp_path / "plain" / shard.name).items()}
    assert all(not torch.equal(got[name], rounded[name]) for name in packed)  # to the nearest, they would be others


WHOLE = """schema: 1
name: whole
extends: {extends}
keep: {{source: [norm, router, mtp, lm_head, embedding, indexer], fp32: [router_bias]}}
"""
"""In the dtypes of the source."""


@pytest.mark.usefixtures("one_thread")
def test_layers_are_those_of_oneshot_under_awq(tmp_path: Path, words: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms and routers as well."""
    from llmcompressor.modifiers.quantization import QuantizationModifier

    folder = make_tiny_glm4_moe(tmp_path / "model", dtype="fp32", num_layers=2, hidden=128, num_heads=2, num_kv_heads=1)
    (tmp_path / "whole.yaml").write_text(WHOLE.format(extends="w4a16-awq"))
    rounding = QuantizationModifier(scheme="W4A16", targets=["Linear"], ignore=["lm_head"])
    recipe = str(tmp_path / "whole.yaml")
    got, expected = of_both(folder, recipe, words, tmp_path / "work", lambda _options: [awq_of(2, 4), rounding], monkeypatch)
    assert len(got) == 2 * (2 * 4 + 3 + 5 * 3) + 2 * 2 + 1 and got.keys() <= expected.keys()
    assert [name for name in got if not torch.equal(got[name], expected[name])] == []
    source = load_all(folder)
    changed = [name for name in got if name in source]
    assert len(changed) == 5 and not any(torch.equal(got[name], source[name]) for name in changed)
