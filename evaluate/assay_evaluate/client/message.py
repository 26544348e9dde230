"""What a reply's message says: its text apart from its thinking, in each form in which servers write the two."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from assay_evaluate.client.journal import Reply
from assay_evaluate.transport.foreign_json import text_of

TEXT_PARTS = {"text": "text", "output_text": "text", "refusal": "refusal"}
"""Kinds of parts of `content` that are the answer -> the field with its text. Of OpenAI (both APIs), Anthropic, Mistral."""
THINKING_PARTS = {
    "thinking": ("thinking",), "reasoning": ("text", "summary", "content"), "reasoning.text": ("text",),
    "reasoning.summary": ("summary",), "reasoning_text": ("text",), "summary_text": ("text",),
}  # fmt: skip
"""The same of thinking: Anthropic and Mistral, OpenAI's Responses, OpenRouter's reasoning details."""
UNSAID = frozenset({"redacted_thinking", "reasoning.encrypted", "reference"})
"""Kinds that hold no words: encrypted thinking, Mistral's references to documents."""


def read_message(message: dict[str, Any]) -> tuple[str, str | None]:
    """(text, thinking) of a message. A refusal is the answer where there is no other. TypeError: a part is of no known kind."""
    content = message.get("content")
    thinking = message.get("reasoning") or message.get("reasoning_content")
    if type(content) is not list and type(thinking) is not list:
        return text_of(content) or text_of(message.get("refusal")) or "", text_of(thinking)
    before = _parts(thinking)[1] or _parts(thinking)[0] if type(thinking) is list else text_of(thinking) or ""
    text, inside = _parts(content) if type(content) is list else (text_of(content) or "", "")
    return text or text_of(message.get("refusal")) or "", "\n".join(filter(None, (before, inside))) or None


def _parts(parts: list[Any]) -> tuple[str, str]:
    texts, thoughts = [], []
    for part in parts:
        if type(part) is str:
            texts.append(text_of(part) or "")
            continue
        if type(part) is not dict:
            raise TypeError(f"{type(part).__name__} in place of a content part")
        kind = part.get("type")
        if type(kind) is not str or not (kind in TEXT_PARTS or kind in THINKING_PARTS or kind in UNSAID):
            raise TypeError(f"a content part of {'no kind' if kind is None else f'kind {str(kind)[:40]!r}'}")
        if kind in TEXT_PARTS:
            texts.append(text_of(part.get(TEXT_PARTS[kind])) or "")
        for name in THINKING_PARTS.get(kind, ()):
            thoughts.append(_words(part.get(name)))
    return "".join(texts), "".join(thoughts)


def _words(value: Any) -> str:
    if type(value) is list:
        return "".join(_parts(value))
    return text_of(value) or ""


# ------------------------------------------------------------------------------------------------ thinking left in the text
_PAIRS = (
    # DeepSeek, Qwen, GLM, Kimi K2, MiniMax M2, ...; Hunyuan: a suffix
    (r"<think(:[^\s>]{1,40})?>", r"</think(:[^\s>]{1,40})?>"),
    (r"<thinking>", r"</thinking>"),
    (r"\[THINK\]", r"\[/THINK\]"),  # Mistral
    (r"<seed:think>", r"</seed:think>"),
    (r"<mm:think>", r"</mm:think>"),  # MiniMax M3
    (r"<ifm\|think(_fast|_faster)?>", r"</ifm\|think(_fast|_faster)?>"),  # K2 Horizon
    (r"<\|START_THINKING\|>", r"<\|END_THINKING\|>"),  # Cohere
    (r"<\|channel>", r"<channel\|>"),  # Gemma 4
    (r"<\|think\|>", r"<\|/think\|>"),
    (r"<\|open\|>\s*think\s*<\|sep\|>", r"<\|close\|>\s*think\s*<\|sep\|>"),  # Kimi K3
    (r"<\|content_thinking\|>", r"<\|content_text\|>"),  # Inkling
    (r"<\|plamo:begin_think:plamo\|>", r"<\|plamo:end_think:plamo\|>"),
    (r"◁think▷", r"◁/think▷"),  # Kimi VL
    (r"<\|begin_of_thought\|>", r"<\|end_of_thought\|>"),  # OpenThinker
    (r"<\|channel\|>analysis", r"<\|channel\|>final[^<]{0,80}<\|message\|>"),  # gpt-oss
    (r"(?:Here's|Here is) my thought process:", r"(?:Here's|Here is) my response:"),  # Granite 3
)
"""Where thinking begins and ends, as vLLM's reasoning parsers have it (vllm/reasoning, vllm/parser), in text of which no parser
took it out."""
_OPENS = tuple((re.compile(rf"\s*(?:{opens})"), re.compile(closes)) for opens, closes in _PAIRS)
_CLOSES_ALONE = ("</think>", "</seed:think>", "</mm:think>", "[/THINK]", "<|END_THINKING|>", "◁/think▷", "<channel|>")
"""Of chat templates that write the opening mark into the prompt, so that the reply begins inside thinking."""
_FIRST = frozenset("<[◁H")
"""First letters of the opening marks."""


def separate_thinking(reply: Reply) -> Reply:
    """The reply with thinking that stands in its text moved to `reasoning`: what a reasoning parser at the server does.

    As it is, if there is none, or its end never came (`ends_inside_thinking`). A server that left it there has not counted it.
    """
    thought, answer = _split(reply.text, may_begin_inside=reply.reasoning is None) or ("", None)
    if answer is None:
        return reply
    reasoning = "\n".join(filter(None, (reply.reasoning, thought.strip()))) or None
    counted = None if reasoning and reply.thinking_tokens == 0 else reply.thinking_tokens
    return replace(reply, text=answer, reasoning=reasoning, thinking_tokens=counted)


def ends_inside_thinking(text: str) -> bool:
    """Whether the text begins with thinking that does not end."""
    parts = _split(text, may_begin_inside=False)
    return parts is not None and parts[1] is None


def _split(text: str, *, may_begin_inside: bool) -> tuple[str, str | None] | None:
    """(thinking, answer; None: it never came). None: no thinking is marked.

    A closing mark alone counts only if words follow it: one at the very end is no thinking, but a slip of the model's.
    """
    begins = text.lstrip()[:1]
    if begins in _FIRST and begins:
        for opens, closes in _OPENS:
            if (opening := opens.match(text)) is not None:
                closing = closes.search(text, opening.end())
                return (text[opening.end() :], None) if closing is None else (
                    text[opening.end() : closing.start()], text[closing.end() :].lstrip()
                )  # fmt: skip
    # One letter of each mark first: to look for all of them in a long text takes a tenth of the time of its request.
    if may_begin_inside and ("<" in text or "◁" in text or "[/" in text):
        for mark in _CLOSES_ALONE:
            before, is_marked, after = text.partition(mark)
            if is_marked and after.strip():
                return before, after.lstrip()
    return None
