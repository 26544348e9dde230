"""Suites through lm-eval: every name we ship exists, code runs only with leave, gsm8k's own files over local data."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from fake_server import FakeServer, Scripted
from lm_eval_questions import ANSWERS, REPLIES, lm_eval_alone, session_with

from assay.recipes.load import load_recipe, recipe_names
from assay.recipes.suite import LmEvalTask, SuiteRecipe
from assay_evaluate.tasks.lm_eval.load import CODE_EVAL, _configs, _manager, configs_of
from assay_evaluate.tasks.lm_eval.task import run_lm_eval

pytestmark = pytest.mark.slow

LM_EVAL_TASKS = [
    (suite, task)
    for suite in recipe_names("suites")
    for task in load_recipe(SuiteRecipe, suite).tasks
    if isinstance(task, LmEvalTask)
]


@pytest.mark.parametrize(("suite", "task"), LM_EVAL_TASKS, ids=lambda one: one if isinstance(one, str) else one.name)
def test_shipped_suites_name_tasks_that_exist_and_have_full_budgets(suite: str, task: LmEvalTask) -> None:
    """Read from lm-eval's index: no data set is loaded, no code of a task is run."""
    index = _manager(None, True)
    assert [name for name in task.tasks if name not in index.task_index] == []
    configs = _configs(index, task.tasks)
    assert len(configs) >= len(task.tasks)
    assert {config["output_type"] for config in configs.values()} == {"generate_until"}
    assert (
        any(config.get("unsafe_code", False) for config in configs.values()) is task.allow_code_execution is (suite == "code")
    )
    assert task.max_tokens >= 16384
    if task.metric is not None:
        assert all(task.metric in [one["metric"] for one in config["metric_list"]] for config in configs.values())


def test_groups_and_tags_are_opened() -> None:
    index = _manager(None, True)
    assert len(_configs(index, ["mmlu_pro"])) == 14
    assert {"mgsm_native_cot_de", "mgsm_en_cot_de"} <= set(_configs(index, ["mgsm_cot_native"]))


def test_a_task_of_ones_own_comes_before_lm_evals_of_that_name(tmp_path: Path) -> None:
    """Also where another name is lm-eval's, so that its index is needed; that index stays as it is for others."""
    (tmp_path / "mine.yaml").write_text("task: gsm8k\ndataset_path: mine\ntag: mgsm_cot_native\noutput_type: generate_until\n")
    task = LmEvalTask(kind="lm_eval", name="x", tasks=("gsm8k", "mmlu_pro"), max_tokens=64, include_path=str(tmp_path))
    result, candidate = configs_of(task), _configs(_manager(None, True), ["gsm8k", "mmlu_pro"])
    assert len(result) == 15 and result["gsm8k"]["dataset_path"] == "mine"
    assert candidate["gsm8k"]["dataset_path"] == "openai/gsm8k"
    assert {name: one for name, one in result.items() if name != "gsm8k"} == {
        name: one for name, one in candidate.items() if name != "gsm8k"
    }
    tagged = task.model_copy(update={"tasks": ("mgsm_cot_native", "mmlu_pro_law")})  # a tag, too, is the folder's alone
    assert configs_of(tagged).keys() == {"gsm8k", "mmlu_pro_law"}


# ------------------------------------------------------------------------------------------------ code
@pytest.fixture
def code_folder(tmp_path: Path) -> Path:
    """A task that is marked as running code, and whose own file leaves a mark when it is imported."""
    (tmp_path / "data.jsonl").write_text('{"question": "Write one."}\n{"question": "Write two."}\n')
    (tmp_path / "code.yaml").write_text(
        f"""task: local_code
dataset_path: json
dataset_kwargs: {{data_files: {{test: {tmp_path / "data.jsonl"}}}, cache_dir: {tmp_path / "cache"}}}
unsafe_code: true
output_type: generate_until
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_target: "1"
process_results: !function marks.run
metric_list: [{{metric: passed, aggregation: mean, higher_is_better: true}}]
"""
    )
    (tmp_path / "marks.py").write_text(
        f"""import os
from pathlib import Path

MARK = Path({str(tmp_path / "imported")!r})
MARK.write_text(os.environ["{CODE_EVAL}"])


def run(doc, results):
    return {{"passed": float(eval(results[0])) if os.environ["{CODE_EVAL}"] == "1" else 0.0}}
"""
    )
    return tmp_path


@pytest.mark.parametrize("name", ["local_code", "humaneval_instruct", "mbpp_instruct"])
def test_code_is_not_even_loaded_without_leave(code_folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CODE_EVAL, "1")  # a variable of the machine is no leave
    folder = str(code_folder) if name == "local_code" else None
    task = LmEvalTask(kind="lm_eval", name="code", tasks=(name,), max_tokens=64, include_path=folder)
    with FakeServer() as server, session_with(server, code_folder) as session:
        result = run_lm_eval(session, task)
    assert (result.num_items, result.accuracy, server.requests) == (0, None, [])
    assert result.note == (
        f"{name} runs the code that the model wrote, on this machine and without a sandbox; "
        "say `allow_code_execution: true` in the suite file if that is what you want"
    )
    assert not (code_folder / "imported").exists()


