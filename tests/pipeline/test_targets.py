"""Where a model recipe's checkpoint is looked for: beside the recipe's file, or in the repository for a recipe that ships."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_errors import one_error
from command_line import Run
from tiny_checkpoints import make_tiny_glm4_moe

from assay.recipes.load import recipes_dir
from assay.recipes.model import Location
from assay.records.plan import Plan
from assay_pipeline.targets import resolve_target

ROOT = recipes_dir().parent


def write_recipe(path: str, source: str, reference: str = "precision: fp8") -> str:
    file = Path(path)
    file.parent.mkdir(exist_ok=True)
    file.write_text(
        f"schema: 1\nname: {file.stem}\nsource: {{path: {source}}}\nfamily: glm4_moe\nreference: {{{reference}}}\n"
        "precisions: [w4a16]\n"
    )
    return path


def test_a_relative_folder_starts_at_the_recipes_file(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tiny_glm4_moe(Path("weights/glm"))
    mine = write_recipe("models/mine.yaml", "../weights/glm", "release: {path: ../weights/fp8}")
    target = resolve_target(mine)
    assert target.location == Location(path="weights/glm")
    assert target.recipe.reference.release == Location(path="weights/fp8")
    by_recipe = Plan.model_validate_json(run("plan", mine, "-p", "w4a16", "--json")[1])
    by_folder = Plan.model_validate_json(run("plan", "weights/glm", "-p", "w4a16", "--json")[1])
    assert by_recipe == by_folder.model_copy(update={"model": "mine"})
    monkeypatch.chdir(tmp_path / "models")
    assert resolve_target("mine.yaml").location == Location(path=str(tmp_path / "weights/glm"))
    absolute = write_recipe("absolute.yaml", str(tmp_path / "weights/glm"))
    assert resolve_target(absolute).location == Location(path=str(tmp_path / "weights/glm"))


def test_a_folder_that_is_not_beside_the_recipe_is_one_line(run: Run, tmp_path: Path) -> None:
    mine = write_recipe("models/mine.yaml", "examples/tiny_glm/checkpoint")
    assert one_error(run("plan", mine, "-p", "w4a16")) == (
        "models/mine.yaml: source.path examples/tiny_glm/checkpoint: no such folder "
        f"{tmp_path}/models/examples/tiny_glm/checkpoint; a relative path starts at the folder of the recipe's file; correct "
        "it, or write it absolute"
    )


def test_a_shipped_recipe_starts_at_the_repository(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By name and by path, whatever the working directory; from a wheel, which has no checkpoints, it is one line."""
    there = Location(path=str(ROOT / "examples/tiny_glm/checkpoint"))
    assert resolve_target("tiny-glm").location == there
    assert resolve_target(str(recipes_dir() / "models" / "tiny-glm.yaml")).location == there
    monkeypatch.setattr("assay_pipeline.targets.recipes_dir", lambda: tmp_path / "_recipes")
    monkeypatch.setattr("assay.recipes.load.recipes_dir", lambda: tmp_path / "_recipes")
    (tmp_path / "_recipes").symlink_to(recipes_dir())
    assert one_error(run("plan", "tiny-glm", "-p", "w4a16")) == (
        f"tiny-glm: source.path examples/tiny_glm/checkpoint: no such folder {tmp_path}/examples/tiny_glm/checkpoint; "
        "checkpoints of shipped recipes lie in a clone and not in the wheel; work in a clone, or give a checkpoint folder"
    )


def test_the_mtp_block_is_left_out_of_every_precision(run: Run) -> None:
    """`--mtp drop`, and the same in a model's recipe; what calibrates the block cannot leave it out."""
    make_tiny_glm4_moe(Path("glm"))
    mine = Path(write_recipe("models/mine.yaml", "../glm"))
    mine.write_text(mine.read_text() + "mtp: drop\n")
    for words in (("glm", "--mtp", "drop"), (mine,)):
        for precision in ("w4a16", "w4a16-mtp", "fp8"):
            made = Plan.model_validate_json(run("plan", *words, "-p", precision, "--json")[1])
            assert (made.drops_mtp, made.keeps_mtp, made.precision, made.precision_recipe["mtp"]) == (
                True, False, precision, "drop",
            )  # fmt: skip
    by_hand = Plan.model_validate_json(run("plan", "glm", "-p", "w4a16-nomtp", "--json")[1])
    by_option = Plan.model_validate_json(run("plan", "glm", "-p", "w4a16", "--mtp", "drop", "--json")[1])
    assert (by_option.tensors, by_option.ignore) == (by_hand.tensors, by_hand.ignore)
    dropped = resolve_target("glm", mtp="drop").recipe
    assert (resolve_target("glm").recipe.serving.num_speculative_tokens, dropped.serving.num_speculative_tokens) == (1, None)
    calibrated = "schema: 1\nname: g\nextends: w4a16-mtp\ncalibration: {method: gptq, mtp: true, text: t.jsonl}\n"
    Path("g.yaml").write_text(calibrated)
    assert one_error(run("plan", "glm", "-p", "g.yaml", "--mtp", "drop")) == (
        "precision g: calibration.mtp calibrates the MTP block, which mtp: drop leaves out; take another precision"
    )
    assert one_error(run("plan", "glm", "-p", "w4a16", "--mtp", "keep")) == "--mtp keep: it takes one of: drop"
