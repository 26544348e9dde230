"""What is particular to one format, or to several replies, partial credit, groups and cuts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from foreign_results import inspect_log, write_archive, write_csv, write_lm_eval, write_nemo, write_swe

from assay.errors import MeasureError
from assay.recipes.gate import GateRecipe, gates_on
from assay.recipes.imported import ImportedSuite
from assay.recipes.load import load_recipe
from assay.records.measurement import Measurement
from assay.records.verdict import GateReport, Verdict
from assay_evaluate.harnesses.find import read_results
from assay_evaluate.harnesses.measurement import ImportedSide, measurements_of
from assay_evaluate.harnesses.scores import TaskScores
from assay_evaluate.statistics.graded import graded_evidence
from assay_evaluate.verdicts.gates import judge


def the_task(path: Path, metric: str | None = None) -> TaskScores:
    (scores,) = read_results(path, metric)[None]
    return scores


def measured(*paths: Path) -> list[Measurement]:
    reference, *others = (ImportedSide(path.stem, path, read_results(path)[None]) for path in paths)
    return measurements_of(reference, others)


def judged(measurements: list[Measurement]) -> GateReport:
    suite = ImportedSuite.model_validate(measurements[0].suite_recipe)
    return judge(measurements, gates_on(load_recipe(GateRecipe, "default"), suite), model=measurements[0].model)


def verdict_of(report: GateReport, gate: str = "score ") -> Verdict:
    (verdict,) = (verdict for verdict in report.verdicts if verdict.gate.startswith(gate))
    return verdict


def table(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# ------------------------------------------------------------------------------------------------ several replies, credit
def test_epochs_are_replies_to_one_item(tmp_path: Path) -> None:
    """Four replies to 100 items are 100 items, not 400: the interval is that of each item's share."""
    before = {str(i): [float((i + epoch) % 4 > 0) for epoch in range(4)] for i in range(100)}
    after = {item: [0.0, *scores[1:]] if int(item) % 2 else scores for item, scores in before.items()}
    paths = [write_archive(tmp_path / f"{name}.eval", inspect_log(log)) for name, log in (("bf16", before), ("fp8", after))]
    measurements = measured(*paths)
    verdict = verdict_of(judged(measurements))
    shares = [[sum(scores) / 4 for scores in side.values()] for side in (before, after)]
    evidence = graded_evidence(*shares, 0.05)
    assert verdict.observed == evidence.drop
    assert (verdict.p_pass, verdict.p_fail, evidence.drop.n) == (evidence.p_pass, evidence.p_fail, 100)
    assert [(task.num_samples, task.num_items) for m in measurements for task in m.tasks] == [(4, 400), (4, 400)]


def test_partial_credit_is_compared_as_credit(tmp_path: Path) -> None:
    """A candidate that gets 0.6 in place of 0.7 of every item is wrong no more often, and loses ten points."""
    sides = {name: table(tmp_path / f"{name}.jsonl", [{"item": i, "score": score} for i in range(200)])
             for name, score in (("bf16", 0.7), ("fp8", 0.6))}  # fmt: skip
    measurements = measured(*sides.values())
    verdict = verdict_of(judged(measurements))
    assert verdict.status == "FAIL"
    assert verdict.observed == graded_evidence([0.7] * 200, [0.6] * 200, 0.05).drop
    assert verdict.detail.startswith("Loses 10.0 points on scores")
    assert [task.accuracy.value for m in measurements for task in m.tasks if task.accuracy] == pytest.approx([0.7, 0.6])
    assert all(task.is_graded for m in measurements for task in m.tasks)


def test_a_reference_with_nothing_to_lose_is_not_measured_by_its_credit(tmp_path: Path) -> None:
    """Of partial credit no item is wholly right; what can be lost is the mean score."""
    paths = [table(tmp_path / f"{name}.jsonl", [{"item": i, "score": 0.02} for i in range(200)]) for name in ("bf16", "fp8")]
    verdict = verdict_of(judged(measured(*paths)))
    assert verdict.status == "NOT MEASURED"
    assert verdict.detail.startswith(
        "bf16 itself has a mean score of 0.020 over 200 replies to scores (2 %): it has less than 5"
    )


