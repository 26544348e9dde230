"""Thinking that stands in a reply's text, where no parser took it out."""

from __future__ import annotations

import pytest

from assay_evaluate.client.journal import Reply
from assay_evaluate.client.message import ends_inside_thinking, separate_thinking

MARKS = [
    ("<think>", "</think>"), ("<think:opensource>", "</think:opensource>"), ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"), ("<mm:think>", "</mm:think>"), ("<ifm|think_fast>", "</ifm|think_fast>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"), ("<|channel>", "<channel|>"), ("<|think|>", "<|/think|>"),
    ("<|open|>think<|sep|>", "<|close|>think<|sep|>"), ("<|content_thinking|>", "<|content_text|>"),
    ("<|plamo:begin_think:plamo|>", "<|plamo:end_think:plamo|>"), ("◁think▷", "◁/think▷"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"),
    ("Here's my thought process:", "Here is my response:"),
]  # fmt: skip


@pytest.mark.parametrize(("opens", "closes"), MARKS)
def test_marks_of_families(opens: str, closes: str) -> None:
    whole = f"\n{opens}\n2 + 5{closes}\n\n#### 7"
    apart = separate_thinking(Reply("answered", whole))
    assert apart.text == "#### 7" and "2 + 5" in str(apart.reasoning)
    assert not ends_inside_thinking(whole)
    cut = f"{opens}\n2 + 5"
    assert ends_inside_thinking(cut) and separate_thinking(Reply("answered", cut)) == Reply("answered", cut)


@pytest.mark.parametrize(
    ("text", "reasoning", "answer", "thought"),
    [
        ("2 + 5</think>#### 7", None, "#### 7", "2 + 5"),  # the template has opened it
        ("2 + 5</think>#### 7", "hm", "2 + 5</think>#### 7", "hm"),  # the server has a parser, which took that for text
        ("<think>2 + 5</think>#### 7", "hm", "#### 7", "hm\n2 + 5"),
        ("<think></think>#### 7", None, "#### 7", None),
        ("#### 7</think>", None, "#### 7</think>", None),  # a slip at the end
        ("#### 7 <think>or not", None, "#### 7 <think>or not", None),
        ("<b>7</b>", None, "<b>7</b>", None),
        ("Here is 7", None, "Here is 7", None),
        ("<think>2</think>3</think>4", None, "3</think>4", "2"),
        ("", None, "", None),
    ],
)
def test_what_is_thinking_and_what_is_not(text: str, reasoning: str | None, answer: str, thought: str | None) -> None:
    apart = separate_thinking(Reply("answered", text, reasoning))
    assert (apart.text, apart.reasoning) == (answer, thought)


@pytest.mark.parametrize(("text", "counted", "thinking_tokens"), [
    ("<think>2 + 5</think>#### 7", 0, None),  # vLLM 0.32 with minimax_m2_append_think, granite, hunyuan_a13b
    ("<think>2 + 5</think>#### 7", 5, 5),
    ("#### 7", 0, 0),
])  # fmt: skip
def test_thinking_that_is_taken_out_of_the_text_is_not_counted_as_zero(
    text: str, counted: int, thinking_tokens: int | None
) -> None:
    assert separate_thinking(Reply("answered", text, thinking_tokens=counted)).thinking_tokens == thinking_tokens
