"""Scorers never raise: whatever text, tool call or trajectory a model writes is right or wrong, and can be written down."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fake_server import FakeServer, Scripted
from lm_eval_questions import session_with

from assay.recipes.suite import ArithmeticTask
from assay.records.base import canonical_json
from assay.records.measurement import TaskResult
from assay_evaluate.asking.language import is_wrong_script
from assay_evaluate.client.journal import Reply
from assay_evaluate.client.truncation import ends_in_loop
from assay_evaluate.tasks.generated import run_generated
from assay_evaluate.tasks.items import arithmetic_item, extract_answer, score
from assay_evaluate.tasks.ruler.items import share_found
from assay_evaluate.tasks.swebench.trajectories import exit_of, measure, read_trajectory, settle
from assay_evaluate.tasks.tools.calls import answer_of, is_correct, judge
from assay_evaluate.tasks.tools.questions import tool_question

DEEP = "[" * 100_000 + "]" * 100_000
NESTED = "[" * 900 + "]" * 900
"""As deep as Python's parser goes; what walks through it afterwards goes less deep."""
TEXTS = {
    "empty": "", "spaces": " \n\t ", "a number of 5,000 digits": "#### " + "9" * 5000, "digits of another script": "#### ٤٢",
    "a sign": "#### -", "marks only": "####" * 999, "zero bytes": "#### \0", "replacement": "#### \ufffd7",
    "deep JSON": DEEP, "nested JSON": NESTED, "infinity": "#### 1e999 NaN Infinity", "one long line": "x" * 300_000,
    "open marks": "\\boxed{" * 9999, "brackets": "(" * 50_000, "commas": "#### " + "1," * 5000,
}  # fmt: skip


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_texts(text: str) -> None:
    item = arithmetic_item("eval-x", 0, "en", 2)
    assert item.answer is not None
    assert score(item, text) in (True, False)
    assert score(item, f"{text} #### {item.answer}") is True
    extract_answer(text)
    assert 0 <= share_found(text, ["7"], "all") <= 1 and share_found(text, ["7"], "any") in (0.0, 1.0)
    is_wrong_script(text, "x", "y")
    ends_in_loop(text)


ARGUMENTS: dict[str, Any] = {
    "none": None, "a number": 5, "a list": [], "no JSON": "{", "NaN": '{"x": NaN}', "infinite": '{"x": 1e999}',
    "5,000 digits": f'{{"x": {"9" * 5000}}}', "4,000 digits": f'{{"x": {"9" * 4000}}}', "deep": DEEP, "nested": NESTED,
    "nested objects": '{"x": ' * 900 + "1" + "}" * 900, "a lone surrogate": '{"x\\ud800": "\\udfff"}',
    "nested in an object": '{"x": ' + NESTED + "}", "a list of text": '["x"]', "text": '"x"', "empty": "",
}  # fmt: skip


@pytest.mark.parametrize("arguments", ARGUMENTS.values(), ids=ARGUMENTS)
@pytest.mark.parametrize("is_right_tool", [True, False])
def test_tool_calls(arguments: Any, is_right_tool: bool) -> None:
    question = tool_question("eval-x", 0, 4, None, 0.0)
    name = question.expected_tool if is_right_tool else "\ufffd"
    reply = Reply("answered", tool_calls=({"function": {"name": name, "arguments": arguments}},), has_tool_calls=True)
    item = judge(question, reply)
    assert is_correct(item, reply) is False
    answer_of(reply, item).encode()
    item.model_dump_json()


@pytest.mark.parametrize("calls", [({},), ({"function": None},), ({"function": "f"},), ({"function": {"name": 5}},)])
def test_tool_calls_of_another_shape(calls: tuple[dict[str, Any], ...]) -> None:
    question = tool_question("eval-x", 0, 4, None, 0.0)
    reply = Reply("answered", tool_calls=calls, has_tool_calls=True)
    assert is_correct(judge(question, reply), reply) is False


# ------------------------------------------------------------------------------------------------ trajectories
def step(response: Any) -> dict[str, Any]:
    return {"role": "assistant", "extra": {"response": response}}


