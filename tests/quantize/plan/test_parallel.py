"""What tensor parallelism cannot split, at the true widths of the shipped models, as vLLM 0.32's loaders say."""

from __future__ import annotations

from pathlib import Path

import hollow
import pytest
from hollow import write_hollow

from assay.errors import PlanError
from assay.recipes.load import load_recipe
from assay.recipes.precision import PrecisionRecipe
from assay.recipes.profile import ProfileRecipe
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.plan.fits import Misfit, Ranks, check_parallel, misfits, rank_bytes, ranks_of, uneven_heads
from assay_quantize.plan.planner import make_plan
from assay_quantize.plan.stored import StoredModel, stored_by, stored_in


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("hollow")
    for model in hollow.MODELS:
        hollow.hollow_model(root / model, model, experts=2)
    return root


def planned(folders: Path, model: str, precision: str) -> StoredModel:
    recipe = load_recipe(PrecisionRecipe, precision)
    return stored_by(make_plan(open_checkpoint(folders / model), recipe, model=model, family=None))


def released(tmp_path: Path, model: str) -> StoredModel:
    """The model's FP8 release in blocks of 128, as vLLM's own FP8 method loads it."""
    base, shapes_of = hollow.MODELS[model]
    experts = "num_experts" if "num_experts" in base else "n_routed_experts"
    config = {**base, "num_hidden_layers": 4, experts: 2}
    shapes, dtypes = hollow.fp8_blocks(shapes_of(config))
    folder = write_hollow(tmp_path, {**config, "quantization_config": hollow.FP8_BLOCKS}, shapes, shards=1, dtypes=dtypes)
    return stored_in(open_checkpoint(folder), str(config["model_type"]), "the reference")


Widths = dict[str, tuple[float, int]]


def widths(model: StoredModel, ranks: Ranks) -> Widths:
    """Role and projection -> (what a rank holds, what it must be a multiple of)."""
    found = misfits(model, ranks)
    assert all(isinstance(one, Misfit) for one in found), found
    return {one.short: (one.width, one.unit) for one in found if isinstance(one, Misfit)}


@pytest.mark.parametrize(
    ("model", "precision", "ranks", "expected"),
    [
        ("glm-5", "w4a16", 8, {}),
        ("glm-5", "w4a16-asym", 8, {}),
        ("glm-5", "w4a16-nomtp", 8, {}),
        ("glm-5.2", "w4a16", 8, {}),
        ("glm-4.7", "w4a16", 8, {"shared_expert down_proj": (192, 128), "routed_expert down_proj": (192, 128)}),
        ("glm-4.7", "w4a16", 4, {}),
        ("glm-4.7", "w4a16-g32", 8, {}),
        ("glm-4.5-air", "w4a16-experts", 4, {"shared_expert down_proj": (352, 128), "routed_expert down_proj": (352, 128)}),
        ("glm-4.5-air", "w4a16-experts", 8, {"shared_expert down_proj": (176, 128), "routed_expert down_proj": (176, 128)}),
        ("glm-4.5-air", "w4a16-g32", 4, {"dense_mlp down_proj": (2736, 32)}),
        ("glm-4.5-air", "nvfp4a16", 8, {"dense_mlp down_proj": (1368, 16)}),
        ("deepseek-v3", "w4a16", 8, {}),
        ("deepseek-v3", "w4a16-mtp", 8, {}),
        ("kimi-k2", "w4a16", 8, {}),
        ("deepseek-v3.2", "fp8", 8, {}),
        ("kimi-k2-thinking", "w4a16-g32", 8, {}),
        ("glm-4.7-flash", "fp8", 2, {}),
        ("glm-4.7-flash", "fp8", 4, {"attention kv_b_proj": (2240, 128)}),
        ("glm-4.7-flash", "w4a16", 4, {}),
        ("qwen3-30b-a3b", "w4a16", 4, {"routed_expert down_proj": (192, 128)}),
        ("qwen3-30b-a3b", "w4a16", 8, {"routed_expert down_proj": (96, 128)}),
        ("qwen3-30b-a3b", "w4a16-g32", 4, {}),
        ("qwen3-30b-a3b", "w4a16-channel", 8, {}),
        ("qwen3-next-80b-a3b", "w4a16", 4, {}),
        ("qwen3-next-80b-a3b", "w4a16", 8, {"shared_expert down_proj": (64, 128), "routed_expert down_proj": (64, 128)}),
        ("qwen3-next-80b-a3b", "w4a16-g32", 8, {}),
    ],
)
def test_what_a_precision_cannot_share(folders: Path, model: str, precision: str, ranks: int, expected: Widths) -> None:
    assert widths(planned(folders, model, precision), Ranks(ranks)) == expected


def test_blocks_that_do_not_end_with_a_rank(folders: Path) -> None:
    fp8 = planned(folders, "qwen3-30b-a3b", "fp8")
    assert widths(fp8, Ranks(4)) == {
        "routed_expert down_proj": (192, 128),
        "routed_expert gate_proj": (192, 128),
        "routed_expert up_proj": (192, 128),
    }


@pytest.mark.parametrize(
    ("model", "ranks", "expected"),
    [
        ("deepseek-v3", 8, {}),
        ("qwen3-30b-a3b", 4, {}),  # vLLM refines the experts' blocks to 64, and to 32 on 8 ranks
        ("qwen3-30b-a3b", 8, {}),
        ("qwen3-next-80b-a3b", 4, {}),
        ("qwen3-next-80b-a3b", 8, {"shared_expert down_proj": (64, 128)}),
    ],
)
def test_what_a_release_cannot_share(tmp_path: Path, model: str, ranks: int, expected: Widths) -> None:
    assert widths(released(tmp_path, model), Ranks(ranks)) == expected


