"""What the items of a suite say is what is asked; what cannot be said here is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from assay.recipes.load import load_recipe
from assay.recipes.suite import ArithmeticTask, SuiteRecipe
from assay_evaluate.tasks.generated import arithmetic_items
from assay_evaluate.tasks.item_texts import item_texts
from assay_evaluate.tasks.tools.questions import tool_question

TASK = """
task: own_questions
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "Q: {{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: []}}
metric_list: [{{metric: exact_match}}]
"""


def test_generated_items_are_those_that_the_quick_suite_asks() -> None:
    suite = load_recipe(SuiteRecipe, "quick")
    result = {task.task: task for task in item_texts(suite, may_download=False)}
    arithmetic = suite.tasks[0]
    assert isinstance(arithmetic, ArithmeticTask)
    assert result["arithmetic"].texts == [item.prompt for item in arithmetic_items(arithmetic, suite.seed)]
    assert result["tools"].texts is not None and len(result["tools"].texts) == 4 * 2 * 15
    assert result["tools"].texts[0] == tool_question(suite.seed, 0, 1, None, 0.25, "en").question
    for sized in ("needle", "codes-en", "ruler", "needle-grid"):
        assert result[sized].texts is None and result[sized].reason == (
            "made for the tokenizer that is asked; a run knows those that it asked"
        )


def test_items_of_lm_eval_are_read_from_the_data_sets_that_are_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"question": f"What is {n} + {n}?", "answer": str(2 * n)}) + "\n" for n in range(3)))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "own.yaml").write_text(TASK.format(data=data))
    base = {"schema": 1, "name": "mine", "seed": "eval-1", "acceptance": False}
    task = {
        "kind": "lm_eval",
        "name": "own",
        "tasks": ["own_questions"],
        "include_path": str(tmp_path / "tasks"),
        "max_tokens": 8,
    }
    (result,) = item_texts(SuiteRecipe.model_validate({**base, "tasks": [task]}), may_download=False)
    assert result.texts == ["Q: What is 0 + 0?", "Q: What is 1 + 1?", "Q: What is 2 + 2?"]
    monkeypatch.setattr("assay_evaluate.tasks.item_texts._has_data_sets", lambda: False)
    monkeypatch.setattr(
        "assay_evaluate.tasks.item_texts.load_tasks", lambda task: pytest.fail("a data set that is not here was loaded")
    )
    full = {one.task: one for one in item_texts(load_recipe(SuiteRecipe, "full"), may_download=False)}
    assert full["gpqa-diamond"].texts is None and full["gpqa-diamond"].reason == "its data set is not on this machine"
