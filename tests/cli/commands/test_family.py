"""`assay family`: what is no config.json is refused before vLLM is started."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import Run

from assay.recipes.load import recipe_names


def test_a_recipe_is_no_config(run: Run) -> None:
    Path("mine.yaml").write_text("schema: 1\n")
    code, out, err = run("family", "mine.yaml")
    assert (code, out) == (2, "")
    assert err.startswith(
        "error: mine.yaml: is no config.json; name one, or a checkpoint's folder, a hub id or a model recipe: "
    )


def test_a_damaged_config(run: Run) -> None:
    Path("config.json").write_text("{")
    code, out, err = run("family", "config.json")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: config.json: not JSON: ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("/nowhere/config.json",),
            "/nowhere/config.json: no such folder: / has no 'nowhere'; give a checkpoint's folder (with config.json and "
            "*.safetensors)",
        ),
        (
            ("tiny-gml",),
            "tiny-gml: no such folder, and no model recipe of that name; did you mean tiny-glm? known recipes: "
            f"{', '.join(recipe_names('models'))}; or give a Hugging Face id such as zai-org/GLM-4.5-Air",
        ),
        (
            ("tiny-glm", "--out", "families/mine.yaml"),
            "families/mine.yaml: there is no folder families; make it, or give another name",
        ),
    ],
)
def test_nothing_is_built_for_a_name_that_is_not_there(run: Run, words: tuple[str, ...], message: str) -> None:
    assert run("family", *words) == (2, "", f"error: {message}\n")
