"""Tool calls: generated questions and catalogues, reading and judging replies, sizing prompts."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import binom
from tool_server import ToolServer, solve, the_tool

from assay.recipes.load import load_recipe
from assay.recipes.suite import SuiteRecipe, ToolsTask
from assay.records.base import sha256_of
from assay.records.measurement import ItemResult, ToolCell, ToolFigures, ToolItem, TriggerFidelity
from assay_evaluate.asking.dialect import Dialect, count_prompt
from assay_evaluate.asking.language import count_scripts
from assay_evaluate.client.client import Client, NotMeasured
from assay_evaluate.client.journal import Identity, Journal, Reply
from assay_evaluate.statistics.proportions import wilson
from assay_evaluate.tasks.tools import languages
from assay_evaluate.tasks.tools.calls import (
    answer_of,
    equal_arguments,
    is_call_left_in_text,
    is_correct,
    is_valid,
    judge,
    read_calls,
    tool_calls,
    trigger_fidelity,
)
from assay_evaluate.tasks.tools.catalogue import CATALOGUE_VERSION, all_tools
from assay_evaluate.tasks.tools.dialogue import fit, messages_of
from assay_evaluate.tasks.tools.languages import OtherLanguage
from assay_evaluate.tasks.tools.parameters import describe_value
from assay_evaluate.tasks.tools.questions import ToolQuestion, tool_question

SEED = "eval-tools-test"


def questions(num_tools: int, n: int = 40, share: float = 0.25) -> list[ToolQuestion]:
    return [tool_question(SEED, index, num_tools, None, share) for index in range(n)]


# ------------------------------------------------------------------------------------------------ questions
@pytest.mark.parametrize("num_tools", [1, 8, 32, 128])
def test_every_question_has_one_right_tool_or_none(num_tools: int) -> None:
    """A solver that sees only the question and the tools finds the tool and its arguments; where none is right, no tool."""
    for item in questions(num_tools):
        offered = [tool.definition for tool in item.tools]
        names = [one["function"]["name"] for one in offered]
        assert (len(names), len(set(names))) == (num_tools, num_tools)
        assert solve(item.question, offered) == (None if item.expected_tool is None else (item.expected_tool, item.expected))
        if item.expected_tool is None:
            assert item.expected is None
        else:
            right = the_tool(item.question, offered)
            assert is_valid(item.expected, right["parameters"])
    kinds = [item.kind for item in questions(num_tools)]
    assert [kinds.count(kind) for kind in ("tool", "missing", "talk")] == [30, 5, 5]


def test_distractors_are_alike() -> None:
    """Of 8 tools, 4 share the object and 3 the action; the odd one out is the right one."""
    for item in questions(8, share=0.0):
        verb, noun = str(item.expected_tool).split("_", 1)
        others = [tool.name.split("_", 1) for tool in item.tools if tool.name != item.expected_tool]
        assert (sum(n == noun for _, n in others), sum(v == verb for v, _ in others)) == (4, 3)
    for item in questions(1, share=1.0):
        if item.kind == "missing":  # the one tool does the right thing to the wrong kind of object
            assert item.tools[0].action.verb in item.question.lower()
            assert item.tools[0].kind.noun not in item.question


SCRIPTS = {"zh": "Han", "es": "Latin", "ru": "Cyrillic", "ja": "Kana"}


@pytest.mark.parametrize("language", list(SCRIPTS))
def test_questions_in_other_languages_mean_one_tool(language: OtherLanguage) -> None:
    """Wordings of every verb and object, matched against the question: only the right tool's is there, and every argument."""
    for index in range(60):
        item = tool_question(SEED, index, 32, None, 0.25, language)
        assert item.id == f"tools/32/short/{language}/{index}"
        assert count_scripts(item.question)[SCRIPTS[language]] > 0 or item.kind == "talk"
        assert "{" not in item.question
        meant = set()
        for tool in all_tools():
            code = re.search(rf"{tool.kind.prefix}-\d{{4}}", item.question)
            for wording in languages.REQUESTS[language][tool.action.verb]:
                given = "" if code is None else (f" {code[0]} " if language in {"zh", "ja"} else code[0])
                sentence = wording.format(noun=languages.NOUNS[tool.kind.noun][language], code=given)
                if item.question.startswith(sentence) and ("{code}" not in wording or code is not None):
                    meant.add(tool.name)
        assert len(meant) == (0 if item.kind == "talk" else 1)
        if item.kind == "tool":
            assert meant == {item.expected_tool}
            assert item.expected is not None
            assert all(describe_value(name, value) in item.question for name, value in item.expected.items() if name != "code")
            assert item.expected.get("code", "") in item.question
        elif item.kind == "missing":
            assert meant.isdisjoint(tool.name for tool in item.tools)
    english = [tool_question(SEED, index, 32, None, 0.25) for index in range(60)]
    assert all(one.language == "en" for one in english)


