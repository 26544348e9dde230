"""The truncation ledger: each reason by itself, and a planted budget of eight tokens through measurements and gates."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from blank_records import item_result
from fake_server import Scripted
from scripted_world import World, make_folders, pair_of

from assay.quantities import percent_short
from assay.recipes.gate import GateRecipe
from assay.recipes.model import Serving
from assay.recipes.suite import ArithmeticTask, SuiteRecipe
from assay.records.measurement import ItemResult, Measurement
from assay_evaluate.client.journal import Reply
from assay_evaluate.client.truncation import count_thinking_cut, count_truncations, ends_in_loop, is_looping, truncation_of
from assay_evaluate.statistics.paired import paired_difference
from assay_evaluate.tasks.generated import arithmetic_items
from assay_evaluate.verdicts.gates import judge

PLAIN = Reply(status="answered", text="#### 7", finish_reason="stop", prompt_tokens=100, output_tokens=20)


@pytest.mark.parametrize(
    ("changes", "parser", "reason"),
    [
        ({}, False, None),
        ({}, True, None),
        ({"finish_reason": "length"}, False, "length"),
        ({"output_tokens": 50}, False, "budget"),
        ({"output_tokens": 50, "finish_reason": "length"}, True, "budget"),
        ({"output_tokens": 49}, False, None),
        ({"prompt_tokens": 180}, False, "context"),  # the server clamped max_tokens to 20 without a word
        ({"prompt_tokens": 179}, False, None),
        ({"output_tokens": 50, "finish_reason": "tool_calls", "has_tool_calls": True}, True, "budget"),
        ({"text": " \n", "reasoning": "I think"}, True, "empty"),
        ({"text": "", "reasoning": "I think"}, False, "empty"),  # whoever has thinking apart has a parser, named or not
        ({"text": ""}, False, None),
        ({"text": "<think>I think"}, False, "empty"),
        ({"text": "<think>I think</think> #### 7"}, False, None),
        ({"text": "", "reasoning": "2 + 5.\n#### 7"}, False, "reasoning_only"),
        ({"text": "", "reasoning": "2 + 5.\n#### 7", "finish_reason": "length"}, True, "length"),
        ({"text": "", "reasoning": "#### is what I must write, so let me see." + " and 7" * 60}, True, "empty"),
        ({"text": "", "reasoning": "So it is \\boxed{7}."}, True, "reasoning_only"),
        ({"text": "", "reasoning": "So the final answer is (B)"}, True, "reasoning_only"),
        ({"finish_reason": "repetition"}, False, "length"),
        ({"text": "", "has_tool_calls": True, "finish_reason": "tool_calls"}, True, None),
        ({"output_tokens": None}, False, None),
        ({"prompt_tokens": None, "output_tokens": 50}, False, "budget"),
        ({"status": "failed", "text": "", "finish_reason": "length"}, True, None),
    ],
)
def test_reasons(changes: dict[str, Any], parser: bool, reason: str | None) -> None:
    """Budget of 50 tokens, context of 200."""
    reply = dataclasses.replace(PLAIN, **changes)
    assert truncation_of(reply, max_tokens=50, max_model_len=200, has_reasoning_parser=parser) == reason


def test_counts() -> None:
    def item(reason: Any, thinking_tokens: int | None = None) -> ItemResult:
        told = {"prompt_tokens": 1, "output_tokens": 9, "thinking_tokens": thinking_tokens}
        return item_result("x", truncated=reason is not None, truncated_by=reason, **told)

    items = [item("empty", 3), item(None, 8), item("budget", 9), item("empty"), item(None)]
    assert count_truncations(items) == {"budget": 1, "empty": 2}
    assert count_thinking_cut(items, 8) == 2
    assert count_thinking_cut(items, None) is None
    assert count_thinking_cut([item(None)], 8) is None


# ------------------------------------------------------------------------------------------------ end to end
def suite_of(max_tokens: int, **more: Any) -> SuiteRecipe:
    return SuiteRecipe.model_validate(
        {
            "schema": 1, "name": "small", "seed": "eval-small", "acceptance": False,
            "tasks": [{"kind": "arithmetic", "name": "arithmetic", "num_items": 40, "num_steps": [2],
                       "max_tokens": max_tokens, **more}],
        }
    )  # fmt: skip


GATES = GateRecipe.model_validate(
    {
        "schema": 1, "name": "small",
        "gates": [{"kind": "score", "task": "arithmetic", "max_drop": 0.05}, {"kind": "truncation", "max_share": 0.05}],
    }
)  # fmt: skip
ARITHMETIC = suite_of(64).tasks[0]
assert isinstance(ARITHMETIC, ArithmeticTask)
ANSWERS = {item.prompt: item.answer for item in arithmetic_items(ARITHMETIC, "eval-small")}
REPLY = "Step by step. #### "


def obedient(body: dict[str, Any]) -> Scripted:
    """Every answer right, and no more characters (tokens, to this server) than it was allowed."""
    text = REPLY + (ANSWERS[body["messages"][-1]["content"]] or "")
    cut = text[: body["max_tokens"]]
    return Scripted(cut, finish_reason="length" if len(cut) < len(text) else "stop")


def rambling(body: dict[str, Any]) -> Scripted:
    """Uses up its budget, and says `stop`."""
    return Scripted("x" * body["max_tokens"])


def thinking(body: dict[str, Any]) -> Scripted:
    """The end came inside thinking: reasoning, no answer, `stop`."""
    return Scripted("", reasoning="Let me see", output_tokens=10)


def run(
    tmp_path: Path, suite: SuiteRecipe, replies: dict[str, Callable[[dict[str, Any]], Scripted]], parser: str | None = None
) -> tuple[list[Measurement], World]:
    """Reference, its repeat and a candidate; `replies`: by folder name, `obedient` where none is given."""
    world, folders = World(), make_folders(tmp_path)
    world.reply = dict.fromkeys(folders, obedient) | replies
    serving = Serving(reasoning_parser=parser)
    return world.measure(tmp_path / "run", pair_of(folders), suite, serving=serving, foresee=lambda spec: None), world


def test_a_budget_of_eight_tokens_is_not_measured_and_not_zero(tmp_path: Path) -> None:
    measurements, _ = run(tmp_path, suite_of(8), {})
    for measured in measurements:
        (task,) = measured.tasks
        assert (task.num_items, task.num_truncated, task.truncated_by) == (80, 80, {"budget": 80})
        assert task.accuracy is not None
        assert task.accuracy.value == 0  # kept as it was scored; no verdict is made of it
    report = judge(measurements, GATES, model="tiny")
    assert report.overall == {"fp8-repeat": "NOT MEASURED", "w4a16": "NOT MEASURED"}
    assert [(v.gate, v.candidate, v.status) for v in report.verdicts] == [
        ("score arithmetic", "fp8-repeat", "NOT MEASURED"),
        ("truncation", "fp8-repeat", "NOT MEASURED"),
        ("score arithmetic", "w4a16", "NOT MEASURED"),
        ("truncation", "w4a16", "NOT MEASURED"),
    ]
    assert report.verdicts[2].detail == (
        "80 of 80 replies of fp8 itself to arithmetic are cut off at 8 tokens (100 %; above 1.7 % at 97.5 %): "
        "the score measures the budget, not the model; raise max_tokens."
    )
    again = Measurement.load(tmp_path / "run" / "measurements" / "w4a16.json")
    assert again == measurements[2]


def test_enough_budget_is_measured(tmp_path: Path) -> None:
    measurements, _ = run(tmp_path, suite_of(64), {})
    assert [m.tasks[0].num_truncated for m in measurements] == [0, 0, 0]
    assert judge(measurements, GATES, model="tiny").overall == {"fp8-repeat": "PASS", "w4a16": "PASS"}


def test_replies_that_fill_their_budget_and_say_stop_are_a_fault_of_the_serving(tmp_path: Path) -> None:
    """The budget is enough for the reference; a gateway before the candidate says `stop` of all that fill it."""
    measurements, _ = run(tmp_path, suite_of(len(REPLY) + 3), {"candidate": rambling})
    assert measurements[2].tasks[0].truncated_by == {"budget": 80}
    report = judge(measurements, GATES, model="tiny")
    assert report.overall == {"fp8-repeat": "PASS", "w4a16": "NOT MEASURED"}
    assert [finding.rule for finding in report.serving] == ["stop at budget"]


def test_a_cut_that_only_the_candidate_has_and_nobody_admits(tmp_path: Path) -> None:
    """The budget is enough for the reference; the candidate's server says `stop`."""
    measurements, _ = run(tmp_path, suite_of(len(REPLY) + 3), {"candidate": thinking}, "deepseek_r1")
    assert measurements[0].tasks[0].num_truncated == 0
    assert measurements[2].tasks[0].truncated_by == {"empty": 80}
    assert {item.finish_reason for item in measurements[2].tasks[0].items} == {"stop"}
    report = judge(measurements, GATES, model="tiny")
    assert report.overall == {"fp8-repeat": "PASS", "w4a16": "FAIL"}
    assert report.verdicts[3].detail == (
        "Is cut off or loops in 100 % of its replies to arithmetic (80 of 80), fp8 in none (95 % interval: 91.0 to 100.0 "
        "points more); 2 % more allowed."
    )


