"""What one reply means: errors told with status 200, how it ended, contents in parts, counts that contradict themselves."""

from __future__ import annotations

import json
from typing import Any

import pytest

from assay_evaluate.client.journal import Reply, Request
from assay_evaluate.client.sending import Received, received_of
from assay_evaluate.transport.connection import HttpReply

ASKED = Request("t", "1", 0, "/v1/chat/completions", {"messages": [], "max_tokens": 100})


def received(data: Any, **body: Any) -> Received:
    """What a reply with status 200 means. body: more that was asked for."""
    asked = Request("t", "1", 0, ASKED.path, {**ASKED.body, **body})
    return received_of(HttpReply(200, json.dumps(data).encode()), asked, 0.5)


def chat(content: Any = "four", *, usage: Any = None, token_ids: Any = None, **choice: Any) -> dict[str, Any]:
    """A reply of /v1/chat/completions."""
    message = {"role": "assistant", "content": content} | choice.pop("message", {})
    found: dict[str, Any] = {"message": message, "finish_reason": "stop"} | choice
    return {"choices": [found if token_ids is None else {**found, "token_ids": token_ids}]} | (
        {"usage": usage} if usage else {}
    )


def read(data: Any, **body: Any) -> Reply:
    """Of a reply that is answered."""
    reply = received(data, **body).reply
    assert (reply.status, reply.error) == ("answered", None)
    return reply


# ------------------------------------------------------------------------------------------------ how it ended
@pytest.mark.parametrize(
    ("told", "known"),
    [
        *((word, "stop") for word in ("stop", "eos", "eos_token", "stop_sequence", "end_turn", "COMPLETE", "STOP")),
        *((word, "stop") for word in ("end", "end_of_turn")),  # pi #2116
        *((word, "length") for word in ("length", "max_tokens", "MAX_TOKENS", "model_length")),
        *((word, "length") for word in ("model_context_window_exceeded", "out_of_tokens")),
        *((word, "tool_calls") for word in ("tool_calls", "tool_use", "function_call", "TOOL_CALL")),
        ("repetition", "repetition"),  # of vLLM: it saw the model repeat itself, and stopped it
        ("", None),
        (None, None),
    ],
)
def test_a_reply_that_ended(told: str | None, known: str | None) -> None:
    assert read(chat(finish_reason=told)).finish_reason == known


@pytest.mark.parametrize(
    "word", ["abort", "error", "content_filter", "cancelled", "timeout", "network_error", "insufficient_system_resource", "new"]
)
def test_a_reply_that_was_not_finished_is_a_failed_request(word: str) -> None:
    found = received(chat("Let me see", finish_reason=word))
    why = f"HTTP 200 with finish_reason {word}: the server did not finish the reply"
    assert found.reply == Reply("failed", error=why, http_status=200, latency_s=0.5, finish_reason=word)
    assert found.may_help and found.no_answer == "unfinished"


# ------------------------------------------------------------------------------------------------ errors told with status 200
QUOTA = "Provider returned error: quota of 5 requests exceeded"


LATE = {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}  # Anthropic
LONG_PROMPT = {"object": "error", "message": "too long", "type": "BadRequestError", "code": 400}  # vLLM, SGLang
CLOUDFLARE = {"success": False, "errors": [{"code": 7009, "message": "upstream is away"}]}


