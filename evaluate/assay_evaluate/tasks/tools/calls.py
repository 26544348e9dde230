"""What one reply did: called, missed, or left a call in its text; right tool, valid arguments, the arguments asked for."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from assay.records.base import Interval, canonical_json
from assay.records.measurement import ItemResult, ToolCalls, ToolCell, ToolFigures, ToolItem, TriggerFidelity
from assay_evaluate.client.journal import Reply
from assay_evaluate.statistics.paired import mcnemar_midp
from assay_evaluate.statistics.proportions import wilson
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
    for call in reply.tool_calls or ():
        function = call.get("function")
        function = function if isinstance(function, dict) else {}
        arguments = function.get("arguments")
        if isinstance(arguments, str):  # as the API sends them; some servers send the object itself
            try:
                arguments = clean_json(read_json(arguments.encode()))
            except ValueError:  # not JSON, NaN, a number of thousands of digits, or nested without end
                arguments = None
        calls.append(Call(str(function.get("name") or ""), arguments if isinstance(arguments, dict) else None))
    return tuple(calls)


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


def equal_arguments(actual: dict[str, Any], expected: dict[str, Any], schema: Schema) -> bool:
    """Whether both say the same: an argument left out has its default; 2 equals 2.0 but not true; text letter for letter."""
    defaults = {name: own["default"] for name, own in schema["properties"].items() if "default" in own}
    return _same({**defaults, **actual}, {**defaults, **expected})


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


# ------------------------------------------------------------------------------------------------ figures
def tool_calls(items: Sequence[ItemResult], reference: Sequence[ItemResult] | None) -> ToolCalls:
    """Figures of one checkpoint's answered items. reference: its results for the same items; None: this is the reference."""
    answered = [item.tool for item in items if item.correct is not None and item.tool is not None]
    cells: dict[tuple[int, int | None], list[ToolItem]] = {}
    for item in answered:
        cells.setdefault((item.num_tools, item.prompt_tokens), []).append(item)
    return ToolCalls(
        overall=ToolFigures(**_figures(answered)),
        cells=tuple(
            ToolCell(num_tools=num_tools, prompt_tokens=length, **_figures(of_cell))
            for (num_tools, length), of_cell in cells.items()
        ),
        against_reference=None if reference is None else trigger_fidelity(reference, items),
    )


def _figures(items: Sequence[ToolItem]) -> dict[str, Any]:
    triggered = [item for item in items if item.called]
    with_tool = [item for item in items if item.expected_tool is not None]
    rightly = [item for item in triggered if item.expected_tool is not None]
    of_right_tool = [item for item in rightly if item.arguments_equal is not None]
    return {
        "num_items": len(items),
        "trigger_precision": _share(len(rightly), len(triggered)),
        "trigger_recall": _share(len(rightly), len(with_tool)),
        "right_tool": _share(sum(item.called == (item.expected_tool,) for item in rightly), len(rightly)),
        "schema_valid": _share(sum(item.schema_valid is True for item in triggered), len(triggered)),
        "arguments_equal": _share(sum(item.arguments_equal is True for item in of_right_tool), len(of_right_tool)),
        "num_left_in_text": sum(item.left_in_text for item in items),
    }


def _share(num: int, of: int) -> Interval | None:
    return wilson(num, of) if of else None


def trigger_fidelity(reference: Sequence[ItemResult], candidate: Sequence[ItemResult]) -> TriggerFidelity | None:
    """Triggers of both sides on the items that both answered; None without any. Whether a tool was right plays no part."""
    of_reference, of_candidate = (
        {item.item: bool(item.tool.called) for item in side if item.correct is not None and item.tool is not None}
        for side in (reference, candidate)
    )
    pairs = Counter((of_reference[name], called) for name, called in of_candidate.items() if name in of_reference)
    if not pairs:
        return None
    num_both, reference_only, candidate_only = pairs[True, True], pairs[True, False], pairs[False, True]
    num_any = num_both + reference_only + candidate_only
    return TriggerFidelity(
        num_both=num_both,
        num_reference_only=reference_only,
        num_candidate_only=candidate_only,
        num_neither=pairs[False, False],
        precision=_share(num_both, num_both + candidate_only),
        recall=_share(num_both, num_both + reference_only),
        f1=2 * num_both / (num_both + num_any) if num_any else None,
        p_value=mcnemar_midp(reference_only, candidate_only),
    )
