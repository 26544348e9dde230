"""The truncation ledger: which replies were cut off, by what, and what a whole task's replies say about its budget.

`finish_reason` alone does not tell: vLLM clamps `max_tokens` in silence to what is left of the context, tool calls overwrite
`length`, and an end inside thinking is reported as `stop` with an empty answer.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import get_args

from assay.records.measurement import ItemResult, Truncation
from assay_evaluate.client.journal import Reply
from assay_evaluate.client.message import ends_inside_thinking

SHORTEST_TAIL = 64
LONGEST_TAIL = 8192
"""Characters at the end of a reply that are looked at: tails of 64, 128, ... 8192."""
WINDOW = 16
MIN_REPEATS = 3
"""A tail loops if at most every third of its windows of 16 characters is a new one. Prose, code, tables of different
numbers and lists of keys have hardly any twice; a repeat that changes a number each time still has most of them again."""
ENDS_WITH_ANSWER = re.compile(
    r"(?:####[^#]|\\boxed\s*\{|(?:final|correct) answer\b|\banswer is\b|\banswer\s*:|最终答案|答案[是为：:]).{0,200}\Z",
    re.IGNORECASE | re.DOTALL,
)
"""An answer in a form that questions ask for, at the end of a text. Thinking that is cut off has it early, if at all."""


def room_tokens(prompt_tokens: int | None, max_tokens: int, max_model_len: int | None) -> int:
    """Tokens a reply can have: its budget, or what the prompt leaves of the context."""
    if max_model_len is None or prompt_tokens is None:
        return max_tokens
    return min(max_tokens, max_model_len - prompt_tokens)


def truncation_of(reply: Reply, *, max_tokens: int, max_model_len: int | None, has_reasoning_parser: bool) -> Truncation | None:
    """Why the reply counts as cut off, None if it does not.

    Cut off: its tokens reach min(max_tokens, max_model_len - prompt), or the server says `length`, or there is no answer and
    no tool call though a reasoning parser is on, as it is where thinking comes apart from text, or the text begins with
    thinking that does not end. A reply that never came is not cut off: None.
    """
    if reply.status != "answered":
        return None
    room = room_tokens(reply.prompt_tokens, max_tokens, max_model_len)
    if reply.output_tokens is not None and reply.output_tokens >= room:
        return "budget" if room == max_tokens else "context"
    if reply.finish_reason in {"length", "repetition"}:
        return "length"
    if reply.has_tool_calls:
        return None
    if reply.text.strip():
        return "empty" if ends_inside_thinking(reply.text) else None
    if reply.reasoning and ENDS_WITH_ANSWER.search(reply.reasoning[-400:].rstrip()):
        return "reasoning_only"
    return "empty" if has_reasoning_parser or reply.reasoning else None


def count_truncations(items: Iterable[ItemResult]) -> dict[Truncation, int]:
    """Truncated items by reason, in the order in which reasons are listed; reasons that do not occur are left out."""
    counts = Counter(item.truncated_by for item in items if item.truncated and item.truncated_by is not None)
    return {reason: counts[reason] for reason in get_args(Truncation) if counts[reason]}


def count_thinking_cut(items: Iterable[ItemResult], thinking_budget_tokens: int | None) -> int | None:
    """Replies whose thinking used up its budget. None: there is none, or no reply says how long it thought."""
    if thinking_budget_tokens is None:
        return None
    counts = [item.thinking_tokens for item in items if item.thinking_tokens is not None]
    return sum(tokens >= thinking_budget_tokens for tokens in counts) if counts else None


# ------------------------------------------------------------------------------------------------ loops
def ends_in_loop(text: str) -> bool:
    """Whether the text ends in a passage that it repeats, at least `MIN_REPEATS` times, exactly or nearly."""
    size = SHORTEST_TAIL
    while size <= min(len(text), LONGEST_TAIL):
        tail = text[-size:]
        windows = [tail[at : at + WINDOW] for at in range(size - WINDOW + 1)]
        if len(set(windows)) * MIN_REPEATS <= len(windows):
            return True
        size *= 2
    return False


def is_looping(reply: Reply, cut_by: Truncation | None, thinking_budget_tokens: int | None) -> bool | None:
    """Whether the reply repeats itself until it is cut off, or its thinking until the thinking's budget ended it.

    A reply that ends of its own accord does not loop, whatever it repeats. None: no reply came.
    """
    if reply.status != "answered":
        return None
    if reply.finish_reason == "repetition":
        return True
    thought = reply.thinking_tokens
    if thinking_budget_tokens is not None and thought is not None and thought >= thinking_budget_tokens:
        return ends_in_loop((reply.reasoning or "").rstrip()) or (cut_by is not None and ends_in_loop(reply.text))
    return cut_by is not None and ends_in_loop(reply.text if reply.text.strip() else reply.reasoning or "")


def count_loops(items: Iterable[ItemResult]) -> int | None:
    """Replies that loop. None: there is none of which this was looked at."""
    flags = [item.loops for item in items if item.loops is not None]
    return sum(flags) if flags else None
