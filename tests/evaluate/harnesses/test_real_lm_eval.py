"""The same replies, scored here and by lm-eval alone with its own writer: the imported verdict is the one of here."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_server import FakeServer, Scripted
from lm_eval_questions import session_with
from synthetic_run import make_measurement

from assay.recipes.gate import GateRecipe, gates_on
from assay.recipes.imported import ImportedSuite
from assay.recipes.load import load_recipe
from assay.recipes.suite import LmEvalTask, SuiteRecipe
from assay.records.verdict import Verdict
from assay_evaluate.harnesses.find import read_results
from assay_evaluate.harnesses.measurement import ImportedSide, measurements_of
from assay_evaluate.tasks.lm_eval.task import run_lm_eval
from assay_evaluate.verdicts.gates import judge

N = 150
TASK = "local_sums"
Say = Callable[[int], str]


@pytest.fixture(scope="module")
def task_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    rows = [{"question": f"{i} + {i}", "answer": str(2 * i)} for i in range(N)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "sums.yaml").write_text(
        f"""task: {TASK}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder / "data.jsonl"}}}, cache_dir: {folder / "cache"}}}
output_type: generate_until
test_split: test
doc_to_text: "Q: {{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
generation_kwargs: {{until: ["Q:"], do_sample: false}}
num_fewshot: 0
"""
    )
    return folder


def number_in(prompt: str) -> int:
    return int(prompt.removeprefix("Q: ").split(" ")[0])


def evaluated_alone(folder: Path, say: Say, out: Path) -> None:
    """`lm_eval --log_samples --output_path OUT`, with a model that says what it is told."""
    from lm_eval.api.model import LM
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.loggers import EvaluationTracker
    from lm_eval.tasks import TaskManager

    class Saved(LM):
        def generate_until(self, requests: list[Any]) -> list[str]:
            return [say(number_in(request.args[0])) for request in requests]

        def loglikelihood(self, requests: list[Any]) -> list[Any]:
            raise NotImplementedError

        loglikelihood_rolling = loglikelihood

    tracker = EvaluationTracker(output_path=str(out))
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    results = simple_evaluate(Saved(), tasks=[TASK], task_manager=manager, bootstrap_iters=0, evaluation_tracker=tracker)
    assert results is not None
    samples = results.pop("samples")
    tracker.save_results_aggregated(results=results, samples=samples)
    tracker.save_results_samples(task_name=TASK, samples=samples[TASK])


def score_of(verdicts: tuple[Verdict, ...]) -> dict[str, Any]:
    (verdict,) = (verdict for verdict in verdicts if verdict.gate.startswith("score "))
    return verdict.model_dump(exclude={"detail", "title", "clause", "gate", "mean_output_tokens", "extra_output_tokens"})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("says", "word"),
    [
        (lambda i: str(2 * i) if i % 10 else "none", "PASS"),
        (lambda i: str(2 * i) if i % 10 and i % 4 else "none", "FAIL"),
    ],
    ids=["lossless", "lossy"],
)
def test_lm_evals_own_files_give_the_verdict_of_the_same_replies_scored_here(
    tmp_path: Path, task_folder: Path, says: Say, word: str
) -> None:
    def reference(i: int) -> str:
        return str(2 * i) if i % 10 else "none"

    task = LmEvalTask(kind="lm_eval", name="arithmetic", tasks=(TASK,), max_tokens=64, include_path=str(task_folder))
    measured, imported = [], []
    for label, say in (("fp8", reference), ("w4a16", says)):  # fp8 is the reference of the synthetic run
        with (
            FakeServer(lambda body, say=say: Scripted(say(number_in(body["messages"][-1]["content"])))) as server,
            session_with(server, tmp_path / label) as session,
        ):
            result = run_lm_eval(session, task)
        suite = load_recipe(SuiteRecipe, "quick")
        measured.append(make_measurement(label, suite).model_copy(update={"tasks": (result,)}))
        evaluated_alone(task_folder, say, tmp_path / "alone" / label)
        imported.append(ImportedSide(label, tmp_path / "alone" / label, read_results(tmp_path / "alone" / label)[None]))
    gates = GateRecipe.model_validate(
        {"schema": 1, "name": "here", "gates": [{"kind": "score", "task": "arithmetic", "max_drop": 0.05}]}
    )
    here = judge(measured, gates, model=measured[0].model)
    measurements = measurements_of(imported[0], imported[1:])
    suite_there = ImportedSuite.model_validate(measurements[0].suite_recipe)
    there = judge(measurements, gates_on(load_recipe(GateRecipe, "default"), suite_there), model=measurements[0].model)
    assert score_of(there.verdicts) == score_of(here.verdicts)
    assert score_of(there.verdicts)["status"] == word
    (task_there,) = suite_there.tasks
    assert (task_there.name, task_there.metric, task_there.settings["num_fewshot"]) == (TASK, "exact_match", 0)
    assert measurements[0].imported is not None
    assert measurements[0].imported.harnesses == ("lm-eval 0.4.13",)
