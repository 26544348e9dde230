"""AutoRound of a layer: what it leaves alone, what goes from layer to layer, and what comes out is verified."""

from __future__ import annotations

import json
import math
import os
import random
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from calibrating import LENGTH, SEQUENCES, layer_tensors, load_all, made_and_verified, plan_of
from command_line import Run
from safetensors.torch import load_file, save_file
from tiny_checkpoints import change_biases, make_tiny_glm4_moe
from tiny_families import deepseek_v3, glm4_moe, glm_moe_dsa, make_tiny, qwen3_moe

from assay.errors import QuantizeError
from assay_quantize.calibration.layerwise import calibrate_layers
from assay_quantize.calibration.memory import IMPORTED_NUMBERS, SPARE_BYTES, check_gpu_memory, layer_bytes
from assay_quantize.calibration.text import Text
from assay_quantize.plan.calibrated import calibrated_tensors

pytestmark = pytest.mark.slow


def _biased(number: int, generator: torch.Generator, bias: torch.Tensor) -> torch.Tensor:
    return number + 2**-5 * torch.randint(-9, 9, bias.shape, generator=generator).float()


def recipe_in(folder: Path, *, name: str = "tuned", keys: str = "", **options: Any) -> str:
    text = "".join(f", {key}: {value}" for key, value in {"iterations": 3, "batch": 4, **options}.items())
    path = folder / f"{name}.yaml"
    path.write_text(f"schema: 1\nname: {name}\nextends: w4a16\n{keys}calibration: {{method: autoround{text}}}\n")
    return str(path)


@pytest.mark.parametrize(
    "config", [glm_moe_dsa(), qwen3_moe(), deepseek_v3()], ids=lambda config: str(config["model_type"])
)  # fmt: skip
def test_every_weight_of_a_family_is_tuned_and_verified(tmp_path: Path, words: Path, config: dict[str, Any]) -> None:
    """auto-round would leave the MLPs of GLM-5 in 16 bits, by a rule for names in layer 0."""
    source = make_tiny(tmp_path / "model", config)
    plan, result = made_and_verified(source, words, tmp_path, recipe_in(tmp_path))
    rounded = {t.name.removesuffix(".weight") for ts in calibrated_tensors(plan).values() for t in ts}
    assert result.damages == () and result.checks["calibrated"] == 3
    made = layer_tensors(tmp_path / "work")
    assert {name.removesuffix(".weight_packed") for name in made if name.endswith("packed")} == rounded and rounded
    assert any(".mlp." in name for name in rounded)


def test_scales_may_be_negative_and_everything_else_is_the_sources(tmp_path: Path, words: Path) -> None:
    """AutoRound takes all sixteen codes, and turns a group round whose largest weight is positive."""
    source = make_tiny_glm4_moe(tmp_path / "model", hidden=128, num_layers=2, num_heads=2, num_kv_heads=1)
    _, result = made_and_verified(source, words, tmp_path, recipe_in(tmp_path))
    assert result.damages == ()
    stored, original = load_all(tmp_path / "made"), load_all(source)
    scales = [value for name, value in stored.items() if name.endswith("weight_scale")]
    assert all(scale.dtype == torch.bfloat16 for scale in scales) and any(bool((scale < 0).any()) for scale in scales)
    kept = stored.keys() & original.keys()
    assert all(torch.equal(stored[name], original[name]) for name in kept)
    assert any(name.endswith("mlp.gate.weight") for name in kept)


