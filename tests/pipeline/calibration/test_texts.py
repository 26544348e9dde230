"""`assay calibrate`: a run as a source, what is withheld by default and by name, and what the terminal shows of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import Run
from journals import write_journal
from synthetic_run import make_run

from assay.recipes.suite import ArithmeticTask
from assay.records.calibration import Calibration, LayerCoverage
from assay.records.run import RunRecord
from assay_evaluate.tasks.generated import arithmetic_items
from assay_evaluate.tasks.items import LANGUAGES
from assay_pipeline.calibration.sentences import coverage_lines

TRAINED = Path(__file__).resolve().parents[3] / "examples" / "tiny_glm" / "checkpoint"
ASK = ("--tokens", 128, "--length", 32, "--min-tokens", 1)


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of tiny-glm with a prompt and a reply for every item."""
    folder = make_run(tmp_path_factory.mktemp("runs") / "tiny-glm")
    write_journal(folder)
    RunRecord(model="tiny_glm").save(folder / "run.json")
    return folder


@pytest.mark.slow
def test_replies_of_a_run_are_a_source_and_no_text_for_who_is_judged_by_it(run: Run, tmp_path: Path, evaluated: Path) -> None:
    out = tmp_path / "w.safetensors"
    code, stdout, _ = run("calibrate", TRAINED, "--out", out, "--text", evaluated, *ASK, "--runs", evaluated.parent, "--json")
    record = Calibration.model_validate_json(stdout)
    (source,) = record.sources
    assert code == 0 and source.source == f"replies of the reference in {evaluated}" and source.num_dropped == 0
    assert not any(one.suite.startswith("run ") for one in record.withheld), "the source is not compared with itself"
    code, _, said = run("calibrate", TRAINED, "--out", out, "--text", evaluated, *ASK, "--withhold", evaluated)
    assert code == 2 and "texts with items of an evaluation left out; give more text or a smaller --length" in said
    chats = tmp_path / "chats.jsonl"
    texts = [{"text": "The small cat sits in the park. " * 20}]
    chats.write_text("".join(json.dumps(one) + "\n" for one in texts))
    code, stdout, _ = run("calibrate", TRAINED, "--out", out, "--text", chats, *ASK, "--runs", evaluated.parent, "--json")
    record = Calibration.model_validate_json(stdout)
    assert code == 0 and {one.suite for one in record.withheld} > {f"run {evaluated}", "quick", "full"}


@pytest.mark.slow
def test_calibration_ends_when_every_expert_has_seen_enough(run: Run, tmp_path: Path) -> None:
    sums = ArithmeticTask(kind="arithmetic", name="x", languages=LANGUAGES, num_items=700, num_steps=(3,), max_tokens=64)
    rows = [{"text": f"{item.prompt} {item.answer}"} for item in arithmetic_items(sums, "calibration-1")]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = (
        "calibrate",
        TRAINED,
        "--out",
        tmp_path / "w",
        "--length",
        64,
        "--withhold",
        "quick",
        "--text",
        tmp_path / "sums.jsonl",
    )
    code, stdout, _ = run(*command, "--tokens", 20_000, "--tokens-per-expert", 600, "--min-tokens", 1, "--json")
    seen = Calibration.model_validate_json(stdout)
    assert code == 0 and seen.ended == "every expert" and seen.num_tokens < 20_000
    assert min(min(layer.tokens) for layer in seen.coverage) >= 600
    code, stdout, _ = run(*command, "--tokens", seen.num_tokens - 4096, "--min-tokens", 1, "--json")
    without = Calibration.model_validate_json(stdout)
    assert without.ended == "tokens" and min(min(layer.tokens) for layer in without.coverage) < 600
    code, said, _ = run(*command, "--tokens", 128, "--tokens-per-expert", 10_000, "--min-tokens", 1)
    assert code == 0 and "not every expert saw 10,000 tokens" in said and "that were all tokens asked for" in said
    assert "tokens of each expert, by layer" in said


def test_a_folder_that_is_no_run_is_one_line(run: Run, tmp_path: Path) -> None:
    code, _, said = run("calibrate", TRAINED, "--out", tmp_path / "w", "--text", tmp_path)
    assert code == 2 and "a folder is taken for a run, and this one has no journal.db" in said and said.count("\n") == 1
    code, _, said = run("calibrate", TRAINED, "--out", tmp_path / "w", "--withhold", "quik")
    assert code == 2 and "no suite recipe called 'quik'" in said


def test_experts_are_drawn_by_layer(evaluated: Path) -> None:
    layers = (LayerCoverage(layer=1, tokens=(0, 1, 100, 400)), LayerCoverage(layer=12, tokens=(25, 400, 400, 50)))
    assert layers[0].drawn(400) == "·▁▅█"
    many = LayerCoverage(layer=1, tokens=(*[400] * 127, 0))
    assert many.drawn(400) == "█" * 63 + "·", "of two experts in a block the one that saw less is shown"
    made = Calibration.model_construct(coverage=layers)
    assert list(coverage_lines(made)) == [
        "tokens of each expert, by layer (· none, █ 400):",
        "   1 ·▁▅█ 0 to 400, 1 unseen",
        "  12 ▃██▃ 25 to 400",
        "no token reached layer 1 expert 0: their static scales are the largest of their layer",
    ]