@pytest.mark.parametrize(
    ("body", "status", "may_help", "http_status", "said"),
    [
        ({"error": {"message": QUOTA, "code": 429}, "user_id": "u1"}, "failed", True, 429, f"(429): {QUOTA}"),  # OpenRouter
        ({"error": {"message": QUOTA, "code": "429"}}, "failed", True, 429, f"(429): {QUOTA}"),
        ({"error": {"message": QUOTA, "type": "rate_limit_error"}}, "failed", True, 429, f"(429): {QUOTA}"),
        ({"error": {"message": QUOTA, "code": "insufficient_quota"}}, "failed", True, 429, f"(429): {QUOTA}"),
        (LATE, "failed", True, 503, "(503): Overloaded"),
        (LONG_PROMPT, "refused", False, 400, "(400): too long"),
        ({"choices": [{"error": {"code": 502, "message": "down"}, "finish_reason": "error", "message": {"content": ""}}]},
         "failed", True, 502, "(502): down"),
        ({"error": "no such thing"}, "failed", True, 200, ": no such thing"),
        ({"detail": "Not authenticated"}, "failed", True, 200, ": Not authenticated"),
        ({"detail": [{"loc": ["body"], "msg": "field required"}]}, "failed", True, 200, ": body: field required"),
        (CLOUDFLARE, "failed", True, 200, ": upstream is away"),
        ({"code": 1302, "msg": "too many at once"}, "failed", True, 200, ": too many at once"),
        ({"message": "API rate limit exceeded", "status": 429}, "failed", True, 429, "(429): API rate limit exceeded"),
        ({"error": {"message": "out of credits", "code": 402}}, "failed", True, 402, "(402): out of credits"),
    ],
)  # fmt: skip
def test_an_error_with_status_200(body: Any, status: str, may_help: bool, http_status: int, said: str) -> None:
    found = received(body)
    gap = " " if said.startswith("(") else ""
    assert (found.reply.status, found.may_help, found.reply.http_status) == (status, may_help, http_status)
    assert found.reply.error == f"HTTP 200 with an error in it{gap}{said}"


@pytest.mark.parametrize("nothing", [None, {}, "", False, 0, []])
def test_an_error_field_that_says_nothing_is_no_error(nothing: Any) -> None:
    assert read({**chat(), "error": nothing, "errors": []}).text == "four"


# ------------------------------------------------------------------------------------------------ contents in parts
@pytest.mark.parametrize(
    ("content", "text", "reasoning"),
    [
        ([{"type": "text", "text": "four"}], "four", None),
        (["fo", "ur"], "four", None),
        ([], "", None),
        ([{"type": "text", "text": "fo"}, {"type": "text", "text": "ur"}], "four", None),
        ([{"type": "output_text", "text": "four", "annotations": []}], "four", None),  # OpenAI, Responses
        ([{"type": "refusal", "refusal": "I will not"}], "I will not", None),
        (  # Mistral
            [{"type": "thinking", "thinking": [{"type": "text", "text": "2 + 2"}]}, {"type": "text", "text": "four"}],
            "four", "2 + 2",
        ),
        (  # Anthropic
            [{"type": "thinking", "thinking": "2 + 2", "signature": "x"}, {"type": "redacted_thinking", "data": "x"},
             {"type": "text", "text": "four"}],
            "four", "2 + 2",
        ),
        (
            [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "2"}],
              "content": [{"type": "reasoning_text", "text": "+ 2"}]}, {"type": "output_text", "text": "four"}],
            "four", "2+ 2",
        ),
        ([{"type": "reasoning", "text": "2 + 2"}, {"type": "text", "text": "four"}], "four", "2 + 2"),
    ],
)  # fmt: skip
def test_contents_in_parts(content: Any, text: str, reasoning: str | None) -> None:
    reply = read(chat(content))
    assert (reply.text, reply.reasoning) == (text, reasoning)


def test_thinking_in_the_message_and_in_parts_is_one() -> None:
    reply = read(
        chat([{"type": "thinking", "thinking": "again"}, {"type": "text", "text": "four"}], message={"reasoning": "hm"})
    )
    assert (reply.text, reply.reasoning) == ("four", "hm\nagain")
    reply = read(chat("four", message={"reasoning": [{"type": "reasoning.text", "text": "hm"}]}))
    assert (reply.text, reply.reasoning) == ("four", "hm")
    assert read(chat(None, message={"refusal": "I will not"})).text == "I will not"


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ([{"type": "image_url", "image_url": {"url": "x"}}], "a content part of kind 'image_url'"),
        ([{"type": "tool_use", "name": "f", "input": {}}], "a content part of kind 'tool_use'"),
        ([{"text": "four"}], "a content part of no kind"),
        ([{"type": "text", "text": 4}], "int in place of text"),
        ([4], "int in place of a content part"),
        ({"text": "four"}, "dict in place of text"),
        (4, "int in place of text"),
    ],
)
def test_contents_of_another_shape_are_refused_by_name(content: Any, why: str) -> None:
    found = received(chat(content))
    text = json.dumps(chat(content))
    shown = text[:100] + ("…" if len(text) > 100 else "")
    assert found.reply.error == f"reply is not what the API promises: TypeError: {why}; received {shown}"
    assert found.may_help and found.no_answer == "shape"


