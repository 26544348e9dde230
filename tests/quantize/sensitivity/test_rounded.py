"""Weights and activations come back as compressed-tensors and the serving emulation have them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from assay.errors import QuantizeError
from assay.recipes.precision import SchemeName
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.checkpoint.source_reader import SourceReader
from assay_quantize.engine.quantize import quantize
from assay_quantize.plan.planner import make_plan
from assay_quantize.sensitivity.parts import Key, find_parts
from assay_quantize.sensitivity.rounded import Rounder, input_args, round_inputs
from assay_vllm.dequantize import Dequantizer
from assay_vllm.fake_quant import fake_quantize

SCHEMES = tuple(name for name in get_args(SchemeName) if name != "fp8_static")  # that one needs a calibration file


@pytest.mark.parametrize("scheme", SCHEMES)
def test_weights_are_those_that_are_served(tiny_glm: Path, tmp_path: Path, scheme: str) -> None:
    """The checkpoint that `assay quantize` makes, read by the code that emulates it inside vLLM."""
    checkpoint = open_checkpoint(tiny_glm)
    layout = find_parts(checkpoint, [scheme], model="tiny")
    key = Key(1, "routed_expert")
    plan = make_plan(checkpoint, layout.recipe("one", {key: scheme}), model="tiny", family=None)
    quantize(plan, tiny_glm, tmp_path / "made")
    config = json.loads((tmp_path / "made" / "config.json").read_text())["quantization_config"]
    stored = [item for path in sorted((tmp_path / "made").glob("*.safetensors")) for item in load_file(path).items()]
    served = dict(Dequantizer(config, torch.float32)(stored))
    with SourceReader(checkpoint) as reader:
        found = list(Rounder(layout, reader).weights(key, scheme))
    assert [name for name, _, _ in found] == list(layout.weights[key])
    for name, plain, back in found:
        assert not torch.equal(plain, back)
        # of 4-bit floats with quantized activations the emulation leaves out one rounding to BF16
        tolerance = {"rtol": 2**-8, "atol": 1e-9} if scheme == "nvfp4" else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(back, served[name].float(), **tolerance)


@pytest.mark.parametrize("scheme", [one for one in SCHEMES if input_args(one) is not None])
def test_activations_are_rounded_as_the_emulation_does(scheme: str) -> None:
    """Which its own tests hold against compressed-tensors."""
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((7, 256)).astype(np.float32)) * 3
    x[0] = 0
    args = input_args(scheme)
    ours = round_inputs(x, scheme)
    assert torch.equal(ours, fake_quantize(x, args, None, torch.ones(1)))
    assert not torch.equal(ours, x) and torch.equal(ours[0], torch.zeros(256))


def test_inputs_of_weight_only_schemes_stay() -> None:
    x = torch.randn(2, 256)
    assert all(round_inputs(x, scheme) is x for scheme in ("w4a16", "nvfp4a16", "w4a16_asym"))


def test_weights_that_are_not_finite_are_named(tiny_glm: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_glm, tmp_path / "bad")
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    for path in (tmp_path / "bad").glob("*.safetensors"):
        tensors = load_file(path)
        if name in tensors:
            tensors[name][3, 5] = float("nan")
            save_file(tensors, path, {"format": "pt"})
    checkpoint = open_checkpoint(tmp_path / "bad")
    layout = find_parts(checkpoint, ["w4a16", "nvfp4a16"], model="tiny")
    with SourceReader(checkpoint) as reader:
        for scheme in ("w4a16", "nvfp4a16"):
            with pytest.raises(QuantizeError, match=r"experts\.2\.up_proj\.weight: holds NaN or infinity"):
                list(Rounder(layout, reader).weights(Key(1, "routed_expert"), scheme))