def test_expert_parallelism_leaves_the_shared_expert(folders: Path) -> None:
    ranks = Ranks(8, expert_parallel=True)
    assert widths(planned(folders, "glm-4.7", "w4a16"), ranks) == {"shared_expert down_proj": (192, 128)}
    assert widths(planned(folders, "qwen3-30b-a3b", "w4a16"), ranks) == {}


def test_heads_are_repeated_beyond_their_number(folders: Path) -> None:
    """4 key-value heads of 128 rows on 8 ranks: each rank has a whole one, and FP8 blocks end with it."""
    fp8 = planned(folders, "qwen3-30b-a3b", "fp8")
    assert not [one for one in misfits(fp8, Ranks(8)) if one.short.startswith("attention ")]


@pytest.mark.parametrize(
    ("model", "ranks", "expected"),
    [
        ("glm-4.7-flash", 4, []),
        ("glm-4.7-flash", 8, ["20 attention heads (num_attention_heads) cannot be shared by 8 ranks"]),
        ("qwen3-30b-a3b", 8, []),  # 4 key-value heads, repeated
        ("qwen3-30b-a3b", 16, []),
        ("qwen3-30b-a3b", 6, ["32 attention heads (num_attention_heads) cannot be shared by 6 ranks",
                              "4 key-value heads (num_key_value_heads) cannot be shared by 6 ranks"]),
        ("glm-4.5-air", 12, ["8 key-value heads (num_key_value_heads) cannot be shared by 12 ranks"]),
        ("qwen3-next-80b-a3b", 16, []),
        ("qwen3-next-80b-a3b", 32, ["16 attention heads (num_attention_heads) cannot be shared by 32 ranks",
                                    "16 key heads of linear attention (linear_num_key_heads) cannot be shared by 32 ranks"]),
    ],
)  # fmt: skip
def test_heads_that_ranks_cannot_share(model: str, ranks: int, expected: list[str]) -> None:
    """Of latent attention (GLM-4.7-Flash) only one kind counts."""
    assert [one.sentence for one in uneven_heads(hollow.MODELS[model][0], Ranks(ranks))] == expected


def test_no_precision_helps_where_heads_do_not_fit(folders: Path) -> None:
    """Blocks of FP8 do not fit either; one scale per row would mend only these."""
    with pytest.raises(PlanError) as error:
        check_parallel(planned(folders, "glm-4.7-flash", "fp8"), load_recipe(ProfileRecipe, "8xh200"))
    assert str(error.value) == (
        "precision fp8 cannot be served on profile 8xh200: 20 attention heads (num_attention_heads) cannot be shared by 8 "
        "ranks; not divisible either: attention kv_b_proj, shared_expert down_proj, shared_expert gate_proj and 4 more; what "
        "fits: a profile with tensor-parallel-size 2"
    )


def test_plan_and_headers_give_one_answer(folders: Path, tmp_path: Path) -> None:
    """A checkpoint is judged by its headers as it was by its plan."""
    plan = make_plan(open_checkpoint(folders / "glm-4.7"), load_recipe(PrecisionRecipe, "w4a16"), model="m", family=None)
    outputs = [output for tensor in plan.tensors for output in tensor.outputs]
    made = write_hollow(
        tmp_path, plan.config, iter([(one.name, one.shape) for one in outputs]), shards=1,
        dtypes={one.name: one.dtype for one in outputs},
    )  # fmt: skip
    read = stored_in(open_checkpoint(made, allow_quantized=True), plan.family, "precision w4a16")
    assert sorted(read.weights) == sorted(stored_by(plan).weights)


def test_the_error_names_width_group_and_what_fits(folders: Path) -> None:
    profile = load_recipe(ProfileRecipe, "8xh200")
    check_parallel(planned(folders, "glm-5", "w4a16"), profile)
    with pytest.raises(PlanError) as error:
        check_parallel(planned(folders, "glm-4.7", "w4a16"), profile)
    assert str(error.value) == (
        "precision w4a16 cannot be served on profile 8xh200: shared_expert down_proj: 192 inputs on each of 8 ranks are not a "
        "multiple of 128, the group that shares a scale (model.layers.3.mlp.shared_experts.down_proj.weight); not "
        "divisible either: routed_expert down_proj; what "
        "fits: a group size of 64 (w4a16-g64) or 32 (w4a16-g32) or 16 (nvfp4a16), "
        "or a profile with tensor-parallel-size 4"
    )
    with pytest.raises(PlanError, match=r"what fits: one scale per row \(w4a16-channel\), or a profile with"):
        check_parallel(planned(folders, "glm-4.5-air", "w4a16-g32"), profile)


def test_replicas_share_the_experts(folders: Path) -> None:
    """GLM-4.7 on twice four GPUs: 384 columns of an expert on four, 192 on eight, and the shared expert as on four."""
    model, h200 = planned(folders, "glm-4.7", "w4a16"), load_recipe(ProfileRecipe, "4xh200")
    replicas = h200.model_copy(update={"vllm": {**h200.vllm, "data_parallel_size": 2}})
    assert (ranks_of(h200), ranks_of(replicas)) == (Ranks(4), Ranks(4, data_parallel=2))
    assert misfits(model, Ranks(4)) == [] == misfits(model, Ranks(4, expert_parallel=True, data_parallel=2))
    (found,) = misfits(model, ranks_of(replicas))
    assert isinstance(found, Misfit)
    assert (found.short, found.width, found.unit, found.ranks) == ("routed_expert down_proj", 192, 128, 8)
    experts = sum(one.num_bytes for one in model.weights if ".mlp.experts." in one.name)
    saved = rank_bytes(model, Ranks(4)) - rank_bytes(model, ranks_of(replicas))
    assert saved == pytest.approx(experts / 8, rel=1e-3)
