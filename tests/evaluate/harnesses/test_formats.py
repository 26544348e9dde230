"""Results of every format: a lossless pair passes, a lossy one fails, a shuffled one is paired rightly or refused; and the
verdict is that of the same replies scored here."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from blank_records import item_result
from foreign_results import WRITERS, Scores
from synthetic_run import make_measurement, task_of

from assay.errors import MeasureError
from assay.recipes.gate import GateRecipe, gates_on
from assay.recipes.imported import ImportedSuite
from assay.recipes.load import load_recipe
from assay.recipes.suite import SuiteRecipe
from assay.records.measurement import Measurement
from assay.records.verdict import GateReport, Verdict
from assay_evaluate.harnesses.find import read_results
from assay_evaluate.harnesses.measurement import ImportedSide, measurements_of
from assay_evaluate.verdicts.gates import judge

N = 400
BEFORE: Scores = {str(i): float(i % 10 < 7) for i in range(N)}
LOSSLESS: Scores = {item: score if int(item) % 100 else 1 - score for item, score in BEFORE.items()}
LOSSY: Scores = {item: score if int(item) % 5 else 0.0 for item, score in BEFORE.items()}
FORMATS = pytest.mark.parametrize("name", WRITERS)


def sides(tmp_path: Path, name: str, before: Scores, after: Scores, **changes: Any) -> list[Measurement]:
    """changes: how the candidate's results are written."""
    write = WRITERS[name]
    paths = write(tmp_path / "bf16", before), write(tmp_path / "fp8", after, **changes)
    reference, candidate = (ImportedSide(path.name, path, read_results(path)[None]) for path in paths)
    return measurements_of(reference, [candidate])


def judged(measurements: list[Measurement]) -> GateReport:
    suite = ImportedSuite.model_validate(measurements[0].suite_recipe)
    return judge(measurements, gates_on(load_recipe(GateRecipe, "default"), suite), model=measurements[0].model)


def score_of(report: GateReport) -> Verdict:
    (verdict,) = (verdict for verdict in report.verdicts if verdict.gate.startswith("score "))
    return verdict


@FORMATS
@pytest.mark.parametrize(
    ("after", "word"), [(BEFORE, "PASS"), (LOSSLESS, "PASS"), (LOSSY, "FAIL")], ids=["same", "lossless", "lossy"]
)
def test_a_pair_is_judged(tmp_path: Path, name: str, after: Scores, word: str) -> None:
    report = judged(sides(tmp_path, name, BEFORE, after))
    assert report.overall == {"fp8": word}


@FORMATS
def test_few_items_are_never_a_pass(tmp_path: Path, name: str) -> None:
    few = {item: score for item, score in BEFORE.items() if int(item) < 50}
    assert judged(sides(tmp_path, name, few, few)).overall == {"fp8": "UNDERPOWERED"}


@FORMATS
@pytest.mark.parametrize("after", [LOSSLESS, LOSSY], ids=["lossless", "lossy"])
def test_the_verdict_is_that_of_the_same_replies_scored_here(tmp_path: Path, name: str, after: Scores) -> None:
    """Status, interval, p values and power, exactly."""
    imported = score_of(judged(sides(tmp_path, name, BEFORE, after)))

    def here(label: str, scores: Scores) -> Measurement:
        cluster = (lambda item: f"repo{int(item) % 40}") if name == "swe-bench" else (lambda item: None)
        items = [item_result(item, score == 1, cluster=cluster(item), answer="x") for item, score in scores.items()]
        suite = load_recipe(SuiteRecipe, "quick")
        return make_measurement(label, suite).model_copy(update={"tasks": (task_of("arithmetic", "arithmetic", items),)})

    gates = GateRecipe.model_validate(
        {"schema": 1, "name": "here", "gates": [{"kind": "score", "task": "arithmetic", "max_drop": 0.05}]}
    )
    measurements = [here("fp8", BEFORE), here("w4a16", after)]  # fp8 is the reference of the synthetic run
    asked_here = score_of(judge(measurements, gates, model=measurements[0].model))
    names = (
        "status", "observed", "limit", "minimum_detectable_effect", "discordant", "p_value", "p_pass", "p_fail", "items_needed",
        "items_needed_at_loss", "worst_case", "estimand",
    )  # fmt: skip
    assert {field: getattr(imported, field) for field in names} == {field: getattr(asked_here, field) for field in names}


@FORMATS
def test_another_order_is_paired_by_name(tmp_path: Path, name: str) -> None:
    turned = dict(reversed(LOSSY.items()))
    report, other = judged(sides(tmp_path / "a", name, BEFORE, LOSSY)), judged(sides(tmp_path / "b", name, BEFORE, turned))
    assert score_of(other) == score_of(report)