def test_two_states_go_from_layer_to_layer(tmp_path: Path, words: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first is the untouched model's and the second the tuned one's; with DSA, each has two parts."""
    from assay_quantize.calibration import layerwise

    source = make_tiny(tmp_path / "model", glm_moe_dsa())
    states: dict[str, np.ndarray[Any, Any]] = {}
    add = layerwise.WorkFolder.add

    def kept(self: Any, line: Any) -> None:
        states.update({path.name: np.load(path) for path in self.path.glob("state-*.npy")})
        add(self, line)

    monkeypatch.setattr(layerwise.WorkFolder, "add", kept)
    calibrate_layers(plan_of(source, recipe_in(tmp_path)), source, tmp_path / "work", Text((words,)), batch_tokens=LENGTH)
    assert sorted(states) == [f"state-0000{layer}-{part}.npy" for layer in (1, 2) for part in range(4)]
    from transformers import AutoModelForCausalLM

    whole = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="eager").eval()
    tokens = torch.from_numpy(np.load(tmp_path / "work" / "tokens.npy")).long()
    with torch.no_grad():
        *_, behind_second, _ = whole.base_model(input_ids=tokens, output_hidden_states=True).hidden_states
    untouched, tuned = (states[f"state-00002-{part}.npy"] for part in (0, 2))
    assert untouched.shape == tuned.shape == behind_second.shape and untouched.dtype == np.float32
    np.testing.assert_allclose(untouched, behind_second.numpy(), rtol=1e-4, atol=1e-4)
    error = float(np.abs(tuned - untouched).mean() / np.abs(untouched).mean())
    assert 1e-3 < error < 1


def test_a_layer_without_weights_to_tune_passes_both_states_on(tmp_path: Path, words: Path) -> None:
    source = make_tiny_glm4_moe(tmp_path / "model", hidden=128, num_layers=3, num_heads=2, num_kv_heads=1)
    fp8 = "{attention: fp8_channel, dense_mlp: fp8_channel, shared_expert: fp8_channel, routed_expert: fp8_channel}"
    plan = plan_of(source, recipe_in(tmp_path, keys=f"layers: {{'0-1': {fp8}}}\n"))
    assert set(calibrated_tensors(plan)) == {2}
    calibrate_layers(plan, source, tmp_path / "work", Text((words,)))
    assert len(layer_tensors(tmp_path / "work")) == 2 * (4 + 5 * 3)


@pytest.mark.parametrize("config", [glm4_moe(), deepseek_v3()], ids=lambda config: str(config["model_type"]))
def test_a_bias_of_all_experts_changes_nothing(tmp_path: Path, words: Path, config: dict[str, Any]) -> None:
    """auto-round has the layer in BF16, in which experts with biases of 12 and 12.03 are alike."""
    made = []
    for number in (0, 12):
        source = make_tiny(tmp_path / f"model-{number}", config)
        change_biases(source, partial(_biased, number, torch.Generator().manual_seed(1)))
        calibrate_layers(
            plan_of(source, recipe_in(tmp_path, iterations=12)), source, work := tmp_path / f"work-{number}", Text((words,))
        )
        made.append(layer_tensors(work))
    assert made[0].keys() == made[1].keys() and made[0]
    assert [name for name in made[0] if not torch.equal(made[0][name], made[1][name])] == []


def test_weights_beyond_fp16_are_rounded_as_well_as_others(tmp_path: Path, words: Path) -> None:
    """auto-round's scales are FP16, at least 1e-5 and at most 65,504: eighths of weights below and above would be cut off."""
    source = make_tiny_glm4_moe(tmp_path / "model", hidden=128, num_layers=1, num_heads=2, num_kv_heads=1, shards=1, mtp=False)
    for path in source.glob("*.safetensors"):
        tensors = load_file(path)
        for leaf, factor in (("mlp.up_proj", 1e-6), ("mlp.gate_proj", 1e7)):
            for name in (name for name in tensors if name.endswith(f"{leaf}.weight")):
                tensors[name] = tensors[name] * factor
        save_file(tensors, path, {"format": "pt"})
    _, result = made_and_verified(source, words, tmp_path, recipe_in(tmp_path))
    assert result.damages == ()
    assert result.worst_relative_error["dense_mlp"] < 0.2


def test_a_process_is_as_it_was(tmp_path: Path, words: Path) -> None:
    """auto-round seeds everything, and asks for deterministic algorithms."""
    source = make_tiny_glm4_moe(tmp_path / "model", hidden=128, num_layers=1, num_heads=2, num_kv_heads=1, shards=1, mtp=False)

    def state() -> tuple[Any, ...]:
        options = vars(torch._tensor_str.PRINT_OPTS).copy()
        numbers = (random.getstate(), np.random.get_state()[1].tolist(), torch.random.get_rng_state().tolist())
        return *numbers, torch.are_deterministic_algorithms_enabled(), options, dict(os.environ), torch.is_grad_enabled()

    before = state()
    calibrate_layers(plan_of(source, recipe_in(tmp_path)), source, tmp_path / "work", Text((words,)))
    assert state() == before


def test_where_no_step_is_better_it_is_said(tmp_path: Path, words: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With losses that are not finite auto-round rounds to the nearest, and says nothing."""
    from auto_round.algorithms.quantization.sign_round.quantizer import SignRoundQuantizer

    source = make_tiny_glm4_moe(tmp_path / "model", hidden=128, num_layers=1, num_heads=2, num_kv_heads=1, shards=1, mtp=False)
    plan, text = plan_of(source, recipe_in(tmp_path)), Text((words,))
    assert calibrate_layers(plan, source, tmp_path / "work", text).fell_back == ()
    infinite = torch.tensor(torch.inf)
    monkeypatch.setattr(SignRoundQuantizer, "_get_loss", lambda self, output, *_: output.sum() * 0 + infinite)
    weights = {tensor.name.removesuffix(".weight") for tensor in calibrated_tensors(plan)[0]}
    assert set(calibrate_layers(plan, source, tmp_path / "lost", text).fell_back) == weights


def test_what_it_takes_of_memory_is_counted(tmp_path: Path, words: Path) -> None:
    source = make_tiny_glm4_moe(
        tmp_path / "model", num_layers=1, first_dense=0, hidden=128, num_heads=2, num_kv_heads=1, mtp=False
    )
    plan = plan_of(source, recipe_in(tmp_path))
    layers, shape = calibrated_tensors(plan), (SEQUENCES, LENGTH)
    whole = sum(math.prod(t.shape) for t in plan.tensors if ".layers.0." in t.name)
    rounded = sum(math.prod(t.shape) for t in layers[0])
    packed = sum(output.num_bytes for t in layers[0] for output in t.outputs)
    scores, moved = 3 * SEQUENCES * 2 * LENGTH**2, SEQUENCES * LENGTH * 128 * 3  # eight at once, or all
    kept = 4 * SEQUENCES * LENGTH * 128 + 2 * SEQUENCES * LENGTH**2 + IMPORTED_NUMBERS
    assert layer_bytes(plan, layers, shape, 1) == 4 * (whole + 16 * rounded + 24 * moved + scores + kept) + packed
    on_gpu = 4 * (whole + 5 * rounded + 6 * moved + scores) + packed
    assert layer_bytes(plan, layers, shape, 1, gpu=True) == on_gpu
    check_gpu_memory(plan, layers, shape, 1, on_gpu + SPARE_BYTES, source)
    with pytest.raises(QuantizeError, match="of the GPU's memory"):
        check_gpu_memory(plan, layers, shape, 1, on_gpu + SPARE_BYTES - 1, source)
    with pytest.raises(QuantizeError, match=r"calibrating its largest layer takes .* of --memory 67.1 MB"):
        calibrate_layers(plan, source, tmp_path / "work", Text((words,)), memory_bytes=64 << 20)


def test_the_command_says_little_and_what_it_cannot_do_in_a_line(tmp_path: Path, source: Path, words: Path, run: Run) -> None:
    out = ("--text", words, "--out", tmp_path / "made")
    path = recipe_in(tmp_path, tokens=LENGTH * SEQUENCES, length=LENGTH)
    code, printed, stderr = run("quantize", source, "-p", path, *out)
    assert code == 0 and "verified: " in printed, stderr
    manifest = json.loads((tmp_path / "made" / "assay_manifest.json").read_text())
    assert manifest["calibrated"]["versions"]["auto-round"] == version("auto-round")
    assert "autoround: layer 2 of 3" in stderr and "INFO" not in stderr + printed and "WARNING" not in stderr + printed
    for options, message in (
        ({"iterations": 0}, "iterations"),
        ({"grid": 20}, "unknown key 'grid'; method autoround takes tokens, length, seed, text, mtp, method, iterations, batch"),
    ):
        code, _, stderr = run("quantize", source, "-p", recipe_in(tmp_path, name="odd", **options), *out)
        assert code == 2 and message in stderr and "Traceback" not in stderr, stderr
    odd = Path(recipe_in(tmp_path, name="odd"))
    odd.write_text(odd.read_text().replace("extends: w4a16", "extends: w4a16-asym"))
    code, _, stderr = run("quantize", source, "-p", odd, *out)
    assert code == 2 and "calibration by autoround is for schemes w4a16, w4a16_g64, w4a16_g32, w4a16_channel" in stderr
