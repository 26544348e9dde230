"""Layers calibrated one by one are those of llm-compressor's own `oneshot`, on the same sequences in the same order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from calibrating import LENGTH, SEQUENCES, layer_tensors, load_all, plan_of
from safetensors.torch import load_file, save_file
from tiny_checkpoints import change_biases, make_tiny_glm4_moe

from assay.recipes.calibrated.methods import AutoRoundCalibration, AwqGptqCalibration, GptqCalibration, SmoothQuantCalibration
from assay.recipes.precision import PrecisionRecipe
from assay_quantize.calibration.layerwise import calibrate_layers
from assay_quantize.calibration.methods import plain_forward
from assay_quantize.calibration.progress import TOKENS
from assay_quantize.calibration.text import Text
from assay_quantize.engine.quantize import quantize

pytestmark = pytest.mark.slow


def by_oneshot(
    folder: Path, tokens: torch.Tensor, modifiers: list[Any], monkeypatch: pytest.MonkeyPatch, **options: Any
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
            shuffle_calibration_samples=False, **options)  # fmt: skip
    made = {}
    for name, module in model.named_modules():
        if (scheme := getattr(module, "quantization_scheme", None)) is not None:
            given = {"weight": module.weight.data, "weight_scale": module.weight_scale.data}
            form = "pack-quantized" if scheme.weights.num_bits == 4 else "int-quantized"
            parts = BaseCompressor.get_value_from_registry(form).compress(given, scheme)
            made |= {f"{name}.{part}": parts[part] for part in parts if part != "weight_shape"}
        elif (weight := getattr(module, "weight", None)) is not None:
            made[f"{name}.weight"] = weight.data
    return made


def gptq_of(options: GptqCalibration | AwqGptqCalibration) -> Any:
    from llmcompressor.modifiers.gptq import GPTQModifier

    return GPTQModifier(
        scheme="W4A16", targets=["Linear"], ignore=["lm_head"], block_size=options.block_size,
        dampening_frac=options.dampening, actorder=options.activation_order,
    )  # fmt: skip


def scaled(num_layers: int, experts: int, first_dense: int = 1) -> dict[str, list[str]]:
    """What a GLM-4-MoE has scaled, and what reads it, written out."""
    groups = {}
    for layer in range(num_layers):
        at, is_dense = f"model.layers.{layer}", layer < first_dense
        mlps = [f"{at}.mlp"] if is_dense else [f"{at}.mlp.experts.{n}" for n in range(experts)] + [f"{at}.mlp.shared_experts"]
        readers = [f"{mlp}.{part}_proj" for mlp in mlps for part in ("gate", "up")]
        groups[f"{at}.input_layernorm"] = [f"{at}.self_attn.{part}_proj" for part in "qkv"]
        groups[f"{at}.post_attention_layernorm"] = readers if is_dense else [f"{at}.mlp.gate", *readers]
        groups |= {f"{mlp}.up_proj": [f"{mlp}.down_proj"] for mlp in mlps}
    return groups


def awq_of(groups: dict[str, list[str]]) -> Any:
    from llmcompressor.modifiers.transform.awq import AWQMapping, AWQModifier

    return AWQModifier(mappings=[AWQMapping(*mapping) for mapping in groups.items()], offload_device=None)


def of_both(
    folder: Path, precision: str, words: Path, work: Path, modifiers: Any, monkeypatch: pytest.MonkeyPatch, **of_oneshot: Any
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """What we make of a model, and what `oneshot` does. modifiers: of the options of the recipe."""
    plan = plan_of(folder, precision)
    calibrate_layers(plan, folder, work, Text((words,)), batch_tokens=LENGTH)  # oneshot's batch is one sequence
    tokens = torch.from_numpy(np.load(work / TOKENS)).long()
    assert tokens.shape == (SEQUENCES, LENGTH)
    options = PrecisionRecipe.model_validate(plan.precision_recipe).calibration
    return layer_tensors(work), by_oneshot(folder, tokens, modifiers(options), monkeypatch, **of_oneshot)


@contextmanager
def every_expert_runs(model: Any) -> Iterator[None]:
    """As `oneshot` passes states on to the next layer: every expert computes every token, and those routed to it are taken from
    that. With as many rows in each product as there are tokens, its last bits may be others than those of the routed rows."""
    from llmcompressor.modeling.moe.context import moe_calibration_context

    with plain_forward(model), moe_calibration_context():
        yield


@pytest.mark.usefixtures("one_thread")
def test_layers_are_those_of_oneshot(tmp_path: Path, words: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_tiny_glm4_moe(tmp_path / "model", dtype="fp32")  # so that both run in the dtype of the weights
    with monkeypatch.context() as as_oneshot:
        as_oneshot.setattr("assay_quantize.calibration.methods.plain_forward", every_expert_runs)
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


@pytest.mark.usefixtures("one_thread")
def test_routed_rows_alone_change_no_code_but_at_ties(tmp_path: Path, words: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What users get: states go on through the experts that tokens are routed to. Up to the first layer with experts nothing
    differs from every expert on every token; behind it a code may lie on the other side of a tie, which depends on the CPU."""
    folder, text = make_tiny_glm4_moe(tmp_path / "model", dtype="fp32"), Text((words,))
    plan = plan_of(folder, "w4a16-gptq")
    calibrate_layers(plan, folder, tmp_path / "routed", text, batch_tokens=LENGTH)
    monkeypatch.setattr("assay_quantize.calibration.methods.plain_forward", every_expert_runs)
    calibrate_layers(plan, folder, tmp_path / "every", text, batch_tokens=LENGTH)
    routed, every = layer_tensors(tmp_path / "routed"), layer_tensors(tmp_path / "every")
    assert routed.keys() == every.keys()
    behind = [name for name in every if name.startswith("model.layers.2.")]
    assert len(behind) == 2 * (4 + 5 * 3)
    assert [name for name in every if name not in behind and not torch.equal(routed[name], every[name])] == []
    apart = [codes(routed[n]) - codes(every[n]) for n in behind if n.endswith("weight_packed")]
    assert sum(int((part != 0).sum()) for part in apart) <= 1e-3 * sum(part.numel() for part in apart)


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
    recipe, modifiers = str(tmp_path / "whole.yaml"), [awq_of(scaled(2, 4)), rounding]
    got, expected = of_both(folder, recipe, words, tmp_path / "work", lambda _options: modifiers, monkeypatch)
    assert len(got) == 2 * (2 * 4 + 3 + 5 * 3) + 2 * 2 + 1 and got.keys() <= expected.keys()
    assert [name for name in got if not torch.equal(got[name], expected[name])] == []
    source = load_all(folder)
    changed = [name for name in got if name in source]
    assert len(changed) == 5 and not any(torch.equal(got[name], source[name]) for name in changed)


