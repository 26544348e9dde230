"""Items: a question and a catalogue in which exactly one tool answers it, or none does.

Three kinds of questions. `tool`: everything the right tool needs is said, so calling it is the next step and no look-up
is. `missing`: something is asked of a kind of object for which the catalogue has no tool, only look-alikes of other kinds;
`talk`: nothing that a tool does. A plain answer is right for the last two.

Everything is drawn from `random.Random(f"{seed}:tools:...")`: an item is the same in every run and whatever else is asked.
Cells (number of tools, length) draw their own questions, so that items are independent.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Literal

from assay_evaluate.tasks.tools import languages
from assay_evaluate.tasks.tools.catalogue import Tool, all_tools
from assay_evaluate.tasks.tools.languages import ToolLanguage
from assay_evaluate.tasks.tools.parameters import describe_value

QuestionKind = Literal["tool", "missing", "talk"]

TALK = (
    "What is {a} plus {b}? Answer with the number.",
    "Which of the two numbers is larger, {a} or {b}? Answer in one short sentence.",
    "Write one sentence about the number {a} and an otter.",
    "Explain in two sentences why the sky is blue. Begin with the number {a}.",
    "Give me a word that rhymes with 'light', and then the number {b}.",
)


@dataclass(frozen=True)
class ToolQuestion:
    """One item. expected: arguments of the right tool; None when a plain answer is right."""

    id: str
    kind: QuestionKind
    question: str
    tools: tuple[Tool, ...]
    expected_tool: str | None
    expected: dict[str, Any] | None
    prompt_tokens: int | None
    """Length that other dialogue fills the prompt up to. None: not filled."""
    language: ToolLanguage = "en"

    @property
    def num_tools(self) -> int:
        return len(self.tools)


def tool_question(
    seed: str, index: int, num_tools: int, prompt_tokens: int | None, share_without_tool: float, language: ToolLanguage = "en"
) -> ToolQuestion:
    """Item `index` of a cell. Of n items, floor(n * share_without_tool) have no right tool, evenly spread, `missing` and
    `talk` in turn. num_tools: 1 to 152, the number that is left without one kind of object.
    """
    cell = f"{num_tools}/{prompt_tokens or 'short'}" + ("" if language == "en" else f"/{language}")
    draw = random.Random(f"{seed}:tools:{cell}:{index}")
    num_before, num_after = int(index * share_without_tool), int((index + 1) * share_without_tool)
    kind: QuestionKind = "tool" if num_before == num_after else ("missing" if num_before % 2 == 0 else "talk")
    target = draw.choice(all_tools())
    if kind == "talk":
        wording = draw.choice(TALK if language == "en" else languages.TALK[language])
        question = wording.format(a=draw.randint(10, 999), b=draw.randint(10, 999))
        arguments = None
    else:
        # every required argument and about half of the optional ones
        chosen = (*target.required, *[parameter for parameter in target.optional if draw.random() < 0.5])
        arguments = {parameter.name: parameter.draw(draw) for parameter in chosen}
        question = ask(target, arguments, draw, language)
    has_target = kind == "tool"
    tools = _others(target, draw, with_its_kind=has_target)[: num_tools - has_target]
    if has_target:
        tools.append(target)
    draw.shuffle(tools)
    return ToolQuestion(
        id=f"tools/{cell}/{index}",
        kind=kind,
        question=question,
        tools=tuple(tools),
        expected_tool=target.name if has_target else None,
        expected=arguments if has_target else None,
        prompt_tokens=prompt_tokens,
        language=language,
    )


def ask(tool: Tool, arguments: dict[str, Any], draw: random.Random, language: ToolLanguage = "en") -> str:
    """The question that `tool` with `arguments` answers; every argument is named and said word for word."""
    details = "; ".join(describe_value(name, value) for name, value in arguments.items() if name != "code")
    if language != "en":
        return languages.request(language, tool.action.verb, tool.kind.noun, arguments.get("code"), details, draw)
    wording = draw.choice(tool.action.requests)
    sentence = wording.format(noun=tool.kind.noun, code=arguments.get("code"))
    return f"{sentence} Details: {details}."


def _others(target: Tool, draw: random.Random, *, with_its_kind: bool) -> list[Tool]:
    """The other tools, most alike first: same kind and same action in turn, then the rest. Without its kind: none of those."""
    same_kind = [tool for tool in all_tools() if tool.kind == target.kind and tool.action != target.action]
    same_action = [tool for tool in all_tools() if tool.action == target.action and tool.kind != target.kind]
    rest = [tool for tool in all_tools() if tool.action != target.action and tool.kind != target.kind]
    for tools in (same_kind, same_action, rest):
        draw.shuffle(tools)
    if not with_its_kind:
        return [*same_action, *rest]
    in_turn = [tool for pair in zip(same_kind, same_action, strict=False) for tool in pair]
    return [*in_turn, *same_action[len(same_kind) :], *rest]
