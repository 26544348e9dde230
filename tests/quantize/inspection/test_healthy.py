"""Healthy checkpoints, of every family, every precision and several producers: nothing is found."""

from __future__ import annotations

from pathlib import Path

import hollow
import pytest
from published import (
    Chosen,
    awq,
    compressed,
    defects_of,
    fp8_blocks,
    gptq,
    is_expert,
    is_linear,
    modelopt_nvfp4,
    of_model,
    outside_mtp,
    publish,
)
from small_models import TINY, as_published, make_tiny_model

from assay.errors import AssayError
from assay.recipes.load import load_recipe, recipe_names
from assay.recipes.precision import PrecisionRecipe
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.engine.quantize import quantize
from assay_quantize.inspection.files import FolderFiles
from assay_quantize.inspection.inspect import inspect
from assay_quantize.plan.planner import make_plan

TINY_GLM = Path(__file__).parents[3] / "examples" / "tiny_glm" / "checkpoint"
FROM_CALIBRATION = {
    "fp8-kv", "fp8-static", "nvfp4-calibrated", "w4a16-autoround", "w4a16-awq", "w4a16-awq-g32", "w4a16-awq-gptq", "w4a16-gptq",
    "w4a16-gptq-g32", "w4a16-gptq-g64",
}  # fmt: skip
"""Precisions that are made from text; their layouts are those of others."""


@pytest.mark.parametrize("release", [False, True])
@pytest.mark.parametrize("model", sorted(hollow.MODELS))
def test_every_family_as_published(tmp_path: Path, model: str, release: bool) -> None:
    folder = hollow.hollow_model(tmp_path / "model", model, release=release)
    assert defects_of(folder) == {}


@pytest.mark.slow
@pytest.mark.parametrize("precision", sorted(set(recipe_names("precisions")) - FROM_CALIBRATION))
def test_every_precision_of_tiny_glm(tmp_path: Path, precision: str) -> None:
    recipe = load_recipe(PrecisionRecipe, precision)
    plan = make_plan(open_checkpoint(TINY_GLM), recipe, model="tiny-glm", family=None)
    quantize(plan, TINY_GLM, tmp_path / "made")
    assert defects_of(tmp_path / "made", source=TINY_GLM, weights=True) == {}


def test_which_precisions_need_text() -> None:
    for precision in FROM_CALIBRATION:
        plan = make_plan(open_checkpoint(TINY_GLM), load_recipe(PrecisionRecipe, precision), model="tiny-glm", family=None)
        with pytest.raises(AssayError, match="calibrat"):
            quantize(plan, TINY_GLM, TINY_GLM.parent / "never-made")


@pytest.mark.slow
@pytest.mark.parametrize("model", sorted(TINY))
def test_every_small_family_and_its_w4a16(tmp_path: Path, model: str) -> None:
    source = as_published(make_tiny_model(tmp_path / "plain", model), tmp_path / "source", model)
    assert defects_of(source, weights=True) == {}
    plan = make_plan(open_checkpoint(source), load_recipe(PrecisionRecipe, "w4a16"), model=model, family=None)
    quantize(plan, source, tmp_path / "made")
    assert defects_of(tmp_path / "made") == {}


GLM_IGNORE = ["lm_head", "re:.*self_attn.*", r"re:.*mlp\.gate$", r"re:.*layers\.4\..*", r"re:.*layers\.0\.mlp\..*"]


@pytest.mark.parametrize("producer", ["modelopt", "int4", "nvfp4", "nvfp4-w4a4", "gptq", "awq", "fp8"])
def test_every_producer(tmp_path: Path, producer: str) -> None:
    config, tensors = of_model("glm-4.5-air", dense=1)
    dense = "model.layers.0.mlp"  # 10,944 columns are no whole groups of 128
    linears = outside_mtp(lambda name: is_linear(name) and not name.startswith(f"{dense}."), 4)
    exclude = ["lm_head", "*.self_attn.*", "*.mlp.gate", "model.layers.4*", f"{dense}*"]
    substrings = ["self_attn", "layers.0.mlp", "shared_experts", "layers.4."]
    plain = [name.removesuffix(".weight") for name in tensors if is_linear(name) and not is_mlp(name, linears)]

    def is_quantized(name: str) -> bool:
        return is_mlp(name, linears)

    made = {
        "modelopt": lambda: modelopt_nvfp4(config, tensors, is_quantized, exclude),
        "int4": lambda: compressed(config, tensors, is_quantized, GLM_IGNORE, "int4"),
        "nvfp4": lambda: compressed(config, tensors, is_quantized, GLM_IGNORE, "nvfp4"),
        "nvfp4-w4a4": lambda: compressed(config, tensors, is_quantized, GLM_IGNORE, "nvfp4", inputs=True),
        "gptq": lambda: gptq(config, tensors, linears),
        "awq": lambda: awq(config, tensors, outside_mtp(is_expert, 4), substrings),
        "fp8": lambda: fp8_blocks(config, tensors, is_quantized, plain),
    }[producer]()
    assert defects_of(publish(tmp_path / "made", made)) == {}


def is_mlp(name: str, chosen: Chosen) -> bool:
    return ".mlp." in name and chosen(name)


@pytest.mark.full_count
@pytest.mark.parametrize("make", [hollow.hollow_glm5, hollow.hollow_glm5_fp8])
def test_glm_5_at_full_size(tmp_path: Path, make: object) -> None:
    result = inspect(FolderFiles(make(tmp_path / "glm5")))  # type: ignore[operator]
    assert [finding.defect for finding in result.findings] == ["tokenizer_absent"]
    assert result.facts.num_elements == 753_329_940_480
