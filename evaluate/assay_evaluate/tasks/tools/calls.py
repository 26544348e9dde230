"""What one reply did: called, missed, or left a call in its text; right tool, valid arguments, the arguments asked for."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from assay.records.base import canonical_json
from assay.records.measurement import ToolItem
from assay_evaluate.client.journal import Reply
from assay_evaluate.tasks.tools.parameters import Schema
from assay_evaluate.tasks.tools.questions import ToolQuestion
from assay_evaluate.transport.foreign_json import clean_json, read_json

CALL_MARKS = re.compile(
    r"</?[|｜]?[\w:]{0,20}tool[_▁]calls?|</?[|｜]?(?:start_|end_)?function(?:_?calls?)?[=>]|<function\s?=|<arg_key>|<invoke\b"
    r"|\[TOOL_CALLS\]|<\|python_(?:tag|start)\|>|<\|action_start\|>|<\|tools_prefix\|>|<\|plamo:begin_tool|functools\["
)
"""What calls begin with in the templates of vLLM 0.32's parsers (vllm/tool_parsers); in a parsed reply none is left."""


@dataclass(frozen=True)
class Call:
    """One call. arguments: None when they are not a JSON object."""

    name: str
    arguments: dict[str, Any] | None


def read_calls(reply: Reply) -> tuple[Call, ...]:
    """The calls that the server's parser found. A call without a name counts, with an empty one."""
    calls = []
    for one in reply.tool_calls or ():
        function = one.get("function")
        function = function if isinstance(function, dict) else {}
        calls.append(Call(str(function.get("name") or ""), _object(function.get("arguments"))))
    return tuple(calls)


def _object(arguments: Any) -> dict[str, Any] | None:
    """Arguments as the API sends them: JSON text. Some servers send the object itself."""
    if isinstance(arguments, str):
        try:
            arguments = clean_json(read_json(arguments.encode()))
        except ValueError:  # not JSON, NaN, a number of thousands of digits, or nested without end
            return None
    return arguments if isinstance(arguments, dict) else None


def is_call_left_in_text(text: str, names: Sequence[str]) -> bool:
    """Whether `text` holds a call that no parser took out: its mark, or an offered tool's name as JSON or code calls it."""
    if CALL_MARKS.search(text):
        return True
    any_name = "|".join(map(re.escape, names))
    return re.search(rf'"name"\s*:\s*"(?:{any_name})"|\b(?:{any_name})\s*\(\s*(?:\w+\s*=|\{{)', text) is not None


def is_valid(arguments: dict[str, Any] | None, schema: Schema) -> bool:
    """Whether `arguments` are of the JSON schema (draft 2020-12)."""
    from jsonschema import Draft202012Validator

    return arguments is not None and Draft202012Validator(schema).is_valid(arguments)


def equal_arguments(found: dict[str, Any], expected: dict[str, Any], schema: Schema) -> bool:
    """Whether both say the same: an argument left out has its default; 2 equals 2.0 but not true; text letter for letter."""
    defaults = {name: one["default"] for name, one in schema["properties"].items() if "default" in one}
    return _same({**defaults, **found}, {**defaults, **expected})


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_same(left[key], right[key]) for key in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(_same, left, right))
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    return bool(left == right)


def judge(question: ToolQuestion, reply: Reply) -> ToolItem:
    """What the reply did with the tools, before it is called right or wrong."""
    calls = read_calls(reply)
    schemas: Mapping[str, Schema] = {tool.name: tool.schema for tool in question.tools}
    right = next((call for call in calls if call.name == question.expected_tool), None)
    equal = None
    if right is not None:
        assert question.expected is not None
        equal = right.arguments is not None and equal_arguments(right.arguments, question.expected, schemas[right.name])
    return ToolItem(
        num_tools=question.num_tools,
        prompt_tokens=question.prompt_tokens,
        expected_tool=question.expected_tool,
        called=tuple(call.name for call in calls),
        left_in_text=is_call_left_in_text(reply.text, tuple(schemas)),
        schema_valid=all(c.name in schemas and is_valid(c.arguments, schemas[c.name]) for c in calls) if calls else None,
        arguments_equal=equal,
    )


def is_correct(item: ToolItem, reply: Reply) -> bool:
    """One valid call of the right tool with the arguments asked for; or, where none is right, words and no call."""
    if item.expected_tool is None:
        return not item.called and not item.left_in_text and bool(reply.text.strip())
    return item.called == (item.expected_tool,) and item.schema_valid is True and item.arguments_equal is True


def answer_of(reply: Reply, item: ToolItem) -> str:
    """What was done, as text that is equal when the same was done: the calls, or that there was none."""
    calls = read_calls(reply)
    if not calls:
        return "a call left in the text" if item.left_in_text else "no call"
    return "; ".join(f"{c.name}({'not JSON' if c.arguments is None else canonical_json(c.arguments)})" for c in calls)