def test_unequal_numbers_of_replies_are_compared_by_item(tmp_path: Path) -> None:
    rows = [{"item": i, "score": int(i % 10 < 7), "sample": sample} for i in range(200) for sample in range(2)]
    paths = table(tmp_path / "bf16.jsonl", rows), table(tmp_path / "fp8.jsonl", [row for row in rows if row["sample"] == 0])
    verdict = verdict_of(judged(measured(*paths)))
    assert (verdict.status, verdict.discordant) == ("PASS", (0, 0))
    assert verdict.observed is not None and verdict.observed.n == 200


def test_items_of_a_cluster_count_as_one_draw(tmp_path: Path) -> None:
    """Ten questions, asked in forty wordings each: where one question is lost, all its wordings are."""

    def rows(lost: int | None) -> list[dict[str, Any]]:
        return [{"item": f"{q}-{w}", "score": int(q != lost), "cluster": str(q)} for q in range(10) for w in range(40)]

    paths = table(tmp_path / "bf16.jsonl", rows(None)), table(tmp_path / "fp8.jsonl", rows(3))
    verdict = verdict_of(judged(measured(*paths)))
    assert verdict.status == "UNDERPOWERED"
    assert "400 items share 10 questions or texts" in verdict.detail


# ------------------------------------------------------------------------------------------------ cut replies
def cut(path: Path, num_cut: int) -> Path:
    log = inspect_log({str(i): [1.0 if i >= num_cut else 0.0] for i in range(300)})
    for sample in log["samples"][:num_cut]:
        sample["output"]["choices"][0]["stop_reason"] = "max_tokens"
    path.write_text(json.dumps(log))
    return path


def test_replies_that_inspect_says_were_cut_are_judged_as_cut(tmp_path: Path) -> None:
    measurements = measured(cut(tmp_path / "bf16.json", 0), cut(tmp_path / "fp8.json", 60))
    report = judged(measurements)
    assert [(task.num_truncated, task.knows_cuts) for m in measurements for task in m.tasks] == [(0, True), (60, True)]
    assert verdict_of(report, "truncation").status == "FAIL"


def test_where_nobody_knows_of_cuts_there_is_no_gate_on_them(tmp_path: Path) -> None:
    scores = {str(i): 1.0 for i in range(300)}
    report = judged(measured(write_csv(tmp_path / "bf16", scores), write_csv(tmp_path / "fp8", scores)))
    assert [verdict.gate for verdict in report.verdicts] == ["score gsm8k", "verbosity"]
    assert report.overall == {"fp8": "PASS"}


# ------------------------------------------------------------------------------------------------ one format
def test_a_group_of_lm_eval_is_one_task_with_parts(tmp_path: Path) -> None:
    folder = tmp_path / "bf16"
    folder.mkdir()
    for subject in ("law", "physics"):
        rows = [
            {
                "doc_id": i, "metrics": ["acc"], "acc": 1.0, "doc_hash": f"{subject}{i}", "prompt_hash": "p",
                "target_hash": "t", "filter": "none", "filtered_resps": ["x"], "arguments": [["a"]] * 4,
            }
            for i in range(3)
        ]  # fmt: skip
        table(folder / f"samples_mmlu_{subject}_2026-11-01T10-00-00.000000.jsonl", rows)
    configs = {f"mmlu_{subject}": {"output_type": "multiple_choice"} for subject in ("law", "physics")}
    groups = {"mmlu": ["mmlu_humanities", "mmlu_stem"], "mmlu_humanities": ["mmlu_law"], "mmlu_stem": ["mmlu_physics"]}
    settings = {"results": {}, "configs": configs, "group_subtasks": groups}
    (folder / "results_2026-11-01T10-00-00.000000.json").write_text(json.dumps(settings))
    scores = the_task(folder)
    assert (scores.task, scores.metric, scores.chance) == ("mmlu", "acc", 0.25)
    assert [(reply.item, reply.subtask) for reply in scores.replies] == [
        (f"mmlu_{subject}/{i}", f"mmlu_{subject}") for subject in ("law", "physics") for i in range(3)
    ]


