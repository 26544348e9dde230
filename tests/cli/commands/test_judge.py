"""`assay judge`: two servers by their URLs, the shipped suite in part, and what is said of wrong words."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_errors import one_error
from command_line import Run
from gateways import given
from tiny_checkpoints import make_tiny_glm4_moe

from assay.errors import RecipeError
from assay.recipes.load import load_recipe
from assay.recipes.suite import Range, SuiteRecipe
from assay.recipes.suite_files import with_selection
from assay.records.verdict import GateReport


def test_some_tasks_and_items_of_a_suite() -> None:
    suite = load_recipe(SuiteRecipe, "first-look")
    assert with_selection(suite) is suite
    chosen = with_selection(suite, ["sums"], 40)
    assert [(task.name, task.items) for task in chosen.tasks] == [("sums", 40)]
    assert chosen.sha256 != suite.sha256 and chosen.name == "first-look (part)"
    assert chosen.description == f"Only sums, at most 40 items of each part. {suite.description}"
    assert with_selection(suite, ["codes-zh", "sums"]).description == f"Only sums, codes-zh. {suite.description}"
    assert with_selection(suite, limit=60).description == f"At most 60 items of each part. {suite.description}"
    assert with_selection(suite, ["sums", "codes-en", "codes-zh"], 1000) == suite
    kept = with_selection(suite, None, 1000)
    assert [task.items for task in kept.tasks] == [Range(min=60, max=100), Range(min=100, max=250), Range(min=100, max=250)]
    with pytest.raises(RecipeError, match=r"^--tasks sum: did you mean sums\? suite first-look has sums, codes-en, codes-zh$"):
        with_selection(suite, ["sum"])


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "status"), [("healthy", "PASS"), ("swapped", "NOT MEASURED")])
def test_two_urls_have_a_verdict(run: Run, mode: str, status: str) -> None:
    """The limits of the tasks that were left out go. What these servers write is not drawn from the log-probabilities that they
    report, so their divergence is not measured."""
    with given(fp8="healthy", w4a16=mode) as servers:
        urls = [f"{label}={server.base_url}" for label, server in servers.by_label.items()]
        exit_code, out, err = run("judge", *urls, "--tasks", "sums", "--limit", "60")
    assert exit_code == 1, err
    part = "note: verdicts are on a part of suite first-look alone: only sums, at most 60 items of each part"
    assert part in err.splitlines()
    report = GateReport.load(Path("runs/model/gates.json"))
    verdicts = {verdict.gate: verdict.status for verdict in report.verdicts if verdict.candidate == "w4a16"}
    assert verdicts["score sums"] == status, out
    assert [gate for gate in verdicts if gate.startswith("score ")] == ["score sums"]
    assert report.overall["w4a16"] == verdicts["divergence kl_mean"] == "NOT MEASURED"
    assert out.splitlines()[0] == "model: reference fp8; suite first-look (part)"
    assert err.splitlines()[-1] == "report: runs/model/report/index.html"


def test_without_a_vllm_to_serve_folders_no_run_is_begun(run: Run, tmp_path: Path) -> None:
    folders = [make_tiny_glm4_moe(tmp_path / name, seed=seed) for seed, name in enumerate(("model", "other"))]
    Path("mine.yaml").write_text("schema: 1\nname: mine\nhardware: {device: cpu}\ninterpreter: /nowhere/python\n")
    message = "/nowhere/python: no such Python (profile mine); name one that has vLLM, or leave it out"
    assert one_error(run("judge", *folders, "--profile", "mine.yaml")) == message
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["http://127.0.0.1:9"],
            "http://127.0.0.1:9: is a server, and what to compare it with is missing; write `assay judge REFERENCE "
            "http://127.0.0.1:9`",
        ),
        (["no", "where", "--suite", "first"], "no suite recipe called 'first'; did you mean first-look?"),
    ],
)
def test_wrong_words_are_one_line(run: Run, words: list[str], message: str) -> None:
    assert one_error(run("judge", *words)).startswith(message)
