"""Sources at the edge of what numbers can be: what was made of them is right, and `verify` must say so."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import make_tiny_glm4_moe

from assay.errors import CheckpointError
from assay.recipes.load import load_recipe
from assay.recipes.precision import PrecisionRecipe
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.engine.quantize import quantize
from assay_quantize.plan.planner import make_plan
from assay_quantize.verify.verify import verify

PRECISIONS = ("w4a16", "fp8", "fp8-channel", "nvfp4", "nvfp4a16", "mxfp4", "mxfp8", "w8a8")
SMALLEST_NORMAL = 2.0**-126


def outlier(weight: torch.Tensor) -> None:
    weight.mul_(1e-3)
    weight[3, 5] = 3e4


EDGES: dict[str, Callable[[torch.Tensor], object]] = {
    "denormal": lambda weight: weight.copy_((torch.rand_like(weight.float()) - 0.5).mul_(SMALLEST_NORMAL)),
    "smallest": lambda weight: weight.fill_(2.0**-133),
    "one outlier": outlier,
    "one weight": lambda weight: weight.zero_()[0, 0].fill_(1.0),
    "one denormal": lambda weight: weight.zero_()[0, 0].fill_(2.0**-133),
    "huge": lambda weight: weight.copy_((torch.rand_like(weight.float()) - 0.5).mul_(3e38)),
    "negative zero": lambda weight: weight.fill_(-0.0),
    "a row of zeros": lambda weight: weight[1].zero_(),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each edge in the experts, shared expert and attention of a layer of its own."""
    folder = make_tiny_glm4_moe(
        tmp_path_factory.mktemp("edges") / "source",
        num_layers=len(EDGES) + 1,
        num_experts=2,
        hidden=128,
        dense_intermediate=128,
    )
    torch.manual_seed(0)
    for shard in folder.glob("*.safetensors"):
        tensors = load_file(shard)
        for number, change in enumerate(EDGES.values(), start=1):
            for name, weight in tensors.items():
                if name.startswith(f"model.layers.{number}.") and weight.ndim == 2 and ("_proj" in name):
                    change(weight)
        save_file(tensors, shard, {"format": "pt"})
    return folder


@pytest.mark.parametrize("precision", PRECISIONS)
def test_what_was_made_passes(precision: str, source: Path, tmp_path: Path) -> None:
    plan = make_plan(open_checkpoint(source), load_recipe(PrecisionRecipe, precision), model="tiny", family=None)
    quantize(plan, source, tmp_path / "out")
    for options in ({"source": source}, {}, {"source": source, "sample": 0.1}):
        result = verify(tmp_path / "out", **options)  # type: ignore[arg-type]
        assert [(damage.check, damage.where, damage.what) for damage in result.damages] == []


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_a_config_holds_numbers_of_json(number: str, source: Path, tmp_path: Path) -> None:
    """Python's `json` writes and reads NaN. Plan and manifest could not hold it, and NaN is not equal to itself."""
    folder = shutil.copytree(source, tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    text = json.dumps({**config, "rope_parameters": {"factor": [0, 7]}}).replace("[0, 7]", f"[0, {number}]")
    (folder / "config.json").write_text(text)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    said = {"1e999": "inf", "NaN": "nan", "Infinity": "inf", "-Infinity": "-inf"}[number]
    assert str(caught.value) == (
        f"{folder}/config.json: 'rope_parameters.factor.1' is {said}, which is no number of JSON; write a number or null there"
    )