def test_the_metric_and_filter_of_lm_eval_can_be_chosen(tmp_path: Path) -> None:
    rows = [{"doc_id": i, "metrics": ["exact_match", "f1"], "exact_match": float(choice == "flexible-extract"), "f1": 0.5,
             "doc": {}, "target": "t", "filter": choice, "filtered_resps": ["x"]}
            for choice in ("strict-match", "flexible-extract") for i in range(2)]  # fmt: skip
    path = table(tmp_path / "samples_gsm8k.jsonl", rows)
    chosen = {metric: the_task(path, metric) for metric in (None, "exact_match,strict-match", "f1")}
    assert [(scores.task, scores.metric, [reply.score for reply in scores.replies]) for scores in chosen.values()] == [
        ("gsm8k", "exact_match,flexible-extract", [1.0, 1.0]), ("gsm8k", "exact_match,strict-match", [0.0, 0.0]),
        ("gsm8k", "f1,flexible-extract", [0.5, 0.5]),
    ]  # fmt: skip
    with pytest.raises(
        MeasureError, match=r"has no metric acc; --metric takes one of: exact_match, f1, exact_match,strict-match"
    ):
        the_task(path, "acc")


def test_scorers_of_inspect_and_their_values(tmp_path: Path) -> None:
    values = ["C", "I", "P", "N", True, 0.25, "yes", "0.5", float("nan"), None]
    log = inspect_log({str(i): [1.0] for i in range(len(values))})
    for sample, value in zip(log["samples"], values, strict=True):
        sample["scores"] = {"judge": {"value": value}, "rubric": {"value": {"style": 0.5}}}
    (tmp_path / "a.json").write_text(json.dumps(log))
    scores = the_task(tmp_path / "a.json")
    assert (scores.metric, [reply.score for reply in scores.replies]) == (
        "judge", [1.0, 0.0, 0.5, 0.0, 1.0, 0.25, 1.0, 0.5, None, None],
    )  # fmt: skip
    assert [reply.error for reply in scores.replies][-2:] == ["not scored", "not scored"]
    assert {reply.score for reply in the_task(tmp_path / "a.json", "rubric/style").replies} == {0.5}


def test_a_log_of_inspect_without_any_score_says_why(tmp_path: Path) -> None:
    log = inspect_log({"0": [None], "1": [None]})
    (tmp_path / "a.json").write_text(json.dumps(log))
    with pytest.raises(MeasureError, match="no sample has a score; the first error: ConnectionError; run `inspect eval-retry`"):
        the_task(tmp_path / "a.json")


def test_samples_of_inspect_that_were_invalidated_have_no_score(tmp_path: Path) -> None:
    log = inspect_log({"0": [1.0], "1": [1.0]})
    log["samples"][0]["invalidation"] = {"author": "a", "reason": "wrong sandbox"}
    (tmp_path / "a.json").write_text(json.dumps(log))
    assert [(reply.score, reply.error) for reply in the_task(tmp_path / "a.json").replies] == [
        (None, "invalidated"),
        (1.0, None),
    ]


def test_a_judge_that_broke_is_no_score_of_nemo(tmp_path: Path) -> None:
    folder = write_nemo(tmp_path / "bf16", {"0": 1.0, "1": 0.0})
    path = folder / "gsm8k" / "results.jsonl"
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    second["scoring_details"] = {"judge": {"error": "no judge_client configured"}}
    table(path, [first, second])
    assert [(reply.score, reply.error) for reply in the_task(folder).replies] == [
        (1.0, None), (None, "no verdict of the judge: no judge_client configured"),
    ]  # fmt: skip
    assert the_task(path) == the_task(folder)