def test_a_header_of_a_cache_goes_with_the_reply() -> None:
    answer = HttpReply(200, json.dumps(chat()).encode(), cache_header="x-cache: HIT")
    assert received_of(answer, ASKED, 0.5).reply.cache_header == "x-cache: HIT"


# ------------------------------------------------------------------------------------------------ counts
def usage(prompt: int, completion: int, total: int | None = None, **more: Any) -> dict[str, Any]:
    total = prompt + completion if total is None else total
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": total, **more}


LONG = "word " * 400
HIDDEN = {"completion_tokens_details": {"reasoning_tokens": 900}}


@pytest.mark.parametrize(
    ("told", "reply", "problem"),
    [
        (usage(210, 312, 312), {}, "prompt_tokens 210 and completion_tokens 312 are more than total_tokens 312"),
        (usage(10, 7), {"token_ids": [1, 2, 3]}, "completion_tokens 7, but 3 token ids"),
        (usage(10, 1), {"content": LONG}, "completion_tokens 1 for a text of 2,000 bytes"),
        (usage(2000, 2004), {}, "completion_tokens 2,004 for a text of 4 bytes, where at most 100 were asked for"),
        (
            usage(90, 94), {"message": {"reasoning": "h"}},
            "completion_tokens 94 for a text of 5 bytes: as many as prompt and reply",
        ),
    ],
)  # fmt: skip
def test_counts_that_contradict_themselves_are_told_and_not_used(told: Any, reply: Any, problem: str) -> None:
    found = read(chat(usage=told, **reply))
    assert (found.output_tokens, found.usage_problem, found.usage) == (None, problem, told)
    assert found.prompt_tokens == told["prompt_tokens"]


