"""A family of the user's own: `--family FILE`, or in a model's recipe."""

from __future__ import annotations

import json
from pathlib import Path

import hollow
import hollow_moe
import pytest
from command_line import Run

from assay.recipes import families
from assay.recipes.base import recipes_dir

RECIPE = """schema: 1
name: small
description: "x"
source: {path: checkpoint}
family: mine.yaml
reference: {precision: fp8}
precisions: [w4a16-g32]
suite: quick
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`checkpoint`, of an architecture that assay does not know, and `mine.yaml`, which says how it names its tensors."""
    monkeypatch.setattr(families, "_own_files", {})
    families.names_of.cache_clear()
    config = hollow_moe.small("mixtral") | {"architectures": ["MineForCausalLM"], "model_type": "mine"}
    hollow.write_hollow(tmp_path / "checkpoint", config, hollow_moe.MODELS["mixtral"].shapes(config), shards=1)
    shipped = (recipes_dir() / "families" / "mixtral.yaml").read_text()
    own = shipped.replace("name: mixtral", "name: mine").replace("MixtralForCausalLM", "MineForCausalLM")
    (tmp_path / "mine.yaml").write_text(own)
    return tmp_path


def test_plan_and_quantize_take_a_family_from_a_file(run: Run, folder: Path) -> None:
    checkpoint, own = str(folder / "checkpoint"), str(folder / "mine.yaml")
    code, _, err = run("plan", checkpoint, "-p", "w4a16-g32")
    assert code == 2
    assert err.startswith(f"error: {checkpoint}/config.json: architecture MineForCausalLM is not known; `assay family` drafts")
    code, out, err = run("plan", checkpoint, "-p", "w4a16-g32", "--family", own, "--json")
    assert (code, err) == (0, "")
    plan = json.loads(out)
    assert plan["family"] == "mine"
    assert {tensor[4] for tensor in plan["tensors"] if tensor[1] == "routed_expert"} == {"quantize"}


def test_a_models_recipe_names_the_file_relative_to_its_own(run: Run, folder: Path) -> None:
    (folder / "small.yaml").write_text(RECIPE)
    code, out, err = run("plan", str(folder / "small.yaml"), "-p", "w4a16-g32", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["family"] == "mine"


def test_a_file_that_is_no_family_is_one_line(run: Run, folder: Path) -> None:
    (folder / "mine.yaml").write_text("schema: 1\nname: mine\n")
    code, out, err = run("plan", str(folder / "checkpoint"), "-p", "w4a16", "--family", str(folder / "mine.yaml"))
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {folder}/mine.yaml: 3 problems:")
