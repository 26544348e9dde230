"""`--budget-check`: twenty items of every task on the reference say whether its budgets suffice."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from blank_records import blank_fingerprint, item_result
from fake_server import FakeServer, Scripted
from typer.testing import CliRunner

import assay_cli
from assay.errors import MeasureError
from assay.recipes.gate import GateRecipe
from assay.recipes.load import load_recipe, recipe_names
from assay.recipes.model import Serving
from assay.recipes.profile import ProfileRecipe
from assay.recipes.suite import ArithmeticTask, SuiteRecipe
from assay.records.measurement import BudgetCheck, ItemResult
from assay_evaluate.asking.session import task_result
from assay_evaluate.run import budget_check
from assay_evaluate.run.budget_check import check_budgets, first_items, judge_budget
from assay_evaluate.run.candidate import Candidate
from assay_evaluate.run.evaluate import evaluate
from assay_evaluate.serving.server import ServerSpec
from assay_evaluate.statistics.proportions import clopper_pearson
from assay_evaluate.tasks.generated import arithmetic_items

SUITE = SuiteRecipe.model_validate(
    {
        "schema": 1, "name": "small", "seed": "eval-small", "acceptance": False,
        "tasks": [
            {"kind": "arithmetic", "name": "arithmetic", "num_items": 30, "num_steps": [2], "max_tokens": 64},
            {"kind": "ruler", "name": "ruler", "tasks": ["niah_single_1"], "num_items": 25, "lengths_tokens": [600],
             "max_tokens": 20},
        ],
        "divergence": {"num_documents": 3, "max_tokens": 40},
    }
)  # fmt: skip
QUICK = load_recipe(GateRecipe, "quick")
GATES = QUICK.model_copy(update={"gates": tuple(gate for gate in QUICK.gates if gate.kind != "score" or gate.required)})
"""Those of quick that are required: a task without a gate is required as well."""
PROFILE = load_recipe(ProfileRecipe, "cpu-emulated")
ARITHMETIC = SUITE.tasks[0]
assert isinstance(ARITHMETIC, ArithmeticTask)
ANSWERS = {item.prompt: item.answer for item in arithmetic_items(ARITHMETIC, SUITE.seed)}


def reply(body: dict[str, Any]) -> Scripted:
    """Sums in some ten tokens; needles with more words than there is room for."""
    prompt = body["messages"][-1]["content"]
    if prompt in ANSWERS:
        return Scripted(f"So: #### {ANSWERS[prompt]}")
    return Scripted("x" * body["max_tokens"], finish_reason="length")


@pytest.fixture
def start() -> Callable[..., Any]:
    servers: list[FakeServer] = []

    @contextmanager
    def start(spec: ServerSpec, on_progress: Callable[[str], None]) -> Iterator[FakeServer]:
        with FakeServer(reply) as server:
            server.fingerprint = blank_fingerprint(server="scripted", hardware={"cpu": "x"})
            servers.append(server)
            yield server

    start.servers = servers  # type: ignore[attr-defined]
    return start


def checkpoint_in(tmp_path: Path) -> Path:
    folder = tmp_path / "reference"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"vocab_size": 128}))
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def test_twenty_items_of_every_task_and_what_they_say(tmp_path: Path, start: Any) -> None:
    folder = checkpoint_in(tmp_path)
    common: dict[str, Any] = {
        "suite": SUITE, "profile": PROFILE, "serving": Serving(), "run_dir": tmp_path / "run", "start_server": start,
    }  # fmt: skip
    checked = check_budgets("tiny", Candidate("fp8", folder, True), gates=GATES, **common)
    arithmetic, ruler = checked.tasks
    assert (arithmetic.num_replies, arithmetic.num_truncated, arithmetic.suffices) == (20, 0, True)
    assert (ruler.num_replies, ruler.num_truncated, ruler.suffices) == (20, 20, False)
    assert ruler.truncated_share == clopper_pearson(20, 20)
    longest = max(len(f"So: #### {answer}") for answer in list(ANSWERS.values()))
    assert arithmetic.longest_reply_tokens == longest
    assert arithmetic.detail == (
        f"0 of 20 cut off (interval of at least 95 %: 0.0 to 16.8 %), longest reply {longest} of 64 tokens: suffices"
    )  # fmt: skip
    assert ruler.detail == (
        "20 of 20 cut off (interval of at least 95 %: 83.2 to 100.0 %), longest reply 20 of 20 tokens: too small, at most 5 % "
        "may be; raise max_tokens"
    )
    assert not checked.suffices
    assert checked.suite_sha256 == SUITE.sha256
    # The whole run asks only the rest: 60 and 25 items, of which 20 and 20 are answered. Twice: the noise floor asks again; and
    # 24 questions once more.
    chats = start.servers[0].count("/v1/chat/completions")
    assert chats == 40
    evaluate("tiny", [Candidate("fp8", folder, True)], foresee=lambda spec: None, **common)
    asked = [
        body for path, body in start.servers[1].requests if path == "/v1/chat/completions" and "return_token_ids" not in body
    ]
    assert len(asked) == 2 * (60 + 25) - 40 + 24


@pytest.mark.parametrize(
    ("tokens", "context", "end"),
    [
        ([10] * 20, None, "suffices"),
        ([10] * 19 + [80], None, "suffices, but only just"),
        ([10] * 18 + [100] * 2, None, "too small, at most 5 % may be; raise max_tokens"),
        ([10] * 18 + [90] * 2, 100, "too small, at most 5 % may be; the context is too short: raise max-model-len"),
        ([10] * 19 + [100], None, "suffices, but only just"),  # 5 % of twenty
        ([], None, "no reply to judge by: the task has no items"),
    ],
)
def test_one_task(tokens: list[int], context: int | None, end: str) -> None:
    """Budget of 100 tokens; prompts of ten in a context of 100, where there is one."""

    def item(number: int, count: int) -> ItemResult:
        by: Any = "context" if context is not None and count == 90 else "budget" if count >= 100 else None
        return item_result(str(number), truncated=by is not None, truncated_by=by, prompt_tokens=10, output_tokens=count)

    result = task_result("x", "needle", [item(*one) for one in enumerate(tokens)], 100)
    judged = judge_budget(result, 0.05)
    assert judged.detail.endswith(end)
    assert judged.suffices is ("suffices" in end)


def test_replies_that_end_by_themselves_are_no_fault_of_the_budget() -> None:
    """What tiny-glm does on RULER: 7 of 26 replies end without an answer, the longest at 190 of 512 tokens."""

    def item(number: int) -> ItemResult:
        by: Any = "empty" if number < 7 else None
        return item_result(
            str(number), correct=False, truncated=by is not None, truncated_by=by, prompt_tokens=10, output_tokens=190
        )

    judged = judge_budget(task_result("ruler", "ruler", [item(number) for number in range(26)], 512), 0.05)
    assert judged.detail == (
        "0 of 26 cut off (interval of at least 95 %: 0.0 to 13.2 %), longest reply 190 of 512 tokens, 7 ended without an "
        "answer, which no budget changes: suffices"
    )
    assert (judged.suffices, judged.num_truncated, judged.truncated_share) == (True, 7, clopper_pearson(0, 26))


def test_a_task_whose_gate_is_not_required_fails_nothing(tmp_path: Path, start: Any) -> None:
    checked = check_budgets(
        "tiny", Candidate("fp8", checkpoint_in(tmp_path), True), gates=QUICK, suite=SUITE, profile=PROFILE, serving=Serving(),
        run_dir=tmp_path / "run", start_server=start,
    )  # fmt: skip
    assert [(task.task, task.suffices, task.is_required) for task in checked.tasks] == [
        ("arithmetic", True, True), ("ruler", False, False),
    ]  # fmt: skip
    assert checked.suffices


@pytest.mark.slow
@pytest.mark.parametrize("name", recipe_names("suites"))
def test_every_suite_has_twenty_items_of_a_task_and_not_many_more(name: str) -> None:
    """`limit` counts for each of lm-eval's tasks, `num_items` for each cell."""
    from assay_evaluate.tasks.cells import num_cells
    from assay_evaluate.tasks.lm_eval.load import configs_of

    suite = load_recipe(SuiteRecipe, name)
    replies = [task for task in suite.tasks if task.kind != "swe"]  # a trajectory is no reply: its steps have a budget each
    for task, few in zip(replies, first_items(suite, 20).tasks, strict=True):
        if few.kind == "lm_eval":
            num_items = (few.limit or 0) * len(configs_of(few))
            assert 20 <= num_items < 20 + len(configs_of(few))
        else:
            num_items = few.num_items * num_cells(few)
            assert 20 <= num_items < max(20 + num_cells(few), 2 * num_cells(few))
        assert few.max_tokens == task.max_tokens


