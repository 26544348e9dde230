"""What a server counted of one reply, and whether its counts can be true.

Counts that contradict each other, or the reply, are not used: a reply of 90 tokens that is billed with its prompt seems to fill
its budget, and a healthy checkpoint to be cut off everywhere (kserve PR #3712; llama-cpp-python #1344: always 1). Only what no
healthy server writes is a contradiction. Totals above prompt and reply are none: Gemini's has thinking, Bedrock's the cached
prompt on top; nor are more tokens than the text can have, by themselves: thinking may be hidden.
"""

from __future__ import annotations

from typing import Any

from assay_evaluate.client.journal import Reply
from assay_evaluate.transport.foreign_json import count_in, object_in

SLACK_TOKENS = 64
"""Tokens without text that an ordinary reply may have: marks of thinking, calls and turns, blanks that parsers strip."""
MOST_BYTES_PER_TOKEN = 256
"""The longest tokens of large vocabularies have 128 bytes (blanks, rules)."""


def usage_problem(usage: dict[str, Any], reply: Reply, max_tokens: int | None) -> str | None:
    """How the counts of a reply cannot be true, in words. None: they may be. max_tokens: as asked for."""
    prompt, output, total = reply.prompt_tokens, reply.output_tokens, count_in(usage, "total_tokens")
    if not output:
        return None
    excess = prompt + output - total if prompt and total else 0
    # Servers that take the cached part of the prompt out of the total are right, too.
    if prompt and excess > 0 and excess != count_in(object_in(usage, "prompt_tokens_details"), "cached_tokens"):
        return f"prompt_tokens {prompt:,} and completion_tokens {output:,} are more than total_tokens {total:,}"
    if reply.token_ids is not None:
        # One off is the end of the text, which some count and do not show.
        num_ids = len(reply.token_ids)
        return f"completion_tokens {output:,}, but {num_ids:,} token ids" if abs(output - num_ids) > 1 else None
    return _against_text(reply, output, max_tokens)


def _against_text(reply: Reply, output: int, max_tokens: int | None) -> str | None:
    num_letters = len(reply.text) + len(reply.reasoning or "")
    if output <= num_letters + SLACK_TOKENS and 4 * num_letters <= MOST_BYTES_PER_TOKEN * output:
        return None  # a letter has 1 to 4 bytes: these need not be counted
    num_bytes = len(reply.text.encode()) + len((reply.reasoning or "").encode())
    counted = f"completion_tokens {output:,} for a text of {num_bytes:,} bytes"
    if num_bytes > MOST_BYTES_PER_TOKEN * output:
        return counted
    most = num_bytes + SLACK_TOKENS
    has_ended = reply.finish_reason == "stop" and not reply.has_tool_calls and num_bytes > 0
    if output - (reply.thinking_tokens or 0) <= most or not has_ended:
        return None
    if max_tokens is not None and output > max_tokens:
        return f"{counted}, where at most {max_tokens:,} were asked for"
    if reply.reasoning and reply.prompt_tokens and 0 < output - reply.prompt_tokens <= most:
        return f"{counted}: as many as prompt and reply"
    return None