@pytest.mark.usefixtures("one_thread")
def test_awq_then_gptq_is_oneshots(tmp_path: Path, words: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer: `oneshot` scales the whole model first and rounds it then, we go on to the next layer when one is rounded."""
    folder = make_tiny_glm4_moe(
        tmp_path / "model", dtype="fp32", num_layers=1, first_dense=0, hidden=128, num_heads=2, num_kv_heads=1
    )
    (tmp_path / "whole.yaml").write_text(WHOLE.format(extends="w4a16") + "calibration: {method: awq+gptq, grid: 4}\n")

    def modifiers(options: AwqGptqCalibration) -> list[Any]:
        awq = awq_of(scaled(1, 4, first_dense=0))
        awq.n_grid = options.grid
        return [awq, gptq_of(options)]

    recipe = str(tmp_path / "whole.yaml")
    got, expected = of_both(folder, recipe, words, tmp_path / "work", modifiers, monkeypatch)
    assert len(got) == 2 * (4 + 5 * 3) + 3 and got.keys() <= expected.keys()
    assert [name for name in got if not torch.equal(got[name], expected[name])] == []


@pytest.mark.usefixtures("one_thread")
def test_layers_are_those_of_oneshot_under_smoothquant(tmp_path: Path, words: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier

    folder = make_tiny_glm4_moe(tmp_path / "model", dtype="fp32", num_layers=2, hidden=128, num_heads=2, num_kv_heads=1)
    (tmp_path / "whole.yaml").write_text(WHOLE.format(extends="w8a8") + "calibration: {method: smoothquant, strength: 0.6}\n")
    norms = [[readers, norm] for norm, readers in scaled(2, 4).items() if norm.endswith("layernorm")]

    def modifiers(options: SmoothQuantCalibration) -> list[Any]:
        smoothing = SmoothQuantModifier(smoothing_strength=options.strength, mappings=norms)
        return [smoothing, QuantizationModifier(scheme="W8A8", targets=["Linear"], ignore=["lm_head"])]

    recipe = str(tmp_path / "whole.yaml")
    got, expected = of_both(folder, recipe, words, tmp_path / "work", modifiers, monkeypatch)
    assert len(got) == 2 * (2 * 4 + 3 + 5 * 3) + 2 * 2 + 1 and got.keys() <= expected.keys()
    assert [name for name in got if not torch.equal(got[name], expected[name])] == []


@pytest.mark.usefixtures("one_thread")
def test_layers_are_those_of_oneshot_under_autoround(tmp_path: Path, words: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second layer is tuned with what the tuned first one puts out. In BF16 throughout, as AutoRound runs in it: routers
    have no biases here, which `oneshot` casts to BF16 and we do not (`test_autoround.py`)."""
    from llmcompressor.modifiers.autoround import AutoRoundModifier

    folder = make_tiny_glm4_moe(tmp_path / "model", num_layers=2, hidden=128, num_heads=2, num_kv_heads=1)
    change_biases(folder, torch.zeros_like)
    (tmp_path / "whole.yaml").write_text(
        WHOLE.format(extends="w4a16") + "calibration: {method: autoround, iterations: 12, batch: 4}\n"
    )

    def modifiers(options: AutoRoundCalibration) -> list[Any]:
        return [AutoRoundModifier(scheme="W4A16", targets=["Linear"], ignore=["lm_head"], iters=options.iterations,
                                  batch_size=options.batch, enable_torch_compile=False)]  # fmt: skip

    # every expert on every token would change nothing but the last bits
    recipe, options = str(tmp_path / "whole.yaml"), {"moe_calibrate_all_experts": False}
    got, expected = of_both(folder, recipe, words, tmp_path / "work", modifiers, monkeypatch, **options)
    expected = {name: value for name, value in expected.items() if not name.endswith(".weight")}
    expected = {name: value.bfloat16() if name.endswith("scale") else value for name, value in expected.items()}
    assert got.keys() == expected.keys() and len(got) == 2 * (2 * 4 + 3 + 5 * 3)
    assert [name for name in got if not torch.equal(got[name], expected[name])] == []
    (tmp_path / "whole.yaml").write_text(
        WHOLE.format(extends="w4a16") + "calibration: {method: autoround, iterations: 1, batch: 4}\n"
    )
    calibrate_layers(plan_of(folder, recipe), folder, tmp_path / "untuned", Text((words,)), batch_tokens=LENGTH)
    untuned = layer_tensors(tmp_path / "untuned")
    assert all(not torch.equal(got[name], untuned[name]) for name in got if name.endswith("weight_packed"))


@pytest.mark.usefixtures("one_thread")
def test_columns_that_no_text_reaches_are_rounded_to_the_nearest_and_others_are_oneshots(
    tmp_path: Path, words: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llm-compressor makes them zero: text that does reach them would miss them, and the weight is far from its source."""
    source = make_tiny_glm4_moe(
        tmp_path / "model", dtype="fp32", num_layers=1, first_dense=0, hidden=128, num_heads=2, num_kv_heads=1, num_experts=2
    )
    for path in source.glob("*.safetensors"):
        tensors = load_file(path)
        for name in (name for name in tensors if name.endswith("layers.0.post_attention_layernorm.weight")):
            tensors[name][:32] = 0
        save_file(tensors, path, {"format": "pt"})
    (tmp_path / "whole.yaml").write_text(WHOLE.format(extends="w4a16") + "calibration: {method: gptq}\n")
    recipe = str(tmp_path / "whole.yaml")
    got, expected = of_both(source, recipe, words, tmp_path / "work", lambda options: [gptq_of(options)], monkeypatch)
    quantize(plan_of(source, "w4a16"), source, tmp_path / "plain")
    plain, differing = load_all(tmp_path / "plain"), []
    for name in (name for name in got if name.endswith("weight_packed")):
        actual, reference = codes(got[name]), codes(expected[name])
        if name.endswith(("gate_proj.weight_packed", "up_proj.weight_packed")):
            assert torch.equal(actual[:, :32], codes(plain[name])[:, :32]) and bool((reference[:, :32] == 8).all())
            actual, reference = actual[:, 32:], reference[:, 32:]
            differing.append(name)
        assert torch.equal(actual, reference), name
    assert len(differing) == 6


def codes(packed_OI: torch.Tensor) -> torch.Tensor:
    """INT4 plus 8, [rows, columns]."""
    return torch.stack([packed_OI >> shift & 15 for shift in range(0, 32, 4)], -1).flatten(1)
