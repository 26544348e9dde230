"""Weights and inputs that are zero, not finite, or too large to be squared."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from calibrating import made_and_verified, plan_of
from safetensors.torch import load_file, save_file
from tiny_checkpoints import make_tiny_glm4_moe

from assay.errors import AssayError, QuantizeError
from assay_quantize.calibration.calibrate import calibrate
from assay_quantize.calibration.layerwise import calibrate_layers
from assay_quantize.calibration.text import Text

pytestmark = pytest.mark.slow
NORM, EXPERT = "model.layers.0.post_attention_layernorm.weight", "model.layers.0.mlp.experts.0"
Change = Callable[[torch.Tensor], object]


def made_with(folder: Path, changes: dict[str, Change]) -> Path:
    """A model of one layer with two experts; tensors changed in place."""
    source = make_tiny_glm4_moe(
        folder, num_layers=1, first_dense=0, hidden=128, num_heads=2, num_kv_heads=1, num_experts=2
    )  # fmt: skip
    for path in source.glob("*.safetensors"):
        tensors = load_file(path)
        for name in tensors.keys() & changes.keys():
            changes[name](tensors[name])
        save_file(tensors, path, {"format": "pt"})
    return source


def dead(columns: int) -> Change:
    return lambda tensor: tensor[:columns].zero_()


ZEROS: dict[str, Change] = {
    NORM: dead(32),  # of a norm that reads a quarter of its channels times zero
    f"{EXPERT}.up_proj.weight": dead(16),
    "model.layers.0.mlp.experts.1.up_proj.weight": torch.Tensor.zero_,
    "model.layers.0.self_attn.q_proj.weight": torch.Tensor.zero_,
    "model.layers.0.input_layernorm.weight": lambda tensor: tensor[7].fill_(1e4),
}


@pytest.mark.parametrize("extends", ["w4a16-gptq", "w4a16-awq", "w8a8"])
def test_zeros_and_outliers_of_the_source_are_no_damage(tmp_path: Path, words: Path, extends: str) -> None:
    source = made_with(tmp_path / "model", ZEROS)
    recipe = tmp_path / "recipe.yaml"
    method = {"w4a16-gptq": "gptq", "w4a16-awq": "awq, grid: 3", "w8a8": "smoothquant"}[extends]
    recipe.write_text(f"schema: 1\nname: recipe\nextends: {extends}\ncalibration: {{method: {method}}}\n")
    plan, result = made_and_verified(source, words, tmp_path, str(recipe))
    assert result.damages == () and result.checks["calibrated"] == 1
    assert plan.calibrated is not None
    # no input of its down projection is anything but zero: it is rounded to the nearest, and that is said
    fell_back = ("model.layers.0.mlp.experts.1.down_proj",) if extends == "w4a16-gptq" else ()
    assert plan.calibrated.fell_back == fell_back


def test_inputs_too_large_to_be_squared_leave_weights_rounded_to_the_nearest(tmp_path: Path, words: Path) -> None:
    source = made_with(tmp_path / "model", {f"{EXPERT}.up_proj.weight": lambda tensor: tensor[0, 0].fill_(1e30)})
    plan = plan_of(source)
    made = calibrate_layers(plan, source, tmp_path / "work", Text((words,)))
    assert f"{EXPERT}.down_proj" in made.fell_back and not any("self_attn" in name for name in made.fell_back)


@pytest.mark.parametrize("name", [f"{EXPERT}.up_proj.weight", "model.layers.0.input_layernorm.weight"])
def test_what_is_not_finite_is_said_before_anything_is_rounded(tmp_path: Path, words: Path, name: str) -> None:
    source = made_with(tmp_path / "model", {name: lambda tensor: tensor.view(-1)[3].fill_(torch.nan)})
    message = f"{name} has values that are NaN or infinite; the source is damaged" if "up_proj" in name else (
        "layer 0 gives values that are NaN or infinite, so nothing behind it can be calibrated"
    )  # fmt: skip
    with pytest.raises(QuantizeError, match=message):
        calibrate_layers(plan_of(source), source, tmp_path / "work", Text((words,)))
    assert not list((tmp_path / "work").glob("layer-*"))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e20])
def test_inputs_that_are_not_finite_have_no_largest_magnitude(tmp_path: Path, words: Path, value: float) -> None:
    """Of NaN `max` keeps what was there before; infinity, and the square of 1e20, are no numbers of a calibration file."""
    source = made_with(tmp_path / "model", {NORM: lambda tensor: tensor[7].fill_(value)})
    with pytest.raises(QuantizeError, match=r"what enters model\.layers\.0\.mlp\..* is NaN, infinite or too large"):
        calibrate(source, tmp_path / "w", Text((words,)), model_name="tiny", num_tokens=64, length=32, min_tokens=1)
    assert not (tmp_path / "w").exists()


def test_a_model_whose_inputs_are_all_zero_is_refused(tmp_path: Path, words: Path) -> None:
    zeros = {NORM: torch.Tensor.zero_, "model.layers.0.input_layernorm.weight": torch.Tensor.zero_}
    biases = {f"model.layers.0.self_attn.{part}_proj.bias": torch.Tensor.zero_ for part in "qkv"}
    source = made_with(tmp_path / "model", {**zeros, **biases})
    with pytest.raises(QuantizeError, match="all inputs of all weights are zero"):
        calibrate(source, tmp_path / "w", Text((words,)), model_name="tiny", num_tokens=64, length=32, min_tokens=1)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("hidden_act", 5, "Field 'hidden_act' expected str, got int (value: 5)"),
        ("n_group", 0, "transformers cannot run it: integer division or modulo by zero"),
        ("num_experts_per_tok", -1, "transformers cannot run it: selected index k out of range"),
        ("partial_rotary_factor", 3.5, "transformers cannot run it: The size of tensor a"),
        ("head_dim", "64", "transformers cannot "),
    ],
)
def test_a_config_that_no_model_runs_with(tmp_path: Path, words: Path, key: str, value: object, message: str) -> None:
    """transformers checks little of it, and fails somewhere in the model's code."""
    source = made_with(tmp_path / "model", {})
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, key: value}))
    errors = []
    for run in (
        lambda: calibrate(source, tmp_path / "out", Text((words,)), model_name="m", num_tokens=64, length=32, min_tokens=1),
        lambda: made_and_verified(source, words, tmp_path / "made", "w4a16-gptq"),
    ):
        with pytest.raises(AssayError) as raised:
            run()
        errors.append(str(raised.value))
    assert all("\n" not in error for error in errors) and all(message in error for error in errors), errors
