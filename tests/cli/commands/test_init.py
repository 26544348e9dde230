"""`assay init`: a model recipe inferred from a checkpoint, and what can be done with it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml
from command_errors import one_error
from command_line import Run

from assay.records.plan import Plan

TINY_GLM = Path(__file__).resolve().parents[3] / "examples" / "tiny_glm" / "checkpoint"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """tiny-glm's folder under another name, as that of somebody's own model."""
    shutil.copytree(TINY_GLM, tmp_path / "my-glm")
    return tmp_path / "my-glm"


def test_what_is_inferred_of_tiny_glm_is_what_a_plan_takes(run: Run, folder: Path) -> None:
    code, out, err = run("init", folder, "--base-model", "me/my-glm")
    assert (code, out) == (0, "my-glm.yaml\n")
    assert err.splitlines()[-1] == (
        "next: `assay plan my-glm.yaml --precision fp8` shows what would be made; "
        "`assay run my-glm.yaml` makes and judges it all"
    )
    assert yaml.safe_load(Path("my-glm.yaml").read_text()) == {
        "schema": 1, "name": "my-glm", "description": "Made from the config of my-glm.", "source": {"path": str(folder)},
        "base_model": "me/my-glm", "family": "glm4_moe", "reference": {"precision": "fp8"},
        "precisions": ["fp8", "w4a16", "nvfp4a16"], "include_source": True, "suite": "full",
        "profiles": ["4xh200", "cpu-emulated"],  # its 4 heads cannot be shared by 8 GPUs
        "serving": {"reasoning_parser": "glm45", "num_speculative_tokens": 1},
    }  # fmt: skip
    by_recipe = Plan.model_validate_json(run("plan", "my-glm.yaml", "-p", "w4a16", "--json")[1])
    by_folder = Plan.model_validate_json(run("plan", folder, "-p", "w4a16", "--json")[1])
    assert by_recipe == by_folder.model_copy(update={"base_model": "me/my-glm"})


def test_a_file_that_is_there_stays_unless_force_is_given(run: Run, folder: Path) -> None:
    Path("mine.yaml").write_text("mine\n")
    assert one_error(run("init", folder, "--out", "mine.yaml")) == (
        "mine.yaml: exists already; --force overwrites it, --out FILE names another"
    )
    assert Path("mine.yaml").read_text() == "mine\n"
    made = json.loads(run("init", folder, "--out", "mine.yaml", "--force", "--json")[1])
    assert made["file"] == "mine.yaml" and yaml.safe_load(Path("mine.yaml").read_text())["name"] == "mine"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("tiny-glm",), "tiny-glm: assay ships the recipe tiny-glm for it; use that name as TARGET"),
        (
            ("./tiny-qwen",),
            "./tiny-qwen: the folder is called as a recipe that ships with assay; if it is that model, use tiny-qwen as "
            "TARGET, else give the folder another name",
        ),
        (
            ("{folder}", "--base-model", "glm"),
            "--base-model glm: is not a repository id; write OWNER/NAME, such as zai-org/GLM-5",
        ),
        (("{folder}", "--out", "no/x.yaml"), "no/x.yaml: there is no folder no; make it, or give another name with --out"),
    ],
)
def test_what_cannot_be_written_is_one_line(run: Run, folder: Path, words: tuple[str, ...], message: str) -> None:
    shutil.copytree(folder, "tiny-qwen")
    assert one_error(run("init", *(word.format(folder=folder) for word in words))) == message