def answered(message: Any, **more: Any) -> dict[str, Any]:
    return step({"choices": [{"message": message}], **more})


ODD: list[Any] = [None, 5, "x", [], [None], {}, {"choices": None}, {"choices": [None]}, {"choices": [5]}, {"choices": "x"}]
TRAJECTORIES: list[Any] = [
    {}, {"messages": None}, {"messages": 5}, {"messages": [None, 5, "x", []]}, {"info": 5, "messages": []},
    {"info": {"submission": "a\ud800b"}, "messages": []}, {"info": {"submission": {"x": 1}}},
    {"messages": [{"extra": 5}]}, {"messages": [{"extra": {"interrupt_type": []}}]},
    *({"messages": [step(one)] * 6} for one in ODD),
    *({"messages": [answered(one)]} for one in ODD),
    *({"messages": [answered({"tool_calls": one})]} for one in (5, "x", [None], [5], [{"function": "f"}], [{"function": 5}])),
    *(
        {"messages": [answered({"tool_calls": [{"function": {"name": "bash", "arguments": one}}]})]}
        for one in ARGUMENTS.values()
    ),
    *({"messages": [answered({}, usage=one)]} for one in (5, [], {"prompt_tokens": "9"}, {"prompt_tokens": [1]})),
    *({"messages": [answered({}, metrics=one)]} for one in (5, {"speculative_decoding": 5}, {"speculative_decoding": {}})),
    {"messages": [{"extra": {"response": {}, "actions": 5}}] * 6},
    {"messages": [{"extra": {"response": {}, "actions": [5, {"command": json.loads(NESTED)}]}}] * 6},
    {"messages": [step({}), {"extra": {"raw_output": json.loads(NESTED), "returncode": {}}}] * 6},
]  # fmt: skip


@pytest.mark.parametrize("trajectory", TRAJECTORIES, ids=lambda trajectory: repr(trajectory)[:60])
def test_trajectories(trajectory: Any) -> None:
    for native in (True, False):
        result = measure(trajectory, native_tool_calls=native)
        assert result["num_valid_tool_calls"] in (0, None)
        canonical_json(result).encode()
    exit_of(trajectory)


@pytest.mark.parametrize(
    "text", [DEEP, "9" * 5000, "", "[]", '{"info": 5}', '{"info": {"exit_status": "Submitted", "submission": 5}}']
)
def test_files_of_trajectories(text: str, tmp_path: Path) -> None:
    """One that cannot be read is put aside and done again."""
    path = tmp_path / "i" / "i.traj.json"
    path.parent.mkdir()
    path.write_text(text)
    read_trajectory(path)
    kept = settle(tmp_path, "model")
    assert kept == {} or kept["i"]["model_patch"] == ""


# ------------------------------------------------------------------------------------------------ whole tasks
def saved(result: TaskResult) -> TaskResult:
    """As a measurement writes and reads it."""
    return TaskResult.model_validate_json(
        json.dumps(result.model_dump(mode="json"), allow_nan=False, ensure_ascii=False).encode()
    )


def test_a_task_of_hostile_replies(tmp_path: Path) -> None:
    """Nothing ends it, now or when it is scored from the journal again."""
    texts = [*TEXTS.values(), "\ud800"]
    task = ArithmeticTask(kind="arithmetic", name="a", num_items=len(texts), num_steps=(2,), max_tokens=9, languages=("en",))
    items = [arithmetic_item("eval-test", number, "en", 2) for number in range(len(texts))]
    by_prompt = {item.prompt: text for item, text in zip(items, texts, strict=True)}
    with FakeServer(lambda body: Scripted(by_prompt[body["messages"][-1]["content"]], output_tokens=1)) as server:
        for _ in range(2):
            with session_with(server, tmp_path) as session:
                result = saved(run_generated(session, task, items))
            assert (result.num_items, result.num_failed) == (len(texts), 0)
            assert [item.correct for item in result.items] == [False] * len(texts)
        assert server.count("/v1/chat/completions") == len(texts)
