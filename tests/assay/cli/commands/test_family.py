"""`assay family`: what is no config.json is refused before vLLM is started."""

from __future__ import annotations

from pathlib import Path

from command_line import Run


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
