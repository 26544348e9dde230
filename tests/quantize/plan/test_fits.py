"""Memory of one GPU, against figures that were worked out by hand from vLLM 0.32 and the published configs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import hollow
import hollow_moe
import pytest

from assay.errors import PlanError
from assay.recipes.load import load_recipe
from assay.recipes.model import ModelRecipe, Serving
from assay.recipes.precision import PrecisionRecipe
from assay.recipes.profile import ProfileRecipe
from assay_evaluate.roofline.weights import step_weights
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.plan.fits import (
    WORKSPACE_BYTES,
    Ranks,
    Window,
    check_served,
    fit_on,
    fits,
    kv_bytes_per_token,
    rank_bytes,
    windows,
)
from assay_quantize.plan.planner import make_plan
from assay_quantize.plan.stored import StoredModel, StoredWeight, stored_by, stored_in

GIB = 2**30


def released(folder: Path, model: str) -> StoredModel:
    made = open_checkpoint(hollow.hollow_shapes(folder, model, release=True))
    return hollow.at_true_size(stored_in(made, str(made.config["model_type"]), "the reference"), model)


def planned(folder: Path, model: str, precision: str) -> StoredModel:
    recipe = load_recipe(PrecisionRecipe, precision)
    plan = make_plan(open_checkpoint(hollow.hollow_shapes(folder, model)), recipe, model=model, family=None)
    return hollow.at_true_size(stored_by(plan), model)


@pytest.fixture(scope="module")
def glm52(tmp_path_factory: pytest.TempPathFactory) -> StoredModel:
    return released(tmp_path_factory.mktemp("glm52"), "glm-5.2")


def test_the_release_has_its_published_size(glm52: StoredModel) -> None:
    assert sum(weight.num_bytes for weight in glm52.weights) == pytest.approx(756e9, rel=0.001)


def test_kv_cache_of_sparse_latent_attention(glm52: StoredModel) -> None:
    """vLLM's fp8_ds_mla: 512 FP8 + 4 F32 scales + 64 BF16 = 656 bytes in 79 layers; 22 indexers of 128 FP8 + F32."""
    assert kv_bytes_per_token(glm52, 1, 8) == 79 * 656 + 22 * 132 == 54_728
    assert kv_bytes_per_token(glm52, 1, 4) == 54_728  # every rank keeps all of it
    assert kv_bytes_per_token(glm52, 2, 8) == 79 * 576 * 2 + 22 * 132
    drafting = Serving(num_speculative_tokens=1)
    on = {name: fit_on(glm52, load_recipe(ProfileRecipe, name), drafting).kv_bytes_per_token for name in SPARSE}
    assert on == SPARSE


SPARSE = {"8xh200": 79 * 656 + 22 * 132, "8xb200": 79 * 576 + 22 * 132, "8xrtx-pro-6000": 79 * 656 + 22 * 132}
"""Profile -> bytes per token: B200's kernel reads plain FP8, RTX PRO 6000's packs even where the dtype is `auto`."""


def test_without_speculation_the_mtp_block_is_not_served(glm52: StoredModel) -> None:
    profile = load_recipe(ProfileRecipe, "8xh200")
    drafting, alone = (fit_on(glm52, profile, Serving(num_speculative_tokens=tokens)) for tokens in (1, None))
    block = tuple(weight for weight in glm52.weights if weight.name.startswith("model.layers.78."))
    of_block = rank_bytes(replace(glm52, weights=block), Ranks(8))
    assert (drafting.weight_bytes - alone.weight_bytes, round(of_block / GIB, 1)) == (of_block, 1.3)
    assert drafting.kv_bytes_per_token - alone.kv_bytes_per_token == 656 + 132
    asked = profile.model_copy(update={"vllm": {**profile.vllm, "speculative_config": {"method": "mtp"}}})
    assert fit_on(glm52, asked, Serving()) == drafting


def test_experts_in_one_tensor_are_shared_by_the_ranks(tmp_path: Path) -> None:
    """As a source or a release stores them: what is served, and not planned, is read as it is."""
    path = hollow.hollow_model(tmp_path, "step-3.5-flash")
    stacked = stored_in(open_checkpoint(path, allow_quantized=True), "step3p5", "source")
    one_by_one = stored_in(open_checkpoint(path), "step3p5", "source")
    assert any(len(weight.shape) == 3 for weight in stacked.weights) and len(stacked.weights) < len(one_by_one.weights)
    assert rank_bytes(stacked, Ranks(4)) == rank_bytes(one_by_one, Ranks(4))


