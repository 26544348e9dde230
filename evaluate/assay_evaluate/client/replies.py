"""What an OpenAI-compatible server sends back, as a Reply."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from assay.foreign_text import shown
from assay_evaluate.client.journal import Reply, Request
from assay_evaluate.client.logprobs import read_prompt_logprobs
from assay_evaluate.client.message import read_message
from assay_evaluate.transport.foreign_json import MOST_COUNT, clean_json, count_in, fingerprint_in, object_in, text_of

ENDED = {
    "stop": "stop", "eos": "stop", "eos_token": "stop", "stop_sequence": "stop", "end_turn": "stop", "complete": "stop",
    "end": "stop", "end_of_turn": "stop",
    "length": "length", "max_tokens": "length", "model_length": "length", "model_context_window_exceeded": "length",
    "out_of_tokens": "length",
    "tool_calls": "tool_calls", "tool_use": "tool_calls", "function_call": "tool_calls", "tool_call": "tool_calls",
    "repetition": "repetition",
}  # fmt: skip
"""`finish_reason` of a reply that is whole, or was cut off at its budget, small letters -> its name in OpenAI's API.

eos_token, stop_sequence: TGI; eos: Together; end_turn, tool_use, max_tokens: Anthropic and xAI; model_length: Mistral;
COMPLETE, TOOL_CALL: Cohere; STOP, MAX_TOKENS: Gemini; end: Ollama and LM Studio (pi #2116); end_of_turn, out_of_tokens: Llama
Stack; model_context_window_exceeded: Anthropic and Z.ai; function_call: OpenAI before tools; repetition: vLLM, where a model
repeats itself.
What is not listed (abort, error, content_filter, timeout, cancelled, network_error, ...) did not end as the model meant it:
vLLM, SGLang and LMDeploy write `abort` where they took a request back, with what was generated so far as its text."""


SLACK_TOKENS = 64
"""Tokens without text that an ordinary reply may have: marks of thinking, calls and turns, blanks that parsers strip."""
MOST_BYTES_PER_TOKEN = 256
"""The longest tokens of large vocabularies have 128 bytes (blanks, rules)."""


class NotFinished(ValueError):
    """A reply that the server did not finish. `word`: its finish_reason."""

    def __init__(self, word: str) -> None:
        super().__init__(f"HTTP 200 with finish_reason {shown(word, 40)}: the server did not finish the reply")
        self.word = word


def read_reply(data: dict[str, Any], request: Request, latency_s: float) -> Reply:
    """An API response as a Reply. LookupError, TypeError, ValueError, AttributeError: not shaped as the API promises.

    NotFinished: it says itself that it is no whole reply.

    Everything in it can be written down: text is Unicode (a lone surrogate becomes U+FFFD), counts are numbers, nothing is
    nested without end.
    """
    choice = data["choices"][0]
    message = choice["message"] if "message" in choice else {"content": text_of(choice.get("text"))}
    finish_reason = _finish_reason(choice.get("finish_reason"))
    text, reasoning = read_message(message)
    usage = data.get("usage") or {}
    prompt_ids = data.get("prompt_token_ids") or choice.get("prompt_token_ids")
    token_ids = choice.get("token_ids")
    logprobs = read_prompt_logprobs(data, choice, request)
    says_something = any(message.values()) or choice.get("finish_reason") or token_ids or logprobs is not None
    if not says_something:
        raise ValueError("a choice that says nothing, not even that it has ended")
    thinking_tokens = _count((usage.get("completion_tokens_details") or {}).get("reasoning_tokens"))
    if thinking_tokens == 0 and reasoning:
        thinking_tokens = None  # vLLM counts from the opening mark on, which templates put into the prompt
    prompt_tokens, output_tokens = _counts(usage, thinking_tokens, finish_reason)
    if not output_tokens and (text or reasoning):
        output_tokens = None  # servers that do not count write zeros
    stop_id = count_in(choice, "stop_reason")
    reply = Reply(
        status="answered",
        text=text,
        reasoning=reasoning,
        has_tool_calls=bool(message.get("tool_calls")),
        tool_calls=tuple(_objects(message["tool_calls"])) if message.get("tool_calls") else None,
        finish_reason=finish_reason,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        thinking_tokens=thinking_tokens,
        # A scoring request carries its own ids; keeping them twice would only swell the journal.
        prompt_token_ids=None if prompt_ids is None or logprobs is not None else _ids(prompt_ids),
        token_ids=None if token_ids is None else _ids(token_ids),
        usage=clean_json(data.get("usage")),
        speculation=_read_speculation(data),
        http_status=200,
        latency_s=latency_s,
        logprobs=logprobs,
        reply_id=_name(data.get("id")),
        model=_name(data.get("model")),
        system_fingerprint=fingerprint_in(data),
        stop_reason=_name(choice.get("stop_reason")) if stop_id is None else stop_id,
    )
    problem = usage_problem(usage, reply, request.body.get("sampling_params", request.body).get("max_tokens"))
    return reply if problem is None else replace(reply, output_tokens=None, usage_problem=problem)


def _finish_reason(value: Any) -> str | None:
    """NotFinished: it is no end of a whole reply.

    None where the server names none: gateways of old write none, SGLang an empty one. No server leaves it out of a reply that
    it took back, and a cut is still found by its tokens.
    """
    word = text_of(value)
    if not word:
        return None
    reason = ENDED.get(word) or ENDED.get(word.lower())
    if reason is None:
        raise NotFinished(word)
    return reason


def _read_speculation(data: dict[str, Any]) -> dict[str, int] | None:
    """vLLM's `--per-request-spec-decode-metrics`, when on."""
    stats = (data.get("metrics") or {}).get("speculative_decoding")
    if not stats:
        return None
    names = {
        "num_drafts": "num_spec_steps",
        "num_draft_tokens": "num_draft_tokens",
        "num_accepted_tokens": "num_accepted_draft_tokens",
    }
    counts: dict[str, int] = {}
    for name, stored_as in names.items():
        if (count := _count(stats[stored_as])) is None:
            raise TypeError("null in place of a count")
        counts[name] = count
    return counts


# ---------------------------------------------------------------------------------------------------- counts that cannot be
def _counts(usage: dict[str, Any], thinking: int | None, finish_reason: str | None) -> tuple[int | None, int | None]:
    """Tokens of the whole prompt, and of the whole reply with its thinking. None: not told, or the count leaves some out.

    Some leave thinking out of completion_tokens (xAI, inspect_ai #5528; Gemini), or what the cache took or gave out of
    prompt_tokens (Bedrock, litellm #15270), and have them in total_tokens.
    """
    prompt, output = _count(usage.get("prompt_tokens")) or None, _count(usage.get("completion_tokens"))
    beyond = (count_in(usage, "total_tokens") or 0) - (prompt or 0) - (output or 0)
    if prompt is None or output is None or beyond <= 0:
        return prompt, output
    if beyond == thinking:
        return prompt, output + beyond
    # Tokens of the prompt that a cache gave, or took, in OpenAI's place and in Anthropic's.
    cached = count_in(object_in(usage, "prompt_tokens_details"), "cached_tokens")
    written, read = (count_in(usage, f"cache_{what}_input_tokens") for what in ("creation", "read"))
    if beyond in {cached, written, read, (written or 0) + (read or 0)}:
        return None, output
    return prompt, None if finish_reason == "length" else output  # more was spent than the reply has, on nobody knows what


def usage_problem(usage: dict[str, Any], reply: Reply, max_tokens: int | None) -> str | None:
    """How the counts of a reply cannot be true, in words. None: they may be. max_tokens: as asked for.

    Counts that contradict each other, or the reply, are not used: a reply of 90 tokens that is billed with its prompt seems to
    fill its budget, and a healthy checkpoint to be cut off everywhere (kserve PR #3712; llama-cpp-python #1344: always 1). Only
    what no healthy server writes is a contradiction. Totals above prompt and reply are none: Gemini's has thinking, Bedrock's
    the cached prompt on top; nor are more tokens than the text can have, by themselves: thinking may be hidden.
    """
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


# ---------------------------------------------------------------------------------------------------- values, checked
def _count(value: Any) -> int | None:
    if value is None:
        return None
    if type(value) in {int, float} and 0 <= value < MOST_COUNT and value == int(value):
        return int(value)
    raise TypeError(f"{type(value).__name__} in place of a count")


def _name(value: Any) -> str | None:
    """A name that the reply gives itself, for people and records. None: it gives none."""
    return shown(value) if isinstance(value, str) and value else None


def _ids(value: Any) -> tuple[int, ...]:
    if type(value) is list and set(map(type, value)) <= {int} and (not value or (min(value) >= 0 and max(value) < MOST_COUNT)):
        return tuple(value)
    raise TypeError("token ids that are no list of counts")


def _objects(value: Any) -> list[dict[str, Any]]:
    objects = clean_json(value)
    if type(objects) is list and set(map(type, objects)) <= {dict}:
        return objects
    raise TypeError("tool calls that are no list of objects")