@pytest.mark.parametrize(
    ("told", "reply", "output_tokens"),
    [
        (usage(210, 102), {}, 102),
        (usage(20, 424, 1016), {}, 424),  # of Gemini: the total has thinking that the parts have not
        (usage(20, 5, 1025, prompt_tokens_details={"cached_tokens": 1000}), {}, 5),  # of Bedrock: the cached ones on top
        (usage(1020, 5, 25, prompt_tokens_details={"cached_tokens": 1000}), {}, 5),  # the cached ones left out
        (usage(20, 904, **HIDDEN), {}, 904),  # of OpenAI: thinking is counted and not shown
        (usage(20, 904), {"finish_reason": "length"}, 904),
        (usage(10, 3), {"token_ids": [1, 2, 3]}, 3),
        (usage(10, 3), {"token_ids": [1, 2]}, 3),  # the last one may be the end of the text
        (usage(10, 400), {"content": LONG}, 400),  # no cap was kept, and the text has them
        (usage(10, 60), {"content": ""}, 60),  # tokens that have no text
        ({"prompt_tokens": 10, "completion_tokens": 5}, {}, 5),
        ({"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 0}, {}, 5),
        ({"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": None}, {}, 5),
    ],
)
def test_counts_of_healthy_servers_are_used(told: Any, reply: Any, output_tokens: int) -> None:
    found = read(chat(usage=told, **reply), max_tokens=1000)
    assert (found.output_tokens, found.usage_problem) == (output_tokens, None)


THOUGHT = {"completion_tokens_details": {"reasoning_tokens": 90}}


@pytest.mark.parametrize(
    ("told", "finish_reason", "prompt_tokens", "output_tokens"),
    [
        # xAI (inspect_ai #5528): completion_tokens is the answer alone, the total has the thinking as well.
        (usage(20, 10, 120, **THOUGHT), "length", 20, 100),
        (usage(20, 10, 120, **THOUGHT), "stop", 20, 100),
        (usage(20, 100, 120, **THOUGHT), "stop", 20, 100),  # of OpenAI: thinking is part of completion_tokens
        # Gemini (arbr-control-plane #253): the same, and nothing says how much was thought.
        (usage(20, 10, 96), "length", 20, None),
        (usage(20, 10, 96), "stop", 20, 10),
        # Bedrock (litellm #15270): the total has what the cache gave, and what it took; prompt_tokens may not.
        (usage(20, 5, 1025, prompt_tokens_details={"cached_tokens": 1000}), "stop", None, 5),
        (usage(20, 5, 1025, cache_creation_input_tokens=1000), "length", None, 5),
        (usage(1020, 5, prompt_tokens_details={"cached_tokens": 1000}), "stop", 1020, 5),
        (usage(1020, 5, 25, prompt_tokens_details={"cached_tokens": 1000}), "stop", 1020, 5),
    ],
)  # fmt: skip
def test_what_prompt_and_completion_tokens_leave_out(
    told: Any, finish_reason: str, prompt_tokens: int | None, output_tokens: int | None
) -> None:
    found = read(chat(usage=told, finish_reason=finish_reason))
    assert (found.prompt_tokens, found.output_tokens, found.usage_problem) == (prompt_tokens, output_tokens, None)


@pytest.mark.parametrize(
    ("told", "thinking", "thinking_tokens"),
    [
        (90, "two and two", 90),
        (0, None, 0),
        (0, "", 0),
        # vLLM 0.32 counts from the opening mark on, which the template of DeepSeek R1 has put into the prompt.
        (0, "two and two", None),
    ],
)
def test_thinking_that_was_not_counted_is_not_zero(told: int, thinking: str | None, thinking_tokens: int | None) -> None:
    counts = usage(20, 100, completion_tokens_details={"reasoning_tokens": told})
    found = read(chat("four", usage=counts, message={"reasoning": thinking}))
    assert (found.thinking_tokens, found.output_tokens, found.usage_problem) == (thinking_tokens, 100, None)


def test_counts_of_zero_are_none() -> None:
    """Servers that do not count write zeros (tt-inference-server #3552, ax-llm #64)."""
    found = read(chat(usage=usage(0, 0)))
    assert (found.prompt_tokens, found.output_tokens, found.usage_problem) == (None, None, None)
    assert read(chat("", usage=usage(3, 0))).output_tokens == 0


# ------------------------------------------------------------------------------------------------ log-probabilities
def scored(*rows: Any) -> Received:
    """A prompt of three tokens, scored from the second on."""
    asked = Request("t", "1", 0, "/v1/completions", {"prompt": [4, 5, 6], "prompt_logprobs": 1}, logprobs_from=1)
    data = {"choices": [{"text": "x", "finish_reason": "length", "prompt_logprobs": list(rows)}]}
    return received_of(HttpReply(200, json.dumps(data).encode()), asked, 0.0)


def test_log_probabilities_that_are_missing_are_not_taken_for_nan() -> None:
    five, six = {"5": {"logprob": -1.0, "rank": 1}}, {"6": {"logprob": float("nan"), "rank": 1}}
    found = scored(None, five, six).reply.logprobs  # NaN that a server wrote, which is no JSON, is one
    assert found is not None and found.chosen_P[0] == -1.0 and found.chosen_P[1] != found.chosen_P[1]
    null = "prompt_logprobs of another shape, or null in place of a log-probability"
    for rows, why in (
        ((None, five, None), "no prompt_logprobs for token 2"),
        ((None, five, {"6": {"logprob": None, "rank": 1}}), null),
        ((None, five, {"6": {"logprob": -1.0}, "7": {"logprob": None}}), null),
        ((None, five, [6]), "prompt_logprobs of other tokens than 6 in place 1"),
    ):
        assert f": {why}" in str(scored(*rows).reply.error)


def test_generated_log_probabilities_tell_null_from_nan() -> None:
    def rows(logprob: Any, top: Any) -> list[tuple[bool, bool]]:
        told = {"tokens": ["a"], "token_logprobs": [logprob], "top_logprobs": [{"a": top}]}
        return [(row.has_null, row.logprob == row.logprob) for row in received(chat(logprobs=told)).rows]

    assert rows(-1.0, -1.0) == [(False, True)]
    assert rows(float("nan"), float("nan")) == [(False, False)]
    assert rows(None, -1.0) == [(True, False)]
    assert rows(-1.0, None) == [(True, True)]
