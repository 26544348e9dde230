"""recipes/shapes: what the files say is what `hollow.py` has, and sums over two experts are sums over all."""

from __future__ import annotations

from dataclasses import replace

import models_page
import pytest
import shapes_written

from assay.recipes.load import load_recipe
from assay.recipes.precision import PrecisionRecipe
from assay.recipes.profile import ProfileRecipe
from assay_quantize.plan.fits import Fit, fit_on, kv_read_bytes
from assay_quantize.plan.planner import make_plan
from assay_quantize.plan.shipped import has_shapes, shapes_dir, shipped_model
from assay_quantize.plan.stored import StoredModel, stored_by


def test_every_model_for_gpus_ships() -> None:
    assert sorted(path.stem for path in shapes_dir().glob("*.json")) == models_page.models()
    assert has_shapes("glm-5.2") and not has_shapes("tiny-glm")


@pytest.mark.parametrize("model", models_page.models())
def test_files_are_up_to_date(model: str) -> None:
    assert (shapes_dir() / f"{model}.json").read_text(encoding="utf-8") == shapes_written.text_of(model), (
        "run tests/support/models/shapes_written.py"
    )


@pytest.mark.parametrize("model", models_page.models())
def test_memory_is_that_of_the_models_page(model: str) -> None:
    """The page plans a hollow checkpoint on disk; a router there has two rows, here one for every expert."""
    shipped, page = shipped_model(model), models_page.stored_of(model)
    recipe = page.recipe
    profile = load_recipe(ProfileRecipe, recipe.profiles[0])
    precision = recipe.on_profile(profile.name).precisions[0]
    plan = make_plan(shipped.checkpoint, load_recipe(PrecisionRecipe, precision), model=model, family=recipe.family)
    ours = fit_on(shipped.whole(stored_by(plan)), profile, recipe.serving)
    theirs = fit_on(page.of(precision), profile, recipe.serving)
    assert ours.weight_bytes == pytest.approx(theirs.weight_bytes, rel=0.01)
    assert replace(ours, weight_bytes=0) == replace(theirs, weight_bytes=0)


def glm52() -> tuple[StoredModel, Fit]:
    shipped = shipped_model("glm-5.2")
    plan = make_plan(shipped.checkpoint, load_recipe(PrecisionRecipe, "fp8"), model="glm-5.2", family=None)
    stored = shipped.whole(stored_by(plan)).served(False)
    serving = load_recipe(models_page.ModelRecipe, "glm-5.2").serving.model_copy(update={"num_speculative_tokens": None})
    return stored, fit_on(stored, load_recipe(ProfileRecipe, "8xh200"), serving)


def test_all_weights_of_glm52_are_counted() -> None:
    """743 billion weights, in BF16 and with its MTP block 1.5 TB."""
    shipped = shipped_model("glm-5.2")
    plan = make_plan(shipped.checkpoint, load_recipe(PrecisionRecipe, "fp8"), model="glm-5.2", family=None)
    stored = shipped.whole(stored_by(plan))
    assert sum(one.num_bytes for one in stored.weights) == pytest.approx(765.6e9, rel=1e-3)
    assert stored.config["n_routed_experts"] == 256 and stored.config["max_position_embeddings"] == 1_048_576


def test_sparse_attention_reads_what_its_indexer_chose() -> None:
    """78 layers keep 656 bytes a token, of which 2,048 rows are read; 21 indexers keep 132, all of which are."""
    stored, fit = glm52()
    assert fit.kv_bytes_per_token == 78 * 656 + 21 * 132
    assert kv_read_bytes(stored, fit, 1000) == 1000 * (78 * 656 + 21 * 132)
    assert kv_read_bytes(stored, fit, 100_000) == 2048 * 78 * 656 + 100_000 * 21 * 132


def test_grouped_attention_reads_its_whole_cache() -> None:
    """46 layers of 8 heads of 128, keys and values, BF16; one head for each of eight ranks."""
    shipped = shipped_model("glm-4.5-air")
    recipe = load_recipe(PrecisionRecipe, "fp8-channel")
    stored = shipped.whole(stored_by(make_plan(shipped.checkpoint, recipe, model="m", family=None))).served(False)
    serving = models_page.stored_of("glm-4.5-air").recipe.serving.model_copy(update={"num_speculative_tokens": None})
    fit = fit_on(stored, load_recipe(ProfileRecipe, "4xh200"), serving)
    assert fit.kv_dtype == "fp8"
    assert kv_read_bytes(stored, fit, 1000) == 1000 * 46 * 2 * 2 * 128