@FORMATS
def test_names_that_stand_for_other_questions_are_refused(tmp_path: Path, name: str) -> None:
    """A pair whose items were renumbered: the same names, the questions of others. The name of a SWE-bench instance is its
    identity, so nothing can be shuffled there."""
    others = [f"question {(i + 1) % N}" for i in range(N)]
    if name == "swe-bench":
        assert judged(sides(tmp_path, name, BEFORE, BEFORE, questions=others)).overall == {"fp8": "PASS"}
        return
    with pytest.raises(MeasureError) as error:
        sides(tmp_path, name, BEFORE, BEFORE, questions=others)
    assert str(error.value) == (
        "gsm8k: fp8 cannot be compared with bf16: 400 of 400 items of the same name are other questions (the same questions "
        "under other names): 0, 1, 2 and 397 more; evaluate both on the same data, in the same order"
    )


@FORMATS
def test_what_infrastructure_spoilt_is_never_wrong(tmp_path: Path, name: str) -> None:
    """Three of 400 have no score: they are left out, and the others pass. Twenty are too many to say anything."""
    three = {item: None if int(item) in {10, 20, 30} else score for item, score in BEFORE.items()}
    measurements = sides(tmp_path / "a", name, BEFORE, three)
    task = measurements[1].tasks[0]
    assert (task.num_items, task.num_failed) == (400, 3)
    assert all(item.error and item.correct is None for item in task.items if item.score is None)
    verdict = score_of(judged(measurements))
    assert (verdict.status, verdict.discordant) == ("PASS", (0, 0))
    assert verdict.observed is not None and verdict.observed.n == 397
    twenty = {item: None if int(item) < 20 else score for item, score in BEFORE.items()}
    verdict = score_of(judged(sides(tmp_path / "b", name, BEFORE, twenty)))
    assert verdict.status == "NOT MEASURED"
    assert verdict.detail.startswith("20 of 400 items of ")


@FORMATS
def test_items_of_one_side_are_named_and_missing(tmp_path: Path, name: str) -> None:
    fewer = {item: score for item, score in BEFORE.items() if int(item) >= 10}
    measurements = sides(tmp_path, name, BEFORE, fewer)
    assert any("10 items have results of the reference only (" in note for note in measurements[1].notes)
    assert score_of(judged(measurements)).status == "NOT MEASURED"


# ------------------------------------------------------------------------------------------------ what the records say
def test_what_the_files_say_stands_in_the_record(tmp_path: Path) -> None:
    reference, candidate = sides(tmp_path, "lm-eval", BEFORE, LOSSY)
    assert reference.suite_recipe["tasks"] == [
        {
            "name": "gsm8k", "kind": "imported", "harness": "lm-eval", "metric": "exact_match", "knows_cuts": False,
            "settings": {
                "version": 3.0, "num_fewshot": 5, "generation_kwargs": {"temperature": 0.0, "max_gen_toks": 256},
            },
        }
    ]  # fmt: skip
    assert (reference.model, reference.tasks[0].max_tokens, reference.started) == ("tiny", 256, "2026-11-01T10:00:00+00:00")
    assert candidate.imported is not None
    assert candidate.imported.harnesses == ("lm-eval 0.4.13",)
    assert sorted(candidate.imported.files) == [
        "model/results_2026-11-01T10-00-00.000000.json", "model/samples_gsm8k_2026-11-01T10-00-00.000000.jsonl",
    ]  # fmt: skip
    assert candidate.imported.not_known == (
        "engine and version", "flags and environment", "hardware and kernels", "speculative decoding", "faults of serving",
        "which replies were cut off (gsm8k)", "how often a guess is right (gsm8k)",
    )  # fmt: skip
    item = candidate.tasks[0].items[0]
    assert dataclasses.asdict(item) == dataclasses.asdict(
        item_result("0", False, language="und", finish_reason=None, answer="x", score=0.0)
    )


def test_other_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(MeasureError) as error:
        sides(tmp_path, "lm-eval", BEFORE, BEFORE, shots=0)
    assert str(error.value) == (
        "gsm8k: fp8 cannot be compared with bf16: asked differently: num_fewshot (5, fp8 0); evaluate both with the same "
        "settings"
    )


def test_other_prompts_are_refused_where_no_setting_says_so(tmp_path: Path) -> None:
    paths = WRITERS["lm-eval"](tmp_path / "bf16", BEFORE), WRITERS["lm-eval"](tmp_path / "fp8", BEFORE, shots=0)
    for path in paths:
        next(path.rglob("results_*.json")).unlink()
    reference, candidate = (ImportedSide(path.name, path, read_results(path)[None]) for path in paths)
    with pytest.raises(MeasureError, match=r"400 of 400 items were asked with other prompts \(0, 1, 2 and 397 more\)"):
        measurements_of(reference, [candidate])
