"""Parts and their bytes: what a mix adds up to is what the plan of its recipe says, in all and on every GPU."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from sensitivities import parts_of
from tiny_checkpoints import make_tiny_glm4_moe, store_as_fp8
from tiny_families import glm4_moe, make_tiny

from assay.errors import PlanError
from assay.recipes.load import load_recipe
from assay.recipes.model import Serving
from assay.recipes.precision import PrecisionRecipe
from assay.recipes.profile import ProfileRecipe
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.mixing.parts import Machine, StoredParts, stored_parts
from assay_quantize.mixing.recipe_text import recipe_data
from assay_quantize.plan.fits import WORKSPACE_BYTES, fit_on, misfits, ranks_of
from assay_quantize.plan.planner import make_plan
from assay_quantize.plan.shipped import shipped_model
from assay_quantize.plan.stored import stored_by

SCHEMES = ("w4a16", "w4a16_g32", "w4a16_asym", "fp8_block", "fp8_channel", "nvfp4", "mxfp8")
BASE = load_recipe(PrecisionRecipe, "w4a16")


def drawn_mix(stored: StoredParts, seed: int) -> dict[tuple[int, str], str]:
    drawn = random.Random(seed)
    return {
        (part.layer, part.role): drawn.choice([s for s in sorted(part.num_bytes) if s not in part.refused])
        for part in stored.parts
    }


def recipe_of(schemes: dict[tuple[int, str], str]) -> PrecisionRecipe:
    return PrecisionRecipe.model_validate(recipe_data(BASE, "mix", "", schemes))


@pytest.mark.parametrize("seed", range(8))
def test_bytes_are_those_of_the_plan(tiny_glm: Path, seed: int) -> None:
    checkpoint = open_checkpoint(tiny_glm)
    stored = parts_of(checkpoint, SCHEMES)
    schemes = drawn_mix(stored, seed)
    plan = make_plan(checkpoint, recipe_of(schemes), model="tiny", family=None)
    chosen = sum(part.num_bytes[schemes[part.layer, part.role]] for part in stored.parts)
    assert stored.other_bytes + chosen == plan.bytes_out
    weights = sum(t.shape[0] * t.shape[1] for t in plan.tensors if t.role in BASE.quantize and t.name.endswith(".weight"))
    assert stored.num_weights == weights
    assert {(part.layer, part.role) for part in stored.parts} == {
        (0, "attention"), (0, "dense_mlp"),
        *((layer, role) for layer in (1, 2) for role in ("attention", "routed_expert", "shared_expert")),
    }  # fmt: skip


def test_fp8_sources_keep_what_they_store(tiny_glm: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(store_as_fp8(tiny_glm, tmp_path / "fp8"))
    stored = parts_of(checkpoint, ("fp8_block", "w4a16"))
    for scheme in ("fp8_block", "bf16"):
        schemes = {(part.layer, part.role): scheme for part in stored.parts}
        schemes[0, "dense_mlp"] = "w4a16"
        plan = make_plan(checkpoint, recipe_of(schemes), model="tiny", family=None)
        chosen = sum(part.num_bytes[schemes[part.layer, part.role]] for part in stored.parts)
        assert stored.other_bytes + chosen == plan.bytes_out


def test_a_scheme_that_does_not_divide_is_refused_where_it_does_not(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "odd", glm4_moe(hidden_size=256, moe_intermediate_size=96))
    stored = parts_of(open_checkpoint(folder), ("w4a16", "w4a16_g32"))
    refused = {part.role: dict(part.refused) for part in stored.parts}
    why = "shape [256, 96] does not fit scheme w4a16: 96 columns are not a multiple of the group size 128"
    assert refused["routed_expert"] == {"w4a16": f"model.layers.*.mlp.experts.*.down_proj.weight: {why}"}
    assert refused["attention"] == {}
    assert all(set(part.num_bytes) == {"bf16", "w4a16", "w4a16_g32"} - set(part.refused) for part in stored.parts)


def machine(users: int = 4, context: int = 4096, **refused: str) -> Machine:
    of_experts = {(scheme, True): why for scheme, why in refused.items()}
    return Machine(load_recipe(ProfileRecipe, "4xh200"), Serving(num_speculative_tokens=1), users, context, of_experts)


def test_gpus_take_what_their_ranks_can_share(tiny_glm: Path) -> None:
    """Experts of 128 over four GPUs: 32 columns each. What is left fits every rank, and is as large there as `fits` says."""
    checkpoint, on = open_checkpoint(tiny_glm), machine(nvfp4="computed otherwise")
    stored = stored_parts(checkpoint, BASE, SCHEMES, whole=lambda model: model, machine=on)
    experts = next(part for part in stored.parts if part.role == "routed_expert")
    assert set(experts.refused) == {"w4a16", "w4a16_asym", "fp8_block", "nvfp4"}
    assert experts.refused["w4a16"] == (
        "routed_expert down_proj: 32 inputs on each of 4 ranks are not a multiple of 128, the group that shares a scale "
        "(model.layers.*.mlp.experts.*.down_proj.weight and 3 more)"
    )
    assert experts.refused["nvfp4"] == "computed otherwise"
    assert not any("nvfp4" in part.refused for part in stored.parts if part.role != "routed_expert")  # theirs are other kernels
    for seed in range(4):
        schemes = drawn_mix(stored, seed)
        model = stored_by(make_plan(checkpoint, recipe_of(schemes), model="tiny", family=None))
        fit = fit_on(model, on.profile, on.serving)
        chosen = sum(part.rank_bytes[schemes[part.layer, part.role]] for part in stored.parts)
        assert stored.other_rank_bytes + chosen == fit.weight_bytes
        assert misfits(model, ranks_of(on.profile)) == []
        assert stored.rank_limit == fit.usable_bytes - WORKSPACE_BYTES - 4 * fit.kv_bytes(4096)


def test_users_that_leave_no_room(tiny_glm: Path) -> None:
    with pytest.raises(PlanError, match=r"--profile 4xh200: 99999 users at 1,048,576 tokens leave 0\.0 GiB of each GPU"):
        stored_parts(open_checkpoint(tiny_glm), BASE, SCHEMES, whole=lambda m: m, machine=machine(99_999, 1_048_576))


def test_heads_that_no_scheme_makes_divisible(tmp_path: Path) -> None:
    folder = make_tiny_glm4_moe(tmp_path / "odd", hidden=192, num_heads=3, num_kv_heads=3)
    with pytest.raises(
        PlanError, match=r"3 attention heads .* cannot be shared by 4 ranks.*; no choice of schemes changes that"
    ):
        stored_parts(open_checkpoint(folder), BASE, ("w4a16_g64",), whole=lambda model: model, machine=machine())


@pytest.mark.parametrize("seed", range(3))
def test_a_quantized_mtp_block_has_its_bytes_and_the_bases_scheme_in_every_mix(tiny_glm: Path, seed: int) -> None:
    """Whatever layers take, 16 bits in all of them included: the block's bytes are spent on them."""
    checkpoint, base = open_checkpoint(tiny_glm), load_recipe(PrecisionRecipe, "w4a16-mtp")
    stored = parts_of(checkpoint, SCHEMES, base="w4a16-mtp")
    assert stored.parts == parts_of(checkpoint, SCHEMES).parts
    schemes = drawn_mix(stored, seed) if seed else {(part.layer, part.role): "bf16" for part in stored.parts}
    recipe = PrecisionRecipe.model_validate(recipe_data(base, "mix", "", schemes))
    plan = make_plan(checkpoint, recipe, model="tiny", family=None)
    for (layer, role), scheme in schemes.items():
        assert (recipe.scheme_of(role, layer) or "bf16") == scheme
    assert {tensor.scheme for tensor in plan.tensors if tensor.role == "mtp"} == {None, "w4a16"}
    chosen = sum(part.num_bytes[schemes[part.layer, part.role]] for part in stored.parts)
    assert stored.other_bytes + chosen == plan.bytes_out
    assert stored.other_bytes < parts_of(checkpoint, SCHEMES).other_bytes


def test_shapes_as_shipped_have_all_experts() -> None:
    """GLM-5.2 in w4a16, from two experts a layer: as large as the plan of the whole model."""
    shipped = shipped_model("glm-5.2")
    stored = stored_parts(shipped.checkpoint, BASE, ("w4a16",), whole=shipped.whole, machine=None)
    plan = make_plan(shipped.checkpoint, BASE, model="glm-5.2", family=None)
    whole = sum(weight.num_bytes for weight in shipped.whole(stored_by(plan)).weights)
    assert stored.other_bytes + sum(part.num_bytes["w4a16"] for part in stored.parts) == whole
    experts = [part for part in stored.parts if part.role == "routed_expert"]
    assert (len(experts), experts[0].num_weights) == (75, 256 * 3 * 6144 * 2048)
