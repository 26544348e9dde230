"""A scripted server that takes tools, and a solver that answers generated questions from what a model would see.

The solver knows verbs, nouns and the form of "Details: ..."; it knows nothing of the generator, so that a question which it
answers can be answered from its own words.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, Literal

from fake_server import FakeServer, Scripted

PARSER_MISSING = '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'


class ToolServer(FakeServer):
    """Its chat template shows tools as JSON, one token a character; or ignores them; or it refuses them, as vLLM does."""

    def __init__(
        self,
        reply: Callable[[dict[str, Any]], Scripted] = lambda body: Scripted("no"),
        *,
        tools: Literal["shown", "ignored", "refused"] = "shown",
        **options: Any,
    ) -> None:
        super().__init__(reply, **options)
        self.tools = tools
        self.die_softly = False

    def num_tokens(self, messages: list[dict[str, str]], definitions: list[dict[str, Any]]) -> int:
        return len(self._prompt_ids({"messages": messages, "tools": definitions}))

    def _prompt_ids(self, body: dict[str, Any]) -> list[int]:
        shown = json.dumps(body["tools"]) if body.get("tools") and self.tools == "shown" else ""
        return [2] * len(shown) + super()._prompt_ids(body)

    def _answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]] | None:
        if self.die_softly:
            return 503, {"error": {"message": "busy"}}
        if body.get("tool_choice") == "auto" and self.tools == "refused":
            return 400, {"error": {"message": PARSER_MISSING}}
        return super()._answer(path, body)


def the_tool(question: str, tools: list[dict[str, Any]]) -> dict[str, Any]:
    """The one function whose verb and noun the question names; an empty one if none does. AssertionError if several do."""
    found = []
    for one in tools:
        verb, noun = one["function"]["name"].split("_", 1)
        if re.search(rf"\b{verb}\b", question.split("Details:")[0].lower()) and noun.replace("_", " ") in question:
            found.append(one["function"])
    assert len(found) <= 1, [one["name"] for one in found]
    return found[0] if found else {}


def solve(question: str, tools: list[dict[str, Any]]) -> tuple[str, dict[str, Any]] | None:
    """(name, arguments) of the call that answers; None if no tool does."""
    function = the_tool(question, tools)
    if not function:
        return None
    request, _, details = question.partition(" Details: ")
    arguments = _read_object("; " + details.removesuffix("."), function["parameters"], "; ")
    code = re.search(r"\b[A-Z]{2}-\d{4}\b", request)
    return function["name"], ({"code": code.group()} if code else {}) | arguments


def _read_object(text: str, schema: dict[str, Any], separator: str) -> dict[str, Any]:
    """`; name: value; other name: value` by the names the schema has."""
    names = {name.replace("_", " "): name for name in schema["properties"]}
    split = re.split(rf"{separator}({'|'.join(names)}): ", text)
    assert split[0] == "", text
    return {
        names[name]: _read_value(value, schema["properties"][names[name]])
        for name, value in zip(split[1::2], split[2::2], strict=True)
    }


def _read_value(text: str, schema: dict[str, Any]) -> Any:
    if schema["type"] == "object":
        assert (text[0], text[-1]) == ("(", ")"), text
        return _read_object(", " + text[1:-1], schema, ", ")
    if schema["type"] == "array":
        return text.split(", ")
    if schema["type"] == "boolean":
        return {"yes": True, "no": False}[text]
    if schema["type"] in {"integer", "number"}:
        return json.loads(text)
    return text.strip('"')


def as_call(name: str, arguments: Any) -> dict[str, Any]:
    """A call as the API shapes it; ids differ from server to server."""
    return {"id": f"call-{id(arguments)}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