def test_how_much_of_a_gpu_vllm_takes_if_nobody_says() -> None:
    profile = load_recipe(ProfileRecipe, "8xh200")
    silent = profile.model_copy(update={"vllm": {}})
    assert (profile.gpu_memory_utilization, silent.gpu_memory_utilization) == (0.9, 0.92)
    assert silent.usable_bytes == 150_000_000_000 * 92 // 100


def test_a_million_tokens_do_not_fit_beside_the_reference(glm52: StoredModel) -> None:
    """GLM-5.2 says 1,048,576: 53.4 GiB of KV cache a GPU, and 8 H200 have less than 38.4 GiB left."""
    fit = fit_on(glm52, load_recipe(ProfileRecipe, "8xh200"), Serving(num_speculative_tokens=1))
    assert 1_048_576 * fit.kv_bytes_per_token / GIB == pytest.approx(53.44, abs=0.01)
    left = (143_771 * 2**20 * 0.9 - sum(weight.num_bytes for weight in glm52.weights) / 8) / GIB
    assert left == pytest.approx(38.4, abs=0.1)
    assert fit.free_bytes / GIB < left - WORKSPACE_BYTES / GIB
    assert (fit.holds(1_048_576), fit.holds(202_752)) == (False, True)


def test_a_context_without_room_is_refused_before_anything_is_served(glm52: StoredModel) -> None:
    profile, drafting = load_recipe(ProfileRecipe, "8xh200"), Serving(num_speculative_tokens=1)
    long = replace(glm52, config={**glm52.config, "max_position_embeddings": 1_048_576})
    with pytest.raises(PlanError) as error:
        check_served(long, profile, drafting)
    assert str(error.value) == (
        "the reference cannot be served on profile 8xh200: each GPU would hold 89.3 GiB of weights and 53.4 GiB of KV cache "
        "for max-model-len 1,048,576, and 125.7 GiB are usable; set serving.max_model_len to less than 715,222"
    )
    check_served(long, profile, load_recipe(ModelRecipe, "glm-5.2").serving)


def test_where_glm5_fits(glm52: StoredModel, tmp_path: Path) -> None:
    """The reference on eight H200 or B200; the candidate on half of that, and on RTX PRO 6000."""
    reference, candidate = fits(glm52), fits(planned(tmp_path, "glm-5.2", "w4a16"))
    assert [fit.profile for fit in reference] == ["4xrtx-pro-6000", "4xh200", "4xb200", "8xrtx-pro-6000", "8xh200", "8xb200"]
    assert [fit.profile for fit in reference if fit.holds(202_752)] == ["8xh200", "8xb200"]
    assert [fit.profile for fit in candidate if fit.holds(202_752)] == [
        "4xh200",
        "4xb200",
        "8xrtx-pro-6000",
        "8xh200",
        "8xb200",
    ]


def test_kv_cache_of_grouped_query_attention(tmp_path: Path) -> None:
    made = open_checkpoint(hollow.hollow_model(tmp_path, "qwen3-30b-a3b"))
    model = stored_in(made, "qwen3_moe", "the source")
    assert kv_bytes_per_token(model, 2, 4) == 4 * 2 * 1 * 128 * 2
    assert kv_bytes_per_token(model, 1, 8) == 4 * 2 * 1 * 128 * 1  # 4 heads on 8 ranks: each is held twice


def test_kv_cache_where_layers_have_other_heads_and_values_are_narrower(tmp_path: Path) -> None:
    """One full layer with 4 key-value heads; three sliding ones and three MTP layers with 8; keys of 192, values of 128.

    Of the sliding ones 128 tokens are kept, those of two steps of 8,192, and a block.
    """
    model = stored_in(open_checkpoint(hollow.hollow_model(tmp_path, "mimo-v2-flash")), "mimo_v2_flash", "the source")
    assert kv_bytes_per_token(model, 2, 1) == 4 * (192 + 128) * 2
    assert kv_bytes_per_token(model, 1, 8) == 192 + 128
    assert windows(model, 2, 1, step_tokens=8192) == (Window(128 + 16_384 + 64, 6 * 8 * (192 + 128) * 2),)
    assert windows(model, 1, 8, step_tokens=8192) == (Window(128 + 16_384 + 64, 6 * (192 + 128)),)
    rtx = load_recipe(ProfileRecipe, "4xrtx-pro-6000")
    without = fit_on(model, rtx, Serving())
    assert without.kv_bytes(100) == 100 * (1 + 3 * 2) * (192 + 128) * 2
    assert without.kv_bytes(200_000) == (200_000 + 16_576 * 3 * 2) * (192 + 128) * 2
    assert without.tokens_in(without.kv_bytes(200_000)) == 200_000