def swallowed(body: dict[str, Any]) -> Scripted:
    """A reasoning parser that takes the answer for thinking."""
    return Scripted("", reasoning=obedient(body).text)


def left_open(body: dict[str, Any]) -> Scripted:
    """No parser, and thinking that never ends: what stands at its end is no answer."""
    return Scripted(f"<think>{obedient(body).text}")


def in_text(body: dict[str, Any]) -> Scripted:
    """No parser, and thinking that ends; the number in it is another."""
    return Scripted(f"<think>#### 1</think>{obedient(body).text}")


def test_answers_that_a_parser_swallowed_and_thinking_without_one(tmp_path: Path) -> None:
    """No recipe names a parser."""
    for name, reply, accuracy, cut in (
        ("swallowed", swallowed, 0, {"reasoning_only": 80}),
        ("left_open", left_open, 1, {"empty": 80}),
        ("in_text", in_text, 1, {}),
    ):
        (tmp_path / name).mkdir()
        measurements, _ = run(tmp_path / name, suite_of(64), {"candidate": reply})
        task = measurements[2].tasks[0]
        assert task.accuracy is not None
        assert (task.accuracy.value, task.truncated_by) == (accuracy, cut), name


def looping(body: dict[str, Any]) -> Scripted:
    """Three sums in ten are begun and never ended."""
    text = obedient(body).text
    if sum(map(ord, body["messages"][-1]["content"])) % 10 >= 3:
        return Scripted(text)
    return Scripted(("Step by step. Let me see. Wait, " * 40)[: body["max_tokens"]], finish_reason="length")


