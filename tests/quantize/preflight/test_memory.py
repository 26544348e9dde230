"""Memory and tensor parallelism, as one line each, from true shapes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import hollow
import pytest

from assay.errors import PlanError
from assay.recipes.load import load_recipe
from assay.recipes.model import ModelRecipe, Serving
from assay.recipes.precision import PrecisionRecipe
from assay.recipes.profile import ProfileRecipe
from assay.records.preflight.report import Check
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.plan.fits import check_served
from assay_quantize.plan.planner import make_plan
from assay_quantize.plan.stored import StoredModel, stored_by, stored_in
from assay_quantize.preflight.memory import check_memory, check_split, problem_on

GLM5 = load_recipe(ModelRecipe, "glm-5").serving


def profile(name: str) -> ProfileRecipe:
    return load_recipe(ProfileRecipe, name)


@pytest.fixture(scope="module")
def glm5(tmp_path_factory: pytest.TempPathFactory) -> StoredModel:
    """W4A16, all layers; sums of all experts."""
    source = open_checkpoint(hollow.hollow_shapes(tmp_path_factory.mktemp("glm") / "source", "glm-5"))
    plan = make_plan(source, load_recipe(PrecisionRecipe, "w4a16"), model="m", family=None)
    return hollow.at_true_size(stored_by(plan), "glm-5")


def test_it_fits(glm5: StoredModel) -> None:
    check = check_memory("w4a16", glm5, profile("8xh200"), GLM5, [])
    assert check is not None and (check.outcome, check.remedy) == ("PASS", None)
    assert check.detail == (
        "69.1 GiB needed, 125.7 usable on each of 8 GPUs: weights 49.3, KV cache for max-model-len 202,752 11.8, allowed for "
        "the rest 8; 1,180,139 tokens of KV cache fit"
    )


def test_a_context_too_long_for_the_cache(glm5: StoredModel) -> None:
    """GLM-5.2's own: a million tokens."""
    long = StoredModel(glm5.what, glm5.family, {**glm5.config, "max_position_embeddings": 1_500_000}, glm5.weights)
    check = check_memory("w4a16", long, profile("8xh200"), GLM5, [profile("8xb200"), profile("4xh200")])
    assert check is not None and check.outcome == "FAIL"
    assert check.detail == (
        "144.3 GiB needed, 125.7 usable on each of 8 GPUs: weights 49.3, KV cache for max-model-len 1,500,000 87.0, allowed "
        "for the rest 8"
    )
    assert check.remedy == (
        "set `serving: {max_model_len: 1179648}` in the model's recipe (`max-model-len` in the profile wins), or take a "
        "profile that holds it: --profile 8xb200 (not 4xh200: 191.4 GiB needed, 125.7 usable)"
    )


def test_it_fits_only_if_the_rest_is_small(glm5: StoredModel) -> None:
    """The allowance was not measured, so nobody can tell."""
    tight = StoredModel(glm5.what, glm5.family, {**glm5.config, "max_position_embeddings": 1_250_000}, glm5.weights)
    check = check_memory("w4a16", tight, profile("8xh200"), GLM5, [])
    assert check is not None and check.outcome == "UNKNOWN"
    assert check.detail == (
        "129.8 GiB needed, 125.7 usable on each of 8 GPUs: weights 49.3, KV cache for max-model-len 1,250,000 72.5, allowed "
        "for the rest 8; it fits if the rest takes no more than 3.9 GiB"
    )


def test_weights_too_large(glm5: StoredModel) -> None:
    check = check_memory("w4a16", glm5, profile("4xrtx-pro-6000"), GLM5, [profile("8xb200")])
    assert check is not None and check.outcome == "FAIL"
    assert check.remedy == "take a profile that holds it: --profile 8xb200"
    assert problem_on(glm5, profile("4xrtx-pro-6000"), GLM5) == "116.2 GiB needed, 84.7 usable"


def test_nothing_is_said_where_the_memory_is_not_known(glm5: StoredModel) -> None:
    assert check_memory("w4a16", glm5, profile("cpu-emulated"), GLM5, []) is None