def test_code_runs_with_leave(code_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CODE_EVAL, raising=False)
    task = LmEvalTask(
        kind="lm_eval",
        name="code",
        tasks=("local_code",),
        max_tokens=64,
        include_path=str(code_folder),
        allow_code_execution=True,
    )
    with (
        FakeServer(lambda body: Scripted("2 - 1" if "one" in body["messages"][0]["content"] else "0")) as server,
        session_with(server, code_folder) as session,
    ):
        result = run_lm_eval(session, task)
    assert [item.correct for item in result.items] == [True, False]
    assert (code_folder / "imported").read_text() == "1"
    assert CODE_EVAL not in os.environ


def test_code_finds_no_secrets(code_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hunter2")
    task = LmEvalTask(
        kind="lm_eval", name="code", tasks=("local_code",), max_tokens=64, include_path=str(code_folder),
        allow_code_execution=True,
    )  # fmt: skip
    looks = "'PATH' in os.environ and 'HF_TOKEN' not in os.environ"
    with FakeServer(lambda body: Scripted(looks)) as server, session_with(server, code_folder) as session:
        result = run_lm_eval(session, task)
    assert [item.correct for item in result.items] == [True, True]
    assert os.environ["HF_TOKEN"] == "hunter2"


# ------------------------------------------------------------------------------------------------ gsm8k
MORE_REPLIES = {
    "7 * 8": "#### 56",
    "100 / 8": "The answer is 12.5.",
    "3 - 8": "The answer is -5.",
    "12 + 0": "**12**",
    "2 * 3": "I get 6; check: 3 * 2 = 6. The answer is 6. Q: another? 9",
    "40 + 2": "The answer is $42.00",
}
MORE_ANSWERS = {"7 * 8": "56", "100 / 8": "12.5", "3 - 8": "-5", "12 + 0": "12", "2 * 3": "6", "40 + 2": "42"}


@pytest.fixture(scope="module")
def gsm8k_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """lm-eval's own gsm8k files, unchanged but for where the data are."""
    import lm_eval.tasks

    folder = tmp_path_factory.mktemp("gsm8k")
    rows = [{"question": q, "answer": f"Think.\n#### {a}"} for q, a in {**ANSWERS, **MORE_ANSWERS}.items()]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = f"{{test: {folder / 'data.jsonl'}, train: {folder / 'data.jsonl'}}}"
    for file in ("gsm8k-cot-zeroshot", "gsm8k"):
        (folder / f"{file}.yaml").write_text(
            f"include: {Path(lm_eval.tasks.__file__).parent / 'gsm8k' / file}.yaml\n"
            f"task: local_{file.replace('-', '_')}\ntag: local\ndataset_path: json\ndataset_name: null\n"
            f"dataset_kwargs: {{data_files: {data}, cache_dir: {folder / 'cache'}}}\n"
        )
    return folder


def question_in(prompt: str) -> str:
    """The last question of a prompt in either wording."""
    return prompt.rsplit("Question: " if "Question: " in prompt else "Q: ", 1)[1].split("\n")[0]


@pytest.mark.parametrize("name", ["local_gsm8k_cot_zeroshot", "local_gsm8k"])
@pytest.mark.parametrize("which", ["flexible-extract", "strict-match"])
def test_gsm8k_is_scored_item_by_item_as_lm_eval_does(tmp_path: Path, gsm8k_folder: Path, name: str, which: str) -> None:
    """Twelve saved replies, both files and both filters of gsm8k; `gsm8k` with its five examples."""
    text = {**REPLIES, **MORE_REPLIES}
    asked: list[list[dict[str, str]]] = []

    def reply(body: dict[str, Any]) -> Scripted:
        asked.append(body["messages"])
        return Scripted(text[question_in(body["messages"][-1]["content"])])

    task = LmEvalTask(
        kind="lm_eval", name="gsm8k", tasks=(name,), max_tokens=512, include_path=str(gsm8k_folder),
        filter=None if which == "flexible-extract" else which,
    )  # fmt: skip
    with FakeServer(reply) as server, session_with(server, tmp_path) as session:
        result = run_lm_eval(session, task)
    alone = lm_eval_alone(gsm8k_folder, name, lambda prompt: text[question_in(prompt)])
    assert {int(item.item.split("/")[1]): item.correct for item in result.items} == alone[which]
    assert len(alone[which]) == 12
    assert 0 < sum(alone[which].values()) < 12
    assert {len(messages) for messages in asked} == {1 if name.endswith("zeroshot") else 11}
    assert result.note == f"{name} scored by exact_match after {which}"


@pytest.mark.parametrize(
    ("more", "note"),
    [
        ({"filter": "strict"}, "local_gsm8k has no filter 'strict'; it has strict-match, flexible-extract"),
        ({"metric": "f1"}, "local_gsm8k has no metric 'f1'; it has exact_match"),
    ],
)
def test_unknown_metric_or_filter(tmp_path: Path, gsm8k_folder: Path, more: dict[str, str], note: str) -> None:
    task = LmEvalTask.model_validate(
        {"kind": "lm_eval", "name": "x", "tasks": ["local_gsm8k"], "max_tokens": 64, "include_path": str(gsm8k_folder), **more}
    )
    with FakeServer() as server, session_with(server, tmp_path) as session:
        result = run_lm_eval(session, task)
    assert (result.num_items, result.note) == (0, note)


@pytest.mark.parametrize(
    ("dataset_name", "language"), [("zh", "zh"), ("main", "und"), ("default", "und"), (None, "und"), ("de", "de")]
)
def test_language_of_a_part(dataset_name: str | None, language: str) -> None:
    from assay_evaluate.tasks.lm_eval.task import _language

    assert _language(dataset_name) == language
