"""`assay run`: what `quantize` and `evaluate` do one after the other, and the exit code of `gate`."""

from __future__ import annotations

import json
import shutil
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from command_errors import one_error
from command_line import Run
from given_servers import GivenServers, given_servers
from tiny_checkpoints import make_tiny_glm4_moe
from tiny_families import glm4_moe, make_tiny

from assay.recipes.load import recipes_dir
from assay.records.run import RunRecord
from assay_reports.schema import Report

SUITE = """\
schema: 1
name: one
seed: eval-one
acceptance: false
tasks: [{kind: arithmetic, name: arithmetic, num_items: 2, num_steps: [2], max_tokens: 32}]
"""


@pytest.fixture
def server(run: Run) -> Iterator[GivenServers]:
    """Answers for every checkpoint; in the working directory a profile that names it, and a suite."""
    with given_servers("fp8", "w4a16", "bf16") as server:
        Path("here.yaml").write_text(server.profile())
        Path("one.yaml").write_text(SUITE)
        yield server


@pytest.mark.slow
def test_it_makes_measures_and_judges(run: Run, server: GivenServers) -> None:
    make_tiny_glm4_moe(Path("tuned"))
    options = ("tuned", "--precisions", "w4a16", "--suite", "one.yaml", "--profile", "here.yaml")
    code, out, err = run("run", *options)
    assert code == 1, "two items are too few to pass"
    few = "suite one passes a candidate that lost nothing with 0 % only, else it is UNDERPOWERED"
    assert few in err
    assert [line.split()[0] for line in out.splitlines()][:4] == ["fp8", "verified:", "w4a16", "verified:"]
    assert {path.name for path in Path("runs/tuned").iterdir() if path.name != ".lock"} >= {
        "fp8", "w4a16", "measurements", "gates.json", "report",
    }  # fmt: skip
    asked = len(server.requests)
    code, out, err = run("run", *options, "--json")
    assert code == 1 and server.count("/v1/chat/completions") <= asked, "all of it was done before"
    assert "done before and verified" in err and "measured already" in err
    assert few not in err, "it is said before the first request"
    report = Report.model_validate_json(out)
    assert json.loads(Path("runs/tuned/report/report.json").read_text()) == json.loads(out)
    assert [(row.label, [task.task for task in row.tasks]) for row in report.rows] == [
        (label, ["arithmetic"]) for label in ("fp8", "fp8-repeat", "bf16", "w4a16")
    ]
    # `quantize` and `evaluate` find the same work done.
    assert run("quantize", "tuned", "--precisions", "w4a16")[1].count("done before and verified") == 2
    code, out, _ = run("evaluate", *options, "--json")
    assert code == 0 and Report.model_validate_json(out) == report


def test_a_part_of_the_suite_is_asked_and_said(run: Run, server: GivenServers) -> None:
    make_tiny_glm4_moe(Path("tuned"))
    words = ("tuned", "--precisions", "w4a16", "--suite", "demo", "--profile", "here.yaml", "--tasks", "sums", "--limit", "2")
    _, out, err = run("run", *words, "--json")
    assert "note: verdicts are on a part of suite demo alone: only sums, at most 2 items of each part" in err
    report = Report.model_validate_json(out)
    assert {(row.label, *(task.task for task in row.tasks)) for row in report.rows} == {
        (label, "sums") for label in ("fp8", "fp8-repeat", "bf16", "w4a16")
    }
    assert report.suite == "demo (part)"
    assert one_error(run("run", *words, "--tasks", "sumz")).startswith("--tasks sumz: ")