def test_groups_that_no_rank_can_hold(tmp_path: Path) -> None:
    source = open_checkpoint(hollow.hollow_model(tmp_path / "source", "glm-4.7"))
    plan = make_plan(source, load_recipe(PrecisionRecipe, "w4a16"), model="m", family=None)
    result = check_split("w4a16", stored_by(plan), profile("8xh200"), GLM5)
    assert result == Check(
        check="split", subject="w4a16", outcome="FAIL",
        detail="shared_expert down_proj: 192 inputs on each of 8 ranks are not a multiple of 128, the group that shares a "
        "scale (model.layers.3.mlp.shared_experts.down_proj.weight); not divisible either: "
        "routed_expert down_proj",
        remedy="what fits: a group size of 64 (w4a16-g64) or 32 (w4a16-g32) or 16 (nvfp4a16), or a profile with "
        "tensor-parallel-size 4",
    )  # fmt: skip
    result = check_split("w4a16", stored_by(plan), profile("4xh200"), GLM5)
    assert (result.outcome, result.remedy) == ("PASS", None)
    assert result.detail == "each of 4 ranks has whole heads, and groups and blocks that share a scale end where its part ends"


def test_heads_that_ranks_cannot_share(tmp_path: Path) -> None:
    """GLM-4.7-Flash has 20 heads; groups of 32 would fit eight ranks."""
    source = open_checkpoint(hollow.hollow_model(tmp_path / "source", "glm-4.7-flash"))
    model = stored_by(make_plan(source, load_recipe(PrecisionRecipe, "w4a16-g32"), model="m", family=None))
    assert check_split("w4a16-g32", model, profile("8xh200"), GLM5) == Check(
        check="split", subject="w4a16-g32", outcome="FAIL",
        detail="20 attention heads (num_attention_heads) cannot be shared by 8 ranks",
        remedy="what fits: a profile with tensor-parallel-size 4",
    )  # fmt: skip
    assert check_split("w4a16-g32", model, profile("4xh200"), GLM5).outcome == "PASS"
    wrong = "20 attention heads (num_attention_heads) cannot be shared by 8 ranks"
    assert problem_on(model, profile("8xh200"), GLM5) == wrong
    with pytest.raises(PlanError, match="20 attention heads"):
        check_served(model, profile("8xh200"), GLM5)  # so the profile is not chosen


def test_layers_with_a_window_need_little(tmp_path: Path) -> None:
    """MiMo-V2-Flash: of 48 layers 39 keep 128 tokens. As if they kept 262,144, four RTX PRO 6000 would not hold it."""
    release = open_checkpoint(hollow.hollow_shapes(tmp_path, "mimo-v2-flash", release=True), allow_quantized=True)
    model = hollow.at_true_size(stored_in(release, "mimo_v2_flash", "reference"), "mimo-v2-flash")
    check = check_memory("reference", model, profile("4xrtx-pro-6000"), Serving(), [])
    assert check is not None and (check.outcome, check.detail) == (
        "PASS",
        "82.7 GiB needed, 84.7 usable on each of 4 GPUs: weights 72.6, KV cache for max-model-len 262,144 2.2, allowed for the "
        "rest 8; 618,915 tokens of KV cache fit",
    )


def test_a_draft_that_is_not_asked_for_does_not_count(tmp_path: Path) -> None:
    """An MTP block in groups that eight ranks cannot share, of a model that is served without it."""
    source = open_checkpoint(hollow.hollow_model(tmp_path / "source", "glm-5"))
    model = stored_by(make_plan(source, load_recipe(PrecisionRecipe, "w4a16"), model="m", family=None))
    weights = tuple(
        weight._replace(group=512) if weight.name.startswith("model.layers.4.") else weight for weight in model.weights
    )
    odd = replace(model, weights=weights)
    assert check_split("w4a16", odd, profile("8xh200"), GLM5).outcome == "FAIL"
    assert check_split("w4a16", odd, profile("8xh200"), Serving()).outcome == "PASS"
