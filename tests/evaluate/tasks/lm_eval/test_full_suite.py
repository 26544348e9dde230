"""Every lm-eval task that suites `full` and `languages` name: its own files, over local rows, asked and scored."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_server import FakeServer, Scripted
from lm_eval_questions import session_with

from assay.recipes.load import load_recipe
from assay.recipes.suite import LmEvalTask, SuiteRecipe
from assay_evaluate.tasks.lm_eval.load import _configs, _manager, load_tasks
from assay_evaluate.tasks.lm_eval.task import run_lm_eval

pytestmark = pytest.mark.slow

Row = dict[str, Any]
OPTIONS = [f"option {letter}" for letter in "ABCDEFGHIJ"]


def choice(i: int) -> Row:
    """MMLU-Pro's columns, and MMLU-ProX's; the right one is B."""
    cot = "A: Let's think step by step. It is B. The answer is (B)."
    row = {"question": f"Which is it, {i}?", "options": OPTIONS, "answer": "B", "category": "math", "cot_content": cot}
    return row | {f"option_{number}": text for number, text in enumerate(OPTIONS)}


def grade_school(i: int) -> Row:
    return {"question": f"{i} + 5?", "answer": None, "answer_number": i + 5, "equation_solution": None}


def gpqa(i: int) -> Row:
    wrong = {f"Incorrect Answer {number}": f"wrong {number} of {i}" for number in (1, 2, 3)}
    return {"Question": f"Which, {i}?", "Correct Answer": f"right of {i}", **wrong}


def letter_of_the_right_one(prompt: str) -> str:
    result = re.search(r"\(([A-D])\) right of \d", prompt)
    assert result is not None
    return f"It cannot be another. The answer is ({result[1]})."


def says_what_the_filter_wants(name: str) -> str:
    """MMLU-ProX takes the answer from a sentence in the language of the question."""
    [config] = _configs(_manager(None, True), [name]).values()
    pattern: str = config["filter_list"][0]["filter"][0]["regex_pattern"]
    return pattern.replace(r"\(?([ABCDEFGHIJ])\)?", "(B)")


ROWS: dict[str, tuple[Callable[[int], Row], Callable[[str, str], str]]] = {
    # lm-eval's name begins with -> (columns of row i, the right reply to a prompt of task `name`); a reply "none" is wrong
    "gsm8k": (lambda i: {"question": f"{i} + 5?", "answer": f"Add.\n#### {i + 5}"}, lambda name, prompt: sum_in(prompt)),
    "minerva_math500": (
        lambda i: {"problem": f"What is half of {i}?", "solution": f"It is $\\boxed{{\\frac{{{i}}}{{2}}}}$.", "answer": "-"},
        lambda name, prompt: f"Half of it is $\\boxed{{{int(last_number(prompt)) / 2}}}$",  # 0.5 is \frac{1}{2}
    ),
    "aime24": (
        lambda i: {"ID": f"{i}", "Problem": f"{i} + 5?", "Solution": "", "Answer": i + 5},
        lambda name, prompt: f"\\boxed{{{sum_in(prompt)}}}",
    ),
    "aime25": (
        lambda i: {"problem": f"{i} + 5?", "answer": f"{i + 5}"},
        lambda name, prompt: f"\\boxed{{{sum_in(prompt)}}}",
    ),
    "gpqa": (gpqa, lambda name, prompt: letter_of_the_right_one(prompt)),
    "mmlu_pro_": (choice, lambda name, prompt: "I see. The answer is (B)."),
    "ifeval": (
        lambda i: {
            "key": i, "prompt": f"Write four words about {i}.", "instruction_id_list": ["length_constraints:number_words"],
            "kwargs": [{"relation": "at least", "num_words": 4}],
        },
        lambda name, prompt: "these are four words",
    ),
    "mgsm": (grade_school, lambda name, prompt: f"so {sum_in(prompt)}"),
    "mmlu_prox": (choice, lambda name, prompt: says_what_the_filter_wants(name)),
}  # fmt: skip


def last_number(prompt: str) -> str:
    return re.findall(r"\d+", prompt)[-1]


def sum_in(prompt: str) -> str:
    return str(int(re.findall(r"(\d+) \+ 5\?", prompt)[-1]) + 5)


def leaves() -> list[tuple[LmEvalTask, str]]:
    """Every task named, with one leaf of what is a group (mathematics of 14 subjects)."""
    result = []
    for suite in ("full", "languages"):
        for task in load_recipe(SuiteRecipe, suite).tasks:
            if isinstance(task, LmEvalTask):
                result += [(task, f"{name}_math" if name.startswith("mmlu_pro") else name) for name in task.tasks]
    return result


def local_copy(folder: Path, name: str, rows: Callable[[int], Row]) -> str:
    """lm-eval's own file for `name`, unchanged but for where the data are; the name of the copy."""
    config = _configs(_manager(None, True), [name])[name]
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(rows(i)) + "\n" for i in range(1, 7)))
    splits = {
        config[kind] for kind in ("test_split", "training_split", "validation_split", "fewshot_split") if config.get(kind)
    }
    files = ", ".join(f"{split}: {data}" for split in sorted(splits))
    original = _manager(None, True).task_index[name].yaml_path
    (folder / "copy.yaml").write_text(
        f"include: {original}\ntask: local_{name}\ntag: local\ndataset_path: json\ndataset_name: null\n"
        f"dataset_kwargs: {{data_files: {{{files}}}, cache_dir: {folder / 'cache'}}}\n"
    )
    return f"local_{name}"


@pytest.mark.parametrize(("task", "name"), leaves(), ids=lambda one: one if isinstance(one, str) else one.name)
def test_a_task_by_name_is_built_asked_and_scored(tmp_path: Path, task: LmEvalTask, name: str) -> None:
    rows, right = next(made for prefix, made in reversed(ROWS.items()) if name.startswith(prefix))
    local = task.model_copy(update={"tasks": (local_copy(tmp_path, name, rows),), "include_path": str(tmp_path)})
    asked = 0

    def reply(body: dict[str, Any]) -> Scripted:
        nonlocal asked
        asked += 1
        prompt = body["messages"][-1]["content"]
        is_wrong = re.search(r"\b2\b(?! tokens)", prompt.rsplit("Question", 1)[-1].split("\n(A)")[0]) is not None
        return Scripted("none" if is_wrong else right(name, prompt), reasoning="I think.")

    with FakeServer(reply) as server, session_with(server, tmp_path) as session:
        result = run_lm_eval(session, local)
    assert [item.correct for item in result.items] == [True, False, True, True, True, True], result.note
    assert asked == 6
    assert (result.num_truncated, result.num_failed) == (0, 0)


def test_what_a_task_draws_at_random_is_the_same_in_every_run(tmp_path: Path) -> None:
    """gpqa shuffles its choices with Python's own generator while it is loaded: unseeded, no two runs ask the same question."""
    name = local_copy(tmp_path, "gpqa_diamond_cot_zeroshot", gpqa)
    observed = []
    for number in range(3):
        task = LmEvalTask(kind="lm_eval", name="gpqa", tasks=(name,), max_tokens=64, include_path=str(tmp_path))
        random.seed(number)
        before = random.getstate()
        [loaded] = load_tasks(task)["tasks"].values()
        assert random.getstate() == before  # nor does it disturb anybody else's
        observed.append([doc["answer"] for doc in loaded.eval_docs])
    assert observed[0] == observed[1] == observed[2]
    assert len(set(observed[0])) > 1