def test_a_candidate_that_loops_where_the_reference_does_not_fails(tmp_path: Path) -> None:
    measurements, _ = run(tmp_path, suite_of(512), {"candidate": looping})
    num = sum(sum(map(ord, prompt)) % 10 < 3 for prompt in ANSWERS)
    assert [(m.tasks[0].num_truncated, m.tasks[0].num_loops) for m in measurements] == [(0, 0), (0, 0), (num, num)]
    report = judge(measurements, GATES, model="tiny")
    assert report.overall == {"fp8-repeat": "PASS", "w4a16": "FAIL"}
    verdict = report.verdicts[3]
    assert verdict.observed == paired_difference(num, 0, 80)
    low, high = 100 * verdict.observed.low, 100 * verdict.observed.high
    assert (verdict.gate, verdict.status, verdict.detail) == (
        "truncation", "FAIL",
        f"Loops in {percent_short(num / 80)} of its replies to arithmetic ({num} of 80), fp8 in none (95 % interval: "
        f"{low:.1f} to {high:.1f} points more); 2 % more allowed.",
    )  # fmt: skip


SENTENCE = "The pump on the left runs at 40 bar, so the valve opens after 12 s. "


@pytest.mark.parametrize(
    ("text", "is_loop"),
    [
        ("", False),
        ("x" * 63, False),
        ("x" * 64, True),
        ("Let me see. " + SENTENCE * 5, True),
        (SENTENCE * 3, False),
        (SENTENCE * 200 + "The answer is 4.", True),
        ("".join(f"Wait, check case {i}: the sum of both sides must then be even again. " for i in range(60)), True),
        ("".join(f"{i}: {i * 7919 % 100_003}, " for i in range(300)), False),
        ("".join(f"{chr(97 + i * 7 % 26)}{i * i % 97} " for i in range(300)), False),
        ("\n".join(f"| item {i} | {i * i} | {chr(97 + i % 26) * 3} |" for i in range(80)), False),
    ],
)  # fmt: skip
def test_what_repeats_itself_to_the_end(text: str, is_loop: bool) -> None:
    assert ends_in_loop(text) == is_loop


