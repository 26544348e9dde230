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
from assay.recipes.calibrated.methods import GptqCalibration
from assay.recipes.precision import PrecisionRecipe, SchemeName
from assay_quantize.calibration.layerwise import calibrate_layers
from assay_quantize.calibration.text import Text
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.checkpoint.source_reader import SourceReader
from assay_quantize.engine.quantize import quantize
from assay_quantize.plan.planner import make_plan
from assay_quantize.sensitivity.parts import Key, find_parts
from assay_quantize.sensitivity.rounded import Rounder, calibrated_weights, input_args, round_inputs
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


@pytest.mark.slow
def test_calibrated_weights_are_those_that_are_served(tiny_glm: Path, tmp_path: Path) -> None:
    """The checkpoint that the engine makes of the same layers, read by the code that emulates it; other schemes are as ever."""
    checkpoint, lines = open_checkpoint(tiny_glm), list[str]()
    layout = find_parts(checkpoint, ["w4a16", "w4a16_channel", "nvfp4a16"], model="tiny")
    options = GptqCalibration(method="gptq", tokens=64, length=32)
    recipe = layout.plans["w4a16"].precision_recipe | {"calibration": options.model_dump(mode="json")}
    plan = make_plan(checkpoint, PrecisionRecipe.model_validate(recipe), model="tiny", family=None)
    with calibrated_weights(layout, tiny_glm, tmp_path, options, lines.append) as calibrated:
        assert sum(line.startswith("gptq of ") for line in lines) == 2
        assert sum("sampled" in line for line in lines) < 2, "one text"
        [work] = tmp_path.glob("gptq-w4a16-*")
        lines.clear()
        made = calibrate_layers(plan, tiny_glm, work, Text((), options.seed), report=lines.append)
        assert not any("layer" in line for line in lines), "nothing is done twice"
        quantize(plan.model_copy(update={"calibrated": made}), tiny_glm, tmp_path / "made", calibrated=work)
        config = json.loads((tmp_path / "made" / "config.json").read_text())["quantization_config"]
        stored = [item for path in sorted((tmp_path / "made").glob("*.safetensors")) for item in load_file(path).items()]
        served = dict(Dequantizer(config, torch.float32)(stored))
        with SourceReader(checkpoint) as reader:
            free, rounder = Rounder(layout, reader), Rounder(layout, reader, calibrated)
            assert free.calibration_sha256 is None and rounder.calibration_sha256 == calibrated.sha256
            for key in (Key(0, "attention"), Key(1, "routed_expert")):
                for scheme in layout.plans:
                    for (name, plain, back), (_, _, nearest) in zip(
                        rounder.weights(key, scheme), free.weights(key, scheme), strict=True
                    ):
                        assert not torch.equal(back, plain)
                        assert torch.equal(back, nearest) == (scheme == "nvfp4a16"), (name, scheme)
                        assert scheme != "w4a16" or torch.equal(back, served[name].float()), name


@pytest.mark.parametrize("scheme", [one for one in SCHEMES if input_args(one) is not None])
def test_activations_are_rounded_as_the_emulation_does(scheme: str) -> None:
    """Which its own tests hold against compressed-tensors."""
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((7, 256)).astype(np.float32)) * 3
    x[0] = 0
    args = input_args(scheme)
    rounded = round_inputs(x, scheme)
    assert torch.equal(rounded, fake_quantize(x, args, None, torch.ones(1)))
    assert not torch.equal(rounded, x) and torch.equal(rounded[0], torch.zeros(256))


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
