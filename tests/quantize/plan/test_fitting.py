"""A hidden size of 576 has no groups of 128. A model by path gets precisions that fit; a precision that is named is kept."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import Run
from tiny_checkpoints import make_tiny_glm4_moe
from tiny_families import glm4_moe, make_tiny

from assay.recipes.load import load_recipe
from assay.recipes.precision import PrecisionRecipe
from assay.records.run import RunRecord
from assay_pipeline.planning import precisions_for
from assay_pipeline.targets import resolve_target
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.engine.quantize import quantize
from assay_quantize.plan.planner import choose_fitting, make_plan
from assay_quantize.verify.verify import verify
from assay_reports.find_limits import find_limits
from assay_reports.run import load_run

HERE = "model.layers.0.mlp.gate_proj.weight: shape [256, 576] does not fit scheme"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Hidden size 576, four experts, an MTP layer."""
    return make_tiny_glm4_moe(tmp_path_factory.mktemp("fitting") / "odd", hidden=576, num_layers=2, num_experts=4, num_heads=9)


def test_precisions_are_chosen_by_what_divides(folder: Path) -> None:
    target = resolve_target(str(folder))
    assert target.recipe.precisions == ("fp8-channel", "w4a16-g64", "nvfp4a16")
    assert target.recipe.reference.precision == "fp8-channel"
    whys = (
        f"precision fp8-channel in place of fp8: {HERE} fp8_block: 576 columns are not a multiple of the group size 128",
        f"precision w4a16-g64 in place of w4a16: {HERE} w4a16: 576 columns are not a multiple of the group size 128",
    )
    assert target.choices == (("fp8-channel", whys[0]), ("w4a16-g64", whys[1]))
    assert all(why in target.recipe.description for why in whys)


@pytest.mark.parametrize(
    ("hidden", "expert", "taken"),
    [
        (256, 192, ("fp8-channel", "w4a16-g64", "nvfp4a16")),
        (256, 96, ("fp8-channel", "w4a16-g32", "nvfp4a16")),
        (256, 80, ("fp8-channel", "w4a16-channel", "nvfp4a16")),
        (256, 72, ("fp8-channel", "w4a16-channel", None)),
        (256, 100, ("fp8-channel", None, None)),
    ],
)
def test_the_largest_group_that_divides_is_taken(
    tmp_path: Path, hidden: int, expert: int, taken: tuple[str | None, ...]
) -> None:  # fmt: skip
    folder = make_tiny(tmp_path / "odd", glm4_moe(hidden_size=hidden, moe_intermediate_size=expert))
    found = choose_fitting(open_checkpoint(folder), ("fp8", "w4a16", "nvfp4a16"))
    assert tuple(one.precision for one in found) == taken
    left_out = [one for one in found if one.precision is None]
    assert all(str(one.sentence).startswith(f"precision {one.requested} is left out: model.layers.") for one in left_out)
    target = resolve_target(str(folder))
    assert target.recipe.precisions == tuple(one for one in taken if one is not None)


def test_shapes_that_fit_change_nothing(tmp_path: Path) -> None:
    target = resolve_target(str(make_tiny_glm4_moe(tmp_path / "even")))
    assert (target.recipe.precisions, target.choices) == (("fp8", "w4a16", "nvfp4a16"), ())
    assert target.recipe.description == "Made from the config of even."


@pytest.mark.parametrize("precision", ["fp8-channel", "w4a16-g64", "nvfp4a16"])
def test_what_was_chosen_is_planned_quantized_and_verified(folder: Path, tmp_path: Path, precision: str) -> None:
    plan = make_plan(open_checkpoint(folder), load_recipe(PrecisionRecipe, precision), model="odd", family=None)
    quantize(plan, folder, tmp_path / "out")
    found = verify(tmp_path / "out", source=folder, workers=1)
    assert (found.damages, plan.mtp_layers) == ((), (2,))


def test_the_choice_is_printed_and_a_named_precision_is_insisted_on(run: Run, folder: Path) -> None:
    target, notes = resolve_target(str(folder)), list[str]()
    chosen = precisions_for(target, None, None, with_reference=True, say=notes.append)
    assert list(chosen) == ["fp8-channel", "w4a16-g64", "nvfp4a16"]
    assert "note: precision w4a16-g64 in place of w4a16:" in " ".join(notes)
    notes.clear()
    assert list(precisions_for(target, "w4a16", None, with_reference=False, say=notes.append)) == ["w4a16"]
    assert notes == []
    chosen = precisions_for(target, None, ["nvfp4a16"], with_reference=True, say=notes.append)
    assert list(chosen) == ["fp8-channel", "nvfp4a16"]
    assert "note: precision fp8-channel in place of fp8:" in " ".join(notes) and "w4a16" not in " ".join(notes)
    code, _, said = run("plan", folder, "-p", "w4a16")
    assert code == 2
    assert HERE in " ".join(said.split()) and said.rstrip().endswith("; precision w4a16-g64 fits this checkpoint")
    code, _, said = run("plan", folder, "-p", "w4a16-g64")
    assert (code, "in place of" in said) == (0, False)


def test_the_choice_is_kept_in_the_run_and_stands_in_its_report(run: Run, folder: Path, tmp_path: Path) -> None:
    code, _, said = run("quantize", folder, "--precisions", "w4a16-g64", "--runs", tmp_path)
    assert code == 0, said
    choices = RunRecord.load(tmp_path / "odd" / "run.json").choices
    assert [why.partition(":")[0] for why in choices] == [
        "precision fp8-channel in place of fp8", "precision w4a16-g64 in place of w4a16",
    ]  # fmt: skip
    (said,) = (limit.text for limit in find_limits(load_run(tmp_path / "odd")) if limit.key == "precisions_by_shape")
    assert said == f"Precisions chosen to fit the checkpoint's shapes: {'; '.join(choices)}."