@pytest.mark.parametrize(
    ("changes", "cut_by", "budget", "found"),
    [
        ({"text": SENTENCE * 9}, None, None, False),  # it ended of its own accord
        ({"text": SENTENCE * 9}, "budget", None, True),
        ({"text": "#### 7", "reasoning": SENTENCE * 9, "thinking_tokens": 40}, None, 40, True),
        ({"text": "#### 7", "reasoning": SENTENCE * 9, "thinking_tokens": 39}, None, 40, False),
        ({"text": " ", "reasoning": SENTENCE * 9}, "empty", None, True),
        ({"text": "no two alike", "finish_reason": "repetition"}, "length", None, True),
        ({"status": "failed", "text": ""}, None, None, None),
    ],
)
def test_which_replies_loop(changes: dict[str, Any], cut_by: Any, budget: int | None, found: bool | None) -> None:
    assert is_looping(dataclasses.replace(PLAIN, **changes), cut_by, budget) is found


@pytest.mark.parametrize("parser", [None, "deepseek_r1"])
def test_thinking_and_answer_have_budgets_of_their_own_where_the_server_can(tmp_path: Path, parser: str | None) -> None:
    """vLLM's `thinking_token_budget`; it refuses the parameter without a reasoning parser."""
    measurements, world = run(tmp_path, suite_of(64, thinking_tokens=40, top_p=0.95, top_k=20, temperature=0.6), {}, parser)
    bodies = [
        body
        for servers in world.servers.values()
        for server in servers
        for path, body in server.requests
        if path == "/v1/chat/completions"
    ]
    sampling = {(body["temperature"], body["top_p"], body["top_k"], body["min_p"], body["max_tokens"]) for body in bodies}
    assert sampling == {(0.6, 0.95, 20, 0.0, 64)}
    assert {body.get("thinking_token_budget") for body in bodies} == {None if parser is None else 40}
    assert {m.tasks[0].thinking_budget_tokens for m in measurements} == {None if parser is None else 40}
    assert measurements[0].suite_recipe["tasks"][0]["thinking_tokens"] == 40


def test_the_report_says_what_a_greater_budget_would_not_mend() -> None:
    from synthetic_run import make_measurements

    from assay_reports.limits.scores import reasons_of_cuts

    task = make_measurements()[0].tasks[0]
    cut = task.model_copy(update={"truncated_by": {"budget": 4, "context": 2, "empty": 1}})
    assert reasons_of_cuts(cut) == ", 2 ended by the context, 1 ended inside thinking"
    assert reasons_of_cuts(task) == ""
