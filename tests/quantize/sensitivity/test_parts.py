"""Parts: their bytes are the plan's, in every scheme and kept; what a scheme cannot hold is left out; recipes of mixes."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_checkpoints import make_tiny_glm4_moe

from assay.errors import PlanError
from assay.recipes.load import load_recipe
from assay.recipes.precision import PrecisionRecipe
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.plan.planner import make_plan
from assay_quantize.sensitivity.parts import Key, find_parts, mix_recipe, part_bytes


def test_parts_of_a_small_model(tiny_glm: Path) -> None:
    layout = find_parts(open_checkpoint(tiny_glm), ["w4a16", "nvfp4"], model="tiny")
    assert list(map(str, layout.sizes)) == [
        "layer 0 attention", "layer 0 dense_mlp", "layer 1 attention", "layer 1 shared_expert", "layer 1 routed_expert",
        "layer 2 attention", "layer 2 shared_expert", "layer 2 routed_expert", "mtp",
    ]  # fmt: skip
    experts = Key(1, "routed_expert")
    assert layout.num_weights[experts] == 4 * 3 * 128 * 256
    # 4 bits, a BF16 scale for 128, the shape of each of twelve weights; 4 bits, a byte for 16, two scales for each weight
    of_shape = 4 * 3 * 128 * 256
    assert layout.sizes[experts] == {
        "w4a16": of_shape // 2 + of_shape // 128 * 2 + 12 * 16,
        "nvfp4": of_shape // 2 + of_shape // 16 + 12 * 8,
        "bf16": 2 * of_shape,
    }
    assert [len(layout.weights[key]) for key in (Key(0, "attention"), experts)] == [4, 12]
    assert [(str(key), scheme) for key, scheme in layout.pairs()][:3] == [
        ("layer 0 attention", "w4a16"), ("layer 0 attention", "nvfp4"), ("layer 0 dense_mlp", "w4a16"),
    ]  # fmt: skip


@pytest.mark.parametrize("precision", ["w4a16-mtp", "w4a16", "fp8"])
def test_bytes_add_up_to_a_plan_made_by_itself(tiny_glm: Path, precision: str) -> None:
    """Of a recipe that nobody here wrote: attention and MLPs quantized, the MTP block kept or not."""
    checkpoint = open_checkpoint(tiny_glm)
    recipe = load_recipe(PrecisionRecipe, precision)
    layout = find_parts(checkpoint, ["w4a16", "fp8_block"], model="tiny")
    plan = make_plan(checkpoint, recipe, model="tiny", family=None)
    scheme = {"w4a16-mtp": "w4a16", "w4a16": "w4a16", "fp8": "fp8_block"}[precision]
    mtp = "bf16" if recipe.mtp == "keep" else scheme
    chosen = {key: mtp if key.role == "mtp" else scheme for key in layout.sizes}
    assert part_bytes(plan, layout.tensors) == {key: layout.sizes[key][chosen[key]] for key in chosen}
    assert layout.other_bytes + sum(layout.sizes[key][chosen[key]] for key in chosen) == plan.bytes_out


def test_a_mix_is_planned_as_its_parts_say(tiny_glm: Path) -> None:
    checkpoint = open_checkpoint(tiny_glm)
    layout = find_parts(checkpoint, ["w4a16", "fp8_block"], model="tiny")
    chosen = {Key(1, "routed_expert"): "w4a16", Key(2, "routed_expert"): "fp8_block", Key(0, "attention"): "fp8_block"}
    plan = make_plan(checkpoint, layout.recipe("mix", chosen), model="tiny", family=None)
    schemes = {(tensor.name.split(".")[2], tensor.role, tensor.scheme) for tensor in plan.tensors if tensor.scheme}
    assert schemes == {("1", "routed_expert", "w4a16"), ("2", "routed_expert", "fp8_block"), ("0", "attention", "fp8_block")}
    sizes = {key: layout.sizes[key][chosen.get(key, "bf16")] for key in layout.sizes}
    assert layout.other_bytes + sum(sizes.values()) == plan.bytes_out


def test_what_does_not_fit_is_left_out_by_name(tmp_path: Path) -> None:
    """Experts of 64 columns: no group of 128 divides their `down_proj`."""
    source = make_tiny_glm4_moe(tmp_path / "narrow", moe_intermediate=64)
    layout = find_parts(open_checkpoint(source), ["w4a16", "w4a16_g64"], model="narrow")
    left = {(row.layer, row.role, row.scheme) for row in layout.left_out}
    assert left == {(at, role, "w4a16") for at in (1, 2) for role in ("shared_expert", "routed_expert")} | {
        (None, "mtp", "w4a16")
    }
    assert all("64 columns are not a multiple of the group size 128" in row.why for row in layout.left_out)
    assert sorted(layout.sizes[Key(1, "routed_expert")]) == ["bf16", "w4a16_g64"]
    with pytest.raises(PlanError, match=r"no part takes nvfp4: .* 40 columns are not a multiple"):
        find_parts(
            open_checkpoint(
                make_tiny_glm4_moe(tmp_path / "odd", hidden=40, head_dim=8, dense_intermediate=40, moe_intermediate=40)
            ),
            ["nvfp4"],
            model="odd",
        )


def test_an_mtp_block_has_the_scheme_of_all_roles() -> None:
    known = [Key(0, "attention"), Key(1, "attention"), Key(1, "routed_expert"), Key(None, "mtp")]
    made = mix_recipe("m", {Key(None, "mtp"): "w4a16", Key(1, "attention"): "fp8_block"}, known)
    assert made.mtp == "quantize"
    assert made.quantize == {"attention": "w4a16", "routed_expert": "w4a16"}
    assert [made.scheme_of("attention", layer) for layer in (0, 1, None)] == [None, "fp8_block", "w4a16"]
    assert made.scheme_of("routed_expert", 1) is None