def test_items_depend_on_nothing_but_seed_cell_and_index() -> None:
    made = [
        [one.id, one.kind, one.question, one.expected, [tool.definition for tool in one.tools]]
        for num_tools in (1, 8, 128)
        for length in (None, 4096)
        for one in [tool_question("eval-pinned", index, num_tools, length, 0.25) for index in range(8)]
    ]
    # Another digest means that every measured score is one of other questions: raise CATALOGUE_VERSION with it.
    assert (CATALOGUE_VERSION, sha256_of(made)) == (1, "b423f6cfcfebc74371d9ffd1fa5035d4cf1976de7514e6b045558edaa6bd71b0")
    alone = tool_question("eval-pinned", 3, 8, 4096, 0.25)
    assert [alone.id, alone.kind, alone.question, alone.expected, [t.definition for t in alone.tools]] in made
    assert len({one[2] for one in made}) == len(made)


def test_schemas_are_schemas_and_use_every_type() -> None:
    from jsonschema import Draft202012Validator

    observed: set[str] = set()

    def walk(schema: dict[str, Any]) -> None:
        observed.update([schema["type"], *(key for key in ("enum", "pattern", "default", "uniqueItems") if key in schema)])
        for inner in [*schema.get("properties", {}).values(), *([schema["items"]] if "items" in schema else [])]:
            walk(inner)

    for tool in all_tools():
        Draft202012Validator.check_schema(tool.schema)
        walk(tool.schema)
    assert observed == {
        "object",
        "array",
        "string",
        "integer",
        "number",
        "boolean",
        "enum",
        "pattern",
        "default",
        "uniqueItems",
    }
    assert len({tool.name for tool in all_tools()}) == 160


