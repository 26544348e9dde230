"""Precisions by path: from `quantize` to the card they have the recipe's name, and two recipes of one name never mix."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from command_errors import one_error
from command_line import Run
from given_servers import GivenServers, given_servers
from tiny_checkpoints import make_tiny_glm4_moe

from assay.recipes.model import Serving
from assay.records.manifest import Manifest
from assay_evaluate.run.evaluate import Candidate
from assay_pipeline.comparison.checkpoints import unused_draft_head
from assay_pipeline.targets import resolve_target
from assay_reports.schema import Report

MINE = "my recipes/attention-kept.yaml"


def write_precision(path: str, *, keep: str = "attention") -> str:
    file = Path(path)
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"schema: 1\nname: {file.stem}\nextends: w4a16\nkeep: {{bf16: [{keep}]}}\n")
    return path


@pytest.fixture
def server(run: Run) -> Iterator[GivenServers]:
    """In the working directory: a model, a profile that names scripted servers, a suite of two questions."""
    with given_servers("fp8", "w4a16", "bf16", "attention-kept", "kept") as server:
        make_tiny_glm4_moe(Path("tuned"))
        Path("here.yaml").write_text(server.profile())
        task = "{kind: arithmetic, name: sums, num_items: 2, num_steps: [2], max_tokens: 32}"
        Path("own.yaml").write_text(f"schema: 1\nname: own\nseed: eval-own\nacceptance: false\ntasks: [{task}]\n")
        yield server


def evaluate(run: Run, *arguments: object) -> tuple[int, str, str]:
    return run("evaluate", "tuned", "--suite", "own.yaml", "--profile", "here.yaml", *arguments)


@pytest.mark.slow
def test_a_precision_by_path_from_end_to_end(run: Run, server: GivenServers) -> None:
    mine = write_precision(MINE)
    assert one_error(evaluate(run, "--precisions", mine)) == (
        "runs/tuned/fp8/checkpoint: no finished checkpoint there; make it first: assay quantize tuned --precision fp8"
    )
    code, _, err = run("quantize", "tuned", "--precisions", f"{mine},w4a16")
    assert code == 0, err
    assert sorted(path.parent.name for path in Path("runs/tuned").glob("*/checkpoint")) == ["attention-kept", "fp8", "w4a16"]
    code, _, err = evaluate(run, "--precisions", mine, "--precisions", "w4a16")
    assert code == 0, err
    assert [row.label for row in Report.load(Path("runs/tuned/report/report.json")).rows if row.kind == "candidate"] == [
        "bf16", "attention-kept", "w4a16",
    ]  # fmt: skip
    assert "against fp8" in Path("runs/tuned/attention-kept/checkpoint/README.md").read_text()
    assert run("report", "runs/tuned")[0] == run("card", "runs/tuned")[0] == 0


@pytest.mark.slow
def test_two_recipes_of_one_name_never_mix(run: Run, server: GivenServers) -> None:
    for words in (("quantize", "tuned", "--runs", "r"), ("run", "tuned"), ("evaluate", "tuned")):
        assert one_error(run(*words, "--precisions", "w4a16", "--precisions", write_precision("a/w4a16.yaml"))) == (
            "w4a16 and a/w4a16.yaml are different recipes, both called w4a16, which is also the name of the checkpoint; "
            "give one of them another name, and its file too"
        )
    assert not Path("r").exists()
    shutil.copy(write_precision("a/kept.yaml"), "kept.yaml")
    assert run("quantize", "tuned", "--precisions", "a/kept.yaml,kept.yaml")[0] == 0  # one recipe, named twice
    made = Manifest.load(Path("runs/tuned/kept/checkpoint/assay_manifest.json"))

    write_precision("a/kept.yaml", keep="attention, dense_mlp")
    assert one_error(evaluate(run, "--precisions", "a/kept.yaml")) == (
        "runs/tuned/kept/checkpoint: made from another recipe called kept than a/kept.yaml is now; delete it and make it "
        "again: assay quantize tuned --precision a/kept.yaml"
    )
    code, _, err = run("quantize", "tuned", "--precisions", "a/kept.yaml")
    assert code == 2 and "runs/tuned/kept/checkpoint: holds a finished checkpoint of another plan (recipe kept " in err
    assert Manifest.load(Path("runs/tuned/kept/checkpoint/assay_manifest.json")) == made


def test_a_draft_head_that_is_not_used_is_named(run: Run, tiny_glm: Path) -> None:
    target, reference = resolve_target(str(tiny_glm)), Candidate("fp8", tiny_glm, is_reference=True)
    assert unused_draft_head(target, reference) is None  # found in the config, and used
    silent = replace(target, recipe=target.recipe.model_copy(update={"serving": Serving()}))
    assert unused_draft_head(silent, reference) == (
        "note: fp8 has an MTP head that is not used, so acceptance is not measured: the recipe of tiny-glm4-moe sets no "
        "`serving: {num_speculative_tokens: 1}`"
    )


@pytest.mark.parametrize("command", ["quantize", "evaluate", "run"])
def test_an_unknown_precision_is_the_same_error_everywhere(run: Run, server: GivenServers, command: str) -> None:
    said = one_error(run(command, "tuned", "--precisions", "w4a17"))
    assert said.startswith("no precision recipe called 'w4a17'; did you mean w4a16? `assay recipes precisions` lists all 30")


def test_a_file_that_is_not_there_or_wrong(run: Run, server: GivenServers) -> None:
    for command in ("quantize", "evaluate"):
        assert (
            one_error(run(command, "tuned", "--precisions", "my/none.yaml"))
            == "my/none.yaml: cannot be read: No such file or directory"
        )


@pytest.mark.parametrize("name", ["bf16", "reference", "fp8-repeat", "measurements", "report", "run.json"])
def test_a_precision_is_not_called_as_something_else_of_a_run(run: Run, name: str) -> None:
    """`bf16` would be the label of the source, `report` the folder of the report: found before hours of quantizing."""
    assert one_error(run("quantize", "tiny-glm", "--precision", write_precision(f"my/{name}.yaml"))) == (
        f"my/{name}.yaml: name '{name}' already means something in a run's folder, where the precision is a label and a "
        "folder; give the recipe and its file another name"
    )
    assert not Path("runs").exists()