@pytest.mark.slow
def test_what_a_screening_fails_is_not_measured(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    # texts of a model with random weights are foreign to it, whatever they are
    monkeypatch.setattr("assay.records.screening.FOREIGN_NATS", 10.0)
    with given_servers("fp8", "w4a16-g32", "bf16") as server:
        Path("here.yaml").write_text(server.profile())
        Path("one.yaml").write_text(SUITE)
        make_tiny(Path("tuned"), glm4_moe())
        _screened_run(run)


def _screened_run(run: Run) -> None:
    replies = [{"prompt": f"{n} + 3?", "reply": f"</think>It is {n + 3}."} for n in range(24)]
    Path("replies.jsonl").write_text("".join(json.dumps(reply) + "\n" for reply in replies))
    options = ("tuned", "--precisions", "w4a16-g32", "--suite", "one.yaml", "--profile", "here.yaml")
    code, out, err = run("run", *options, "--screened", "--screen-text", "replies.jsonl", "--json")
    report = Report.model_validate_json(out)
    assert code == 1 and [row.label for row in report.rows if row.tasks] == ["fp8", "fp8-repeat", "bf16"]
    (limit,) = [limit.text for limit in report.limits if limit.key == "screened_out"]
    assert limit.startswith("Excluded by a screening, and asked nothing: w4a16-g32 (a screening fails it: KL ")
    assert limit.endswith(" nats over 24 texts, 0.08 allowed for 99.88 % 4-bit and 0.12 % 16-bit weights).")
    assert "w4a16-g32: not measured: a screening fails it: KL " in err
    page = Path("runs/tuned/report/index.html").read_text()
    assert "Excluded by a screening, and asked nothing: w4a16-g32" in page
    assert {path.name for path in Path("runs/tuned/screened").iterdir()} >= {"screening.json", "screening.html"}
    assert list(RunRecord.load(Path("runs/tuned/run.json")).screened_out) == ["w4a16-g32"]
    shutil.rmtree("runs/tuned/w4a16-g32")
    assert one_error(run("run", *options, "--screen-text", "replys.jsonl")) == (
        "replys.jsonl: no such file or folder; give texts, JSON lines, or the folder of a run"
    )
    assert not Path("runs/tuned/w4a16-g32").exists(), "it is found before anything is made"
    # measured after all, it is excluded no longer
    code, out, _ = run("run", *options, "--json")
    report = Report.model_validate_json(out)
    assert "w4a16-g32" in [row.label for row in report.rows if row.tasks]
    assert "screened_out" not in [limit.key for limit in report.limits]


def test_what_cannot_work_fails_before_anything_is_made(run: Run, server: GivenServers) -> None:
    make_tiny_glm4_moe(Path("tuned"))
    for options, said in (
        (("--suite", "quik"), "no suite recipe called 'quik'; did you mean quick?"),
        (("--profile", "none"), "no profile recipe called 'none'"),
        (("--precisions", "w4a61"), "no precision recipe called 'w4a61'; did you mean w4a16?"),
    ):
        assert one_error(run("run", "tuned", "--profile", "here.yaml", "--suite", "one.yaml", *options)).startswith(said)
    assert not Path("runs").exists() and server.requests == []


def test_a_reference_alone_is_not_quantized(run: Run, server: GivenServers) -> None:
    make_tiny_glm4_moe(Path("tuned"))
    recipe = yaml.safe_load((recipes_dir() / "models" / "tiny-glm.yaml").read_text())
    changes = {"name": "alone", "source": {"path": str(Path("tuned").absolute())}, "include_source": False}
    Path("alone.yaml").write_text(yaml.safe_dump(recipe | changes))
    options = ("--precisions", "fp8", "--profile", "here.yaml", "--suite", "one.yaml")
    assert one_error(run("run", "alone.yaml", *options)) == (
        "alone: only the reference is there to measure; add a candidate with --precisions"
    )
    assert not Path("runs").exists()


def test_without_a_serving_environment_nothing_is_made(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("assay_evaluate.serving.server.serving_environments", list)
    monkeypatch.setattr("assay_evaluate.serving.hardware.find_gpus", lambda: ())
    make_tiny_glm4_moe(Path("tuned"))
    assert one_error(run("run", "tuned", "--suite", "quick")).startswith("no serving environment in ")
    # as a setup leaves it that was stopped before vLLM was installed
    venv.EnvBuilder(symlinks=True).create("stopped")
    monkeypatch.setattr("assay_evaluate.serving.server.serving_environments", lambda: [Path("stopped").absolute()])
    for words in (("run", "tuned", "--suite", "quick"), ("judge", "tuned", "tuned"), ("serve", "tuned")):
        code, out, err = run(*words)
        message = f"error: {Path('stopped/bin/python').absolute()}: has no vLLM (profile cpu-emulated); run "
        assert (code, out) == (2, "") and err.splitlines()[-1].startswith(message), words
    assert not Path("runs").exists()