# ------------------------------------------------------------------------------------------------ reading replies
def called(*calls: tuple[str, Any], text: str = "") -> Reply:
    """A reply as the API shapes it."""
    shaped = tuple(
        {"id": f"call-{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(calls)
    )
    return Reply("answered", text, has_tool_calls=bool(calls), tool_calls=shaped or None, finish_reason="tool_calls")


ITEM = questions(8)[0]
RIGHT = (str(ITEM.expected_tool), json.dumps(ITEM.expected))
OTHER = next(tool for tool in ITEM.tools if tool.name.split("_")[0] != RIGHT[0].split("_")[0])
TALK = next(one for one in questions(8) if one.kind == "talk")


@pytest.mark.parametrize(
    ("reply", "names", "left", "valid", "equal", "correct"),
    [
        (called(RIGHT), [RIGHT[0]], False, True, True, True),
        (called(RIGHT, text="I will do that."), [RIGHT[0]], False, True, True, True),
        (called(RIGHT, RIGHT), [RIGHT[0]] * 2, False, True, True, False),
        (called((RIGHT[0], ITEM.expected)), [RIGHT[0]], False, True, True, True),  # not as text: some servers do
        (called((RIGHT[0], RIGHT[1][:-1])), [RIGHT[0]], False, False, False, False),
        (called((RIGHT[0], "[]")), [RIGHT[0]], False, False, False, False),
        (called((RIGHT[0], '{"code": NaN}')), [RIGHT[0]], False, False, False, False),
        (called((RIGHT[0], "")), [RIGHT[0]], False, False, False, False),
        (called((RIGHT[0], json.dumps({**ITEM.expected, "colour": "red"}))), [RIGHT[0]], False, False, False, False),  # type: ignore[dict-item]
        (called((OTHER.name, RIGHT[1])), [OTHER.name], False, False, None, False),
        (called(("make_coffee", "{}")), ["make_coffee"], False, False, None, False),
        (called(("", "{}")), [""], False, False, None, False),
        (called(RIGHT, ("make_coffee", "{}")), [RIGHT[0], "make_coffee"], False, False, True, False),
        (called(text="Done."), [], False, None, None, False),
        (called(text=f"<tool_call>{RIGHT[0]}\n<arg_key>"), [], True, None, None, False),
        (called(RIGHT, text="</tool_call>"), [RIGHT[0]], True, True, True, True),
        (Reply("answered", tool_calls=({"function": None},)), [""], False, False, None, False),
    ],
)
def test_replies_where_a_tool_is_right(
    reply: Reply, names: list[str], left: bool, valid: bool | None, equal: bool | None, correct: bool
) -> None:
    result = judge(ITEM, reply)
    assert result == ToolItem(
        num_tools=8, prompt_tokens=None, expected_tool=RIGHT[0], called=tuple(names), left_in_text=left, schema_valid=valid,
        arguments_equal=equal,
    )  # fmt: skip
    assert is_correct(result, reply) is correct


@pytest.mark.parametrize(
    ("reply", "correct", "answer"),
    [
        (called(text="It is 41."), True, "no call"),
        (called(text=" "), False, "no call"),
        (called(text='{"name": "%s", "arguments": {}}' % OTHER.name), True, "no call"),  # noqa: UP031
        (called((TALK.tools[0].name, "{}")), False, TALK.tools[0].name + "({})"),
        (called((TALK.tools[0].name, "{")), False, TALK.tools[0].name + "(not JSON)"),
        (called(text="<tool_call>"), False, "a call left in the text"),
    ],
)
def test_replies_where_none_is_right(reply: Reply, correct: bool, answer: str) -> None:
    assert OTHER.name not in [tool.name for tool in TALK.tools]
    result = judge(TALK, reply)
    assert (is_correct(result, reply), answer_of(reply, result)) == (correct, answer)
    assert (result.expected_tool, result.arguments_equal) == (None, None)


def test_answers_are_equal_when_the_same_was_called() -> None:
    one, two = called(("x", '{"a": 1, "b": 2}')), called(("x", '{ "b":2,"a":1 }'))
    assert answer_of(one, judge(TALK, one)) == answer_of(two, judge(TALK, two)) == 'x({"a":1,"b":2})'
    assert [call.name for call in read_calls(called(("x", "{}"), ("y", "{}")))] == ["x", "y"]


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ('<tool_call>\n{"name": "f"}', True), ("<tool_call>f\n<arg_key>a</arg_key>", True), ("text </tool_call>", True),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f", True), ("<|tool_calls_section_begin|>", True),
        ('[TOOL_CALLS][{"name": "f"}]', True), ("<function=cancel_order>", True), ("<|python_tag|>f.call()", True),
        ("<|action_start|><|plugin|>", True), ("<minimax:tool_call>", True), ("<function_call> {", True),
        ('functools[{"name": "f"}]', True), ("<start_function_call>call:f{", True),
        ('```json\n{"name": "cancel_order", "arguments": {}}', True), ('cancel_order(code="PO-1")', True),
        ('cancel_order({"code": 1})', True), ("[cancel_order(code='PO-1')]", True),
        ("I have no tool that cancels an order.", False), ("You could use cancel_order (if you had it).", False),
        ('{"name": "Anna"}', False), ("In C, a function is called like f(x).", False), ("x < tool, y > call", False),
        ("", False),
    ],
)  # fmt: skip
def test_calls_left_in_text(text: str, left: bool) -> None:
    """Examples in the forms that vLLM's parsers read."""
    assert is_call_left_in_text(text, ["cancel_order", "share_order"]) is left


def test_equal_arguments() -> None:
    schema = {"properties": {"n": {"type": "number"}, "limit": {"type": "integer", "default": 10}, "who": {}}}
    for result, expected, equal in [
        ({"n": 2}, {"n": 2.0}, True), ({"n": 1}, {"n": True}, False), ({"n": 0}, {"n": False}, False),
        ({"n": 1, "limit": 10}, {"n": 1}, True), ({"n": 1}, {"n": 1, "limit": 10}, True), ({"limit": 9}, {}, False),
        ({"who": {"a": [1, "x"]}}, {"who": {"a": [1.0, "x"]}}, True), ({"who": ["a", "b"]}, {"who": ["b", "a"]}, False),
        ({"who": ["a"]}, {"who": ["a", "b"]}, False), ({"who": "Anna"}, {"who": "anna"}, False),
        ({"who": {}}, {"who": []}, False), ({"who": None}, {}, False),
    ]:  # fmt: skip
        assert equal_arguments(result, expected, schema) is equal, (result, expected)