def test_a_suite_of_trajectories_has_nothing_to_check_and_starts_no_server(tmp_path: Path) -> None:
    suite, gates = load_recipe(SuiteRecipe, "swe-tiny"), load_recipe(GateRecipe, "swe-tiny")
    with pytest.raises(MeasureError, match=r"suite swe-tiny: nothing to check: .*leave out --budget-check"):
        check_budgets(
            "m", Candidate("bf16", tmp_path / "no-checkpoint", is_reference=True), suite=suite, gates=gates,
            profile=load_recipe(ProfileRecipe, "cpu-emulated"), serving=Serving(), run_dir=tmp_path / "run",
        )  # fmt: skip
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("max_truncated", "code"), [(0.0, 1), (1.0, 0)])
def test_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_truncated: float, code: int) -> None:
    cut = item_result(
        "1", correct=False, truncated=True, truncated_by="budget", finish_reason="length", prompt_tokens=10, output_tokens=8
    )
    checked = BudgetCheck(
        model="tiny", label="fp8", checkpoint_sha256="c", suite="quick", suite_sha256="s",
        tasks=(judge_budget(task_result("x", "needle", [cut], 8), max_truncated),),
    )  # fmt: skip
    asked: list[Any] = []
    monkeypatch.setattr(budget_check, "check_budgets", lambda *given, **named: asked.append(given) or checked)
    for name in ("a", "b"):
        shutil.copytree(Path(__file__).resolve().parents[3] / "examples" / "tiny_glm" / "checkpoint", tmp_path / name)
    arguments = ["evaluate", "--reference", str(tmp_path / "a"), "--suite", "quick"]
    arguments += ["--profile", "cpu-emulated", "--runs", str(tmp_path / "runs"), "--budget-check", "--json"]
    result = CliRunner().invoke(assay_cli.app, arguments)
    assert result.exit_code == code, result.output
    assert BudgetCheck.model_validate_json(result.stdout) == checked
    assert [given[1].label for given in asked] == ["a"]
    assert not list((tmp_path / "runs").rglob("gates*.json"))