def test_kv_cache_of_compressed_attention(tmp_path: Path) -> None:
    """DeepSeek-V4-Flash: 584 bytes for 4 tokens in 21 layers, whose indexers keep 132, and for 128 tokens in 20 layers."""
    model = stored_in(open_checkpoint(hollow.hollow_shapes(tmp_path, "deepseek-v4-flash")), "deepseek_v4", "the source")
    assert kv_bytes_per_token(model, 1, 8) == kv_bytes_per_token(model, 1, 1) == 3851
    assert 21 * (584 + 132) / 4 + 20 * 584 / 128 == 3850.25
    kept = windows(model, 1, 8, step_tokens=8192)
    assert kept[0] == Window(128 + 16_448, 44 * 584), "43 layers and the draft"
    found = Counter(kept[1:])
    assert found == {Window(8 + 16_448, 8192): 21, Window(8 + 16_448, 2048): 21, Window(128 + 16_448, 4096): 20}


def test_mamba_keeps_nothing_per_token(tmp_path: Path) -> None:
    model = stored_in(open_checkpoint(hollow.hollow_model(tmp_path, "nemotron-3-nano")), "nemotron_h", "the source")
    assert kv_bytes_per_token(model, 2, 1) == 2 * 2 * 128 * 2  # one of four layers attends
    assert kv_bytes_per_token(model, 2, 8) == 2 * 1 * 128 * 2


def test_linear_attention_keeps_nothing_per_token(tmp_path: Path) -> None:
    made = open_checkpoint(hollow.hollow_model(tmp_path, "qwen3-next-80b-a3b"))
    assert (
        kv_bytes_per_token(stored_in(made, "qwen3_next", "the source"), 2, 1) == 2 * 2 * 2 * 256 * 2
    )  # one layer of 4, and MTP


def test_what_one_rank_holds() -> None:
    config = {"num_hidden_layers": 1, "head_dim": 128, "hidden_size": 512, "num_attention_heads": 4}
    attention = "model.layers.0.self_attn."
    weights = {
        f"{attention}q_proj.weight": (512, 512), f"{attention}k_proj.weight": (256, 512),
        f"{attention}o_proj.weight": (512, 512),
        "model.layers.0.mlp.gate.weight": (8, 512), "model.layers.0.mlp.experts.0.down_proj.weight": (512, 128),
        "model.norm.weight": (512,), "lm_head.weight": (1000, 512),
    }  # fmt: skip
    model = StoredModel(
        "m", "glm4_moe", config, tuple(StoredWeight(name, shape, 2 * shape[0] * (shape[1] if shape[1:] else 1))
                                       for name, shape in weights.items()),
    )  # fmt: skip
    rank = {"q": 512 * 512 // 4, "k": 128 * 512, "o": 512 * 512 // 4, "gate": 8 * 512, "down": 512 * 128 // 4, "norm": 512,
            "head": 1000 * 512 // 4}  # fmt: skip
    assert rank_bytes(model, Ranks(4)) == 2 * sum(rank.values())


@pytest.mark.parametrize("precision", [None, "w4a16-g32"])
def test_a_scale_that_is_no_weights_is_a_tensor_of_its_own(tmp_path: Path, precision: str | None) -> None:
    """Gemma 4's `router.scale` [H] is multiplied with; a step reads it with the other weights."""
    config = hollow_moe.cut("gemma4")
    made = open_checkpoint(hollow_moe.write(tmp_path / "model", "gemma4", config))
    model = stored_in(made, "gemma4", "the source")
    if precision is not None:
        model = stored_by(make_plan(made, load_recipe(PrecisionRecipe, precision), model="x", family=None))
    held = {weight.name: weight.num_bytes for weight in model.weights}
    layer = "model.language_model.layers.0.router"
    assert held[f"{layer}.scale"] == 2 * config["text_config"]["hidden_size"] and f"{layer}.weight" not in held
    weights = [(weight.name, weight.shape, weight.num_bytes) for weight in model.weights]
    target = step_weights("gemma4", config, weights, []).target
    assert target.shared_bytes + target.expert_bytes < sum(held.values())