def test_outcomes_of_swe_bench(tmp_path: Path) -> None:
    report = {
        "resolved_ids": ["django__django-1"], "unresolved_ids": ["django__django-2", "sympy__sympy-3"],
        "error_ids": ["sympy__sympy-4"], "empty_patch_ids": ["sympy__sympy-5"], "incomplete_ids": ["sympy__sympy-6"],
        "infra_failure_ids": ["sympy__sympy-3"],
    }  # fmt: skip
    (tmp_path / "tiny.run.json").write_text(json.dumps(report))
    assert [(reply.item, reply.score, reply.error, reply.cluster) for reply in the_task(tmp_path).replies] == [
        ("django__django-1", 1.0, None, "django__django"),
        ("django__django-2", 0.0, None, "django__django"),
        ("sympy__sympy-3", None, "its environment broke", "sympy__sympy"),
        ("sympy__sympy-5", 0.0, None, "sympy__sympy"),
        ("sympy__sympy-4", None, "its evaluation broke", "sympy__sympy"),
    ]


def test_a_row_with_an_error_has_no_score(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("item,score,error\n1,0,HTTP 500\n2,true,\n3,,\n")
    assert [(reply.score, reply.error) for reply in the_task(tmp_path / "a.csv").replies] == [
        (None, "HTTP 500"), (1.0, None), (None, "no score stands there"),
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------------ several at once
def test_a_folder_holds_benchmarks_of_several_harnesses(tmp_path: Path) -> None:
    scores = {str(i): float(i % 10 < 7) for i in range(400)}
    paths = []
    for name in ("bf16", "fp8"):
        folder = tmp_path / name
        write_lm_eval(folder, scores)
        write_swe(folder / "swe", scores)
        (folder / "tau2.csv").write_text("item,score\n" + "".join(f"{item},{score}\n" for item, score in scores.items()))
        (folder / "config.json").write_text('{"not": "a result"}')
        paths.append(folder)
    report = judged(measured(*paths))
    assert {verdict.gate: verdict.status for verdict in report.verdicts if verdict.gate.startswith("score")} == {
        "score gsm8k": "PASS", "score swe-bench": "PASS", "score tau2": "PASS",
    }  # fmt: skip
    assert report.overall == {"fp8": "PASS"}


def test_a_benchmark_that_one_side_lacks_is_not_measured(tmp_path: Path) -> None:
    scores = {str(i): 1.0 for i in range(200)}
    before, after = write_csv(tmp_path / "bf16", scores), write_csv(tmp_path / "fp8", scores)
    write_swe(before / "swe", scores)
    (after / "extra.csv").write_text("item,score\n1,1\n")
    measurements = measured(before, after)
    report = judged(measurements)
    assert report.overall == {"fp8": "NOT MEASURED"}
    (verdict,) = (verdict for verdict in report.verdicts if verdict.gate == "score swe-bench")
    assert verdict.detail == "swe-bench has no score for fp8: its results do not have it."
    assert measurements[1].notes[-1] == "tasks without results of the reference, left out: extra"


def test_results_that_are_the_references_are_called_so(tmp_path: Path) -> None:
    scores = {str(i): 1.0 for i in range(40)}
    measurements = measured(write_csv(tmp_path / "bf16", scores), write_csv(tmp_path / "fp8", scores))
    assert measurements[1].notes[-1] == "its results are the reference's, reply by reply"


def test_other_harnesses_are_not_compared(tmp_path: Path) -> None:
    scores = {str(i): 1.0 for i in range(40)}
    with pytest.raises(MeasureError, match="gsm8k: fp8 cannot be compared with bf16: harness lm-eval, fp8 table"):
        measured(write_lm_eval(tmp_path / "bf16", scores), write_csv(tmp_path / "fp8", scores))