def test_a_broken_argument_is_invalid() -> None:
    """Each of ten breakages, on the arguments of whatever tools have what it breaks."""
    broken = dict.fromkeys(("missing", "extra", "code", "number", "enum", "boolean", "array", "twice", "nested", "null"), 0)
    for item in questions(1, 200, share=0.0):
        assert item.expected is not None
        schema, good = item.tools[0].schema, item.expected
        assert is_valid(good, schema)
        variants: dict[str, dict[str, Any]] = {
            "missing": {name: value for name, value in good.items() if name != schema["required"][0]},
            "extra": {**good, "colour": "red"},
            "null": {**good, schema["required"][0]: None},
        }
        for name, value in good.items():
            kind = schema["properties"][name]
            if name == "code":
                variants["code"] = {**good, name: value + "x"}
            if kind["type"] in {"integer", "number"}:
                variants["number"] = {**good, name: str(value)}
            if "enum" in kind:
                variants["enum"] = {**good, name: value.upper() + "!"}
            if kind["type"] == "boolean":
                variants["boolean"] = {**good, name: "yes"}
            if kind["type"] == "array":
                variants["array"] = {**good, name: ", ".join(value)}
                variants["twice"] = {**good, name: [*value, value[0]]}
            if kind["type"] == "object":
                variants["nested"] = {**good, name: {**value, "colour": "red"}}
        for what, arguments in variants.items():
            assert not is_valid(arguments, schema), (what, arguments)
            broken[what] += 1
    assert min(broken.values()) >= 10, broken


# ------------------------------------------------------------------------------------------------ figures
def result(name: str, expected: str | None, called_: tuple[str, ...] = (), **more: Any) -> ItemResult:
    fields: dict[str, Any] = {"num_tools": 1, "prompt_tokens": None, "left_in_text": False}
    fields |= {"schema_valid": True if called_ else None, "arguments_equal": True if expected in called_ else None}
    correct = more.pop("correct", True)
    return ItemResult(
        item=name, language="en", correct=correct, truncated=False, wrong_script=False, finish_reason="stop", prompt_tokens=1,
        output_tokens=1, answer=None, tool=ToolItem(expected_tool=expected, called=called_, **{**fields, **more}),
    )  # fmt: skip


def test_figures_by_hand() -> None:
    items = [
        result("1", "f", ("f",)),
        result("2", "f", ("f",), arguments_equal=False),
        result("3", "f", ("f", "f")),
        result("4", "f", ("g",), schema_valid=False, num_tools=8, prompt_tokens=4096),
        result("5", "f", num_tools=8, prompt_tokens=4096, left_in_text=True),
        result("6", None, num_tools=8, prompt_tokens=4096),
        result("7", None, ("g",), num_tools=8, prompt_tokens=4096),
        result("8", None, ("g",), correct=None),  # no reply: counts nowhere
    ]
    found = tool_calls(items, None)
    assert found.overall == ToolFigures(
        num_items=7, trigger_precision=wilson(4, 5), trigger_recall=wilson(4, 5), right_tool=wilson(2, 4),
        schema_valid=wilson(4, 5), arguments_equal=wilson(2, 3), num_left_in_text=1,
    )  # fmt: skip
    assert found.cells == (
        ToolCell(
            num_tools=1, prompt_tokens=None, num_items=3, trigger_precision=wilson(3, 3), trigger_recall=wilson(3, 3),
            right_tool=wilson(2, 3), schema_valid=wilson(3, 3), arguments_equal=wilson(2, 3), num_left_in_text=0,
        ),
        ToolCell(
            num_tools=8, prompt_tokens=4096, num_items=4, trigger_precision=wilson(1, 2), trigger_recall=wilson(1, 2),
            right_tool=wilson(0, 1), schema_valid=wilson(1, 2), arguments_equal=None, num_left_in_text=1,
        ),
    )  # fmt: skip
    assert found.against_reference is None
    nothing = tool_calls([], [])
    assert (nothing.overall.trigger_precision, nothing.cells, nothing.against_reference) == (None, (), None)


