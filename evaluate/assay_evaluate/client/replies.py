"""What an OpenAI-compatible server sends back, as a Reply."""

from __future__ import annotations

from typing import Any

from assay_evaluate.client.journal import Reply, Request
from assay_evaluate.client.prompt_logprobs import read_prompt_logprobs


def read_reply(data: dict[str, Any], request: Request, latency_s: float) -> Reply:
    """An API response as a Reply. LookupError or TypeError if it is not shaped as the API promises."""
    choice = data["choices"][0]
    message = choice.get("message", {"content": choice.get("text")})
    usage = data.get("usage") or {}
    prompt_ids = data.get("prompt_token_ids") or choice.get("prompt_token_ids")
    token_ids = choice.get("token_ids")
    logprobs = read_prompt_logprobs(data, choice, request)
    return Reply(
        status="answered",
        text=message.get("content") or "",
        reasoning=message.get("reasoning") or message.get("reasoning_content"),
        has_tool_calls=bool(message.get("tool_calls")),
        tool_calls=tuple(message["tool_calls"]) if message.get("tool_calls") else None,
        finish_reason=choice.get("finish_reason"),
        prompt_tokens=usage.get("prompt_tokens"),
        output_tokens=usage.get("completion_tokens"),
        thinking_tokens=(usage.get("completion_tokens_details") or {}).get("reasoning_tokens"),
        # A scoring request carries its own ids; keeping them twice would only swell the journal.
        prompt_token_ids=None if prompt_ids is None or logprobs is not None else tuple(prompt_ids),
        token_ids=None if token_ids is None else tuple(token_ids),
        usage=data.get("usage"),
        speculation=_read_speculation(data),
        http_status=200,
        latency_s=latency_s,
        logprobs=logprobs,
    )


def _read_speculation(data: dict[str, Any]) -> dict[str, int] | None:
    """vLLM's `--per-request-spec-decode-metrics`, when on."""
    stats = (data.get("metrics") or {}).get("speculative_decoding")
    if not stats:
        return None
    return {
        "num_drafts": stats["num_spec_steps"],
        "num_draft_tokens": stats["num_draft_tokens"],
        "num_accepted_tokens": stats["num_accepted_draft_tokens"],
    }