def test_triggers_against_the_reference() -> None:
    """The reference is the truth: that item 3 is right to call nothing does not count, nor do items one side lacks."""

    def side(triggers: dict[str, bool]) -> list[ItemResult]:
        return [result(name, None, ("f",) if yes else ()) for name, yes in triggers.items()]

    reference = side({"1": True, "2": True, "3": True, "4": False, "5": False, "6": True, "7": True, "8": False})
    candidate = side({"8": True, "7": True, "6": True, "5": False, "4": True, "3": True, "2": False, "other": True})
    found = trigger_fidelity(reference, candidate)
    assert found is not None
    assert found.model_copy(update={"f1": None, "p_value": 0}) == TriggerFidelity(
        num_both=3, num_reference_only=1, num_candidate_only=2, num_neither=1, precision=wilson(3, 5), recall=wilson(3, 4),
        f1=None, p_value=0,
    )  # fmt: skip
    assert found.f1 == pytest.approx(2 * 0.6 * 0.75 / (0.6 + 0.75))
    assert found.p_value == pytest.approx(2 * binom.cdf(1, 3, 0.5) - binom.pmf(1, 3, 0.5))
    silent = trigger_fidelity(side({"1": False}), side({"1": False}))
    assert silent is not None
    assert (silent.num_neither, silent.precision, silent.recall, silent.f1) == (1, None, None, None)


# ------------------------------------------------------------------------------------------------ prompts that grow
@pytest.mark.slow
@pytest.mark.parametrize("can_tokenize", [True, False])
def test_prompts_are_filled_to_their_length(tmp_path: Path, can_tokenize: bool) -> None:
    """The fullest prompt that fits, as found by trying every number of sentences."""
    with (
        ToolServer(max_model_len=9000, tokenize=can_tokenize) as server,
        Journal(tmp_path / "journal.db") as journal,
        Client(server, journal, Identity("c", "f")) as client,
    ):
        dialect = Dialect(True, can_tokenize, {})
        for num_tools, length in ((1, 3000), (8, 8000), (8, 8999)):
            item = tool_question(SEED, 0, num_tools, length, 0.25)
            definitions = [tool.definition for tool in item.tools]
            sizes = [server.num_tokens(messages_of(item, n, SEED), definitions) for n in range(200)]
            assert sizes == sorted(set(sizes))
            best = max(n for n, size in enumerate(sizes) if size <= length)
            before = len(server.requests)
            count = functools.partial(count_prompt, client, dialect, tools=definitions)
            assert fit(item, SEED, count) == best
            assert len(server.requests) - before <= 10
            assert 0.95 * length <= sizes[best] <= length
        roles = [message["role"] for message in messages_of(item, best, SEED)]
        assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"]
        assert messages_of(item, best, SEED)[:2] != messages_of(dataclasses.replace(item, id="other"), best, SEED)[:2]
        assert fit(dataclasses.replace(item, prompt_tokens=None), SEED, count) == 0
        with pytest.raises(ValueError, match=r"8 tools and the question alone take [0-9]+ tokens"):
            fit(dataclasses.replace(item, prompt_tokens=500), SEED, count)
        server.die_softly = True
        with pytest.raises(NotMeasured, match=r"tokens cannot be counted: .*HTTP 503: busy"):
            fit(item, SEED, count)


# ------------------------------------------------------------------------------------------------ recipes
def test_recipes() -> None:
    suite = SuiteRecipe.model_validate(
        {
            "schema": 1,
            "name": "x",
            "seed": "eval",
            "tasks": [{"kind": "tools", "name": "tools", "num_items": 5, "max_tokens": 9}],
        }
    )
    task = suite.tasks[0]
    assert isinstance(task, ToolsTask)
    assert (task.num_tools, task.prompt_tokens, task.share_without_tool) == ((1, 8, 32, 128), (0,), 0.25)
    for wrong in ({"num_tools": [0]}, {"num_tools": [129]}, {"prompt_tokens": [-1]}, {"share_without_tool": 1.1}, {"tools": 3}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            ToolsTask.model_validate({"kind": "tools", "name": "t", "num_items": 1, "max_tokens": 1, **wrong})
    full = [task for task in load_recipe(SuiteRecipe, "full").tasks if isinstance(task, ToolsTask)]
    assert [(one.name, one.num_tools, one.prompt_tokens, one.num_items) for one in full] == [
        ("tools", (1, 8, 32, 128), (0, 65536), 20)
    ]
